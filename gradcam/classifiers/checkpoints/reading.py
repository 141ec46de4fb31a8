"""Checkpoints of any trainer, read without running what is in them."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradcam.classifiers.checkpoints.pickles import FACTORY, MOST_BYTES, UNPACKED, check_pickles, explain_refusal
from gradcam.classifiers.checkpoints.signatures import OTHERS, PEEK, describe_stranger, is_safetensors
from gradcam.classifiers.checkpoints.state_dicts import StateDict, find_state_dicts
from gradcam.errors import ModelError, join_names, shorten
from gradcam.files import open_file


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A file's weights by name, as they lie in it, on the processor. `notes`: what a person should know of the choice."""

    path: Path
    tensors: dict[str, Tensor] = field(repr=False)
    notes: Sequence[str] = ()


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The weights in a file of safetensors or of torch.save, whatever its suffix; epochs, optimizers and such are left.

    Pickles are read with `weights_only=True`, always: nothing in a file is executed. Where several sets of weights lie
    in one file, averages (EMA) come first, and a note says which was taken.
    Raises `ModelError` for a file that is missing, cut or no checkpoint, that would run code, or that holds no weights.
    """
    path = Path(path)
    try:
        head = b""
        if not (path.is_dir() and path.suffix.lower() in OTHERS):
            with open_file(path) as file:
                head = file.read(PEEK)
        what = describe_stranger(head, path)
        if what:
            raise ModelError(f"{path}: {what}.")
        content = _read_safetensors(path) if is_safetensors(head) else _read_torch(path)
    except ModelError:
        raise
    except pickle.UnpicklingError:
        raise explain_refusal(path) from None
    except MemoryError:
        raise ModelError(f"{path}: does not fit into memory") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise ModelError(f"{path}: cannot be opened ({error.strerror}), expected a checkpoint") from None
        # Readers raise RuntimeError, EOFError, IndexError, BadZipFile, zlib.error, struct.error and more on broken files.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "magic number" in reason:  # a pickle that begins otherwise than those of torch.save
            raise explain_refusal(path) from None
        raise ModelError(f"{path}: is damaged or cut off ({reason})") from error
    return _choose(path, content)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_torch(path: Path) -> Any:
    check_pickles(path)
    with path.open("rb") as file, warnings.catch_warnings():  # a file: of a path, torch.load goes by the suffix
        warnings.simplefilter("ignore")  # of storages as they were saved years ago
        return torch.load(file, map_location="cpu", weights_only=True)


def _choose(path: Path, content: object) -> Checkpoint:
    found = find_state_dicts(content, lambda value: isinstance(value, Tensor))
    if not found:
        what = shorten(content)
        if isinstance(content, dict) and content:
            what = f"a dictionary of {', '.join(map(shorten, list(content)[:5]))}"
        raise ModelError(f"{path}: holds no weights by name, but {what}. {FACTORY}")
    chosen, *others = found
    if others and not chosen.is_known:
        names = join_names(_name(each) for each in found)
        raise ModelError(f"{path}: holds several sets of weights, {names}, and none that is the usual one. {FACTORY}")
    tensors = {name: value.detach() for name, value in chosen.values.items() if isinstance(value, Tensor)}
    odd = [name for name, tensor in tensors.items() if tensor.is_meta or tensor.is_quantized or tensor.is_sparse]
    if odd:
        raise ModelError(
            f"{path}: '{odd[0]}' is quantised, sparse or without values, expected plain tensors. {FACTORY}"
        )
    _check_claims(path, tensors)
    return Checkpoint(path, tensors, _notes(chosen, others))


def _check_claims(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises `ModelError` where tensors share, or repeat, so few values that copies of them would fill the memory."""
    held = sum(
        {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors.values()}.values()
    )
    claimed = sum(each.nbytes for each in tensors.values())
    if claimed > UNPACKED * held + MOST_BYTES:
        name = max(tensors, key=lambda name: tensors[name].nbytes)
        shape = " x ".join(map(str, tensors[name].shape))
        raise ModelError(f"{path}: '{name}' claims to be {shape}, and the whole file holds {held} bytes of values.")


def _notes(chosen: StateDict, others: Sequence[StateDict]) -> Sequence[str]:
    if not others:
        return ()
    return (f"Of several sets of weights, '{_name(chosen)}' was taken and {join_names(map(_name, others))} left.",)


def _name(found: StateDict) -> str:
    return ".".join(found.keys)
