"""Mosaics of a study's own pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from gradcam.batch.items import Item
from gradcam.batch.reading import read_item
from gradcam.classifiers import Prepared
from gradcam.evaluation.mosaics import MOSAICS, make_mosaics
from gradcam.evaluation.seeds import derive
from gradcam.evaluation.study.engine import Composition
from gradcam.evaluation.study.judging import Judge

CANDIDATES = 512  # pictures that are looked at for mosaics, since all of them are held at once
HALVED = "The network takes no larger input than its own: pictures in mosaics have half their height and width."


def choose_items(items: Sequence[Item], limit: int | None, seed: int) -> Sequence[Item]:
    """At most so many, in their order: drawn, as those of a folder may be sorted by what they show."""
    if limit is None or limit >= len(items):
        return items
    chosen = {item.name for item in sorted(items, key=lambda item: derive(seed, "limit", item.name))[:limit]}
    return [item for item in items if item.name in chosen]


def compose(judge: Judge, items: Sequence[Item]) -> tuple[list[Composition], list[str]]:
    """Mosaics of the pictures in the order of their names, and notes of how they were made.

    Pictures that cannot be read are passed over. Raises `GradcamError` where fewer than four classes are confident.
    """
    images: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for item in sorted(choose_items(items, CANDIDATES, judge.seed), key=lambda item: item.name):
        read = read_item(judge.classifier, item, audit=True)
        if isinstance(read.picture, Prepared) and read.fetched.sha256 is not None:
            images[item.name], digests[item.name] = read.picture.image, read.fetched.sha256
    mosaics = make_mosaics(judge.classifier, images, limit=min(MOSAICS, max(1, len(images))), seed=judge.seed)
    found = [Composition(mosaic, _join([digests[name] for name in mosaic.names])) for mosaic in mosaics]
    is_halved = mosaics[0].image.shape == images[mosaics[0].names[0]].shape
    return found, [HALVED] if is_halved else []


def _join(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
