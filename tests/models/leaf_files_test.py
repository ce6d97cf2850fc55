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
from mixle.models.transformer import Block, CausalLM
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


# ---- a hostile description


def refusal(path, change) -> str:
    described = json.loads((path / "leaf.json").read_text())
    change(described)
    (path / "leaf.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=str(path)) as refused:
        StreamingTransformerLeaf.load(path)
    return str(refused.value)


@pytest.mark.parametrize("n_layer", [3000, 10**6, 10**12])
def test_a_config_of_more_layers_than_are_saved_is_refused_before_they_are_built(tmp_path, monkeypatch, n_layer):
    leaf(1).save(tmp_path)
    built = []
    init = Block.__init__
    monkeypatch.setattr(Block, "__init__", lambda self, *a, **k: (built.append(1), init(self, *a, **k))[1])
    assert "does not build" in refusal(tmp_path, lambda d: d["config"].update(n_layer=n_layer))
    assert len(built) < 200
    assert torch.nn.Linear(2, 2).weight.shape == (2, 2)


@pytest.mark.parametrize("name", ["vocab", "d_model", "n_head", "block", "d_mlp"])
@pytest.mark.parametrize("value", [10**12, 10**30, -(10**30), "8", True, [], 1e300])
def test_a_config_with_a_size_that_cannot_be_is_refused(tmp_path, name, value):
    leaf(1).save(tmp_path)
    assert "does not" in refusal(tmp_path, lambda d: d["config"].update({name: value}))


@pytest.mark.parametrize("name", leaf_files.COUNTERS)
@pytest.mark.parametrize("value", [-5, 1.9, "3", True, float("inf"), None])
def test_a_counter_that_cannot_be_is_refused_by_name(tmp_path, name, value):
    leaf(1).save(tmp_path)
    assert f"{name}={value!r} must be" in refusal(tmp_path, lambda d: d["training"].update({name: value}))


RECORD = {
    "loss": 1.0,
    "step": 1,
    "epoch": 0,
    "learning_rate": 0.1,
    "grad_norm": "inf",
    "targets": 3,
    "seconds": None,
    "skipped": False,
    "evaluation": None,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "abc"),
        ("loss", None),
        ("loss", True),
        ("loss", []),
        ("loss", float("nan")),
        ("grad_norm", "1.0"),
        ("evaluation", "abc"),
        ("step", 1.5),
        ("epoch", -1),
        ("targets", "3"),
        ("learning_rate", "inf"),
        ("seconds", -1.0),
        ("skipped", 0),
    ],
)
def test_a_step_that_cannot_have_been_is_refused_by_name(tmp_path, name, value):
    leaf(1).save(tmp_path)
    assert f"history {name}=" in refusal(tmp_path, lambda d: d.update(history=[{**RECORD, name: value}]))


def test_a_history_with_losses_that_were_not_finite_is_read_back(tmp_path):
    leaf(1).save(tmp_path)
    described = json.loads((tmp_path / "leaf.json").read_text())
    described["history"] = [{**RECORD, "loss": "-inf"}]
    (tmp_path / "leaf.json").write_text(json.dumps(described))
    (record,) = StreamingTransformerLeaf.load(tmp_path).history
    assert record.to_dict() == {**RECORD, "loss": float("-inf"), "grad_norm": float("inf")}
