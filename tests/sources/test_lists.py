"""Test lists of images in every usual format, and the messages for lists that cannot be read."""

from __future__ import annotations

import csv
import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcam.errors import ImageError, InputError
from gradcam.sources.collect import InputListing, list_inputs
from gradcam.sources.list_files import _read_lines, _read_table, decode_text
from tests.sources.test_sources import refuse


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, content: str | bytes) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def show(listing: InputListing) -> list[tuple[str, str | None]]:
    return [(item.name, item.wanted) for item in listing.items]


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


CAT_AND_DOG = [("a.jpg", "tabby"), ("b.jpg", None), ("c.jpg", "281")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("l.txt", "a.jpg\ttabby\nb.jpg\nc.jpg\t281\n"),
        ("l.TXT", "a.jpg\ttabby\nb.jpg\nc.jpg\t281"),
        ("l.txt", "\r\n\r\na.jpg\ttabby\r\n  \r\nb.jpg\t\r\n\t\r\nc.jpg\t 281 \r\n"),
        ("l.txt", "\ufeffa.jpg\ttabby\nb.jpg\nc.jpg\t281\n"),
        ("l.txt", "a.jpg\ttabby\nb.jpg\nc.jpg\t281\n".encode("utf-16")),
        ("l.csv", "a.jpg,tabby\nb.jpg\nc.jpg,281\n"),
        ("l.csv", "a.jpg,tabby,0.5,more\r\n\r\nb.jpg,,0.2\r\n,,,\r\nc.jpg, 281 ,0.1"),
        ("l.csv", "\ufeffimage,class\na.jpg,tabby\nb.jpg,\nc.jpg,281\n"),
        ("l.csv", "\n\nid,Label, PATH \n1,tabby,a.jpg\n2,,b.jpg\n3,281,c.jpg\n"),
        ("l.csv", ",filename,target\n0,a.jpg,tabby\n1,b.jpg\n2,c.jpg,281\n"),
        ("l.csv", '"file","score","class"\n"a.jpg",0.5,"tabby"\n"b.jpg",0.5,""\n"c.jpg",0.5,"281"\n'),
        ("l.CSV", "IMAGE,LABEL\na.jpg,tabby\nb.jpg\nc.jpg,281\n"),
        ("l.tsv", "a.jpg\ttabby\nb.jpg\nc.jpg\t281\n"),
        ("l.tsv", "target\tpath\ntabby\ta.jpg\n\tb.jpg\n281\tc.jpg\n"),
    ],
)
def test_lists_name_pictures_and_perhaps_their_classes(name: str, content: str | bytes) -> None:
    for picture in ("a.jpg", "b.jpg", "c.jpg"):
        write(picture, picture)
    listing = list_inputs([write(name, content)])
    assert show(listing) == CAT_AND_DOG
    assert [item.content.read().decode() for item in listing.items] == ["a.jpg", "b.jpg", "c.jpg"]


@pytest.mark.parametrize(
    "content",
    [
        "a.jpg\ttabby\nb.jpg\nc.jpg\t281\n", "\ufeff\r\na.jpg\ttabby\r\nb.jpg\r\nc.jpg\t281",
        "image,class\na.jpg,tabby\nb.jpg\nc.jpg,281\n",
        'score,"Image","class"\r\n1,a.jpg,tabby\r\n1,b.jpg,\r\n1,c.jpg,281\r\n',
        "\n\r\nimage,class\na.jpg,tabby\nb.jpg\nc.jpg,281\n", "path\tlabel\na.jpg\ttabby\nb.jpg\nc.jpg\t281\n",
    ],
)  # fmt: skip
def test_standard_input_is_a_list_by_its_first_line(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    pipe_in(monkeypatch, content)
    assert show(list_inputs(["-"])) == CAT_AND_DOG


def test_standard_input_that_is_no_table_may_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, "one, two.jpg\nthree.jpg\n")
    assert show(list_inputs(["-"])) == [("one, two.jpg", None), ("three.jpg", None)]


