"""EM for a Gaussian mixture beside scikit-learn's, on equal work: the same rows, start and number of iterations.

    python tests/benchmarks/gaussian_mixture.py

Both sides run on one thread, in turns; times are CPU seconds, and the fastest of the rounds counts. The start has means
off the truth, unit variances and equal weights. scikit-learn gets it as weights, means and precisions, with
``reg_covar=0``; like ours, it then runs a fixed number of iterations.
"""

from __future__ import annotations

import os

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_threads] = "1"

import argparse  # noqa: E402  (the thread counts are read when NumPy is imported)
import platform  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402

import numpy as np  # noqa: E402
import sklearn  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.mixture import GaussianMixture  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import mixle  # noqa: E402
from mixle.stats.diagonal_gaussian import DiagonalGaussianDistribution, DiagonalGaussianEstimator  # noqa: E402
from mixle.stats.mixture import MixtureDistribution, MixtureEstimator  # noqa: E402
from mixle.stats.multivariate_gaussian import (  # noqa: E402
    MultivariateGaussianDistribution,
    MultivariateGaussianEstimator,
)


def rows(n: int, d: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows from ``k`` correlated clusters that overlap, and means to start from."""
    rng = np.random.default_rng(0)
    means = rng.normal(0, 2, (k, d))
    mixing = np.eye(d) + 0.3 * rng.normal(size=(k, d, d))
    group = rng.integers(k, size=n)
    x = means[group] + np.einsum("nij,nj->ni", mixing[group], rng.normal(size=(n, d)))
    return x, means + rng.normal(0, 0.5, (k, d))


def fit_mixle(chunks, start: np.ndarray, covariance: str, iterations: int):
    """Run EM; return the seconds and the mean log-density of the fitted model."""
    k, d = start.shape
    if covariance == "full":
        components = [MultivariateGaussianDistribution(m, np.eye(d)) for m in start]
        estimator = MixtureEstimator([MultivariateGaussianEstimator(d) for _ in range(k)])
    else:
        components = [DiagonalGaussianDistribution(m, np.ones(d)) for m in start]
        estimator = MixtureEstimator([DiagonalGaussianEstimator(d) for _ in range(k)])
    model = MixtureDistribution(components, np.full(k, 1 / k))
    began = time.process_time()
    for _ in range(iterations):
        model = mixle.seq_estimate(chunks, estimator, model)
    seconds = time.process_time() - began
    count, total = mixle.seq_log_density_sum(chunks, model)
    return seconds, total / count


def fit_sklearn(x: np.ndarray, start: np.ndarray, covariance: str, iterations: int):
    """Run EM; return the seconds and the mean log-density of the fitted model."""
    k, d = start.shape
    precisions = np.stack([np.eye(d)] * k) if covariance == "full" else np.ones((k, d))
    model = GaussianMixture(
        k,
        covariance_type=covariance,
        weights_init=np.full(k, 1 / k),
        means_init=start,
        precisions_init=precisions,
        reg_covar=0.0,
        tol=0.0,
        max_iter=iterations,
    )
    began = time.process_time()
    model.fit(x)
    return time.process_time() - began, model.score(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=10)
    parser.add_argument("--components", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    x, start = rows(args.rows, args.dim, args.components)

    print(f"mixle {mixle.__version__}, scikit-learn {sklearn.__version__}, numpy {np.__version__}, one thread")
    print(f"python {platform.python_version()} on {platform.platform()}, {processor()}")
    print(f"{args.iterations} EM iterations, n={args.rows}, d={args.dim}, k={args.components}, best of {args.rounds}")
    print(f"{'covariance':<12}{'mixle':>10}{'sklearn':>10}{'ratio':>8}{'log-likelihood difference':>28}")
    with threadpool_limits(1):
        for covariance, estimator in (("full", MultivariateGaussianEstimator()), ("diag", DiagonalGaussianEstimator())):
            chunks = mixle.seq_encode(x, estimator=MixtureEstimator([estimator]))
            ours, theirs = [], []
            for _ in range(args.rounds):
                theirs.append(fit_sklearn(x, start, covariance, args.iterations))
                ours.append(fit_mixle(chunks, start, covariance, args.iterations))
            (t, ll), (peer_t, peer_ll) = min(ours), min(theirs)
            gap = abs(ll - peer_ll) / abs(peer_ll)
            print(f"{covariance:<12}{t:>8.2f} s{peer_t:>8.2f} s{peer_t / t:>8.2f}{gap:>28.1e}")


def processor() -> str:
    """Return the processor's name and number, where the system tells."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


if __name__ == "__main__":
    main()
