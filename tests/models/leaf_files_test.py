"""A leaf on disk is the old one or the new one, whole, whoever else saves, loads or dies."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mixle.models import leaf_files
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeaf
from mixle.models.transformer import CausalLM
from mixle.utils.whole_file import locked, replace_file

VOCAB, D_MODEL, BLOCK = 11, 8, 6


def leaf(seed: int) -> StreamingTransformerLeaf:
    torch.manual_seed(seed)
    return StreamingTransformerLeaf(CausalLM(VOCAB, D_MODEL, 1, 2, BLOCK))


def weights(path) -> torch.Tensor:
    return StreamingTransformerLeaf.load(path).module.head.weight.detach()


def names(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ---- others at the same time


def test_a_load_that_another_save_overtakes_is_of_the_new_leaf(tmp_path, monkeypatch):
    leaf(1).save(tmp_path)
    parse = leaf_files._parse
    saves = iter([leaf(2), leaf(3)])

    def overtaken(data, where):
        described = parse(data, where)
        for other in saves:
            other.save(tmp_path)
            break
        return described

    monkeypatch.setattr(leaf_files, "_parse", overtaken)
    assert torch.equal(weights(tmp_path), leaf(3).module.head.weight)


def test_a_load_that_is_overtaken_forever_gives_up_saying_so(tmp_path, monkeypatch):
    leaf(1).save(tmp_path)
    parse = leaf_files._parse
    seeds = iter(range(2, 1000))

    def overtaken(data, where):
        described = parse(data, where)
        leaf(next(seeds)).save(tmp_path)
        return described

    monkeypatch.setattr(leaf_files, "_parse", overtaken)
    with pytest.raises(FileNotFoundError, match="saved over 10 times while it was read"):
        weights(tmp_path)


def test_a_save_waits_for_another_to_publish_and_clean_up(tmp_path, monkeypatch):
    published, second = [], threading.Thread(target=lambda: leaf(2).save(tmp_path))

    def replace(path, data):
        replace_file(path, data)
        if path.name == "leaf.json" and not published:
            published.append(path)
            second.start()
            with pytest.raises(BlockingIOError), locked(tmp_path / ".lock", wait=False):
                pass

    monkeypatch.setattr(leaf_files, "replace_file", replace)
    leaf(1).save(tmp_path)
    second.join(timeout=60)
    assert torch.equal(weights(tmp_path), leaf(2).module.head.weight)


def test_saves_and_loads_at_once_find_whole_leaves_only(tmp_path):
    leaves = [leaf(seed) for seed in range(3)]
    leaves[0].save(tmp_path)

    def save_often(number):
        for _ in range(20):
            leaves[number].save(tmp_path)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(save_often, number) for number in (1, 2)]
        while not all(writer.done() for writer in writers):
            found = weights(tmp_path)
            assert any(torch.equal(found, written.module.head.weight) for written in leaves)
        for writer in writers:
            writer.result()
    assert len(names(tmp_path)) == 3


# ---- what a crash leaves


@pytest.mark.parametrize("deaths", [1, 2])
def test_what_a_save_that_died_left_is_swept_by_the_next(tmp_path, monkeypatch, deaths):
    (tmp_path / "module-notes.safetensors").write_text("mine")
    leaf(1).save(tmp_path)
    for number in range(deaths):
        for name in (f"module-{number:064x}.safetensors", f".leaf.json.{number:016x}.partial"):
            (tmp_path / name).write_bytes(b"half")
        (tmp_path / f".moments-{number:064x}.safetensors.{number:016x}.partial").write_bytes(b"half")
    assert torch.equal(weights(tmp_path), leaf(1).module.head.weight)
    leaf(2).save(tmp_path)
    named = json.loads((tmp_path / "leaf.json").read_text())["files"]["module"]
    assert names(tmp_path) == sorted([".lock", "leaf.json", "module-notes.safetensors", named])
    assert torch.equal(weights(tmp_path), leaf(2).module.head.weight)


def test_saving_the_same_leaf_again_keeps_its_file(tmp_path):
    leaf(1).save(tmp_path)
    leaf(1).save(tmp_path)
    np.testing.assert_array_equal(weights(tmp_path), leaf(1).module.head.weight.detach())
