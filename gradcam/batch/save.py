"""What is written of each picture: drawn, encoded, and written whole, and the record that says what there is."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from gradcam.batch.findings import MapResult, PictureResult, Request
from gradcam.batch.names import Saving, list_endings, name_kinds, name_page, name_result, panel_ending
from gradcam.errors import GradcamError, OutputError, StoreError, describe_failure
from gradcam.images.files import OutputNames
from gradcam.images.write import encode_image
from gradcam.models.checkpoints.read import hash_weights
from gradcam.models.classifier import Classifier
from gradcam.models.panels import panel
from gradcam.models.results import ImageExplanation
from gradcam.sources.contents import Item
from gradcam.storage.clear import PAGE
from gradcam.storage.output import ResultWriter
from gradcam.storage.records import Record, Report

if TYPE_CHECKING:
    from gradcam.batch.read import Fetched


DrawViews = Callable[..., Mapping[str, bytes]]  # (stem, picture, overlays), `report.draw_views`


@dataclass(frozen=True, eq=False)
class Saver:
    """Writes what was found in pictures; several threads may save at once. `place`: None where files go along with the
    report. `stems`: what results' names begin with, by the picture's. `draw_views`: `report.draw_views`."""

    place: ResultWriter | None
    stems: Mapping[str, str]
    saving: Saving
    classifier: Classifier
    request: Request
    draw_views: DrawViews | None = None

    def save(self, fetched: Fetched, found: PictureResult | GradcamError) -> Report:
        """Write what was found in one picture; what keeps that from being done is in the record. Raises `OutputError`
        or `StoreError` where the place is the reason, which other pictures would meet as well."""
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
        return Report(replace(record, sha256=fetched.sha256), time.perf_counter() - start, files)

    def _save(self, item: Item, found: PictureResult) -> tuple[Record, Mapping[str, bytes]]:
        stem, saving = self.stems[item.name], self.saving
        is_seen = "overlay" in saving.kinds or saving.views
        # Those on another picture have no part in a panel.
        results = [it for it in found.results if it.entry.on is None or saving.kinds != ("panel",)]
        overlays = [it.draw(alpha=saving.alpha, colormap=saving.colormap) if is_seen else None for it in results]
        files: dict[str, bytes] = {}  # all of them are ready before the first is written
        panel_name, encode = None, partial(encode_image, suffix=saving.suffix, quality=saving.quality)
        if "panel" in saving.kinds:
            panel_name = name_result(stem, panel_ending(self.request.options["evidence"], suffix=saving.suffix))
            files[panel_name] = encode(panel(found.maps, alpha=saving.alpha, colormap=saving.colormap))
        named: list[dict[str, str | None]] = []
        for result, name, overlay in zip(results, self._name(stem, results), overlays):
            names = name_kinds(name, saving)
            for kind, made in result.draw_kinds(overlay, saving.kinds, saving.colormap):
                files[names[kind]] = made if isinstance(made, bytes) else encode(made)
            has_part = isinstance(result.source, ImageExplanation) and result.entry.on is None
            named.append({**names, "panel": panel_name if has_part else None})
        page = None if found.page is None else name_page(stem)
        if page is not None and found.page is not None:
            link = f"{'../' * page.count('/')}{PAGE}" if saving.views else None
            files[page] = replace(found.page, name=PurePosixPath(item.name).name, link=link).to_html().encode()
        if self.place is not None:
            draw = self.draw_views if saving.views else None
            self.place.write(files, {} if draw is None else draw(stem, found.picture, overlays))
            files = {}
        return replace(found.to_record(item.name, self.classifier.name, named), page=page), files

    def _name(self, stem: str, results: Sequence[MapResult]) -> list[str]:
        """The overlays' names; those that are alike, as of layers that differ in a sign, get numbers."""
        endings = list_endings(self.request, results, suffix=self.saving.suffix)
        names = [name_result(stem, ending) for ending in endings]
        if len(set(map(str.casefold, names))) == len(names):
            return names
        parent = PurePosixPath(stem).parent
        claimed = OutputNames(Path(parent), ()).claim([PurePosixPath(name).name for name in names])
        return [(parent / path.name).as_posix() for path in claimed]


def describe_weights(classifier: Classifier, file: Path | None = None) -> dict[str, Any]:
    """`{"file", "sha256", "of"}`: of the weights' file; or, where there is none or it is a folder, of the model's own
    tensors, with their names, types and shapes, in the order of the state dict. Raises `OSError`."""
    name = None if file is None else file.name
    if file is not None and file.is_file():
        return {"file": name, "sha256": hash_weights(file), "of": "file"}
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
            plain = value.dequantize() if value.is_quantized else value
            dense = plain if plain.layout == torch.strided else plain.to_dense()
            yield dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:  # of other things the address may be in the repr, which no two runs share
        yield f"{name} {value if isinstance(value, (str, int, float)) else type(value).__name__}\n".encode()
