"""Test images in archives: read in place, from many threads, and never from outside the archive."""

from __future__ import annotations

import bz2
import contextlib
import gc
import gzip
import io
import lzma
import os
import random
import shutil
import stat
import struct
import subprocess
import tarfile
import tempfile
import threading
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcam.errors import ImageError
from gradcam.sources import archives
from gradcam.sources.archives import _to_safe_name
from gradcam.sources.collect import InputListing, list_inputs
from gradcam.sources.contents import ArchiveFile, ImageContent, InputImage, TarContent
from tests.sources.test_sources import refuse

TARS = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".TAR.GZ"]
DATA = {f"folder/{number}.jpg": random.Random(number).randbytes(5000 + 700 * number) for number in range(20)}


def make_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    mode = {"gz": "w:gz", "bz2": "w:bz2", "xz": "w:xz"}.get(path.suffix.lower().lstrip(".t"), "w")
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            add(archive, name, data)
    return path


def add(
    archive: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(data), kind, target
    archive.addfile(member, io.BytesIO(data))


def make(path: Path, members: dict[str, bytes]) -> Path:
    return make_zip(path, members) if path.suffix == ".zip" else make_tar(path, members)


def name_all(listing: InputListing) -> list[str]:
    return [item.name for item in listing.items]


def read_all(listing: InputListing) -> dict[str, bytes]:
    return {item.name: item.content.read() for item in listing.items}


def find_reason(content: ImageContent) -> str:
    with pytest.raises(ImageError) as caught:
        content.read()
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".zip", ".ZIP", *TARS])
def test_pictures_in_archives_are_read_where_they_lie(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pictures{suffix}"
    members = DATA | {"b.PNG": b"b", "a.gif": b"a", "notes.txt": b"x", "deep/more.zip": b"x"}
    path.write_bytes(make(tmp_path / f"made{suffix.lower()}", members).read_bytes())
    listing = list_inputs([path])
    assert name_all(listing) == [*DATA, "b.PNG", "a.gif"], "an archive keeps its order"
    assert read_all(listing) == DATA | {"b.PNG": b"b", "a.gif": b"a"}
    assert listing.left_out == 2
    assert listing.root is None
    assert {item.content.path for item in listing.items} == {None}
    assert not list(tmp_path.glob("folder"))


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz"])
def test_many_threads_read_one_archive(tmp_path: Path, suffix: str) -> None:
    items = list_inputs([make(tmp_path / f"a{suffix}", DATA)]).items
    wrong: list[str] = []

    def read(seed: int) -> None:
        for item in random.Random(seed).sample(items * 10, len(items) * 10):
            if item.content.read() != DATA[item.name]:
                wrong.append(item.name)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_every_way_of_packing_a_zip(tmp_path: Path, method: int) -> None:
    assert read_all(list_inputs([make_zip(tmp_path / "a.zip", DATA, method)])) == DATA


def test_a_zip_with_more_than_names_in_its_headers(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("a.jpg")
    info.extra = struct.pack("<HH4s", 0x9999, 4, b"more")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, b"data")
    assert b"a.jpg\x99\x99" in (tmp_path / "a.zip").read_bytes()
    assert read_all(list_inputs([tmp_path / "a.zip"])) == {"a.jpg": b"data"}


def test_a_zip_behind_something_else(tmp_path: Path) -> None:
    packed = make_zip(tmp_path / "a.zip", DATA).read_bytes()
    (tmp_path / "a.zip").write_bytes(b"#!/bin/sh\nexit\n" + packed)
    assert read_all(list_inputs([tmp_path / "a.zip"])) == DATA


def test_a_zip_that_was_written_as_a_stream(tmp_path: Path) -> None:
    """Check a zip whose sizes and checksums follow the data, and are repeated in the directory."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            self.data += bytes(data)
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name, data in DATA.items():
            archive.writestr(name, data)
    (tmp_path / "a.zip").write_bytes(pipe.data)
    assert read_all(list_inputs([tmp_path / "a.zip"])) == DATA


def test_an_archive_among_other_inputs_is_a_folder(tmp_path: Path) -> None:
    make(tmp_path / "one.zip", {"a.jpg": b"1"})
    make(tmp_path / "sub.tar", {"a.jpg": b"2", "x/b.jpg": b"3"})
    (tmp_path / "c.jpg").write_bytes(b"4")
    listing = list_inputs([tmp_path / "one.zip", tmp_path / "sub.tar", tmp_path / "c.jpg"])
    assert read_all(listing) == {"one.zip/a.jpg": b"1", "sub.tar/a.jpg": b"2", "sub.tar/x/b.jpg": b"3", "c.jpg": b"4"}
    assert listing.root == tmp_path


def test_an_archive_that_is_given_twice_is_explained_once(tmp_path: Path) -> None:
    path = make(tmp_path / "a.zip", {"a.jpg": b"1", "n.txt": b""})
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "to").symlink_to(tmp_path)
    listing = list_inputs([path, f"{tmp_path}/./a.zip", tmp_path / "link" / "to" / "a.zip"])
    assert len(listing.items) == listing.left_out == 1


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_hidden_members_and_what_macos_adds_are_left_out(tmp_path: Path, suffix: str) -> None:
    names = ["__MACOSX/._a.jpg", "__MACOSX/a.jpg", ".hidden.jpg", "x/.y/a.jpg", "./a.jpg", "./x//b.jpg", ".DS_Store"]
    listing = list_inputs([make(tmp_path / f"a{suffix}", dict.fromkeys(names, b"x"))])
    assert name_all(listing) == ["a.jpg", "x/b.jpg"]
    assert listing.left_out == 0


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_members_that_lead_out_say_so_under_names_that_do_not(tmp_path: Path, suffix: str) -> None:
    evil = {"../up.jpg": "up.jpg", "../../../etc/far.jpg": "etc/far.jpg", "/etc/rooted.jpg": "etc/rooted.jpg"}
    evil |= {"//server/share.jpg": "server/share.jpg", "a/../../b.jpg": "b.jpg", "..\\back.jpg": "back.jpg"}
    evil |= {"C:\\drive.jpg": "drive.jpg", "C:/other.jpg": "other.jpg", "/../../both.jpg": "both.jpg"}
    (tmp_path / "up.jpg").write_bytes(b"not this one")
    members = dict.fromkeys(evil, b"x") | {"a/../fine.jpg": b"fine", "good.jpg": b"good", "up.jpg": b"real"}
    listing = list_inputs([make(tmp_path / f"a{suffix}", members)])
    by_name = {item.name: item.content for item in listing.items}
    # A file keeps its real name if it comes first; here it came last.
    assert list(by_name) == [*evil.values(), "fine.jpg", "good.jpg", "up-2.jpg"]
    for name in evil.values():
        assert find_reason(by_name[name]) == "has a path outside the archive"
    assert [by_name[name].read() for name in ("fine.jpg", "good.jpg", "up-2.jpg")] == [b"fine", b"good", b"real"]


NAMES = st.lists(st.sampled_from(["..", ".", "", "a", "b.jpg", "C:", "\\", "..\\", "a\\b", " ", "..."])).map("/".join)


@given(NAMES)
def test_no_name_leads_out_after_it_was_made_harmless(name: str) -> None:
    plain, leads_out = _to_safe_name(name)
    assert not plain.startswith("/")
    assert "\\" not in plain
    if plain != "..":  # names that begin with a dot are hidden
        assert ".." not in plain.split("/")
        # As an oracle, walk along the name and check whether it ever goes above its start.
        depth = lowest = 0
        for part in name.replace("\\", "/").split("/"):
            depth += (part not in ("", ".", "..")) - (part == "..")
            lowest = min(lowest, depth)
        if not name.startswith(("/", "\\", "C:")):
            assert leads_out == (lowest < 0) or "C:" in name


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_members_of_one_name_are_told_apart(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    names = ["a.jpg", "a.jpg", "a-2.jpg", "x/a.jpg", "a.jpg", "a-2.jpg"]
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for number, name in enumerate(names):
                is_double = name in names[:number]
                with pytest.warns(UserWarning, match="Duplicate") if is_double else contextlib.nullcontext():
                    archive.writestr(name, str(number))
    else:
        with tarfile.open(path, "w") as tar:
            for number, name in enumerate(names):
                add(tar, name, str(number).encode())
    messages = ["a.jpg", "a-3.jpg", "a-2.jpg", "x/a.jpg", "a-4.jpg", "a-2-2.jpg"]
    assert read_all(list_inputs([path])) == {name: str(number).encode() for number, name in enumerate(messages)}


def test_a_thousand_members_of_one_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(1000):
            add(tar, "a.jpg", str(number).encode())
    listing = list_inputs([tmp_path / "a.tar"])
    assert name_all(listing) == ["a.jpg", *(f"a-{number}.jpg" for number in range(2, 1001))]
    assert listing.items[999].content.read() == b"999"


def test_links_and_devices_in_a_tar_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "real.jpg", b"real")
        add(tar, "soft.jpg", kind=tarfile.SYMTYPE, target=str(tmp_path / "secret.jpg"))
        add(tar, "hard.jpg", kind=tarfile.LNKTYPE, target="real.jpg")
        add(tar, "device.jpg", kind=tarfile.CHRTYPE)
        add(tar, "pipe.jpg", kind=tarfile.FIFOTYPE)
        add(tar, "empty.jpg")
        add(tar, "folder.jpg", kind=tarfile.DIRTYPE)
        add(tar, "link", kind=tarfile.SYMTYPE, target="/etc")
        add(tar, "link/under.jpg", b"under")
    listing = list_inputs([tmp_path / "a.tar"])
    by_name = {item.name: item.content for item in listing.items}
    reasons = dict.fromkeys(["soft.jpg", "hard.jpg"], "is a link") | {"empty.jpg": "is empty"}
    reasons |= dict.fromkeys(["device.jpg", "pipe.jpg"], "is not a file")
    assert {name: find_reason(by_name[name]) for name in reasons} == reasons
    assert by_name["link/under.jpg"].read() == b"under"
    assert "folder.jpg" not in by_name


def test_links_devices_and_folders_in_a_zip(tmp_path: Path) -> None:
    kinds = {"link.jpg": stat.S_IFLNK, "device.jpg": stat.S_IFBLK, "file.jpg": stat.S_IFREG, "folder.jpg": stat.S_IFDIR}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, kind in kinds.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (kind | 0o644) << 16
            archive.writestr(info, b"/etc/passwd")
        archive.mkdir("other.jpg") if hasattr(archive, "mkdir") else archive.writestr("other.jpg/", b"")
        archive.writestr("empty.jpg", b"")
    by_name = {item.name: item.content for item in list_inputs([tmp_path / "a.zip"]).items}
    assert list(by_name) == ["link.jpg", "device.jpg", "file.jpg", "empty.jpg"]
    assert find_reason(by_name["link.jpg"]) == "is a link"
    assert find_reason(by_name["device.jpg"]) == "is not a file"
    assert find_reason(by_name["empty.jpg"]) == "is empty"
    assert by_name["file.jpg"].read() == b"/etc/passwd"


def patch(path: Path, old: bytes, new: bytes, *, last: bool = False) -> None:
    data = path.read_bytes()
    at = data.rindex(old) if last else data.index(old)
    path.write_bytes(data[:at] + new + data[at + len(old) :])


def test_encrypted_members_say_so(tmp_path: Path) -> None:
    make_zip(tmp_path / "a.zip", {"a.jpg": b"abcdef", "b.jpg": b"b"}, zipfile.ZIP_STORED)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    first, second = list_inputs([tmp_path / "a.zip"]).items
    assert find_reason(first.content) == "is encrypted: unpack the archive with its password first"
    assert second.content.read() == b"b"


def test_a_member_that_claims_too_much_fails_without_filling_the_memory(tmp_path: Path) -> None:
    make_zip(tmp_path / "a.zip", {"a.jpg": b"x" * 1000})
    patch(tmp_path / "a.zip", struct.pack("<I", 1000), struct.pack("<I", 2**30 + 1), last=True)
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        member = tarfile.TarInfo("b.jpg")
        member.size = 2**30 + 1
        tar.addfile(member)
    with open(tmp_path / "b.tar", "r+b") as file:
        file.truncate(512 + 2**30 + 512 + 1024)  # a hole: the file takes no space on the disk
    listing = list_inputs([tmp_path / "a.zip", tmp_path / "b.tar"])
    for item in listing.items:
        assert find_reason(item.content).startswith("declares 1073741825 bytes, but the limit")


def test_a_bomb_unpacks_to_no_more_than_it_says(tmp_path: Path) -> None:
    import tracemalloc

    make_zip(tmp_path / "a.zip", {"a.jpg": bytes(50_000_000)})
    patch(tmp_path / "a.zip", struct.pack("<I", 50_000_000), struct.pack("<I", 1000), last=True)
    (item,) = list_inputs([tmp_path / "a.zip"]).items
    tracemalloc.start()
    assert find_reason(item.content).startswith("is damaged or cut off")
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_member_fails_and_the_others_do_not(tmp_path: Path, method: int) -> None:
    path = make_zip(tmp_path / "a.zip", DATA, method)
    info = zipfile.ZipFile(path).infolist()[3]
    data = bytearray(path.read_bytes())
    at = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    data[at : at + 20] = bytes(20)
    path.write_bytes(data)
    for item in list_inputs([path]).items:
        if item.name == info.filename:
            assert find_reason(item.content).startswith("is damaged or cut off (")
        else:
            assert item.content.read() == DATA[item.name]


def test_a_member_that_does_not_begin_where_the_archive_says(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", DATA)
    patch(path, b"PK\3\4", b"PK\3\5")
    assert "is not where" in find_reason(list_inputs([path]).items[0].content)


def test_an_unknown_way_of_packing(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a.jpg": b"x"}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 10] = 97  # compression method 97 is WavPack
    path.write_bytes(data)
    assert find_reason(list_inputs([path]).items[0].content).startswith("uses an unsupported compression (")


NO_ARCHIVE = b"This is no archive at all. " * 100
BROKEN = dict.fromkeys(("text.zip", "text.tar", "text.tar.gz"), NO_ARCHIVE) | dict.fromkeys(
    ("empty.zip", "empty.tar"), b""
)
BROKEN |= {"inside.tar.gz": gzip.compress(NO_ARCHIVE), "header.tgz": b"\x1f\x8b\x08"}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_archive_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    refuse(rf"/{name}: this archive is damaged or cut off \(.+\)$", [tmp_path / name])


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz"])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.97])
def test_an_archive_that_was_cut_off_is_refused(tmp_path: Path, suffix: str, part: float) -> None:
    path = make(tmp_path / f"a{suffix}", DATA)
    size = sum(len(data) for data in DATA.values()) if suffix == ".tar" else path.stat().st_size
    os.truncate(path, int(size * part))
    refuse("this archive is damaged or cut off", [path])


def test_a_tar_with_a_broken_header_in_the_middle_is_refused(tmp_path: Path) -> None:
    """Check that a broken header raises an error; tarfile itself takes it for the end and drops the remaining members."""
    path = make_tar(tmp_path / "a.tar", DATA)
    with tarfile.open(path) as tar:
        at = tar.getmembers()[7].offset
    with open(path, "r+b") as file:
        file.seek(at + 150)  # the checksum of the header
        file.write(b"9")
    with tarfile.open(path) as tar:
        assert len(tar.getmembers()) == 7
    refuse(r"this archive is damaged or cut off \(a broken header\)", [path])


def test_a_tar_without_its_end_mark_is_whole(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"a.jpg": b"a" * 512})
    os.truncate(path, 1024)
    assert read_all(list_inputs([path])) == {"a.jpg": b"a" * 512}


def test_what_tar_itself_packs(tmp_path: Path) -> None:
    """Check GNU tar: long names, folders and names that are not UTF-8 are read; sparse files are refused."""
    folder = tmp_path / "in"
    names = [b"a.jpg", b"x/" * 60 + b"b" * 90 + b".jpg", b"caf\xe9.jpg"]
    for name in names:
        path = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(name)
    with open(folder / "sparse.jpg", "wb") as file:
        file.truncate(2**20)
        file.write(b"x")
    if not shutil.which("tar"):
        pytest.skip("there is no tar here")
    for options in (["--format=gnu"], ["--format=pax"]):
        subprocess.run(["tar", "--sparse", *options, "-cf", tmp_path / "a.tar", "."], cwd=folder, check=True)
        by_name = {os.fsencode(item.name): item.content for item in list_inputs([tmp_path / "a.tar"]).items}
        assert set(by_name) == {*names, b"sparse.jpg"}
        assert [by_name[name].read() for name in names] == names
        assert "sparse" in find_reason(by_name[b"sparse.jpg"])


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_an_archive_that_changes_after_it_was_listed(tmp_path: Path, suffix: str) -> None:
    path = make(tmp_path / f"a{suffix}", {"a.jpg": b"x"})
    (item,) = list_inputs([path]).items
    make(tmp_path / f"b{suffix}", {"b.jpg": b"y"}).replace(path)
    assert find_reason(item.content) == "is in an archive that changed after it was listed"
    path.unlink()
    assert find_reason(item.content) == "is in an archive that cannot be opened (No such file or directory)"


def test_a_member_behind_the_end(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"a.jpg": b"x"})
    with open(path, "rb") as file:
        archive = ArchiveFile(str(path), file)
    content = TarContent(archive, path.stat().st_size - 5, 10)
    assert find_reason(content) == "is damaged or cut off (the archive ends too early)"


def test_a_compressed_tar_needs_no_file_any_more_and_leaves_none(tmp_path: Path, monkeypatch: Any) -> None:
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    listing: InputListing | None = list_inputs([make(tmp_path / "a.tar.gz", DATA)])
    assert not list(room.iterdir())
    (tmp_path / "a.tar.gz").unlink()
    assert read_all(listing) == DATA
    del listing
    gc.collect()
    assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_no_room_to_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fill)
    path = make(tmp_path / "a.tar.gz", DATA)
    refuse(r"a\.tar\.gz: cannot be unpacked in .* \(No space left on device\); set TMPDIR", path)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_tar_is_unpacked_by_what_it_is_not_by_what_it_is_called(tmp_path: Path, pack: object) -> None:
    plain = make_tar(tmp_path / "a.tar", DATA).read_bytes()
    (tmp_path / "b.tar").write_bytes(pack(plain))  # type: ignore[operator]
    assert read_all(list_inputs([tmp_path / "b.tar"])) == DATA
    (tmp_path / "c.tar.gz").write_bytes(plain)
    assert read_all(list_inputs([tmp_path / "c.tar.gz"])) == DATA


def test_an_archive_without_pictures(tmp_path: Path) -> None:
    path = make(tmp_path / "a.zip", {"notes.txt": b"x"})
    refuse(r"There are no images in '.*a\.zip'; 1 file without an image suffix was left out\.", path)
    refuse(r"There are no images in '.*a\.tar'\.", [make(tmp_path / "a.tar", {})])


def test_an_archive_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = make(tmp_path / "a.zip", DATA)
    monkeypatch.setattr(archives, "_list_zip", fail)
    refuse(r"a\.zip: this archive cannot be opened \(Permission denied\)", [path])


def test_the_checksum_is_that_of_zlib(tmp_path: Path) -> None:
    """Check that data of the right length but with the wrong checksum is refused."""
    path = make_zip(tmp_path / "a.zip", {"a.jpg": b"right"}, zipfile.ZIP_STORED)
    patch(path, b"right", b"wrong")
    assert zlib.crc32(b"right") != zlib.crc32(b"wrong")
    assert find_reason(list_inputs([path]).items[0].content).startswith("is damaged or cut off (Bad CRC-32")


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
def test_members_are_kept_in_half_a_kilobyte(tmp_path: Path, suffix: str) -> None:
    import tracemalloc

    count = 3000
    path = make(tmp_path / f"a{suffix}", {f"class_{number % 50:04}/{number:08}.jpg": b"x" for number in range(count)})
    tracemalloc.start()
    items: object = list_inputs([path]).items
    memory, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(items, list)
    assert isinstance(items[0], InputImage)
    assert memory / count < 500
    assert suffix == ".zip" or peak / count < 450, "the list of members that tarfile makes is not kept"
