"""Join the ranks of a torchrun job, agree across them, and never wait for one another without a deadline.

Collectives move data; verdicts go through the group's key-value store instead, because a store can say *who* is
missing. A failure is written there before the failing rank tears its group down, which wakes the peers that wait in a
collective: they find it and raise it under its rank's name.
"""

from __future__ import annotations

import builtins
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mixle.utils.optional_import import optional_import

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["PeerError", "Peers", "join", "require_backend"]

BACKENDS = ("gloo", "nccl")
COLLECTIVE_TIMEOUT_S = 300.0
LAST_WORDS_S = 2.0
COLLECTIVE_FAILURE = re.compile(r"gloo|nccl|connection|socket|timed? ?out|process group|backend", re.IGNORECASE)


class PeerError(RuntimeError):
    """Another rank failed, or did not come; ``ranks`` are those at fault, as far as it can be known."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass
class _Group:
    """The process group that this process is in, shared by every handle that joined it."""

    store: Store
    rank: int
    world: int
    backend: str
    owned: bool
    generation: int
    users: int = 0
    meetings: int = 0
    gone: str | None = None


_group: _Group | None = None
_base_store: Store | None = None
_generation = 0


def require_backend(backend: object) -> str | None:
    """Return ``backend`` if it is None or names a backend that this build of torch has.

    Accepts one name, or one for each kind of device: ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ValueError: it is none of these.
    """
    if backend is None:
        return None
    available = [name for name in BACKENDS if _torch_distributed().is_backend_available(name)]
    if isinstance(backend, str) and all(part.rpartition(":")[2] in available for part in backend.split(",")):
        return backend
    raise ValueError(
        f"backend={backend!r} must be None or one that this build of torch has: {', '.join(map(repr, available))}"
    )


def join(
    *,
    init_process_group: bool = True,
    backend: str | None = None,
    alone: bool = False,
    deadline_s: float = 30.0,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> Peers:
    """Join the process group of this torchrun job, or the one that exists, and return this rank's place in it.

    The group lives until the last :class:`Peers` of this process is closed; one that the caller initialized is used and
    never destroyed. Without torchrun's variables, and without a group, this process works alone.

    Args:
        init_process_group: join the group that ``RANK`` and ``WORLD_SIZE`` describe; False uses only a group that the
            caller has initialized.
        backend: as in :func:`torch.distributed.init_process_group`; None is nccl for CUDA tensors and gloo for others.
        alone: make a group of one if there is no other, for what needs a group even in one process.
        deadline_s: how long a rank waits for its peers where they meet.
        collective_timeout_s: how long a collective may take.

    Raises:
        PeerError: a peer did not come within ``collective_timeout_s``.
        ValueError: ``backend`` is none that this build of torch has, or not that of the group that exists; or the
            environment's ``RANK`` and ``WORLD_SIZE`` are malformed; or a group is needed and may not be made.
    """
    global _group
    require_backend(backend)
    if _group is not None and not _torch_distributed().is_initialized():
        _group.gone, _group = "it was destroyed behind the handle's back", None
    if _group is None:
        _group = _adopt_or_create(init_process_group, backend, alone, collective_timeout_s)
    if _group is not None:
        if backend is not None and backend != _group.backend:
            raise ValueError(f"backend={backend!r} is not {_group.backend!r}, that of the process group that exists")
        _group.users += 1
    return Peers(_group, deadline_s)


def _torch_distributed() -> Any:
    return optional_import("torch.distributed", extra="torch")


def _adopt_or_create(init: bool, backend: str | None, alone: bool, timeout_s: float) -> _Group | None:
    global _generation
    dist = _torch_distributed()
    _generation += 1
    if dist.is_initialized():
        store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        return _Group(store, rank, world, dist.get_backend(), owned=False, generation=_generation)
    place = _torchrun_place() if init else None
    if place is not None:
        store, (rank, world) = _torchrun_store(timeout_s), place
    elif alone and init:
        store, rank, world = dist.HashStore(), 0, 1
    elif alone:
        raise ValueError("init_process_group=False needs a process group that the caller initialized; there is none")
    else:
        return None
    torch = optional_import("torch", extra="torch")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    group = _Group(store, rank, world, chosen, owned=True, generation=_generation)
    if world > 1:
        _meet(group, "joining the process group", "", timeout_s)
    own_keys = dist.PrefixStore(f"mixle/{_generation}/group", store)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(chosen, store=own_keys, rank=rank, world_size=world, timeout=timeout)
    return group


def _torchrun_place() -> tuple[int, int] | None:
    """Return torchrun's (rank, world size), None outside of it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise ValueError(
            f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r} in the environment must be "
            "integers with 0 <= RANK < WORLD_SIZE, as torchrun sets them"
        )
    return rank, world


