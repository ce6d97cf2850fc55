"""Which tensors of a teacher's samples are token ids and targets, and what is trained of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mixle.data.teacher.specs import BatchConfig
from mixle.training.next_token import IGNORED
from mixle.training.taught_tokens import TaughtTokens

CPU = torch.device("cpu")


def tokens(*tensors: tuple[str, tuple[int, ...], str], vocab: int | None = None) -> TaughtTokens:
    found = TaughtTokens.of(BatchConfig([{"name": n, "shape": s, "dtype": d} for n, s, d in tensors]))
    return replace(found, vocab=vocab)


def test_the_only_integer_row_holds_the_ids_whatever_it_is_called():
    assert tokens(("made", (8,), "uint8"), ("logits", (8, 5), "float32")).ids == "made"


def test_of_several_integer_rows_the_one_named_like_ids_is_taken():
    assert tokens(("lengths", (8,), "int32"), ("input_ids", (8,), "int32")).ids == "input_ids"


def test_each_next_id_is_a_target_and_the_last_position_has_none():
    task = tokens(("ids", (4,), "int32"))
    tensors = {"ids": torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]], dtype=torch.int32)}
    batch = task.batch(tensors, CPU)
    assert batch.inputs.tolist() == [[3, 1, 4, 1], [5, 9, 2, 6]]
    assert batch.targets.tolist() == [[1, 4, 1, IGNORED], [9, 2, 6, IGNORED]]
    assert task.places(tensors) == 6


def test_targets_of_the_teacher_count_unless_they_are_masked():
    task = tokens(("ids", (3,), "int64"), ("labels", (3,), "int16"))
    tensors = {"ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, IGNORED, 4]], dtype=torch.int16)}
    assert task.batch(tensors, CPU).targets.tolist() == [[2, IGNORED, 4]]
    assert task.places(tensors) == 2


def test_ids_of_int64_are_not_copied():
    tensors = {"ids": torch.zeros(2, 4, dtype=torch.int64)}
    assert tokens(("ids", (4,), "int64")).batch(tensors, CPU).inputs.data_ptr() == tensors["ids"].data_ptr()


@pytest.mark.parametrize("bad", [-1, 9])
def test_an_id_outside_the_vocabulary_is_refused_naming_it_and_its_sample(bad):
    task = tokens(("ids", (3,), "int64"), vocab=9)
    with pytest.raises(ValueError, match=rf"ids={bad} in sample 1 of a batch, .* vocabulary of 9"):
        task.batch({"ids": torch.tensor([[1, 2, 3], [4, bad, 5]])}, CPU)


def test_a_target_outside_the_vocabulary_is_refused_but_not_a_masked_one():
    task = tokens(("ids", (2,), "int64"), ("targets", (2,), "int64"), vocab=9)
    task.batch({"ids": torch.tensor([[1, 2]]), "targets": torch.tensor([[IGNORED, 8]])}, CPU)
    with pytest.raises(ValueError, match="targets=9 in sample 0"):
        task.batch({"ids": torch.tensor([[1, 2]]), "targets": torch.tensor([[IGNORED, 9]])}, CPU)


def test_samples_without_ids_are_refused_listing_what_they_have():
    with pytest.raises(ValueError, match=r"no token ids among: x \(4,\) float32, n \(\) int64"):
        tokens(("x", (4,), "float32"), ("n", (), "int64"))


def test_samples_with_two_candidates_are_refused():
    with pytest.raises(ValueError, match="2 tensors that may be the token ids"):
        tokens(("a", (4,), "int64"), ("b", (4,), "int64"))


def test_targets_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"targets 'labels' have shape \(3,\), and the ids 'ids' \(4,\)"):
        tokens(("ids", (4,), "int64"), ("labels", (3,), "int64"))
