"""Addresses: what is a URL, and what is a path of this machine."""

from __future__ import annotations

import re
from urllib.parse import unquote

# Two letters at least: one is a drive. "simplecache::s3://" is a chain of fsspec's; a file may be called "a::b.jpg".
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::.*)?://", re.DOTALL)
LOCAL = re.compile(r"(?:file|local)://", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Whether it leads away from this machine's disks: `s3://bucket/photos` does, a path and `file://` do not."""
    return URL.match(text) is not None and LOCAL.match(text) is None


def to_path(text: str) -> str:
    """The path that a `file://` URL means; anything else as it is."""
    match = LOCAL.match(text)
    if match is None:
        return text
    rest = text[match.end() :]
    host, slash, path = rest.partition("/")
    # `file:///folder`, `file://localhost/folder`, and what people type: `file://folder`, which is relative to nothing.
    rooted = slash + path if host in ("", "localhost") else rest
    return unquote(rooted) if "%" in rooted else rooted
