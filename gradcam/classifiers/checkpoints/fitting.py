"""A checkpoint into a model: names fitted, everything checked, and only then loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradcam.classifiers.checkpoints.differences import compare
from gradcam.classifiers.checkpoints.heads import Tensors, find_head, rename_head
from gradcam.classifiers.checkpoints.prefixes import Fitted, fit_names
from gradcam.classifiers.checkpoints.reading import Checkpoint
from gradcam.errors import ModelError


def count_classes(checkpoint: Checkpoint, model: nn.Module) -> int | None:
    """The number of classes in the checkpoint's last layer, for a model of this architecture with any number; else None.

    The model may be on the meta device. None where its last layer is not one with a row for each class, or where the
    checkpoint has no tensor of its name with as many features.
    """
    expected, head = _expect(model), find_head(model)
    if head is None:
        return None
    name = f"{head}.weight"
    found = _fit(checkpoint, model, expected).tensors.get(name)
    return len(found) if found is not None and found.shape[1:] == expected[name].shape[1:] else None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> Sequence[str]:
    """Loads the checkpoint into the model, in the model's own precision; gives sentences on what was made to fit.

    A prefix is taken off, or put on, where that makes most names the model's. Everything that the model needs has to be
    there, and nothing else: but for buffers that are worked out anyway, and heads that only training needs. A model on
    the meta device gets storage of its own. Nothing is loaded unless all of it fits.
    Raises `ModelError` with what is missing, unexpected and of wrong shape; and for weights that are not finite.
    """
    expected = _expect(model)
    fitted = _fit(checkpoint, model, expected)
    difference = compare(fitted.tensors, expected, fitted.outside)
    if difference.matters:
        what, details = difference.describe(model)
        raise ModelError(f"{checkpoint.path}: {what}", details)
    fitting = [name for name in expected if name in fitted.tensors and name not in difference.of_no_account]
    _check_kinds(checkpoint, {name: fitted.tensors[name] for name in fitting}, expected)
    state = OrderedDict((name, fitted.tensors[name].to(expected[name].dtype, copy=True)) for name in fitting)
    _check_finite(checkpoint, state)
    # compare() allows nothing but counters to be missing where the model has no values of its own.
    counters = [name for name, wanted in expected.items() if wanted.is_meta and name not in state]
    state.update((name, torch.zeros_like(expected[name], device="cpu")) for name in counters)
    _assign(model, state, expected, checkpoint.path)
    return [*checkpoint.notes, *fitted.notes, *difference.notes()]


def _expect(model: nn.Module) -> Tensors:
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModelError(f"The model's '{lazy[0]}' has no shape yet: let its factory run it on a picture once.")
    expected = model.state_dict()
    for name in [name for name, value in expected.items() if not isinstance(value, Tensor)]:  # modules' extra state
        del expected[name]
    return expected


def _fit(checkpoint: Checkpoint, model: nn.Module, expected: Tensors) -> Fitted:
    if checkpoint.tensors.keys() == expected.keys():
        return Fitted(checkpoint.tensors)
    try:
        fitted = fit_names(checkpoint.tensors, expected)
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from None
    tensors, notes = rename_head(fitted.tensors, expected, find_head(model))
    return replace(fitted, tensors=tensors, notes=[*fitted.notes, *notes])


def _assign(model: nn.Module, state: OrderedDict[str, Tensor], expected: Tensors, path: Path) -> None:
    # The names and shapes are today's: without a version, modules would take them for those of their oldest one.
    state._metadata = expected._metadata  # type: ignore[attr-defined]  # PyTorch keeps versions there
    on_meta = any(tensor.is_meta for tensor in expected.values())
    try:
        model.load_state_dict(state, strict=False, assign=on_meta)
    except RuntimeError as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error


def _check_kinds(checkpoint: Checkpoint, tensors: Tensors, expected: Tensors) -> None:
    """Integers in place of weights are quantised ones, which mean nothing without their scales."""
    for name, tensor in tensors.items():
        if tensor.is_complex() or tensor.is_floating_point() != expected[name].is_floating_point():
            raise ModelError(f"{checkpoint.path}: '{name}' is {tensor.dtype}, expected {expected[name].dtype}.")


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
