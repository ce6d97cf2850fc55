"""Two sites, each a torchrun job of two ranks, that share nothing but a folder: one model, whoever of them dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from diloco_sites import at_once
from torchrun import launch

from mixle.diloco import open_mailbox
from mixle.diloco.records import RoundRecord

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "diloco_handle.py"
STEPS = 25  # of one epoch: 800 tokens, 2 ranks, 2 windows of 8 targets each


def site(folder: Path, name: str, wrapping: str, what: str = "train"):
    url, state = f"file://{folder}/mailbox", str(folder / f"state-{name}")
    return launch(PROGRAM, url, name, wrapping, what, state, ranks=2, timeout_s=240, check=what != "killed")


def records(folder: Path) -> list[RoundRecord]:
    store = open_mailbox(f"file://{folder}/mailbox")
    newest_first = [RoundRecord.from_bytes(store.get(key)) for key in store.list("rounds/")]
    return newest_first[::-1]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    launched = at_once(lambda: site(folder, "a", "ddp"), lambda: site(folder, "b", request.param), deadline_s=300)
    return folder, [report for each in launched for report in each.reports]


class TestTwoSites:
    def test_all_ranks_of_both_sites_end_at_the_same_parameters(self, together):
        _, reports = together
        assert len({report["theta"] for report in reports}) == 1
        assert len({report["newest"] for report in reports}) == 1

    def test_no_step_of_either_is_lost(self, together):
        folder, reports = together
        assert all(report["flushed"] for report in reports)
        assert all(report["steps"] == STEPS for report in reports)
        for name in ("site-a", "site-b"):
            per_fragment = [0, 0]
            for record in records(folder):
                per_fragment[record.fragment] += sum(c.steps for c in record.contributions if c.learner == name)
            assert per_fragment == [STEPS, STEPS]

    def test_the_ranks_of_a_site_have_the_same_parameters_when_it_leaves(self, together):
        _, reports = together
        for first, second in (reports[:2], reports[2:]):
            assert first["after leaving"] == second["after leaving"]

    def test_the_site_that_leaves_last_is_at_the_runs_parameters(self, together):
        _, reports = together
        assert reports[0]["theta"] in {report["after leaving"] for report in reports}


@pytest.fixture(scope="module")
def after_a_kill(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")

    def killed_and_started_again():
        died = site(folder, "b", "ddp", "killed")
        return died, site(folder, "b", "ddp")

    staying, (died, back) = at_once(
        lambda: site(folder, "a", "ddp", "until-b"), killed_and_started_again, deadline_s=400
    )
    return folder, staying, died, back


class TestASiteThatIsKilled:
    def test_it_reported_nothing(self, after_a_kill):
        _, _, died, _ = after_a_kill
        assert died.exit_code != 0
        assert died.reports == [None, None]

    def test_the_other_goes_on_alone_meanwhile(self, after_a_kill):
        folder, _, _, _ = after_a_kill
        who = [{c.learner for c in record.contributions} for record in records(folder)]
        first, last = (
            next(i for i in order if "site-b" in who[i]) for order in (range(len(who)), range(len(who))[::-1])
        )
        assert {"site-a"} in who[first:last]

    def test_it_comes_back_to_where_it_last_published(self, after_a_kill):
        _, _, _, back = after_a_kill
        first, second = (report["resumed"] for report in back.reports)
        assert first == second
        assert first[0] == first[1]
        assert 6 <= first[0] <= 17

    def test_both_end_at_the_same_parameters(self, after_a_kill):
        _, staying, _, back = after_a_kill
        reports = staying.reports + back.reports
        assert len({report["theta"] for report in reports}) == 1
        assert all(report["flushed"] for report in reports)