def test_standard_input_beside_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    write("x/a.jpg", "a")
    pipe_in(monkeypatch, "y/b.jpg\n")
    assert show(list_inputs(["x", "-"])) == [("x/a.jpg", None), ("y/b.jpg", None)]


def test_standard_input_can_be_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse("'-' is given 2 times, but standard input can be read only once", ["-", "-"])
    monkeypatch.setattr(sys, "stdin", None)
    refuse("standard input cannot be read, but '-' was given", ["-"])


def test_names_may_hold_commas_quotes_and_ends_of_lines_in_tables() -> None:
    names = ["a, b.jpg", 'say "hi".jpg', "two\nlines.jpg", " spaces .jpg", "猫.jpg", "u\u2028v.jpg"]
    for name in names:
        write(name, name)
    text = io.StringIO()
    csv.writer(text).writerows([name, "x,y"] for name in names)
    listing = list_inputs([write("l.csv", text.getvalue())])
    assert show(listing) == [(name, "x,y") for name in names]
    assert [item.content.read().decode() for item in listing.items] == names


def test_text_keeps_names_as_they_are() -> None:
    names = [" spaces .jpg", '"quoted".jpg', "a,b.jpg", "u\u2028v\x0bw\x85.jpg"]
    names += ["#x.jpg", "*.jpg", "no suffix", "notes.txt"]
    assert [name for name, _ in show(list_inputs([write("l.txt", "\n".join(names))]))] == names


def test_names_that_are_not_utf_8() -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    Path(name).write_bytes(b"x")
    for path in ("l.txt", "l.csv"):
        (item,) = list_inputs([write(path, b"caf\xe9.jpg\n")]).items
        assert item.name == name
        assert item.content.read() == b"x"


def test_paths_are_looked_up_beside_the_list_then_here(tmp_path: Path) -> None:
    for path in ("a.jpg", "b.jpg", "data/a.jpg", "data/c.jpg"):
        write(path, path)
    listing = list_inputs([write("data/l.txt", f"a.jpg\nb.jpg\nc.jpg\nmissing.jpg\n{tmp_path}/a.jpg\n../b.jpg\n")])
    assert [name for name, _ in show(listing)] == ["data/a.jpg", "b.jpg", "data/c.jpg", "data/missing.jpg", "a.jpg"]
    assert listing.root == tmp_path
    assert [item.content.read().decode() for item in listing.items[:3]] == ["data/a.jpg", "b.jpg", "data/c.jpg"]


def test_a_path_that_does_not_exist_or_is_a_folder_is_a_picture_that_cannot_be_read() -> None:
    write("folder/a.jpg", "a")
    items = list_inputs([write("l.txt", "missing.jpg\nfolder\n")]).items
    for item, reason in zip(items, ("does not exist", "is not a file")):
        with pytest.raises(ImageError, match=f"^{reason}$"):
            item.content.read()


def test_the_root_of_a_list_is_the_deepest_common_folder(tmp_path: Path) -> None:
    listing = list_inputs([write("l.txt", "x/y/a.jpg\nx/y/z/b.jpg\nx/y/c.jpg\n")])
    assert [name for name, _ in show(listing)] == ["a.jpg", "z/b.jpg", "c.jpg"]
    assert listing.root == tmp_path / "x" / "y"


def test_a_list_in_a_list_is_a_file() -> None:
    write("inner.txt", "a.jpg")
    assert show(list_inputs([write("l.txt", "inner.txt\nb.zip\n")])) == [("inner.txt", None), ("b.zip", None)]


# One image, several classes


def test_a_picture_that_is_named_twice_with_one_class_is_explained_once() -> None:
    path = write("l.txt", "a.jpg\tcat\nb.jpg\n./a.jpg\t cat \na.jpg\nb.jpg\tdog")
    assert show(list_inputs([path])) == [("a.jpg", "cat"), ("b.jpg", "dog")]