def _torchrun_store(timeout_s: float) -> Store:
    """Return the job's store; one per process, since rank 0 may be the one that serves it."""
    global _base_store
    if _base_store is None:
        rendezvous = optional_import("torch.distributed.rendezvous", extra="torch").rendezvous
        _base_store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
    return _base_store


class Peers:
    """This rank's place among the ranks that work on one thing; a context manager that leaves the group.

    Every method that waits is called by all ranks in the same order, and returns at once in a process that is alone.
    """

    def __init__(self, group: _Group | None, deadline_s: float) -> None:
        self._group, self._closed, self.deadline_s = group, False, deadline_s
        self.rank, self.world = (0, 1) if group is None else (group.rank, group.world)

    @property
    def has_group(self) -> bool:
        """Whether a torch process group exists, even if this process is alone in it."""
        return self._group is not None

    def with_deadline(self, deadline_s: float) -> Peers:
        """Return the same place in the group, waiting longer or shorter; it is left by closing this one."""
        view = Peers(self._group, deadline_s)
        view._closed = True
        return view

    def meet(self, what: str, *, deadline_s: float | None = None) -> None:
        """Wait until every rank is here.

        Raises:
            PeerError: some did not come within the deadline; names them, and the group stays usable. Or the group is
                gone.
        """
        self.exchange(what, "", deadline_s=deadline_s)

    def exchange(self, what: str, value: str, *, deadline_s: float | None = None) -> list[str]:
        """Return every rank's ``value``, in rank order; for a few bytes. Raises as :meth:`meet` does."""
        group = self._shared()
        if group is None:
            return [value]
        key = _meet(group, what, value, self.deadline_s if deadline_s is None else deadline_s)
        return [group.store.get(f"{key}/{rank}").decode() for rank in range(group.world)]

    def agree(self, what: str, error: Exception | None, *, deadline_s: float | None = None) -> None:
        """Raise on every rank if any rank has an ``error``: its own where it has one, else the lowest rank's.

        A built-in exception keeps its type on the other ranks, any other becomes a :class:`PeerError`. Raises as
        :meth:`meet` does.
        """
        group = self._shared()
        if group is not None:
            told = "" if error is None else f"{type(error).__name__}\n{error}"
            try:
                deadline = self.deadline_s if deadline_s is None else deadline_s
                key = _meet(group, what, told, deadline, failed=error is not None)
            except PeerError:
                if error is None:
                    raise
            else:
                if error is None and group.store.add(f"{key}/failures", 0):
                    for rank in range(group.world):
                        if told := group.store.get(f"{key}/{rank}").decode():
                            raise _rebuilt(rank, told)
        if error is not None:
            raise error

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Run a stretch of collectives; if any rank fails in it, all raise.

        The failing rank publishes its error and tears the group down, whereupon the peers' collectives fail and they
        raise a :class:`PeerError` that names it: at once if its connections close with the group or its process ends,
        else when the collective times out. The group is then gone for every handle of these processes.
        """
        group = self._shared()
        try:
            yield
        except BaseException as error:
            if group is None:
                raise
            waited = _is_collective_failure(error)
            word = "waited for its peers" if waited else f"{type(error).__name__}: {error}"
            group.store.set(_last_word(group, group.rank), f"{'waited' if waited else 'failed'}\n{what}: {word}")
            try:
                if waited:
                    raise _blame(group, what, error) from error
                raise
            finally:
                _tear_down(group, f"{what} failed on rank {group.rank} ({word})")

    def close(self) -> None:
        """Leave the group; the last to leave destroys it if it was made here. Closing twice is harmless."""
        if self._closed or self._group is None:
            return
        self._closed = True
        self._group.users -= 1
        if self._group.users == 0 and self._group.gone is None:
            _tear_down(self._group, "its last user has closed it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shared(self) -> _Group | None:
        """Return the group if there are peers in it."""
        if self._group is not None and self._group.gone is not None:
            raise PeerError(f"the process group is gone: {self._group.gone}", ())
        return self._group if self.world > 1 else None


def _meet(group: _Group, what: str, value: str, deadline_s: float, *, failed: bool = False) -> str:
    """Arrive at the next meeting with a value, wait for all, and return the key under which the values lie.

    Whoever brings the count of arrivals to the world size opens the door. A rank that gives up takes its arrival back,
    so that a later meeting of all still works.
    """
    store, key = group.store, f"mixle/{group.generation}/{group.meetings}/{what}"
    if failed:
        store.add(f"{key}/failures", 1)
    store.set(f"{key}/{group.rank}", value)
    if store.add(f"{key}/arrived", 1) == group.world:
        store.set(f"{key}/open", "")
    try:
        store.wait([f"{key}/open"], timedelta(seconds=deadline_s))
    except RuntimeError as error:
        if store.add(f"{key}/arrived", -1) < group.world - 1:
            missing = tuple(rank for rank in range(group.world) if not store.check([f"{key}/{rank}"]))
            store.delete_key(f"{key}/{group.rank}")
            if failed:
                store.add(f"{key}/failures", -1)
            raise PeerError(
                f"{what}: {_ranks(missing)} did not come within {deadline_s:g} s; every rank must make this call",
                missing,
            ) from error
    group.meetings += 1
    return key


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks)) or 'unknown'}"


def _rebuilt(rank: int, text: str) -> Exception:
    """Return another rank's error as an exception of this one."""
    name, _, message = text.partition("\n")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (OSError, UnicodeError)):
        return kind(f"rank {rank}: {message}")
    return PeerError(f"rank {rank}: {name}: {message}", (rank,))


