"""Token arrays on disk, memory-mapped: as long as the disk is large, opened in milliseconds, never copied into RAM.

A shard is one ``.bin`` file, little-endian throughout:

======  ====  =====================================================
offset  size  content
======  ====  =====================================================
0       8     magic: the ASCII bytes ``MIXLETOK``
8       2     version, uint16: 1
10      2     dtype code, uint16: 2 for uint16, 4 for uint32
12      2     number of the shard, uint16, from 0; 0 in a file that stands alone
14      2     shards there are, uint16; 0 in a file that stands alone
16      8     count of tokens, uint64
24            the tokens, one after the other, to the end of the file
======  ====  =====================================================
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mixle.data.token_check import find_bad_token
from mixle.utils.exact import require_positive_int

PathLike: TypeAlias = str | os.PathLike[str]

_HEADER = struct.Struct("<8sHHHHQ")
_MAGIC = b"MIXLETOK"
_VERSION = 1
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 20
_NUMBERS_AT = 12
_MOST_SHARDS = 2**16 - 1


class TokenFile:
    """Read shards of tokens as one 1-D array, without copying them into memory.

    Supports ``len``, ``dtype``, ``shape``, ``ndim`` and slices with step 1, which are views of the mapped file where
    they lie in one shard and copies of the slice where they do not.

    Args:
        path: a shard; a sequence of shards, in order; a directory, whose ``*.bin`` are taken in order of their names;
            or a glob pattern, likewise. Only a sequence may leave out some of the shards that were written together.

    Raises:
        FileNotFoundError: no such shard.
        ValueError: a file that is no shard, of an unknown version or dtype, shorter or longer than its header says, or
            empty; shards of different dtypes; a directory or a pattern that lacks a shard.
    """

    def __init__(self, path: PathLike | Sequence[PathLike]) -> None:
        self._open(_shard_paths(path), None)
        if isinstance(path, (str, os.PathLike)) and not os.path.isfile(path):
            _require_all_shards(self.paths)

    @classmethod
    def raw(cls, path: PathLike | Sequence[PathLike], dtype: DTypeLike) -> TokenFile:
        """Open files that are tokens of ``dtype`` and nothing else, without a header.

        Raises:
            TypeError: ``dtype`` is not an integer type.
            ValueError: an empty file, or one whose size is no multiple of the dtype's.
        """
        kind = _as_dtype(dtype)
        if kind.kind not in "iu":
            raise TypeError(f"dtype={dtype!r} must be an integer type, such as numpy.uint16")
        return cls._reopen(_shard_paths(path), kind)

    @classmethod
    def _reopen(cls, paths: tuple[str, ...], raw_dtype: np.dtype[Any] | None) -> TokenFile:
        tokens = cls.__new__(cls)
        tokens._open(paths, raw_dtype)
        return tokens

    def _open(self, paths: tuple[str, ...], raw_dtype: np.dtype[Any] | None) -> None:
        self.paths = paths
        self._raw_dtype = raw_dtype
        self._shards = [_map(path, raw_dtype) for path in paths]
        for path, shard in zip(paths, self._shards, strict=True):
            if shard.dtype != self._shards[0].dtype:
                raise ValueError(f"{path} holds {shard.dtype} and {paths[0]} {self._shards[0].dtype}; write them alike")
        self._edges = np.cumsum([0] + [len(shard) for shard in self._shards])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The integer type of the tokens."""
        return self._shards[0].dtype

    @property
    def shape(self) -> tuple[int]:
        """``(len(self),)``."""
        return (len(self),)

    @property
    def ndim(self) -> int:
        """1."""
        return 1

    def __len__(self) -> int:
        return int(self._edges[-1])

    def __repr__(self) -> str:
        where = self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"
        return f"TokenFile({where}: {len(self)} tokens, {self.dtype})"

    def __reduce__(self) -> tuple[Callable[..., TokenFile], tuple[object, ...]]:
        return self._reopen, (self.paths, self._raw_dtype)

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{self!r} is not copied into memory as a whole; take a slice of it")

    def __getitem__(self, item: slice) -> NDArray[Any]:
        """Return the tokens of a slice with step 1, bounds as for any sequence."""
        if not isinstance(item, slice):
            raise TypeError(f"a TokenFile takes slices, not {type(item).__name__}; see windows() for many at once")
        start, stop, step = item.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of a TokenFile have step 1, not {step}")
        return self.slice(start, max(start, stop))

    def slice(self, start: int, stop: int) -> NDArray[Any]:
        """Return tokens ``[start, stop)``: a read-only view where they lie in one shard, else a copy.

        Raises:
            IndexError: the range is not within ``[0, len(self)]``.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) are not within [0, {len(self)})")
        first = self._shard_of(start)
        if stop <= self._edges[first + 1]:
            return self._shards[first][start - self._edges[first] : stop - self._edges[first]]
        last = self._shard_of(stop - 1)
        parts = [
            shard[max(0, start - edge) : stop - edge]
            for shard, edge in zip(self._shards[first : last + 1], self._edges[first : last + 1], strict=True)
        ]
        return np.concatenate(parts)

    def windows(self, starts: NDArray[np.integer], width: int) -> NDArray[Any]:
        """Return tokens ``[start, start + width)`` of each start, (m, width), reading those and no others.

        Raises:
            IndexError: a window is not within ``[0, len(self)]``.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and (starts.min() < 0 or starts.max() + width > len(self)):
            raise IndexError(
                f"windows of {width} tokens from {starts.min()} to {starts.max()} are not within [0, {len(self)})"
            )
        offsets = np.arange(width)
        if len(self._shards) == 1:
            return self._shards[0][starts[:, None] + offsets]
        rows = np.empty((len(starts), width), dtype=self.dtype)
        owners = np.searchsorted(self._edges, starts, side="right") - 1
        inside = starts + width <= self._edges[owners + 1]
        for owner in np.unique(owners[inside]):
            mine = np.flatnonzero(inside & (owners == owner))
            rows[mine] = self._shards[owner][starts[mine, None] - self._edges[owner] + offsets]
        for row in np.flatnonzero(~inside):
            rows[row] = self.slice(int(starts[row]), int(starts[row]) + width)
        return rows

    def _shard_of(self, position: int) -> int:
        return min(int(np.searchsorted(self._edges, position, side="right")) - 1, len(self._shards) - 1)

    @classmethod
    def write(
        cls,
        path: PathLike,
        tokens: object,
        *,
        dtype: DTypeLike | None = None,
        shard_tokens: int | None = None,
    ) -> TokenFile:
        """Write tokens and return them opened; what stood at ``path`` is there, whole, until all is written.

        Args:
            path: the file, replaced if it exists; with ``shard_tokens`` a directory, which must not exist.
            tokens: (n,) integers (an array, a list, a TokenFile), or an iterable of such arrays, read once and piece
                by piece.
            dtype: uint16 or uint32. Unless given, the smaller one that holds all tokens; of an iterable, uint32.
            shard_tokens: write shards of this many tokens, the last one of what is left.

        Raises:
            TypeError: tokens that are not numbers, or are masked; a dtype other than these two.
            ValueError: ids that are negative, have a fraction or do not fit; no tokens at all; arrays that are not 1-D;
                more than 65,535 shards.
            FileExistsError: the directory for ``shard_tokens`` exists.
        """
        target = Path(path)
        limit = sys.maxsize if shard_tokens is None else require_positive_int(shard_tokens, "shard_tokens")
        if shard_tokens is not None and target.exists():
            raise FileExistsError(f"{target} exists; shards are written into a new directory")
        source = _as_source(tokens)
        kind = _smallest_dtype(source) if dtype is None else _as_dtype(dtype).newbyteorder("<")
        if kind not in _DTYPES.values():
            raise TypeError(f"dtype={dtype!r} must be uint16 or uint32")
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
        shards = groupby(_numbered(_checked_pieces(source, kind), limit), key=lambda numbered: numbered[0])
        try:
            if shard_tokens is not None:
                partial.mkdir()
            written = 0
            for number, parts in shards:
                if number == _MOST_SHARDS:
                    raise ValueError(
                        f"shard_tokens={shard_tokens} makes more than {_MOST_SHARDS} shards; give a larger one"
                    )
                file = partial if shard_tokens is None else partial / _shard_name(number)
                _write_shard(file, kind, (part for _, part in parts))
                written += 1
            if not written:
                raise ValueError(f"there are no tokens to write to {target}")
            if shard_tokens is not None:
                for number in range(written):
                    _number_shard(partial / _shard_name(number), number, written)
                _sync_directory(partial)
            os.replace(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
            raise
        _sync_directory(target.parent)
        return cls(target)


_Source: TypeAlias = NDArray[Any] | TokenFile | Iterable[object]


def _as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype={dtype!r} is not a NumPy dtype") from None


def _shard_paths(path: PathLike | Sequence[PathLike]) -> tuple[str, ...]:
    """Return the absolute paths of the shards that ``path`` names."""
    if not isinstance(path, (str, os.PathLike)):
        paths = [os.fspath(each) for each in path]
    elif os.path.isdir(path):
        paths = sorted(glob.glob(os.path.join(glob.escape(os.fspath(path)), "*.bin")))
    elif os.path.exists(path) or not glob.has_magic(os.fspath(path)):
        paths = [os.fspath(path)]
    else:
        paths = sorted(glob.glob(os.fspath(path)))
    if not paths:
        raise FileNotFoundError(f"path={path!r} names no token files")
    return tuple(map(os.path.abspath, paths))


def _map(path: str, raw_dtype: np.dtype[Any] | None) -> NDArray[Any]:
    """Map one shard read-only, after checking that it is one."""
    size = os.path.getsize(path)
    if raw_dtype is not None:
        dtype, start = raw_dtype, 0
        count, rest = divmod(size, dtype.itemsize)
        if rest:
            raise ValueError(f"{path} has {size} bytes, which is no multiple of the {dtype.itemsize} of a {dtype}")
    else:
        dtype, count = _read_header(path, size)
        start = _HEADER.size
    if count == 0:
        raise ValueError(f"{path} has no tokens")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,)))


