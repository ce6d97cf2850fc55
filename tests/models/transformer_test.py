from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scipy.special import erf, logsumexp  # noqa: E402
from torch import nn  # noqa: E402

from mixle.models.transformer import CausalLM, SelfAttention  # noqa: E402

KINDS = [
    {"position": "rotary", "norm": "rms", "bias": False, "tie_embeddings": True},
    {"position": "rotary", "norm": "layer", "bias": True, "tie_embeddings": False},
    {"position": "learned", "norm": "layer", "bias": False, "tie_embeddings": True},
    {"position": "learned", "norm": "rms", "bias": True, "tie_embeddings": False},
]


def build(seed=0, **options) -> CausalLM:
    """A tiny model whose parameters, norms and biases included, are all random."""
    torch.manual_seed(seed)
    model = CausalLM(13, 12, 2, 3, 7, **{"d_mlp": 20, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def ids_of(batch=3, time=7, vocab=13, seed=0):
    return torch.randint(vocab, (batch, time), generator=torch.Generator().manual_seed(seed))


# ---- an independent computation of the logits, one token and one head at a time


def dense_logits(model: CausalLM, sequence: list[int], places: list[int] | None = None) -> np.ndarray:
    weights = {name: value.numpy().astype(np.float64) for name, value in model.state_dict().items()}
    width = model.d_model // model.n_head

    def linear(name, x):
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0.0)

    def norm(name, x):
        if model.norm_kind == "layer":
            x = x - x.mean()
        return x / np.sqrt((x * x).mean() + 1e-5) * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)

    def turned(head, place):
        out = np.empty(width)
        for i in range(width // 2):
            angle = place * 10_000 ** (-2 * i / width)
            a, b = head[i], head[i + width // 2]
            out[i], out[i + width // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return out

    places = list(range(len(sequence))) if places is None else places
    stream = [weights["embedding.weight"][token] for token in sequence]
    if model.position == "learned":
        stream = [x + weights["position_embedding.weight"][place] for x, place in zip(stream, places, strict=True)]
    for layer in range(model.n_layer):
        at = f"blocks.{layer}"
        normed = [norm(f"{at}.attention_norm", x) for x in stream]
        q, k, v = ([linear(f"{at}.attention.{part}", x) for x in normed] for part in "qkv")
        for t in range(len(sequence)):
            mixed = np.empty(model.d_model)
            for head in range(model.n_head):
                mine = slice(head * width, (head + 1) * width)
                queries, keys = q[t][mine], [k[s][mine] for s in range(t + 1)]
                if model.position == "rotary":
                    queries, keys = turned(queries, places[t]), [turned(key, places[s]) for s, key in enumerate(keys)]
                scores = np.array([queries @ key / np.sqrt(width) for key in keys])
                chances = np.exp(scores - logsumexp(scores))
                mixed[mine] = sum(chance * v[s][mine] for s, chance in enumerate(chances))
            stream[t] = stream[t] + linear(f"{at}.attention.o", mixed)
        for t, x in enumerate(stream):
            hidden = linear(f"{at}.mlp.up", norm(f"{at}.mlp_norm", x))
            stream[t] = x + linear(f"{at}.mlp.down", 0.5 * hidden * (1 + erf(hidden / np.sqrt(2))))
    return np.array([linear("head", norm("norm", x)) for x in stream])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_dense_computation(kind):
    model, ids = build(**kind), ids_of()
    with torch.no_grad():
        logits = model.double()(ids).numpy()
    assert logits.shape == (3, 7, 13)
    for row in range(3):
        np.testing.assert_allclose(logits[row], dense_logits(model, ids[row].tolist()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_stand_at_the_positions_they_are_given(kind):
    model, ids = build(**kind), ids_of(time=4)
    places = torch.tensor([[0, 2, 3, 6], [1, 1, 5, 6], [6, 4, 2, 0]])
    with torch.no_grad():
        batched = model.double()(ids, places)
        shared = model(ids, places[0])
    for row in range(3):
        expected = dense_logits(model, ids[row].tolist(), places[row].tolist())
        np.testing.assert_allclose(batched[row].numpy(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shared[0], batched[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_position_alone_gives_the_same_logits(kind):
    model, ids = build(**kind), ids_of()
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_logits(kind):
    model, ids = build(**kind), ids_of()
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 13
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=-1).any()


def test_rotary_positions_are_relative():
    model, ids = build(position="rotary").double(), ids_of()
    torch.testing.assert_close(model(ids), model(ids, torch.arange(7) + 1000), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind):
    model, ids = build(**kind).double(), ids_of(time=7)

    def loss():
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step, start = 1e-5, parameter.detach().clone()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.copy_(start + sign * step * direction)
                values.append(loss().item())
            parameter.copy_(start)
        numerical = (values[0] - values[1]) / (2 * step)
        assert numerical == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-5, abs=1e-8), name


# ---- size and initialization


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_parameters_is_the_closed_form(kind):
    vocab, d, layers, block, mlp = 13, 12, 2, 7, 20
    bias, layer_norm = kind["bias"], kind["norm"] == "layer"
    norm = d * (2 if layer_norm and bias else 1)
    layer = 4 * d * d + 2 * d * mlp + 2 * norm + bias * (4 * d + mlp + d)
    embeddings = vocab * d * (1 if kind["tie_embeddings"] else 2) + (block * d if kind["position"] == "learned" else 0)
    assert sum(parameter.numel() for parameter in build(**kind).parameters()) == layers * layer + norm + embeddings


@pytest.mark.parametrize("vocab", [2, 11, 64, 256, 5000])
@pytest.mark.parametrize("d_model", [16, 128, 512])
@pytest.mark.parametrize("position", ["rotary", "learned"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_fresh_model_prefers_no_token(vocab, d_model, position, tie):
    torch.manual_seed(0)
    model = CausalLM(vocab, d_model, 2, 4, 64, position=position, tie_embeddings=tie)
    ids = ids_of(batch=16, time=65, vocab=vocab)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(vocab), rel=0.05)


def test_what_writes_to_the_residual_stream_starts_smaller_with_depth():
    torch.manual_seed(0)
    model = CausalLM(50, 128, 8, 4, 16)
    for block in model.blocks:
        for projection in (block.attention.o, block.mlp.down):
            assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
        assert block.attention.q.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_model_built_on_the_meta_device_is_initialized_where_it_lands():
    with torch.device("meta"):
        model = CausalLM(13, 12, 2, 3, 7, bias=True, norm="layer")
    model = model.to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight
    torch.manual_seed(0)
    model.init_weights()
    torch.manual_seed(0)
    direct = CausalLM(13, 12, 2, 3, 7, bias=True, norm="layer")
    direct_state = {name: value.std() if value.ndim > 1 else value for name, value in direct.state_dict().items()}
    for name, value in model.state_dict().items():
        if value.ndim > 1:
            assert value.std() == pytest.approx(direct_state[name], rel=0.5), name
        else:
            torch.testing.assert_close(value, direct_state[name], msg=name)


# ---- what happens to a model


@pytest.mark.parametrize(
    "carried", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda m: m.half()]
)
def test_embeddings_stay_tied_when_the_model_is_carried_elsewhere(carried):
    model = carried(CausalLM(13, 12, 1, 3, 7))
    assert model.head.weight is model.embedding.weight


def test_untied_embeddings_are_two_matrices():
    model = CausalLM(13, 12, 1, 3, 7, tie_embeddings=False)
    assert model.head.weight is not model.embedding.weight


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_agrees_with_float32_within_its_precision(kind):
    model = CausalLM(13, 12, 2, 3, 7, **kind).eval()
    ids = ids_of()
    with torch.no_grad():
        full = model(ids)
        half = model.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.02 * full.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_went_through_json_builds_the_same_model(kind):
    model = build(**kind)
    again = CausalLM.from_config(json.loads(json.dumps(model.config)))
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(ids_of()), model(ids_of()), rtol=0, atol=0)


def test_a_config_names_every_constructor_argument():
    model = CausalLM(13, 12, 1, 3, 7, d_mlp=5, dropout=0.25, position="learned", bias=True, norm="layer")
    assert model.config == {
        "vocab": 13,
        "d_model": 12,
        "n_layer": 1,
        "n_head": 3,
        "block": 7,
        "d_mlp": 5,
        "dropout": 0.25,
        "position": "learned",
        "tie_embeddings": True,
        "bias": True,
        "norm": "layer",
    }
    assert CausalLM(13, 12, 1, 3, 7).d_mlp == 48


def test_dropout_acts_in_training_and_not_in_evaluation():
    model, ids = build(dropout=0.5), ids_of()
    torch.testing.assert_close(model(ids), model(ids), rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(ids), model(ids))


# ---- what a parallel plan relies on


def test_rows_of_whole_heads_make_an_attention_of_fewer_heads():
    torch.manual_seed(0)
    whole = SelfAttention(12, 6, dropout=0.0, rotary=True, bias=False)
    x, positions = torch.randn(2, 5, 12), torch.arange(5)
    parts = []
    for rank in range(3):
        part = copy.deepcopy(whole)
        mine = slice(rank * 4, (rank + 1) * 4)
        for name in "qkv":
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight[mine])
        part.o.weight = nn.Parameter(whole.o.weight[:, mine])
        parts.append(part(x, positions))
    torch.testing.assert_close(sum(parts), whole(x, positions))


def test_attending_can_be_replaced():
    class Masked(nn.Module):
        def forward(self, q, k, v):
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
            return scores.masked_fill(later, -torch.inf).softmax(-1) @ v

    model, ids = build(), ids_of()
    expected = model(ids)
    for block in model.blocks:
        block.attention.attend = Masked()
    torch.testing.assert_close(model(ids), expected)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab": 0}, ValueError, "vocab=0 must be at least 1"),
        ({"d_model": 12.0}, TypeError, r"d_model=12\.0 must be an integer"),
        ({"n_layer": True}, TypeError, "n_layer=True must be an integer"),
        ({"block": "7"}, TypeError, "block='7' must be an integer"),
        ({"d_mlp": 0}, ValueError, "d_mlp=0 must be at least 1"),
        ({"n_head": 5}, ValueError, "n_head=5 must divide d_model=12; nearest that do: 4, 6$"),
        ({"n_head": 24}, ValueError, "n_head=24 must divide d_model=12; nearest that do: 12$"),
        ({"n_head": 4}, ValueError, 'position="rotary" needs heads of even width, and d_model=12 / n_head=4 is 3'),
        ({"dropout": 1.0}, ValueError, r"dropout=1\.0 must be below 1"),
        ({"dropout": -0.1}, ValueError, r"dropout=-0\.1 must be at least 0"),
        ({"dropout": float("nan")}, ValueError, "dropout=nan must be finite"),
        ({"position": "rotory"}, ValueError, "position='rotory' must be .*did you mean 'rotary'"),
        ({"norm": "batch"}, ValueError, "norm='batch' must be one of 'rms', 'layer'"),
        ({"tie_embeddings": "yes"}, TypeError, "tie_embeddings='yes' must be True or False"),
        ({"bias": 0}, TypeError, "bias=0 must be True or False"),
    ],
)
def test_arguments_that_make_no_model_are_refused_by_name_and_value(changes, error, message):
    arguments = {"vocab": 13, "d_model": 12, "n_layer": 1, "n_head": 3, "block": 7, **changes}
    with pytest.raises(error, match=message):
        CausalLM(**arguments)


def test_learned_positions_allow_heads_of_odd_width():
    assert CausalLM(13, 12, 1, 4, 7, position="learned")(ids_of()).shape == (3, 7, 13)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(1, 8, dtype=torch.int64), ValueError, "ids have 8 tokens; the model takes 1 to block=7"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, "ids have 0 tokens"),
        (torch.zeros(7, dtype=torch.int64), ValueError, r"ids must be \(batch, time\), not of shape \(7,\)"),
        (torch.zeros(1, 7), TypeError, r"ids must be int64, not torch\.float32"),
        (torch.zeros(1, 7, dtype=torch.int32), TypeError, r"ids must be int64, not torch\.int32"),
    ],
)
def test_ids_that_the_model_cannot_take_are_refused(ids, error, message):
    with pytest.raises(error, match=message):
        CausalLM(13, 12, 1, 3, 7)(ids)
