from __future__ import annotations

from mixle.cli import main

main()
