"""Test object stores: one that refuses, one that fails and recovers, and a server that speaks S3."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradcam.errors import StoreError
from gradcam.images.files import is_url, to_path
from gradcam.storage import retry as failures
from gradcam.storage import retry as waiting
from gradcam.storage.store import Store
from tests.stores import ObjectStore, down, objects


@pytest.fixture
def fs() -> Iterator[type[ObjectStore]]:
    with objects() as actual:
        yield actual


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds that retries would wait."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(failures.time, "sleep", sleep)
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    return slept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/photos", True), ("gs://b", True), ("az://c/d", True), ("memory://x", True), ("http://h/x", True),
        ("simplecache::s3://b/x", True), ("photos", False), ("/photos/a.jpg", False), ("C:\\photos", False),
        ("C:/photos", False), ("a:b.jpg", False), ("file:///photos", False), ("FILE:///photos", False), ("-", False),
    ],
)  # fmt: skip
def test_what_is_a_url(text: str, expected: bool) -> None:
    assert is_url(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///a/b.jpg", "/a/b.jpg"), ("file://localhost/a/b.jpg", "/a/b.jpg"), ("file://a/b.jpg", "a/b.jpg"),
        ("local:///a", "/a"), ("file:///a%20b/%C3%BC.jpg", "/a b/ü.jpg"), ("a%20b.jpg", "a%20b.jpg"), ("/a", "/a"),
    ],
)  # fmt: skip
def test_a_file_url_is_a_path(text: str, expected: str) -> None:
    assert to_path(text) == expected


def test_what_is_written_is_found_and_read(fs: Any) -> None:
    store = Store("objects://bucket/photos/")
    store.write("b/2.jpg", b"two")
    store.write("1.jpg", b"one!")
    store.write("b/2.jpg", b"other")
    Store("objects://bucket/photos-2").write("x.jpg", b"x")
    assert store.find() == {"1.jpg": 4, "b/2.jpg": 5}
    assert list(Store("objects://bucket").find("photos")) == ["photos/1.jpg", "photos/b/2.jpg"]
    assert (store.read("b/2.jpg"), store.read_range("b/2.jpg", 1, 3), store.stamp("1.jpg")[0]) == (b"other", b"the", 4)
    assert (store.read_range("1.jpg", 2, 9), store.read_range("1.jpg", 2, 0)) == (b"e!", b"")
    assert (store.is_file("b"), store.is_file("no")) == (False, False)
    store.remove(["1.jpg", "no"])
    assert store.find() == {"b/2.jpg": 5}
    assert store.find("nothing") == {}
    with pytest.raises(FileNotFoundError):
        store.read("1.jpg")


def test_names_are_relative_and_places_can_be_sent(fs: Any) -> None:
    store = Store("objects://bucket/photos/")
    store.write("a.jpg", b"a")
    assert (str(store), store.name, str(store.parent)) == ("objects://bucket/photos/", "photos", "objects://bucket/")
    assert store.below("a.jpg").read() == b"a"
    assert Store("OBJECTS://bucket/photos").read("a.jpg") == b"a"
    sent = pickle.loads(pickle.dumps(store))
    assert sent == store
    assert sent.read("a.jpg") == b"a"
    assert Store("objects://").find() == {"bucket/photos/a.jpg": 1}


def test_the_state_of_an_object_tells_two_writes_apart(fs: Any) -> None:
    store = Store("objects://bucket")
    store.write("a", b"1")
    before = store.stamp("a")
    assert store.stamp("a") == before
    store.write("a", b"2")
    assert store.stamp("a") != before


def test_what_passes_is_waited_for(fs: Any, waits: list[float]) -> None:
    store = Store("objects://bucket")
    fs.failures += [down(), TimeoutError(), OSError(errno.EIO, "Internal error")]
    store.write("a", b"1")
    assert waits == [0.5, 1.0, 2.0]
    assert fs.written == ["/bucket/a"]
    assert store.read("a") == b"1"


@pytest.mark.parametrize(("status", "kind"), [(401, PermissionError), (403, PermissionError), (400, OSError)])
def test_what_a_server_refuses_is_not_waited_for(fs: Any, waits: list[float], status: int, kind: type[OSError]) -> None:
    from aiohttp import ClientResponseError, RequestInfo
    from multidict import CIMultiDict, CIMultiDictProxy
    from yarl import URL

    info = RequestInfo(URL("http://there/a"), "PUT", CIMultiDictProxy(CIMultiDict()), URL("http://there/a"))

    def refuse(status: int) -> ClientResponseError:
        return ClientResponseError(info, (), status=status, message="not for you")

    fs.failures.append(refuse(status))
    with pytest.raises(kind, match="not for you"):
        Store("objects://bucket").write("a", b"1")
    assert waits == []
    fs.failures += [refuse(503), refuse(429)]
    Store("objects://bucket").write("a", b"1")
    assert waits == [0.5, 1.0]


def test_a_store_that_stays_down_is_said_to_be(fs: Any, waits: list[float]) -> None:
    fs.failures += [down() for _ in range(99)]
    with pytest.raises(StoreError) as caught:
        Store("objects://bucket").read("a.jpg")
    reason = "the store has not answered correctly for 60 s (Connection refused)"
    assert str(caught.value) == f"objects://bucket/a.jpg: {reason}; try again later"
    assert sum(waits) == pytest.approx(failures.RETRY_SECONDS)
    assert max(waits) == failures.MAX_WAIT_SECONDS


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the messages about waiting appear soon."""
    monkeypatch.setattr(waiting, "NOTICE_SECONDS", 0.4)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.02)


