"""Encodings: cutting them into rows and moving them into shared frames."""

from __future__ import annotations

import numpy as np
import pytest

from mixle.stats import CategoricalEstimator, CompositeEstimator, GaussianEstimator, OptionalEstimator, PoissonEstimator
from mixle.stats.encoding import (
    LeafEncoding,
    any_impossible,
    encoding_frames,
    impossible_rows,
    join_all,
    reframe_encoding,
    row_count,
    take_rows,
)
from mixle.stats.frames import Centre, Vocabulary

FOREIGN = np.arange(5)


def encoder(estimator):
    return estimator.accumulator_factory().make().acc_to_encoder()


def test_arrays_of_other_libraries_are_encodings_too():
    assert row_count(FOREIGN) == 5
    assert take_rows(FOREIGN, 1, 3).tolist() == [1, 2]
    assert encoding_frames(FOREIGN) == []
    assert reframe_encoding(FOREIGN, []) is FOREIGN
    assert impossible_rows(FOREIGN) is None


def test_what_cannot_be_cut_into_rows_is_refused():
    with pytest.raises(TypeError, match="to be cut into rows, got list"):
        take_rows([1, 2], 0, 1)


def test_shards_of_different_models_are_refused():
    with pytest.raises(ValueError, match="numbers of leaves differ"):
        join_all([[None], [None, None]])


def test_rows_are_views():
    enc = LeafEncoding((np.arange(10.0),))
    assert np.shares_memory(enc.rows(2, 5).columns[0], enc.columns[0])


def test_shards_take_one_frame_and_score_as_before():
    estimator = CompositeEstimator([CategoricalEstimator(), OptionalEstimator(GaussianEstimator())])
    shards = [encoder(estimator).seq_encode(s) for s in ([("b", 1.0)], [], [("a", None), ("c", 5.0)])]
    frames = join_all([encoding_frames(s) for s in shards])
    assert isinstance(frames[0], Vocabulary) and frames[0].categories == ("a", "b", "c")
    assert isinstance(frames[1], Centre) and frames[1].count == 2
    moved = [reframe_encoding(s, frames) for s in shards]
    assert [encoding_frames(s) for s in moved] == [frames] * 3
    assert [s.fields[0].columns[0].tolist() for s in moved] == [[1], [], [0, 2]]


def test_impossible_rows_are_those_of_any_field():
    estimator = CompositeEstimator([PoissonEstimator(), OptionalEstimator(PoissonEstimator())])
    enc = encoder(estimator).seq_encode([(1, None), (-1, 2), (3, 0.5), (0, 0)])
    assert enc.impossible_rows().tolist() == [False, True, True, False]
    assert any_impossible([]) is None
    assert any_impossible([FOREIGN]) is None
