"""Test list_inputs(): the images in each input, their order and their names."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradcam.errors import ImageError, InputError
from gradcam.images.files import READ_SUFFIXES
from gradcam.sources.collect import InputListing, list_inputs
from gradcam.sources.contents import FileContent
from gradcam.sources.shards import Shard, parse_shard

ANYBODY = 65534  # the id of a user without privileges


def make(folder: Path, *names: str) -> Path:
    """Write files whose content is their own name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def refuse(message: str, inputs: Any, error: type[Exception] = InputError, **options: Any) -> None:
    with pytest.raises(error, match=message):
        list_inputs(inputs, **options)


def make_zip(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def name_all(listing: InputListing) -> list[str]:
    return [item.name for item in listing.items]


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Run a block without privileges: root may read everything, so it becomes another user for a while."""
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(ANYBODY)
    except OSError:
        pytest.skip("root may read everything here, and cannot become somebody else")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """Make a folder that every user may read; the folders of pytest are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


# Folders


def test_a_folder_gives_the_pictures_in_it_and_below_by_name(tmp_path: Path) -> None:
    make(tmp_path, "b.jpg", "a.PNG", "Z.gif", "é.jpg", "sub/c.jpeg", "sub-2/d.bmp", "sub/deep/e.tif", "a 1.webp")
    listing = list_inputs([tmp_path])
    below = ["sub/c.jpeg", "sub/deep/e.tif", "sub-2/d.bmp"]
    assert name_all(listing) == ["Z.gif", "a 1.webp", "a.PNG", "b.jpg", "é.jpg", *below]
    assert listing.root == tmp_path
    assert listing.left_out == 0
    assert [item.content.read().decode() for item in listing.items] == name_all(listing)
    assert [item.content.path for item in listing.items] == [tmp_path / name for name in name_all(listing)]
    assert {item.wanted for item in listing.items} == {None}


def test_the_order_is_not_the_file_systems_nor_the_locales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{letter}{number}.jpg" for letter in "aBcÄz" for number in range(20)]
    make(tmp_path, *random.Random(0).sample(names, len(names)))
    scandir = os.scandir

    @contextlib.contextmanager
    def shuffled(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(path) as entries:
            yield random.Random(1).sample(actual := list(entries), len(actual))

    monkeypatch.setattr(os, "scandir", shuffled)
    assert name_all(list_inputs([tmp_path])) == sorted(names)


def test_only_pictures_by_their_suffix_are_items_and_the_rest_is_counted(tmp_path: Path) -> None:
    pictures = [f"picture{suffix}" for suffix in READ_SUFFIXES] + ["UPPER.JPG", "two.dots.png"]
    make(tmp_path, *pictures, "notes.txt", "list.csv", "more.zip", "jpg", "a.jpg.bak", "sub/model.pt")
    listing = list_inputs([tmp_path])
    assert set(name_all(listing)) == set(pictures)
    assert listing.left_out == 6


HIDDEN = (".hidden.jpg", ".git/b.jpg", "sub/.cache/deep/c.jpg", "sub/._d.jpg", ".DS_Store")


@pytest.mark.parametrize(
    ("files", "inputs", "names"),
    [
        (("a.jpg", "sub/e.jpg", *HIDDEN), [""], ["a.jpg", "sub/e.jpg"]),
        ((".cache/a.jpg",), [".cache"], ["a.jpg"]),  # A hidden folder counts if it is the input.
        (("album.jpg/a.png",), [""], ["album.jpg/a.png"]),  # a folder whose name has an image suffix
        (("sub/a.jpg",), ["sub/a.jpg"], ["a.jpg"]),  # a file's name is relative to its folder
        (("x/b.jpg", "x/deep/c.jpg"), ["x", "x/deep/c.jpg"], ["b.jpg", "deep/c.jpg"]),
        # Neither folder contains the other.
        (("cat/a.jpg", "cats/a.jpg"), ["cat", "cats"], ["cat/a.jpg", "cats/a.jpg"]),
    ],
)
def test_what_is_listed(tmp_path: Path, files: Sequence[str], inputs: Sequence[str], names: list[str]) -> None:
    make(tmp_path, *files)
    listing = list_inputs([tmp_path / name for name in inputs])
    assert (name_all(listing), listing.left_out) == (names, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_pictures_as_find_finds(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    parts = ["a", "b b", ".hidden", "c.jpg", "d.png", "e.txt", "f\nline", "[g]", "猫"]
    for _ in range(60):
        path = tmp_path.joinpath(*draw.choices(parts, k=draw.randint(1, 4))).with_name(draw.choice(parts))
        with contextlib.suppress(OSError):  # some names are existing folders or files
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    command = ["find", ".", "-mindepth", "1", "-name", ".*", "-prune", "-o", "-type", "f", "-printf", "%P\\0"]
    actual = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout.decode().split("\0")[:-1]
    pictures = [name for name in actual if name.endswith((".jpg", ".png"))]
    listing = list_inputs([tmp_path])
    assert sorted(name_all(listing)) == sorted(pictures)
    assert pictures
    assert listing.left_out == len(actual) - len(pictures)


def test_links_to_files_are_followed_and_each_has_its_item(tmp_path: Path) -> None:
    make(tmp_path, "in/a.jpg", "elsewhere/b.jpg")
    (tmp_path / "in" / "link.jpg").symlink_to("a.jpg")
    (tmp_path / "in" / "other.jpg").symlink_to(tmp_path / "elsewhere" / "b.jpg")
    listing = list_inputs([tmp_path / "in"])
    assert name_all(listing) == ["a.jpg", "link.jpg", "other.jpg"]
    assert [item.content.read() for item in listing.items] == [b"in/a.jpg", b"in/a.jpg", b"elsewhere/b.jpg"]


def test_loops_of_folders_end(tmp_path: Path) -> None:
    make(tmp_path, "a/one.jpg", "b/two.jpg")
    for name in ("x", "y"):
        (tmp_path / "a" / name).symlink_to(tmp_path)
        (tmp_path / "b" / name).symlink_to("../a")
    assert name_all(list_inputs([tmp_path])) == ["a/one.jpg", "b/two.jpg"]
    assert name_all(list_inputs([f"{tmp_path}/**/*.jpg"])) == ["a/one.jpg", "b/two.jpg"]


def test_a_linked_folder_is_called_by_its_own_place_where_that_is_in_the_input(tmp_path: Path) -> None:
    make(tmp_path, "in/z/one.jpg", "outside/two.jpg")
    (tmp_path / "in" / "a").symlink_to("z")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "outside")
    (tmp_path / "in" / "c").symlink_to(tmp_path / "outside")
    listing = list_inputs([tmp_path / "in"])
    assert name_all(listing) == ["b/two.jpg", "z/one.jpg"]
    assert [item.content.read() for item in listing.items] == [b"outside/two.jpg", b"in/z/one.jpg"]


def test_links_that_lead_nowhere_or_round_in_circles_are_pictures_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "circle.jpg").symlink_to("circle.jpg")
    (tmp_path / "nowhere.jpg").symlink_to("missing.jpg")
    items = list_inputs([tmp_path]).items
    assert [item.name for item in items] == ["circle.jpg", "nowhere.jpg"]
    with pytest.raises(ImageError, match=r"^cannot be opened \(Too many levels of symbolic links\)$"):
        items[0].content.read()
    with pytest.raises(ImageError, match="^does not exist$"):
        items[1].content.read()


def test_a_folder_that_cannot_be_read_is_named_before_work_begins(public: Path) -> None:
    make(public, "a.jpg", "locked/b.jpg")
    (public / "locked").chmod(0)
    with without_rights(), pytest.raises(InputError, match=r"locked: this folder cannot be read \(Permission denied\)"):
        list_inputs([public])
    with without_rights(), pytest.raises(InputError, match="locked: this folder cannot be read"):
        list_inputs([f"{public}/**/*.jpg"])


def test_a_file_that_cannot_be_read_has_its_item(public: Path) -> None:
    make(public, "a.jpg")
    (public / "a.jpg").chmod(0)
    with without_rights():
        (item,) = list_inputs([public]).items
        with pytest.raises(ImageError, match=r"^cannot be opened \(Permission denied\)$"):
            item.content.read()


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"x")
    (item,) = list_inputs([tmp_path]).items
    assert os.fsencode(item.name) == b"caf\xe9.jpg"
    assert item.content.read() == b"x"
    assert Shard(1, 1).takes(item.name)


# Files, and several inputs


@pytest.mark.parametrize("name", ["no suffix", "a.weights", ".hidden.jpg", "a[1].jpg", "*.jpg", "-n.jpg"])
def test_a_file_that_is_named_is_an_item_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    make(tmp_path, name, "other.jpg", "a1.jpg")
    (item,) = list_inputs([tmp_path / name]).items
    assert item.name == name
    assert item.content.read() == name.encode()


def test_the_root_of_several_inputs_is_their_deepest_common_folder(tmp_path: Path) -> None:
    make(tmp_path, "x/one/a.jpg", "x/two/b.jpg", "x/two/deep/c.jpg")
    listing = list_inputs([tmp_path / "x" / "two", tmp_path / "x" / "one" / "a.jpg"])
    assert name_all(listing) == ["two/b.jpg", "two/deep/c.jpg", "one/a.jpg"]
    assert listing.root == tmp_path / "x"
    assert list_inputs([tmp_path / "x" / "one" / "a.jpg"]).root == tmp_path / "x" / "one"


def test_what_is_reached_twice_is_explained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "in/a.jpg", "in/sub/b.jpg")
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text("in/a.jpg\n./in/../in/a.jpg\nlink/a.jpg\n")
    folders = ["in", "in/", tmp_path / "in", "link"]
    listing = list_inputs(["in/a.jpg", *folders, "link/sub/b.jpg", "in/sub/../a.jpg", "list.txt", "in/*.jpg"])
    assert [item.content.path for item in listing.items] == [tmp_path / "in/a.jpg", tmp_path / "in/sub/b.jpg"]
    assert name_all(listing) == ["in/a.jpg", "in/sub/b.jpg"]
    assert listing.root == tmp_path


