"""What `mixle lm` reads, and what it holds out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle.lm.corpus import read_corpus, standard_library_files


@pytest.fixture
def write(tmp_path):
    def write(*texts: bytes):
        paths = [tmp_path / f"{index}.txt" for index in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text)
        return paths

    return write


def test_the_standard_library_is_sources_without_tests_and_installed_packages():
    files = standard_library_files()
    assert len(files) > 100
    assert {path.suffix for path in files} == {".py"}
    assert files == sorted(files)
    assert not [path for path in files if {"site-packages", "test", "tests"} & set(path.parts)]


def test_nothing_is_lost_between_the_training_and_the_held_out_bytes(write):
    files = write(*(bytes([letter]) * 100 for letter in b"abcdefghij"))
    corpus = read_corpus(files, max_bytes=10_000, heldout_fraction=0.1, seed=3)
    assert sorted(np.concatenate([corpus.train, corpus.heldout])) == sorted(b"".join(p.read_bytes() for p in files))


def test_no_file_is_on_both_sides_when_files_are_small(write):
    files = write(*(bytes([letter]) * 100 for letter in b"abcdefghij"))
    corpus = read_corpus(files, max_bytes=10_000, heldout_fraction=0.13, seed=3)
    assert len(corpus.heldout) == 100
    assert not set(corpus.train) & set(corpus.heldout)
    assert "whole files" in corpus.description


def test_one_file_is_cut_at_the_fraction(write):
    corpus = read_corpus(write(bytes(range(200))), max_bytes=10_000, heldout_fraction=0.1, seed=0)
    assert corpus.heldout.tolist() == list(range(180, 200))
    assert "cut inside a file" in corpus.description


def test_the_cap_bounds_what_is_read(write):
    corpus = read_corpus(write(b"a" * 300, b"b" * 300), max_bytes=400, heldout_fraction=0.25, seed=0)
    assert len(corpus.train) + len(corpus.heldout) == 400


def test_the_seed_alone_fixes_the_split(write):
    files = write(*(bytes([letter]) * 50 for letter in b"abcdefghijklmnopqrst"))
    first, again, other = (read_corpus(files, max_bytes=10_000, heldout_fraction=0.1, seed=s) for s in (1, 1, 2))
    assert first.train.tobytes() == again.train.tobytes()
    assert first.train.tobytes() != other.train.tobytes()


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    fraction=st.floats(0.02, 0.5),
    cap=st.integers(100, 3000),
)
def test_the_held_out_share_is_within_a_factor_of_two(tmp_path_factory, lengths, fraction, cap):
    folder = tmp_path_factory.mktemp("texts")
    files = [folder / str(index) for index in range(len(lengths))]
    for path, length in zip(files, lengths, strict=True):
        path.write_bytes(b"x" * length)
    corpus = read_corpus(files, max_bytes=cap, heldout_fraction=fraction, seed=0)
    total = min(cap, sum(lengths))
    assert len(corpus.train) + len(corpus.heldout) == total
    assert fraction * total / 2 - 1 <= len(corpus.heldout) <= 2 * fraction * total + 1
