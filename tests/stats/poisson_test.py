"""The Poisson log-density at means from one to far beyond where its terms cancel."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest

from mixle.stats import PoissonDistribution


def exact_log_density(x: int, lam: float) -> float:
    """Return ``x log(lam) - lam - log(x!)`` from decimals of 90 digits; Stirling's series from 1000 on."""
    with localcontext(prec=90):
        n, mean = Decimal(x), Decimal(lam)
        if x < 1000:
            log_factorial = Decimal(math.factorial(x)).ln()
        else:
            pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803483")
            series = 1 / (12 * n) - 1 / (360 * n**3) + 1 / (1260 * n**5) - 1 / (1680 * n**7)
            log_factorial = n * n.ln() - n + (2 * pi * n).ln() / 2 + series
        return float(n * mean.ln() - mean - log_factorial)


@pytest.mark.parametrize("lam", [0.25, 3.0, 255.5, 256.0, 256.5, 300.25, 1e4, 1e6, 1e12, 1e15, 2.0**62])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.81, 0.82, 0.999, 1.0, 1.0001, 1.2, 1.23, 2.0, math.e, 1e3])
def test_the_log_density_is_exact_whatever_the_mean(lam: float, ratio: float) -> None:
    x = int(lam * ratio)
    exact = exact_log_density(x, lam)
    assert PoissonDistribution(lam).log_density(x) == pytest.approx(exact, rel=1e-13, abs=1e-12)


@pytest.mark.parametrize("x", range(20))
def test_small_counts_are_exact_at_a_large_mean(x: int) -> None:
    assert PoissonDistribution(300.0).log_density(x) == pytest.approx(exact_log_density(x, 300.0), rel=1e-14)
