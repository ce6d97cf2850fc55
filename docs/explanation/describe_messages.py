"""Write docs/explanation/teacher-messages.inc: every message of the teacher's protocol as the code checks it.

python docs/explanation/describe_messages.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mixle.data.teacher import layout, messages, network, routing

PAGE = Path(__file__).with_name("teacher-messages.inc")
MESSAGES_BELOW = "<!-- messages -->"
ROLES = re.compile(r":\w+:`[~.]*([\w.]+)`")
SOCKETS = {
    "frontend": "Students to the frontend",
    "backend": "Workers to the backend",
    "control": "Anyone to control",
}
KINDS = {
    name: value
    for name, value in vars(messages).items()
    if inspect.isclass(value) and issubclass(value, messages.Message) and value is not messages.Message
}
HEADER = [
    (
        "token",
        layout.TOKEN_AT,
        "uint64",
        "which order the slot is of; one more from slot to slot of an order, modulo 2^64",
    ),
    ("generation", layout.GENERATION_AT, "uint64", "of the model that the sample is wanted from"),
    ("length", layout.LENGTH_AT, "uint64", "bytes of the sample, back to back; 0 until it is complete"),
    (
        "status",
        layout.STATUS_AT,
        "uint32",
        f"{layout.EMPTY} empty, {layout.WRITING} writing, {layout.COMPLETE} complete; the writer stores it last",
    ),
    ("checksum", layout.CHECKSUM_AT, "uint32", "CRC-32 of the sample; 0 for none"),
    (
        "watched",
        layout.WATCHED_AT,
        "uint32",
        "1 while the student sleeps on this word (a futex); a writer that completes the slot then puts 0 and wakes it",
    ),
]


def page() -> str:
    """Return the whole of it, in Markdown."""
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    yield from table(
        ("offset", "content", "type", ""),
        [(str(at), f"`{name}`", kind, text) for name, at, kind, text in HEADER]
        + [
            (str(layout.WATCHED_AT + 4), "zeros", f"{layout.HEADER_BYTES - layout.WATCHED_AT - 4} bytes", ""),
            (
                str(layout.HEADER_BYTES),
                "the tensors, in the order of the batch config",
                f"each from a multiple of {layout.ALIGNMENT} on, C-contiguous, little-endian",
                "",
            ),
            (
                "behind them",
                "the canary",
                f"{len(layout.CANARY)} bytes, `{layout.CANARY[:4].hex()}` again and again",
                "",
            ),
        ],
    )
    yield MESSAGES_BELOW
    yield ""
    yield from groups()
    yield "### Rows"
    yield ""
    yield "Lists within a message; their items in this order."
    yield ""
    rows = [value for value in vars(messages).values() if inspect.isfunction(value) and row_of(value) is not None]
    for check in rows:
        kind, checks = row_of(check)
        yield f"**{kind.__name__}**: {summary(kind)}"
        yield ""
        yield from table(("item", "value"), described(kind, dict(zip(kind._fields, checks, strict=True))))
    yield "### Samples over the network"
    yield ""
    magic, size = network.MAGIC.decode(), network.HEAD.size
    yield (
        f"Two frames, worker to student. The head has {size} bytes: magic `{magic}`; token, generation, first slot and "
        "count, uint64 each; whether a CRC-32 is wanted, uint32; zeros. The other frame has the slots between header "
        f"and canary, back to back: {network.RUN_BYTES:,} bytes at most, or one slot."
    )


def groups() -> Iterator[str]:
    """Yield the messages by who takes them."""
    kinds = [kind for kind in KINDS.values() if kind is not messages.News]
    accepted = routing._ACCEPTED
    to_broker = {kind for some in accepted.values() for kind in some}
    for socket, title in SOCKETS.items():
        yield f"### {title}"
        yield ""
        for kind in kinds:
            if kind in accepted[socket]:
                others = [name for name in SOCKETS if kind in accepted[name]]
                yield from message(kind) if others[0] == socket else mention(kind, others[0])
    yield "### The broker to its peers"
    yield ""
    for kind in kinds:
        if kind not in to_broker:
            yield from message(kind)
        elif kind is messages.Stop:
            yield from mention(kind, "control")
    yield "### Published"
    yield ""
    yield from message(messages.News)


def message(kind: type[messages.Message]) -> Iterator[str]:
    title = "the topic" if kind is messages.News else kind.COMMAND.decode()
    yield f"**{title}**: {summary(kind)}"
    yield ""
    own = fields(kind)
    if not own:
        yield "No fields."
        yield ""
        return
    yield from table(("field", "value"), described(kind, {one.name: one.metadata["check"] for one in own}))


def mention(kind: type[messages.Message], socket: str) -> Iterator[str]:
    yield f'**{kind.COMMAND.decode()}**: as under "{SOCKETS[socket]}".'
    yield ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def summary(kind: type) -> str:
    text = ROLES.sub(lambda role: f"`{named(role[1])}`", inspect.cleandoc(kind.__doc__ or ""))
    return " ".join(text.replace("``", "`").replace("2**64", "2^64").split())


def named(target: str) -> str:
    return KINDS[target].COMMAND.decode() if target in KINDS else target


def described(kind: type, checks: dict[str, Callable[[object], Any]]) -> list[tuple[str, str]]:
    hints = get_type_hints(kind)
    return [(f"`{name}`", words(check, hints[name])) for name, check in checks.items()]


def words(check: Callable[[object], Any], hint: Any) -> str:
    """Say in words what a check lets pass; ``hint`` is the type of what it returns."""
    inside = inspect.getclosurevars(check).nonlocals
    row = next((kind.__name__ for kind in (hint, *get_args(hint)) if hasattr(kind, "_fields")), None)
    if "limit" in inside and "inner" in inside:
        of = f"{row} rows" if row else f"values, each {words(inside['inner'], None)}"
        return f"{inside['at_least']} to {inside['limit']:,} {of}"
    if set(inside) == {"inner"}:
        return f"a {row}; or nil" if row else f"{words(inside['inner'], None)}; or nil"
    if row:
        return f"a {row}"
    try:
        check(object())
    except messages.ProtocolError as error:
        text = str(error).partition(", not ")[2]
    else:
        raise AssertionError(f"{check} lets anything pass")
    text = re.sub(r"\b(\d+) to \1 bytes", r"\1 bytes", text)
    text = re.sub(r"\b\d{4,}\b", lambda digits: number(int(digits[0])), text)
    return re.sub(r" like (.*)$", r" that matches `\1`", text).replace("|", "\\|")


def number(value: int) -> str:
    if value < 2**20:
        return f"{value:,}"
    for power, rest in ((value, ""), (value + 1, " - 1")):
        if power.bit_count() == 1:
            return f"2^{power.bit_length() - 1}{rest}"
    return f"{value:,}"


def row_of(check: Callable[[object], Any]) -> tuple[type, tuple[Callable[[object], Any], ...]] | None:
    """Return the class of the rows that a check reads and the checks of their items; None if it reads no row."""
    inside = inspect.getclosurevars(check).nonlocals
    if "paired" in inside:
        return inside["make"].__self__, tuple(inner for _, inner in inside["paired"])
    if set(inside) == {"inner", "first", "count"}:
        return row_of(inside["inner"])
    return None


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
