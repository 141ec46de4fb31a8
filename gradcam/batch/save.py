"""What is written of each picture: drawn, encoded, and written whole, and the record that says what there is."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gradcam.batch.findings import Drawing, Finding, Question
from gradcam.batch.names import HEATMAP, MAP_SUFFIX, Saving, list_endings, name_result, panel_ending
from gradcam.errors import GradcamError, OutputError, StoreError, describe_failure
from gradcam.images.draw import overlay
from gradcam.images.files import OutputNames, hash_file
from gradcam.images.read import Pixels, encode_image
from gradcam.models.classifier import Classifier
from gradcam.models.results import PictureExplanation, panel
from gradcam.sources.contents import Item
from gradcam.storage.output import Place
from gradcam.storage.records import Explained, Record

if TYPE_CHECKING:
    from gradcam.batch.read import Fetched


DrawViews = Callable[..., Mapping[str, bytes]]  # (stem, picture, overlays), `report.draw_views`


@dataclass(frozen=True)
class Outcome:
    """What became of a picture, and how long drawing, encoding and writing it took.

    `files`: what is recorded, by name, where nobody wrote it yet.
    """

    record: Record
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class Saver:
    """Writes what was found in pictures; several threads may save at once.

    `place`: where files go; None where they go along with the outcome. `stems`: what the names of each picture's results
    begin with, by the picture's name, relative to the place, with "/". `draw_views`: `report.draw_views`, called where
    `saving.views` asks for it.
    """

    place: Place | None
    stems: Mapping[str, str]
    saving: Saving
    classifier: Classifier
    question: Question
    draw_views: DrawViews | None = None

    def save(self, fetched: Fetched, found: Finding | GradcamError) -> Outcome:
        """Write what was found in one picture. What keeps that from being done is in the record, and nothing is written.

        Raises `OutputError` or `StoreError` where the place is the reason, which other pictures would meet as well.
        """
        start, item, model = time.perf_counter(), fetched.item, self.classifier.name
        files: Mapping[str, bytes] = {}
        if isinstance(found, GradcamError):
            record = Record(item.name, model, error=describe_failure(item.name, found))
        else:
            try:
                record, files = self._save(item, found)
            except (OutputError, StoreError):
                raise
            except Exception as error:  # one picture does not stop the others
                record = Record(item.name, model, error=describe_failure(item.name, error))
        return Outcome(replace(record, sha256=fetched.sha256), time.perf_counter() - start, files)

    def _save(self, item: Item, found: Finding) -> tuple[Record, Mapping[str, bytes]]:
        """The record, and the files that are still to be written."""
        stem, saving, drawings = self.stems[item.name], self.saving, found.drawings
        overlays = self._draw(drawings)
        files: dict[str, bytes] = {}  # all of them are ready before the first is written
        panel_name = None
        if "panel" in saving.kinds:
            panel_name = name_result(stem, panel_ending(self.question.evidence, suffix=saving.suffix))
            files[panel_name] = self._encode(panel(found.maps, alpha=saving.alpha, colormap=saving.colormap))
        explained = []
        for drawing, name, picture in zip(drawings, self._name(stem, drawings), overlays):
            names = name_kinds(name, saving)
            for kind, made in draw_kinds(drawing, picture, saving):
                files[names[kind]] = made if isinstance(made, bytes) else self._encode(made)
            explained.append(self._to_entry(drawing, names, panel_name))
        if self.place is not None:
            draw = self.draw_views if saving.views else None
            views = {} if draw is None else draw(stem, found.picture, overlays)
            self.place.write(files, views)
            files = {}
        height, width = found.picture.shape[:2]
        record = Record(
            image=item.name,
            model=self.classifier.name,
            predictions=tuple(found.predictions),
            explained=tuple(explained),
            note=found.note,
            size=(height, width),
            region=found.region,
            fit=found.fit,
        )
        return record, files

    def _draw(self, drawings: Sequence[Drawing]) -> list[Pixels | None]:
        """The overlays, where anybody is to see them."""
        if "overlay" not in self.saving.kinds and not self.saving.views:
            return [None] * len(drawings)
        return [drawing.draw(alpha=self.saving.alpha, colormap=self.saving.colormap) for drawing in drawings]

    def _name(self, stem: str, drawings: Sequence[Drawing]) -> list[str]:
        """The overlays' names; those that are alike, as of layers that differ in a sign, get numbers."""
        endings = list_endings(self.question, drawings, self.classifier.labels, suffix=self.saving.suffix)
        names = [name_result(stem, ending) for ending in endings]
        if len(set(map(str.casefold, names))) == len(names):
            return names
        parent = PurePosixPath(stem).parent
        claimed = OutputNames(Path(parent), ()).claim([PurePosixPath(name).name for name in names])
        return [(parent / path.name).as_posix() for path in claimed]

    def _encode(self, picture: Pixels) -> bytes:
        return encode_image(picture, self.saving.suffix, self.saving.quality)

    def _to_entry(self, drawing: Drawing, names: Mapping[str, str], panel_name: str | None) -> Explained:
        return replace(
            drawing.to_entry(self.classifier.label(drawing.index)),
            overlay=names.get("overlay"),
            heatmap=names.get("heatmap"),
            map=names.get("map"),
            panel=panel_name if isinstance(drawing.source, PictureExplanation) else None,
        )


