"""The pages about the protocol show what the code does: lists and pictures are those that their scripts make."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[3] / "docs"
EXPLANATION = DOCS / "explanation"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXPLANATION / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_messages_is_that_of_the_code():
    written = (EXPLANATION / "teacher-messages.inc").read_text()
    assert written == script("describe_messages").page(), "run docs/explanation/describe_messages.py"


def test_every_message_and_row_is_in_the_list():
    describe = script("describe_messages")
    titles = set(re.findall(r"^\*\*(.+?)\*\*:", describe.page(), re.MULTILINE))
    commands = {kind.COMMAND.decode() for name, kind in describe.KINDS.items() if name != "News"}
    rows = {"ModelState", "ProcessIdentity", "Order", "Piece", "WorkPiece", "DonePiece", "HeldPiece", "SegmentInfo"}
    rows |= {"ServedSlots"}
    assert titles == {*commands, *rows, "the topic"}


@pytest.mark.parametrize("name", ["teacher-order", "teacher-switch", "teacher-restart"])
def test_a_picture_is_that_of_its_script(name):
    draw = script("draw_teacher")
    assert (EXPLANATION / f"{name}.svg").read_text() == draw.draw(*draw.PICTURES[name]), (
        "run docs/explanation/draw_teacher.py"
    )
