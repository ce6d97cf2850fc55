"""Tell a session's callbacks what happens, none of which may stop it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from mixle.diloco.events import Callback, Event

__all__ = ["Announcer"]

logger = logging.getLogger(__name__)


class Announcer:
    """Call each callback with each event, on the thread where it happens."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._threads: set[int] = set()

    def is_announcing_here(self) -> bool:
        """Tell whether it is a callback that asks."""
        return threading.get_ident() in self._threads

    def announce(self, event: Event) -> None:
        """Call the callbacks; what one raises is logged."""
        here, outermost = threading.get_ident(), not self.is_announcing_here()
        self._threads.add(here)
        try:
            for callback in self._callbacks:
                try:
                    callback(event)
                except Exception:
                    logger.exception("a callback failed at the event %s; training goes on", event)
        finally:
            if outermost:
                self._threads.discard(here)
