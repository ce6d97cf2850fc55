"""Draw the sequences of docs/explanation/teacher-protocol.md: an order, a switch of the model, a restarted broker.

python docs/explanation/draw_teacher.py
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

LANE, ROW, LEFT, TOP = 230, 34, 110, 52
INK, LINE, MESSAGE, PAYLOAD, NEWS = "#0f172a", "#cbd5e1", "#1d4ed8", "#b45309", "#0f766e"
COLOURS = {"message": MESSAGE, "payload": PAYLOAD, "news": NEWS}


class Arrow(NamedTuple):
    """Something that goes from one lane to another: a message, bytes written to memory, or news that are published."""

    start: str
    end: str
    label: str
    kind: Literal["message", "payload", "news"] = "message"


class Note(NamedTuple):
    """What a lane does."""

    lane: str
    text: str


Step = Arrow | Note

LANES = ("student", "its slots", "broker", "worker")
PICTURES: dict[str, tuple[tuple[str, ...], tuple[Step, ...]]] = {
    "teacher-order": (
        LANES,
        (
            Arrow("student", "broker", "ASK"),
            Arrow("broker", "student", "RUN  run id, model"),
            Arrow("student", "its slots", "makes them, empty", "payload"),
            Arrow("student", "broker", "HELLO  name, layout"),
            Arrow("broker", "student", "WELCOME  session"),
            Arrow("worker", "broker", "READY  slot size, patterns"),
            Arrow("broker", "worker", "WELCOME"),
            Arrow("student", "its slots", "tokens, generation", "payload"),
            Arrow("student", "broker", "REQUEST  slots 0-7"),
            Arrow("broker", "worker", "WORK  slot 0, its segment"),
            Note("worker", "generator_fn(id, cfg)"),
            Arrow("worker", "its slots", "the sample, then: complete", "payload"),
            Arrow("worker", "broker", "DONE  slot 0"),
            Arrow("broker", "worker", "WORK  slots 1-4"),
            Arrow("broker", "student", "COMPLETE  slot 0"),
            Arrow("its slots", "student", "tensors, no copy", "payload"),
            Note("student", "release: slot 0 is free"),
            Arrow("student", "broker", "REQUEST  slot 0, a new token"),
        ),
    ),
    "teacher-switch": (
        ("rank 0", "rank 1", "broker", "worker"),
        (
            Note("worker", "makes samples of generation 4"),
            Arrow("rank 0", "broker", "SET_MODEL"),
            Note("broker", "generation 5"),
            Arrow("broker", "rank 0", "MODEL  5"),
            Note("rank 0", "hands out 5 only"),
            Arrow("broker", "worker", "published: MODEL  5", "news"),
            Arrow("broker", "rank 1", "published: MODEL  5", "news"),
            Note("rank 1", "hands out 5 only"),
            Arrow("broker", "rank 1", "DROPPED  what no worker had"),
            Arrow("worker", "broker", "DONE  one begun, others skipped"),
            Arrow("broker", "rank 1", "COMPLETE, DROPPED"),
            Note("rank 1", "old slots are free again"),
            Arrow("rank 1", "broker", "REQUEST  generation 5"),
            Arrow("broker", "worker", "WORK  generation 5, model"),
        ),
    ),
    "teacher-restart": (
        LANES,
        (
            Note("broker", "dies"),
            Arrow("worker", "its slots", "finishes what it has", "payload"),
            Arrow("its slots", "student", "reads what is complete", "payload"),
            Note("broker", "starts: same run id"),
            Arrow("worker", "broker", "READY  session, what it holds"),
            Arrow("broker", "worker", "WELCOME"),
            Arrow("student", "broker", "HELLO  last session, sealed model"),
            Arrow("broker", "student", "WELCOME  highest generation"),
            Arrow("student", "broker", "REQUEST  resent, the same tokens"),
            Note("broker", "holds unclaimed orders for 2 beats"),
            Arrow("worker", "broker", "DONE  what it held"),
            Arrow("broker", "student", "COMPLETE"),
            Arrow("broker", "worker", "WORK  the rest"),
        ),
    ),
}


def draw(lanes: tuple[str, ...], steps: tuple[Step, ...]) -> str:
    """Return a sequence diagram as SVG."""
    width, height = 2 * LEFT + LANE * (len(lanes) - 1), TOP + ROW * (len(steps) + 1)
    return "\n".join((*_frame(width, height), *_lanes(lanes, height), *_steps(lanes, steps), "</svg>")) + "\n"


def _frame(width: int, height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="13" text-anchor="middle">'
    )
    yield "<defs>"
    for kind, colour in COLOURS.items():
        yield (
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="11" markerHeight="11" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 1L10 5L0 9z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'


def _lanes(lanes: tuple[str, ...], height: int) -> Iterator[str]:
    for number, name in enumerate(lanes):
        x = LEFT + LANE * number
        yield f'<line x1="{x}" y1="{TOP - 16}" x2="{x}" y2="{height - 12}" stroke="{LINE}" stroke-width="2"/>'
        yield f'<text x="{x}" y="26" fill="{INK}" font-weight="bold">{escape(name)}</text>'


def _steps(lanes: tuple[str, ...], steps: tuple[Step, ...]) -> Iterator[str]:
    places = {name: LEFT + LANE * number for number, name in enumerate(lanes)}
    for number, step in enumerate(steps):
        y = TOP + ROW * number + 18
        match step:
            case Note(lane, text):
                x, half = places[lane], 4 + 3.4 * len(text)
                yield (
                    f'<rect x="{x - half:g}" y="{y - 14}" width="{2 * half:g}" height="20" rx="4" fill="#f1f5f9" '
                    f'stroke="{LINE}"/>'
                )
                yield f'<text x="{x}" y="{y}" fill="{INK}" font-size="12">{escape(text)}</text>'
            case Arrow(start, end, label, kind):
                x1, x2, colour = places[start], places[end], COLOURS[kind]
                dashes = ' stroke-dasharray="6 4"' if kind == "news" else ""
                thick = 3 if kind == "payload" else 1.5
                yield (
                    f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="{colour}" stroke-width="{thick}"{dashes} '
                    f'marker-end="url(#{kind})"/>'
                )
                yield (
                    f'<text x="{(x1 + x2) / 2:g}" y="{y - 7}" fill="{colour}" stroke="#ffffff" stroke-width="4" '
                    f'paint-order="stroke">{escape(label)}</text>'
                )


def main() -> None:
    for name, (lanes, steps) in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw(lanes, steps), encoding="utf-8")


if __name__ == "__main__":
    main()