def _read_header(path: str, size: int) -> tuple[np.dtype[Any], int]:
    """Return the dtype and count of a shard of ``size`` bytes."""
    if size < _HEADER.size:
        raise ValueError(f"{path} has {size} bytes, fewer than the {_HEADER.size} of a token file's header")
    with open(path, "rb") as file:
        magic, version, code, number, shards, count = _HEADER.unpack(file.read(_HEADER.size))
    if magic != _MAGIC:
        raise ValueError(
            f"{path} begins with {magic!r}, not {_MAGIC!r}; for headerless tokens: TokenFile.raw(path, dtype)"
        )
    if version != _VERSION:
        raise ValueError(f"{path} has version {version} of the format; this reads version {_VERSION}")
    if code not in _DTYPES:
        raise ValueError(f"{path} has dtype code {code}; known are {', '.join(map(str, _DTYPES))}")
    if number >= max(shards, 1):
        raise ValueError(f"{path} has shard number {number} of {shards}; the numbers are below that, from 0")
    expected = _HEADER.size + count * _DTYPES[code].itemsize
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise ValueError(f"{path} is {state}: {count} tokens of {_DTYPES[code]} make {expected} bytes, it has {size}")
    return _DTYPES[code], count


def _require_all_shards(paths: tuple[str, ...]) -> None:
    """Refuse a gap in, or behind, shards that were written together; files that stand alone may lie among them."""
    due, shards = 0, 0
    for path in paths:
        with open(path, "rb") as file:
            *_, number, total, _ = _HEADER.unpack(file.read(_HEADER.size))
        if (number, total) != (due, shards if due else total):
            _refuse_gap(path, due, shards or total)
        due, shards = (number + 1, total) if number + 1 < total else (0, 0)
    if due:
        _refuse_gap(paths[-1], due, shards)


