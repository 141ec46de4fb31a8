"""A sheet of examples: the first pictures of a study, with the maps that were judged."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradcam.batch.items import Item
from gradcam.batch.reading import read_item
from gradcam.classifiers import Prepared
from gradcam.drawing import overlay
from gradcam.errors import GradcamError
from gradcam.evaluation.study.engine import EXAMPLES, Study
from gradcam.evaluation.study.entries import Entry
from gradcam.evaluation.study.results import Results
from gradcam.images import Pixels
from gradcam.panels import PanelRow, draw_panel

HEIGHT = 168  # pixels of each picture


def draw_examples(study: Study, results: Results) -> Pixels:
    """Up to five pictures below one another, and beside each its maps by all methods: RGB, uint8 (H,W,3).

    Maps are on the part of the picture that the network saw.

    Maps that were not computed in this run are computed again. Raises `GradcamError` where no picture was judged, and
    where one cannot be read any more.
    """
    items = {item.name: item for item in study.items}
    rows = [_to_row(study, items[entry.image], entry) for entry in results.judged()[:EXAMPLES]]
    if not rows:
        raise GradcamError("There are no examples: no picture was judged.")
    return draw_panel(["picture", *study.judge.plan.names], rows, height=HEIGHT)


def _to_row(study: Study, item: Item, entry: Entry) -> PanelRow:
    read = read_item(study.classifier, item)
    if isinstance(read.picture, GradcamError):
        raise read.picture
    picture = read.picture.reading.picture
    heatmaps = study.kept.get(entry.image) or _explain(study, read.picture, entry)
    top, left, height, width = study.classifier.region(*picture.shape[:2])
    seen = picture[top : top + height, left : left + width]
    drawn = [overlay(seen, heatmaps[name][0]) for name in study.judge.plan.names]
    label = f"class {entry.index}" if entry.label is None else entry.label
    return PanelRow(f"{entry.image}: {label}, {100 * (entry.probability or 0):.0f} %", [picture, *drawn])


def _explain(study: Study, prepared: Prepared, entry: Entry) -> Mapping[str, Tensor]:
    subject = study.judge.look(prepared, entry.index)
    found = study.judge.explain(subject.images, subject.classes[:, None], entry.sha256 or "")
    return {name: maps[:, 0].cpu() for name, maps in found.items()}
