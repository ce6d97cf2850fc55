"""Join a run: take the id, make or find the run, move the parameters to its newest versions, and build the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.alignment import Overwrite
from mixle.diloco.clock import Clock
from mixle.diloco.compression import Codec
from mixle.diloco.exchange import Exchange, Gather, Report, gather_on_threads
from mixle.diloco.existing_run import read_run_record, schema_of
from mixle.diloco.learner import Learner
from mixle.diloco.lease import Lease, LeaseKeeper, Liveness
from mixle.diloco.mailbox import Mailbox, MailboxError
from mixle.diloco.node import Node
from mixle.diloco.node_info import NodeInfo
from mixle.diloco.parameters import Parameters
from mixle.diloco.peers import Peers, Role
from mixle.diloco.records import RunRecord
from mixle.diloco.versions import Versions
from mixle.diloco.wire import Wire

__all__ = ["Member", "join"]


@dataclass(frozen=True)
class Member:
    """A node that has joined, without threads: whoever holds it calls ``node.tick``, ``keeper.tick`` and the learner.

    Attributes:
        lease: held.
        learner: the training half; None for a syncer.
        peers: who takes part.
        run: the run.
        exchange: reads and writes it.
    """

    lease: Lease
    liveness: Liveness
    keeper: LeaseKeeper
    learner: Learner | None
    node: Node
    peers: Peers
    run: RunRecord
    exchange: Exchange

    def leave(self, farewell: bytes, report: Report) -> None:
        """End the keeper and release the lease with these last words, if it is still this node's."""
        _let_go(self.lease, self.keeper, farewell, report)


def join(
    parameters: Parameters | None,
    algorithm: DiLoCo,
    *,
    mailbox: Mailbox,
    name: str,
    role: Role,
    codec: Codec,
    lease_every: float,
    lease_timeout: float,
    clock: Clock,
    report: Report,
    keep: Callable[[LeaseKeeper], None],
    training_clock: Clock | None = None,
    gather: Gather = gather_on_threads,
) -> Member:
    """Join the run in ``mailbox``, or make it with these parameters; a syncer's are left alone.

    Args:
        parameters: of the model; a syncer needs none, once there is a run.
        keep: called once the id is held, to have the lease renewed from then on: reading a model takes a while.
        training_clock: what the learner waits by, ``clock`` if None.
        gather: makes reads that do not wait for one another.

    Raises:
        TypeError, ValueError: an argument that is not what it should be.
        AlgorithmMismatch, SchemaMismatch: the run is another.
        IdInUse: a living process has the id.
        MailboxError: the store does not answer.
        CorruptPayload: a fragment has no version that can be read.
    """
    schema = schema_of(read_run_record(mailbox)) if parameters is None else parameters.schema
    sizes = {spec.name: schema.nbytes(spec.name) for spec in schema.parameters}
    fragments = algorithm.partition.split(sizes, algorithm.fragments)
    exchange = Exchange(mailbox, schema, fragments, codec=codec, report=report, gather=gather)
    liveness = Liveness(mailbox, lease_timeout=lease_timeout, clock=clock)
    peers = Peers(mailbox, liveness)
    lease = Lease(mailbox, name, lease_every=lease_every, lease_timeout=lease_timeout, clock=clock)
    keeper = LeaseKeeper(lease, liveness, clock=clock)
    keeper.info = NodeInfo(role).to_bytes()
    lease.acquire()
    try:
        keeper.tick()
        keep(keeper)
        base = [] if parameters is None else [parameters.read(names) for names in fragments]
        embeddings = frozenset() if parameters is None else parameters.embeddings
        buffers = frozenset() if parameters is None else parameters.buffers
        run = exchange.open_run(algorithm, base, embeddings=embeddings, buffers=buffers)
        versions = Versions(exchange, run, Wire.of(algorithm), report)
        newest, held = versions.load_all()
        learner = None
        if parameters is not None and role != "syncer":
            for version in held:
                parameters.align(version.theta, version.theta, Overwrite())
            learner = Learner(
                parameters,
                algorithm,
                fragments,
                anchors=[version.theta for version in held],
                versions=[version.round for version in held],
                seen=newest,
                buffers=exchange.buffers,
                clock=clock if training_clock is None else training_clock,
            )
        node = Node(
            name,
            exchange,
            algorithm,
            versions,
            newest=newest,
            at=[version.round for version in held],
            learner=learner,
            closes=_closes(role, peers),
            embeddings=frozenset(run.embeddings),
            peers=peers,
            clock=clock,
            report=report,
        )
    except BaseException:
        _let_go(lease, keeper, b"", report)
        raise
    return Member(lease, liveness, keeper, learner, node, peers, run, exchange)


def _let_go(lease: Lease, keeper: LeaseKeeper, farewell: bytes, report: Report) -> None:
    keeper.stop()
    if lease.held and keeper.error is None:
        try:
            lease.release(farewell)
        except MailboxError as error:
            report("store", None, {"error": f"the lease is not released, and runs out: {error}"})


def _closes(role: Role, peers: Peers) -> Callable[[], bool]:
    """Return what tells whether a node of this role closes rounds now."""
    if role == "either":
        return lambda: not peers.syncers()
    return lambda: role != "learner"
