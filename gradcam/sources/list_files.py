"""Read lists of images, as text or tables: one path per line, optionally with the class to explain."""

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

Row = tuple[int, str, str]  # (line number, path, class), as written in the list


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An image that the user names: its absolute path or URL, the requested class, and its line in the list."""

    path: str
    wanted: str | None = None
    line: int = 0


def read_list(path: str) -> list[ListEntry]:
    """Read a list of images from a ``.csv`` or ``.tsv`` table, or from a text file.

    Each line of a text file contains a path, or a path, a TAB and a class. A relative path is looked up in the list's
    folder, then in the current folder. Raises `InputError`. If a line is faulty, the message contains its number.
    """
    try:
        text = decode_text(read_text_file(path), path)
    except OSError as error:
        hint = "; to read a list from a pipe, give - as the input, and redirect standard input with <"
        hint = hint if isinstance(error, NotAFileError) else ""
        raise InputError(f"{path}: this list cannot be opened ({error.strerror}){hint}") from error
    return list(_to_entries(_read_rows(text, path), os.path.dirname(path), path))


def read_stored_list(store: Store) -> list[ListEntry]:
    """Read a list in a store like `read_list`, but look up relative paths only in the list's folder.

    Raises `InputError`, and the errors of `Store`.
    """
    text = decode_text(store.read(), store.url)
    return list(_to_entries(_read_rows(text, store.url), store.parent.url, store.url))


def read_standard_input() -> list[ListEntry]:
    """Read a list from standard input.

    If the first line is a header with an image column, the list is a table. Otherwise, it is text with one path per
    line. Raises `InputError` as `read_list` does.
    """
    try:
        text = decode_text(sys.stdin.buffer.read(), STANDARD_INPUT)
    except (OSError, AttributeError, ValueError) as error:  # Standard input is missing, closed or unreadable.
        raise InputError(f"{STANDARD_INPUT} cannot be read, but '-' was given as input") from error
    header = text.lstrip("\r\n").partition("\n")[0]
    delimiter = next((mark for mark in (",", "\t") if _is_header(header.strip("\r").split(mark))), None)
    rows = _read_lines(text) if delimiter is None else _read_table(text, delimiter, STANDARD_INPUT)
    return list(_to_entries(rows, os.getcwd(), STANDARD_INPUT))


def decode_text(data: bytes, source: str) -> str:
    """Decode a list. The encoding is UTF-16 if the list begins with a UTF-16 byte order mark, and UTF-8 otherwise.

    Programs on Windows often write UTF-16. If bytes are not valid UTF-8, they become surrogates, so that file names in
    any encoding keep their bytes.
    """
    if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-8-sig", "surrogateescape")
    try:
        return data.decode("utf-16")
    except UnicodeDecodeError as error:
        problem = f"starts like UTF-16, but is not valid ({error.reason})"
        raise InputError(f"{source}: {problem}; save it as UTF-8") from error


def _read_rows(text: str, source: str) -> Iterator[Row]:
    suffix = os.path.splitext(source)[1].lower()
    return _read_lines(text) if suffix == ".txt" else _read_table(text, "\t" if suffix == ".tsv" else ",", source)


def _read_lines(text: str) -> Iterator[Row]:
    # Do not use splitlines(), which would also split at characters that may be part of a name.
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        path, _, class_name = line.removesuffix("\r").partition("\t")
        yield number, path, class_name


def read_cells(text: str, delimiter: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, cells) for each non-blank row of a table. `line` is the number of the row's last line.

    Raises `InputError` if the text cannot be read as a table.
    """
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
        path, class_name = (row[column] if column is not None and column < len(row) else "" for column in columns)
        yield line, path, class_name


def _find_columns(header: Sequence[str]) -> tuple[int | None, int | None]:
    if not _is_header(header):
        return 0, 1
    cells = list(enumerate(map(_normalise, header)))
    classes = next((column for column, cell in cells if cell in CLASS_COLUMNS), None)
    return next(column for column, cell in cells if cell in IMAGE_COLUMNS), classes


def _is_header(row: Sequence[str]) -> bool:
    return any(_normalise(cell) in IMAGE_COLUMNS for cell in row)


def _normalise(cell: str) -> str:
    return cell.strip().strip('"').lower()


def _to_entries(rows: Iterator[Row], base: str, source: str) -> Iterator[ListEntry]:
    for line, path, text in rows:
        class_name = text.strip()
        if "\0" in path:
            raise InputError(f"{source}, line {line}: the path contains a zero byte; check that the file lists images")
        if path.strip():
            yield ListEntry(_look_up(path, base), sys.intern(class_name) or None, line)
        elif class_name:
            problem = f"the class '{class_name}' has no image"
            raise InputError(f"{source}, line {line}: {problem}; add the path of the image")


def _look_up(text: str, base: str) -> str:
    """Return the absolute path or the URL of an entry.

    If a relative path exists neither in the list's folder nor in the current folder, the path in the list's folder is
    returned. The error is raised later, when this path is read.
    """
    if is_url(text):
        return text
    path = to_path(text)
    if os.path.isabs(path):
        return to_absolute(path)
    if is_url(base):
        protocol, separator, folder = base.rpartition("://")
        return f"{protocol}{separator}{normpath(f'{folder}/{path}'.replace(os.sep, '/'))}"
    candidate = os.path.join(base, path)
    return to_absolute(path if not os.path.lexists(candidate) and os.path.lexists(path) else candidate)
