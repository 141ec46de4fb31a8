"""Test that `batch -o URL` and `report URL` give the same results as on disk, even if the store fails."""

from __future__ import annotations

import errno
import json
import logging
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam.batch.formats import store_folder as store_results
from gradcam.cli._terminal import TerminationSignal
from gradcam.errors import StoreError
from gradcam.storage import retry as failures
from gradcam.storage import retry as waiting
from gradcam.storage.store import Store
from tests.cli.test_batch import ORDER, batch, photos
from tests.cli.test_cli import POSIX, Command, Outcome, files, folder, gradcam_command
from tests.s3 import client
from tests.stores import ObjectStore, down, objects

__all__ = ["batch", "folder", "gradcam_command", "photos"]  # fixtures

Patch = pytest.MonkeyPatch
URL = "objects://bucket/out"


@pytest.fixture
def fs() -> Iterator[type[ObjectStore]]:
    with objects() as store:
        yield store


def read_all(url: str) -> dict[str, bytes]:
    """Return the objects that must not depend on interruptions."""
    store = Store(url)
    return {name: store.read(name) for name in store.find() if not name.startswith("log")}


def on_disk(folder: Path) -> dict[str, bytes]:
    """Return the files of a run on disk under the names that a store uses."""
    contents = {name: (folder / name).read_bytes() for name in files(folder)}
    names = {"manifest.jsonl": "manifest/00001.jsonl"}
    return {
        names.get(name, name): data for name, data in contents.items() if not Path(name).name.startswith(("log", "."))
    }


def without_root(contents: dict[str, bytes]) -> dict[str, Any]:
    """Remove the path of the input folder, which differs between a store and a disk."""
    run = json.loads(contents["run.json"])
    run.pop("root")
    return {**contents, "run.json": run}


# Through s3fs, to a server that speaks the protocol


@pytest.mark.parametrize(
    "options", ["--save overlay --save map --save heatmap --method gradcam --method layercam --report"]
)
def test_the_same_bytes_as_on_a_disk(batch: Command, folder: Path, photos: Path, s3: str, options: str) -> None:
    remote = batch("photos", "-o", f"{s3}/a b/out/", *options.split())
    local = batch("photos", "-o", "out", *options.split())
    assert (remote.status, remote.err) == (local.status, local.err) == (1, local.err)
    pace = r"\(\d+\.\d s, \d+\.\d images per second\)"
    assert re.sub(pace, "", remote.out).splitlines() == [
        *re.sub(pace, "", local.out).splitlines()[:1],
        f"  →  {s3}/a b/out/",
        f"  →  {s3}/a b/out/index.html",
    ]
    stored, on_disk_files = without_root(read_all(f"{s3}/a b/out")), without_root(on_disk(folder / "out"))
    assert list(stored) == sorted(on_disk_files)
    assert stored == on_disk_files
    assert gradcam.read_manifest(f"{s3}/a b/out") == gradcam.read_manifest(folder / "out")


def test_going_on_in_a_bucket(batch: Command, folder: Path, photos: Path, s3: str) -> None:
    url = f"{s3}/out"
    assert batch("photos", "-o", url).status == 1
    again = batch("photos", "-o", url)
    assert (again.status, again.out) == (2, "")
    assert f"Error: {url}/: contains an earlier run, with 6 records; give --resume to continue it" in again.err
    (photos / "b" / "broken.jpg").write_bytes((photos / "c" / "coffee.jpg").read_bytes())
    Store(url).remove(["b/koala-gradcam.jpg"])
    outcome = batch("photos", "-o", url, "--resume")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("2 images explained, 4 explained in an earlier run, 1 non-image file ignored")
    assert [record.image for record in gradcam.read_manifest(url)] == ORDER
    batch("photos", "-o", "out")
    stored, on_disk_files = read_all(url), on_disk(folder / "out")
    (piece,) = [name for name in stored if name.startswith("manifest/")]
    assert stored.pop(piece) == on_disk_files.pop("manifest/00001.jsonl")
    assert without_root(stored) == without_root(on_disk_files)


def test_overwriting_in_a_bucket(batch: Command, photos: Path, s3: str) -> None:
    Store(s3).write("out/mine.txt", b"mine")
    batch("photos", "-o", f"{s3}/out", "--report", "--save", "map")
    assert Store(f"{s3}/out").is_file("macaw-gradcam.npy")
    assert batch("photos/b", "-o", f"{s3}/out", "--overwrite").status == 1
    names = ["koala-gradcam.jpg", "manifest/00001.jsonl", "mine.txt", "panda-gradcam.jpg", "run.json"]
    assert [name for name in Store(f"{s3}/out").find() if not name.startswith("log")] == names


