"""Addresses, and what is particular to buckets; against a real S3 server."""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from pathlib import Path

import pytest
from moto_server import BUCKET, environment, moto_server, request
from virtual_clock import VirtualClock

from mixle.diloco.mailbox import PermanentMailboxError, TransientMailboxError
from mixle.diloco.object_store import ObjectStoreMailbox, open_mailbox

PART = 5 << 20


@pytest.fixture(scope="module")
def server():
    with moto_server() as variables, environment(variables):
        yield variables["AWS_ENDPOINT_URL"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://x/y", "must begin with one of memory://, file://, s3://, gs://, az://"),
        ("/data", "must begin with one of"),
        ("memory://", "the name in memory://=''"),
        ("memory://a/b", "the name in memory://='a/b'"),
        ("file://data/run", "must be file:// and an absolute folder"),
        ("file:///", "must be file:// and an absolute folder"),
        ("s3://", "must be s3://BUCKET or s3://BUCKET/PREFIX"),
        ("s3://b/a//c", "with no empty part"),
        ("s3://b/../c", "with no empty part"),
        ("s3://b/p?region=x", "options come from the environment"),
    ],
)
def test_a_bad_address_is_refused_by_name(url, message):
    with pytest.raises(ValueError, match="=") as refused:
        open_mailbox(url)
    assert message in str(refused.value)


def test_an_address_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="mailbox=None must be a string"):
        open_mailbox(None)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="part_bytes=1 must be at least 5242880"):
        open_mailbox("memory://a", part_bytes=1)
    with pytest.raises(ValueError, match=r"deadline_s=-1\.0 must be at least"):
        open_mailbox("memory://a", deadline_s=-1)


def test_a_file_address_may_be_quoted(tmp_path):
    open_mailbox(f"file://{tmp_path}/my%20run").put_if_absent("a", b"1")
    assert (tmp_path / "my run" / "a").read_bytes() == b"1"


def test_a_folder_whose_name_is_no_text_is_the_one_that_is_meant(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    open_mailbox(folder).put_if_absent("a", b"1")
    assert (folder / "a").read_bytes() == b"1"


def test_memory_is_shared_by_name():
    open_mailbox("memory://shared").put_if_absent("a", b"1")
    assert open_mailbox("memory://shared").get("a") == b"1"
    assert open_mailbox("memory://another").get("a") is None


def test_without_obstore_a_cloud_address_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ImportError, match=r"pip install 'mixle\[diloco\]'"):
        open_mailbox("s3://bucket")


def test_an_azure_address_without_an_account_is_refused(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError, match=r"az://container cannot be opened: .*Account must be specified"):
        open_mailbox("az://container/run")


def test_google_and_azure_addresses_open_without_asking(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for url in ("az://container/run", "gs://bucket/run"):
        assert open_mailbox(url).traffic.lists == 0


def test_prefixes_of_one_bucket_are_apart(server):
    open_mailbox(f"s3://{BUCKET}/one").put_if_absent("a", b"1")
    assert open_mailbox(f"s3://{BUCKET}/on").list("") == []
    assert "one/a" in open_mailbox(f"s3://{BUCKET}").list("one/")


def test_a_missing_bucket_is_an_error_not_a_missing_object(server):
    mailbox = open_mailbox("s3://no-such-bucket/run")
    for call in (
        lambda: mailbox.get("a"),
        lambda: mailbox.put_if_absent("a", b""),
        lambda: mailbox.list(""),
        lambda: mailbox.delete(["a"]),
        mailbox.clock,
    ):
        with pytest.raises(PermanentMailboxError, match="NoSuchBucket"):
            call()
    assert mailbox.traffic.retries == 0


def test_a_server_that_does_not_answer_is_asked_again_until_the_deadline():
    clock = VirtualClock()
    with environment(
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    ):
        mailbox = open_mailbox("s3://bucket/run", deadline_s=20.0, clock=clock)
    with pytest.raises(TransientMailboxError, match=r"get\('a'\) failed \d+ times .*deadline_s=20"):
        mailbox.get("a")
    assert 10 < clock.monotonic() <= 20
    assert mailbox.traffic.retries == mailbox.traffic.gets - 1 > 5


def test_what_others_put_into_the_bucket_does_not_stop_a_list(server):
    name = uuid.uuid4().hex
    mailbox = open_mailbox(f"s3://{BUCKET}/{name}")
    mailbox.put_if_absent("r/a", b"1")
    for stray in ("r/folder/", "r/%C3%A9", "r/a%231", "r/sp%20ace", "r/.hidden", "%20"):
        assert request(f"{server}/{BUCKET}/{name}/{stray}", "PUT", b"x")
    assert [key for key in mailbox.list("r/") if key != "r/folder"] == ["r/a"]
    assert "r/a" in mailbox.list("")
    assert "r/sp ace" in mailbox.strays


@pytest.mark.parametrize("stray", ["r//z", "r/..%2Fq", "r/.%2Fq"])
def test_a_name_that_obstore_cannot_read_is_gone_past(server, stray, caplog):
    name = uuid.uuid4().hex
    mailbox = open_mailbox(f"s3://{BUCKET}/{name}")
    for key in ("r/0", "r/00", "r/a"):
        mailbox.put_if_absent(key, b"1")
    assert request(f"{server}/{BUCKET}/{name}/{stray}", "PUT", b"x")
    assert mailbox.list("r/") == ["r/0", "r/00", "r/a"]
    assert mailbox.list("r/", limit=2) == ["r/0", "r/00"]
    assert mailbox.list("r/", "r/0") == ["r/00", "r/a"]
    assert "is no key of a mailbox" in caplog.text


def test_a_name_that_obstore_cannot_read_deeper_down_is_an_error_that_names_it(server):
    name = uuid.uuid4().hex
    mailbox = open_mailbox(f"s3://{BUCKET}/{name}")
    assert request(f"{server}/{BUCKET}/{name}/r/x//z", "PUT", b"x")
    with pytest.raises(PermanentMailboxError, match=r"list r/: .*r/x//z"):
        mailbox.list("r/")


@pytest.mark.slow
def test_a_list_goes_over_several_pages(server):
    mailbox = open_mailbox(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    name = mailbox._inner._store.prefix
    for number in range(1001):
        assert request(f"{server}/{BUCKET}/{name}/p/{number:05}", "PUT")
    assert len(mailbox.list("p/")) == 1001
    assert mailbox.traffic.lists == 2
    assert mailbox.list("p/", limit=1) == ["p/00000"]
    assert mailbox.list("p/", "p/00999") == ["p/01000"]
    mailbox.delete(f"p/{number:05}" for number in range(1001))
    assert mailbox.list("p/") == []
    assert mailbox.traffic.deletes == 2


def test_a_large_object_goes_up_in_parts_only_under_its_own_digest(server, monkeypatch):
    mailbox = open_mailbox(f"s3://{BUCKET}/{uuid.uuid4().hex}", part_bytes=PART)
    store, put, options = mailbox._inner, mailbox._inner._obstore.put, []

    class Noted:
        def __getattr__(self, name):
            return getattr(sys.modules["obstore"], name)

        def put(self, *arguments, **given):
            options.append(given)
            return put(*arguments, **given)

    monkeypatch.setattr(store, "_obstore", Noted())
    data = os.urandom(PART + 1)
    mailbox.put_if_absent("any", data)
    mailbox.put_if_absent(f"p/{hashlib.sha256(data).hexdigest()}", data)
    assert options[0] == {"mode": "create"}
    assert options[1]["use_multipart"] and options[1]["chunk_size"] == PART


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("AlreadyExistsError: 409 Conflict: <Code>ConditionalRequestConflict</Code>", TransientMailboxError),
        ("GenericError: Server returned non-2xx status code: 503 Slow Down", TransientMailboxError),
        ("GenericError: Server returned non-2xx status code: 400 Bad Request", PermanentMailboxError),
        ("GenericError: HTTP error: error sending request", TransientMailboxError),
        ("PermissionDeniedError: status code: 403", PermanentMailboxError),
        ("UnauthenticatedError: status code: 401", PermanentMailboxError),
    ],
)
def test_errors_say_whether_to_try_again(raised, expected):
    from obstore import exceptions
    from obstore.store import MemoryStore

    name, _, message = raised.partition(": ")

    class Failing:
        def put(self, *arguments, **options):
            raise getattr(exceptions, name)(message + "\n\nDebug source:\nlong")

    mailbox = ObjectStoreMailbox(MemoryStore())
    mailbox._obstore = Failing()
    with pytest.raises(expected, match="put a: ") as error:
        mailbox.put_if_absent("a", b"")
    assert "Debug source" not in str(error.value)


