"""The reference forms compute what the dense modules do, and leave the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mixle.experimental.tensor_pipeline_context_parallel.reference import (
    column_parallel_linear,
    head_parallel_attention,
    parallel_mlp,
    pipeline_step,
    row_parallel_linear,
    sharded_attention,
    tensor_parallel_logits,
    vocabulary_parallel_losses,
)
from mixle.models.transformer import MLP, CausalLM, SelfAttention
from mixle.training.next_token import IGNORED

few = settings(max_examples=25, deadline=None)
sizes, ranks_drawn = st.integers(1, 4), st.sampled_from([1, 2, 3, 4])


def assert_same(module: nn.Module, inputs: tuple, dense, parallel) -> None:
    """Outputs, and gradients of module and inputs under the same random cotangent, agree to 1e-5."""
    wanted = [p for p in (*module.parameters(), *inputs) if p.requires_grad]
    expected, found = dense(), parallel()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, wanted, cotangent) for out in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@few
@given(sizes, sizes, sizes, ranks_drawn, st.booleans(), st.integers(0, 99))
def test_a_column_parallel_layers_outputs_lie_side_by_side(batch, inputs, outputs, ranks, bias, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(inputs, outputs * ranks, bias=bias), torch.randn(batch, inputs, requires_grad=True)
    assert_same(layer, (x,), lambda: layer(x), lambda: torch.cat(column_parallel_linear(x, layer, ranks), -1))


@few
@given(sizes, sizes, sizes, ranks_drawn, st.booleans(), st.integers(0, 99))
def test_a_row_parallel_layers_outputs_add_up(batch, inputs, outputs, ranks, bias, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(inputs * ranks, outputs, bias=bias), torch.randn(batch, inputs * ranks, requires_grad=True)
    assert_same(layer, (x,), lambda: layer(x), lambda: row_parallel_linear(x.chunk(ranks, -1), layer))


@few
@given(sizes, sizes, ranks_drawn, st.booleans(), st.integers(0, 99))
def test_an_mlp_whose_hidden_units_are_split_is_the_mlp(batch, units, ranks, bias, seed):
    torch.manual_seed(seed)
    mlp, x = MLP(6, units * ranks, bias=bias), torch.randn(batch, 3, 6, requires_grad=True)
    assert_same(mlp, (x,), lambda: mlp(x), lambda: parallel_mlp(mlp, x, ranks))


@few
@given(sizes, st.integers(1, 9), sizes, sizes, ranks_drawn, st.booleans(), st.booleans(), st.integers(0, 99))
def test_attention_whose_heads_are_split_is_the_attention(batch, length, half, heads, ranks, rotary, bias, seed):
    torch.manual_seed(seed)
    width = 2 * half * heads * ranks
    attention = SelfAttention(width, heads * ranks, dropout=0.0, rotary=rotary, bias=bias)
    x, positions = torch.randn(batch, length, width, requires_grad=True), torch.arange(length)
    assert_same(
        attention,
        (x,),
        lambda: attention(x, positions),
        lambda: head_parallel_attention(attention, x, positions, ranks),
    )


def models(draw_seed: int, heads: int, layers: int, plain: bool) -> CausalLM:
    torch.manual_seed(draw_seed)
    options = {} if plain else {"tie_embeddings": False, "position": "learned", "norm": "layer", "bias": True}
    return CausalLM(12, 4 * heads, layers, heads, 8, d_mlp=12, **options)


@few
@given(sizes, st.integers(1, 8), sizes, ranks_drawn, st.booleans(), st.integers(0, 99))
def test_logits_of_parts_of_the_vocabulary_lie_side_by_side(batch, length, layers, ranks, plain, seed):
    model = models(seed, 12, layers, plain)
    ids = torch.randint(0, 12, (batch, length))
    assert_same(model, (), lambda: model(ids), lambda: torch.cat(tensor_parallel_logits(model, ids, ranks), -1))


@few
@given(st.integers(1, 6), sizes, ranks_drawn, st.integers(0, 99))
def test_losses_from_parts_of_the_vocabulary_are_the_cross_entropy(rows, width, ranks, seed):
    torch.manual_seed(seed)
    logits = (10 * torch.randn(rows, width * ranks)).requires_grad_()
    targets = torch.randint(0, width * ranks, (rows,))
    targets[0] = IGNORED
    assert_same(
        nn.Identity(),
        (logits,),
        lambda: F.cross_entropy(logits, targets, reduction="none"),
        lambda: vocabulary_parallel_losses(logits.chunk(ranks, 1), targets),
    )


@few
@given(st.integers(1, 5), sizes, st.data(), st.booleans(), st.integers(0, 99))
def test_a_pipelines_gradients_are_the_dense_models(batch, layers, data, plain, seed):
    model = models(seed, 2, layers, plain)
    stages = data.draw(st.integers(1, layers))
    microbatches = data.draw(st.integers(1, batch))
    ids, targets = torch.randint(0, 12, (2, batch, 8))
    targets[0, 1:] = IGNORED
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    expected = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )
    result = pipeline_step(model, ids, targets, stages=stages, microbatches=microbatches)
    torch.testing.assert_close(result.loss_sum, loss.detach(), atol=1e-5, rtol=1e-5)
    assert result.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(result.gradients[name], gradient, atol=1e-5, rtol=1e-5)
    assert result.sent == 2 * (stages - 1) * ids.numel() * model.d_model


@pytest.mark.parametrize(
    ("tie", "stages", "said"),
    [(True, 2, "two copies, gradients added"), (True, 1, "one parameter in one stage"), (False, 2, None)],
)
def test_a_pipeline_says_how_it_dealt_with_tied_embeddings(tie, stages, said):
    model = CausalLM(12, 8, 2, 2, 8, tie_embeddings=tie)
    ids = torch.zeros((1, 8), dtype=torch.int64)
    assert pipeline_step(model, ids, ids, stages=stages, microbatches=1).tied == said


@few
@given(sizes, sizes, sizes, ranks_drawn, st.sampled_from(["ring", "allgather"]), st.integers(0, 99))
def test_attention_by_an_online_softmax_over_parts_is_the_attention(batch, heads, part, ranks, mode, seed):
    torch.manual_seed(seed)
    inputs = tuple(torch.randn(batch, heads, 2 * part * ranks, 4, requires_grad=True) for _ in range(3))
    assert_same(
        nn.Identity(),
        inputs,
        lambda: F.scaled_dot_product_attention(*inputs, is_causal=True),
        lambda: sharded_attention(*inputs, ranks=ranks, mode=mode)[0],
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_of_keys_and_computes_its_share_of_scores(ranks):
    q = torch.randn(1, 2, 16, 4)
    _, receipt = sharded_attention(q, q, q, ranks=ranks)
    assert receipt.key_value_elements == 2 * q.numel() // ranks
    assert receipt.score_elements == 2 * 16 * 16 // ranks**2
    assert len(set(receipt.scores_by_rank)) == 1
    assert sum(receipt.scores_by_rank) == 2 * 16 * 17 // 2