def test_two_dots_behind_a_link_lead_where_the_system_says(tmp_path: Path) -> None:
    make(tmp_path, "far/away/a.jpg", "far/b.jpg", "b.jpg")
    (tmp_path / "link").symlink_to("far/away")
    listing = list_inputs([f"{tmp_path}/link/../b.jpg"])
    assert [item.content.read() for item in listing.items] == [b"far/b.jpg"]
    assert listing.root == tmp_path / "far"
    (tmp_path / "far" / "away" / "linked.jpg").symlink_to("../b.jpg")
    assert name_all(list_inputs([f"{tmp_path}/far/../link/linked.jpg"])) == ["linked.jpg"]
    (tmp_path / "far" / "away" / "linked.jpg").unlink()
    listing = list_inputs([f"{tmp_path}/link/.."])
    assert name_all(listing) == ["b.jpg", "away/a.jpg"]


def test_a_folder_under_a_link_keeps_the_name_that_people_gave(tmp_path: Path) -> None:
    make(tmp_path, "store/v1/a.jpg", "here/b.jpg")
    (tmp_path / "here" / "current").symlink_to(tmp_path / "store" / "v1")
    listing = list_inputs([tmp_path / "here" / "current", tmp_path / "here" / "b.jpg"])
    assert name_all(listing) == ["current/a.jpg", "b.jpg"]
    assert [item.content.read() for item in listing.items] == [b"store/v1/a.jpg", b"here/b.jpg"]


