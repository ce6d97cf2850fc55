"""The base classes of the contract: serialization by name, and M-steps with and without a previous model."""

from __future__ import annotations

import pytest

from mixle.stats import (
    GaussianDistribution,
    GaussianEstimator,
    ParameterEstimator,
    PoissonDistribution,
    ProbabilityDistribution,
)
from mixle.stats.contract import m_step


class Silent(ProbabilityDistribution):
    """A distribution of another library that defines no more than it must."""

    def seq_log_density(self, enc):
        return 0.0 * enc

    def sampler(self, seed=None):
        raise NotImplementedError

    def estimator(self, pseudo_count=None):
        raise NotImplementedError

    def dist_to_encoder(self):
        raise NotImplementedError


class Forgetful(ParameterEstimator):
    """An estimator whose M-step has no use for a previous model."""

    def accumulator_factory(self):
        raise NotImplementedError

    def estimate(self, nobs, suff_stat):
        return PoissonDistribution(suff_stat / nobs)


def test_own_classes_are_serialized_by_bare_names_and_others_by_qualified_ones():
    assert GaussianDistribution(0, 1).to_dict()["type"] == "GaussianDistribution"
    assert Silent.type_name() == f"{Silent.__module__}:Silent"


def test_a_distribution_that_defines_no_parameters_cannot_be_serialized():
    with pytest.raises(TypeError, match="Silent does not define parameters_to_dict"):
        Silent().to_json()
    with pytest.raises(TypeError, match="Silent does not define parameters_from_dict"):
        ProbabilityDistribution.from_dict({"type": Silent.type_name()})
    assert Silent().repairs == ()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (3, "payload must be a dict with a 'type' name, got 3"),
        ({"mu": 0}, "payload must be a dict with a 'type' name"),
        ({"type": ["a"]}, "payload must be a dict with a 'type' name"),
        ({"type": "os:system"}, "names the type 'os:system', which no imported module defines"),
        ({"type": "GaussianDistribution", "mu": 0.0}, "payload of a GaussianDistribution lacks 'sigma2'"),
    ],
)
def test_what_is_no_distribution_is_refused(payload, message):
    with pytest.raises(ValueError, match=message):
        ProbabilityDistribution.from_dict(payload)


def test_a_class_reads_only_its_own_kind():
    text = PoissonDistribution(2.0).to_json()
    assert PoissonDistribution.from_json(text).lam == 2.0
    with pytest.raises(ValueError, match="payload holds a PoissonDistribution, not a GaussianDistribution"):
        GaussianDistribution.from_json(text)


def test_an_m_step_hands_over_the_previous_model_only_where_it_is_taken():
    assert m_step(Forgetful(), 2.0, 6.0, PoissonDistribution(1.0)).lam == 3.0
    kept = m_step(
        GaussianEstimator(), 0.0, GaussianEstimator().accumulator_factory().make().value(), GaussianDistribution(7, 1)
    )
    assert kept.mu == 7.0