def name_kinds(overlay: str, saving: Saving) -> dict[str, str]:
    """The name of each kind of file that is asked for, but the panel, beside an overlay of that name."""
    base = overlay.removesuffix(saving.suffix)
    names = {"overlay": overlay, "heatmap": f"{base}-{HEATMAP}{saving.suffix}", "map": f"{base}{MAP_SUFFIX}"}
    return {kind: name for kind, name in names.items() if kind in saving.kinds}


def draw_kinds(drawing: Drawing, overlay: Pixels | None, saving: Saving) -> Iterator[tuple[str, Pixels | bytes]]:
    """Each kind that is asked for, but the panel: a picture, or a map as the bytes of its file; the overlay is given."""
    if "overlay" in saving.kinds and overlay is not None:
        yield "overlay", overlay
    if "heatmap" in saving.kinds:
        yield "heatmap", _draw_heatmap(drawing, saving.colormap)
    if "map" in saving.kinds:
        yield "map", _encode_map(drawing)


def _draw_heatmap(drawing: Drawing, colormap: str) -> Pixels:
    source = drawing.source
    if not isinstance(source, PictureExplanation):
        return source.picture(0, drawing.k)
    black, heatmap = np.zeros_like(source.pictures[0]), source.heatmaps[0, drawing.k]
    signed = source.evidence == "signed"
    return overlay(black, heatmap, alpha=1, colormap=colormap, region=source.regions[0], signed=signed)


def _encode_map(drawing: Drawing) -> bytes:
    source, file = drawing.source, io.BytesIO()
    values = source.maps[0, drawing.k] if isinstance(source, PictureExplanation) else source.values[0, drawing.k]
    np.save(file, np.ascontiguousarray(values.float().cpu().numpy()))
    return file.getvalue()


def describe_weights(classifier: Classifier, file: Path | None = None) -> dict[str, Any]:
    """`{"file", "sha256", "of"}`: the name of the weights' file, and the SHA-256 of it, or of the model's own tensors.

    Tensors count with their names, types, shapes and bytes, in the order of the state dict; they are hashed where there is
    no file, or it is a folder. Raises `OSError` where the file cannot be read.
    """
    name = None if file is None else file.name
    if file is not None and file.is_file():
        return {"file": name, "sha256": hash_file(file), "of": "file"}
    digest = hashlib.sha256()
    for key, value in classifier.model.state_dict().items():
        for part in _to_parts(key, value):
            digest.update(part)
    return {"file": name, "sha256": digest.hexdigest(), "of": "tensors"}


def _to_parts(name: str, value: Any) -> Iterator[bytes | memoryview]:
    """All that makes an entry of a state dict: packed and quantised tensors by the plain ones in them."""
    if isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _to_parts(f"{name}.{i}", part)
    elif isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for part in value.__tensor_flatten__()[0]:
                yield from _to_parts(f"{name}.{part}", getattr(value, part))
            return
        yield f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
        if not value.is_meta:
            yield _to_bytes(value.detach())
    else:  # of other things the address may be in the repr, which no two runs share
        yield f"{name} {value if isinstance(value, (str, int, float)) else type(value).__name__}\n".encode()


def _to_bytes(tensor: Tensor) -> memoryview:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
