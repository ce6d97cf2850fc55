from __future__ import annotations

import re
from dataclasses import fields

import pytest

from mixle.data.teacher.errors import ProtocolError
from mixle.data.teacher.messages import MAX_MESSAGE_BYTES
from mixle.data.teacher.stats import BrokerStats, StudentStats, WorkerStats


def figures(**changes: object) -> BrokerStats:
    values: dict[str, object] = {one.name: 1 for one in fields(BrokerStats)}
    values |= {"run_id": "0123abcd", "model_id": "m", "leader": "", "latency_p50_s": None, "latency_p99_s": 0.25}
    values |= {"students": (), "workers": ()}
    return BrokerStats(**{**values, **changes})


WORKER = WorkerStats('a"b\\c\nd', "h/1", "idle", "*", 0, 5, 0, 2.5, None, 4096)
STUDENT = StudentStats("s" * 32, "h/2", 0, 8, 1, 2, 3, 0, False)


def test_figures_come_back_as_they_were_packed():
    told = figures(workers=(WORKER,), students=(STUDENT,))
    assert BrokerStats.unpack(told.pack()) == told


def test_any_number_of_peers_fits_a_message():
    packed = figures(workers=(WORKER,) * 4096, students=(STUDENT,) * 4096).pack()
    assert len(packed) < MAX_MESSAGE_BYTES
    assert len(BrokerStats.unpack(packed).workers) == 256


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_other_bytes_are_no_figures(junk):
    with pytest.raises(ProtocolError):
        BrokerStats.unpack(junk)


def test_garbage_is_summed_over_the_sockets():
    assert figures(garbage_frontend=1, garbage_backend=2, garbage_control=4).garbage == 7


def test_the_prometheus_text_is_well_formed():
    text = figures(workers=(WORKER,)).prometheus()
    sample = re.compile(r'[a-z_0-9]+(\{[a-z_]+="([^"\\\n]|\\["\\n])*"(,[a-z_]+="([^"\\\n]|\\["\\n])*")*\})? \S+')
    kinds = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            assert sample.fullmatch(line), line
            name = re.split(r"[{ ]", line)[0]
            assert (kinds[name] == "counter") == name.endswith("_total")
            float(line.rsplit(" ", 1)[1])
    assert 'worker="a\\"b\\\\c\\nd"' in text
