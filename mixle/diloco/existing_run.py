"""The run that a mailbox holds, as one finds it who has no model at hand."""

from __future__ import annotations

from mixle.diloco import names
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.records import RECORD_LIMIT, RunRecord
from mixle.diloco.serialization import ParameterSpec, Schema

__all__ = ["read_run_record", "schema_of"]


def read_run_record(mailbox: Mailbox) -> RunRecord:
    """Return the record of the run in a mailbox.

    Raises:
        ValueError: there is none.
        MalformedRecord: ``run.json`` is something else.
    """
    data = mailbox.get(names.RUN, limit=RECORD_LIMIT)
    if data is None:
        raise ValueError("there is no run in the mailbox: no site has joined under this prefix yet")
    return RunRecord.from_bytes(data)


def schema_of(run: RunRecord) -> Schema:
    """Return the parameters that a run trains."""
    return Schema(tuple(ParameterSpec(name, dtype, shape) for name, dtype, shape in run.parameters))  # type: ignore[arg-type]
