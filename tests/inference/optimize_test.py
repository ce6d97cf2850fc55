"""The loops over the dispatch: convergence, restarts, history, and what they refuse."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from mixle import LocalEncodedData, best_of, optimize, seq_encode, seq_log_density_sum
from mixle.inference.progress import ProgressLine
from mixle.stats.categorical import CategoricalDistribution, CategoricalEstimator
from mixle.stats.composite import CompositeEstimator
from mixle.stats.gaussian import GaussianDistribution, GaussianEstimator
from mixle.stats.mixture import MixtureDistribution, MixtureEstimator


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(0, 1, 300), rng.normal(6, 0.5, 150)])


PAIR = MixtureEstimator([GaussianEstimator(), GaussianEstimator()])


def test_a_single_gaussian_gets_its_closed_form(values):
    model = optimize(values, GaussianEstimator(), rng=0)
    assert model.mu == pytest.approx(values.mean(), rel=1e-12)
    assert model.sigma2 == pytest.approx(values.var(), rel=1e-12)


def test_a_mixture_finds_both_clusters(values):
    model = optimize(values, PAIR, rng=3, max_its=500, delta=1e-10)
    assert sorted(c.mu for c in model.components) == pytest.approx([0, 6], abs=0.2)


def test_the_history_holds_the_log_density_of_every_model(values):
    model = optimize(values, PAIR, rng=3, max_its=7, delta=None)
    history = model.fit_history
    count, total = seq_log_density_sum(seq_encode(values, model=model), model)
    assert len(history.iterations) == 8
    assert history.log_density[-1] == pytest.approx(total / count, rel=1e-12)
    assert all(b >= a - 1e-9 * abs(a) for a, b in zip(history.log_density, history.log_density[1:], strict=False))
    seconds = [i.seconds for i in history.iterations]
    assert seconds == sorted(seconds)


def test_it_stops_when_the_gain_falls_below_delta(values):
    history = optimize(values, PAIR, rng=3, max_its=500, delta=1e-3).fit_history
    gains = np.diff(history.log_density)
    assert history.converged
    assert gains[-1] < 1e-3
    assert (gains[1:-1] >= 1e-3).all()


def test_running_out_of_iterations_is_not_convergence(values):
    assert not optimize(values, PAIR, rng=3, max_its=2, delta=1e-12).fit_history.converged


def test_no_iteration_returns_the_starting_model(values):
    start = MixtureDistribution([GaussianDistribution(0, 1), GaussianDistribution(6, 1)], [0.5, 0.5])
    assert optimize(values, PAIR, prev_estimate=start, max_its=0) is start


def test_the_same_seed_gives_the_same_model(values):
    assert optimize(values, PAIR, rng=5).to_json() == optimize(values, PAIR, rng=5).to_json()


def test_data_and_a_handle_give_the_same_model(values):
    handle = LocalEncodedData(values, estimator=PAIR)
    assert optimize(None, PAIR, enc_data=handle, rng=5).to_json() == optimize(values, PAIR, rng=5).to_json()


def test_a_start_that_violates_a_tie_does_not_come_back_as_the_result():
    estimator = CompositeEstimator([GaussianEstimator(keys="shared"), GaussianEstimator(keys="shared")])
    data = [(0.0, 4.0), (0.2, 4.4)]
    untied = optimize(data, CompositeEstimator([GaussianEstimator(), GaussianEstimator()]), rng=0)
    tied = optimize(data, estimator, prev_estimate=untied)
    assert [d.mu for d in tied.dists] == pytest.approx([2.15, 2.15])
    assert [d.sigma2 for d in tied.dists] == pytest.approx([4.2275, 4.2275])


def test_validation_data_chooses_the_model_that_is_returned(values):
    held_out = values[::7]
    model = optimize(values, PAIR, rng=3, max_its=50, delta=None, vdata=held_out)
    scores = [i.validation for i in model.fit_history.iterations]
    count, total = seq_log_density_sum(seq_encode(held_out, model=model), model)
    assert total / count == pytest.approx(max(scores), rel=1e-12)
    assert model.fit_history.best == int(np.argmax(scores))


def test_the_best_of_several_starts_is_returned(values):
    model = best_of(values, PAIR, trials=5, rng=1, max_its=5)
    scores = [trial.score for trial in model.fit_history.trials]
    assert len(scores) == 5
    assert model.fit_history.score == max(scores)


def test_the_init_estimator_makes_the_starting_model(values):
    def means(init):
        start = optimize(values, PAIR, init_estimator=init, rng=2, max_its=0)
        return [c.mu for c in start.components]

    held = GaussianEstimator(pseudo_count=1e9, suff_stat=(-3.0, 1.0))
    assert means(MixtureEstimator([held, GaussianEstimator()]))[0] == pytest.approx(-3.0, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"estimator": None}, TypeError, "estimator"),
        ({"max_its": -1}, ValueError, "max_its"),
        ({"max_its": True}, TypeError, "max_its"),
        ({"delta": -1e-3}, ValueError, "delta"),
        ({"delta": math.nan}, ValueError, "delta"),
        ({"init_p": 0}, ValueError, "0"),
        ({"progress": 1}, TypeError, "progress"),
        ({"enc_data": []}, ValueError, "not both"),
        ({"data": None}, ValueError, "data or enc_data"),
        ({"data": []}, ValueError, "empty"),
        ({"data": [], "prev_estimate": GaussianDistribution(0, 1)}, ValueError, "empty"),
        ({"rng": "seed"}, TypeError, "rng"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        optimize(**{"data": [1.0, 2.0], "estimator": GaussianEstimator(), **options})


def test_best_of_refuses_no_trials():
    with pytest.raises(ValueError, match="trials=0"):
        best_of([1.0], GaussianEstimator(), trials=0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_line_shows_on_a_terminal_only():
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = ProgressLine(4, "EM", shown=True, stream=stream)
        line.update(2, "log-density -1.5")
        line.close()
    assert "2/4 log-density -1.5" in terminal.getvalue()
    assert pipe.getvalue() == ""


def test_a_history_prints_in_one_line(values):
    text = repr(best_of(values, PAIR, trials=2, rng=1, max_its=3, delta=None).fit_history)
    assert text.startswith("FitHistory(3 iterations, not converged, log-density ")
    assert text.endswith("best of 2 trials)")


@pytest.mark.parametrize("seed", range(4))
def test_components_that_start_at_random_find_clusters_that_anyone_can_see(seed):
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1, 2000), rng.normal(9, 1, 2000)])
    model = optimize(values, PAIR, rng=seed)
    assert sorted(c.mu for c in model.components) == pytest.approx([0, 9], abs=0.2)


def test_a_mixture_over_many_categories_gives_each_of_them_a_chance():
    data = [f"c{i}" for i in np.random.default_rng(0).integers(0, 40, 200)]
    model = optimize(data, MixtureEstimator([CategoricalEstimator(), CategoricalEstimator()]), rng=0)
    assert model.repairs == ()
    assert all(math.isfinite(model.log_density(x)) for x in data)


def test_a_fit_that_ends_impossible_says_so():
    start = MixtureDistribution([CategoricalDistribution({"a": 1.0}), CategoricalDistribution({"a": 1.0})], [0.5, 0.5])
    estimator = MixtureEstimator([CategoricalEstimator(), CategoricalEstimator()])
    with pytest.warns(RuntimeWarning, match="impossible under the model"):
        optimize(["a", "b"], estimator, prev_estimate=start)


def test_an_estimator_that_trains_in_place_is_not_restarted():
    class InPlace(GaussianEstimator):
        trains_in_place = True

    with pytest.raises(TypeError, match="InPlace trains in place and cannot be restarted"):
        best_of([1.0, 2.0], InPlace())
    model = optimize([1.0, 2.0, 9.0], InPlace(), vdata=[1.0], max_its=3, delta=None, rng=0)
    assert model.fit_history.best == 3


def test_empty_validation_data_is_refused_by_name():
    with pytest.raises(ValueError, match="vdata is empty"):
        optimize([1.0], GaussianEstimator(), vdata=[])
