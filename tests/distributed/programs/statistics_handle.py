"""A mixture over records on the ranks of a job, against local EM; and what happens when one rank's part raises."""

from __future__ import annotations

import os
import time

from composite_mixture import ESTIMATOR, differences, fit, records
from torchrun import error_of, report

import mixle
from mixle.stats.gaussian import GaussianDistribution, GaussianEstimator
from mixle.utils.parallel.torchrun import TorchRunEncodedData

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
data = records(403)
results: dict[str, object] = {}
reference = fit(mixle.LocalEncodedData(data, estimator=ESTIMATOR))

with mixle.encoded_data(data, estimator=ESTIMATOR, backend="torchrun") as handle:
    model = fit(handle)
    results["model"] = model.to_json()
    results["difference"] = max(differences(model, reference))
    results["length"] = len(handle)
    results["sum"] = mixle.seq_log_density_sum(handle, model)
    results["rows here"] = sum(map(len, mixle.seq_log_density(handle, model)))
results["reference sum"] = mixle.seq_log_density_sum(mixle.seq_encode(data, model=model), model)

# Rank 0 holds nothing, the others split the rows unevenly.
edges = [0, 0, 5, 403][: world + 1]
edges[-1] = 403
with TorchRunEncodedData(data[edges[rank] : edges[rank + 1]], estimator=ESTIMATOR, shard_by_rank=False) as handle:
    results["uneven difference"] = max(differences(fit(handle), reference))
    results["uneven length"] = len(handle)

# Statistics about different points on different ranks still meet in one frame.
with TorchRunEncodedData([1e9 + rank, 1e9 + rank + 1], estimator=GaussianEstimator(), shard_by_rank=False) as handle:
    gaussian = mixle.seq_estimate(handle, GaussianEstimator())
    results["far from zero"] = [gaussian.mu - 1e9, gaussian.sigma2]

started = time.monotonic()
last = world - 1
bad = [float("nan")] if rank == last else [1.0]
results["bad row"] = error_of(TorchRunEncodedData, bad, estimator=GaussianEstimator(), shard_by_rank=False)


class Failing(GaussianEstimator):
    """Raises in the M-step, which runs on rank 0."""

    def estimate(self, nobs, suff_stat, previous=None):
        raise ZeroDivisionError("no such maximum")


class Refusing(GaussianDistribution):
    """Raises where rank ``last`` scores."""

    def seq_log_density(self, enc):
        if rank == last:
            raise LookupError("lost my notes")
        return super().seq_log_density(enc)


with TorchRunEncodedData([1.0 + rank], estimator=GaussianEstimator(), shard_by_rank=False) as handle:
    results["M-step"] = error_of(mixle.seq_estimate, handle, Failing())
    results["scoring"] = error_of(mixle.seq_log_density_sum, handle, Refusing(0, 1))
    different = GaussianDistribution(float(rank), 1.0)
    results["different models"] = error_of(mixle.seq_estimate, handle, GaussianEstimator(), different)
    results["usable"] = mixle.seq_estimate(handle, GaussianEstimator()).mu
results["prompt"] = time.monotonic() - started < 30

with TorchRunEncodedData([], estimator=GaussianEstimator()) as handle:
    results["empty"] = error_of(mixle.seq_estimate, handle, GaussianEstimator())
report(results)
