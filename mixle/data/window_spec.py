"""The geometry of training windows: which tokens a window reads, which it trains, and who owns them.

A window of ``block`` input tokens starts at token ``s``. With ``targets="last"`` it trains the one token after it,
``s + block``; with ``targets="all"`` input position ``i`` trains token ``s + i + 1``. Everything here follows from
lengths alone, so that every rank computes the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixle.utils.exact import require_choice, require_exact_int, require_nonnegative_int, require_positive_int

Targets = Literal["last", "all"]
Boundary = Literal["exclude", "overlap"]


@dataclass(frozen=True)
class WindowSpec:
    """Say how windows lie in an array of tokens.

    Args:
        block: input tokens per window.
        targets: ``"last"`` trains the token after each window, windows starting at every token; ``"all"`` trains the
            token after each position of the window.
        stride: tokens between the starts of neighbouring windows; ``block`` by default with ``targets="all"``, where
            a larger one skips tokens. It is 1 with ``targets="last"``.

    Raises:
        ValueError: ``stride < block`` with ``targets="all"`` (targets would be trained twice), or a stride other than 1
            with ``targets="last"``.
    """

    block: int
    targets: Targets = "last"
    stride: int | None = None

    def __post_init__(self) -> None:
        block = require_positive_int(self.block, "block")
        require_choice(self.targets, "targets", ("last", "all"))
        usual = 1 if self.targets == "last" else block
        stride = usual if self.stride is None else require_positive_int(self.stride, "stride")
        if self.targets == "last" and stride != 1:
            raise ValueError(f'stride={stride} needs targets="all"; with targets="last" windows start at every token')
        if self.targets == "all" and stride < block:
            raise ValueError(
                f"stride={stride} must be at least block={block}: overlapping windows would train targets twice"
            )
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "stride", stride)

    @property
    def hop(self) -> int:
        """Tokens between the starts of neighbouring windows: ``stride``, resolved."""
        assert self.stride is not None
        return self.stride

    @property
    def targets_per_window(self) -> int:
        """Targets of a full window: 1 or ``block``."""
        return 1 if self.targets == "last" else self.block

    @property
    def shortest(self) -> int:
        """The fewest tokens that have a window."""
        return self.block + 1 if self.targets == "last" else 2

    def window_count(self, n_tokens: int) -> int:
        """Return how many windows ``n_tokens`` consecutive tokens have."""
        if self.targets == "last":
            return max(0, n_tokens - self.block)
        return max(0, -(-(n_tokens - 1) // self.hop))

    def target_count(self, n_tokens: int) -> int:
        """Return how many targets those windows train."""
        return self.window_count(n_tokens) * self.targets_per_window - self.padding(n_tokens)

    def padding(self, n_tokens: int) -> int:
        """Return how many targets the last window lacks; the others are full."""
        windows = self.window_count(n_tokens)
        if self.targets == "last" or windows == 0:
            return 0
        return max(0, self.block - (n_tokens - 1 - (windows - 1) * self.hop))

    def reachable_targets(self, n_tokens: int) -> int:
        """Return how many tokens have context enough to be a target, those that a stride skips included."""
        return max(0, n_tokens - self.shortest + 1)

    def targets_in_windows(self, indices: ArrayLike, n_tokens: int) -> NDArray[np.int64]:
        """Return how many targets each of the windows ``indices`` trains, int64 of the same shape."""
        windows = np.asarray(indices, dtype=np.int64)
        if self.targets == "last":
            return np.ones(windows.shape, dtype=np.int64)
        return np.clip(n_tokens - 1 - windows * self.hop, 0, self.block)


@dataclass(frozen=True)
class Shard:
    """Tokens ``[start, stop)`` of an array; windows and targets are counted from ``start``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        require_nonnegative_int(self.start, "start")
        require_exact_int(self.stop, "stop", minimum=self.start)

    def __len__(self) -> int:
        return self.stop - self.start


def shard_tokens(
    n_tokens: int, replicas: int, replica: int, spec: WindowSpec, *, boundary: Boundary = "exclude"
) -> Shard:
    """Return the tokens that replica ``replica`` of ``replicas`` trains on.

    Args:
        boundary: ``"exclude"`` splits the tokens evenly, and targets whose context crosses a boundary are lost;
            ``"overlap"`` splits the targets evenly, each shard beginning with the tokens before its first target, so
            that none is. With ``stride > block`` it is the windows of the whole array that ``"overlap"`` splits:
            windows restarted at every shard would train other targets than one replica does.
    """
    n_tokens = require_nonnegative_int(n_tokens, "n_tokens")
    replicas = require_positive_int(replicas, "replicas")
    replica = require_exact_int(replica, "replica", minimum=0, maximum=replicas - 1)
    require_choice(boundary, "boundary", ("exclude", "overlap"))
    if boundary == "exclude":
        return Shard(*_split(n_tokens, replicas, replica))
    if spec.targets == "all" and spec.hop > spec.block:
        first, last = _split(spec.window_count(n_tokens), replicas, replica)
        length = (last - first - 1) * spec.hop + spec.block + 1
        start = first * spec.hop
    else:
        first, last = _split(spec.target_count(n_tokens), replicas, replica)
        length = last - first + spec.shortest - 1
        start = first
    return Shard(start, min(n_tokens, start + length)) if last > first else Shard(start, start)


def _split(total: int, parts: int, part: int) -> tuple[int, int]:
    """Return the bounds of one of ``parts`` nearly equal runs of ``[0, total)``."""
    return part * total // parts, (part + 1) * total // parts
