"""A site's own arguments, which need not be those of others; they check themselves before anything is begun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mixle.diloco.compression import Codec, Compression
from mixle.diloco.events import Callback
from mixle.diloco.lease import require_lease_times
from mixle.diloco.mailbox import Mailbox, require_id
from mixle.diloco.node_info import Role
from mixle.diloco.protocols import MAILBOX_MEMBERS, require_members
from mixle.diloco.state_folder import require_folder
from mixle.utils.exact import require_choice, require_finite_float

__all__ = ["MailboxLike", "SiteOptions", "require_mailbox_like"]

MailboxLike = str | os.PathLike[str] | Mailbox


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """A site's own arguments, as :class:`~mixle.diloco.session.Session` describes them.

    Raises:
        TypeError, ValueError: one is not what it says there.
        ImportError: ``compression`` needs a package that is not installed.
    """

    mailbox: MailboxLike
    learner_id: str | None
    poll_interval: float
    compression: Compression
    lease_every: float
    lease_timeout: float
    callbacks: Sequence[Callback]
    role: Role
    state_dir: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        require_mailbox_like(self.mailbox)
        if self.learner_id is not None:
            require_id(self.learner_id, "learner_id")
        self._set("poll_interval", require_finite_float(self.poll_interval, "poll_interval", exclusive_minimum=0.0))
        lease_every, lease_timeout = require_lease_times(self.lease_every, self.lease_timeout)
        self._set("lease_every", lease_every)
        self._set("lease_timeout", lease_timeout)
        self._set("callbacks", _callables(self.callbacks))
        require_choice(self.role, "role", ("both", "learner", "syncer", "either"))
        if self.state_dir is not None:
            require_folder(self.state_dir)
        Codec(self.compression)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def require_mailbox_like(value: Any) -> Any:
    """Return ``value`` if it is an address or a mailbox.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, str | os.PathLike):
        return value
    what = "a URL such as 's3://bucket/prefix', the path of a folder, or a mailbox"
    return require_members(value, "mailbox", MAILBOX_MEMBERS, what)


def _callables(callbacks: Any) -> tuple[Callback, ...]:
    is_sequence = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
    if not is_sequence or not all(callable(each) for each in callbacks):
        raise TypeError(f"callbacks={callbacks!r} must be a sequence of callables")
    return tuple(callbacks)
