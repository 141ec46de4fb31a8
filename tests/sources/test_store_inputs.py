"""Test list_inputs() on object stores: the images and names match those on a disk, with one or two requests."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam.batch.read_items import read_item
from gradcam.errors import ImageError, InputError, StoreError
from gradcam.sources.collect import InputListing, list_inputs
from gradcam.sources.contents import InputImage
from gradcam.storage import fetch as store_contents
from gradcam.storage import retry as failures
from gradcam.storage.fetch import RangeFile
from gradcam.storage.store import Store
from tests.cli.test_cli import Command, folder, gradcam_command
from tests.sources.test_archives import make as make_archive
from tests.sources.test_sources import refuse
from tests.stores import FSSPEC_VERSION, ObjectStore, down, objects

Photo = Callable[[str], Path]

__all__ = ["folder", "gradcam_command"]  # fixtures

HERE = "objects://bucket"
DATA = {f"folder/{number}.jpg": random.Random(number).randbytes(5000 + 700 * number) for number in range(20)}


@pytest.fixture
def fs() -> Iterator[type[ObjectStore]]:
    with objects() as actual:
        yield actual


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)


def put(*names: str, bucket: str = HERE) -> None:
    """Write objects whose content is their own name."""
    for name in names:
        Store(bucket).write(name, name.encode())
    ObjectStore.requests.clear()


def put_data(name: str, data: bytes) -> str:
    Store(HERE).write(name, data)
    ObjectStore.requests.clear()
    return f"{HERE}/{name}"


def name_all(listing: InputListing) -> list[str]:
    return [item.name for item in listing.items]


def read_all(listing: InputListing) -> dict[str, bytes]:
    return {item.name: item.content.read() for item in listing.items}


def find_reason(item: InputImage) -> str:
    with pytest.raises(ImageError) as caught:
        item.content.read()
    return str(caught.value)


NAMES = [
    "b.jpg", "a.PNG", "Z.gif", "é.jpg", "sub/c.jpeg", "sub-2/d.bmp", "sub/deep/e.tif", "a 1.webp", "notes.txt", "jpg",
    ".hidden.jpg", ".git/b.jpg", "sub/.cache/deep/c.jpg", "sub/._d.jpg", "sub/list.csv", "b[1].jpg", "t/u/v/w.jpg",
]  # fmt: skip


def compare(tmp_path: Path, pattern: str, exclude: str | None = None) -> list[str] | None:
    """Return the names, which must be the same on a disk; return None if both raise an error."""
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    put(*(f"in/{name}" for name in NAMES))
    on_disk = describe(str(tmp_path), pattern, None if exclude is None else tmp_path / exclude)
    in_store = describe(f"{HERE}/in", pattern, None if exclude is None else Store(f"{HERE}/in/{exclude}"))
    assert in_store == on_disk
    return None if on_disk is None else on_disk[0]


def describe(top: str, pattern: str, exclude: Path | Store | None) -> tuple[list[str], int, str] | None:
    """Return the names, the number of files left out, and the root relative to the top; None if there are no inputs."""
    try:
        listing = list_inputs([f"{top}/{pattern}"], exclude=exclude)
    except InputError:
        return None
    root = listing.root.url if isinstance(listing.root, Store) else str(listing.root)
    return name_all(listing), listing.left_out, root.removeprefix(top)


@pytest.mark.parametrize(
    "pattern",
    [
        "", "sub", "sub/", "*.jpg", "?.jpg", "b[1].jpg", "*/*", "*/*.jpeg", "**/*.jpg", "**", "**/u/**", "t/**/*.jpg",
        "*/", ".h*", ".g*/*", "sub*", "[st]*/", "**/deep/*", "*", "sub/*", "s?b/**", "**/*", "**/deep/",
        "b.jpg", "jpg", "é.jpg", ".git", "t/*/*/*", "**/.cache/**", "[!a-s]*/**/w.*",
    ],
)  # fmt: skip
def test_what_is_found_in_a_store_is_what_is_found_on_a_disk(fs: Any, tmp_path: Path, pattern: str) -> None:
    assert compare(tmp_path, pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "*/missing.jpg", "*.bmp", "missing/*", "missing", "missing.jpg", "notes.txt/x.jpg", "b[0-9].jpg", "b.jpg/*", "*.csv",
    ],
)  # fmt: skip
def test_nothing_is_found_where_there_is_nothing_on_a_disk(fs: Any, tmp_path: Path, pattern: str) -> None:
    assert compare(tmp_path, pattern) is None


@pytest.mark.parametrize("pattern", ["", "**/*.jpg", "*/*", "sub", "sub/", "sub/**", "*.jpg", "**"])
@pytest.mark.parametrize("exclude", ["sub", "sub/deep", ".", "su"])
def test_the_output_is_left_out_as_on_a_disk(fs: Any, tmp_path: Path, pattern: str, exclude: str) -> None:
    put("elsewhere/x.jpg")
    if exclude == ".":
        compare(tmp_path, pattern)
        ones = list_inputs([f"{tmp_path}/{pattern}" if pattern else tmp_path / "sub"], exclude=tmp_path)
        inputs = list_inputs([f"{HERE}/in/{pattern}" if pattern else f"{HERE}/in/sub"], exclude=Store(f"{HERE}/in"))
        assert name_all(ones) == name_all(inputs)
    else:
        compare(tmp_path, pattern, exclude)


def test_an_input_that_is_the_output(fs: Any) -> None:
    put("out/a.jpg", "in/b.jpg")
    message = "There are no images in .*; the output folder is left out: choose another"
    refuse(message, f"{HERE}/out/", exclude=Store(f"{HERE}/out"))
    assert name_all(list_inputs([f"{HERE}/out/", f"{HERE}/in"], exclude=Store(f"{HERE}/out"))) == ["b.jpg"]
    assert name_all(list_inputs([f"{HERE}/out/a.jpg"], exclude=Store(f"{HERE}/out"))) == ["a.jpg"], "it was named"


def test_a_folder_takes_one_request_however_much_is_in_it(fs: Any) -> None:
    put(*(f"in/{number % 7}/{number}.jpg" for number in range(500)))
    for url in (f"{HERE}/in/", f"{HERE}/in", HERE, f"{HERE}/in/*/*.jpg", f"{HERE}/in/**"):
        fs.requests.clear()
        assert len(list_inputs([url]).items) == 500
        assert [request for request, _ in fs.requests if request == "list"] == ["list"]
        assert len(fs.requests) <= 2


def test_one_object_whatever_it_is_called(fs: Any) -> None:
    put("in/a.jpg", "in/no suffix", "in/b[1].jpg", "in/x/a.weights")
    for name in ("a.jpg", "no suffix", "b[1].jpg", "x/a.weights"):
        listing = list_inputs([f"{HERE}/in/{name}"])
        assert read_all(listing) == {name.rpartition("/")[2]: f"in/{name}".encode()}
        assert listing.root == Store(f"{HERE}/in/{name}").parent


def test_names_of_several_inputs_in_one_bucket(fs: Any) -> None:
    put("x/one/a.jpg", "x/two/b.jpg", "x/two/deep/c.jpg", "x/twofold/d.jpg")
    listing = list_inputs([f"{HERE}/x/two", f"{HERE}/x/one/a.jpg", f"{HERE}/x/two/deep/c.jpg", f"{HERE}/x/two*"])
    assert name_all(listing) == ["two/b.jpg", "two/deep/c.jpg", "one/a.jpg", "twofold/d.jpg"]
    assert listing.root == Store(f"{HERE}/x")


def test_names_in_several_stores_begin_with_the_bucket(fs: Any, tmp_path: Path) -> None:
    put("x/a.jpg", "x/y/b.jpg")
    put("x/a.jpg", bucket="objects://other")
    put("z/a.jpg", bucket="memory://bucket")
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    (tmp_path / "photos" / "sub" / "a.jpg").write_text("disk")
    inputs = [f"{HERE}/x/", "objects://other/x/a.jpg", tmp_path / "photos", "memory://bucket/z"]
    listing = list_inputs(inputs)
    ours = {f"bucket/{name}": name.encode() for name in ("x/a.jpg", "x/y/b.jpg")}
    expected = {"other/x/a.jpg": b"x/a.jpg", "photos/sub/a.jpg": b"disk", "bucket-2/z/a.jpg": b"z/a.jpg"}
    assert read_all(listing) == ours | expected
    assert listing.root is None
    Store("memory://bucket").remove(["z/a.jpg"])


def test_the_output_changes_no_name(fs: Any, tmp_path: Path) -> None:
    put("x/y/a.jpg", "out/b.jpg")
    listing = list_inputs([f"{HERE}/x/y", f"{HERE}/out"], exclude=Store(f"{HERE}/out"))
    assert (name_all(listing), listing.root) == (["a.jpg"], Store(f"{HERE}/x/y"))


def test_what_is_reached_twice_is_explained_once_and_counted_once(fs: Any) -> None:
    put("in/a.jpg", "in/sub/b.jpg", "in/n.doc", "in/sub/m.doc")
    Store(HERE).write("in/l.csv", b"a.jpg\n./sub/../a.jpg\n")
    listing = list_inputs([f"{HERE}/in/", f"{HERE}/in", f"{HERE}/in/sub", f"{HERE}/in/a.jpg", f"{HERE}/in/l.csv"])
    assert (name_all(listing), listing.left_out) == (["a.jpg", "sub/b.jpg"], 3)


def test_a_file_url_is_a_path(fs: Any, tmp_path: Path) -> None:
    (tmp_path / "a b.jpg").write_text("x")
    (tmp_path / "l.txt").write_text(f"file://{tmp_path}/a%20b.jpg\n")
    for url in (tmp_path.as_uri(), f"file://{tmp_path}/a%20b.jpg", f"file://{tmp_path}/l.txt"):
        listing = list_inputs([url])
        assert (name_all(listing), listing.root) == (["a b.jpg"], tmp_path)


# Lists


def test_a_list_in_a_store_names_what_is_beside_it_and_what_is_anywhere(fs: Any, tmp_path: Path) -> None:
    put("data/a.jpg", "data/x/b.jpg", "c.jpg")
    put("d.jpg", bucket="objects://other")
    (tmp_path / "e.jpg").write_text("e")
    lines = ["a.jpg\tcat", "x/b.jpg", "../c.jpg", "objects://other/d.jpg\tdog", str(tmp_path / "e.jpg"), "missing.jpg"]
    url = put_data("data/l.txt", "\n".join(lines).encode())
    listing = list_inputs([url])
    assert [(item.name, item.wanted) for item in listing.items] == [
        ("bucket/data/a.jpg", "cat"), ("bucket/data/x/b.jpg", None), ("bucket/c.jpg", None), ("other/d.jpg", "dog"),
        (f"{tmp_path.name}/e.jpg", None), ("bucket/data/missing.jpg", None),
    ]  # fmt: skip
    assert [item.content.read() for item in listing.items[:3]] == [b"data/a.jpg", b"data/x/b.jpg", b"c.jpg"]
    assert find_reason(listing.items[5]) == "does not exist"
    assert [request for request, _ in fs.requests if request != "read"] == ["look"], "nothing is asked of each line"


def test_urls_in_a_list_on_a_disk_and_on_standard_input(fs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    put("in/a.jpg", "in/x/b.jpg")
    text = f"image,class\n{HERE}/in/a.jpg,cat\n{HERE}/in/x/b.jpg,\n"
    (tmp_path / "l.csv").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    for list_path in (tmp_path / "l.csv", "-"):
        listing = list_inputs([list_path])
        assert [(item.name, item.wanted) for item in listing.items] == [("a.jpg", "cat"), ("x/b.jpg", None)]
        assert listing.root == Store(f"{HERE}/in")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense://b/a.jpg", "is not a supported URL"),
        ("objects://", "is only a bucket, expected an object in it"),
        ("abfs://container/a.jpg", r"abfs:// needs an additional package: pip install \"\.\[azure\]\""),
    ],
)
def test_a_line_that_no_picture_can_be_at_is_named_before_work_begins(fs: Any, line: str, reason: str) -> None:
    url = put_data("l.txt", f"a.jpg\n\n{line}\n".encode())
    refuse(rf"^{url}, line 3: {line}.*{reason}", [url])


def test_two_classes_for_one_object(fs: Any) -> None:
    url = put_data("l.csv", f"a.jpg,cat\n{HERE}/a.jpg,dog\n".encode())
    refuse(r"line 2: the class of objects://bucket/a.jpg is 'dog', but 'cat' in .* line 1", [url])


# Archives


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz", ".tar.xz", ".tbz2"])
def test_archives_are_read_where_they_lie(fs: Any, tmp_path: Path, suffix: str) -> None:
    members = DATA | {"notes.txt": b"x", "../up.jpg": b"x"}
    url = put_data(f"in/a{suffix}", make_archive(tmp_path / f"a{suffix}", members).read_bytes())
    listing = list_inputs([url])
    assert name_all(listing) == [*DATA, "up.jpg"]
    assert (listing.left_out, listing.root) == (1, None)
    fs.requests.clear()
    assert {item.name: item.content.read() for item in listing.items[:-1]} == DATA
    assert len(fs.requests) == (0 if suffix[-1] != "p" and suffix != ".tar" else len(DATA)), "one for each picture"
    assert find_reason(listing.items[-1]) == "has a path outside the archive"
    put("in/b.jpg")
    assert name_all(list_inputs([url, f"{HERE}/in/b.jpg"]))[-2:] == [f"a{suffix}/up.jpg", "b.jpg"]
    assert name_all(list_inputs([f"{HERE}/in/*{os.path.splitext(url)[1]}"])) == name_all(listing)


def test_an_archive_is_not_fetched_picture_by_picture_to_be_listed(fs: Any, tmp_path: Path) -> None:
    members = {f"{number}.jpg": bytes(20_000) for number in range(300)}
    for suffix in (".tar", ".zip"):
        url = put_data(f"a{suffix}", make_archive(tmp_path / f"a{suffix}", members).read_bytes())
        assert len(list_inputs([url]).items) == 300
        assert sum(request == "read" for request, _ in fs.requests) < 15


def test_large_members_are_passed_over(fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    fetch = Store.read_range
    monkeypatch.setattr(Store, "read_range", lambda *args: fetched.append(args[3]) or fetch(*args))
    members = {f"{number}.jpg": bytes(3_000_000) for number in range(10)}
    url = put_data("a.tar", make_archive(tmp_path / "a.tar", members).read_bytes())
    list_inputs([url])
    assert sum(fetched) < 3_000_000


@pytest.mark.parametrize("seed", range(20))
def test_a_range_is_a_file(fs: Any, seed: int) -> None:
    draw = random.Random(seed)
    data = draw.randbytes(draw.choice([0, 1, 1000, 300_000]))
    url = put_data("x", data)
    file, oracle = RangeFile(Store(url), len(data), 0, draw.choice([1, 100, 70_000])), io.BytesIO(data)
    for _ in range(200):
        if draw.random() < 0.4:
            where = draw.choice([(draw.randint(0, 2 * len(data)), 0), (draw.randint(0, 5000), 1), (0, 2)])
            assert file.seek(*where) == oracle.seek(*where)
        size = draw.choice([0, 1, 512, 5000, 100_000])
        assert file.read(size) == oracle.read(size)
        assert file.tell() == oracle.tell()
    file.seek(0)
    assert file.read() == data


def test_an_archive_that_changes_after_it_was_listed(fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_archive(tmp_path / "a.tar", {"a.jpg": b"x"}).read_bytes()
    url = put_data("a.tar", archive)
    (item,) = list_inputs([url]).items
    put_data("a.tar", archive + bytes(512))
    assert item.content.read() == b"x", "it was looked at a moment ago"
    monkeypatch.setattr(store_contents, "RECHECK_SECONDS", 0.0)
    assert find_reason(item) == "is in an archive that changed after it was listed"
    Store(HERE).remove(["a.tar"])
    assert find_reason(item) == "is in an archive that does not exist"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.zip", b"not a zip", "this archive is damaged or cut off (File is not a zip file)"),
        ("a.tar.gz", b"\x1f\x8b" + bytes(50), "this archive is damaged or cut off"),
        ("a.tar", b"x" * 600, "this archive is damaged or cut off"),
    ],
)
def test_a_broken_archive(fs: Any, name: str, data: bytes, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        list_inputs([put_data(name, data)])
    assert str(caught.value).startswith(f"{HERE}/{name}: {reason}")


# Items sent to other processes


@pytest.mark.parametrize("where", ["disk", "store"])
@pytest.mark.parametrize("kind", ["folder", ".zip", ".tar", ".tar.gz"])
def test_every_item_can_be_sent(fs: Any, tmp_path: Path, where: str, kind: str) -> None:
    if kind == "folder":
        (tmp_path / "in" / "folder").mkdir(parents=True)
        for name, data in DATA.items():
            (tmp_path / "in" / name).write_bytes(data)
            Store(f"{HERE}/in").write(name, data)
        source = tmp_path / "in" if where == "disk" else f"{HERE}/in"
    else:
        path = make_archive(tmp_path / f"a{kind}", DATA)
        source = path if where == "disk" else put_data(path.name, path.read_bytes())  # type: ignore[assignment]
    items = list_inputs([source]).items
    # Pickle each item separately, as the batch run does.
    sent = [pickle.loads(pickle.dumps(item)) for item in items]
    assert {item.name: item.content.read() for item in sent} == DATA


def test_a_compressed_tar_is_unpacked_once_for_all_that_is_sent(fs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    items = list_inputs([make_archive(tmp_path / "a.tar.gz", DATA)]).items
    temporary_files = []
    temporary = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *args: temporary_files.append(1) or temporary(*args))
    sent = [pickle.loads(pickle.dumps(item)) for item in items for _ in range(3)]
    assert temporary_files == [], "not before anybody reads"
    threads = [threading.Thread(target=lambda: [item.content.read() for item in sent]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(temporary_files) == 1
    changed = pickle.dumps(list_inputs([make_archive(tmp_path / "b.tar.gz", DATA)]).items[0])
    make_archive(tmp_path / "b.tar.gz", DATA | {"more.jpg": b"x"})
    assert find_reason(pickle.loads(changed)) == "is in an archive that changed after it was listed"


# Errors


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError("Forbidden"), "cannot be read: the store denies access (Forbidden)"),
        (FileNotFoundError("gone"), "does not exist"),
        (IsADirectoryError("x"), "is not a file"),
        (OSError(errno.ENAMETOOLONG, "Too long"), "cannot be opened (Too long)"),
    ],
)
def test_a_picture_that_cannot_be_read(fs: Any, error: OSError, reason: str) -> None:
    put("a.jpg")
    (item,) = list_inputs([f"{HERE}/a.jpg"]).items
    fs.failures.append(error)
    assert find_reason(item) == reason
    assert item.content.read() == b"a.jpg"
    put_data("a.jpg", b"")
    assert find_reason(item) == "is empty"


@pytest.mark.skipif(FSSPEC_VERSION < (2025, 0), reason="fsspec finds nothing in a folder without a name")
def test_a_glob_takes_nothing_for_a_folder_without_a_name(fs: Any) -> None:
    put("/lead.jpg", "b/c.jpg", "b//d.jpg")
    assert read_all(list_inputs([f"{HERE}/*/"])) == {"c.jpg": b"b/c.jpg", "/d.jpg": b"b//d.jpg"}
    assert read_all(list_inputs([f"{HERE}/**/*.jpg"])) == {
        "lead.jpg": b"/lead.jpg", "b/c.jpg": b"b/c.jpg", "b//d.jpg": b"b//d.jpg"
    }  # fmt: skip


def test_what_cannot_be_listed(fs: Any, hasty: None) -> None:
    put("in/a.jpg")
    for url in (f"{HERE}/in/", f"{HERE}/in/*.jpg", f"{HERE}/in/a.jpg", f"{HERE}/l.csv", f"{HERE}/a.zip"):
        fs.failures[:] = [PermissionError(errno.EACCES, "Access Denied")]
        refuse(r"the store denies access \(Access Denied\)", [url])
        fs.failures[:] = [FileNotFoundError("The specified bucket does not exist")] * 2
        refuse("does not exist", [url])
        fs.failures[:] = [down()]
        refuse("the store has not answered correctly", [url], error=StoreError)
        fs.failures.clear()


@pytest.mark.parametrize("name", ["", "a.jpg", "none", "none/", "in/a", "a.zip", "in/b*"])
def test_where_there_is_nothing(fs: Any, name: str) -> None:
    put("in/a.jpg" if name else "in/a.doc")
    refuse("^(objects://.*: does not exist|There are no images in 'objects://bucket/')", [f"{HERE}/{name}"])


def test_urls_that_cannot_be_followed(fs: Any) -> None:
    refuse("nonsense://x/y: is not a supported URL", ["nonsense://x/y"], error=StoreError)
    refuse(r"objects://\*/a.jpg: a glob cannot match buckets: write the name of one bucket", ["objects://*/a.jpg"])
    refuse(r"^s3:///x: contains no bucket name, expected a URL like s3://BUCKET/FOLDER/", ["s3:///x"])
    message = r"^objects:/bucket/a: does not exist; give a URL as a string, because a Path removes a"
    refuse(message, Path("objects://bucket/a"))


# Whole runs


@pytest.fixture
def photos(fs: Any, photo: Photo) -> list[str]:
    names = ["coffee.jpg", "macaw.webp"]
    for name in names:
        put_data(f"in/{name}", photo(name).read_bytes())
    put_data("in/sub/broken.jpg", b"no picture")
    return names


@pytest.fixture
def run(gradcam_command: Command) -> Command:
    return lambda *arguments: gradcam_command("batch", "--device", "cpu", *arguments)


def test_pictures_in_a_store_are_explained_as_those_on_a_disk(photos: list[str], run: Command, tmp_path: Path) -> None:
    for name in (*photos, "sub/broken.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(Store(f"{HERE}/in").read(name))
    ones = run(tmp_path / "in", "-o", tmp_path / "one", "--audit", "--save", "overlay", "--save", "map")
    result = run(f"{HERE}/in/", "-o", tmp_path / "two", "--audit", "--save", "overlay", "--save", "map", "--report")
    assert (ones.status, result.status) == (1, 1), result.err
    assert (tmp_path / "one/manifest.jsonl").read_bytes() == (tmp_path / "two/manifest.jsonl").read_bytes()
    for record in gradcam.read_manifest(tmp_path / "one"):
        for name in record.files:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    facts = json.loads((tmp_path / "two/run.json").read_text())
    assert (facts["root"], facts["inputs"]) == (f"{HERE}/in", [f"{HERE}/in/"])
    assert (tmp_path / "two/index.html").is_file()


def test_a_store_that_fails_and_comes_back_and_one_that_stays_down(
    photos: list[str], run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MIN_WAIT_SECONDS", 0.01)
    read, errors = ObjectStore.cat_file, [down(), down()]

    def fail_at_times(self: Any, path: str, *args: Any, **kwargs: Any) -> bytes:
        if "in/" in path and errors:
            raise errors.pop()
        return read(self, path, *args, **kwargs)

    monkeypatch.setattr(ObjectStore, "cat_file", fail_at_times)
    urls = [f"{HERE}/in/{name}" for name in photos]
    assert run(*urls, "-o", tmp_path / "one").status == 0
    assert errors == []
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.1)
    errors.extend(down() for _ in range(10_000))
    result = run(*urls, "-o", tmp_path / "two", "--workers", 1)
    assert result.status == 1
    assert "the store has not answered correctly for" in result.err
    assert "Traceback" not in result.err
    assert [record.status for record in gradcam.read_manifest(tmp_path / "two")] == ["failed"] * len(photos)
    errors.clear()
    assert run(*urls, "-o", tmp_path / "two", "--resume").status == 0
    assert (tmp_path / "one/manifest.jsonl").read_bytes() == (tmp_path / "two/manifest.jsonl").read_bytes()


@pytest.mark.parametrize("url", ["nonsense://b/x", "objects://bucket/none/", "objects://bucket/none.csv"])
def test_what_cannot_be_listed_is_one_line_and_status_2(fs: Any, run: Command, tmp_path: Path, url: str) -> None:
    result = run(url, "-o", tmp_path / "out")
    assert result.status == 2
    assert (result.out, result.err.count("\n")) == ("", 1)
    assert not (tmp_path / "out").exists()


def test_readers_of_the_users_get_a_file(photos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradcam.models.preprocess import read_image_file

    calls = []

    def read(path: Path) -> Any:
        calls.append((path.suffix, path.read_bytes()))
        return read_image_file(path)

    classifier = gradcam.load_classifier(device="cpu", reader=read)
    (item,) = list_inputs([f"{HERE}/in/{photos[0]}"]).items
    read_item(classifier, item, audit=True)
    assert calls == [(".jpg", Store(f"{HERE}/in").read(photos[0]))]


def test_features_of_pictures_in_a_store(
    photos: list[str], gradcam_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("inspect", "features", f"{HERE}/in/{photos[0]}", "-o", tmp_path / "f.npz", "--device", "cpu")
    assert gradcam_command(*arguments).status == 0
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)
    (tmp_path / "f.npz").unlink()

    def fail(self: Any, path: str, *args: Any, **kwargs: Any) -> bytes:
        raise down()

    monkeypatch.setattr(ObjectStore, "cat_file", fail)
    outcome = gradcam_command(*arguments)
    assert outcome.status == 1
    assert "the store has not answered correctly" in outcome.err
    assert "Nothing was written." in outcome.out


def test_explain_files_takes_urls(photos: list[str]) -> None:
    results = {result.name: result for result in gradcam.explain_files(f"{HERE}/in/", workers=1)}
    assert set(results) == {*photos, "sub/broken.jpg"}
    assert results[photos[0]].error is None
    assert results[photos[0]].path is None
    assert "sub/broken.jpg: is not an image in a supported format" in str(results["sub/broken.jpg"].error)


def test_one_look_at_an_archive_for_all_that_is_sent(fs: Any, tmp_path: Path) -> None:
    items = list_inputs([put_data("a.tar", make_archive(tmp_path / "a.tar", DATA).read_bytes())]).items
    sent = [pickle.loads(pickle.dumps(item)) for item in items]
    fs.requests.clear()
    assert {item.name: item.content.read() for item in sent} == DATA
    assert [request for request, _ in fs.requests].count("look") == 1


def test_an_archive_that_has_another_number_on_another_machine(tmp_path: Path) -> None:
    path = make_archive(tmp_path / "a.tar", DATA)
    (item, *_) = list_inputs([path]).items
    sent = pickle.loads(pickle.dumps(item))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.rename(tmp_path / "b.tar")
    path.write_bytes((tmp_path / "b.tar").read_bytes())
    os.utime(path, ns=times)
    assert sent.content.read() == DATA[item.name]
    assert find_reason(item) == "is in an archive that changed after it was listed"
    os.utime(path, ns=(1, 1))
    assert find_reason(sent) == "is in an archive that changed after it was listed"


def test_a_store_that_fails_while_an_archive_is_listed(fs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(failures, "MIN_WAIT_SECONDS", 0.01)
    url = put_data("a.tar", make_archive(tmp_path / "a.tar", DATA).read_bytes())
    fs.failures[:] = [down(), down()]
    assert read_all(list_inputs([url])) == DATA
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)
    info = ObjectStore.info(ObjectStore(), "bucket/a.tar")
    monkeypatch.setattr(ObjectStore, "info", lambda *_, **__: info)
    fs.failures[:] = [down()] * 3
    refuse(f"^{url}: the store has not answered correctly", [url], error=StoreError)


def test_listing_a_store_costs_little(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import time
    import tracemalloc

    count = 3000
    actual = {f"class_{number % 50:04}/picture_{number:08}.JPEG": 1 for number in range(count)}
    monkeypatch.setattr(Store, "find", lambda *_: actual)
    for url in (HERE, f"{HERE}/**/*.JPEG"):
        start = time.process_time()
        tracemalloc.start()
        items = list_inputs([url]).items
        memory, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(items) == count
        assert memory / count < 500
        assert (time.process_time() - start) / count < 5e-4
