"""Statistical modelling in one verb: the estimator says what is fitted, the data handle says where and how.

Names load when they are first used, so that a process that needs one part of the library holds no other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mixle.inference import best_of, optimize
    from mixle.stats.sequence import seq_encode, seq_estimate, seq_initialize, seq_log_density, seq_log_density_sum
    from mixle.utils.parallel.planner import (
        EncodedDataHandle,
        LocalEncodedData,
        encoded_data,
        register_encoded_data_backend,
    )

__version__ = "0.1.0"

__all__ = [
    "EncodedDataHandle",
    "LocalEncodedData",
    "__version__",
    "best_of",
    "encoded_data",
    "optimize",
    "register_encoded_data_backend",
    "seq_encode",
    "seq_estimate",
    "seq_initialize",
    "seq_log_density",
    "seq_log_density_sum",
]

_HOMES = {
    "mixle.inference": ("best_of", "optimize"),
    "mixle.stats.sequence": ("seq_encode", "seq_estimate", "seq_initialize", "seq_log_density", "seq_log_density_sum"),
    "mixle.utils.parallel.planner": (
        "EncodedDataHandle",
        "LocalEncodedData",
        "encoded_data",
        "register_encoded_data_backend",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
