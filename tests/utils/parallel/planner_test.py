"""Handles are found by what they can do, and built by name."""

from __future__ import annotations

import numpy as np
import pytest

import mixle
from mixle.stats.gaussian import GaussianDistribution, GaussianEstimator
from mixle.utils.parallel import planner

DATA = [1.0, 2.0, 4.0, 7.0]


def test_the_local_handle_does_what_the_dispatch_does_on_a_list():
    handle = mixle.encoded_data(DATA, estimator=GaussianEstimator(), num_chunks=2)
    chunks = mixle.seq_encode(DATA, estimator=GaussianEstimator(), num_chunks=2)
    model = mixle.seq_estimate(handle, GaussianEstimator())
    assert model == mixle.seq_estimate(chunks, GaussianEstimator())
    assert mixle.seq_initialize(handle, GaussianEstimator(), 1, 0.5) == mixle.seq_initialize(
        chunks, GaussianEstimator(), 1, 0.5
    )
    assert mixle.seq_log_density_sum(handle, model) == mixle.seq_log_density_sum(chunks, model)
    assert [len(part) for part in mixle.seq_log_density(handle, model)] == [2, 2]
    assert len(handle) == 4


def test_anything_with_the_method_of_a_verb_is_data_for_that_verb():
    class Fixed:
        def pysp_seq_estimate(self, estimator, prev_estimate):
            return ("fitted", estimator, prev_estimate)

    assert mixle.seq_estimate(Fixed(), "estimator", "previous") == ("fitted", "estimator", "previous")


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (lambda h: mixle.seq_estimate(h, GaussianEstimator()), "pysp_seq_estimate"),
        (lambda h: mixle.seq_initialize(h, GaussianEstimator(), 0), "pysp_seq_initialize"),
        (lambda h: mixle.seq_log_density_sum(h, GaussianDistribution(0, 1)), "pysp_seq_log_density_sum"),
        (lambda h: mixle.seq_log_density(h, GaussianDistribution(0, 1)), "pysp_seq_log_density"),
    ],
)
def test_a_handle_that_lacks_a_verb_is_named_with_the_verb(call, verb):
    class Bare:
        pass

    class Derived(mixle.EncodedDataHandle):
        pass

    with pytest.raises(TypeError, match=f"Bare has no {verb}"):
        call(Bare())
    with pytest.raises(TypeError, match=f"Derived does not offer {verb}"):
        call(Derived())


def test_raw_data_in_place_of_encoded_data_is_refused():
    with pytest.raises(TypeError, match="the list that seq_encode returns"):
        mixle.seq_estimate(DATA, GaussianEstimator())


def test_a_handle_without_a_length_says_so_and_is_still_true():
    handle = mixle.EncodedDataHandle()
    assert handle
    with pytest.raises(TypeError, match="does not know its number"):
        len(handle)


def test_a_registered_backend_gets_the_data_the_encoder_and_the_options(monkeypatch):
    monkeypatch.setattr(planner, "_factories", dict(planner._factories))
    mixle.register_encoded_data_backend("mine", lambda data, *, encoder, flavour: (data, encoder, flavour))
    data, encoder, flavour = mixle.encoded_data(DATA, estimator=GaussianEstimator(), backend="mine", flavour="x")
    assert (data, flavour) == (DATA, "x")
    assert encoder == GaussianDistribution(0, 1).dist_to_encoder()


def test_a_name_is_taken_over_only_on_request(monkeypatch):
    monkeypatch.setattr(planner, "_factories", dict(planner._factories))
    with pytest.raises(ValueError, match="'local' is registered already"):
        mixle.register_encoded_data_backend("local", list)
    mixle.register_encoded_data_backend("local", lambda data, **_: "mine", replace=True)
    assert mixle.encoded_data(DATA, estimator=GaussianEstimator()) == "mine"


@pytest.mark.parametrize(("name", "factory"), [("", list), (3, list), ("x", "not callable")])
def test_a_bad_registration_is_refused(name, factory):
    with pytest.raises(TypeError, match=r"name|factory"):
        mixle.register_encoded_data_backend(name, factory)


def test_an_unknown_backend_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match=r"backend='spork' is not known; there are: local, multiprocessing, torchrun"):
        mixle.encoded_data(DATA, estimator=GaussianEstimator(), backend="spork")


def test_how_to_encode_is_said_exactly_once():
    with pytest.raises(ValueError, match="exactly one of encoder, estimator and model"):
        mixle.encoded_data(DATA)
    with pytest.raises(ValueError, match=r"\['estimator', 'model'\]"):
        mixle.seq_encode(DATA, estimator=GaussianEstimator(), model=GaussianDistribution(0, 1))


def test_an_entry_point_adds_a_backend(tmp_path, monkeypatch):
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mixle.encoded_data]\nelsewhere = elsewhere_backend:build\n")
    (tmp_path / "elsewhere_backend.py").write_text(
        "def build(data, *, encoder):\n    return ('elsewhere', len(data))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert mixle.encoded_data(DATA, estimator=GaussianEstimator(), backend="elsewhere") == ("elsewhere", 4)


def test_initialization_does_not_depend_on_the_chunks():
    rng = np.random.default_rng(0)
    data = rng.normal(size=101)
    models = [
        mixle.seq_initialize(
            mixle.seq_encode(data, estimator=GaussianEstimator(), num_chunks=c), GaussianEstimator(), 7
        )
        for c in (1, 2, 5)
    ]
    assert all(m.mu == pytest.approx(models[0].mu, rel=1e-12) for m in models)


def test_a_share_too_small_to_draw_a_row_uses_all_rows_alike():
    enc = mixle.seq_encode([3.0], estimator=GaussianEstimator())
    assert mixle.seq_initialize(enc, GaussianEstimator(), 0, 1e-9).mu == 3.0
