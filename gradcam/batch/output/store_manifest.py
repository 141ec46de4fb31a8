"""The pieces of a manifest in a store: which pictures need not be done again, and how the pieces are put in order."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from gradcam.batch.output.manifest import is_of, parse_lines
from gradcam.batch.output.parts import Part, find_last, list_manifests, name_piece
from gradcam.batch.output.shelves import StoreShelf
from gradcam.records import parse_whole
from gradcam.stores import Store

LINES = 1000  # of a piece that is written anew
HELD = 16  # pieces in memory meanwhile

Place = tuple[int, int, int, int]  # of a line: its rank in the order, its piece, where it begins and where it ends


def find_done(
    shelf: StoreShelf, pieces: Sequence[str], sizes: Mapping[str, int], model: str, stems: Mapping[str, str]
) -> tuple[frozenset[str], dict[str, bool]]:
    """The names of pictures that need not be done again, and of those that are recorded and need to be, whether they failed.

    Done is what `is_of` takes, by its last record, and whose files are all there with something in them. `sizes`: of all
    objects in the store, by name: to ask for each on its own would take hours for a million.
    Raises `OutputError` for a line that is no record, and what a `Shelf` does.
    """
    done: set[str] = set()
    other: dict[str, bool] = {}
    for piece in pieces:
        for record in parse_lines(shelf.read_lines(piece), shelf.show(piece), parse_whole):
            if is_of(record, model, stems) and all(sizes.get(name, 0) > 0 for name in record.files):
                done.add(record.image)
                other.pop(record.image, None)
            else:
                done.discard(record.image)
                other[record.image] = record.error is not None
    return frozenset(done), other


def sort_pieces(store: Store, part: Part, order: Sequence[str], unwanted: Collection[str]) -> None:
    """Bring the records into the order of the pictures' names, each picture's last alone; none of those that are unwanted.

    What has no place in the order goes behind. From the first piece on that has other lines, or in another order, all are
    written anew, under higher numbers, and only then the old ones are removed: readers take the last record of a picture,
    so that a stop in between does no harm. Raises what a `Store` does.
    """
    names = StoreShelf(store).list_names()
    pieces, ranks = list_manifests(names, part), {name: rank for rank, name in enumerate(order)}
    last: dict[str, Place] = {}
    stored: list[list[Place]] = []  # the lines of each piece
    for number, piece in enumerate(pieces):
        lines = dict(_find_lines(store.read(piece), number, ranks))
        last |= lines
        stored.append(list(lines.values()))
    wanted = sorted(place for image, place in last.items() if image not in unwanted)
    kept = position = 0
    while kept < len(pieces) and wanted[position : position + len(stored[kept])] == stored[kept]:
        position += len(stored[kept])
        kept += 1
    number, read = find_last(names, part.records), lru_cache(HELD)(store.read)
    for start in range(position, len(wanted), LINES):
        number += 1
        cut = (read(pieces[piece])[begin:end] for _, piece, begin, end in wanted[start : start + LINES])
        store.write(name_piece(part.records, number), b"".join(cut))
    store.remove(pieces[kept:])


def _find_lines(data: bytes, piece: int, ranks: Mapping[str, int]) -> Iterator[tuple[str, Place]]:
    """The picture of each whole line, and where the line is."""
    start = 0
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            image = json.loads(line)["image"]
            yield image, (ranks.get(image, len(ranks)), piece, start, start + len(line))
        start += len(line)
