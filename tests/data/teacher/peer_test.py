from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from teacher_broker import RUN_ID, FakeBroker, endpoints

from mixle.data.teacher import messages
from mixle.data.teacher.errors import BrokerUnreachable, RequestRefused, VersionMismatch
from mixle.data.teacher.keys import Keys
from mixle.data.teacher.messages import HeldPiece, ModelState
from mixle.data.teacher.peer import Peer, ask
from mixle.data.teacher.run import process_identity

PATIENCE_S = 20.0


def ready(attempt: int = 1, session: bytes | None = None, held: tuple[HeldPiece, ...] = ()) -> messages.Ready:
    return messages.Ready(
        version=messages.PROTOCOL_VERSION,
        attempt=attempt,
        session=session,
        worker_id="w",
        identity=process_identity(),
        slot_size=64,
        max_batch=None,
        patterns=("*",),
        prefetch=2,
        held=held,
        model=messages.NO_MODEL,
        lane=None,
    )


DONE = messages.Done(pieces=(messages.DonePiece(b"t" * 16, 0, 1, messages.DONE, None),), seconds=0.0)


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    with endpoints() as pair:
        yield pair


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def started(peer: Peer, broker: FakeBroker) -> bytes:
    """Let the peer register; return its address at the broker."""
    registered = []
    thread = threading.Thread(target=lambda: registered.append(peer.start(PATIENCE_S)))
    thread.start()
    sender, _ = broker.admit(messages.Ready)
    thread.join()
    assert registered
    return sender


