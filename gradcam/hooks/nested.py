"""Tensors inside tuples, lists, mappings and dataclasses, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import ImageError
from gradcam.hooks import pytorch

STATIC = ("torch.ao.nn.quantized.modules", "torch.ao.nn.intrinsic.quantized.modules")  # of activations too
IN_FLOATS = (
    "8-bit integers, which have no gradient: explain the original floating-point model, or this one with method='rise', "
    "which needs no gradient."
)


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, each once, as `model.modules()` does, in another order and a quarter of the time."""
    modules, seen = [model], {model}
    for module in modules:  # which grows on the way
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in `value`, in order."""
    return [value] if isinstance(value, Tensor) else [it for _, child in _children(value) for it in tensors(child)]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to every tensor; containers are copied, everything else is kept as it is."""
    if isinstance(value, Tensor):
        return function(value)
    children = {key: map_tensors(child, function) for key, child in _children(value)}
    if not children:
        return value
    if isinstance(value, tuple):
        return type(value)(*children.values()) if hasattr(value, "_fields") else type(value)(children.values())
    if isinstance(value, list):
        return list(children.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {**value, **children}
    changed = copy.copy(value)
    for key, child in children.items():
        if isinstance(changed, MutableMapping):
            changed[key] = child
        else:
            object.__setattr__(changed, key, child)  # frozen dataclasses too: the copy is ours
    return changed


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """`value` with the tensor `old` replaced by `new` wherever it lies."""
    return map_tensors(value, lambda tensor: new if tensor is old else tensor)


def take_rows(output: Any, rows: slice, total: int) -> Any:
    """Some of the images' rows of an output that has `total` of them: of each tensor with so many, and of a list that has
    something that is no tensor for each image, as detectors give it."""
    if isinstance(output, list) and len(output) == total and not any(isinstance(it, Tensor) for it in output):
        return output[rows]
    return map_tensors(output, lambda tensor: tensor[rows] if tensor.shape[:1] == (total,) else tensor)


def has_rows(output: Any, total: int) -> bool:
    """Whether an output has anything for each of `total` images."""
    return (isinstance(output, list) and len(output) == total) or any(
        tensor.shape[:1] == (total,) for tensor in tensors(output)
    )


def first_floating(value: Any) -> Tensor | None:
    """The first floating-point tensor in `value`, or None."""
    return next((tensor for tensor in tensors(value) if tensor.is_floating_point()), None)


def floating_by_keys(value: Any) -> dict[tuple[str, ...], Tensor]:
    """Every floating-point tensor in `value`, once, by the keys and indices that lead to it."""
    if isinstance(value, Tensor):
        return {(): value} if value.is_floating_point() else {}
    found: dict[int, tuple[tuple[str, ...], Tensor]] = {}
    for key, child in _children(value):
        for keys, tensor in floating_by_keys(child).items():
            found.setdefault(id(tensor), ((str(key), *keys), tensor))
    return dict(found.values())


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Mapping):  # first: a ModelOutput of Hugging Face is a dataclass too, and leaves None out
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def is_in_8_bits(values: Any) -> bool:
    """Whether a tensor among these values, or one that a module among them computes, is quantised."""
    if isinstance(values, nn.Module):
        return any(type(module).__module__.startswith(STATIC) for module in values.modules())
    return any(tensor.is_quantized for tensor in tensors(values))


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
        """Write `values` into the original, so that whoever uses it goes on with them; gives what has them. Not into a
        parameter, on which the graph would stay, nor into a view that was made without recording: autograd would then
        refuse all other views of that memory. What the model does with those under another name stays unseen."""
        original = self.original
        is_unrecorded_view = pytorch.is_view(original) and not original.requires_grad
        if original is values or is_unrecorded_view or isinstance(original, nn.Parameter):
            return values
        return original.copy_(values)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def take_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[LayerInput], Arguments | None]:
    """Every tensor among the arguments, and the arguments to call the layer with, None for those that came. Where a
    target layer further up records already, the layer is given a copy: autograd may have saved what came."""
    copies: dict[int, Any] = {
        id(tensor): tensor.clone()
        for tensor in (*args, *kwargs.values())
        if isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    }
    pairs = [(tensor, copies.get(id(tensor), tensor)) for tensor in tensors((args, kwargs))]
    inputs = [LayerInput(tensor, given, version_of(given)) for tensor, given in pairs]
    if not copies:
        return inputs, None
    new_kwargs = {key: copies.get(id(value), value) for key, value in kwargs.items()}
    return inputs, (tuple(copies.get(id(value), value) for value in args), new_kwargs)