@pytest.mark.slow
def test_what_is_waited_for_is_said_once_for_each_outage(
    fs: Any, hasty: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failures, "MIN_WAIT_SECONDS", 0.8)
    store = Store("objects://outage")
    store.write("a", b"1")
    for number in range(2):
        fs.failures += [down() for _ in range(6)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(store.read, "aaaa")) == [b"1"] * 4
        assert store.read("a") == b"1"  # The store works again.
        assert [record.getMessage() for record in caplog.records] == [
            "objects://outage/a: the store does not answer correctly (Connection refused); still waiting"
        ] * (number + 1)
    assert {(record.name, record.levelname) for record in caplog.records} == {("gradcam", "WARNING")}


def test_a_store_that_is_silent_is_said_to_be_waited_for(hasty: None, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):  # longer than a request that began before the test
        assert failures.call_with_retries(lambda: time.sleep(0.8) or 1, f"objects://silent/{name}") == 1
    assert [record.getMessage() for record in caplog.records] == [
        "objects://silent/a: no complete answer from the store for 0 s; still waiting"
    ]
    deadline = time.monotonic() + 5
    while any(thread.name == "gradcam-stores" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_does_not_try_again_for_minutes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    s3fs.S3FileSystem.clear_instance_cache()
    start = time.monotonic()
    with pytest.raises(StoreError, match="has not answered correctly"):
        Store("s3://patience").find()
    assert time.monotonic() - start < 15  # at most 1 s between the two attempts
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_store_that_was_given_up_is_not_waited_for_again_at_once(fs: Any, waits: list[float]) -> None:
    store = Store("objects://bucket/out")
    fs.failures += [down() for _ in range(99)]
    with pytest.raises(StoreError):
        store.read("a.jpg")
    before = len(waits)
    for another_store in (store, Store("objects://bucket")):
        with pytest.raises(StoreError):
            another_store.write("b", b"1")
    assert len(waits) == before
    with pytest.raises(StoreError):
        Store("objects://other").read("a.jpg")  # a bucket that has not failed yet
    assert sum(waits[before:]) == pytest.approx(failures.RETRY_SECONDS)
    fs.failures.clear()
    store.write("b", b"1")  # the store works again
    fs.failures.append(down())
    assert store.read("b") == b"1"


@pytest.mark.parametrize(("error", "tries"), [(down(), 1), (TimeoutError(), 0)])
def test_a_store_that_was_given_up_for_its_silence_is_not_asked_again_at_once(
    fs: Any, waits: list[float], monkeypatch: pytest.MonkeyPatch, error: OSError, tries: int
) -> None:
    """Check that a store that timed out is not tried for each object.

    Each attempt would take as long as the client's time-out. A refusal is different: it may concern a single object.
    """
    fs.failures += [error] * 99
    with pytest.raises(StoreError):
        Store("objects://bucket").read("a.jpg")
    before = len(fs.requests)
    with pytest.raises(StoreError, match=r"^objects://bucket/b.jpg: .* for 60 s"):
        Store("objects://bucket").read("b.jpg")
    assert len(fs.requests) - before == tries
    monkeypatch.setattr(failures.time, "monotonic", lambda: 2.1 * failures.RETRY_SECONDS)
    fs.failures.clear()
    Store("objects://bucket").write("b.jpg", b"1")  # A minute later, the store is tried again.


def test_a_reader_in_a_hurry_leaves_patience_to_others(fs: Any, waits: list[float]) -> None:
    fs.failures += [TimeoutError()] * 99
    for _ in range(2):
        with pytest.raises(StoreError, match="for 5 s"), failures.limit_retries():
            Store("objects://bucket").read("a.jpg")
    assert sum(waits) == pytest.approx(failures.SHORT_RETRY_SECONDS)
    with pytest.raises(StoreError, match="for 60 s"):
        Store("objects://bucket").read("a.jpg")
    assert sum(waits) == pytest.approx(failures.RETRY_SECONDS)


def test_what_is_directly_in_a_folder(fs: Any) -> None:
    store = Store("objects://bucket/out")
    for name in ("run.json", "manifest/00001.jsonl", "manifest/deep/x", "b/c/d.jpg", "a.jpg"):
        store.write(name, b"1")
    Store("objects://bucket/outer").write("x", b"1")
    assert store.list_names() == ["a.jpg", "b/", "manifest/", "run.json"]
    assert store.list_names("manifest") == ["manifest/00001.jsonl", "manifest/deep/"]
    assert (store.list_names("none"), store.list_names("a.jpg")) == ([], [])
    assert Store("objects://bucket").list_names() == ["out/", "outer/"]
    assert Store("objects://").list_names() == ["bucket/"]


def test_many_are_removed_and_written_at_once(fs: Any) -> None:
    store = Store("objects://bucket")
    store.write_all({f"{i}": b"x" * i for i in range(40)})
    assert store.find() == {f"{i}": i for i in range(40)}
    store.remove([*map(str, range(1, 40)), "none"])
    assert store.find() == {"0": 0}
    store.write_all({})


def test_slashes_at_the_end_of_a_url_say_nothing() -> None:
    urls = {"s3://b/x/": "s3://b/x", "s3://b//": "s3://b", "s3://": "s3://", "s3:///": "s3://"}
    assert {url: Store(url).url for url in urls} == urls


def test_a_server_that_speaks_the_protocol(s3: str, tmp_path: Path) -> None:
    store = Store(f"{s3}/a folder")
    for name, data in (("b/ü #1.jpg", b"one"), ("[a]*?.jpg", b"two!"), ("b.jpg", b"3")):
        store.write(name, data)
    store.write_all({"c/1": b"c", "c/2": b""})
    Store(s3).write("a folder-2/x", b"x")
    Store(s3).write("a folder/", b"")  # the empty object that consoles create for an empty folder
    assert store.find() == {"[a]*?.jpg": 4, "b.jpg": 1, "b/ü #1.jpg": 3, "c/1": 1, "c/2": 0}
    assert store.list_names() == ["[a]*?.jpg", "b.jpg", "b/", "c/"]
    assert (store.read("[a]*?.jpg"), store.read_range("b/ü #1.jpg", 1, 9)) == (b"two!", b"ne")
    before = store.stamp("b.jpg")
    store.write("b.jpg", b"4")
    assert store.stamp("b.jpg") != before
    (tmp_path / "file").write_bytes(b"from a file")
    store.upload("d.tar", str(tmp_path / "file"))
    assert store.read_range("d.tar", 5, 99) == b"a file"
    assert pickle.loads(pickle.dumps(store)).read("b.jpg") == b"4"
    store.remove(["[a]*?.jpg", "none", "c/1"])
    assert list(store.find()) == ["b.jpg", "b/ü #1.jpg", "c/2", "d.tar"]
    for call in (store.read, store.stamp):
        with pytest.raises(FileNotFoundError):
            call("none")
    assert (store.is_file("b"), Store(f"{s3}/none").find(), Store(f"{s3}/none").list_names()) == (False, {}, [])
    for call in (Store("s3://nothing-here/x").find, Store("s3://nothing-here/x").list_names):
        with pytest.raises(FileNotFoundError):
            call()


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("Access Denied"), IsADirectoryError("x")])
def test_what_waiting_does_not_mend_is_raised_at_once(fs: Any, waits: list[float], error: OSError) -> None:
    fs.failures.append(error)
    with pytest.raises(type(error)):
        Store("objects://bucket").read("a")
    assert waits == []