def test_one_path_alone_is_one_input(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    assert name_all(list_inputs(tmp_path)) == name_all(list_inputs(str(tmp_path))) == ["a.jpg"]


def test_the_root_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a.jpg")
    monkeypatch.setattr(os.path, "commonpath", lambda paths: "/")
    assert name_all(list_inputs([tmp_path / "a.jpg"])) == [str(tmp_path / "a.jpg")[1:]]


# Globs


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jpg", ["a.jpg", "b1.jpg", "b[1].jpg"]), ("?.jpg", ["a.jpg"]), ("b[0-9].jpg", ["b1.jpg"]),
        ("b[!0-9].jpg", None), ("b[1].jpg", ["b[1].jpg"]), ("*/*.jpg", ["s/c.jpg", "t/d.jpg"]),
        ("[st]/*", ["s/c.jpg", "t/d.jpg", "t/u/e.jpg"]),
        ("**/*.jpg", ["a.jpg", "b1.jpg", "b[1].jpg", "s/c.jpg", "t/d.jpg", "t/u/e.jpg"]),
        ("**", ["a.jpg", "b1.jpg", "b[1].jpg", "s/c.jpg", "t/d.jpg", "t/u/e.jpg"]), ("**/u/**", ["t/u/e.jpg"]),
        ("t/**/*.jpg", ["t/d.jpg", "t/u/e.jpg"]), ("*/", ["s/c.jpg", "t/d.jpg", "t/u/e.jpg"]),
        (".h*/*", [".hidden/x.jpg"]), ("*/missing.jpg", None), ("*.bmp", None), ("missing/*", None),
    ],
)  # fmt: skip
def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: list[str] | None) -> None:
    make(tmp_path, "a.jpg", "b1.jpg", "b[1].jpg", "s/c.jpg", "s/n.doc", "t/d.jpg", "t/u/e.jpg")
    make(tmp_path, ".hidden/x.jpg", ".y.jpg")
    monkeypatch.chdir(tmp_path)
    for prefix in ("", f"{tmp_path}/"):
        if names is None:
            refuse("does not exist, and matches nothing as a glob", [prefix + pattern])
        else:
            listing = list_inputs([prefix + pattern])
            assert [str(item.content.path) for item in listing.items] == [str(tmp_path / name) for name in names]


