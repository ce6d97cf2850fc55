"""The torchrun handle: local EM on any number of ranks, one model everywhere, and one error everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torchrun import launch

pytestmark = pytest.mark.distributed
PROGRAM = Path(__file__).parent / "programs" / "statistics_handle.py"


@pytest.fixture(scope="module", params=[1, 2, 3])
def reports(request):
    return launch(PROGRAM, ranks=request.param).reports


def test_the_fit_equals_local_em(reports):
    assert max(r["difference"] for r in reports) < 1e-9


def test_every_rank_ends_with_the_same_bits(reports):
    assert len({r["model"] for r in reports}) == 1


def test_uneven_and_empty_shards_change_nothing(reports):
    assert max(r["uneven difference"] for r in reports) < 1e-9
    assert {r["uneven length"] for r in reports} == {403}


def test_the_sum_and_the_length_are_global_and_the_rows_local(reports):
    assert {r["length"] for r in reports} == {403}
    assert {tuple(r["sum"]) for r in reports} == {tuple(reports[0]["sum"])}
    assert reports[0]["sum"] == pytest.approx(reports[0]["reference sum"], rel=1e-12)
    assert sum(r["rows here"] for r in reports) == 403


def test_moments_of_data_far_from_zero_are_exact(reports):
    offsets = [r + d for r in range(len(reports)) for d in (0, 1)]
    assert reports[0]["far from zero"] == pytest.approx([np.mean(offsets), np.var(offsets)], rel=1e-6)


def test_a_row_that_one_rank_refuses_is_refused_on_every_rank(reports):
    assert all(r["bad row"].startswith("ValueError") and "NaN at index 0" in r["bad row"] for r in reports)


def test_an_m_step_that_raises_on_the_root_raises_everywhere(reports):
    assert all(r["M-step"].startswith("ZeroDivisionError") and "no such maximum" in r["M-step"] for r in reports)


def test_scoring_that_raises_on_one_rank_raises_everywhere(reports):
    assert all(r["scoring"].startswith("LookupError") and "lost my notes" in r["scoring"] for r in reports)


def test_ranks_that_pass_different_models_are_told_so(reports):
    if len(reports) > 1:
        assert all("every rank must pass the same estimator" in r["different models"] for r in reports)


def test_the_handle_is_usable_after_errors_and_no_rank_waited_long(reports):
    assert {r["usable"] for r in reports} == {np.mean([1.0 + r for r in range(len(reports))])}
    assert all(r["prompt"] for r in reports)


def test_no_data_on_any_rank_is_refused_by_name(reports):
    assert all("empty" in r["empty"] for r in reports)