def test_a_peer_registers_and_exchanges_messages(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        sender = started(peer, broker)
        assert peer.registered
        assert peer.send(DONE)
        assert broker.expect(messages.Done) == (sender, DONE)
        broker.send(sender, messages.Stop())
        assert peer.receive(PATIENCE_S) == messages.Stop()


def test_a_peer_that_came_before_its_broker_registers_when_that_comes(addresses: tuple[str, str]) -> None:
    with Peer(addresses[0], ready) as peer:
        assert peer.receive(0) is None
        with FakeBroker(*addresses) as broker:
            started(peer, broker)


def test_a_missing_broker_is_named_by_the_deadline(addresses: tuple[str, str]) -> None:
    with Peer(addresses[0], ready) as peer, pytest.raises(BrokerUnreachable) as caught:
        peer.start(0.05)
    assert f"{addresses[0]} within 0.05 s: nothing listens there" in str(caught.value)


def test_what_listens_and_does_not_answer_is_told_from_a_missing_broker(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        broker.expect(messages.Ready)
        with pytest.raises(BrokerUnreachable, match="something listens there, which is too slow or stopped, or no"):
            peer.start(0.05)


def test_a_refused_registration_raises_with_the_brokers_words(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        sender, _ = broker.expect(messages.Ready)
        broker.send(sender, messages.Error(kind="version", message="version 1, not 7", request_id=None))
        with pytest.raises(VersionMismatch, match="version 1, not 7"):
            peer.start(PATIENCE_S)


def test_a_busy_peer_beats_and_is_registered_again_with_a_new_broker(addresses: tuple[str, str]) -> None:
    held = HeldPiece(b"t" * 16, "/mx0123abcd-1-aaaaaa", 0, 4, 7)
    holding: list[HeldPiece] = []
    with Peer(addresses[0], lambda attempt: ready(attempt, held=tuple(holding))) as peer:
        with FakeBroker(*addresses) as broker:
            started(peer, broker)
            broker.pump_until(lambda: broker.beats > 2)
        # From here on the owner does nothing: it computes.
        holding.append(held)
        with FakeBroker(*addresses) as broker:
            _, message = broker.admit(messages.Ready)
            assert message.held == (held,)
            broker.pump_until(lambda: broker.beats > 2)
            assert peer.welcome is not None
            assert peer.welcome.session in broker.sessions


def test_the_owner_hears_of_a_registration_that_was_made_for_it(addresses: tuple[str, str]) -> None:
    with Peer(addresses[0], ready) as peer:
        with FakeBroker(*addresses) as broker:
            started(peer, broker)
        with FakeBroker(*addresses) as broker:
            sender, _ = broker.admit(messages.Ready)
            broker.pump_until(lambda: peer.registered)
            broker.send(sender, messages.Stop())
            assert isinstance(peer.receive(PATIENCE_S), messages.Welcome)
            assert peer.receive(PATIENCE_S) == messages.Stop()


def test_nothing_is_sent_to_a_broker_that_has_gone(addresses: tuple[str, str]) -> None:
    with Peer(addresses[0], ready) as peer:
        with FakeBroker(*addresses) as broker:
            started(peer, broker)
        wait_until(lambda: not peer.registered)
        assert not peer.send(DONE)
        with FakeBroker(*addresses) as broker:
            broker.admit(messages.Ready)
            broker.pump_until(lambda: peer.registered)


def test_a_peer_whose_connection_is_forgotten_registers_again_and_drops_what_was_before(
    addresses: tuple[str, str],
) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        sender = started(peer, broker)
        broker.send(sender, messages.Who())
        broker.send(sender, messages.Retire(segment_ids=(1,)))
        received: list[messages.Message | None] = []
        thread = threading.Thread(target=lambda: received.extend(peer.receive(PATIENCE_S) for _ in range(2)))
        thread.start()
        broker.admit(messages.Ready)
        broker.send(sender, messages.Retire(segment_ids=(2,)))
        thread.join()
        assert isinstance(received[0], messages.Welcome)
        assert received[1] == messages.Retire(segment_ids=(2,))


def test_a_peer_whose_session_has_expired_registers_again(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        started(peer, broker)
        broker.sessions.clear()
        broker.admit(messages.Ready)


def test_the_answer_to_an_earlier_registration_is_void(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        sender = started(peer, broker)
        broker.sessions.clear()
        _, again = broker.expect(messages.Ready)
        assert again.attempt == 2
        broker.welcome(sender, 1)
        broker.send(sender, messages.Stop())
        assert peer.receive(0.2) is None and not peer.registered
        broker.welcome(sender, 2)
        assert isinstance(peer.receive(PATIENCE_S), messages.Welcome) and peer.registered


def test_a_beat_answered_by_another_broker_makes_a_peer_register_again(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        started(peer, broker)
        broker.broker_id = b"\0" * 8
        broker.admit(messages.Ready)


@pytest.mark.parametrize("way", ["beat", "news"])
def test_a_newer_model_is_told_while_the_owner_is_busy(way: str, addresses: tuple[str, str]) -> None:
    told: list[ModelState] = []
    newer = ModelState(3, "big", None, b"seal")
    with (
        FakeBroker(*addresses) as broker,
        Peer(addresses[0], ready, control_pub_endpoint=addresses[1], on_model=told.append) as peer,
    ):
        started(peer, broker)
        if way == "beat":
            broker.model = newer

        def is_told() -> bool:
            if way == "news":
                broker.publish("MODEL", newer)
            return peer.model == newer

        broker.pump_until(is_told)
        assert told == [newer]


def test_news_of_another_run_or_an_older_model_are_ignored(addresses: tuple[str, str]) -> None:
    newest = ModelState(5, "e", None, b"")
    with (
        FakeBroker(*addresses) as broker,
        Peer(addresses[0], ready, control_pub_endpoint=addresses[1]) as peer,
    ):
        started(peer, broker)

        def is_told() -> bool:
            broker.publish("MODEL", ModelState(9, "foreign", None, b""), run_id="ffffffff")
            broker.publish("MODEL", newest)
            broker.publish("MODEL", ModelState(4, "d", None, b""))
            return peer.model.generation > 0

        broker.pump_until(is_told)
        assert peer.model == newest


def test_news_that_the_broker_stops_reach_the_owner(addresses: tuple[str, str]) -> None:
    with (
        FakeBroker(*addresses) as broker,
        Peer(addresses[0], ready, control_pub_endpoint=addresses[1]) as peer,
    ):
        started(peer, broker)
        received: list[messages.Message | None] = []
        thread = threading.Thread(target=lambda: received.append(peer.receive(PATIENCE_S)))
        thread.start()

        def is_told() -> bool:
            broker.publish("STOP", messages.NO_MODEL)
            return not thread.is_alive()

        broker.pump_until(is_told)
        assert received == [messages.Stop()]


def test_garbage_from_the_broker_is_counted_and_dropped(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        sender = started(peer, broker)
        broker.send_raw(sender, b"WORK", b"\xc1")
        broker.send_raw(sender, b"one frame")
        broker.send(sender, messages.Stop())
        assert peer.receive(PATIENCE_S) == messages.Stop()
        assert peer.protocol_errors == 2


def test_waking_ends_a_wait(addresses: tuple[str, str]) -> None:
    with Peer(addresses[0], ready) as peer:
        peer.wake()
        before = time.monotonic()
        assert peer.receive(PATIENCE_S) is None
        assert time.monotonic() - before < PATIENCE_S


def test_a_fork_is_refused_with_the_fix_and_leaves_the_parents_connection_alone(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker, Peer(addresses[0], ready) as peer:
        started(peer, broker)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                peer.close()
                peer.receive(0)
                answer = b"used it"
            except RuntimeError as error:
                answer = str(error).encode()
            finally:
                os.write(writer, answer)
                os._exit(0)
        os.waitpid(child, 0)
        assert b"make a new one in the child" in os.read(reader, 4096)
        os.close(reader)
        os.close(writer)
        assert peer.send(DONE)
        assert broker.expect(messages.Done)[1] == DONE


def test_a_closed_peer_says_its_farewell_and_refuses_to_be_used(addresses: tuple[str, str]) -> None:
    with FakeBroker(*addresses) as broker:
        peer = Peer(addresses[0], ready)
        started(peer, broker)
        peer.close(messages.Bye())
        peer.close()
        assert broker.expect(messages.Bye)
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            peer.receive(0)


def test_a_peer_that_is_closed_while_it_awaits_its_welcome_takes_its_registration_back(
    addresses: tuple[str, str],
) -> None:
    with FakeBroker(*addresses) as broker:
        peer = Peer(addresses[0], ready)
        sender, _ = broker.expect(messages.Ready)
        peer.receive(0.01)
        peer.close(messages.Bye())
        assert broker.expect(messages.Bye)[0] == sender


def test_a_run_is_asked_for_without_a_registration(addresses: tuple[str, str]) -> None:
    run = messages.Run(
        version=1, run_id=RUN_ID, broker_id=b"b" * 8, model=messages.NO_MODEL, heartbeat_s=0.5, timeout_s=5.0
    )
    answers: list[messages.Run] = []
    with FakeBroker(*addresses) as broker:
        thread = threading.Thread(target=lambda: answers.append(ask(addresses[0], deadline_s=PATIENCE_S)))
        thread.start()
        sender, _ = broker.expect(messages.Ask)
        broker.send(sender, run)
        thread.join()
    assert answers == [run]


def test_asking_nobody_raises_by_the_deadline(addresses: tuple[str, str]) -> None:
    with pytest.raises(BrokerUnreachable, match="nothing listens"):
        ask(addresses[0], deadline_s=0.05)


def test_asking_a_broker_that_refuses_raises(addresses: tuple[str, str]) -> None:
    errors: list[BaseException] = []

    def try_to_ask() -> None:
        with pytest.raises(RequestRefused) as caught:
            ask(addresses[0], deadline_s=PATIENCE_S)
        errors.append(caught.value)

    with FakeBroker(*addresses) as broker:
        thread = threading.Thread(target=try_to_ask)
        thread.start()
        sender, _ = broker.expect(messages.Ask)
        broker.send(sender, messages.Error(kind="refused", message="no more", request_id=None))
        thread.join()
    assert "no more" in str(errors[0])


def test_keys_admit_a_peer_that_has_them(addresses: tuple[str, str]) -> None:
    keys = Keys.generate()
    with FakeBroker(*addresses, keys=keys) as broker, Peer(addresses[0], ready, keys=keys) as peer:
        started(peer, broker)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("client", "refuses this client's key"),
        ("server", "or are these the keys of another run?"),
        ("none", "does one side use keys and the other not"),
    ],
)
def test_wrong_keys_are_refused_and_named(wrong: str, why: str, addresses: tuple[str, str]) -> None:
    keys, others = Keys.generate(), Keys.generate()
    used = {
        "client": Keys(keys.server_public, others.client_public, others.client_secret),
        "server": Keys(others.server_public, keys.client_public, keys.client_secret),
        "none": None,
    }[wrong]
    done = threading.Event()
    errors: list[BaseException] = []

    def try_to_start() -> None:
        try:
            with Peer(addresses[0], ready, keys=used) as peer, pytest.raises(BrokerUnreachable) as caught:
                peer.start(1.0)
            errors.append(caught.value)
        finally:
            done.set()

    with FakeBroker(*addresses, keys=keys) as broker:
        thread = threading.Thread(target=try_to_start)
        thread.start()
        broker.pump_until(done.is_set)
        thread.join()
    assert why in str(errors[0])
