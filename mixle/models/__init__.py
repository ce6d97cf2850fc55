"""Torch modules and the leaves that make them distributions."""

from __future__ import annotations

from mixle.utils.optional_import import optional_import

optional_import("torch", extra="torch")  # before a module of this package fails to import it without naming the extra
