import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixle.data.teacher.layout import SlotLayout
from mixle.data.teacher.mediums import FileMedium, Medium, MediumBase, SharedMemoryManager
from mixle.data.teacher.specs import BatchConfig, TensorSpec

RUN = f"{os.getpid():08x}"  # one that no other test has now
CONFIG = BatchConfig([TensorSpec("x", (2, 3), "bfloat16"), TensorSpec("y", (), "bool")])
STRIDE = SlotLayout.of(CONFIG).stride


@pytest.fixture(params=[SharedMemoryManager, FileMedium])
def kind(request, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXLE_TEACHER_DIR", str(tmp_path / "teacher"))
    return request.param


def names_of(run_id=RUN):
    folders = [Path("/dev/shm"), Path(os.environ["MIXLE_TEACHER_DIR"]) / "slots"]
    return [name for folder in folders if folder.is_dir() for name in os.listdir(folder) if run_id in name]


def test_a_medium_is_made_with_the_documented_arguments_and_found_under_its_name(kind):
    with kind(slot_count=4, slot_stride=256, read_only=True, run_id=RUN) as medium:
        assert isinstance(medium, Medium)
        assert isinstance(medium, MediumBase)
        assert (medium.slot_count, medium.slot_stride) == (4, 256)
        assert len(medium.buf_name) < 31
        assert names_of() == [medium.buf_name]
    assert names_of() == []


def test_a_worker_attaches_by_name_and_the_student_reads_its_sample(kind):
    sample = {"x": torch.arange(6.0).reshape(2, 3).bfloat16(), "y": torch.tensor(True)}
    with kind(4, STRIDE, True, RUN, batch_config=CONFIG) as student:
        with kind.attach(student.buf_name, 4, run_id=RUN, batch_config=CONFIG) as worker:
            student.slots.prepare(2, 1, 9, 1)
            worker.slots.write(2, 9, 1, sample)
        assert student.slots.is_complete(2, 9, 1)
        assert student.slots.intact(0, 4).all()
        read = student.read_slot_tensors(2)
        assert {name: tensor.dtype for name, tensor in read.items()} == {"x": torch.bfloat16, "y": torch.bool}
        assert all(torch.equal(read[name], sample[name]) for name in sample)


def test_a_slot_without_a_config_is_plain_bytes_over_the_shared_memory(kind):
    with kind(2, 100, run_id=RUN) as student, kind.attach(student.buf_name, 2, 100) as worker:
        worker.segment.buffer[100:200] = bytes(range(100))
        assert student.read_slot_tensors(0)["bytes"].eq(0).all()
        assert student.read_slot_tensors(1)["bytes"].tolist() == list(range(100))
        with pytest.raises(ValueError, match="plain bytes in its slots; give batch_config="):
            _ = student.slots


def test_tensors_stay_readable_after_the_medium_is_closed_and_unlinked(kind):
    medium = kind(2, batch_config=CONFIG, run_id=RUN)
    tensors = medium.read_slot_tensors(1)
    plain = kind(2, 64, run_id=RUN)
    row = plain.read_slot_tensors(1)["bytes"]
    for each in (medium, plain):
        each.close()
        each.close()
        each.unlink()
        each.unlink()
    assert names_of() == []
    assert tensors["x"].fill_(1).sum() == 6
    assert row.fill_(1).sum() == 64
    with pytest.raises(ValueError, match="is closed"):
        medium.read_slot_tensors(0)
    with pytest.raises(ValueError, match="is closed"):
        plain.read_slot_tensors(0)


def test_media_of_one_run_have_its_id_and_names_of_their_own(kind):
    with kind(1, 64, run_id=RUN) as first, kind(1, 64, run_id=RUN) as second:
        assert first.buf_name != second.buf_name
        assert sorted(names_of()) == sorted([first.buf_name, second.buf_name])
    with kind(1, 64) as third:
        assert third.run_id in third.buf_name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 64), ValueError, "slot_count=0 must be at least 1"),
        ((2.0, 64), TypeError, "slot_count=2.0 must be an integer"),
        ((2, -64), ValueError, "slot_stride=-64 must be at least 1"),
        ((2, None), ValueError, "slot_stride=None needs batch_config="),
        ((2, 64, 1), TypeError, "read_only=1 must be True or False"),
        ((2, 64, False), ValueError, "read_only=False attaches a segment that is there; give its name="),
        ((2, 64, True, "../../x"), ValueError, "run_id='../../x' must be 8 hexadecimal digits"),
    ],
)
def test_arguments_that_make_no_medium_are_refused_by_name(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(*arguments)


def test_a_stride_that_is_not_the_configs_is_refused(kind):
    with pytest.raises(ValueError, match=rf"slot_stride=64 is not the {STRIDE} that a slot"):
        kind(2, 64, batch_config=CONFIG)
    with pytest.raises(TypeError, match="must be a BatchConfig or None"):
        kind(2, 64, batch_config=CONFIG.to_dict())
    with pytest.raises(ValueError, match="is for read_only=False"):
        kind(2, 64, name=f"mx{RUN}-1-123456")


@pytest.mark.parametrize("slot", [-1, 2, 2**70])
def test_a_slot_that_is_not_there_is_refused(kind, slot):
    with kind(2, 64, run_id=RUN) as medium, pytest.raises(ValueError, match=f"slot_id={slot} must be at"):
        medium.read_slot_tensors(slot)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "mx0123abcd-1-123456/../x", "psm_1"])
def test_a_worker_attaches_no_path_that_a_peer_names(kind, name):
    with pytest.raises(ValueError, match="is not the name of a segment"):
        kind.attach(name, 1, 64, run_id=RUN)


def test_a_worker_attaches_nothing_of_another_run_process_or_size(kind):
    with kind(2, 64, run_id="ffffffff") as medium:
        with pytest.raises(ValueError, match="is a segment of run ffffffff, not of this run, " + RUN):
            kind.attach(medium.buf_name, 2, 64, run_id=RUN)
        with pytest.raises(ValueError, match="is a segment of process"):
            kind.attach(medium.buf_name, 2, 64, pid=1)
        with pytest.raises(ValueError, match="has 128 bytes, not the size=192"):
            kind.attach(medium.buf_name, 3, 64)


def test_slots_that_do_not_fit_are_refused_at_construction(kind):
    with pytest.raises(OSError, match=r"bytes of slots do not fit in .*, which has \d+ of \d+ bytes free"):
        kind(1 << 20, 1 << 30, run_id=RUN)
    assert names_of() == []


def test_the_resource_tracker_of_multiprocessing_hears_nothing():
    code = (
        "from multiprocessing import resource_tracker\n"
        "from mixle.data.teacher.mediums import SharedMemoryManager\n"
        "with SharedMemoryManager(2, 64) as one, SharedMemoryManager.attach(one.buf_name, 2, 64): pass\n"
        "assert resource_tracker._resource_tracker._pid is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