def test_a_glob_leaves_out_what_is_no_picture_unless_it_asks_for_that(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg", "b.doc", "c.img", "notes.txt")
    make_zip(tmp_path / "d.zip", "inside.jpg")
    listing = list_inputs([f"{tmp_path}/*"])
    assert (name_all(listing), listing.left_out) == (["a.jpg"], 4)
    assert name_all(list_inputs([f"{tmp_path}/*.img"])) == ["c.img"]
    assert name_all(list_inputs([f"{tmp_path}/*.zip"])) == ["inside.jpg"]
    with tarfile.open(tmp_path / "e.TAR.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.jpg", "packed.jpg")
    assert name_all(list_inputs([f"{tmp_path}/*.gz"])) == ["packed.jpg"]
    (tmp_path / "sub").mkdir()
    make(tmp_path, "0/in.jpg")
    assert name_all(list_inputs([f"{tmp_path}/*"])) == ["a.jpg", "0/in.jpg"]


def test_a_link_that_leads_nowhere_is_found_by_a_glob_as_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jpg").symlink_to("missing")
    assert name_all(list_inputs([f"{tmp_path}/sub/*.jpg"])) == ["a.jpg"]
    assert name_all(list_inputs([f"{tmp_path}/*/a.jpg"])) == ["a.jpg"]


# The output folder


@pytest.mark.parametrize("through_link", [False, True])
def test_the_output_folder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_link: bool) -> None:
    make(tmp_path, "in/a.jpg", "in/out/a-gradcam.jpg", "in/out/deep/b.jpg", "in/outer/c.jpg", "in/out/run.json")
    (tmp_path / "link").symlink_to("in/out")
    monkeypatch.chdir(tmp_path)
    exclude = Path("link") if through_link else Path("in/out")
    several = [["in/a.jpg", "in/*/*.jpg"], ["in/a.jpg", "in/out", "in/outer"]]
    for inputs in (["in"], ["in/*"], ["in/**"], ["in/**/*.jpg"], *several):
        listing = list_inputs(inputs, exclude=exclude)
        assert name_all(listing) == ["a.jpg", "outer/c.jpg"]
        assert listing.left_out == 0


def test_an_output_folder_among_the_inputs_changes_no_name(tmp_path: Path) -> None:
    make(tmp_path, "in/deep/a.jpg", "out/a.jpg")
    inputs = [tmp_path / "in" / "deep", tmp_path / "out"]
    assert name_all(list_inputs(inputs, exclude=tmp_path / "out")) == ["a.jpg"]


