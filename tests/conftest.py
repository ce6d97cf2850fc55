"""What every test runs under."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A deadline would time the machine, not the code; where a change is judged, the same examples are drawn every time.
settings.register_profile(
    "mixle", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mixle")
