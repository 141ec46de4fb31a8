"""Tensors inside tuples, lists, mappings and dataclasses, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from gradcam.errors import ImageError
from gradcam.hooks import pytorch

# Packages of static quantisation, whose modules quantise activations as well as weights.
STATICALLY_QUANTISED = ("torch.ao.nn.quantized.modules", "torch.ao.nn.intrinsic.quantized.modules")
STACK_ADVICE = "expected one tensor (N,C,H,W): pass torch.stack(images), or image[None] for one image."
RISE_ADVICE = "or use method='rise', which needs no gradient."
QUANTISED_ADVICE = f"8-bit integers, which have no gradient: explain the original floating-point model, {RISE_ADVICE}"


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, each once. The order differs from `model.modules()`, which takes six times as long."""
    modules, visited = [model], {model}
    for module in modules:  # The list grows during the loop.
        for child in module._modules.values() if module._modules else ():
            if child is not None and child not in visited:
                visited.add(child)
                modules.append(child)
    return modules


def list_tensors(value: Any) -> list[Tensor]:
    """Return every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, child in _children(value) for tensor in list_tensors(child)]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` applied to every tensor. Containers are copied, other objects are not."""
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
    copied = copy.copy(value)
    for key, child in children.items():
        if isinstance(copied, MutableMapping):
            copied[key] = child
        else:
            object.__setattr__(copied, key, child)  # Unlike `setattr`, this also works for frozen dataclasses.
    return copied


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return `value` with every occurrence of the tensor `old` replaced by `new`."""
    return map_tensors(value, lambda tensor: new if tensor is old else tensor)


def take_rows(output: Any, rows: slice, total: int) -> Any:
    """Return the part of a model's output for `total` images that belongs to the images in `rows`.

    The slice `rows` is applied to each tensor of length `total`, or to a list with one entry per image. Detectors
    return such lists.
    """
    if isinstance(output, list) and len(output) == total and not any(isinstance(item, Tensor) for item in output):
        return output[rows]
    return map_tensors(output, lambda tensor: tensor[rows] if tensor.shape[:1] == (total,) else tensor)


def has_rows(output: Any, total: int) -> bool:
    """Return whether an output has an entry for each of `total` images."""
    is_list = isinstance(output, list) and len(output) == total
    return is_list or any(tensor.shape[:1] == (total,) for tensor in list_tensors(output))


def find_floating_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in `value`, or None."""
    return next((tensor for tensor in list_tensors(value) if tensor.is_floating_point()), None)


