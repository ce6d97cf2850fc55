"""What a site keeps on its disk, rank by rank."""

from __future__ import annotations

import os

import numpy as np
import pytest

from mixle.diloco import state_folder
from mixle.diloco.clock import SYSTEM_CLOCK
from mixle.diloco.memory_mailbox import MemoryMailbox
from mixle.diloco.site_state import SiteState

RUN = "0123456789abcde"


def site_state(folder, state=dict, *, rank: int = 1, lead: int = 1) -> SiteState:
    return SiteState(folder, state, lead=lead, rank=rank, clock=SYSTEM_CLOCK)


def test_a_rank_goes_on_from_the_state_that_rank_0_names_and_not_from_its_newest(tmp_path):
    place = 0
    kept = site_state(tmp_path, lambda: {"place": place})
    for place in (10, 20, 30):
        kept.save(run=RUN, steps=place)
    assert kept.after(20, run=RUN).state == {"place": 20}
    with pytest.raises(ValueError, match="state_dir of rank 1 lacks the state after 25 steps that rank 0 goes on from"):
        kept.after(25, run=RUN)
    with pytest.raises(ValueError, match="state_dir of rank 1 holds the state of another run"):
        kept.after(20, run="f" * 15)
    kept.close()


def test_a_rank_keeps_as_many_states_as_rank_0_may_name(tmp_path):
    kept = site_state(tmp_path, lead=2)
    for steps in range(10, 100, 10):
        kept.save(run=RUN, steps=steps)
    assert [int(path.stem.partition("-")[2]) for path in sorted(tmp_path.glob("*.npz"))] == [60, 70, 80, 90]
    kept.close()


def test_a_rank_whose_disk_is_full_says_so_and_trains_on(tmp_path, monkeypatch, caplog):
    def full(path, data) -> None:
        raise OSError(28, os.strerror(28))

    kept = site_state(tmp_path, lambda: {"moments": np.zeros(3)})
    monkeypatch.setattr(state_folder, "replace_file", full)
    kept.save(run=RUN, steps=10)
    assert "rank 1: state_dir has not got the state after 10 steps: " in caplog.text
    kept.close()


def test_a_site_without_a_state_has_none_whatever_the_mailbox_holds(tmp_path):
    kept = site_state(tmp_path, rank=0)
    assert kept.newest("a", MemoryMailbox()) is None
    kept.close()
