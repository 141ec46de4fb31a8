"""Extract the features of many images, and write them to one NumPy .npz or .safetensors file."""

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
from gradcam.errors import GradcamError, LayerError, OutputError
from gradcam.hooks.containers import to_batch
from gradcam.images.files import open_replacement
from gradcam.inspection.extraction import features
from gradcam.inspection.selection import Layers, select_layers
from gradcam.layers.axes import AxisResolver
from gradcam.layers.find import unwrap
from gradcam.layers.token_layout import find_patches
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.models.preprocess import Prepared
from gradcam.models.probe import make_noise
from gradcam.sources.contents import InputImage
from gradcam.storage.disk import describe_os_error

Reshape = str | tuple[int, ...] | None
Row = dict[str, Tensor]  # The outputs for one image or one batch, by layer name.


@dataclass(frozen=True)
class Extractor:
    """Extracts the outputs of named layers of a model.

    If `pools` is True, each output is averaged over its positions in the image. `reshape` is as in `gradcam.explain`.
    """

    classifier: Classifier
    layers: Sequence[str]
    pools: bool = False
    reshape: Reshape = None

    def extract(self, pictures: Sequence[Prepared], *, classes: Sequence[int] | None = None) -> list[Row]:
        """Run the model once on images of equal size, and return each image's layer outputs. `classes` is ignored."""
        images = torch.stack([prepared.image for prepared in pictures])
        outputs = self.run(images.to(self.classifier.device, find_input_dtype(self.classifier.model)))
        on_cpu = {name: tensor.cpu() for name, tensor in outputs.items()}
        return [{name: tensor[i] for name, tensor in on_cpu.items()} for i in range(len(pictures))]

    def run(self, images: Tensor) -> Row:
        """Return the layer outputs for images (N,...), which must be on the model's device.

        Raises `LayerError` if the first axis of an output is not the batch.
        """
        outputs = features(self.classifier.model, images, self.layers)
        for name, tensor in outputs.items():
            if not tensor.ndim or len(tensor) != len(images):
                problem = "its first dimension is not the batch, so features cannot be assigned to images"
                advice = "Choose a layer whose first dimension is the batch."
                raise LayerError(f"{_describe(name, tensor, images)}: {problem}. {advice}")
        return {name: self._pool(name, tensor, images) for name, tensor in outputs.items()} if self.pools else outputs

    def _pool(self, name: str, tensor: Tensor, images: Tensor) -> Tensor:
        """Return the mean over all positions, (N,C). Tokens outside the grid, such as class tokens, are left out."""
        if tensor.ndim <= 2 or tensor[0].numel() == max(tensor.shape[1:]):
            return tensor.flatten(1) if tensor.ndim > 2 else tensor
        model = unwrap(self.classifier.model)
        module = select_layers(model, name)[name]
        patches = find_patches(model.modules()) if tensor.ndim == 3 else ()
        layout = AxisResolver(model, to_batch(images), patches).find_layout(tensor.shape, module, self.reshape)
        if layout is None:
            problem = f"{_describe(name, tensor, images)}, and its grid cannot be determined"
            raise LayerError(f"{problem}: give --reshape, or leave out --pool.")
        return layout.to_grid(tensor).flatten(2).mean(2)


def _describe(name: str, tensor: Tensor, images: Tensor) -> str:
    return f"Layer '{name}' returns {tuple(tensor.shape)} for {len(images)} images"


def prepare_extractor(
    classifier: Classifier, layers: Layers, *, pools: bool = False, reshape: Reshape = None, batch_size: int
) -> Extractor:
    """Return an extractor for the layers that match the names and patterns, and test it on noise images.

    Raises `LayerError` as `inspection.features` does, and if the output of a layer has no batch axis.
    """
    noise = make_noise(classifier.preprocess, classifier.model)
    images = noise.repeat(min(batch_size, 2), *[1] * (noise.ndim - 1))
    # A pattern may match layers that the model does not run. Such layers have no output, and are left out.
    outputs = features(classifier.model, images, layers)
    extractor = Extractor(classifier, list(outputs), pools, reshape)
    extractor.run(images)
    return extractor


def extract_items(
    extractor: Extractor, items: Iterable[InputImage], *, batch_size: int, workers: int
) -> Generator[tuple[str, Row | GradcamError], None, None]:
    """Yield the name of each image with its features or an error, in the order of the items."""
    options: Any = {"batch_size": batch_size, "workers": workers}
    options["finish"] = lambda fetched, row: (fetched.item.name, row)
    items_without_class = (replace(item, wanted=None) for item in items)  # Features do not depend on a class.
    return compute_items(extractor.classifier, extractor.extract, items_without_class, **options)


NAMES_KEY = "names"  # The key of the image names in a file.
RESERVED_NAMES = {".npz": NAMES_KEY, ".safetensors": "__metadata__"}  # Layers must not have these names.
# Readers of safetensors files reject longer headers.
MAX_HEADER_BYTES = 100_000_000
COPY_BLOCK_BYTES = 2**20

