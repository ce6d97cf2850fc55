"""Who takes part in a run right now, and in which role."""

from __future__ import annotations

from mixle.diloco.lease import Liveness, read_info
from mixle.diloco.mailbox import Mailbox
from mixle.diloco.node_info import NodeInfo, Role

__all__ = ["Peers", "Role"]


class Peers:
    """The nodes of a run, as one of them sees them.

    Args:
        mailbox: where their leases are.
        liveness: what this node knows of the leases.
    """

    def __init__(self, mailbox: Mailbox, liveness: Liveness) -> None:
        self._mailbox, self._liveness = mailbox, liveness
        self._roles: dict[tuple[str, int | None], Role] = {}

    def is_gone(self, node: str) -> bool:
        """Tell whether a node has left or fallen silent; one that has not been seen yet may just have come."""
        return self._liveness.states.get(node) in ("silent", "released")

    def learners(self) -> frozenset[str]:
        """Return the living nodes that train; one that has not said what it does may be one."""
        return frozenset(node for node in self._living() if self._role(node) != "syncer")

    def syncers(self) -> frozenset[str]:
        """Return the living nodes that close rounds and do nothing else."""
        return frozenset(node for node in self._living() if self._role(node) == "syncer")

    def _living(self) -> list[str]:
        return sorted(self._liveness.alive)

    def _role(self, node: str) -> Role | None:
        key = (node, self._liveness.epoch(node))
        if key not in self._roles:
            said = NodeInfo.parse(read_info(self._mailbox, node)).role
            if said is None:
                return None
            self._roles[key] = said
        return self._roles[key]
