"""What every mailbox does, in memory, in a folder and in a real S3 server's bucket."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from moto_server import environment, moto_server

from mixle.diloco.mailbox import ObjectTooLarge, require_id
from mixle.diloco.object_store import open_mailbox

ROOT = Path(__file__).parents[2]
BIG = (5 << 20) + 1


@pytest.fixture(scope="module")
def s3():
    with moto_server() as variables, environment(variables):
        yield


@pytest.fixture(params=("memory", "file", "s3"))
def url(request, tmp_path) -> str:
    return new_url(request.param, request, tmp_path)


@pytest.fixture(params=("file", "s3"))
def url_for_processes(request, tmp_path) -> str:
    return new_url(request.param, request, tmp_path)


def new_url(kind: str, request, tmp_path) -> str:
    if kind == "s3":
        request.getfixturevalue("s3")
    name = uuid.uuid4().hex
    return {"memory": f"memory://{name}", "file": f"file://{tmp_path}/box", "s3": f"s3://bucket/{name}"}[kind]


@pytest.fixture
def mailbox(url):
    return open_mailbox(url, part_bytes=5 << 20)


def test_what_is_put_is_got(mailbox):
    assert mailbox.put_if_absent("rounds/1", b"\x00one\xff")
    assert mailbox.get("rounds/1") == b"\x00one\xff"


def test_a_get_returns_plain_bytes(mailbox):
    mailbox.put_if_absent("a", b"1")
    assert type(mailbox.get("a")) is bytes


def test_an_object_may_be_empty(mailbox):
    assert mailbox.put_if_absent("empty", b"")
    assert mailbox.get("empty") == b""


def test_the_first_write_stays(mailbox):
    mailbox.put_if_absent("a", b"first")
    assert not mailbox.put_if_absent("a", b"second")
    assert mailbox.get("a") == b"first"


def test_the_same_bytes_by_another_call_are_not_this_calls_write(mailbox):
    mailbox.put_if_absent("a", b"same")
    assert not mailbox.put_if_absent("a", b"same")


def test_what_was_not_put_is_none(mailbox):
    mailbox.put_if_absent("folder/a", b"1")
    assert mailbox.get("folder/b") is None
    assert mailbox.get("elsewhere/a") is None


def test_a_folder_is_no_object(mailbox):
    mailbox.put_if_absent("folder/a", b"1")
    assert mailbox.get("folder") is None


def test_another_mailbox_at_the_same_address_sees_the_objects(mailbox, url):
    mailbox.put_if_absent("a", b"1")
    assert open_mailbox(url).get("a") == b"1"


def test_a_list_is_sorted_and_goes_into_subfolders(mailbox):
    for key in ("r/b", "r/a/2", "r/a/10", "r/a-b", "s/1", "rr/1"):
        mailbox.put_if_absent(key, b"")
    assert mailbox.list("r/") == ["r/a-b", "r/a/10", "r/a/2", "r/b"]
    assert mailbox.list("") == ["r/a-b", "r/a/10", "r/a/2", "r/b", "rr/1", "s/1"]


def test_a_list_begins_after_a_key(mailbox):
    for key in ("r/0", "r/1/x", "r/2/x", "r/2/y", "r/3"):
        mailbox.put_if_absent(key, b"")
    assert mailbox.list("r/", "r/2/x") == ["r/2/y", "r/3"]
    assert mailbox.list("r/", "r/1/y") == ["r/2/x", "r/2/y", "r/3"]
    assert mailbox.list("r/", "r/2") == ["r/2/x", "r/2/y", "r/3"]
    assert mailbox.list("r/", "q") == mailbox.list("r/")
    assert mailbox.list("r/", "s") == []


def test_a_list_may_be_cut_short(mailbox):
    for key in ("a/1", "a/2", "a/3"):
        mailbox.put_if_absent(key, b"")
    assert mailbox.list("a/", limit=2) == ["a/1", "a/2"]
    assert mailbox.list("a/", "a/1", limit=5) == ["a/2", "a/3"]


def test_the_list_of_a_folder_that_is_not_there_is_empty(mailbox):
    assert mailbox.list("nothing/") == []


def test_what_is_deleted_is_gone_and_the_rest_stays(mailbox):
    for key in ("f/1", "f/2", "f/3"):
        mailbox.put_if_absent(key, b"")
    mailbox.delete(["f/1", "f/not-there", "g/neither", "f/3"])
    assert mailbox.list("") == ["f/2"]
    assert mailbox.get("f/1") is None


def test_deleting_nothing_asks_nothing(mailbox):
    mailbox.delete([])
    assert mailbox.traffic.deletes == 0


def test_a_key_can_be_used_again_after_a_delete(mailbox):
    mailbox.put_if_absent("f/a", b"1")
    mailbox.delete(["f/a"])
    assert mailbox.put_if_absent("f/a", b"2")
    assert mailbox.get("f/a") == b"2"


def test_an_object_above_the_readers_limit_is_refused(mailbox):
    mailbox.put_if_absent("a", b"12345")
    assert mailbox.get("a", limit=5) == b"12345"
    with pytest.raises(ObjectTooLarge, match="a holds 5 bytes, more than the 4"):
        mailbox.get("a", limit=4)
    assert mailbox.traffic.bytes_down == 5


@pytest.mark.parametrize("named_by_content", [True, False])
def test_an_object_of_several_parts_comes_back_whole(mailbox, named_by_content):
    data = os.urandom(2 * BIG)
    key = f"payloads/{hashlib.sha256(data).hexdigest()}.st" if named_by_content else "payloads/any"
    assert mailbox.put_if_absent(key, data)
    assert not mailbox.put_if_absent(key, data)
    assert mailbox.get(key) == data
    assert mailbox.list("payloads/") == [key]


def test_the_stores_clock_does_not_go_back_and_is_no_object(mailbox):
    first = mailbox.clock()
    assert isinstance(first, float)
    assert mailbox.clock() >= first
    assert mailbox.list("") == []


def test_it_works_inside_a_running_event_loop(mailbox):
    async def notebook_cell():
        mailbox.put_if_absent("loop/a", b"1")
        return mailbox.get("loop/a"), mailbox.list("loop/")

    assert asyncio.run(notebook_cell()) == (b"1", ["loop/a"])


def test_traffic_is_counted(mailbox):
    mailbox.put_if_absent("a/1", b"123")
    mailbox.put_if_absent("a/1", b"1234")
    mailbox.get("a/1")
    mailbox.get("a/2")
    mailbox.list("a/")
    mailbox.delete(["a/1"])
    seen = mailbox.traffic
    assert (seen.puts, seen.gets, seen.lists, seen.deletes, seen.retries) == (2, 2, 1, 1, 0)
    assert (seen.bytes_up, seen.bytes_down) == (7, 3)


def test_one_of_many_threads_wins_each_key(mailbox):
    start = threading.Barrier(4)

    def race(me: int) -> list[int]:
        start.wait()
        return [key for key in range(25) if mailbox.put_if_absent(f"race/{key}", b"%d" % me)]

    with ThreadPoolExecutor(4) as threads:
        won = list(threads.map(race, range(4)))
    assert sorted(key for keys in won for key in keys) == list(range(25))
    for me, keys in enumerate(won):
        assert all(mailbox.get(f"race/{key}") == b"%d" % me for key in keys)


RACER = """
import sys
from mixle.diloco.object_store import open_mailbox
mailbox = open_mailbox(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(*(key for key in range(100) if mailbox.put_if_absent(f"race/{key:03}", sys.argv[2].encode() * 1000)))
"""


def test_one_of_two_processes_wins_each_key(url_for_processes):
    url = url_for_processes
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, url, me],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for me in "ab"
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert sorted(map(int, won[0] + won[1])) == list(range(100))
    mailbox = open_mailbox(url)
    for me, keys in zip("ab", won, strict=True):
        assert all(mailbox.get(f"race/{int(key):03}") == me.encode() * 1000 for key in keys)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", ".a", "a/.b", "a.", "a b", "é", "a\nb", "-a",
                                 "a#1", "a\\b", "a" * 201, "a/" * 300 + "a"])  # fmt: skip
def test_a_bad_key_is_refused_before_anything_is_asked(key):
    mailbox = open_mailbox("memory://bad-keys")
    for call in (lambda: mailbox.put_if_absent(key, b""), lambda: mailbox.get(key), lambda: mailbox.delete(["b", key])):
        with pytest.raises(ValueError, match="key="):
            call()
    assert mailbox.traffic.puts == mailbox.traffic.gets == mailbox.traffic.deletes == 0


@pytest.mark.parametrize("data", ["text", bytearray(b"1"), memoryview(b"1"), None, 1])
def test_data_that_is_not_bytes_is_refused(data):
    with pytest.raises(TypeError, match="data must be bytes, not"):
        open_mailbox("memory://bad-data").put_if_absent("a", data)


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "a b/"])
def test_a_prefix_that_is_no_folder_is_refused(prefix):
    with pytest.raises(ValueError, match="must be '' or a folder"):
        open_mailbox("memory://bad-prefix").list(prefix)


def test_arguments_of_a_wrong_type_are_refused():
    mailbox = open_mailbox("memory://bad-types")
    with pytest.raises(TypeError, match="key=1 must be a string"):
        mailbox.get(1)
    with pytest.raises(TypeError, match="prefix=None must be a string"):
        mailbox.list(None)
    with pytest.raises(TypeError, match="after=1 must be a string"):
        mailbox.list("", 1)
    with pytest.raises(TypeError, match="keys='a' must be an iterable of keys"):
        mailbox.delete("a")
    with pytest.raises(TypeError, match=r"limit=1\.0 must be an integer"):
        mailbox.get("a", limit=1.0)
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        mailbox.list("", limit=0)


@pytest.mark.parametrize("good", ["a", "site-1", "A.b_c", "9", "a" * 63])
def test_a_good_id_is_returned(good):
    assert require_id(good, "learner_id") == good


@pytest.mark.parametrize("bad", ["", "a/b", ".a", "a.", "_a", "a b", "a" * 64, "ä"])
def test_a_bad_id_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="learner_id="):
        require_id(bad, "learner_id")


def test_an_id_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="learner_id=3 must be a string, not int"):
        require_id(3, "learner_id")
