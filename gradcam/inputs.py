"""What a layer gets, and may change in place under the hands of a model that goes on using it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradcam.nested import tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LayerInput:
    """A tensor that came to the layer, the one that the layer was given for it, and how often that had been changed."""

    original: Tensor
    given: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        return version_of(self.given) != self.version

    def replace(self, values: Tensor) -> Tensor:
        """Write `values` into the original, so that whoever uses it goes on with them; gives what has them.

        Not into a parameter, on which the graph would stay, nor into a view that was made without recording: autograd
        would then refuse all other views of that memory. What the model does with those under another name stays unseen.
        """
        original = self.original
        is_unrecorded_view = original._is_view() and not original.requires_grad
        if original is values or is_unrecorded_view or isinstance(original, nn.Parameter):
            return values
        return original.copy_(values)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def take_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[LayerInput], Arguments | None]:
    """Every tensor among the arguments, and the arguments to call the layer with, None for those that came.

    Where a target layer further up records already, the layer is given a copy: autograd may have saved what came.
    """
    copies = {
        id(tensor): tensor.clone()
        for tensor in (*args, *kwargs.values())
        if isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    }

    def given(value: Any) -> Any:
        return copies.get(id(value), value)

    inputs = [LayerInput(tensor, given(tensor), version_of(given(tensor))) for tensor in tensors((args, kwargs))]
    if not copies:
        return inputs, None
    return inputs, (tuple(map(given, args)), {key: given(value) for key, value in kwargs.items()})
