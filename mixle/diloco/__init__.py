"""Training across sites that share nothing but a bucket (DiLoCo)."""

from __future__ import annotations

from mixle.diloco import serialization

__all__ = ["serialization"]
