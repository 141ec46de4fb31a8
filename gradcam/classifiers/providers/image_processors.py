"""transformers' image processors: they compute the values themselves; where in a picture these are from is worked out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from gradcam.classifiers.preprocessing import Preprocessing
from gradcam.errors import ImageError, ModelError
from gradcam.images import Pixels, Region, check_pixels

WARPED_FROM = 384  # ConvNeXt's processor takes no centre from this size on
ALIKE = 0.98  # correlation of what a processor gives with what the same steps give; 0.6 where they are off by a crop


@dataclass(frozen=True, eq=False)
class ProcessorPreprocess:
    """An image processor of transformers, with the part of a picture that its result shows.

    `plain`: the same as steps that can be changed, where there are such. `is_known`: whether its steps are understood;
    otherwise the whole picture is taken to be seen.
    """

    processor: Any = field(repr=False)
    plain: Preprocessing | None
    is_known: bool = True

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """An RGB picture, uint8 (H,W,3), as float32 (C,h,w): what the processor gives.

        Of deeper values it would keep 8 bits: those go through the same steps of our own, where they are known.
        Raises `ImageError` where they are not.
        """
        if image.dtype != np.uint8 or image.ndim != 3:
            return self._prepare_deep(image)
        # Of an array, a processor would have to guess which axis the channels are on.
        values = self.processor(Image.fromarray(check_pixels(image)), return_tensors="pt")["pixel_values"]
        tensor: Tensor = values[0]
        return tensor

    def _prepare_deep(self, image: NDArray[Any]) -> Tensor:
        if not self.is_known:
            raise ImageError(
                f"The picture is {image.dtype} {image.shape}, and {type(self.processor).__name__} takes RGB of 8 bits: save "
                "it as that, or give a reader that makes it."
            )
        tensor = find_steps(self.processor, *image.shape[:2])(image)
        return tensor.flip(0) if getattr(self.processor, "do_flip_channel_order", False) else tensor

    def region(self, height: int, width: int) -> Region:
        """The part of a picture that the network sees: (top, left, height, width), in whole pixels."""
        if not self.is_known:
            return 0, 0, height, width
        return find_steps(self.processor, height, width).region(height, width)


def make_preprocess(processor: Any) -> tuple[ProcessorPreprocess, Sequence[str]]:
    """A processor as preprocessing, and a note where it does something that is not understood."""
    name = type(processor).__name__
    first: Preprocessing | None = None
    second: Preprocessing | None = None
    with contextlib.suppress(AttributeError, TypeError, ValueError, KeyError, ZeroDivisionError, ModelError):
        first, second = (find_steps(processor, *size) for size in ((300, 400), (400, 300)))
    found = ProcessorPreprocess(processor, None, is_known=False)
    picture = _make_picture()
    try:
        values = found(picture)
    except Exception as error:  # a configuration that contradicts itself
        raise ModelError(f"The image processor, {name}, prepares no picture: {' '.join(str(error).split())}") from error
    if first is None or not _does_alike(first, picture, values):
        return found, [f"What part of a picture {name} takes is not known here: maps are drawn on all of it."]
    is_plain = first == second and not getattr(processor, "do_flip_channel_order", False)
    return ProcessorPreprocess(processor, first if is_plain else None), []


def find_steps(processor: Any, height: int, width: int) -> Preprocessing:
    """What a processor's configuration says that it does with a picture of this size."""
    if hasattr(processor, "data_config"):  # the one that wraps timm's transforms
        from gradcam.classifiers.providers.timm import to_preprocessing

        return to_preprocessing(processor.data_config)
    resize = _find_resize(processor, height, width)
    resized = resize if isinstance(resize, tuple) else _scale(height, width, resize / min(height, width))
    mean, std = _find_statistics(processor)
    return Preprocessing(
        size=_find_crop(processor) or resized,
        # Where nothing is cut away, the shorter side alone would not say what the other becomes.
        resize=resize if _find_crop(processor) else resized,
        mean=mean,
        std=std,
        interpolation=Image.Resampling(2 if processor.resample is None else processor.resample).name.lower(),
    )


def _find_resize(processor: Any, height: int, width: int) -> int | tuple[int, int]:
    if not processor.do_resize:
        return height, width
    size = processor.size
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    if _has_share(processor):
        is_warped = shortest >= WARPED_FROM
        return (shortest, shortest) if is_warped else int(shortest / processor.crop_pct)
    if size.get("height") and size.get("width"):
        return size["height"], size["width"]
    if shortest and longest:
        scale = min(shortest / min(height, width), longest / max(height, width))
        return _scale(height, width, scale)
    if shortest:
        return int(shortest)
    return _scale(height, width, min(size["max_height"] / height, size["max_width"] / width))


def _scale(height: int, width: int, scale: float) -> tuple[int, int]:
    return int(height * scale + 1e-9), int(width * scale + 1e-9)


def _find_crop(processor: Any) -> tuple[int, int] | None:
    """The size of the centre that is taken, None where all is."""
    if getattr(processor, "do_center_crop", False):
        return processor.crop_size["height"], processor.crop_size["width"]
    if processor.do_resize and _has_share(processor) and processor.size["shortest_edge"] < WARPED_FROM:
        return processor.size["shortest_edge"], processor.size["shortest_edge"]
    return None


def _has_share(processor: Any) -> bool:
    """Whether the size is that of the centre, as ConvNeXt's processor has it."""
    return getattr(processor, "crop_pct", None) is not None and processor.size.get("shortest_edge") is not None


def _find_statistics(processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of values in [0,1], of which processors may make others first."""
    scale = processor.rescale_factor * 255 if processor.do_rescale else 255.0
    offset = 1.0 if getattr(processor, "rescale_offset", False) else 0.0
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
    means, stds = (np.broadcast_to(np.asarray(values, dtype=np.float64), 3) for values in (mean, std))
    return tuple(((means + offset) / scale).tolist()), tuple((stds / scale).tolist())


def _make_picture() -> Pixels:
    """Coarse random blocks: another part of them looks another way."""
    blocks = np.random.default_rng(0).integers(0, 256, (12, 16), dtype=np.uint8)
    return np.repeat(blocks.repeat(25, 0).repeat(25, 1)[..., None], 3, 2)


def _does_alike(steps: Preprocessing, picture: Pixels, values: Tensor) -> bool:
    """Whether these steps show the same part of a picture as what a processor gave; some pad, which steps cannot."""
    with contextlib.suppress(ValueError):
        return _is_alike(values, steps(picture))
    return False


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors show the same part of a grey picture, whatever their scale."""
    if one.shape[1:] != other.shape[1:]:
        return False
    pair = torch.stack([tensor.float().mean(0).flatten() for tensor in (one, other)])
    return torch.corrcoef(pair)[0, 1].item() > ALIKE