Window = tuple[float, float, float, float]  # top, left, height and width, in pixels


@dataclass(frozen=True)
class Batch:
    """The model's arguments, the pictures among them, how many those are, and of which size: (H,W) or (D,H,W). `listed`:
    the sizes of pictures that the model takes as a list of (C,H,W). In `pictures`, and in the arguments, they then are
    one tensor, each in the upper left corner, and zero around it. `windows`: where each picture lies on what the model is
    given, where that is not all of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pictures: Tensor
    images: int
    size: tuple[int, ...]
    device: torch.device
    listed: tuple[tuple[int, ...], ...] | None = None
    windows: tuple[Window, ...] | None = None

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The size of each picture by itself, without what lies around it."""
        if self.windows is not None:
            return [tuple(max(1, round(length)) for length in window[2:]) for window in self.windows]
        return [self.size] * self.images if self.listed is None else list(self.listed)

    def take(self, images: int, first: int = 0) -> Batch:
        """The same said of some of its images alone, once their tensors have as many rows."""
        rows = slice(first, first + images)
        listed = None if self.listed is None else self.listed[rows]
        return replace(self, images=images, listed=listed, windows=None if self.windows is None else self.windows[rows])

    def repeat(self, times: int) -> Batch:
        """The same said of so many blocks of its images."""
        listed = None if self.listed is None else self.listed * times
        windows = None if self.windows is None else self.windows * times
        return replace(self, images=self.images * times, listed=listed, windows=windows)

    def run(self, model: Callable[..., Any]) -> Any:
        """What the model gives for these arguments. Raises `ImageError` where it takes no list of pictures."""
        if self.listed is None:
            return model(*self.args, **self.kwargs)
        sizes = self.listed * (len(self.pictures) // len(self.listed))
        pictures: Any = [picture[:, :height, :width] for picture, (height, width) in zip(self.pictures, sizes)]
        given = map_tensors((self.args, self.kwargs), lambda it: pictures if it is self.pictures else it)
        try:
            return model(*given[0], **given[1])
        except (TypeError, AttributeError) as error:
            if not pytorch.says(error, pytorch.TAKES_LISTS):
                raise
            raise ImageError(
                f"The images are a list of {len(pictures)} tensors {tuple(pictures[0].shape)}, expected one tensor "
                "(N,C,H,W): pass torch.stack(images), or image[None] for one image. Models that take lists are usually "
                "detectors."
            ) from error

    def copy(self, change: Callable[[Tensor], Tensor] = torch.Tensor.clone, pictures: Tensor | None = None) -> Batch:
        """The arguments for another run, since a model may change its own in place: copies, or what `change` gives.
        `pictures` take the place of the pictures."""
        new = change(self.pictures) if pictures is None else pictures
        args, kwargs = map_tensors((self.args, self.kwargs), lambda it: new if it is self.pictures else change(it))
        return replace(self, args=args, kwargs=kwargs, pictures=new)


def to_arguments(images: Any) -> Arguments:
    """What the caller gave, as arguments: a tuple's are positional, a mapping's have names, anything else is the only
    one. Raises `ImageError` for a mapping from anything but names."""
    if not isinstance(images, Mapping):  # and not only a dict: Hugging Face's processors give one of their own
        return images if isinstance(images, tuple) else (images,), {}
    if not all(isinstance(key, str) for key in images):
        raise ImageError(f"The images have the keys {list(images)}, expected the names of the model's arguments.")
    return (), dict(images)


def to_inputs(images: Any) -> Arguments:
    """What the caller gave, pictures or not, as arguments. Raises `ImageError` where there is no tensor in it."""
    args, kwargs = to_arguments(images)
    if not tensors((args, kwargs)):
        raise ImageError(f"The images are {type(images).__name__}, expected a tensor, or a tuple or dict with tensors.")
    return args, kwargs


def to_batch(images: Any) -> Batch:
    """What the caller gave, as arguments: a tensor of pictures, a list of them (C,H,W) for a model that takes that, or
    either among other arguments. A batch stays what it is. Raises `ImageError` where there is no floating (N,C,H,W) or
    (N,C,D,H,W) in it."""
    if isinstance(images, Batch):
        return images
    args, kwargs = to_arguments(images)
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and value and all(map(_is_picture, value)):
            return _to_listed(value, args, kwargs)
    given = tensors((args, kwargs))
    if any(tensor.is_nested for tensor in given):
        raise ImageError("The images are a nested tensor, expected a batch of images of one size (N,C,H,W).")
    first = next((tensor for tensor in given if tensor.is_floating_point() and tensor.ndim in (4, 5)), None)
    if first is None:
        what = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in given) or type(images).__name__
        if isinstance(images, (list, tuple)) and given and all(map(_is_picture, given)):
            raise ImageError(
                f"The images are a {type(images).__name__} of {len(given)} tensors {tuple(given[0].shape)}, expected one "
                "tensor (N,C,H,W): pass torch.stack(images), or image[None] for one image. Detectors take a list of images."
            )
        if any(tensor.is_floating_point() and tensor.ndim in (2, 3) for tensor in given) and len(given) > 1:
            raise ImageError(
                f"The inputs are {what}, expected a floating-point tensor (N,C,H,W) or (N,C,D,H,W) among them. Models whose "
                "processor cuts images into rows of patches, such as Qwen2-VL, are not supported: use a model that takes "
                "whole images, such as LLaVA, InternVL or Gemma 3."
            )
        raise ImageError(
            f"The images are {what}, expected a floating-point tensor (N,C,H,W) or (N,C,D,H,W), alone or in a tuple or "
            "dict. Preprocess the images, and add the batch dimension of a single image with image[None]."
        )
    if 0 in first.shape:
        raise ImageError(f"The images are {tuple(first.shape)}: an empty tensor cannot be explained.")
    return Batch(args, kwargs, first, len(first), tuple(first.shape[2:]), first.device)


def _is_picture(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point() and not value.is_nested


def _to_listed(pictures: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    first, sizes = pictures[0], tuple(tuple(it.shape[1:]) for it in pictures)
    kinds = {(it.shape[0], it.dtype, it.device) for it in pictures}
    if len(kinds) > 1 or any(0 in it.shape for it in pictures):
        what = ", ".join(f"{tuple(it.shape)} {it.dtype} on {it.device}" for it in pictures[:4])
        raise ImageError(f"The images are {what}, expected (C,H,W) with equal channels, dtype and device.")
    height, width = (max(sides) for sides in zip(*sizes))
    joined = first.new_zeros(len(pictures), first.shape[0], height, width)
    for place, picture in zip(joined, pictures):
        place[:, : picture.shape[1], : picture.shape[2]] = picture.detach()
    args = tuple(joined if it is pictures else it for it in args)
    kwargs = {name: joined if it is pictures else it for name, it in kwargs.items()}
    return Batch(args, kwargs, joined, len(pictures), (height, width), joined.device, sizes)


def caller_keeps(tensor: Tensor) -> Tensor:
    """What the model gets of a tensor of the caller's: outside inference mode, and nothing that is recorded sticks to it."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()
