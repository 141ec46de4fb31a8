"""Draw, encode and write the results of each image, and make the image's record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from gradcam.batch.image_results import DrawnImage, ExplainedImage, ExplainRequest, ExplanationResult
from gradcam.batch.result_names import OutputOptions, list_endings, name_kinds, name_page, name_result, panel_suffix
from gradcam.errors import GradcamError, OutputError, StoreError, describe_failure
from gradcam.images.files import OutputNames
from gradcam.images.write import encode_image
from gradcam.models.checkpoints.read import hash_weights
from gradcam.models.classifier import Classifier
from gradcam.models.panels import panel
from gradcam.models.results import ImageExplanation
from gradcam.sources.contents import InputImage
from gradcam.storage.clear import PAGE
from gradcam.storage.output import OutputWriter
from gradcam.storage.records import ImageOutcome, Record

if TYPE_CHECKING:
    from gradcam.batch.read_items import HashedItem


DrawViews = Callable[..., Mapping[str, bytes]]  # The type of `report.draw_views`, (stem, image, overlays) -> files.


@dataclass(frozen=True, eq=False)
class Saver:
    """Writes the results of images. Thread-safe.

    `place` writes the files. If `place` is None, the files are returned with the record. `stems` maps the name of each
    image to the common beginning of its result names. `draw_views` is the function `report.draw_views`, which draws the
    images of a report.
    """

    place: OutputWriter | None
    stems: Mapping[str, str]
    saving: OutputOptions
    classifier: Classifier
    request: ExplainRequest
    draw_views: DrawViews | None = None

    def save(self, fetched: HashedItem, result: ExplainedImage | GradcamError) -> ImageOutcome:
        """Write the results of one image, and return its record. If the image failed, the record holds the error.

        Raises `OutputError` or `StoreError` if the output cannot be written, because this problem affects other images
        as well.
        """
        start, item, model = time.perf_counter(), fetched.item, self.classifier.name
        files: Mapping[str, bytes] = {}
        if isinstance(result, GradcamError):
            record = Record(item.name, model, error=describe_failure(item.name, result))
        else:
            try:
                record, files = self._save(item, result)
            except (OutputError, StoreError):
                raise
            except Exception as error:  # An error in one image does not stop the run.
                record = Record(item.name, model, error=describe_failure(item.name, error))
        return ImageOutcome(replace(record, sha256=fetched.sha256), time.perf_counter() - start, files)

    def _save(self, item: InputImage, result: ExplainedImage) -> tuple[Record, Mapping[str, bytes]]:
        stem, saving = self.stems[item.name], self.saving
        # A panel contains no results on a reference image. If only a panel is written, leave out these results.
        results = [item for item in result.results if item.entry.on is None or saving.kinds != ("panel",)]
        files: dict[str, bytes] = {}  # All files are encoded before the first file is written.
        panel_name, encode = None, partial(encode_image, suffix=saving.suffix, quality=saving.quality)
        if "panel" in saving.kinds:
            panel_name = name_result(stem, panel_suffix(self.request.options["evidence"], suffix=saving.suffix))
            files[panel_name] = encode(panel(result.maps, alpha=saving.alpha, colormap=saving.colormap))
        fields: list[dict[str, Any]] = []
        overlays: list[DrawnImage | None] = []
        for map_result, name in zip(results, self._name(stem, results)):
            names = name_kinds(name, saving)
            outputs = map_result.draw_kinds([*saving.kinds, *["overlay"] * saving.views], **saving.appearance)
            overlays.append(outputs.get("overlay"))
            for kind in names:
                output = outputs[kind]
                files[names[kind]] = output if isinstance(output, bytes) else encode(output)
            has_part = isinstance(map_result.source, ImageExplanation) and map_result.entry.on is None
            fields.append({**names, "panel": panel_name if has_part else None, "boxes": outputs.get("boxes")})
        page = None
        if result.page is not None:
            page = name_page(stem)
            link = f"{'../' * page.count('/')}{PAGE}" if saving.views else None
            files[page] = replace(result.page, name=PurePosixPath(item.name).name, link=link).to_html().encode()
        if self.place is not None:
            draw = self.draw_views if saving.views else None
            self.place.write(files, {} if draw is None else draw(stem, result.picture, overlays))
            files = {}
        return replace(result.to_record(item.name, self.classifier.name, fields), page=page), files

    def _name(self, stem: str, results: Sequence[ExplanationResult]) -> list[str]:
        """Return a unique name for the overlay of each result.

        If several names would be equal, numbers are added. For example, layer names that differ only in special
        characters give equal file names.
        """
        endings = list_endings(self.request, results, suffix=self.saving.suffix)
        names = [name_result(stem, ending) for ending in endings]
        if len(set(map(str.casefold, names))) == len(names):
            return names
        parent = PurePosixPath(stem).parent
        claimed = OutputNames(Path(parent), ()).claim([PurePosixPath(name).name for name in names])
        return [(parent / path.name).as_posix() for path in claimed]


def describe_weights(classifier: Classifier, file: Path | None = None) -> dict[str, Any]:
    """Return a dict that identifies the weights, with the keys "file", "sha256" and "of".

    If `file` is a regular file, "sha256" is the hash of the file, and "of" is "file". Otherwise, "sha256" is the hash
    of the names, dtypes, shapes and values in the state dict, and "of" is "tensors". Raises `OSError`.
    """
    name = None if file is None else file.name
    if file is not None and file.is_file():
        return {"file": name, "sha256": hash_weights(file), "of": "file"}
    digest = hashlib.sha256()
    for key, value in classifier.model.state_dict().items():
        for part in _to_parts(key, value):
            digest.update(part)
    return {"file": name, "sha256": digest.hexdigest(), "of": "tensors"}


def _to_parts(name: str, value: Any) -> Iterator[bytes | memoryview]:
    """Yield the bytes that identify an entry of a state dict.

    Packed tensors are split into their parts. Quantised and sparse tensors are converted to plain tensors.
    """
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
    else:  # The repr of other objects may contain a memory address, which differs between runs.
        yield f"{name} {value if isinstance(value, (str, int, float)) else type(value).__name__}\n".encode()