def test_a_store_whose_bulk_delete_stops_at_a_missing_object_deletes_the_rest(tmp_path):
    from obstore.store import LocalStore

    mailbox = ObjectStoreMailbox(LocalStore(tmp_path))
    for key in ("a", "c", "d"):
        mailbox.put_if_absent(key, b"")
    mailbox.delete(["a", "b", "c"])
    assert mailbox.list("") == ["d"]


# ---- what the environment says


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


@pytest.mark.parametrize(
    "value", ["127.0.0.1:5917", "localhost:5917", "http://", "", " http://x", "ftp://x", "http://x:y"]
)
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_an_endpoint_that_is_no_url_is_refused_by_the_name_of_its_variable(monkeypatch, variable, value):
    for other in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable}='{value}' in the environment must be the URL of a server"):
        open_mailbox("s3://bucket/prefix")
    open_mailbox("memory://elsewhere")


def test_an_azure_endpoint_is_checked_too(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "127.0.0.1:10000")
    with pytest.raises(ValueError, match="AZURE_STORAGE_ENDPOINT='127"):
        open_mailbox("az://container/prefix")


class PanicException(BaseException):
    """As the client's is, which nobody can import."""


def test_a_client_that_breaks_down_as_it_is_made_is_a_wrong_setting(monkeypatch):
    import obstore.store

    def broken(*arguments, **options):
        raise PanicException("unwrap on an Err")

    monkeypatch.setattr(obstore.store, "S3Store", broken)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"s3://bucket cannot be opened, .*unwrap on an Err.* begin with AWS_"):
        open_mailbox("s3://bucket/prefix")


def test_a_client_that_breaks_down_in_a_request_is_an_error_of_the_store():
    from obstore.store import S3Store

    store = S3Store("bucket", endpoint="localhost", access_key_id="a", secret_access_key="b", region="us-east-1")
    with pytest.raises(PermanentMailboxError, match="list a/: obstore broke down"):
        ObjectStoreMailbox(store).list("a/")


def test_who_has_no_credentials_is_told_which_to_set(monkeypatch):
    from obstore import exceptions
    from obstore.store import S3Store

    mailbox = ObjectStoreMailbox(S3Store("bucket", access_key_id="a", secret_access_key="b", region="us-east-1"))

    def refused(*arguments, **options):
        raise exceptions.GenericError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token")

    monkeypatch.setattr(mailbox._obstore, "get", refused)
    with pytest.raises(TransientMailboxError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        mailbox.get("a")


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///data/run"])
def test_a_url_that_was_made_a_path_is_refused(url):
    with pytest.raises(ValueError, match="is a URL that a path has mangled; give it as a string"):
        open_mailbox(Path(url))
