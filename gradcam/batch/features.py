"""A file of features: rows gathered on the disk, then written whole, as NumPy's .npz or as .safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gradcam.batch.pipeline import compute_items
from gradcam.batch.read import Fetched
from gradcam.errors import GradcamError, LayerError, OutputError
from gradcam.hooks.nested import to_batch
from gradcam.images.files import replacing
from gradcam.inspection.extraction import features
from gradcam.inspection.selection import Layers, select_layers
from gradcam.layers.find import unwrap
from gradcam.layers.layout import Axes, find_patches
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.models.preprocess import Prepared
from gradcam.models.probe import make_noise
from gradcam.sources.contents import Item
from gradcam.storage.disk import describe_os_error

Row = dict[str, Tensor]  # by layer: what it gave for one picture, on the CPU


@dataclass(frozen=True)
class Extractor:
    """Which layers of a model, by name. `pools`: their mean over the picture; `reshape`: as in `gradcam.explain`."""

    classifier: Classifier
    layers: Sequence[str]
    pools: bool = False
    reshape: str | tuple[int, ...] | None = None

    def extract(self, pictures: Sequence[Prepared], *, classes: Sequence[int] | None = None) -> list[Row]:
        """What the layers give for pictures of one size, from one pass; `classes` make no difference."""
        images = torch.stack([picture.image for picture in pictures])
        found = self.run(images.to(self.classifier.device, find_input_dtype(self.classifier.model)))
        on_cpu = {name: tensor.cpu() for name, tensor in found.items()}
        return [{name: tensor[i] for name, tensor in on_cpu.items()} for i in range(len(pictures))]

    def run(self, images: Tensor) -> Row:
        """What the layers give for images (N,...), on their device. Raises `LayerError` where rows are not pictures."""
        found = features(self.classifier.model, images, self.layers)
        for name, tensor in found.items():
            if not tensor.ndim or len(tensor) != len(images):
                raise LayerError(
                    f"Layer '{name}' returns {tuple(tensor.shape)} for {len(images)} images: its first dimension is not the "
                    "batch, so features cannot be assigned to images. Choose a layer whose first dimension is the batch."
                )
        return {name: self._pool(name, tensor, images) for name, tensor in found.items()} if self.pools else found

    def _pool(self, name: str, tensor: Tensor, images: Tensor) -> Tensor:
        """(N,C): the mean over all places; of tokens, over those of the grid."""
        if tensor.ndim <= 2 or tensor[0].numel() == max(tensor.shape[1:]):
            return tensor.flatten(1) if tensor.ndim > 2 else tensor
        model = unwrap(self.classifier.model)
        module = select_layers(model, name)[name]
        patches = find_patches(model.modules()) if tensor.ndim == 3 else ()
        layout = Axes(model, to_batch(images), patches).find_layout(tensor.shape, module, self.reshape)
        if layout is None:
            raise LayerError(
                f"Layer '{name}' returns {tuple(tensor.shape)} for {len(images)} images, and its grid cannot be determined: "
                "give --reshape, or leave out --pool."
            )
        return layout.to_grid(tensor).flatten(2).mean(2)


def prepare_extractor(
    classifier: Classifier,
    layers: Layers,
    *,
    pools: bool = False,
    reshape: str | tuple[int, ...] | None = None,
    batch_size: int,
) -> Extractor:
    """An extractor of the layers that these names and patterns mean, tried out on pictures of noise. Raises
    `LayerError` where `inspection.features` does, and for a layer that gives nothing for each picture."""
    noise = make_noise(classifier.preprocess, classifier.model)
    images = noise.repeat(min(batch_size, 2), *[1] * (noise.ndim - 1))
    found = features(classifier.model, images, layers)  # of a pattern, those that run
    extractor = Extractor(classifier, list(found), pools, reshape)
    extractor.run(images)
    return extractor


def extract_items(
    extractor: Extractor, items: Iterable[Item], *, batch_size: int, workers: int
) -> Generator[tuple[str, Row | GradcamError], None, None]:
    """Each picture's name, and what the layers give for it or why that cannot be had, in the order of the items."""

    def name(fetched: Fetched, found: Row | GradcamError) -> tuple[str, Row | GradcamError]:
        return fetched.item.name, found

    unasked = (replace(item, wanted=None) for item in items)  # no class is looked at
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    return compute_items(extractor.classifier, extractor.extract, unasked, finish=name, **how)


NAMES = "names"  # what the pictures' names are called in a file
RESERVED = {".npz": NAMES, ".safetensors": "__metadata__"}  # no layer can be called so there
LONGEST_HEADER = 100_000_000  # bytes that readers of safetensors take
BLOCK = 2**20  # bytes that are copied at once

