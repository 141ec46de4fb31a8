"""What the webdataset library is asked for: whether it is there, and which shards braces mean."""

from __future__ import annotations

import os
import re

from gradcam.batch.inputs.archives import TAR_SUFFIXES
from gradcam.errors import GradcamError, InputError

BRACES = re.compile(r"\{[^{}]*(?:\.\.|,)[^{}]*\}")


def check_webdataset() -> None:
    """Raises `GradcamError` where the library cannot be imported, with the line that installs it."""
    try:
        import webdataset  # noqa: F401  (whether it is there)
    except ImportError as error:
        raise GradcamError(
            f"WebDatasets need the webdataset library, which cannot be imported ({' '.join(str(error).split())}): "
            'pip install "gradcam-torch[webdataset]"'
        ) from error


def expand_shards(text: str) -> list[str]:
    """The tars that a path or URL with braces means, such as `shards-{000000..000146}.tar`; anything else as it is.

    Raises `GradcamError` without the library, and `InputError` for braces that it does not understand.
    """
    if not BRACES.search(text) or not text.lower().endswith(TAR_SUFFIXES) or os.path.lexists(text):
        return [text]
    check_webdataset()
    from webdataset.shardlists import expand_urls

    try:
        return [str(shard) for shard in expand_urls(text)]
    except Exception as error:  # whatever the library raises
        raise InputError(f"{text}: its braces cannot be expanded ({' '.join(str(error).split())})") from error
