"""Samples on demand: students ask, a broker routes the asking, workers write the samples into memory of the students.

Names load when they are first used, so that a broker needs no torch and a batch config no sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    from mixle.data.teacher.activations import Activations, ModelActivations, ModuleInputs
    from mixle.data.teacher.batch_ref import BatchRef, SampleRef
    from mixle.data.teacher.broker import Broker
    from mixle.data.teacher.cleanup import clean
    from mixle.data.teacher.dataset import DistillIterableDataset
    from mixle.data.teacher.errors import (
        BrokerRunning,
        BrokerUnreachable,
        GeneratorFailed,
        LeaderRefused,
        NoWorker,
        ProtocolError,
        RequestRefused,
        TeacherError,
        VersionMismatch,
    )
    from mixle.data.teacher.keys import Keys
    from mixle.data.teacher.loader import DistillDataLoader
    from mixle.data.teacher.log_setup import setup_logging
    from mixle.data.teacher.mediums import FileMedium, Medium, MediumBase, SharedMemoryManager
    from mixle.data.teacher.specs import BatchConfig, TensorSpec
    from mixle.data.teacher.stats import BrokerStats, StudentStats, WorkerStats
    from mixle.data.teacher.student import StudentClient
    from mixle.data.teacher.worker import Worker

__all__ = [
    "Broker",
    "Worker",
    "StudentClient",
    "SampleRef",
    "BatchRef",
    "DistillIterableDataset",
    "DistillDataLoader",
    "TensorSpec",
    "BatchConfig",
    "ModelActivations",
    "Activations",
    "ModuleInputs",
    "Keys",
    "BrokerStats",
    "StudentStats",
    "WorkerStats",
    "setup_logging",
    "clean",
    "Medium",
    "MediumBase",
    "SharedMemoryManager",
    "FileMedium",
    "TeacherError",
    "BrokerUnreachable",
    "BrokerRunning",
    "NoWorker",
    "GeneratorFailed",
    "LeaderRefused",
    "RequestRefused",
    "ProtocolError",
    "VersionMismatch",
]

_HOMES = {
    name: module
    for module, names in {
        "activations": ("Activations", "ModelActivations", "ModuleInputs"),
        "batch_ref": ("BatchRef", "SampleRef"),
        "broker": ("Broker",),
        "cleanup": ("clean",),
        "dataset": ("DistillIterableDataset",),
        "errors": (
            "BrokerRunning",
            "BrokerUnreachable",
            "GeneratorFailed",
            "LeaderRefused",
            "NoWorker",
            "ProtocolError",
            "RequestRefused",
            "TeacherError",
            "VersionMismatch",
        ),
        "keys": ("Keys",),
        "loader": ("DistillDataLoader",),
        "log_setup": ("setup_logging",),
        "mediums": ("FileMedium", "Medium", "MediumBase", "SharedMemoryManager"),
        "specs": ("BatchConfig", "TensorSpec"),
        "stats": ("BrokerStats", "StudentStats", "WorkerStats"),
        "student": ("StudentClient",),
        "worker": ("Worker",),
    }.items()
    for name in names
}
_ON_TORCH = {"activations", "dataset", "loader"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home in _ON_TORCH:
        optional_import("torch", extra="torch")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
