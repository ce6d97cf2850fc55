"""The run that a mailbox holds, as one finds it who has no model at hand."""

from __future__ import annotations

from mixle.diloco import names
from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.mailbox import Mailbox, ObjectTooLarge
from mixle.diloco.records import RECORD_LIMIT, MalformedRecord, RoundRecord, RunRecord
from mixle.diloco.serialization import ParameterSpec, Schema

__all__ = ["find_run_record", "read_run_record", "require_no_rounds", "schema_of"]

_LOOKED_AT = 10


def read_run_record(mailbox: Mailbox) -> RunRecord:
    """Return the record of the run in a mailbox.

    Raises:
        ValueError: there is none.
        MalformedRecord: ``run.json`` is something else.
    """
    record = find_run_record(mailbox)
    if record is None:
        raise ValueError("there is no run in the mailbox: no site has joined under this prefix yet")
    return record


def find_run_record(mailbox: Mailbox) -> RunRecord | None:
    """Return the record of the run in a mailbox, None if there is none.

    Raises:
        MalformedRecord: ``run.json`` is something else.
    """
    data = mailbox.get(names.RUN, limit=RECORD_LIMIT)
    if data is None:
        return None
    try:
        record = RunRecord.from_bytes(data)
        fragments = DiLoCo.from_dict(record.algorithm).fragments
    except (TypeError, ValueError) as error:
        raise MalformedRecord(f"{names.RUN} in the mailbox is not the record of a run: {error}") from None
    if fragments != len(record.fragments):
        raise MalformedRecord(f"{names.RUN} in the mailbox names {len(record.fragments)} fragments, not {fragments}")
    return record


def require_no_rounds(mailbox: Mailbox) -> None:
    """Check that a mailbox without a run holds no rounds of one, which a new run would take for its own.

    Raises:
        MalformedRecord: it does, and still has no run.
    """
    for key in mailbox.list(names.ROUNDS, limit=_LOOKED_AT):
        if _holds_round(mailbox, key) and mailbox.get(names.RUN, limit=RECORD_LIMIT) is None:
            raise MalformedRecord(
                f"{names.RUN} is gone from the mailbox, which holds {key} of a run: bring it back, take another "
                "prefix, or delete all that is under this one to begin anew"
            )


def _holds_round(mailbox: Mailbox, key: str) -> bool:
    try:
        RoundRecord.from_bytes(mailbox.get(key, limit=RECORD_LIMIT) or b"")
    except (MalformedRecord, ObjectTooLarge):
        return False
    return True


def schema_of(run: RunRecord) -> Schema:
    """Return the parameters that a run trains."""
    return Schema(tuple(ParameterSpec(name, dtype, shape) for name, dtype, shape in run.parameters))  # type: ignore[arg-type]
