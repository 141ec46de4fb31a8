"""A checkpoint into a model: names fitted, everything checked, and only then loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gradcam.classifiers.checkpoints import Checkpoint
from gradcam.classifiers.differences import compare
from gradcam.classifiers.heads import find_head, rename_head
from gradcam.classifiers.prefixes import fit_names
from gradcam.errors import ModelError

Tensors = dict[str, Tensor]


def count_classes(checkpoint: Checkpoint, model: nn.Module) -> int | None:
    """The number of classes in the checkpoint's last layer, for a model of this architecture with any number; else None.

    The model may be on the meta device. None where its last layer is not one with a row for each class, or where the
    checkpoint has no tensor of its name with as many features.
    """
    head = find_head(model)
    if head is None:
        return None
    name = f"{head}.weight"
    expected = model.state_dict()
    found = _fit(checkpoint, model, expected)[0].get(name)
    return len(found) if found is not None and found.shape[1:] == expected[name].shape[1:] else None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> Sequence[str]:
    """Loads the checkpoint into the model, in the model's own precision; gives sentences on what was made to fit.

    A prefix is taken off, or put on, where that makes most names the model's. Everything that the model needs has to be
    there, and nothing else: but for buffers that are worked out anyway, and heads that only training needs. A model on
    the meta device gets storage of its own. Nothing is loaded unless all of it fits.
    Raises `ModelError` with what is missing, unexpected and of wrong shape; and for weights that are not finite.
    """
    expected = model.state_dict()
    tensors, notes = _fit(checkpoint, model, expected)
    difference = compare(tensors, expected)
    if difference.matters:
        raise ModelError(f"{checkpoint.path}: {difference.describe(model)}")
    fitting = [name for name in expected if name in tensors and name not in difference.of_no_account]
    state = OrderedDict((name, tensors[name].to(expected[name].dtype, copy=True)) for name in fitting)
    _check_finite(checkpoint, state)
    counters = [
        name for name, wanted in expected.items() if wanted.is_meta and name not in state
    ]  # as compare() allows
    state.update((name, torch.zeros_like(expected[name], device="cpu")) for name in counters)
    _assign(model, state, expected, checkpoint.path)
    return [*checkpoint.notes, *notes, *difference.notes()]


def _fit(checkpoint: Checkpoint, model: nn.Module, expected: Tensors) -> tuple[Tensors, Sequence[str]]:
    if checkpoint.tensors.keys() == expected.keys():
        return checkpoint.tensors, ()
    try:
        tensors, notes = fit_names(checkpoint.tensors, expected)
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from None
    tensors, more = rename_head(tensors, expected, find_head(model))
    return tensors, [*notes, *more]


def _assign(model: nn.Module, state: OrderedDict[str, Tensor], expected: Tensors, path: Path) -> None:
    # The names and shapes are today's: without a version, modules would take them for those of their oldest one.
    state._metadata = expected._metadata  # type: ignore[attr-defined]
    on_meta = any(tensor.is_meta for tensor in expected.values())
    try:
        model.load_state_dict(state, strict=False, assign=on_meta)
    except RuntimeError as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error


def _check_finite(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """A network with one weight that is not a number answers nothing else: said here, where the file is known."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    sums = [tensor.sum(dtype=torch.float32) for tensor in floating.values()]
    if sums and torch.stack(sums).isfinite().all():  # quick, and right where no sum overflows
        return
    wrong = [name for name, tensor in floating.items() if not tensor.isfinite().all()]
    if wrong:
        raise ModelError(
            f"{checkpoint.path}: {len(wrong)} of its tensors hold NaN or infinity, the first '{wrong[0]}': "
            "the training diverged, or the model's precision cannot hold them. Take an earlier checkpoint."
        )
