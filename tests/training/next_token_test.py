"""Scoring next tokens with modules of either shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mixle.models.transformer import CausalLM
from mixle.training.next_token import IGNORED, NextToken, TokenTensors

VOCAB, BLOCK = 7, 5


def model():
    torch.manual_seed(0)
    return CausalLM(VOCAB, 8, 1, 2, BLOCK)


def batch(targets):
    ids = torch.randint(0, VOCAB, (3, BLOCK + 1), generator=torch.Generator().manual_seed(1))
    wanted = ids[:, 1:].clone() if targets == "all" else ids[:, -1:].clone()
    wanted[1, -1] = IGNORED
    return TokenTensors(ids[:, :-1], wanted)


@pytest.mark.parametrize("targets", ["last", "all"])
def test_log_probabilities_are_those_of_the_softmax_and_zero_where_masked(targets):
    module, rows = model(), batch(targets)
    found = NextToken(module, targets).log_probabilities(module, rows)
    logits = module(rows.inputs)[:, -rows.targets.shape[1] :].double().log_softmax(-1)
    expected = logits.gather(-1, rows.targets.clamp(min=0)[..., None])[..., 0]
    expected[rows.targets == IGNORED] = 0.0
    torch.testing.assert_close(found.double(), expected)
    torch.testing.assert_close(NextToken(module, targets).loss_sum(module, rows).double(), -expected.sum())


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    module = model()
    blank = TokenTensors(torch.zeros(2, BLOCK, dtype=torch.int64), torch.full((2, BLOCK), IGNORED))
    loss = NextToken(module, "all").loss_sum(module, blank)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_the_head_is_spared_the_positions_that_are_not_asked_for():
    module, widths = model(), []
    module.head.register_forward_pre_hook(lambda _, arguments: widths.append(arguments[0].shape))
    NextToken(module, "last").loss_sum(module, batch("last"))
    assert widths == [(3, 8)]


class Constant(nn.Module):
    def __init__(self, output, **attributes):
        super().__init__()
        self.output = output
        vars(self).update(attributes)

    def forward(self, ids):
        return self.output


@pytest.mark.parametrize(
    ("output", "targets", "error", "message"),
    [
        ("logits", "last", TypeError, "Constant returned a str, not a tensor of logits"),
        (torch.zeros(1, 4, VOCAB), "all", ValueError, r"\(1, 5\) to \(1, 4, 7\); .* needs \(1, 5, V\)"),
        (torch.zeros(VOCAB), "last", ValueError, r"\(1, 5\) to \(7,\); .* needs \(1, V\) or \(1, 5, V\)"),
    ],
)
def test_what_is_no_logits_is_refused_with_its_shape(output, targets, error, message):
    module = Constant(output)
    with pytest.raises(error, match=message):
        NextToken(module, targets).vocabulary(module, BLOCK, torch.device("cpu"))


def test_a_module_whose_vocabulary_is_not_the_width_of_its_logits_is_refused_with_both():
    module = Constant(torch.zeros(1, VOCAB), vocab=9)
    with pytest.raises(ValueError, match="Constant has vocab=9 but returns 7 logits"):
        NextToken(module, "last").vocabulary(module, BLOCK, torch.device("cpu"))
