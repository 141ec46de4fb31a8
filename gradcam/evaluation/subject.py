"""The subject of an evaluation: a model and images, and the class probabilities of the images and their variants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.explain import Explanation
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError, find_similar_names, join_names, shorten
from gradcam.hooks.containers import at_least_float32
from gradcam.hooks.memory import HalvingRunner
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.options import check_count
from gradcam.targets.classes import check_classes, to_probabilities
from gradcam.targets.heads import MAX_SUM_ERROR

BASELINES = ("blur", "mean", "zero")
BLUR_RADIUS_PIXELS = 5  # radius for images with a shorter side of `BLUR_IMAGE_PIXELS`, as in RISE's code
BLUR_IMAGE_PIXELS = 224
TRUNCATE_DEVIATIONS = 4  # The Gaussian is cut off at this many standard deviations, as in SciPy.
# Batches are smaller on a CPU, because the activations of larger batches do not fit in the CPU's caches.
MAX_PIXELS_PER_BATCH = 32 * 224 * 224
MAX_PIXELS_PER_BATCH_ON_CPU = 4 * 224 * 224


class Subject:
    """A model, N images and one class per image: the input of all metrics. The heatmaps may come from any library.

    The probabilities of the images and of the baselines are computed once, and shared by all metrics. The model runs in
    evaluation mode and is left unchanged. All tensors are on the images' device.

    Parameters
    ----------
    model : nn.Module
        The model.
    images : Tensor (N,C,H,W)
        Preprocessed images.
    classes : int or sequence of int, default None
        One class for all images, or N classes; None for the top class of each image.
    activation : str, default "auto"
        How logits become probabilities, as in `targets.ClassTarget`.
    batch_size : int, default None
        Batch size; None chooses the batch size by the image size. If memory runs out, the batch size is halved.

    Attributes
    ----------
    classes : Tensor (N,)
        The classes, int64.
    probabilities : Tensor (N,)
        The probabilities of these classes, float32.
    all_probabilities : Tensor (N,C)
        The probabilities of all classes, float32.

    Raises
    ------
    ImageError
        If the images are not a floating-point tensor (N,C,H,W).
    TargetError
        If a class is invalid.
    ModelError
        If the model's output is NaN or infinite, or if its values are not probabilities.
    GradcamError
        If the batch size is invalid.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> subject = gradcam.evaluation.Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> subject.classes, subject.size
    (tensor([285]), (1, 224, 224))
    >>> mirrored = subject.images.flip(3)
    >>> subject.score([subject.baseline("blur"), mirrored]).shape
    torch.Size([2, 1])
    >>> subject.baseline_probabilities("blur") < subject.probabilities
    tensor([True])
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        classes: Any = None,
        *,
        activation: str = "auto",
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not len(images):
            expected = "preprocessed images, a floating-point tensor (N,C,H,W)"
            raise ImageError(f"The images are {describe_tensor(images)}, expected {expected}.")
        if batch_size is not None:
            check_count(batch_size, "Subject: batch_size", "an int, 1 or more.")
        self.model = unwrap(model)
        self.images = images.detach()
        self.activation = activation
        max_pixels = MAX_PIXELS_PER_BATCH_ON_CPU if images.device.type == "cpu" else MAX_PIXELS_PER_BATCH
        self._batches = HalvingRunner(batch_size or max(1, max_pixels // max(1, images.shape[2] * images.shape[3])))
        self._baselines: dict[str, Tensor] = {}
        self._baseline_probabilities: dict[str, Tensor] = {}
        with preserve_state(self.model), torch.no_grad():
            self.all_probabilities = _require_finite(torch.cat(list(self._run([self.images]))))
        check_probabilities(self.all_probabilities.shape[1], activation)
        if activation == "none":
            _require_unit_interval(self.all_probabilities)
        if classes is None:
            self.classes = self.all_probabilities.argmax(1)
        else:
            indices = check_classes(classes, *self.all_probabilities.shape)
            if (count := indices.shape[1]) != 1:
                raise TargetError(f"There are {count} classes per image, expected one: evaluate one class at a time.")
            self.classes = indices[:, 0].to(self.images.device)
        self.probabilities = self.all_probabilities.gather(1, self.classes[:, None])[:, 0]

    @property
    def size(self) -> tuple[int, int, int]:
        """Return the shape (N,H,W) of the heatmaps."""
        return (len(self.images), *self.images.shape[2:])

    def baseline(self, kind: str) -> Tensor:
        """Return the baseline, which supplies the values of hidden pixels. Each baseline is computed only once.

        Parameters
        ----------
        kind : str
            "blur", "mean" or "zero".

        Returns
        -------
        Tensor (N,C,H,W)
            The baseline, with the images' dtype.

        Raises
        ------
        GradcamError
            If the kind is unknown.
        """
        if not isinstance(kind, str) or kind not in self._baselines:
            self._baselines[kind] = make_baseline(self.images, kind)
        return self._baselines[kind]

    def baseline_probabilities(self, kind: str) -> Tensor:
        """Return the probability of each image's class if the model gets the baseline instead of the image.

        The probabilities are computed only once.

        Parameters
        ----------
        kind : str
            As in `baseline`.

        Returns
        -------
        Tensor (N,)
            float32.

        Raises
        ------
        GradcamError
            As in `baseline` and `score`.
        """
        baseline = self.baseline(kind)
        if kind not in self._baseline_probabilities:
            (self._baseline_probabilities[kind],) = self.score([baseline])
        return self._baseline_probabilities[kind]

    def score(self, variants: Iterable[Tensor]) -> Tensor:
        """Return the probability of each image's class for variants of the images, computed in batches.

        Parameters
        ----------
        variants : iterable of Tensor (N,C,H,W)
            V variants of the images.

        Returns
        -------
        Tensor (V,N)
            float32.

        Raises
        ------
        ImageError
            If a variant does not have the images' shape.
        ModelError
            If a probability is NaN.
        """
        classes = cycle(self.classes.split(1))
        with preserve_state(self.model), torch.no_grad():
            parts = [
                probabilities.gather(1, torch.cat(list(islice(classes, len(probabilities))))[:, None])
                for probabilities in self._run(variants)
            ]
        return _require_finite(torch.cat(parts or [self.probabilities[:0]])).reshape(-1, len(self.images))

    def _run(self, variants: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the probabilities of all classes, batch by batch. A batch may contain images of several variants."""

        def iterate_rows() -> Iterator[Tensor]:
            for variant in variants:
                if variant.shape != self.images.shape:
                    expected = tuple(self.images.shape)
                    raise ImageError(
                        f"A variant of the images is {describe_tensor(variant)}, expected the images' shape {expected}."
                    )
                yield from variant.split(1)

        def run(images: Tensor) -> Tensor:
            probabilities = to_probabilities(self.model(images), len(images), self.activation)
            return probabilities.to(self.images.device, torch.float32)  # The model's output may be on another device.

        rows = iterate_rows()
        while batch := list(islice(rows, self._batches.largest)):
            yield from self._batches.run(run, torch.cat(batch))  # `cat` copies, so the model cannot change the images.


def check_probabilities(classes: int, activation: str) -> None:
    """Raise `ModelError` if the model outputs a single value that is not a probability."""
    if classes == 1 and activation == "none":
        advice = 'Use gradcam run instead. If the value is a logit, give --activation sigmoid (activation="sigmoid").'
        raise ModelError(f"The model's output is a single value, but evaluation needs probabilities. {advice}")


def _require_finite(probabilities: Tensor) -> Tensor:
    if not probabilities.isfinite().all():
        raise ModelError("The model's output contains NaN or infinite values: check the weights and the images.")
    return probabilities


def _require_unit_interval(values: Tensor) -> None:
    worst = float(values.flatten()[(values - 0.5).abs().argmax()])
    if not -MAX_SUM_ERROR <= worst <= 1 + MAX_SUM_ERROR:
        advice = "Use gradcam run instead. If the values are logits, give --activation softmax (activation= in Python)."
        raise ModelError(f"The model's output contains {worst:.4g}, but evaluation needs probabilities. {advice}")


def describe_tensor(value: Any, *kinds: Any) -> str:
    """Return the dtype and shape if `value` is a Tensor (or has a type in `kinds`), otherwise the shortened repr."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, kinds or (Tensor,)) else shorten(value)


def make_baseline(images: Tensor, kind: str) -> Tensor:
    """Return the values that replace hidden pixels in images (N,C,H,W). Raise `GradcamError` for an unknown kind.

    "blur" is the blurred image. If the shorter side has 224 pixels, the kernel equals the kernel in RISE's code
    (Petsiuk et al., BMVC 2018). RISE applies `scipy.ndimage.gaussian_filter`, with a standard deviation of 5, to an
    11x11 array with a single non-zero pixel. SciPy reflects the tails of the Gaussian at the array's edges, so the
    kernel is nearly a box filter. For other image sizes, the kernel size is proportional to the shorter side, and at
    least 3 x 3. The image is padded with zeros, as in RISE's code. "mean" is each image's mean per channel. "zero" is 0.
    After the usual normalisation, 0 is the mean colour of the training images, or grey.
    """
    if not isinstance(kind, str) or kind not in BASELINES:
        offers = find_similar_names(kind, BASELINES) if isinstance(kind, str) else []
        raise GradcamError(f"There is no baseline {shorten(kind)}. Choose {join_names(offers or BASELINES)}.")
    if kind == "zero":
        return torch.zeros_like(images)
    values = at_least_float32(images)
    if kind == "mean":
        return torch.zeros_like(images) + values.mean((2, 3), keepdim=True).to(images.dtype)
    radius = max(1, int(BLUR_RADIUS_PIXELS * min(images.shape[2:]) / BLUR_IMAGE_PIXELS + 0.5))
    width = 2 * radius + 1
    # The kernel is separable, so two one-dimensional convolutions suffice. The radius is also the standard deviation.
    tail = TRUNCATE_DEVIATIONS * radius
    offsets = torch.arange(-tail, tail + 1, dtype=torch.int64, device="cpu")
    gaussian = torch.exp(-offsets.double().square() / (2 * radius**2))
    wrapped = (offsets + radius) % (2 * width)
    mirrored = torch.minimum(wrapped, 2 * width - 1 - wrapped)
    weights = torch.zeros(width, dtype=torch.float64, device="cpu").index_add(0, mirrored, gaussian / gaussian.sum())
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        kernel = weights.to(values).reshape(shape).expand(images.shape[1], -1, -1, -1)
        values = nn.functional.conv2d(values, kernel, padding="same", groups=images.shape[1])
    return values.to(images.dtype)


def check_heatmaps(heatmaps: Any, size: Sequence[int] | None = None, device: torch.device | None = None) -> Tensor:
    """Validate heatmaps and convert to float32 (N,H,W) on `device`. Values may have any sign and scale.

    Valid inputs are tensors and arrays (N,H,W) or (N,1,H,W), and an `Explanation` of one class. `size` is the required
    shape (N,H,W); None allows any size. Raise `ImageError` for other shapes, and for NaN and infinite values.
    """
    try:
        tensor = to_tensor(heatmaps.heatmaps if isinstance(heatmaps, Explanation) else heatmaps)
    except (TypeError, ValueError, RuntimeError):
        raise ImageError(f"The heatmaps are {shorten(heatmaps)}, expected a tensor or an array (N,H,W).") from None
    if tensor.ndim == 4 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 3 or tensor.is_complex():
        raise ImageError(f"The heatmaps have the shape {tuple(tensor.shape)}, expected (N,H,W), one per image.")
    if size is not None and tuple(tensor.shape) != tuple(size):
        raise ImageError(
            f"The heatmaps have the shape {tuple(tensor.shape)}, expected {tuple(size)}: one per image, of the same "
            "size as the image. "
            'Resize them with torch.nn.functional.interpolate(maps[:, None], size=(H, W), mode="bilinear").'
        )
    tensor = tensor.to(device if device is not None else tensor.device, torch.float32)
    if not tensor.isfinite().all():
        raise ImageError("The heatmaps contain NaN or infinite values, which cannot be evaluated.")
    return tensor


def to_tensor(values: Any) -> Tensor:
    """Return a detached tensor. Arrays and nested sequences go to the CPU, not to PyTorch's default device."""
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def to_batch(classifier: Classifier, images: Sequence[Tensor]) -> Tensor:
    """Stack images (C,H,W) into a batch (N,C,H,W) with the model's device and dtype."""
    return torch.stack(list(images)).to(classifier.device, find_input_dtype(classifier.model))


def scale_to_unit(heatmaps: Tensor) -> Tensor:
    """Scale heatmaps (N,H,W) to [0,1]: set negative values to zero, and divide by the maximum if it is not zero."""
    positive = heatmaps.clamp(min=0)
    largest = positive.amax((1, 2), keepdim=True)
    return positive / torch.where(largest > 0, largest, 1.0)


def correlate(first: Tensor, second: Tensor) -> Tensor:
    """Return Pearson's correlation of maps (N,...), or of one map and N maps: 1 if both are constant, 0 if one is."""
    first, second = (maps.flatten(1) - maps.flatten(1).mean(1, keepdim=True) for maps in (first, second))
    norms = first.norm(dim=1), second.norm(dim=1)
    cosines = torch.where(norms[0] * norms[1] > 1e-12, (first * second).sum(1) / (norms[0] * norms[1]), 0.0)
    return torch.where(norms[0] + norms[1] < 1e-9, 1.0, cosines).clamp(-1, 1)


def make_generator(seed: int, *names: object) -> torch.Generator:
    """Return a CPU generator for one seed and one purpose, so that all devices get the same random numbers."""
    return torch.Generator("cpu").manual_seed(derive_seed(seed, *names))


def derive_seed(seed: int, *names: object) -> int:
    """Return a seed for one purpose, so that different purposes use independent random numbers."""
    text = "\n".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") >> 1


def rank_pixels(heatmaps: Tensor, seed: int = 0) -> Tensor:
    """Return the rank of each pixel in heatmaps (N,H,W): int64 (N,H,W), 0 for the pixel with the highest value.

    Pixels of equal value are in a random order that depends only on the seed. Without the random order, the top rows of
    a constant heatmap would rank first.
    """
    values = heatmaps.flatten(1)
    generator = make_generator(seed, "ties")
    shuffled = torch.randperm(values.shape[1], generator=generator, dtype=torch.int64, device="cpu").to(values.device)
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    ranks = torch.arange(values.shape[1], dtype=torch.int64, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks).reshape(heatmaps.shape)


def count_pixels(share: float, pixels: int) -> int:
    """Return `share` times `pixels`, rounded to the nearest integer; halves are rounded up."""
    return int(share * pixels + 0.5)
