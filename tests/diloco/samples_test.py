"""A batch is counted by its samples, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diloco_sites import fresh_url, open_session, zeros
from torch.utils.data import DataLoader, TensorDataset

from mixle.diloco import DiLoCo
from mixle.diloco.samples import samples_in

X, Y = np.zeros((8, 3)), torch.zeros(8)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (X, 8),
        (Y, 8),
        ([X, Y], 8),
        ((X, Y), 8),
        ({"x": X, "y": Y}, 8),
        ({"x": X, "names": ["a", "b"]}, 8),
        ((X, 0.5), 8),
        ([1, 2, 3], 3),
        (["a", "bc"], 2),
        ([], 0),
    ],
)
def test_the_samples_of_a_batch_are_the_first_dimension_of_its_arrays_or_the_length_of_a_list(batch, count):
    assert samples_in(batch) == count


@pytest.mark.parametrize(
    "batch",
    [1, "abc", (1, 2), {"a": 1}, np.float32(3.0), torch.tensor(1.0), [(X, Y), (X, Y)], [X, torch.tensor(2)], None],
)
def test_a_batch_that_may_be_counted_in_several_ways_is_not_counted(batch):
    with pytest.raises(TypeError, match="samples="):
        samples_in(batch)


def test_arrays_that_differ_in_their_first_dimension_are_named():
    with pytest.raises(ValueError, match=r"\['x'\] has 8, \['y'\] has 7; give run\(\) samples="):
        samples_in({"x": X, "y": Y[1:]})


def test_a_loader_of_pairs_counts_every_sample_of_its_last_batch_too():
    loader = DataLoader(TensorDataset(torch.zeros(21, 2), torch.zeros(21)), batch_size=8)
    with open_session(zeros(), DiLoCo(5, 1), fresh_url()) as session:
        session.run(lambda batch: None, loader)
        assert session._info().samples == 21


def test_a_batch_that_cannot_be_counted_is_not_trained_on():
    trained = []
    with open_session(zeros(), DiLoCo(5, 1), fresh_url()) as session:
        with pytest.raises(TypeError, match="samples="):
            session.run(trained.append, iter([1, 2]))
        with pytest.raises(ValueError, match="samples=0"):
            session.run(trained.append, [[]])
        session.run(trained.append, iter([1, 2]), samples=lambda batch: 4)
    assert trained == [1, 2]
