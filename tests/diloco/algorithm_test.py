from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.diloco.algorithm import AlgorithmMismatch, DiLoCo
from mixle.diloco.alignment import Adaptive, Blend, Carry, Overwrite
from mixle.diloco.merge import Rda, WeightedMean
from mixle.diloco.partition import ByBytes, Strided
from mixle.diloco.schedule import Schedule

OTHERS = {
    "sync_every": 51,
    "fragments": 3,
    "in_flight": 3,
    "overlap_steps": 0,
    "alignment": Blend(0.5),
    "follow": 0,
    "quorum_size": 2,
    "grace_seconds": 1.5,
    "outer_lr": 0.5,
    "outer_momentum": 0.8,
    "merge": WeightedMean(),
    "partition": Strided(),
    "global_batch_size": 64,
    "delta_dtype": "F4",
    "commit_dtype": "F8_E4M3",
    "master_dtype": "BF16",
    "momentum_dtype": "BF16",
    "flush_on_close": False,
}


def test_the_defaults_drop_no_step_and_are_those_of_the_paper():
    algorithm = DiLoCo(50, 4)
    assert (algorithm.alignment, algorithm.flush_on_close) == (Carry(), True)
    assert (algorithm.outer_lr, algorithm.outer_momentum) == (0.7, 0.9)
    assert (algorithm.merge, algorithm.partition) == (Rda(), ByBytes())
    assert (algorithm.in_flight, algorithm.quorum_size) == (2, 1)