def _is_collective_failure(error: BaseException) -> bool:
    return isinstance(error, _torch_distributed().DistError) or (
        type(error) is RuntimeError and COLLECTIVE_FAILURE.search(str(error)) is not None
    )


def _last_word(group: _Group, rank: int) -> str:
    return f"mixle/{group.generation}/last-word/{rank}"


def _blame(group: _Group, what: str, error: BaseException) -> PeerError:
    """Wait briefly for the peers' last words, and say whose fault it is."""
    silent = set(range(group.world)) - {group.rank}
    until = time.monotonic() + LAST_WORDS_S
    while silent and time.monotonic() < until:
        for rank in sorted(silent):
            if group.store.check([_last_word(group, rank)]):
                status, _, told = group.store.get(_last_word(group, rank)).decode().partition("\n")
                if status == "failed":
                    return PeerError(f"rank {rank} failed in {told}", (rank,))
                silent.remove(rank)
        time.sleep(0.02)
    at_fault = tuple(sorted(silent))
    return PeerError(
        f"{what}: {_ranks(at_fault)} took no part and said nothing (killed, or stuck elsewhere); "
        f"the collective ended with: {str(error).splitlines()[0]}",
        at_fault,
    )


def _tear_down(group: _Group, why: str) -> None:
    """Destroy the group if it was made here, which also wakes peers in a collective, and remember why it is gone."""
    global _group
    group.gone = why
    if _group is group:
        _group = None
    if group.owned and _torch_distributed().is_initialized():
        _torch_distributed().destroy_process_group()
