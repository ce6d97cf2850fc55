"""A shape checks itself, and a size in parameters names a shape that has as many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixle.experimental.tensor_pipeline_context_parallel.model_shape import NAMED_SHAPES, ModelShape, shape_of_size
from mixle.models.transformer import CausalLM


@pytest.mark.parametrize(("values", "message"), [
    ({"n_head": 3}, "n_head=3 must divide d_model=64; nearest that does: 2"),
    ({"n_kv_head": 3}, "n_kv_head=3 must divide n_head=4; nearest that does: 2"),
    ({"vocab": 0}, "vocab=0 must be at least 1"),
    ({"n_head": 10**12}, "n_head=1000000000000 must divide d_model=64; nearest that does: 64"),
    ({"learned_positions": -1}, "learned_positions=-1 must be at least 0"),
    ({"norm": "batch"}, "norm='batch' must be one of"),
])  # fmt: skip
def test_a_shape_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ModelShape(**{"vocab": 10, "d_model": 64, "n_layer": 2, "n_head": 4, **values})


@pytest.mark.parametrize("values", [{"n_kv_head": False}, {"d_mlp": 64.0}, {"learned_positions": True}])
def test_a_width_that_is_no_integer_is_refused(values):
    with pytest.raises(TypeError, match=f"{next(iter(values))}=.* must be an integer"):
        ModelShape(vocab=10, d_model=64, n_layer=2, n_head=4, **values)


def test_more_parameters_than_the_largest_shape_are_refused():
    with pytest.raises(ValueError, match="params='100000T' must be at most"):
        shape_of_size("100000T")


def test_a_shape_is_read_off_a_module():
    read = ModelShape.of(CausalLM(100, 64, 2, 4, 16, d_mlp=96, tie_embeddings=False, bias=True))
    assert read == ModelShape(vocab=100, d_model=64, n_layer=2, n_head=4, d_mlp=96, tied=False, bias=True)


def test_a_module_that_does_not_tell_is_refused_with_what_it_lacks():
    with pytest.raises(TypeError, match="Linear has no vocab, d_model, n_layer, n_head, d_mlp"):
        ModelShape.of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("size", "name"), [
    ("8B", "llama3-8b"), ("70b", "llama3-70b"), ("405B", "llama3-405b"), ("llama2-13b", "llama2-13b"),
    ("Llama3-8B", "llama3-8b"), ("8.03B", "llama3-8b"),
])  # fmt: skip
def test_known_names_and_sizes_are_the_released_models(size, name):
    assert shape_of_size(size) is NAMED_SHAPES[name]


@given(millions=st.integers(100, 2_000_000))
def test_any_other_size_is_met_to_a_fifth(millions):
    assert shape_of_size(f"{millions}M").parameters == pytest.approx(millions * 1e6, rel=0.2)


@pytest.mark.parametrize("size", ["8 billion", "B", "", "-3B", "10K", "llama9"])
def test_what_is_no_size_is_refused_with_examples(size):
    with pytest.raises(ValueError, match="must be a number of at least 1M such as 8B, or one of llama2-7b"):
        shape_of_size(size)
