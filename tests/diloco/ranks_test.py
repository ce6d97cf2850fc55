"""Several ranks of one site, as threads: rank 0 speaks, and the others end with what it has."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from diloco_sites import at_once, descend, fresh_url, open_session, zeros

from mixle.diloco import DiLoCo, NumpyParameters, SiteError, align, open_mailbox
from mixle.diloco.parameters import Ranks
from mixle.diloco.ranks import Site


class ThreadRanks:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, world: int, meeting: threading.Barrier, slot: list) -> None:
        self.rank, self.world, self._meeting, self._slot = rank, world, meeting, slot
        self.broadcasts = 0

    def broadcast(self, array: np.ndarray) -> None:
        self.broadcasts += 1
        if self.rank == 0:
            self._slot[0] = array.copy()
        self._meeting.wait()
        if self.rank:
            array[...] = self._slot[0]
        self._meeting.wait()


def ranks_of(world: int) -> list[Ranks]:
    meeting, slot = threading.Barrier(world, timeout=20), [None]
    return [ThreadRanks(rank, world, meeting, slot) for rank in range(world)]


def site(act, *, world: int = 2):
    """Call ``act(ranks)`` on every rank, and return what each returns."""
    return at_once(*[lambda ranks=ranks: act(ranks) for ranks in ranks_of(world)])


def equal(a, b) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return error


def test_every_rank_ends_with_the_same_parameters_and_those_of_the_run():
    url = fresh_url()

    def act(ranks):
        model = zeros()
        with open_session(model, DiLoCo(4, 2), url, ranks=ranks) as session:
            for _ in range(30):
                descend(model, 1.0)
                session.step(2)
            assert session.close()
        return model, session.rounds_seen

    (first, seen), *others = site(act, world=3)
    committed = zeros()
    assert align(committed, mailbox=url) + 1 == seen
    for model, seen_there in [(first, seen), *others]:
        assert equal(model, committed)
        assert seen_there == seen


def test_one_rank_holds_the_lease_and_the_samples_are_the_sites():
    url = fresh_url()

    def act(ranks):
        with open_session(zeros(), DiLoCo(5, 1, overlap_steps=0), url, ranks=ranks, learner_id="a") as session:
            for _ in range(5):
                session.step(7)

    site(act)
    store = open_mailbox(url)
    assert store.list("leases/") == ["leases/a/00000000-released"]
    assert b'"tokens":35' in store.get(store.list("rounds/")[-1])


def test_a_step_in_which_nothing_happens_is_one_broadcast():
    def act(ranks):
        with open_session(zeros(), DiLoCo(50, 1), fresh_url(), ranks=ranks) as session:
            before = ranks.broadcasts
            for _ in range(10):
                session.step()
            return ranks.broadcasts - before

    assert site(act) == [10, 10]


def test_ranks_that_wait_for_a_commit_hear_from_rank_0_all_the_while():
    """With a second snapshot needed for each round, the site waits until another site brings it."""
    url, algorithm = fresh_url(), DiLoCo(2, 1, overlap_steps=0, quorum_size=2, follow=0)
    heard = threading.Event()

    def act(ranks):
        with open_session(zeros(), algorithm, url, ranks=ranks) as session:
            before = ranks.broadcasts
            session.step()
            session.step()
            return ranks.broadcasts - before

    def other():
        with open_session(zeros(), algorithm, url, learner_id="other") as session:
            heard.wait(20)
            session.step()
            session.step()

    ranks = ranks_of(2)

    def announce():
        while ranks[1].broadcasts < 8:
            pass
        heard.set()

    counts = at_once(*[lambda each=each: act(each) for each in ranks], other, announce)
    assert counts[0] == counts[1] >= 5


def test_what_fails_on_rank_0_fails_on_every_rank():
    def act(ranks):
        with open_session(zeros(), DiLoCo(5, 1), fresh_url(), ranks=ranks) as session:
            refused = outcome(session.step, 2.5)
            session.step(2)
            return refused

    first, second = site(act)
    assert isinstance(first, TypeError)
    assert isinstance(second, SiteError)
    assert "TypeError: samples=2.5" in str(second)


def test_a_run_that_cannot_be_joined_is_refused_on_every_rank():
    def act(ranks):
        return outcome(lambda: open_session(zeros(), DiLoCo(5, 9), fresh_url(), ranks=ranks))

    first, second = site(act)
    assert isinstance(first, ValueError)
    assert "fragments" in str(second)


def test_each_rank_gets_its_own_state_back(tmp_path):
    url = fresh_url()

    def act(ranks):
        folder = tmp_path / str(ranks.rank)
        position = [0]
        algorithm = DiLoCo(5, 1, overlap_steps=0)
        session = open_session(
            zeros(), algorithm, url, ranks=ranks, state_dir=folder, state=lambda: [ranks.rank, position[0]]
        )
        with session:
            found = session.resumed
            for step in range(10):
                position[0] = step + 1
                session.step()
            session.close()
        return found

    assert site(act) == [None, None]
    first, second = site(act)
    assert (first.steps, first.state) == (10, [0, 10])
    assert (second.steps, second.state) == (10, [1, 10])


def test_a_rank_without_the_state_that_rank_0_goes_on_from_says_so(tmp_path):
    url = fresh_url()

    def act(ranks, folder):
        with open_session(zeros(), DiLoCo(5, 1, overlap_steps=0), url, ranks=ranks, state_dir=folder) as session:
            for _ in range(5):
                session.step()
            session.close()

    site(lambda ranks: act(ranks, tmp_path / str(ranks.rank)))

    def again(ranks):
        return outcome(
            lambda: open_session(
                zeros(),
                DiLoCo(5, 1, overlap_steps=0),
                url,
                ranks=ranks,
                state_dir=tmp_path / ("0" if ranks.rank == 0 else "lost"),
            )
        )

    first, second = site(again)
    assert isinstance(second, ValueError)
    assert "state_dir of rank 1 lacks the state after 5 steps" in str(second)
    first.abandon()


def test_all_ranks_are_aligned_to_a_run():
    url = fresh_url()
    with open_session(zeros(), DiLoCo(5, 1), url) as session:
        session.step()

    def act(ranks):
        model = {name: array + 5 for name, array in zeros().items()}
        round_ = align(model, mailbox=url, ranks=ranks)
        return round_, model

    (first, model), (second, other) = site(act)
    assert first == second == 0
    assert equal(model, other)


class Sharded(NumpyParameters):
    """Parameters whose reading is a collective call."""

    is_sharded = True

    def read(self, names):
        self._ranks.broadcast(np.zeros(1))
        return super().read(names)


def test_reading_sharded_parameters_is_done_by_all_ranks():
    def act(ranks):
        site = Site(Sharded(zeros(), ranks=ranks), ranks)
        if ranks.rank:
            return site.follow()
        with site.speaking(lambda: (1, 2, 3)):
            site.read(["weight", "bias"])
        return ranks.broadcasts

    assert site(act) == [4, (1, 2, 3)]


def test_a_syncer_is_one_process():
    ranks = ranks_of(2)[0]
    with pytest.raises(ValueError, match='role="syncer" is one process'):
        open_session(None, DiLoCo(5, 1), fresh_url(), role="syncer", ranks=ranks)
