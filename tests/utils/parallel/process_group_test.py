"""Joining a process group in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mixle.utils.parallel.process_group import join, require_backend


def test_without_torchrun_a_process_is_alone_and_needs_no_group():
    with join() as peers:
        assert (peers.rank, peers.world, peers.has_group, dist.is_initialized()) == (0, 1, False, False)


def test_a_group_of_one_is_made_for_what_needs_one_and_destroyed_by_its_last_user():
    with join(alone=True), join(alone=True):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_a_group_that_is_needed_but_may_not_be_made_is_refused():
    with pytest.raises(ValueError, match="init_process_group=False needs a process group"):
        join(init_process_group=False, alone=True)


def test_a_group_that_the_caller_initialized_is_used_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with join() as peers:
            assert peers.has_group
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_an_error_in_a_process_that_is_alone_is_raised_as_it_is():
    with join() as peers:
        with pytest.raises(KeyError, match="lost"):
            peers.agree("checking", KeyError("lost"))
        with pytest.raises(ZeroDivisionError), peers.guard("training"):
            raise ZeroDivisionError


@pytest.mark.parametrize("backend", ["nope", "", "gloo,nope", 3, True])
def test_an_unknown_backend_is_refused_by_name(backend):
    with pytest.raises(ValueError, match=rf"backend={backend!r} must be None or one .*'gloo'"):
        require_backend(backend)


def test_a_backend_other_than_the_existing_groups_is_refused():
    with join(alone=True), pytest.raises(ValueError, match="backend='cpu:gloo' is not 'gloo'"):
        join(backend="cpu:gloo")


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("x", "2"), ("-1", "2")])
def test_malformed_torchrun_variables_are_refused(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=f"RANK='{rank}' and WORLD_SIZE='{world}'"):
        join()