def floating_tensors_by_keys(value: Any) -> dict[tuple[str, ...], Tensor]:
    """Return the floating-point tensors in `value`, each once, by the keys and indices that lead to the tensor."""
    if isinstance(value, Tensor):
        return {(): value} if value.is_floating_point() else {}
    entries: dict[int, tuple[tuple[str, ...], Tensor]] = {}
    for key, child in _children(value):
        for keys, tensor in floating_tensors_by_keys(child).items():
            entries.setdefault(id(tensor), ((str(key), *keys), tensor))
    return dict(entries.values())


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    # Check for mappings first: Hugging Face's ModelOutput is also a dataclass, but its items omit fields with None.
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def is_quantised(values: Any) -> bool:
    """Return True if `values` contains a quantised tensor, or is a model with quantised activations."""
    if isinstance(values, nn.Module):
        return any(type(module).__module__.startswith(STATICALLY_QUANTISED) for module in values.modules())
    return any(tensor.is_quantized for tensor in list_tensors(values))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LayerInput:
    """A tensor among a layer's inputs, and the tensor passed to the layer instead.

    `given` is `original` or a copy of `original`. `version` is the version of `given` before the layer ran.
    """

    original: Tensor
    given: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        return version_of(self.given) != self.version

    def replace(self, values: Tensor) -> Tensor:
        """Copy `values` into `original`, for later uses of this tensor, and return the tensor that holds the values.

        In two cases, `original` stays unchanged, and its later uses are not recorded. A parameter would keep the graph
        alive after the pass. If a view without a graph were changed, autograd would reject all other views of its
        memory.
        """
        original = self.original
        is_unrecorded_view = pytorch.is_view(original) and not original.requires_grad
        if original is values or is_unrecorded_view or isinstance(original, nn.Parameter):
            return values
        return original.copy_(values)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count changes."""
    try:
        return tensor._version
    except RuntimeError:  # The check whether a tensor is an inference tensor takes longer.
        return 0


def copy_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[LayerInput], Arguments | None]:
    """Return a layer's input tensors, and the layer's new arguments, or None if the arguments stay the same.

    If an earlier target layer is recording, the layer gets copies of its inputs. Autograd may have saved the original
    inputs, so an in-place change by the layer would be an error.
    """
    if len(args) == 1 and not kwargs and isinstance(tensor := args[0], Tensor) and not tensor.requires_grad:
        return [LayerInput(tensor, tensor, version_of(tensor))], None
    copies: dict[int, Any] = {
        id(tensor): tensor.clone()
        for tensor in (*args, *kwargs.values())
        if isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    }
    pairs = [(tensor, copies.get(id(tensor), tensor)) for tensor in list_tensors((args, kwargs))]
    inputs = [LayerInput(tensor, passed, version_of(passed)) for tensor, passed in pairs]
    if not copies:
        return inputs, None
    new_kwargs = {key: copies.get(id(value), value) for key, value in kwargs.items()}
    return inputs, (tuple(copies.get(id(value), value) for value in args), new_kwargs)


Window = tuple[float, float, float, float]  # (top, left, height, width) in pixels


@dataclass(frozen=True)
class Batch:
    """The arguments of a model, and the images among them.

    `pictures` is the tensor with the images, `images` is their number, and `size` is their (H,W) or (D,H,W). If the
    model takes a list of images (C,H,W), `listed` has the sizes of these images. The arguments then contain `pictures`
    instead of the list. In `pictures`, each image lies in the upper left corner, and the rest is filled with zeros. If
    images do not cover the entire input of the network, `windows` has the part that each image covers. If images reach
    the model in pieces, `pieces` is a `layers.pieces.Pieces`. A sample, such as a prompt, may then have several images.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pictures: Tensor
    images: int
    size: tuple[int, ...]
    device: torch.device
    listed: tuple[tuple[int, ...], ...] | None = None
    windows: tuple[Window, ...] | None = None
    pieces: Any = None

    @property
    def samples(self) -> int:
        """Return the number of samples, which is the number of rows in the model's output."""
        return self.images if self.pieces is None else max(self.pieces.samples) + 1

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Return the size of each image, without padding."""
        if self.pieces is not None:
            return list(self.pieces.sizes)
        if self.windows is not None:
            return [tuple(max(1, round(length)) for length in window[2:]) for window in self.windows]
        return [self.size] * self.images if self.listed is None else list(self.listed)

    def take(self, images: int, first: int = 0) -> Batch:
        """Return the batch with the metadata of `images` images, starting at `first`. Slice the tensors beforehand."""
        rows = slice(first, first + images)
        listed, windows = self.listed and self.listed[rows], self.windows and self.windows[rows]
        return replace(self, images=images, listed=listed, windows=windows)

    def repeat(self, times: int) -> Batch:
        """Return the batch with its metadata repeated `times` times. Repeat the tensors beforehand."""
        listed, windows = self.listed and self.listed * times, self.windows and self.windows * times
        return replace(self, images=self.images * times, listed=listed, windows=windows)

    def run(self, model: Callable[..., Any]) -> Any:
        """Return the model's output for these arguments.

        Raises `ImageError` if the model does not take a list of images.
        """
        if self.listed is None:
            return model(*self.args, **self.kwargs)
        sizes = self.listed * (len(self.pictures) // len(self.listed))
        pictures: Any = [picture[:, :height, :width] for picture, (height, width) in zip(self.pictures, sizes)]
        arguments = map_tensors((self.args, self.kwargs), lambda value: pictures if value is self.pictures else value)
        try:
            return model(*arguments[0], **arguments[1])
        except (TypeError, AttributeError) as error:
            if not pytorch.message_contains(error, pytorch.TAKES_LISTS):
                raise
            images = f"a list of {len(pictures)} tensors {tuple(pictures[0].shape)}"
            hint = "Usually, only detectors take a list of images."
            raise ImageError(f"The images are {images}, {STACK_ADVICE} {hint}") from error

    def copy(self, change: Callable[[Tensor], Tensor] = torch.Tensor.clone, pictures: Tensor | None = None) -> Batch:
        """Return the batch with copied arguments for another run, because a model may change arguments in place."""
        new = change(self.pictures) if pictures is None else pictures
        if len(self.args) == 1 and self.args[0] is self.pictures and not self.kwargs:
            return Batch((new,), {}, new, self.images, self.size, self.device, self.listed, self.windows, self.pieces)
        args, kwargs = map_tensors((self.args, self.kwargs), lambda x: new if x is self.pictures else change(x))
        return replace(self, args=args, kwargs=kwargs, pictures=new)


def to_arguments(images: Any) -> Arguments:
    """Return the caller's images as arguments of the model.

    A tuple holds positional arguments, and a mapping holds keyword arguments; anything else is the only argument.
    Raises `ImageError` if a mapping has keys that are not strings.
    """
    if isinstance(images, Tensor) or not isinstance(images, Mapping):  # HF processors return a mapping, not a dict.
        return images if isinstance(images, tuple) else (images,), {}
    if not all(isinstance(key, str) for key in images):
        raise ImageError(f"The images have the keys {list(images)}, expected the names of the model's arguments.")
    return (), dict(images)


def to_inputs(images: Any) -> Arguments:
    """Return the caller's inputs as arguments of the model. Raises `ImageError` if they contain no tensor."""
    args, kwargs = to_arguments(images)
    if not list_tensors((args, kwargs)):
        raise ImageError(f"The images are {type(images).__name__}, expected a tensor, or a tuple or dict with tensors.")
    return args, kwargs