# What each format knows; values of any other kind are written as float32.
SAFETENSORS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
NPZ = {torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2"}


@dataclass(frozen=True)
class _Spool:
    """One layer's rows so far, without a name in their folder, so that nothing is left of them however this ends."""

    file: BinaryIO
    shape: tuple[int, ...]
    dtype: torch.dtype


class FeatureFile:
    """Gathers pictures' features as a context, row by row on the disk, as in memory there is room for one; at the end
    they are written to one file, .npz or .safetensors by its path, which has its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self._known = SAFETENSORS if path.suffix.lower() == ".safetensors" else NPZ
        self._spools: dict[str, _Spool] = {}
        self._files = contextlib.ExitStack()

    def __enter__(self) -> FeatureFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # of a disk that is full: what was in their buffers is not wanted any more
            self._files.close()

    @property
    def layers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Each layer's shape, the pictures' axis first, and dtype, as they are written."""
        shapes = {name: (len(self.names), *spool.shape) for name, spool in self._spools.items()}
        return {name: (shape, str(self._spools[name].dtype).removeprefix("torch.")) for name, shape in shapes.items()}

    def add(self, name: str, row: Mapping[str, Tensor]) -> None:
        """Add one picture's. Raises `LayerError` where a layer's shape differs from that of the pictures before,
        `OutputError`."""
        tensors = {layer: it.to(it.dtype if it.dtype in self._known else torch.float32) for layer, it in row.items()}
        for layer, tensor in tensors.items():
            first = self._spools.get(layer)
            if first is not None and first.shape != tuple(tensor.shape):
                raise LayerError(
                    f"Layer '{layer}' returns {tuple(tensor.shape)} for {name}, but {first.shape} for earlier images, so "
                    "the features do not fit into one array: give one --size HEIGHTxWIDTH for all images, or --pool."
                )
        with _blaming(self.path):
            for layer, tensor in tensors.items():
                if layer not in self._spools:
                    file = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115  (the stack closes it)
                    self._files.enter_context(file)
                    self._spools[layer] = _Spool(file, tuple(tensor.shape), tensor.dtype)
                self._spools[layer].file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.names.append(name)

    def write(self, about: Mapping[str, str]) -> None:
        with _blaming(self.path), replacing(self.path) as file:
            if self._known is SAFETENSORS:
                self._write_safetensors(file, about)
            else:
                self._write_npz(file)
            file.flush()
            os.fsync(file.fileno())

    def _write_npz(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, spool in self._spools.items():
                with _entry(archive, name) as entry:
                    shape = (len(self.names), *spool.shape)
                    about = {"descr": NPZ[spool.dtype], "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(entry, about)
                    _copy(spool, entry)
            with _entry(archive, NAMES) as entry:
                np.lib.format.write_array(entry, np.array(self.names, dtype=np.str_), allow_pickle=False)

    def _write_safetensors(self, file: BinaryIO, about: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": {**about, NAMES: json.dumps(self.names)}}
        # The widest first, so that each begins at a multiple of its values' size.
        spools = sorted(self._spools.items(), key=lambda it: -it[1].dtype.itemsize)
        start = 0
        for name, spool in spools:
            shape = [len(self.names), *spool.shape]
            end = start + math.prod(shape) * spool.dtype.itemsize
            header[name] = {"dtype": SAFETENSORS[spool.dtype], "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, spool in spools:
            _copy(spool, file)


def check_feature_file(path: Path, names: Sequence[str]) -> None:
    """Raises `OutputError` where the names do not fit into the file, or its folder cannot be made or written."""
    if path.suffix.lower() == ".safetensors" and len(json.dumps(json.dumps(names))) > LONGEST_HEADER * 0.99:
        raise OutputError(f"{path}: cannot store the names of {len(names)} images; write an .npz file instead.")
    with _blaming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def check_layers(path: Path, layers: Sequence[str]) -> None:
    """Raises `GradcamError` for a layer whose name means something else in such a file."""
    name, is_npz = RESERVED[path.suffix.lower()], path.suffix.lower() == ".npz"
    if name in layers:
        what, other = ("the image names", ".safetensors") if is_npz else ("the metadata", ".npz")
        raise GradcamError(
            f"The layer name '{name}' is reserved for {what} in a {path.suffix} file: write a {other} file instead."
        )


@contextlib.contextmanager
def _entry(archive: zipfile.ZipFile, name: str) -> Iterator[BinaryIO]:
    """An array in the archive, of any size; without the time, so that the same features are the same bytes."""
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        yield entry  # type: ignore[misc]  # which is what np.lib.format writes to


def _copy(spool: _Spool, file: BinaryIO) -> None:
    spool.file.seek(0)
    shutil.copyfileobj(spool.file, file, BLOCK)


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({describe_os_error(error)}); free some space, or choose another --output."
        ) from error
