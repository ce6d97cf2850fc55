"""Predictions against what others measured and published: every row's error is printed (pytest -s), and bounded."""

from __future__ import annotations

import pytest
from published_rows import ROWS, Row

from mixle.experimental.tensor_pipeline_context_parallel.hardware import GIB
from mixle.experimental.tensor_pipeline_context_parallel.memory import memory_by_rank
from mixle.experimental.tensor_pipeline_context_parallel.step_time import step_time, tokens_per_second

MEMORY_TOLERANCE = 0.15
THROUGHPUT_TOLERANCE = 0.25


def predicted_throughput(row: Row) -> float:
    return tokens_per_second(row.plan, row.workload, step_time(row.shape, row.plan, row.workload, row.hardware))


def predicted_memory_gib(row: Row) -> float:
    return max(rank.reserved for rank in memory_by_rank(row.shape, row.plan, row.workload)) / GIB


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_throughput_is_predicted(row):
    assert predicted_throughput(row) == pytest.approx(row.tokens_per_second, rel=THROUGHPUT_TOLERANCE)


@pytest.mark.parametrize("row", [row for row in ROWS if row.memory_gib is not None], ids=str)
def test_memory_is_predicted(row):
    assert predicted_memory_gib(row) == pytest.approx(row.memory_gib, rel=MEMORY_TOLERANCE)


def test_every_row_is_printed_with_its_error():
    print(
        f"\n{'tokens/s/rank':>31}{'memory GiB':>24}\n{'predicted measured  error':>31}{'predicted measured error':>28}"
    )
    for row in ROWS:
        throughput = predicted_throughput(row)
        line = f"{throughput:15,.0f} {row.tokens_per_second:8,.0f} {throughput / row.tokens_per_second - 1:+6.0%}"
        if row.memory_gib is None:
            line += " " * 28
        else:
            memory = predicted_memory_gib(row)
            line += f"{memory:13.1f} {row.memory_gib:8.1f} {memory / row.memory_gib - 1:+5.0%}"
        print(f"{line}  {'*' if row.calibrates else ' '} {row}")
    print("* looked at when the constants were chosen")
    assert {row.calibrates for row in ROWS} == {True, False}


@pytest.mark.parametrize("better", ["compiled", "async_tp"])
def test_what_made_a_published_run_faster_is_predicted_to(better):
    pairs = [
        (row, other)
        for row in ROWS
        for other in ROWS
        if row.memory_gib and other.memory_gib and row.model == other.model and row.plan == other.plan
        and row.workload.seq_len == other.workload.seq_len and row.workload.precision == other.workload.precision
        and not getattr(row.workload, better) and getattr(other.workload, better) and row.hardware == other.hardware
    ]  # fmt: skip
    assert pairs
    for row, other in pairs:
        assert predicted_throughput(row) < predicted_throughput(other)
        assert row.tokens_per_second < other.tokens_per_second