# The dtypes that each format can store. Other dtypes are converted to float32.
SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
NPZ_DTYPES = {torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2"}


@dataclass(frozen=True)
class _Spool:
    """The features of one layer, in an unnamed temporary file.

    The operating system deletes the file even if the process is killed.
    """

    file: BinaryIO
    shape: tuple[int, ...]
    dtype: torch.dtype


class FeatureFile:
    """Writes the features of many images to one .npz or .safetensors file. This object is a context manager.

    Features are collected in temporary files, because the features of all images may not fit into memory. The final
    file gets its name after it is complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self._dtype_names = SAFETENSORS_DTYPES if path.suffix.lower() == ".safetensors" else NPZ_DTYPES
        self._spools: dict[str, _Spool] = {}
        self._files = contextlib.ExitStack()

    def __enter__(self) -> FeatureFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # Closing fails if the disk is full, but the data are no longer needed.
            self._files.close()

    @property
    def layers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return a dict from each layer to the shape (N,...) and the dtype of its features in the file."""
        shapes = {name: (len(self.names), *spool.shape) for name, spool in self._spools.items()}
        return {name: (shape, str(self._spools[name].dtype).removeprefix("torch.")) for name, shape in shapes.items()}

    def add(self, name: str, row: Mapping[str, Tensor]) -> None:
        """Add the features of one image.

        Raises `OutputError` if the features cannot be written. Raises `LayerError` if the shape of a layer's features
        differs between images.
        """
        dtypes = self._dtype_names
        tensors = {layer: item if item.dtype in dtypes else item.float() for layer, item in row.items()}
        for layer, tensor in tensors.items():
            spool = self._spools.get(layer)
            if spool is not None and spool.shape != tuple(tensor.shape):
                shapes = f"{tuple(tensor.shape)} for {name}, but {spool.shape} for earlier images"
                problem = f"Layer '{layer}' returns {shapes}. One array needs equal shapes"
                raise LayerError(f"{problem}: give one --size HEIGHTxWIDTH for all images, or --pool.")
        with _convert_os_errors(self.path):
            for layer, tensor in tensors.items():
                if layer not in self._spools:
                    file = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115  (the stack closes it)
                    self._files.enter_context(file)
                    self._spools[layer] = _Spool(file, tuple(tensor.shape), tensor.dtype)
                self._spools[layer].file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.names.append(name)

    def write(self, metadata: Mapping[str, str]) -> None:
        with _convert_os_errors(self.path), open_replacement(self.path) as file:
            if self._dtype_names is SAFETENSORS_DTYPES:
                self._write_safetensors(file, metadata)
            else:
                self._write_npz(file)
            file.flush()
            os.fsync(file.fileno())

    def _write_npz(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, spool in self._spools.items():
                with _open_entry(archive, name) as entry:
                    shape = (len(self.names), *spool.shape)
                    header = {"descr": NPZ_DTYPES[spool.dtype], "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(entry, header)
                    _copy(spool, entry)
            with _open_entry(archive, NAMES_KEY) as entry:
                np.lib.format.write_array(entry, np.array(self.names, dtype=np.str_), allow_pickle=False)

    def _write_safetensors(self, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": {**metadata, NAMES_KEY: json.dumps(self.names)}}
        # Write dtypes with large items first, so that each tensor starts at a multiple of its item size.
        spools = sorted(self._spools.items(), key=lambda item: -item[1].dtype.itemsize)
        start = 0
        for name, spool in spools:
            shape = [len(self.names), *spool.shape]
            end = start + math.prod(shape) * spool.dtype.itemsize
            header[name] = {"dtype": SAFETENSORS_DTYPES[spool.dtype], "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, spool in spools:
            _copy(spool, file)


def check_feature_file(path: Path, names: Sequence[str]) -> None:
    """Raise `OutputError` if the file cannot hold the image names, or if its folder cannot be created or written to."""
    if path.suffix.lower() == ".safetensors" and len(json.dumps(json.dumps(names))) > MAX_HEADER_BYTES * 0.99:
        raise OutputError(f"{path}: cannot store the names of {len(names)} images; write an .npz file instead.")
    with _convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def check_layer_names(path: Path, layers: Sequence[str]) -> None:
    """Raise `GradcamError` for a layer name that is reserved in this file format."""
    name, is_npz = RESERVED_NAMES[path.suffix.lower()], path.suffix.lower() == ".npz"
    if name in layers:
        meaning, other_suffix = ("the image names", ".safetensors") if is_npz else ("the metadata", ".npz")
        reason = f"The layer name '{name}' is reserved for {meaning} in a {path.suffix} file"
        raise GradcamError(f"{reason}: write a {other_suffix} file instead.")


def _open_entry(archive: zipfile.ZipFile, name: str) -> Any:
    """Open a new archive entry for an array. The entry has no timestamp, so that equal features give equal bytes."""
    return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)


def _copy(spool: _Spool, file: BinaryIO) -> None:
    spool.file.seek(0)
    shutil.copyfileobj(spool.file, file, COPY_BLOCK_BYTES)


@contextlib.contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({describe_os_error(error)}); free some space, or choose another --output."
        ) from error
