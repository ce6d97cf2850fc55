"""Every setting that cannot work is refused before anything starts, by a message that names the option and a fix."""

from __future__ import annotations

import pytest

from mixle.lm.settings import Settings, nearest


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, r"--epochs 0 must be at least 1"),
        ({"max_bytes": -5}, r"--max-bytes -5 must be at least 1"),
        ({"heldout": 1.0}, r"--heldout 1.0 must lie between 0 and 1"),
        ({"lr": float("nan")}, r"--lr nan must be positive and finite"),
        ({"lr": 0.0}, r"--lr 0.0 must be positive"),
        ({"seed": -1}, r"--seed -1 must be at least 0"),
        ({"d_model": 128, "heads": 3}, r"--heads 3 must divide --d-model 128.*nearest that do: 2, 4"),
        ({"d_model": 7, "heads": 1}, r"--d-model 7 must be even"),
        ({"files": ("/nowhere/a.txt",)}, r"FILES: /nowhere/a.txt is not there"),
        ({"files": ("/",)}, r"FILES: / is a folder"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        Settings(**values)


def test_a_batch_that_processes_cannot_share_is_refused_with_the_nearest_that_they_can():
    with pytest.raises(ValueError, match=r"--batch-size 16 .* 3 processes .* nearest that are: 15, 18"):
        Settings(batch_size=16).per_process(3)


def test_a_batch_is_shared_evenly():
    assert Settings(batch_size=16).per_process(4) == 4


def test_too_little_text_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"100 bytes to train on and 10 held out are too few for --block 128"):
        Settings().require_enough(training_bytes=100, heldout_bytes=10)


def test_the_nearest_choices_are_the_neighbours_on_both_sides():
    assert nearest([1, 2, 4, 8], 3) == "2, 4"
    assert nearest([1, 2, 4, 8], 9) == "8"