def _refuse_gap(near: str, due: int, shards: int) -> NoReturn:
    missing = os.path.join(os.path.dirname(near), _shard_name(due))
    raise ValueError(
        f"{missing}, shard {due} of 0 to {shards - 1}, is missing; restore it, or give a list of the shards to take"
    )


def _shard_name(number: int) -> str:
    return f"{number:08d}.bin"


def refuse_masked(tokens: object, name: str) -> None:
    """Refuse an array with a mask, which a copy of its data would ignore."""
    if isinstance(tokens, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be ignored; give {name}.compressed(), or {name}.filled(id)"
        )


def _as_source(tokens: object) -> _Source:
    """Return an array, a TokenFile, or an iterable that is to yield arrays."""
    if isinstance(tokens, (list, tuple, range)) and (not tokens or isinstance(tokens[0], Integral)):
        return np.asarray(tokens, dtype=None if tokens else np.uint16)
    if isinstance(tokens, TokenFile):
        return tokens
    refuse_masked(tokens, "tokens")
    if hasattr(tokens, "dtype"):
        return np.asarray(tokens)
    if isinstance(tokens, Iterable) and not isinstance(tokens, (str, bytes, bytearray)):
        return tokens
    raise TypeError(f"tokens must be an array of integers or an iterable of arrays, not {type(tokens).__name__}")


