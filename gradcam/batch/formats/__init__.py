"""The table of formats that results are kept in, and what is called by the name of one."""

# No torch is imported here: the shell reads its choices from the table before there is anything to compute.

from __future__ import annotations

from gradcam import plugins
from gradcam.batch.formats.base import Destination, Format, Opening, Results, Writer, is_writer
from gradcam.errors import GradcamError, shorten

__all__ = ["FORMATS", "Destination", "Format", "Opening", "Results", "Writer", "find_format"]

FORMATS = {
    each.name: each
    for each in (
        Format("files", "A file for each result", "records:keep_records", has_files=True),
        Format("webdataset", ".tar shards of a WebDataset", "webdataset:open_tars", "webdataset:check_tars"),
    )
}


def find_format(name: str) -> Format:
    """The format of that name: of the table, of an installed package, or a `Format` or a `Writer`'s class in `FILE.py:NAME`.

    Raises `GradcamError` for one that is not there or cannot be imported, for what is no format, and for a name that is
    another's.
    """
    if name in FORMATS:
        return FORMATS[name]
    found = plugins.load("formats", name)
    if isinstance(found, type) and is_writer(found):
        found = Format(found.__name__, " ".join((found.__doc__ or "").split()), found)
    if not isinstance(found, Format):
        raise GradcamError(
            f"{name} is {shorten(found)}, expected a gradcam.batch.formats.Format, or a class with write(record, files) and "
            "close()."
        )
    if found.name in FORMATS:
        raise GradcamError(f"{name}: there is a format {found.name!r} already: give yours another name.")
    return found