def test_a_list_adds_classes_to_a_folder() -> None:
    write("in/a.jpg", "a")
    write("in/b.jpg", "b")
    assert show(list_inputs(["in", write("l.txt", "in/b.jpg\tdog")])) == [("a.jpg", None), ("b.jpg", "dog")]
    assert show(list_inputs(["l.txt", "in"])) == [("b.jpg", "dog"), ("a.jpg", None)]


def test_two_classes_for_one_picture_are_refused_with_their_lines() -> None:
    write("x/a.jpg", "a")
    Path("link").symlink_to("x")
    write("l.txt", "x/a.jpg\nx/b.jpg\tdog\nx/a.jpg\tcat\nlink/a.jpg\ttabby\n")
    with pytest.raises(InputError) as caught:
        list_inputs(["x", "l.txt"])
    message = str(caught.value)
    assert message.startswith("l.txt, line 4: the class of ")
    assert message.endswith("link/a.jpg is 'tabby', but 'cat' in l.txt, line 3; list each image with one class")


def test_two_lists_that_ask_for_two_classes_are_refused() -> None:
    write("1.csv", 'image,class\n\n"a\n.jpg",cat\n')
    write("2.csv", '"a\n.jpg",dog\n')
    refuse(r"(?s)^2\.csv, line 2: the class of .* is 'dog', but 'cat' in 1\.csv, line 4", ["1.csv", "2.csv"])


# Lists that cannot be read


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", "", "There are no images in 'l.txt'"),
        ("l.csv", "image,class\n", "There are no images in 'l.csv'"),
        ("l.csv", "image,class\na.jpg,cat\n,dog\n", "l.csv, line 3: the class 'dog' has no image"),
        ("l.txt", "a.jpg\n\tdog\n", "l.txt, line 2: the class 'dog' has no image"),
        (
            "l.txt",
            b"a.jpg\n\x00\x01\n",
            "l.txt, line 2: the path contains a zero byte; check that the file lists images",
        ),
        ("l.csv", b"a.jpg\n\x00\x01\n", "l.csv, line 2: (the path contains a zero byte|cannot be read as a table)"),
        ("l.csv", 'a.jpg\n"b.jpg,cat\nc.jpg\n', "l.csv, line 3: cannot be read as a table"),
        ("l.csv", "a.jpg\n" + "x" * 200_000, "l.csv, line 2: cannot be read as a table"),
        ("l.txt", b"\xff\xfea", "l.txt: starts like UTF-16, but is not valid .*; save it as UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(name: str, content: str | bytes, message: str) -> None:
    refuse(f"^{message}", [write(name, content)])


def test_a_list_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    write("l.txt", "a.jpg")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(builtins, "open", fail)
    refuse(r"l\.txt: this list cannot be opened \(Permission denied\)", ["l.txt"])


CHARACTERS = st.characters(exclude_characters="\n\r\t\0", exclude_categories=["Cs"])
TEXT_WITHOUT_SEPARATORS = st.text(CHARACTERS, min_size=1).filter(str.strip)


@given(st.lists(st.tuples(TEXT_WITHOUT_SEPARATORS, TEXT_WITHOUT_SEPARATORS | st.just(""))))
def test_any_names_and_classes_come_back_from_text(rows: list[tuple[str, str]]) -> None:
    text = "".join(f"{path}\t{label}\n" if label else f"{path}\n" for path, label in rows)
    lines = _read_lines(decode_text(b"\xef\xbb\xbf" + text.encode(), "l.txt"))
    read = [(path, label) for _, path, label in lines if path]
    assert read == rows


@given(
    st.lists(st.tuples(TEXT_WITHOUT_SEPARATORS, TEXT_WITHOUT_SEPARATORS | st.just(""))), st.sampled_from([",", "\t"])
)
def test_any_names_and_classes_come_back_from_tables(rows: list[tuple[str, str]], delimiter: str) -> None:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([("image", "class"), *rows])
    read = [(path, label) for _, path, label in _read_table(text.getvalue(), delimiter, "l.csv")]
    assert read == rows
