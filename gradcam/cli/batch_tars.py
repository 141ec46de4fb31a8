"""`gradcam batch --output-format webdataset`: tars in the output folder, before and behind the model's loading."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcam.batch.inputs.shards import Shard
    from gradcam.batch.output.parts import Part
    from gradcam.batch.output.results import Mode, Results
    from gradcam.batch.output.tar_places import TarPlace
    from gradcam.stores import Store


def check_tars(folder: Path | Store, mode: Mode, shard: Shard | None) -> None:
    """What can be told of a WebDataset before a model is loaded. Raises `GradcamError`."""
    from gradcam.batch.inputs.webdatasets import check_webdataset
    from gradcam.batch.output.tar_results import refuse_tars

    check_webdataset()
    if mode == "new":
        part = _to_part(shard)
        refuse_tars(_to_place(folder, part), part)


def fill_tars(
    inner: Results, folder: Path | Store, mode: Mode, shard: Shard | None, stems: Mapping[str, str]
) -> Results:
    """Results in tars, whose records go to the inner results; those are closed where that cannot begin."""
    from gradcam.batch.output.tar_results import TarResults

    with contextlib.ExitStack() as stack:
        stack.callback(inner.close)
        part = _to_part(shard)
        results = TarResults(inner, _to_place(folder, part), part, stems, mode)
        stack.pop_all()
    return results


def _to_part(shard: Shard | None) -> Part:
    from gradcam.batch.output.parts import Part

    return Part() if shard is None else Part(shard.of, shard.index)


def _to_place(folder: Path | Store, part: Part) -> TarPlace:
    from gradcam.batch.output.tar_places import DiskTars, StoreTars
    from gradcam.stores import Store

    return StoreTars(folder) if isinstance(folder, Store) else DiskTars(folder, folder / part.temporary)
