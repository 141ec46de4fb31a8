"""A file of features: rows gathered on the disk, then written whole, as NumPy's .npz or as .safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from gradcam.batch.output.disk import describe
from gradcam.errors import GradcamError, LayerError, OutputError
from gradcam.files import replacing

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

    def size(self, rows: int) -> int:
        """The bytes of so many rows."""
        return rows * math.prod(self.shape) * self.dtype.itemsize


class FeatureFile:
    """Gathers pictures' features as a context, row by row on the disk, and writes them to one file at the end.

    `path`: ends in .npz or .safetensors. Nothing is there under that name before `write`, and then all of it.
    While both are there it takes the disk twice; in memory there is never more than a row, and the names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self._known = SAFETENSORS if path.suffix.lower() == ".safetensors" else NPZ
        self._spools: dict[str, _Spool] = {}
        self._files = contextlib.ExitStack()

    def __enter__(self) -> FeatureFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # of a disk that is full: what was in their buffers is not wanted any more
            self._files.close()

    @property
    def layers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Each layer's shape, the pictures' axis first, and dtype, as they are written."""
        rows = len(self.names)
        return {
            name: ((rows, *spool.shape), str(spool.dtype).removeprefix("torch."))
            for name, spool in self._spools.items()
        }

    def add(self, name: str, row: Mapping[str, Tensor]) -> None:
        """Add one picture's.

        Raises `LayerError` where a layer's shape differs from that of the pictures before, `OutputError` for the disk.
        """
        tensors = {layer: self._convert(tensor) for layer, tensor in row.items()}
        for layer, tensor in tensors.items():
            first = self._spools.get(layer)
            if first is not None and first.shape != tuple(tensor.shape):
                raise LayerError(
                    f"Layer '{layer}' gives {tuple(tensor.shape)} for {name} and {first.shape} for the pictures before it, "
                    "which do not fit into one array: give --size HEIGHTxWIDTH, so that all are alike, or --pool."
                )
        with _blaming(self.path):
            for layer, tensor in tensors.items():
                spool = self._spools.get(layer) or self._open(layer, tensor)
                spool.file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.names.append(name)

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(tensor.dtype if tensor.dtype in self._known else torch.float32)

    def _open(self, layer: str, tensor: Tensor) -> _Spool:
        file = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115  (it stays open until the context ends)
        self._files.enter_context(file)
        self._spools[layer] = _Spool(file, tuple(tensor.shape), tensor.dtype)
        return self._spools[layer]

    def write(self, about: Mapping[str, str]) -> None:
        """Write the file. `about`: what else is said in a .safetensors file. Raises `OutputError`."""
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
                    about = {
                        "descr": NPZ[spool.dtype],
                        "fortran_order": False,
                        "shape": (len(self.names), *spool.shape),
                    }
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
            end = start + spool.size(len(self.names))
            shape = [len(self.names), *spool.shape]
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
        raise OutputError(f"{path}: holds the names of fewer pictures than these {len(names)}; write an .npz file.")
    with _blaming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def check_layers(path: Path, layers: Sequence[str]) -> None:
    """Raises `GradcamError` for a layer whose name means something else in such a file."""
    if RESERVED[path.suffix.lower()] in layers:
        other = next(suffix for suffix in RESERVED if suffix != path.suffix.lower())
        what = "the pictures' names are" if path.suffix.lower() == ".npz" else "what is said of the file is"
        raise GradcamError(
            f"A layer is called '{RESERVED[path.suffix.lower()]}', as {what} in a {path.suffix} file: write a {other} file."
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
    """Whatever the disk refuses is an `OutputError` that says what to do."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({describe(error)}); free some space, or choose another --output."
        ) from error
