"""Training across sites that share nothing but a bucket (DiLoCo).

Names load when they are used: importing this loads neither torch nor a store's client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixle.diloco.algorithm import AlgorithmMismatch, DiLoCo
    from mixle.diloco.alignment import Adaptive, Blend, Carry, Overwrite
    from mixle.diloco.barrier import Barrier, BarrierTimeout
    from mixle.diloco.events import Event, log_events
    from mixle.diloco.exchange import CorruptPayload
    from mixle.diloco.lease import IdInUse
    from mixle.diloco.mailbox import (
        Mailbox,
        MailboxError,
        ObjectTooLarge,
        PermanentMailboxError,
        TransientMailboxError,
    )
    from mixle.diloco.merge import Rda, WeightedMean
    from mixle.diloco.object_store import open_mailbox
    from mixle.diloco.parameters import NumpyParameters, Parameters, Ranks
    from mixle.diloco.partition import ByBytes, Strided
    from mixle.diloco.ranks import SiteError
    from mixle.diloco.records import MalformedRecord
    from mixle.diloco.serialization import (
        DType,
        ParameterSpec,
        Quantized,
        Schema,
        SchemaMismatch,
        TensorBytes,
        nbytes,
        pack,
        quantized_specs,
        scale_name,
        unpack,
        validate,
    )
    from mixle.diloco.session import Session, align
    from mixle.diloco.shared_queue import SharedQueue
    from mixle.diloco.state_folder import Resumed

_HOMES = {
    "algorithm": ("AlgorithmMismatch", "DiLoCo"),
    "alignment": ("Adaptive", "Blend", "Carry", "Overwrite"),
    "barrier": ("Barrier", "BarrierTimeout"),
    "events": ("Event", "log_events"),
    "exchange": ("CorruptPayload",),
    "lease": ("IdInUse",),
    "mailbox": ("Mailbox", "MailboxError", "ObjectTooLarge", "PermanentMailboxError", "TransientMailboxError"),
    "merge": ("Rda", "WeightedMean"),
    "object_store": ("open_mailbox",),
    "parameters": ("NumpyParameters", "Parameters", "Ranks"),
    "partition": ("ByBytes", "Strided"),
    "ranks": ("SiteError",),
    "records": ("MalformedRecord",),
    "serialization": (
        "DType",
        "ParameterSpec",
        "Quantized",
        "Schema",
        "SchemaMismatch",
        "TensorBytes",
        "nbytes",
        "pack",
        "quantized_specs",
        "scale_name",
        "unpack",
        "validate",
    ),
    "session": ("Session", "align"),
    "shared_queue": ("SharedQueue",),
    "state_folder": ("Resumed",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Session",
    "Resumed",
    "align",
    "DiLoCo",
    "Carry",
    "Overwrite",
    "Blend",
    "Adaptive",
    "Rda",
    "WeightedMean",
    "ByBytes",
    "Strided",
    "Mailbox",
    "open_mailbox",
    "Event",
    "log_events",
    "Parameters",
    "NumpyParameters",
    "Ranks",
    "SharedQueue",
    "Barrier",
    "DType",
    "Quantized",
    "TensorBytes",
    "ParameterSpec",
    "Schema",
    "nbytes",
    "scale_name",
    "quantized_specs",
    "validate",
    "pack",
    "unpack",
    "AlgorithmMismatch",
    "SchemaMismatch",
    "IdInUse",
    "SiteError",
    "BarrierTimeout",
    "CorruptPayload",
    "MalformedRecord",
    "MailboxError",
    "TransientMailboxError",
    "PermanentMailboxError",
    "ObjectTooLarge",
]


def __getattr__(name: str) -> Any:
    if name == "serialization":  # a module of its own right, whose names are used with its own before them
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
