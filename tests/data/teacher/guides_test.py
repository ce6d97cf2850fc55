"""The guides to the teacher's command line name commands and options that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from mixle.data.teacher.command import teacher

GUIDES = Path(__file__).parents[3] / "docs" / "howto"
COMMAND = re.compile(r"mixle teacher (\w+)((?:[^\n`\\]|\\\n)*)")


@pytest.mark.parametrize("guide", ["teacher-from-the-command-line.md", "teachers-on-other-machines.md"])
def test_every_command_in_a_guide_has_the_options_it_is_given(guide):
    commands = get_command(teacher).commands
    shown = COMMAND.findall((GUIDES / guide).read_text())
    assert {"broker", "worker", "keys"} <= {name for name, _ in shown}
    for name, rest in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, name