def test_shares_of_a_bucket(batch: Command, photos: Path, s3: str) -> None:
    for index in (1, 2):
        batch("photos", "-o", f"{s3}/out", "--shard", f"{index}/2", "--report")
    manifest = gradcam.read_manifest(f"{s3}/out")
    assert sorted(record.image for record in manifest) == sorted(ORDER)
    page = Store(f"{s3}/out").read("index.html").decode()
    assert all(name in page for name in ORDER)
    assert len({name.split("/")[1] for name in Store(f"{s3}/out").find("report") if "/details-" in name}) == 1


def test_reports_of_buckets(batch: Command, gradcam_command: Command, folder: Path, photos: Path, s3: str) -> None:
    url = f"{s3}/out"
    batch("photos", "-o", url, "--report")
    before = read_all(url)
    Store(url).remove([name for name in before if name.startswith(("report/", "index.html"))])
    outcome = gradcam_command("report", url)
    assert outcome == Outcome(0, f"  →  {url}/index.html\n", "")
    after = read_all(url)
    assert list(after) == list(before)
    remade = {name for name in before if before[name] != after[name]}
    # These views are made from overlays that were already encoded as JPEG, so they differ a little.
    assert all(re.fullmatch(r"report/views/.+\.0\.jpg", name) for name in remade)
    for name in [name for name in before if name.endswith(".large.jpg")]:
        assert after[name] == before[name]


# Errors of a bucket take one line and come before the model is loaded


