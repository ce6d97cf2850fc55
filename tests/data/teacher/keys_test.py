from __future__ import annotations

import stat

import pytest
import zmq

from mixle.data.teacher.keys import Admission, Keys, require_keys


def test_saved_keys_come_back_and_only_their_owner_may_read_them(tmp_path):
    keys = Keys.generate()
    keys.save(tmp_path / "keys")
    assert Keys.load(tmp_path / "keys") == keys
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()} == {0o600}


def test_a_client_needs_no_secret_of_the_broker(tmp_path):
    keys = Keys.generate()
    keys.save(tmp_path)
    (tmp_path / "server.json").unlink()
    client = require_keys(tmp_path)
    assert client.server_secret is None and client.client_secret == keys.client_secret
    with pytest.raises(ValueError, match="a broker needs it"):
        client.require_server()


def test_keys_are_not_overwritten(tmp_path):
    Keys.generate().save(tmp_path)
    with pytest.raises(FileExistsError, match="give another directory"):
        Keys.generate().save(tmp_path)


def test_a_directory_without_keys_says_how_to_make_some(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"make some with `mixle teacher keys {tmp_path}`") as missing:
        require_keys(tmp_path)
    assert missing.value.filename == str(tmp_path / "client.json")


def test_keys_that_others_may_read_are_refused(tmp_path):
    Keys.generate().save(tmp_path)
    (tmp_path / "client.json").chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        Keys.load(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"client_public": 1}'])
def test_a_file_that_holds_no_keys_is_named(tmp_path, content):
    Keys.generate().save(tmp_path)
    (tmp_path / "client.json").write_text(content)
    with pytest.raises(ValueError, match=r"client\.json must hold"):
        Keys.load(tmp_path)


def test_a_malformed_key_is_named():
    keys = Keys.generate()
    with pytest.raises(ValueError, match="client_secret must be a key of 40 characters"):
        Keys(keys.server_public, keys.client_public, "short")


def test_anything_else_than_keys_or_their_directory_is_refused():
    assert require_keys(None) is None
    with pytest.raises(TypeError, match="a directory, Keys or None, not int"):
        require_keys(3)


def test_secrets_are_not_printed():
    keys = Keys.generate()
    assert keys.client_secret not in repr(keys) and keys.server_secret not in repr(keys)


def test_a_receiver_with_a_key_of_its_own_admits_the_runs_clients_only():
    keys, others = Keys.generate(), Keys.generate()
    with zmq.Context() as context, zmq.Context() as elsewhere:
        admission = Admission(context, keys)
        receiver = context.socket(zmq.PULL)
        public = keys.secure_receiver(receiver)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        senders = []
        for who in (others, keys):
            sender = elsewhere.socket(zmq.PUSH)
            sender.linger = 0
            who.secure_client(sender, public)
            sender.connect(f"tcp://127.0.0.1:{port}")
            sender.send(who.client_public.encode(), zmq.NOBLOCK) if who is keys else None
            senders.append(sender)
        poller = zmq.Poller()
        poller.register(receiver, zmq.POLLIN)
        poller.register(admission.socket, zmq.POLLIN)
        received = None
        for _ in range(100):
            ready = dict(poller.poll(20_000))
            assert ready, "nobody was admitted"
            admission.handle()
            if receiver in ready:
                received = receiver.recv()
            if received is not None and admission.refused:
                break
        assert received == keys.client_public.encode() and admission.refused >= 1
        for socket in (*senders, receiver):
            socket.close(0)
        admission.close()
