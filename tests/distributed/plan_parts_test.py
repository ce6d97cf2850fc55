"""What ranks compute of a shared sequence, or of a shared vocabulary, is the dense computation's; none holds it all."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "plan_parts.py"
KEYS = 2 * 3 * 32 * 8  # elements of the keys of the whole sequence


@pytest.fixture(scope="module")
def reports():
    return launch(PROGRAM, ranks=4, timeout_s=120).reports


@pytest.mark.parametrize("mode", ["ring", "allgather"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_over_ranks_is_the_attention_forward_and_backward(reports, mode, size, documents):
    suffix = " documents" if documents else ""
    for report in reports:
        assert report["attention"][f"cp={size} {mode} float32{suffix}"][0] < 1e-5
        assert report["attention"][f"cp={size} {mode} float64{suffix}"][0] < 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_the_ring_never_holds_the_keys_and_values_of_the_whole_sequence(reports, size):
    for report in reports:
        assert report["attention"][f"cp={size} ring float32"][1] <= 2 * KEYS // size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_from_parts_of_the_vocabulary_are_the_cross_entropy(reports, size):
    assert max(report["losses"][f"tp={size}"] for report in reports) < 1e-5


@pytest.mark.parametrize("plan", ["tp=4", "tp=2 pp=2", "tp=2 cp=2"])
def test_a_step_never_gathers_the_logits_that_ranks_share(reports, plan):
    sizes = [report["largest"][f"{plan} logits"] for report in reports]
    assert max(largest for largest, _ in sizes) == sizes[0][1] // 4


def test_a_context_parallel_step_holds_less_than_the_keys_of_the_whole_sequence(reports):
    for report in reports:
        largest, keys = report["largest"]["cp=4 keys and values"]
        assert largest <= keys // 2