def to_batch(images: Any) -> Batch:
    """Return the caller's images as a batch. A `Batch` is returned unchanged.

    The images may be a tensor, or a list of (C,H,W) for a model that takes lists, alone or among other arguments.
    Raises `ImageError` if there is no floating-point tensor (N,C,H,W) or (N,C,D,H,W).
    """
    if isinstance(images, Batch):
        return images
    args, kwargs = to_arguments(images)
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and value and all(map(_is_image, value)):
            return _to_padded_batch(value, args, kwargs)
    items = [images] if isinstance(images, Tensor) else list_tensors((args, kwargs))
    if any(tensor.is_nested for tensor in items):
        raise ImageError("The images are a nested tensor, expected a batch of images of one size (N,C,H,W).")
    first = next((tensor for tensor in items if tensor.is_floating_point() and tensor.ndim in (4, 5)), None)
    if first is None:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in items) or type(images).__name__
        if isinstance(images, (list, tuple)) and items and all(map(_is_image, items)):
            value = f"a {type(images).__name__} of {len(items)} tensors {tuple(items[0].shape)}"
            raise ImageError(f"The images are {value}, {STACK_ADVICE} Detectors take a list of images.")
        expected = "a floating-point tensor (N,C,H,W) or (N,C,D,H,W)"
        if any(tensor.is_floating_point() and tensor.ndim in (2, 3) for tensor in items) and len(items) > 1:
            reason = "Rows of patches are supported only for known models, such as Qwen2-VL and Qwen3-VL"
            raise ImageError(f"The inputs are {shapes}, and none of them is {expected}. {reason}.")
        advice = "Preprocess the images, and add the batch dimension of a single image with image[None]."
        raise ImageError(f"The images are {shapes}, expected {expected}, alone or in a tuple or dict. {advice}")
    if 0 in first.shape:
        raise ImageError(f"The images are {tuple(first.shape)}: an empty tensor cannot be explained.")
    return Batch(args, kwargs, first, len(first), tuple(first.shape[2:]), first.device)


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point() and not value.is_nested


def _to_padded_batch(pictures: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    first, sizes = pictures[0], tuple(tuple(picture.shape[1:]) for picture in pictures)
    formats = {(picture.shape[0], picture.dtype, picture.device) for picture in pictures}
    if len(formats) > 1 or any(0 in picture.shape for picture in pictures):
        shapes = ", ".join(f"{tuple(picture.shape)} {picture.dtype} on {picture.device}" for picture in pictures[:4])
        raise ImageError(f"The images are {shapes}, expected (C,H,W) with equal channels, dtype and device.")
    height, width = (max(sides) for sides in zip(*sizes))
    joined = first.new_zeros(len(pictures), first.shape[0], height, width)
    for padded, picture in zip(joined, pictures):
        padded[:, : picture.shape[1], : picture.shape[2]] = picture.detach()
    args = tuple(joined if value is pictures else value for value in args)
    kwargs = {name: joined if value is pictures else value for name, value in kwargs.items()}
    return Batch(args, kwargs, joined, len(pictures), (height, width), joined.device, sizes)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is more precise."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def detach_input(tensor: Tensor) -> Tensor:
    """Return a caller's tensor for use in the model: detached from the caller's graph, and not an inference tensor."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def swap_contents(tensor: Tensor, replacement: Tensor) -> bool:
    """Swap the contents of two tensor objects, and return True; return False if PyTorch forbids the swap.

    All references to one tensor then see the contents of the other. PyTorch forbids the swap if autograd has saved one
    of the tensors, or if one has a view or a weak reference.
    """
    attributes = dict(vars(tensor))
    try:
        swap_tensors(tensor, replacement)
    except RuntimeError:
        return False
    vars(tensor).update(attributes)
    return True