def test_a_mistake_in_the_code_is_none_of_the_store(fs: Any, waits: list[float]) -> None:
    fs.failures.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        Store("objects://bucket").read("a")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3x://bucket", "s3x://bucket: is not a supported URL .*Protocol not known: s3x"),
        ("gs://bucket", r'gs:// needs an additional package: pip install "\.\[gcs\]"'),
    ],
)
def test_urls_that_cannot_be_followed_say_so(url: str, message: str) -> None:
    if url.startswith("gs") and __import__("importlib.util").util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(StoreError, match=message):
        Store(url).find()


def test_missing_credentials_are_said_in_one_line(fs: Any, waits: list[float]) -> None:
    kind = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})
    fs.failures.append(kind("Unable to locate credentials"))
    with pytest.raises(StoreError, match=r"no valid credentials \(Unable to locate credentials\)"):
        Store("objects://bucket").find()
    assert waits == []
    fs.failures.append(type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})("no"))
    assert Store("objects://bucket").find() == {}
    assert waits == [0.5]


def test_two_colons_alone_make_no_url() -> None:
    assert not is_url("weird::name.jpg")
    assert is_url("zip::simplecache::s3://b/x")


def test_a_url_is_checked_without_a_request(fs: Any) -> None:
    Store("objects://bucket").check()
    assert fs.requests == []
    with pytest.raises(StoreError, match="is not a supported URL"):
        Store("nonsense://bucket").check()
