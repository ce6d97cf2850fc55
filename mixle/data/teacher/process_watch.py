"""Learn at once that a process of this host has died: one descriptor to poll for all of them."""

from __future__ import annotations

import os
import select

from mixle.data.teacher.run import ProcessIdentity, is_running

HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(select, "epoll")


class ProcessWatch:
    """Watch processes by pidfd; where the system has none left, :meth:`dead` must be called now and then."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if HAS_PIDFD else None
        self._by_descriptor: dict[int, ProcessIdentity] = {}
        self._descriptors: dict[ProcessIdentity, int | None] = {}

    @property
    def fd(self) -> int | None:
        """Readable when :meth:`dead` has something to tell; None where only asking helps."""
        return None if self._epoll is None else self._epoll.fileno()

    def watch(self, identity: ProcessIdentity) -> bool:
        """Begin to watch; return False if there is no such process (any more)."""
        descriptor = None
        if self._epoll is not None:
            try:
                descriptor = os.pidfd_open(identity.pid)
            except ProcessLookupError:
                return False
            except OSError:  # no descriptors left, or a thread's id, which the check below refuses
                descriptor = None
        # Checked with the descriptor open: the pid cannot change hands after.
        if not is_running(identity.pid, identity.start):
            if descriptor is not None:
                os.close(descriptor)
            return False
        if descriptor is not None and self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
            self._by_descriptor[descriptor] = identity
        self._descriptors[identity] = descriptor
        return True

    def unwatch(self, identity: ProcessIdentity) -> None:
        """End watching it; harmless if it was not watched."""
        descriptor = self._descriptors.pop(identity, None)
        if descriptor is not None and self._epoll is not None:
            del self._by_descriptor[descriptor]
            self._epoll.unregister(descriptor)
            os.close(descriptor)

    def dead(self, *, ask: bool) -> list[ProcessIdentity]:
        """Return watched processes that are gone; with ``ask`` those without a descriptor too."""
        found = []
        if self._epoll is not None:
            found = [self._by_descriptor[descriptor] for descriptor, _ in self._epoll.poll(0)]
        if ask:
            found += [
                identity
                for identity, descriptor in self._descriptors.items()
                if descriptor is None and not is_running(identity.pid, identity.start)
            ]
        return found

    def close(self) -> None:
        """End watching all."""
        for identity in list(self._descriptors):
            self.unwatch(identity)
        if self._epoll is not None:
            self._epoll.close()
