"""Where a module runs, and what wraps it."""

from __future__ import annotations

import pytest
import torch

from mixle.training.wrap import resolve_device, resolve_wrapping


@pytest.mark.parametrize(
    ("parallel", "world", "device", "wrapping"),
    [
        ("auto", 1, "cpu", "plain"),
        ("auto", 1, "cuda", "plain"),
        ("auto", 2, "cpu", "ddp"),
        ("auto", 2, "cuda", "fsdp"),
        ("none", 1, "cpu", "plain"),
        ("ddp", 2, "cuda", "ddp"),
        ("fsdp", 1, "cpu", "fsdp"),
    ],
)
def test_auto_shards_on_cuda_replicates_on_cpu_and_does_nothing_alone(parallel, world, device, wrapping):
    assert resolve_wrapping(parallel, world, device) == wrapping


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")


def test_plain_cuda_is_this_ranks_own_gpu(four_gpus):
    assert resolve_device("cuda") == torch.device("cuda", 3)


def test_one_gpu_for_all_local_ranks_is_refused(four_gpus):
    with pytest.raises(ValueError, match="device='cuda:0' puts all 4 local ranks on one GPU"):
        resolve_device("cuda:0")


def test_a_process_that_is_alone_may_choose_its_gpu(four_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert resolve_device("cuda:2") == torch.device("cuda", 2)
    assert resolve_device("cuda") == torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="device='cuda' needs CUDA"):
        resolve_device("cuda")


@pytest.mark.parametrize(("device", "error"), [("gpu", ValueError), (2.5, TypeError), (None, TypeError)])
def test_what_is_no_device_is_refused(device, error):
    with pytest.raises(error, match=f"device={device!r}"):
        resolve_device(device)
