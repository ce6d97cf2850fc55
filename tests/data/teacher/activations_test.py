import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mixle.data.teacher.activations import ModelActivations, ModuleInputs


class Steps(nn.Module):
    """Three layers, an in-place ReLU after the first, and a record of what ran."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.ran = []
        for name, layer in self.named_children():
            layer.register_forward_hook(lambda *_, name=name: self.ran.append(name))

    def forward(self, x, scale=1.0):
        return self.third(self.second(self.relu(self.first(x))) * scale)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Steps()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def hooks_of(model):
    return [
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_with_kwargs)
    ]


# ---- what is captured


def test_outputs_are_what_the_module_returned_before_a_later_module_changed_it_in_place(model):
    captured = ModelActivations(model, outputs=["first"]).run(X)
    assert torch.equal(captured.outputs["first"], model.first(X))
    assert (captured.outputs["first"] < 0).any()


def test_inputs_are_what_the_module_was_called_with(model):
    captured = ModelActivations(model, inputs=["second", ""]).run(X, scale=2.0)
    assert torch.equal(captured.inputs["second"].args[0], model.relu(model.first(X)))
    assert captured.inputs[""] == ModuleInputs((captured.inputs[""].args[0],), {"scale": 2.0})


def test_copies_carry_no_graph_and_share_no_memory(model):
    output = ModelActivations(model, outputs=["first", "third"], stop=False).run(X.clone().requires_grad_())
    for tensor in output.outputs.values():
        assert not tensor.requires_grad
    assert output.result.data_ptr() != output.outputs["third"].data_ptr()
    assert torch.equal(output.result, output.outputs["third"])


def test_the_tensors_themselves_are_taken_when_asked_for(model):
    captured = ModelActivations(model, outputs=["third"], copy=False).run(X)
    captured.outputs["third"].sum().backward()
    assert model.first.weight.grad is not None
    kept = ModelActivations(model, outputs=["first"], copy=False, stop=False).run(X)
    assert not (kept.outputs["first"] < 0).any()  # the in-place ReLU's work shows


def test_tensors_are_moved_to_the_device_asked_for(model):
    captured = ModelActivations(model, outputs=["first"], inputs=["first"], device="meta").run(X)
    assert captured.outputs["first"].device.type == "meta"
    assert captured.inputs["first"].args[0].device.type == "meta"


Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Box:
    hidden: torch.Tensor
    note: str


class Nested(nn.Module):
    def forward(self, x):
        return {"pair": Pair(x, [x, None]), "tuple": (x, 1, "one"), "box": Box(x, "kept")}


def test_tensors_within_containers_are_copied_and_the_containers_keep_their_kind():
    model = nn.Sequential(nn.Identity(), Nested())
    x = X.clone()
    output = ModelActivations(model, outputs=["1"]).run(x).outputs["1"]
    x.zero_()
    assert isinstance(output["pair"], Pair)
    assert output["pair"].b[1] is None
    assert output["tuple"][1:] == (1, "one")
    assert output["box"].note == "kept"
    for tensor in (output["pair"].a, output["pair"].b[0], output["tuple"][0], output["box"].hidden):
        assert torch.equal(tensor, X)


class Odd(nn.Module):
    def forward(self, x):
        return iter([x])


def test_what_cannot_be_copied_is_refused_by_the_name_of_its_module():
    model = nn.Sequential(Odd())
    with pytest.raises(TypeError, match="module '0' has a list_iterator there, which is not copied; give copy=False"):
        ModelActivations(model, outputs=["0"]).run(X)
    assert next(ModelActivations(model, outputs=["0"], copy=False).run(X).outputs["0"]) is X


# ---- how much of the model runs


def test_the_forward_stops_at_the_deepest_module_asked_for(model):
    captured = ModelActivations(model, outputs=["first"], inputs=["second"]).run(X)
    assert model.ran == ["first", "relu"]
    assert captured.result is None
    assert captured.outputs.keys() == {"first"}


def test_the_whole_forward_runs_when_asked_for(model):
    captured = ModelActivations(model, outputs=["first"], stop=False).run(X)
    assert model.ran == ["first", "relu", "second", "third"]
    assert torch.equal(captured.result, model(X))


def test_a_model_that_catches_exceptions_does_not_catch_the_stop():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            try:
                self.inner(x)
            except Exception:
                pytest.fail("the model saw the stop")
            pytest.fail("the model went on")

    model = Stubborn()
    assert ModelActivations(model, outputs=["inner"]).run(X).outputs["inner"].shape == (3, 4)


def test_an_error_of_the_model_is_the_callers_and_leaves_no_hooks(model):
    before = hooks_of(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ModelActivations(model, outputs=["third"]).run(torch.zeros(3, 5))
    assert hooks_of(model) == before


def test_an_inner_captures_stop_ends_only_the_inner_pass(model):
    inner = ModelActivations(model, outputs=["first"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Identity()

        def forward(self, x):
            return self.last(inner.run(x).outputs["first"] + 1)

    captured = ModelActivations(Outer(), outputs=["last"]).run(X)
    assert torch.equal(captured.outputs["last"], model.first(X) + 1)


def test_modules_that_did_not_run_are_named(model):
    model.unused = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match=r"did not run outputs\['unused'\], inputs\['unused'\]"):
        ModelActivations(model, outputs=["first", "unused"], inputs=["unused"]).run(X)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Identity()

    def forward(self, x):
        return self.last(self.layer(self.layer(x)))


def test_the_first_call_of_a_module_that_runs_twice_is_captured():
    model = Twice()
    captured = ModelActivations(model, outputs=["layer", "last"]).run(X)
    assert torch.equal(captured.outputs["layer"], model.layer(X))


def test_every_call_is_captured_when_asked_for():
    model = Twice()
    captured = ModelActivations(model, outputs=["layer"], inputs=["layer"], every_call=True).run(X)
    once = model.layer(X)
    assert torch.equal(torch.stack(captured.outputs["layer"]), torch.stack([once, model.layer(once)]))
    assert torch.equal(torch.stack([each.args[0] for each in captured.inputs["layer"]]), torch.stack([X, once]))
    assert torch.equal(captured.result, model(X))


# ---- hooks


def test_the_model_has_hooks_only_while_it_is_captured(model):
    before = hooks_of(model)
    capture = ModelActivations(model, outputs=["first"], inputs=["third"])
    assert hooks_of(model) == before
    capture.run(X)
    assert hooks_of(model) == before
    with capture:
        assert hooks_of(model) != before
    assert hooks_of(model) == before


def test_within_a_with_block_calls_of_the_model_run_whole_and_the_latest_is_kept(model):
    with ModelActivations(model, outputs=["first"]) as capture:
        for scale in (1, 2):
            result = model(X * scale)
            assert torch.equal(capture.latest.outputs["first"], model.first(X * scale))
        assert torch.equal(result, model(X * 2))
        assert capture.run(X).result is None
    with pytest.raises(RuntimeError, match="captures already"), capture, capture:
        pass


def test_a_pass_that_was_stopped_leaves_no_tensors_behind(model):
    alive = []
    model.first.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    gc.disable()
    try:
        capture = ModelActivations(model, outputs=["second"])
        capture.run(X)
        assert alive[0]() is None
    finally:
        gc.enable()


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "nothing is asked for"),
        (
            {"outputs": ["frist"]},
            ValueError,
            "outputs names 'frist', .*; near it are 'first'",
        ),
        ({"inputs": ["zzz"]}, ValueError, "inputs names 'zzz', which no module of the model is$"),
        ({"outputs": "first"}, TypeError, r"outputs='first' must be a sequence of names: \['first'\]"),
        ({"outputs": [3]}, TypeError, "outputs has 3, which is not the name of a module"),
        ({"outputs": ["first"], "copy": 1}, TypeError, "copy=1 must be True or False"),
        ({"outputs": ["first"], "stop": "no"}, TypeError, "stop='no' must be True or False"),
        ({"outputs": ["first"], "every_call": 0}, TypeError, "every_call=0 must be True or False"),
    ],
)
def test_arguments_that_name_nothing_are_refused(model, arguments, error, message):
    with pytest.raises(error, match=message):
        ModelActivations(model, **arguments)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="must be a torch module, not function"):
        ModelActivations(lambda x: x, outputs=["first"])
