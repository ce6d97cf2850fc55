"""The pool of workers: equal to local EM for any number of workers, and honest when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from composite_mixture import ESTIMATOR, differences, fit, records

import mixle
from mixle.stats.gaussian import GaussianDistribution, GaussianEstimator
from mixle.utils.parallel.multiprocessing import MultiprocessingEncodedData


def pool(data, estimator, **options):
    return MultiprocessingEncodedData(data, estimator=estimator, start_method="fork", **options)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_mixture_over_records_equals_local_em(workers):
    data = records(403)
    reference = fit(mixle.LocalEncodedData(data, estimator=ESTIMATOR))
    with pool(data, ESTIMATOR, num_workers=workers) as handle:
        model = fit(handle)
        assert max(differences(model, reference)) < 1e-9
        count, total = mixle.seq_log_density_sum(handle, model)
        densities = np.concatenate(mixle.seq_log_density(handle, model))
        assert len(handle) == count == len(densities) == 403
    local = mixle.seq_encode(data, model=model)
    assert total == pytest.approx(mixle.seq_log_density_sum(local, model)[1], rel=1e-12)
    assert densities == pytest.approx(mixle.seq_log_density(local, model)[0], rel=1e-12)


def test_workers_without_rows_change_nothing():
    data = records(3)
    reference = fit(mixle.LocalEncodedData(data, estimator=ESTIMATOR), iterations=3)
    with pool(data, ESTIMATOR, num_workers=5) as handle:
        assert max(differences(fit(handle, iterations=3), reference)) < 1e-9


def test_spawned_workers_fit_alike():
    data = records(50)
    with mixle.encoded_data(data, estimator=ESTIMATOR, backend="multiprocessing", num_workers=2) as handle:
        model = fit(handle, iterations=3)
    reference = fit(mixle.LocalEncodedData(data, estimator=ESTIMATOR), iterations=3)
    assert max(differences(model, reference)) < 1e-9


def test_data_that_one_worker_refuses_is_refused_with_its_error():
    with pytest.raises(ValueError, match="NaN at index 1"):
        pool([0.0, 1.0, 2.0, float("nan")], GaussianEstimator(), num_workers=2)


def test_no_data_at_all_is_refused_by_name():
    with pool([], GaussianEstimator(), num_workers=2) as handle, pytest.raises(ValueError, match="empty"):
        mixle.seq_estimate(handle, GaussianEstimator())


class Refusing:
    """A model that cannot score."""

    def seq_log_density(self, enc):
        raise ArithmeticError("no score today")


def test_an_error_in_the_workers_leaves_the_pool_usable():
    with pool([1.0, 2.0, 3.0], GaussianEstimator(), num_workers=2) as handle:
        with pytest.raises(ArithmeticError, match="no score today"):
            mixle.seq_log_density_sum(handle, Refusing())
        assert mixle.seq_estimate(handle, GaussianEstimator()).mu == pytest.approx(2.0)


def test_a_killed_worker_is_named_and_nothing_is_left_running():
    handle = pool([1.0, 2.0, 3.0], GaussianEstimator(), num_workers=3)
    processes = list(handle._processes)
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[1].join(timeout=10)
    with pytest.raises(RuntimeError, match=rf"worker 1 \(pid {processes[1].pid}\) ended with exit code -9"):
        mixle.seq_estimate(handle, GaussianEstimator())
    assert not any(p.is_alive() for p in processes)
    with pytest.raises(RuntimeError, match="closed; build a new one"):
        mixle.seq_estimate(handle, GaussianEstimator())


class Sleeping:
    """A model that scores too slowly."""

    def seq_log_density(self, enc):
        time.sleep(60)


def test_workers_that_miss_the_deadline_are_named():
    handle = pool([1.0, 2.0], GaussianEstimator(), num_workers=2)
    handle.deadline_s = 0.2
    with pytest.raises(RuntimeError, match=r"workers 0, 1 did not answer log_density_sum within deadline_s=0\.2"):
        mixle.seq_log_density_sum(handle, Sleeping())


class Unsendable:
    """A model whose scores cannot cross a pipe."""

    def seq_log_density(self, enc):
        return [lambda: None] * len(enc)


def test_an_answer_that_cannot_be_sent_is_an_error_not_a_dead_worker():
    with pool([1.0], GaussianEstimator(), num_workers=1) as handle:
        with pytest.raises(RuntimeError, match="cannot be sent"):
            mixle.seq_log_density(handle, Unsendable())
        assert mixle.seq_estimate(handle, GaussianEstimator()).mu == 1.0


def test_a_script_without_a_main_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(
            """
            from mixle.stats.gaussian import GaussianEstimator
            from mixle.utils.parallel.multiprocessing import MultiprocessingEncodedData

            MultiprocessingEncodedData([1.0], estimator=GaussianEstimator(), num_workers=1)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "under `if __name__" in done.stderr


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_workers": 0}, ValueError, "num_workers=0"),
        ({"num_workers": 1.5}, TypeError, "num_workers=1.5"),
        ({"start_method": "frok"}, ValueError, "start_method='frok'.*did you mean 'fork'"),
        ({"deadline_s": 0}, ValueError, "deadline_s"),
    ],
)
def test_bad_options_are_refused_before_a_process_starts(options, error, words):
    with pytest.raises(error, match=words):
        MultiprocessingEncodedData([1.0], estimator=GaussianEstimator(), **options)


def test_closing_twice_is_harmless():
    handle = pool([1.0], GaussianEstimator(), num_workers=1)
    handle.close()
    handle.close()
    with pytest.raises(RuntimeError, match="closed"):
        mixle.seq_log_density_sum(handle, GaussianDistribution(0, 1))