@pytest.fixture
def no_model(monkeypatch: Patch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("gradcam.cli.batch.prepare_request", refuse)


@pytest.mark.usefixtures("no_model", "s3")
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://nothing-here/out", r"s3://nothing-here/out/: the bucket, or .*, does not exist \(The specified bucket .*\)"),
        ("s3://", r"s3://: contains no bucket name, expected a URL like"),
        ("s3:///", r"s3://: contains no bucket name"),
        ("s3:/bucket/out", r"Invalid value for '-o' / '--output': 's3:/bucket/out' is not a URL: write s3://"),
        ("s3x://b/out", r"s3x://b/out: is not a supported URL"),
        ("s3://Not A Bucket/out", r"s3://Not A Bucket/out: the store cannot be used"),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be(batch: Command, photos: Path, url: str, message: str) -> None:
    outcome = batch("photos", "-o", url)
    assert (outcome.status, outcome.out) == (2, "")
    assert re.search(f"Error: {message}", outcome.err), outcome.err
    assert outcome.err.count("\n") <= 2


@pytest.mark.usefixtures("no_model")
def test_an_output_that_is_an_object(batch: Command, photos: Path, s3: str) -> None:
    Store(s3).write("out.jpg", b"x")
    outcome = batch("photos", "-o", f"{s3}/out.jpg")
    message = f"Error: {s3}/out.jpg: is an object, expected a folder for the results; choose another --output\n"
    assert outcome == Outcome(2, "", message)


def test_what_can_only_be_read_is_no_output(batch: Command, photos: Path, fs: Any, monkeypatch: Patch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(ObjectStore, "pipe_file", refuse)
    message = f"Error: {URL}/: cannot be written to (NotImplementedError); choose another --output\n"
    assert batch("photos", "-o", URL) == Outcome(2, "", message)


@pytest.mark.usefixtures("no_model")
def test_missing_credentials(batch: Command, photos: Path, s3: str, monkeypatch: Patch, folder: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(folder / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    outcome = batch("photos", "-o", f"{s3}/out")
    lines = [line for line in outcome.err.splitlines() if "still waiting" not in line]  # on a busy machine
    assert (outcome.status, len(lines)) == (2, 1)
    assert f"Error: {s3}/out: there are no valid credentials (Unable to locate credentials)" in outcome.err


def check_keys_after(address: str, requests: str) -> None:
    """Let the server check credentials after a number of requests."""
    text = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{address}/moto-api/reset-auth", requests.encode(), text)
    urllib.request.urlopen(request).close()


@pytest.fixture
def reader(s3: str, s3_address: str, monkeypatch: Patch) -> Iterator[str]:
    """Return the URL of a bucket that the current credentials can list and read, but not write to."""
    import s3fs

    iam = client("iam", s3_address)
    iam.create_user(UserName=s3[5:])
    allowed = {"Effect": "Allow", "Action": ["s3:List*", "s3:Get*"], "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=s3[5:], PolicyName="reads", PolicyDocument=document)
    key = iam.create_access_key(UserName=s3[5:])["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    s3fs.S3FileSystem.clear_instance_cache()
    check_keys_after(s3_address, "0")
    yield s3
    check_keys_after(s3_address, "inf")


def test_a_bucket_that_may_not_be_written_to(batch: Command, photos: Path, reader: str) -> None:
    outcome = batch("photos", "-o", f"{reader}/out")
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert f"Error: {reader}/out/: the credentials do not allow listing, reading or writing it" in outcome.err


@pytest.mark.usefixtures("no_model")
def test_a_bucket_that_may_not_be_listed(batch: Command, photos: Path, reader: str, monkeypatch: Patch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASOMEBODYELSE0000")
    s3fs.S3FileSystem.clear_instance_cache()
    outcome = batch("photos", "-o", f"{reader}/out")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1), outcome.err
    assert "do not allow listing" in outcome.err or "no valid credentials" in outcome.err


@pytest.mark.usefixtures("no_model")
def test_a_server_that_does_not_answer(batch: Command, photos: Path, s3: str, monkeypatch: Patch) -> None:
    import s3fs

    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    outcome = batch("photos", "-o", f"{s3}/out")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert f"Error: {s3}/out: the store has not answered correctly for" in outcome.err


# Stores that fail for a while or for good, and interrupted runs


@pytest.fixture
def uninterrupted(batch: Command, photos: Path, fs: Any) -> dict[str, bytes]:
    """Return the objects that an uninterrupted run writes."""
    batch("photos", "-o", URL)
    contents = read_all(URL)
    fs.store.clear()
    return contents


def test_a_store_that_fails_in_the_middle_and_comes_back(
    batch: Command, photos: Path, fs: Any, uninterrupted: dict[str, bytes], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(failures, "MIN_WAIT_SECONDS", 0.01)
    original, writes = ObjectStore.pipe_file, []

    def write(self: Any, path: str, value: bytes, *arguments: Any, **options: Any) -> None:
        writes.append(path)
        if writes.count(path) < 3:  # Each write fails twice.
            raise down() if len(writes) % 2 else OSError(errno.EIO, "Please reduce your request rate")
        original(self, path, value)

    monkeypatch.setattr(ObjectStore, "pipe_file", write)
    outcome = batch("photos", "-o", URL)
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1  # Only the broken image is reported.
    assert read_all(URL) == uninterrupted


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_wait_is_reported_once(batch: Command, photos: Path, fs: Any, quiet: list[str], monkeypatch: Patch) -> None:
    monkeypatch.setattr(waiting, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.02)
    original, tries = ObjectStore.pipe_file, []

    def write(self: Any, path: str, value: bytes, *arguments: Any, **options: Any) -> None:
        tries.append(path)
        if len(tries) < 3:
            raise down()
        original(self, path, value)

    monkeypatch.setattr(ObjectStore, "pipe_file", write)
    outcome = batch("photos", "-o", URL, *quiet)
    messages = [line for line in outcome.err.splitlines() if "broken" not in line]
    expected = f"{URL}/run.json: the store does not answer correctly (Connection refused); still waiting"
    assert (outcome.status, messages) == (1, [] if quiet else [expected])
    assert logging.getLogger("gradcam").handlers == []


def test_store_down(batch: Command, photos: Path, fs: Any, uninterrupted: dict[str, bytes], monkeypatch: Patch) -> None:
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.05)
    original = ObjectStore.pipe_file

    def write(self: Any, path: str, value: bytes, *arguments: Any, **options: Any) -> None:
        if "panda" in path or fs.failures:
            fs.failures += [down() for _ in range(1000)]  # All later requests fail.
            raise down()
        original(self, path, value)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "pipe_file", write)
        outcome = batch("photos", "-o", URL, "--workers", 1)
    *_, reason, count, line = outcome.err.splitlines()
    assert (outcome.status, outcome.out) == (1, "")
    assert re.sub(r"for \d s", "for so many s", reason) == (
        f"{URL}/b/panda-gradcam.jpg: the store has not answered correctly for so many s (Connection refused); "
        "try again later"
    )
    assert count == "0 of 6 images are finished. To resume:"
    fs.failures.clear()
    assert shlex.split(line)[:3] == ["gradcam", "batch", "--resume"]
    again = batch(*shlex.split(line)[2:])
    assert again.status == 1
    assert read_all(URL) == uninterrupted


@pytest.mark.slow
def test_what_is_finished_is_kept_when_it_stops(
    batch: Command, photos: Path, fs: Any, uninterrupted: dict[str, bytes], monkeypatch: Patch
) -> None:
    original = store_results.StoreResults.append

    def append(self: Any, record: Any, contents: Any) -> Any:
        if len(self._manifest) == 3:
            raise error
        return original(self, record, contents)

    for error in (KeyboardInterrupt(), TerminationSignal(), StoreError("gone")):
        fs.store.clear()
        with monkeypatch.context() as patch:
            patch.setattr(store_results.StoreResults, "append", append)
            outcome = batch("photos", "-o", URL)
        assert outcome.status == {KeyboardInterrupt: 130, TerminationSignal: 143}.get(type(error), 1)
        assert len(gradcam.read_manifest(URL)) == 3
        reason = "gone" if isinstance(error, StoreError) else "Stopped."
        assert f"{reason}\n3 of 6 images are finished. To resume:" in outcome.err
        assert batch("photos", "-o", URL, "--resume").out.startswith("3 images explained, ")
        result = read_all(URL)
        assert [record.image for record in gradcam.read_manifest(URL)] == ORDER
        assert {name: data for name, data in result.items() if "manifest" not in name} == {
            name: data for name, data in uninterrupted.items() if "manifest" not in name
        }


@pytest.mark.slow
@pytest.mark.skipif(not POSIX, reason="signals")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM] if POSIX else [])
def test_a_stopped_process_goes_on(batch: Command, folder: Path, photos: Path, s3: str, number: int) -> None:
    """Stop a run by SIGKILL or SIGTERM: after resuming, every image is recorded exactly once."""
    many = folder / "many"
    many.mkdir()
    for i in range(60):
        (many / f"{i:02}.png").hardlink_to(photos / "macaw.png")
    code = (
        "from gradcam.batch.formats import store_folder; store_folder.FLUSH_RECORDS = 8; "
        "from gradcam.cli import main; main()"
    )
    arguments = ["batch", "--device", "cpu", "many", "-o", f"{s3}/out", "--batch-size", "4"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not Store(f"{s3}/out").find("manifest") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    message = process.communicate(timeout=60)[1]
    finished = {record.image for record in gradcam.read_manifest(f"{s3}/out")}
    assert 8 <= len(finished) < 60
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert f"{len(finished)} of 60 images are finished." in message
    outcome = batch("many", "-o", f"{s3}/out", "--batch-size", 4, "--resume")
    assert outcome.out.startswith(f"{60 - len(finished)} images explained, {len(finished)} explained in an earlier run")
    assert [record.image for record in gradcam.read_manifest(f"{s3}/out")] == [f"{i:02}.png" for i in range(60)]
    lines = [
        line for name in Store(f"{s3}/out").find("manifest") for line in Store(f"{s3}/out").read(name).splitlines()
    ]
    assert len(lines) == 60


# Recognising URLs


def test_a_file_url_is_a_folder(batch: Command, gradcam_command: Command, folder: Path, photos: Path) -> None:
    url = f"file://{folder}/with%20space"
    assert batch("photos/macaw.png", "-o", url).status == 0
    assert (folder / "with space" / "manifest.jsonl").is_file()
    assert gradcam_command("report", url).out == f"  →  {folder}/with space/index.html\n"


def test_the_root_of_the_input_is_told_from_a_store(batch: Command, folder: Path, photos: Path, fs: Any) -> None:
    batch("photos", "-o", URL)
    assert json.loads(Store(URL).read("run.json"))["root"] == str(photos)
    (folder / "other").mkdir()
    (folder / "other" / "macaw.png").write_bytes((photos / "macaw.png").read_bytes())
    batch("other", "-o", URL, "--resume").check_error(
        2, f"the earlier run had other settings: input: {photos} → {folder / 'other'}."
    )


def test_a_list_of_other_classes_is_refused_in_a_store(batch: Command, folder: Path, photos: Path, fs: Any) -> None:
    listed = folder / "chosen.csv"
    listed.write_text("image,class\nphotos/b/koala.png,macaw\nphotos/macaw.png,\n")
    assert batch("chosen.csv", "-o", URL).status == 0
    listed.write_text("image,class\nphotos/b/koala.png,koala\nphotos/macaw.png,\n")
    outcome = batch("chosen.csv", "-o", URL, "--resume")
    assert outcome.status == 2
    assert (
        f"Error: {URL}/: the earlier run explained 'macaw' in b/koala.png, but now the list gives 'koala'"
        in outcome.err
    )


def test_many_failures_are_in_the_manifest_of_the_store(batch: Command, folder: Path, photos: Path, fs: Any) -> None:
    for i in range(22):
        (photos / f"{i}.jpg").write_bytes(b"x")
    outcome = batch("photos", "-o", URL)
    assert f"... and 3 more failed images, listed in {URL}/manifest/.\n" in outcome.err
