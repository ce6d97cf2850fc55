"""The objectives of distillation against numbers that were computed another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from torch import nn

from mixle.data.teacher.specs import BatchConfig
from mixle.training.distillation import Distillation, HiddenStates, SoftLabels

CPU = torch.device("cpu")


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32))


def config(*tensors: tuple[str, tuple[int, ...], str]) -> BatchConfig:
    return BatchConfig([{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in tensors])


class TestSoftLabels:
    @settings(max_examples=50, deadline=None)
    @given(seed=st.integers(0, 2**16), temperature=st.floats(0.5, 20), classes=st.integers(1, 9))
    def test_the_loss_is_the_divergence_of_the_softened_distributions_times_the_squared_temperature(
        self, seed, temperature, classes
    ):
        student, teacher = logits(seed, 3, 4, classes), logits(seed + 1, 3, 4, classes)
        p, q = (softmax(x.double().numpy() / temperature, axis=-1) for x in (teacher, student))
        expected = rel_entr(p, q).sum(-1) * temperature**2
        found = SoftLabels(temperature).losses(student, teacher)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * temperature**2)

    def test_its_gradient_is_the_difference_of_the_distributions_times_the_temperature(self):
        student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 7)
        SoftLabels(4.0).losses(student, teacher).sum().backward()
        expected = 4.0 * (softmax(student.detach() / 4.0, axis=-1) - softmax(teacher / 4.0, axis=-1))
        np.testing.assert_allclose(student.grad, expected, atol=1e-6)

    def test_log_probabilities_serve_as_well_as_logits(self):
        student, teacher = logits(0, 5, 7), logits(1, 5, 7)
        found = SoftLabels(3.0).losses(student, teacher.log_softmax(-1))
        torch.testing.assert_close(found, SoftLabels(3.0).losses(student, teacher))

    def test_a_class_that_the_teacher_excludes_adds_nothing_and_is_pushed_away(self):
        student, teacher = logits(0, 1, 3).requires_grad_(), torch.tensor([[0.0, 0.0, -torch.inf]])
        loss = SoftLabels().losses(student, teacher).sum()
        loss.backward()
        q = softmax(student.detach().double().numpy(), axis=-1)[0]
        assert loss.item() == pytest.approx(rel_entr([0.5, 0.5, 0.0], q).sum(), rel=1e-5)
        np.testing.assert_allclose(student.grad[0], q - [0.5, 0.5, 0.0], atol=1e-6)

    def test_half_precision_is_computed_in_single(self):
        student, teacher = logits(0, 5, 7).bfloat16(), logits(1, 5, 7).half()
        found = SoftLabels().losses(student, teacher)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, SoftLabels().losses(student.float(), teacher.float()))

    @pytest.mark.parametrize("temperature", [0, -1.0, float("inf"), True, "2"])
    def test_a_temperature_that_is_not_a_positive_number_is_refused_by_name(self, temperature):
        with pytest.raises((TypeError, ValueError), match="temperature"):
            SoftLabels(temperature)


def test_hidden_states_are_compared_by_the_mean_squared_difference_over_their_width():
    student, teacher = logits(0, 2, 3, 5), logits(1, 2, 3, 5)
    expected = ((student - teacher).double().numpy() ** 2).mean(-1)
    np.testing.assert_allclose(HiddenStates().losses(student, teacher), expected, rtol=1e-5)


class TestBatches:
    CONFIG = config(("x", (4,), "float32"), ("y", (3, 2), "float16"), ("use", (3,), "bool"))

    def test_places_are_the_rows_of_the_targets(self):
        task = Distillation(HiddenStates(), "x", "y")
        assert task.places({"x": torch.zeros(5, 4), "y": torch.zeros(5, 3, 2)}) == 15

    def test_a_mask_leaves_out_places_from_the_count_and_from_the_sum(self):
        task = Distillation(HiddenStates(), "x", "y", "use")
        use = torch.tensor([[True, False, True], [False, False, True]])
        tensors = {"x": torch.zeros(2, 4), "y": logits(3, 2, 3, 2), "use": use}
        answer = nn.Linear(4, 6)
        batch = task.batch(tensors, CPU)
        expected = HiddenStates().losses(answer(tensors["x"]).view(2, 3, 2), tensors["y"])[use].sum()
        assert task.places(tensors) == 3
        torch.testing.assert_close(task.loss_sum(lambda x: answer(x).view(2, 3, 2), batch), expected)

    def test_floats_in_host_memory_are_not_copied_and_integers_become_int64(self):
        task = Distillation(SoftLabels(), "ids", "logits")
        tensors = {"ids": torch.zeros(2, 3, dtype=torch.int16), "logits": torch.zeros(2, 3, 5)}
        batch = task.batch(tensors, CPU)
        assert batch.inputs.dtype == torch.int64
        assert batch.targets.data_ptr() == tensors["logits"].data_ptr()

    def test_a_target_that_is_one_number_is_one_place(self):
        task = Distillation(HiddenStates(), "x", "value")
        tensors = {"x": logits(0, 6, 4), "value": logits(1, 6)}
        layer = nn.Linear(4, 1)
        expected = (layer(tensors["x"])[:, 0] - tensors["value"]).square().sum()
        assert task.places(tensors) == 6
        torch.testing.assert_close(task.loss_sum(layer, task.batch(tensors, CPU)), expected)

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            (("z", "y", None), r"inputs='z' is no tensor of the samples; there are \['x', 'y', 'use'\]"),
            (("x", "logits", None), "targets='logits' is no tensor of the samples"),
            (("x", "use", None), "targets='use' is bool, and a distillation has targets of floats"),
            (("x", "y", "x"), r"mask='x' is float32 of shape \(4,\); targets of shape \(3, 2\) take bool of \(3,\)"),
        ],
    )
    def test_names_that_do_not_fit_the_samples_are_refused(self, names, told):
        with pytest.raises(ValueError, match=told):
            Distillation(HiddenStates(), *names).require_config(self.CONFIG)

    def test_a_module_of_another_shape_is_refused_with_both_shapes(self):
        task = Distillation(HiddenStates(), "x", "y")
        with pytest.raises(ValueError, match=r"'x' of shape \(1, 4\) to \(1, 5\), but targets 'y' have \(1, 3, 2\)"):
            task.require_fits(nn.Linear(4, 5), task.blank(self.CONFIG, 2, CPU))

    def test_a_module_that_returns_no_tensor_is_refused(self):
        class Pair(nn.Module):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return x, x

        task = Distillation(HiddenStates(), "x", "y")
        with pytest.raises(TypeError, match="Pair returned a tuple, not a tensor"):
            task.require_fits(Pair(), task.blank(self.CONFIG, 2, CPU))

    @pytest.mark.parametrize("loss", [None, SoftLabels, 2.0])
    def test_what_is_no_loss_is_refused(self, loss):
        with pytest.raises(TypeError, match="loss="):
            Distillation(loss, "x", "y")
