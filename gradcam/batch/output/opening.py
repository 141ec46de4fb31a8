"""Where results go, whatever kind of place it is: what can be told of it early, and how it is opened for a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gradcam.batch.inputs.shards import Shard
from gradcam.batch.inputs.sources import Listing
from gradcam.batch.items import find_url
from gradcam.batch.output.folder import OutputFolder, check_folder
from gradcam.batch.output.results import Mode, Results
from gradcam.batch.output.run_file import Run
from gradcam.batch.output.store_results import StoreResults, check_store
from gradcam.stores import Store, is_url


def check_output(place: Path | Store, mode: Mode, shard: Shard | None = None, *, report: bool = False) -> None:
    """What can be told before a model is loaded. Raises `OutputError`, and `StoreError` of a store."""
    if isinstance(place, Store):
        check_store(place, mode, shard, report=report)
    else:
        check_folder(place, mode, shard, report=report)


def open_results(
    place: Path | Store,
    run: Run,
    listing: Listing,
    *,
    mode: Mode,
    shard: Shard | None,
    stems: Mapping[str, str] | None = None,
) -> Results:
    """Results there, open for this run. `listing`: the pictures, of which none is removed.

    `stems`: as of `OutputFolder.open`. Raises as `check_output`.
    """
    if isinstance(place, Store):
        urls = [*filter(None, map(find_url, listing.items)), *filter(is_url, listing.archives)]
        return StoreResults.open(place, run, mode=mode, shard=shard, inputs=urls, stems=stems)
    files = [item.content.path for item in listing.items] + [Path(it) for it in listing.archives if not is_url(it)]
    return OutputFolder.open(place, run, mode=mode, shard=shard, inputs=filter(None, files), stems=stems)
