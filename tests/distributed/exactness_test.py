"""Data-parallel training takes exactly the steps that one process would, whatever the shards' sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torchrun import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "exactness.py"
WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def runs():
    return {world: launch(PROGRAM, ranks=world, timeout_s=240).reports for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_the_gradient_of_every_step_is_that_of_the_mean_over_all_ranks_targets(runs, world):
    deviations = [deviation for report in runs[world] for deviation in report["gradients"].values()]
    assert len(deviations) == world * len(runs[world][0]["gradients"]) > 0
    assert max(deviations) <= 1e-6


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
@pytest.mark.parametrize("targets", ["last", "all"])
def test_equal_global_batches_trace_the_same_loss_and_end_with_the_same_parameters(runs, world, wrapping, targets):
    alone, together = runs[1][0]["traces"][f"none {targets}"], runs[world][0]["traces"][f"{wrapping} {targets}"]
    np.testing.assert_allclose(together["losses"], alone["losses"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(together["parameters"], alone["parameters"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_reports_the_same_losses(runs, world):
    for report in runs[world]:
        for name, trace in report["traces"].items():
            assert trace["losses"] == runs[world][0]["traces"][name]["losses"]


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_ends_with_the_same_bits(runs, world):
    assert all(len(set(digests)) == 1 for report in runs[world] for digests in report["same"].values())


@pytest.mark.parametrize("world", WORLDS)
def test_two_calls_of_one_epoch_are_one_call_of_two(runs, world):
    assert all(equal for report in runs[world] for equal in report["continued"].values())


@pytest.mark.parametrize("world", WORLDS)
def test_clipping_bounds_the_norm_of_the_whole_gradient(runs, world):
    for report in runs[world]:
        for ratios in report["clipped"].values():
            np.testing.assert_allclose(ratios, 1.0, rtol=1e-4)
