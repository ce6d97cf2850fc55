"""Every family, and nestings of them, keep the contract."""

from __future__ import annotations

import inspect

import pytest
from contract_suite import contract
from family_cases import CASES

import mixle.stats


@pytest.mark.parametrize(("case", "check"), contract(CASES))
def test_contract(case, check):
    check(case)


def test_every_exported_distribution_has_a_case():
    exported = {
        name
        for name, item in vars(mixle.stats).items()
        if inspect.isclass(item) and name.endswith("Distribution") and not inspect.isabstract(item)
    }
    assert exported == {type(case.dist).__name__ for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_six_roles_are_exported_under_the_name_of_the_family(case):
    family = type(case.dist).__name__.removesuffix("Distribution")
    roles = ("Distribution", "Estimator", "Accumulator", "AccumulatorFactory", "DataEncoder", "Sampler")
    assert all(hasattr(mixle.stats, family + role) for role in roles)
    assert type(case.dist.estimator()).__name__ == family + "Estimator"
    assert type(case.dist.sampler(0)).__name__ == family + "Sampler"
    assert type(case.dist.dist_to_encoder()).__name__ == family + "DataEncoder"
