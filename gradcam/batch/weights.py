"""Which weights a model has, in a few characters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcam.hashing import hash_file

if TYPE_CHECKING:
    from gradcam.classifiers import Classifier


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
