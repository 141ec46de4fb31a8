"""Lists of pictures, as text or CSV: a path a line, and the class that is to be explained, where there is one."""

from __future__ import annotations

import codecs
import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import normpath

from gradcam.errors import InputError
from gradcam.images.files import NotAFileError, is_url, read_text_file, to_path
from gradcam.sources.folders import to_absolute
from gradcam.storage.store import Store

LIST_SUFFIXES = (".txt", ".csv", ".tsv")
STANDARD_INPUT = "standard input"
IMAGE_COLUMNS = frozenset({"image", "path", "file", "filename"})
CLASS_COLUMNS = frozenset({"class", "label", "target"})

Row = tuple[int, str, str]  # the line, the path and the class, as they are written


@dataclass(frozen=True, slots=True)
class Entry:
    """A picture that was named: its absolute path or its URL, the class that is asked for it, and the line of the list."""

    path: str
    wanted: str | None = None
    line: int = 0


def read_list(path: str) -> list[Entry]:
    """The entries of a list: a ``.csv`` or ``.tsv`` file, or else text with a path a line, and perhaps a TAB and a class. A
    relative path is looked up beside the list, then in the current folder. Raises `InputError`, with the line."""
    try:
        text = decode_text(read_text_file(path), path)
    except OSError as error:
        hint = (
            "; to read a list from a pipe, give - as the input, and redirect standard input with <"
            if isinstance(error, NotAFileError)
            else ""
        )
        raise InputError(f"{path}: this list cannot be opened ({error.strerror}){hint}") from error
    return list(_to_entries(_read_rows(text, path), os.path.dirname(path), path))


def read_stored_list(store: Store) -> list[Entry]:
    """The entries of a list in a store, as `read_list` gives them; what is relative is beside the list. Raises what
    `Store` does where the list cannot be had, too."""
    text = decode_text(store.read(), store.url)
    return list(_to_entries(_read_rows(text, store.url), store.parent.url, store.url))


def read_standard_input() -> list[Entry]:
    """The entries of a list on standard input: text, or a table where its first line is a header that names the paths.
    Raises `InputError` as `read_list` does."""
    try:
        text = decode_text(sys.stdin.buffer.read(), STANDARD_INPUT)
    except (OSError, AttributeError, ValueError) as error:  # none, or a closed one
        raise InputError(f"{STANDARD_INPUT} cannot be read, but '-' was given as input") from error
    header = text.lstrip("\r\n").partition("\n")[0]
    delimiter = next((mark for mark in (",", "\t") if _is_header(header.strip("\r").split(mark))), None)
    rows = _read_lines(text) if delimiter is None else _read_table(text, delimiter, STANDARD_INPUT)
    return list(_to_entries(rows, os.getcwd(), STANDARD_INPUT))


def decode_text(data: bytes, source: str) -> str:
    """Names of files may be in any encoding, and are kept as the system has them. Windows likes to write UTF-16."""
    if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-8-sig", "surrogateescape")
    try:
        return data.decode("utf-16")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: starts like UTF-16, but is not valid ({error.reason}); save it as UTF-8"
        ) from error


def _read_rows(text: str, source: str) -> Iterator[Row]:
    suffix = os.path.splitext(source)[1].lower()
    return _read_lines(text) if suffix == ".txt" else _read_table(text, "\t" if suffix == ".tsv" else ",", source)


def _read_lines(text: str) -> Iterator[Row]:
    lines = text.split("\n")  # not splitlines(), which knows ends of lines that names may have
    for number, line in enumerate(lines, 1):
        path, _, wanted = line.removesuffix("\r").partition("\t")
        yield number, path, wanted


def read_cells(text: str, delimiter: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not blank, each with its last line. Raises `InputError`."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{source}, line {reader.line_num}: cannot be read as a table ({error})") from error


def _read_table(text: str, delimiter: str, source: str) -> Iterator[Row]:
    columns = None
    for line, row in read_cells(text, delimiter, source):
        if columns is None:
            columns = _find_columns(row)
            if _is_header(row):
                continue
        path, wanted = (row[column] if column is not None and column < len(row) else "" for column in columns)
        yield line, path, wanted


def _find_columns(first: Sequence[str]) -> tuple[int | None, int | None]:
    if not _is_header(first):
        return 0, 1
    cells = list(enumerate(map(_plain, first)))
    classes = next((column for column, cell in cells if cell in CLASS_COLUMNS), None)
    return next(column for column, cell in cells if cell in IMAGE_COLUMNS), classes


def _is_header(row: Sequence[str]) -> bool:
    return any(_plain(cell) in IMAGE_COLUMNS for cell in row)


def _plain(cell: str) -> str:
    return cell.strip().strip('"').lower()


def _to_entries(rows: Iterator[Row], beside: str, source: str) -> Iterator[Entry]:
    for line, path, given in rows:
        wanted = given.strip()
        if not path.strip():
            if wanted:
                raise InputError(f"{source}, line {line}: gives the class '{wanted}' without an image; add its path")
            continue
        if "\0" in path:
            raise InputError(f"{source}, line {line}: has a zero byte in its path; check that the file is a list")
        yield Entry(_look_up(path, beside), sys.intern(wanted) or None, line)


def _look_up(given: str, beside: str) -> str:
    """The absolute path or the URL. What is nowhere is taken to be beside the list, and found missing when it is read."""
    if is_url(given):
        return given
    path = to_path(given)
    if os.path.isabs(path):
        return to_absolute(path)
    if is_url(beside):
        protocol, mark, folder = beside.rpartition("://")
        return f"{protocol}{mark}{normpath(f'{folder}/{path}'.replace(os.sep, '/'))}"
    there = os.path.join(beside, path)
    return to_absolute(path if not os.path.lexists(there) and os.path.lexists(path) else there)
