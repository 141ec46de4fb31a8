"""What the axes of a layer's output are where counting cannot tell: the model is asked, by a batch of another form.

With one image alone the axis of the images has one row, and windows that were folded into rows have as many as one image
has. With another length of the text, what holds text has another length, and the picture's own tokens have not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, first_floating, tensors
from gradcam.hooks.preserve import recording_off, undisturbed
from gradcam.layers.layout import IMAGE_AXES, Layout, Patch, candidates, find_layout, find_patch_grids

Shapes = dict[nn.Module, tuple[int, ...]]

# By module: what was asked once, by what was asked, the shape that the module gave, and the batch.
_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def one_image(batch: Batch) -> Batch:
    """The first image alone, and what belongs to it."""
    first = batch.copy(lambda tensor: (tensor[:1] if _is_of_images(tensor, batch) else tensor).clone())
    return replace(first, images=1)


class Axes:
    """What the axes of a model's layers' outputs are, for a batch; asked only where that is not certain, and once."""

    def __init__(self, model: nn.Module, batch: Batch, patches: Sequence[Patch] = ()) -> None:
        self._model, self._batch, self._patches = model, batch, patches
        # Words are numbers in a row, or vectors in a row where they are embedded already.
        found = [tensor for tensor in tensors((batch.args, batch.kwargs)) if _is_of_images(tensor, batch)]
        words = [it for it in found if it.ndim == 2 and not it.is_floating_point() and it.dtype != torch.bool]
        vectors = [it for it in found if it.ndim == 3 and it.is_floating_point()]
        self.text_lengths = sorted({it.shape[1] for it in words + vectors})

    def find_layout(
        self, shape: Sequence[int], module: nn.Module, reshape: str | tuple[int, ...] | None = None
    ) -> Layout | None:
        """As `tokens.find_layout`, of what a module gave for the batch; None, too, where it holds text."""
        size, images = self._batch.size, self._batch.images
        axes = IMAGE_AXES if isinstance(reshape, str) else self.image_axes(shape, module)
        found = find_layout(shape, size, module, images, patches=self._patches, reshape=reshape, image_axes=axes)
        return None if found is not None and reshape is None and self.holds_text(shape, module) else found

    def image_axes(self, shape: Sequence[int], module: nn.Module) -> Sequence[int]:
        """Along which of the first two axes of three the images may lie; none where the rows are not the images. There
        may be as many tokens as images, and windows that were folded into rows may have as many tokens each."""
        shape, images = tuple(shape), self._batch.images
        if len(shape) != 3 or images == 1 or shape[1] != images or shape[0] % images:
            return IMAGE_AXES

        def ask() -> Sequence[int]:
            alone = self._alone.get(module, ())
            return [axis for axis in IMAGE_AXES if alone == (*shape[:axis], 1, *shape[axis + 1 :])]

        found: Sequence[int] = self._remember(module, ("images", shape), ask)
        return found

    def holds_text(self, shape: Sequence[int], module: nn.Module) -> bool:
        """Whether an output of this shape is of the text beside the pictures, or of both in one row."""
        shape = tuple(shape)
        if not self.text_lengths or max(shape[1:], default=0) < self.text_lengths[0]:
            return False
        return bool(self._remember(module, ("text", shape, *self.text_lengths), lambda: self._ask_text(shape, module)))

    def prepare(self) -> None:
        """Ask now, for all layers: for whoever is going to look at them while the model runs."""
        if self._batch.images > 1:
            _ = self._alone
        if self.text_lengths:
            _ = self._with_other_texts

    @functools.cached_property
    def plain(self) -> Shapes:
        return self._ask(self._batch.copy())

    def _ask_text(self, shape: tuple[int, ...], module: nn.Module) -> bool:
        for other in self._with_other_texts:
            if module not in other:  # the model takes no other length: the number of tokens has to tell
                left = [shape[1] - length for length in self.text_lengths]
                grids = list(find_patch_grids(self._batch.size, self._patches))
                return any(rest == 0 or (rest > 0 and candidates(rest, grids)) for rest in left)
            if other[module] != shape:
                return True
        return False

    @functools.cached_property
    def _alone(self) -> Shapes:
        return self._ask(one_image(self._batch))

    @functools.cached_property
    def _with_other_texts(self) -> list[Shapes]:
        """For each length of a text: with one word less, or with the last one twice."""
        found = []
        for length in self.text_lengths:
            shorter = {} if length == 1 else self._ask_with_text(length, lambda tensor: tensor[:, :-1])
            found.append(shorter or self._ask_with_text(length, lambda tensor: torch.cat([tensor, tensor[:, -1:]], 1)))
        return found

    def _ask_with_text(self, length: int, change: Callable[[Tensor], Tensor]) -> Shapes:

        def change_texts(tensor: Tensor) -> Tensor:
            is_along = 2 <= tensor.ndim <= 3 and tensor.shape[1] == length and _is_of_images(tensor, self._batch)
            return (change(tensor) if is_along else tensor).clone()

        return self._ask(self._batch.copy(change_texts))

    def _ask(self, batch: Batch) -> Shapes:
        """The shape of what each layer gives for another batch; nothing if the model does not take it."""
        found: Shapes = {}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if (tensor := first_floating(output)) is not None:
                found.setdefault(module, tuple(tensor.shape))

        try:
            with undisturbed(self._model) as modules, recording_off(), Hooks() as hooks:
                for module in modules:
                    if not isinstance(module, torch.jit.ScriptModule):
                        hooks.after_forward(module, look)
                self._model(*batch.args, **batch.kwargs)
        except Exception:  # whatever a model raises for a batch of another form than it was given
            return {}
        return found

    def _remember(self, module: nn.Module, question: Any, ask: Callable[[], Any]) -> Any:
        answers = _known.setdefault(module, {})
        question = (*question, self._batch.images, self._batch.size)
        if question not in answers:
            answers[question] = ask()
        return answers[question]


def _is_of_images(tensor: Tensor, batch: Batch) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch.images