def test_an_algorithm_is_a_value():
    assert DiLoCo(50, 4) == DiLoCo(sync_every=np.int64(50), fragments=4, outer_lr=np.float64(0.7))
    assert hash(DiLoCo(50, 4)) == hash(DiLoCo(50, 4))
    with pytest.raises(FrozenInstanceError):
        DiLoCo(50, 4).outer_lr = 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fragments": 51}, ValueError, "fragments=51 must be at most sync_every=50"),
        ({"fragments": 0}, ValueError, "fragments=0 must be at least 1"),
        ({"sync_every": 50.0}, TypeError, "sync_every=50.0 must be an integer"),
        ({"sync_every": True}, TypeError, "sync_every=True must be an integer"),
        ({"in_flight": 0}, ValueError, "in_flight=0 must be at least 1"),
        ({"overlap_steps": -1}, ValueError, "overlap_steps=-1 must be at least 0"),
        ({"follow": 1.5}, TypeError, "follow=1.5 must be an integer"),
        ({"quorum_size": 0}, ValueError, "quorum_size=0 must be at least 1"),
        ({"grace_seconds": -0.1}, ValueError, "grace_seconds=-0.1 must be at least 0"),
        ({"grace_seconds": float("inf")}, ValueError, "grace_seconds=inf must be finite"),
        ({"outer_lr": 0}, ValueError, "outer_lr=0.0 must be above 0"),
        ({"outer_lr": "0.7"}, TypeError, "outer_lr='0.7' must be a real number"),
        ({"outer_momentum": 1}, ValueError, "outer_momentum=1.0 must be below 1"),
        ({"outer_momentum": -0.1}, ValueError, "outer_momentum=-0.1 must be at least 0"),
        ({"alignment": Carry}, TypeError, "alignment=.*Carry.* must be an instance of one of Carry, Overwrite, Blend"),
        ({"alignment": "carry"}, TypeError, "alignment='carry' must be an instance"),
        ({"merge": Rda}, TypeError, "merge=.* must be an instance of one of Rda, WeightedMean"),
        ({"partition": None}, TypeError, "partition=None must be an instance of one of ByBytes, Strided"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0 must be at least 1"),
        ({"delta_dtype": "bf16"}, ValueError, "delta_dtype='bf16' must be one of 'BF16', 'F8_E4M3', 'F4'"),
        ({"commit_dtype": "F5"}, ValueError, "commit_dtype='F5' must be one of"),
        ({"master_dtype": 16}, ValueError, "master_dtype=16 must be one of"),
        ({"momentum_dtype": "F32"}, ValueError, "momentum_dtype='F32' must be one of"),
        ({"residual_dtype": "BF16"}, ValueError, "residual_dtype='BF16' needs a delta_dtype"),
        ({"flush_on_close": 1}, TypeError, "flush_on_close=1 must be True or False"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(arguments, error, message):
    with pytest.raises(error, match=message):
        DiLoCo(**{"sync_every": 50, "fragments": 4, **arguments})


def test_a_model_may_be_sent_one_fragment_a_step():
    assert DiLoCo(4, 4).schedule.gap(3) == 1


@pytest.mark.parametrize(("quorum_size", "follow", "expected"), [(1, None, 0), (3, None, 2), (3, 0, 0), (1, 5, 5)])
def test_the_schedule_follows_all_but_one_of_the_quorum_unless_told(quorum_size, follow, expected):
    algorithm = DiLoCo(50, 4, quorum_size=quorum_size, follow=follow, in_flight=3, overlap_steps=7)
    assert algorithm.schedule == Schedule(50, 4, in_flight=3, overlap_steps=7, follow=expected)


@pytest.mark.parametrize("alignment", [Carry(), Overwrite(), Blend(0.25), Adaptive(0.7, 0.1)])
@pytest.mark.parametrize("merge", [Rda(), WeightedMean()])
def test_an_algorithm_survives_json(alignment, merge):
    algorithm = DiLoCo(**{**OTHERS, "residual_dtype": "BF16", "alignment": alignment, "merge": merge})
    assert DiLoCo.from_json(algorithm.to_json()) == algorithm


@given(st.floats(1e-6, 10), st.floats(0, 0.999), st.none() | st.floats(0, 100))
def test_numbers_survive_json_exactly(outer_lr, outer_momentum, grace_seconds):
    algorithm = DiLoCo(50, 4, outer_lr=outer_lr, outer_momentum=outer_momentum, grace_seconds=grace_seconds)
    back = DiLoCo.from_json(algorithm.to_json())
    assert back == algorithm
    assert back.digest() == algorithm.digest()


def test_the_digest_is_the_sha256_of_compact_sorted_json():
    algorithm = DiLoCo(50, 4)
    text = json.dumps(algorithm.to_dict(), sort_keys=True, separators=(",", ":"))
    assert algorithm.digest() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", OTHERS)
def test_a_site_with_another_algorithm_is_refused_by_the_name_of_what_differs(name):
    here = DiLoCo(50, 4)
    there = DiLoCo(**{"sync_every": 50, "fragments": 4, name: OTHERS[name]})
    assert here.digest() != there.digest()
    with pytest.raises(AlgorithmMismatch, match=f"{name}=.* here, .* there") as caught:
        here.require_same(there, where="s3://bucket/run")
    assert caught.value.names == (name,)
    assert "s3://bucket/run" in str(caught.value)


def test_a_site_with_the_same_algorithm_is_taken():
    assert DiLoCo(50, 4).require_same(DiLoCo(50, 4, outer_lr=0.7), where="here") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner_lr": 1}, "DiLoCo has no argument inner_lr"),
        ({"alignment": {"kind": "Bland"}}, r"alignment\['kind'\]='Bland' must be one of .* 'Blend'"),
        ({"alignment": {"kind": "Blend"}}, "alignment=Blend needs mixing"),
        ({"alignment": {"kind": "Carry", "mixing": 1}}, "alignment=Carry has no argument mixing"),
        ({"alignment": "Carry"}, "alignment='Carry' must be a mapping with a kind"),
        ({"fragments": 500}, "fragments=500 must be at most sync_every=50"),
    ],
)
def test_a_description_that_describes_no_algorithm_says_what_is_wrong(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DiLoCo.from_dict({**DiLoCo(50, 4).to_dict(), **change})


def test_a_description_that_lacks_an_argument_or_is_no_mapping_is_refused():
    described = DiLoCo(50, 4).to_dict()
    del described["follow"]
    with pytest.raises(ValueError, match="DiLoCo needs follow"):
        DiLoCo.from_dict(described)
    with pytest.raises(TypeError, match=r"described=\[\] must be a mapping"):
        DiLoCo.from_json("[]")


def test_the_algorithm_is_imported_without_torch_or_a_store():
    check = "import sys, mixle.diloco.algorithm; print([m for m in ('torch', 'obstore', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"