def _smallest_dtype(source: _Source) -> np.dtype[Any]:
    """Return the smaller dtype that holds a whole array, and the larger for what can be read only once."""
    if not isinstance(source, (np.ndarray, TokenFile)):
        return _DTYPES[4]
    if source.dtype in (np.uint8, np.uint16):
        return _DTYPES[2]
    fits = source.dtype.kind in "iuf" and all(piece.max() <= np.iinfo(np.uint16).max for piece in _pieces(source))
    return _DTYPES[2] if fits else _DTYPES[4]


def _pieces(source: _Source) -> Iterator[NDArray[Any]]:
    """Cut arrays into pieces small enough to convert in memory."""
    for array in [source] if isinstance(source, (np.ndarray, TokenFile)) else source:
        if not isinstance(array, TokenFile):
            refuse_masked(array, "tokens")
            array = np.asarray(array)
            if array.dtype.kind not in "iuf":
                raise TypeError(f"tokens must be integers, not {array.dtype}")
            if array.ndim != 1:
                hint = "; for a list of ids: numpy.array(ids)" if array.ndim == 0 else ""
                raise ValueError(f"tokens must be 1-D arrays, not of shape {array.shape}{hint}")
        for start in range(0, len(array), _CHUNK):
            yield array[start : start + _CHUNK]


def _checked_pieces(source: _Source, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Convert the pieces to ``dtype``, refusing what it cannot hold."""
    position = 0
    for piece in _pieces(source):
        bad = find_bad_token(piece, 0, len(piece), int(np.iinfo(dtype).max) + 1)
        if bad is not None:
            raise ValueError(f"tokens[{position + bad.position}]={bad.value} is not an integer that fits {dtype}")
        yield piece.astype(dtype)
        position += len(piece)


def _numbered(pieces: Iterator[NDArray[Any]], limit: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Cut pieces where shards of ``limit`` tokens end, each with the number of its shard."""
    position = 0
    for piece in pieces:
        while piece.size:
            number, used = divmod(position, limit)
            head, piece = piece[: limit - used], piece[limit - used :]
            yield number, head
            position += head.size


def _write_shard(path: Path, dtype: np.dtype[Any], parts: Iterator[NDArray[Any]]) -> None:
    """Write one new file and have it on the disk."""
    count = 0
    with open(path, "xb") as file:
        file.write(bytes(_HEADER.size))
        for part in parts:
            file.write(part.data)
            count += part.size
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, 0, 0, count))
        file.flush()
        os.fsync(file.fileno())


def _number_shard(path: Path, number: int, shards: int) -> None:
    """Write into a shard which one it is, now that it is known of how many."""
    with open(path, "r+b") as file:
        file.seek(_NUMBERS_AT)
        file.write(struct.pack("<HH", number, shards))
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
