"""Earlier runs in a store, and their report: how they are cleared away."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gradcam.batch.output.earlier import GENERATOR, HEAD, PAGE, REPORT, REPORT_FILES, list_recorded
from gradcam.batch.output.parts import Part, list_manifests, list_pieces
from gradcam.batch.output.shelves import StoreShelf
from gradcam.errors import OutputError
from gradcam.stores import Store


def remove_runs(store: Store, parts: Iterable[Part], inputs: Iterable[str], *, report: bool) -> None:
    """Remove what these parts wrote, as their manifests say, and their own files; with `report` the report, too.

    The manifests go last: whatever stops this, it can be done again. `inputs`: URLs of pictures. Raises what a `Store` does,
    and `OutputError`, before anything is removed, where one of the pictures would be.
    """
    shelf, sizes, kept = StoreShelf(store), store.find(), set(inputs)
    results: list[str] = []
    own: list[str] = []
    manifests: list[str] = []
    for part in parts:
        results += sizes.keys() & set(list_recorded(shelf, sizes, part))
        own += [part.log, *list_pieces(sizes, part.events), part.run]
        manifests += list_manifests(sizes, part)
    for name in results:
        if store.below(name).url in kept:
            raise OutputError(
                f"{store.below(name).url}: is both a picture to explain and a result of the earlier run, which --overwrite "
                "would remove; choose another --output"
            )
    pages = [name for name in sizes if report and _is_of_report(store, name)]
    for names in (results, pages, [name for name in own if name in sizes], manifests):
        store.remove(names)


def check_page(store: Store, names: Collection[str]) -> None:
    """Raises `OutputError` where a report would replace an `index.html` that is none, and what a `Store` does."""
    if PAGE in names and not _is_report(store):
        raise OutputError(
            f"{store.below(PAGE).url}: is no report of gradcam, and one would replace it; move it away, or choose another "
            "--output"
        )


def _is_of_report(store: Store, name: str) -> bool:
    folder, _, rest = name.partition("/")
    return (folder == REPORT and REPORT_FILES.fullmatch(rest) is not None) or (name == PAGE and _is_report(store))


def _is_report(store: Store) -> bool:
    head = store.read_range(PAGE, 0, HEAD)
    return not head or GENERATOR in head
