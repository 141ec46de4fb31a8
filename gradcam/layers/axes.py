"""Find the axes of layer outputs by running the model on changed batches.

If a shape does not show which axis holds images or text, the model runs on a changed batch, and the output shapes are
compared. If the batch has one image, the image axis has length 1. If windows are folded into the image axis, its length
is the number of windows per image. If the texts get another length, only tensors that contain text change their length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradcam.errors import ImageError
from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.hooks import Hooks, grad_mode_off
from gradcam.hooks.model_facts import Answer, ModelFacts
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.layout import GridSpec, Layout
from gradcam.layers.token_layout import IMAGE_AXES, Patch, find_layout, find_patch_grids, list_token_layouts

Shapes = dict[nn.Module, list[tuple[int, ...]]]  # The shapes of the tensors that each module returns.


def take_image(batch: Batch, index: int = 0) -> Batch:
    """Return a batch of one image, with the rows of all inputs that belong to this image."""

    def take(tensor: Tensor) -> Tensor:
        return (tensor[index : index + 1] if _is_of_images(tensor, batch) else tensor).clone()

    return batch.copy(take).take(1, index)


class AxisResolver:
    """Finds the axes of layer outputs for a batch. The model runs only if the shapes leave the axes uncertain."""

    def __init__(
        self, model: nn.Module, batch: Batch, patches: Sequence[Patch], facts: ModelFacts | None = None
    ) -> None:
        self._model, self._batch, self._patches = model, batch, patches
        self._facts = facts or ModelFacts(model)

    @functools.cached_property
    def text_lengths(self) -> list[int]:
        """Return the lengths of the batch's texts. A text is a row of token ids or of embeddings."""
        if len(self._batch.args) == 1 and not self._batch.kwargs:  # There are only images.
            return []
        arguments = list_tensors((self._batch.args, self._batch.kwargs))
        per_image = [tensor for tensor in arguments if _is_of_images(tensor, self._batch)]
        words = [ids for ids in per_image if ids.ndim == 2 and not ids.is_floating_point() and ids.dtype != torch.bool]
        vectors = [vector for vector in per_image if vector.ndim == 3 and vector.is_floating_point()]
        return sorted({tensor.shape[1] for tensor in words + vectors})

    def find_layout(self, shape: Sequence[int], module: nn.Module, reshape: GridSpec = None) -> Layout | None:
        """Return the layout of a module's output, as the function `find_layout` does; None for outputs with text."""
        size, images = self._batch.size, self._batch.images
        axes = IMAGE_AXES if isinstance(reshape, str) else self.image_axes(shape, module)
        layout = find_layout(shape, size, module, images, patches=self._patches, reshape=reshape, image_axes=axes)
        return None if layout is not None and reshape is None and self.holds_text(shape, module) else layout

    def image_axes(self, shape: Sequence[int], module: nn.Module) -> Sequence[int]:
        """Return which of a tensor's first two axes may be the image axis; an empty list if neither axis can be."""
        # The shape is ambiguous if the number of tokens, per image or per window, equals the number of images.
        shape, images = tuple(shape), self._batch.images
        if len(shape) != 3 or images == 1 or shape[1] != images or shape[0] % images:
            return IMAGE_AXES

        def find_axes() -> Sequence[int]:
            single_shapes = self._single_image_shapes.get(module, [])
            return [axis for axis in IMAGE_AXES if (*shape[:axis], 1, *shape[axis + 1 :]) in single_shapes]

        return self._remember(module, ("images", shape), find_axes)

    def holds_text(self, shape: Sequence[int], module: nn.Module) -> bool:
        """Return whether an output of this shape contains text, alone or together with the image's tokens."""
        shape = tuple(shape)
        if not self.text_lengths or max(shape[1:], default=0) < self.text_lengths[0]:
            return False
        return self._remember(module, ("text", shape, *self.text_lengths), lambda: self._has_text(shape, module))

    def prepare(self) -> None:
        """Run the model on the changed batches now, because a later run would call the caller's hooks."""
        if self._batch.images > 1:
            _ = self._single_image_shapes
        if self.text_lengths:
            _ = self._changed_text_shapes

    @functools.cached_property
    def plain(self) -> Shapes:
        return self._list_shapes(self._batch.copy())

    def _has_text(self, shape: tuple[int, ...], module: nn.Module) -> bool:
        for shapes in self._changed_text_shapes:
            if module not in shapes:  # The model rejects other text lengths, so only the shape is left as evidence.
                image_tokens = [shape[1] - length for length in self.text_lengths]
                grids = list(find_patch_grids(self._batch.size, self._patches))
                return any(count == 0 or (count > 0 and list_token_layouts(count, grids)) for count in image_tokens)
            if shape not in shapes[module]:
                return True
        return False

    @functools.cached_property
    def _single_image_shapes(self) -> Shapes:
        return self._list_shapes(take_image(self._batch))

    @functools.cached_property
    def _changed_text_shapes(self) -> list[Shapes]:
        """Return output shapes for texts without the last token or, if this fails, with the last token repeated."""
        shapes = []
        for length in self.text_lengths:
            shorter = {} if length == 1 else self._text_shapes(length, lambda tensor: tensor[:, :-1])
            shapes.append(shorter or self._text_shapes(length, lambda tensor: torch.cat([tensor, tensor[:, -1:]], 1)))
        return shapes

    def _text_shapes(self, length: int, change: Callable[[Tensor], Tensor]) -> Shapes:
        def change_texts(tensor: Tensor) -> Tensor:
            has_text = 2 <= tensor.ndim <= 3 and tensor.shape[1] == length and _is_of_images(tensor, self._batch)
            return (change(tensor) if has_text else tensor).clone()

        return self._list_shapes(self._batch.copy(change_texts))

    def _list_shapes(self, batch: Batch) -> Shapes:
        """Return the shapes of each layer's output for a batch; an empty dict if the model rejects the batch."""
        shapes_by_module: Shapes = {}

        def record_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if shapes := [tuple(tensor.shape) for tensor in list_tensors(output) if tensor.is_floating_point()]:
                shapes_by_module.setdefault(module, shapes)

        try:
            with preserve_state(self._model) as modules, grad_mode_off(), Hooks() as hooks:
                for module in modules:
                    if not isinstance(module, torch.jit.ScriptModule):
                        hooks.after_forward(module, record_shapes)
                batch.run(self._model)
        except Exception:  # The model may raise any error for a changed batch.
            return {}
        return shapes_by_module

    def _remember(self, module: nn.Module, key: Any, compute: Callable[[], Answer]) -> Answer:
        return self._facts.remember((*key, id(module), self._batch.images, self._batch.size), compute)