def test_pictures_beside_which_the_output_goes_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a.jpg", "sub/b.jpg")
    monkeypatch.chdir(tmp_path)
    assert name_all(list_inputs(["a.jpg"], exclude=tmp_path)) == ["a.jpg"]
    assert name_all(list_inputs(["*.jpg"], exclude=tmp_path)) == ["a.jpg"]
    assert name_all(list_inputs(["**/*.jpg"], exclude=tmp_path)) == ["a.jpg", "sub/b.jpg"]
    assert name_all(list_inputs(["sub"], exclude=tmp_path)) == ["b.jpg"]


def test_an_input_that_is_the_output_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    refuse("There are no images in .*; the output folder is left out: choose another", [tmp_path], exclude=tmp_path)


# Nothing to explain


@pytest.mark.parametrize("path", ["", None, 3, "a\0b", ["a.jpg"]])
def test_what_is_no_path_at_all(path: object) -> None:
    refuse("There is nothing to explain: give files", [])
    refuse("An input is .*, expected the path of a file", [path])


def test_what_does_not_exist(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    (tmp_path / "link.jpg").symlink_to("missing")
    for name in ("missing", "missing/*/a.jpg", "a.jpg/b.jpg", "list.txt", "archive.zip", "\ud800"):
        with pytest.raises(InputError):
            list_inputs([tmp_path / "a.jpg", tmp_path / name])
    refuse("/missing.jpg: does not exist$", [tmp_path / "missing.jpg"])
    refuse("/link.jpg: is a broken link$", [tmp_path / "link.jpg"])
    refuse(r": cannot be opened \(File name too long\)", [tmp_path / ("x" * 300)])


@pytest.mark.parametrize(
    ("names", "ending"),
    [
        ((), "."),
        (("a.txt",), "; 1 file without an image suffix was left out."),
        (("a.txt", "sub/b.pdf", ".hidden.jpg"), "; 2 files without an image suffix were left out."),
    ],
)
def test_no_pictures_at_all(tmp_path: Path, names: tuple[str, ...], ending: str) -> None:
    make(tmp_path, *names)
    with pytest.raises(InputError) as caught:
        list_inputs([tmp_path])
    assert str(caught.value) == f"There are no images in '{tmp_path}'{ending}"


def test_no_pictures_in_many_inputs(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    refuse(r"no images in '.*/0', '.*/1', '.*/2' and 2 more\.$", folders)


# Reading


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(100_000)
    (tmp_path / "a.jpg").write_bytes(data + b"\r\n\x1a\r\n")
    assert FileContent(str(tmp_path / "a.jpg")).read() == data + b"\r\n\x1a\r\n"


def test_what_is_no_file_is_said_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "empty.jpg").touch()
    for name, reason in [
        (tmp_path / "pipe.jpg", "is a pipe, not a file"),
        (tmp_path, "is not a file"),
        (tmp_path / "empty.jpg", "is empty"),
        (tmp_path / "missing.jpg", "does not exist"),
        (tmp_path / "empty.jpg" / "a.jpg", "does not exist"),
        ("/dev/zero", "is a device, not a file"),
    ]:
        start = time.perf_counter()
        with pytest.raises(ImageError, match=f"^{reason}$"):
            FileContent(str(name)).read()
        assert time.perf_counter() - start < 5
    assert name_all(list_inputs([tmp_path])) == ["empty.jpg", "pipe.jpg"]


class FileChangedAfterRead:
    """A file that another process changes right after it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, data: bytes, *, keep_time: bool = False) -> None:
        fstat, calls = os.fstat, []

        def fstat_and_change(descriptor: int) -> os.stat_result:
            calls.append(descriptor)
            status = fstat(descriptor)
            if len(calls) == 1:
                with open(path, "r+b") as file:
                    file.truncate(0)
                    file.write(data)
                if keep_time:
                    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            return status

        monkeypatch.setattr(os, "fstat", fstat_and_change)


@pytest.mark.parametrize(
    ("data", "keep_time"), [(b"short", True), (b"longer than it was before", True), (b"same length", False)]
)
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: Any, data: bytes, keep_time: bool) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"eleven byte")
    os.utime(path, ns=(1, 1))
    FileChangedAfterRead(monkeypatch, path, data, keep_time=keep_time)
    with pytest.raises(ImageError, match="^changed while it was read$"):
        FileContent(str(path)).read()
    assert FileContent(str(path)).read() == data


def test_reading_leaves_no_descriptor_open(tmp_path: Path) -> None:
    make(tmp_path, "a.jpg")
    (tmp_path / "empty.jpg").touch()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for item in list_inputs([tmp_path]).items:
        with contextlib.suppress(ImageError):
            item.content.read()
    with contextlib.suppress(ImageError):
        FileContent(str(tmp_path)).read()
    assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_many_threads_read_files(tmp_path: Path) -> None:
    make(tmp_path, *(f"{number}.jpg" for number in range(50)))
    items = list_inputs([tmp_path]).items
    wrong: list[str] = []

    def read() -> None:
        wrong.extend(item.name for item in items for _ in range(5) if item.content.read().decode() != item.name)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Many inputs


def test_listing_costs_less_than_half_a_millisecond_and_half_a_kilobyte_a_picture(tmp_path: Path) -> None:
    import tracemalloc

    count = 5000
    for number in range(count):
        folder = tmp_path / f"class_{number % 50:04}"
        folder.mkdir(exist_ok=True)
        (folder / f"picture_{number:08}.JPEG").touch()
    start = time.process_time()
    assert len(list_inputs([tmp_path]).items) == count
    assert (time.process_time() - start) / count < 5e-4
    tracemalloc.start()
    items = list_inputs([tmp_path]).items
    memory, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(items) == count
    assert memory / count < 400
    assert peak / count < 600


def test_listing_asks_for_no_files_details(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, *(f"{number}.jpg" for number in range(200)))
    calls = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, **options: calls.append(args) or real(*args, **options))
    list_inputs([tmp_path])
    assert len(calls) < 50


# Shards


def test_shares_are_disjoint_and_cover_everything_and_are_alike() -> None:
    names = [f"class_{number % 7}/picture_{number:06}.jpg" for number in range(8000)]
    for of in (1, 2, 3, 8):
        takers = [[index for index in range(1, of + 1) if Shard(index, of).takes(name)] for name in names]
        assert all(len(taker) == 1 for taker in takers)
        sizes = [sum(taker == [index] for taker in takers) for index in range(1, of + 1)]
        # Five standard deviations of an even split.
        assert all(abs(size - 8000 / of) <= 5 * (8000 / of * (1 - 1 / of)) ** 0.5 for size in sizes)


def test_a_share_is_the_same_on_every_machine() -> None:
    """Check the documented rule: the first 8 bytes of `printf a.jpg | b2sum -l 64` as a big-endian number."""
    command = ["b2sum", "-l", "64"]
    if shutil.which("b2sum"):
        for name in ("a.jpg", "猫/é.jpg", ""):
            digest = subprocess.run(command, input=name.encode(), capture_output=True, check=True).stdout.split()[0]
            assert [Shard(index, 5).takes(name) for index in range(1, 6)].index(True) == int(digest, 16) % 5
    assert [name for name in ("a.jpg", "b.jpg", "c.jpg", "d.jpg") if Shard(1, 3).takes(name)] == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    "text", ["0/4", "5/4", "1/0", "0/0", "-1/4", "1", "1/", "/4", "a/b", "1/4/2", "1.0/4", "", "١/٤", "1 / 4"]
)
def test_nonsense_is_no_share(text: str) -> None:
    assert (parse_shard("2/8"), parse_shard(" 10/10 ")) == (Shard(2, 8), Shard(10, 10))
    with pytest.raises(InputError, match="shard .*expected I/N, with I from 1 to N, such as 2/8"):
        parse_shard(text)


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(2**31)  # a sparse file, which takes no space on the disk
    (item,) = list_inputs(tmp_path).items
    with pytest.raises(ImageError, match="is so large that it needs 2 GiB to read, but the limit is 1 GiB"):
        item.content.read()
