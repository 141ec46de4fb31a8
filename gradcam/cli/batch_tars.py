"""`gradcam batch --output-format webdataset`: tars in the output folder, before and behind the model's loading."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcam.batch.folder import OutputFolder
    from gradcam.batch.results import Mode, Results
    from gradcam.batch.shards import Shard


def check_tars(folder: Path, mode: Mode, shard: Shard | None) -> None:
    """What can be told of a WebDataset before a model is loaded. Raises `GradcamError`."""
    from gradcam.batch.parts import Part
    from gradcam.batch.tar_places import DiskTars
    from gradcam.batch.tar_results import refuse_tars
    from gradcam.batch.webdatasets import check_webdataset

    check_webdataset()
    if mode == "new":
        refuse_tars(DiskTars(folder, folder), Part() if shard is None else Part(shard.of, shard.index))


def fill_tars(inner: OutputFolder, folder: Path, mode: Mode, shard: Shard | None, stems: Mapping[str, str]) -> Results:
    """Results in tars, whose records go to the inner results; those are closed where that cannot begin."""
    from gradcam.batch.parts import Part
    from gradcam.batch.tar_places import DiskTars
    from gradcam.batch.tar_results import TarResults

    with contextlib.ExitStack() as stack:
        stack.callback(inner.close)
        part = Part() if shard is None else Part(shard.of, shard.index)
        results = TarResults(inner, DiskTars(folder, inner.temporary), part, stems, mode)
        stack.pop_all()
    return results