def _is_of_images(tensor: Tensor, batch: Batch) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch.images


def reject_frames_first(batch: Batch, modules: Sequence[nn.Module]) -> None:
    """Raise `ImageError` for images (N,T,C,H,W), whose channel axis would be mistaken for the depth of a volume."""
    convolutions = [module for module in modules if isinstance(module, _ConvNd)]
    channels = batch.pictures.shape[1]
    takes_channels = any(isinstance(module, nn.Conv3d) and module.in_channels == channels for module in convolutions)
    if convolutions and convolutions[0].in_channels == batch.size[0] != channels and not takes_channels:
        if {"input_ids", "pixel_attention_mask"} & batch.kwargs.keys():
            raise ImageError(
                f"pixel_values are {tuple(batch.pictures.shape)}, with several images or tiles per sample. "
                "Turn off splitting in the processor (do_image_splitting=False), and pass pixel_values[:, 0]. Wrap the "
                "model in a module whose forward() calls the model with pixel_values[:, None]."
            )
        wrapper = "a module whose forward(clips) returns model(clips.transpose(1, 2))"
        advice = f"pass frames.transpose(1, 2), and wrap the model in {wrapper}."
        raise ImageError(f"The images are {tuple(batch.pictures.shape)}, with frames before channels: {advice}")
