"""Components scored together agree with components scored one by one, wherever the data lies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mixle import seq_encode, seq_estimate
from mixle.stats import (
    DiagonalGaussianDistribution,
    GaussianDistribution,
    MixtureDistribution,
    MultivariateGaussianDistribution,
    PoissonDistribution,
)
from mixle.stats.component_stack import LinearStack, TurnStack, stack_components
from mixle.stats.mixture import row_blocks

COVAR = np.array([[2.0, 1.2], [1.2, 1.0]])


def mixture(kind, shift=0.0, scale=1.0):
    means = shift + scale * np.array([[0.0, 0.0], [3.0, -1.0], [-2.0, 4.0]])
    match kind:
        case "full":
            parts = [MultivariateGaussianDistribution(m, COVAR * scale**2) for m in means]
        case "diagonal":
            parts = [DiagonalGaussianDistribution(m, np.diagonal(COVAR) * scale**2) for m in means]
        case "scalar":
            parts = [GaussianDistribution(m[0], 2.0 * scale**2) for m in means]
    return MixtureDistribution(parts, [0.5, 0.25, 0.25])


def stacks(model, data):
    """Return the stack that is chosen, one that takes turns, and the encodings for both."""
    enc = seq_encode(data, model=model)[0][1]
    encs = [enc.parts[0]] * len(model.components)
    return stack_components(model.components, model.log_w, encs), TurnStack(model.components, model.log_w, encs), encs


KINDS = pytest.mark.parametrize("kind", ["full", "diagonal", "scalar"])


@KINDS
@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (1e8, 1.0), (-1e3, 1e-6), (0.0, 1e40), (1e15, 1e10)])
def test_linear_kernels_score_as_the_components_do(kind, shift, scale):
    model = mixture(kind, shift, scale)
    linear, turns, encs = stacks(model, np.array(model.sampler(0).sample(400)))
    assert isinstance(linear, LinearStack)
    np.testing.assert_allclose(linear.score(encs)[0], turns.score(encs)[0], rtol=1e-10, atol=1e-10)


@KINDS
def test_components_too_narrow_for_their_distance_take_turns(kind):
    model = mixture(kind)
    narrow = MixtureDistribution([*model.components[:2], type(model.components[0]).from_dict(far(model))], model.w)
    assert isinstance(stacks(narrow, np.array(model.sampler(0).sample(50)))[0], TurnStack)


def far(model):
    """Return the last component moved away and narrowed, as a dict."""
    payload = model.components[-1].to_dict()
    payload["mu"] = (np.array(payload["mu"]) + 1e4).tolist()
    spread = "sigma2" if "sigma2" in payload else "covar"
    payload[spread] = (np.array(payload[spread]) * 1e-4).tolist()
    return payload


@pytest.mark.parametrize(
    "parts",
    [
        [PoissonDistribution(1.0), PoissonDistribution(2.0)],
        [GaussianDistribution(0, 1), PoissonDistribution(2.0)],
        [GaussianDistribution(0, 1), MixtureDistribution([GaussianDistribution(0, 1)], [1.0])],
    ],
    ids=["no kernel", "unlike families", "a mixture inside"],
)
def test_components_without_a_common_kernel_take_turns(parts):
    model = MixtureDistribution(parts, [0.5, 0.5])
    enc = seq_encode([0, 1, 2], model=model)[0][1]
    stack = stack_components(model.components, model.log_w, [enc.parts[i] for i in model.dist_to_encoder().part_of])
    assert isinstance(stack, TurnStack)


@KINDS
@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_em_by_linear_kernels_is_em(kind, shift):
    """Compare with EM written out on the same data moved to the origin."""
    data = np.array(mixture(kind).sampler(1).sample(3000)).reshape(3000, -1)
    model = mixture(kind, shift)
    chunks = seq_encode(data + shift if kind != "scalar" else (data + shift)[:, 0], model=model)
    mu = np.array([np.atleast_1d(c.mu) for c in mixture(kind).components])
    covar = np.array([covariance(c) for c in model.components])
    w = model.w
    for _ in range(4):
        model = seq_estimate(chunks, model.estimator(), model)
        w, mu, covar = reference_step(data, w, mu, covar, diagonal=kind == "diagonal")
    np.testing.assert_allclose(model.w, w, rtol=1e-6)
    np.testing.assert_allclose([np.atleast_1d(c.mu) - shift for c in model.components], mu, atol=1e-6)
    np.testing.assert_allclose([covariance(c) for c in model.components], covar, rtol=1e-6, atol=1e-6)


def covariance(component):
    if isinstance(component, GaussianDistribution):
        return np.array([[component.sigma2]])
    return component.covar if component.covar.ndim == 2 else np.diag(component.covar)


def reference_step(x, w, mu, covar, *, diagonal):
    """One EM step, densities and moments written out."""
    density = np.empty((len(w), len(x)))
    for j, (m, c) in enumerate(zip(mu, covar, strict=True)):
        gap = x - m
        density[j] = (
            w[j] * np.exp(-0.5 * np.sum(gap @ np.linalg.inv(c) * gap, axis=1)) / np.sqrt(np.linalg.det(2 * np.pi * c))
        )
    share = density / density.sum(axis=0)
    mass = share.sum(axis=1)
    mu = share @ x / mass[:, None]
    covar = np.array([((x - m).T * r) @ (x - m) / r.sum() for m, r in zip(mu, share, strict=True)])
    if diagonal:
        covar = np.array([np.diag(np.diagonal(c)) for c in covar])
    return mass / mass.sum(), mu, covar


def test_blocks_cover_all_rows_once():
    for n in (1, 63, 64, 1000, 100_000):
        bounds = list(row_blocks(n, 300.0))
        assert bounds[0][0] == 0 and bounds[-1][1] == n
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert list(row_blocks(0, 300.0)) == [(0, 0)]
    assert max(b - a for a, b in row_blocks(10**6, 1e9)) == 64
