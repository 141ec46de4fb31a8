"""What maps are judged on: pictures, a model, and how probable it finds the explained classes in variants of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.explain import Explanation
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError, join_names, nearest, shorten
from gradcam.hooks.memory import Halving
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import unwrap
from gradcam.models.results import to_probabilities
from gradcam.options import check_count
from gradcam.targets.classes import check_classes

BASELINES = ("blur", "mean", "zero")
RADIUS = 5  # of the blur in a picture of `SIDE` pixels: 11 x 11, with a standard deviation of 5, as in RISE's code
SIDE = 224
CUT = 4  # standard deviations, as SciPy's filter has it
# In one pass of the model. On a processor larger batches take longer, since what lies between two layers leaves its caches.
PIXELS = 32 * 224 * 224
PIXELS_ON_CPU = 4 * 224 * 224


class Subject:
    """A model, N images and one class of each image: the input of all metrics, for heatmaps from any library.

    All metrics share the probabilities of the images and of the baselines, which are computed once. The model runs in
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
        Batch size; None chooses one that suits the image size. If memory runs out, the batch size is halved.

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
        If the images are not a floating tensor (N,C,H,W).
    TargetError
        If a class is invalid.
    ModelError
        If the model's output is NaN or infinite.
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
            raise ImageError(
                f"The images are {describe(images)}, expected preprocessed images, a floating-point tensor (N,C,H,W)."
            )
        if batch_size is not None:
            check_count(batch_size, "Subject: batch_size", "an int, 1 or more.")
        self.model = unwrap(model)
        self.images = images.detach()
        self.activation = activation
        most = PIXELS_ON_CPU if images.device.type == "cpu" else PIXELS
        fitting = max(1, most // max(1, images.shape[2] * images.shape[3]))
        self._parts = Halving(fitting if batch_size is None else batch_size)
        self._baselines: dict[str, Tensor] = {}
        self._of_baselines: dict[str, Tensor] = {}
        with preserve_state(self.model), torch.no_grad():
            self.all_probabilities = _require_finite(torch.cat(list(self._run([self.images]))))
        check_probabilities(self.all_probabilities.shape[1], activation)
        if classes is None:
            self.classes = self.all_probabilities.argmax(1)
        else:
            found = check_classes(classes, *self.all_probabilities.shape)
            if (count := found.shape[1]) != 1:
                raise TargetError(f"There are {count} classes per image, expected one: evaluate one class at a time.")
            self.classes = found[:, 0].to(self.images.device)
        self.probabilities = self.all_probabilities.gather(1, self.classes[:, None])[:, 0]

    @property
    def size(self) -> tuple[int, int, int]:
        """(N,H,W): the shape of the heatmaps."""
        return (len(self.images), *self.images.shape[2:])

    def baseline(self, kind: str) -> Tensor:
        """Return the baseline that replaces hidden pixels. It is computed only once.

        Parameters
        ----------
        kind : str
            "blur", "mean" or "zero".

        Returns
        -------
        Tensor (N,C,H,W)
            The baseline, of the images' type.

        Raises
        ------
        GradcamError
            If the kind is unknown.
        """
        if not isinstance(kind, str) or kind not in self._baselines:
            self._baselines[kind] = make_baseline(self.images, kind)
        return self._baselines[kind]

    def baseline_probabilities(self, kind: str) -> Tensor:
        """Return the classes' probabilities for the baseline. They are computed only once.

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
        if kind not in self._of_baselines:
            (self._of_baselines[kind],) = self.score([baseline])
        return self._of_baselines[kind]

    def score(self, variants: Iterable[Tensor]) -> Tensor:
        """Return the classes' probabilities for variants of the images, computed in batches.

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
        found = torch.cat(parts) if parts else self.probabilities[:0]
        return _require_finite(found).reshape(-1, len(self.images))

    def _run(self, variants: Iterable[Tensor]) -> Iterator[Tensor]:
        """All classes' probabilities, batch by batch, whichever variants the rows of a batch are of."""

        def to_rows() -> Iterator[Tensor]:
            for variant in variants:
                if variant.shape != self.images.shape:
                    expected = f"expected the images' shape {tuple(self.images.shape)}."
                    raise ImageError(f"A variant is {describe(variant)}, {expected}")
                yield from variant.split(1)

        def run(images: Tensor) -> Tensor:
            found = to_probabilities(self.model(images), len(images), self.activation)
            return found.to(self.images.device, torch.float32)  # a model may lie on several devices

        rows = to_rows()
        while batch := list(islice(rows, self._parts.largest)):
            yield from self._parts.run(run, torch.cat(batch))  # a copy: what a model changes in place is nobody's


def check_probabilities(classes: int, activation: str) -> None:
    """Raises `ModelError` for a model whose single output is a value: it has no probability to evaluate maps by."""
    if classes == 1 and activation == "none":
        advice = 'Use gradcam run instead. If the value is a logit, give --activation sigmoid (activation="sigmoid").'
        raise ModelError(f"The model's output is a single value, but evaluation needs probabilities. {advice}")


def _require_finite(probabilities: Tensor) -> Tensor:
    if not probabilities.isfinite().all():
        raise ModelError("The model's output contains NaN or infinite values: check the weights and the images.")
    return probabilities


def describe(value: Any, *kinds: Any) -> str:
    """A tensor, or another of these kinds, by its dtype and shape; anything else as it is, for a sentence."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, kinds or (Tensor,)) else shorten(value)


def make_baseline(images: Tensor, kind: str) -> Tensor:
    """What the pixels of images (N,C,H,W) are replaced with: the same shape, type and device. "blur": the image,
    blurred by the very kernel of RISE's code (Petsiuk et al., BMVC 2018) where the shorter side is 224:
    `scipy.ndimage.gaussian_filter` of one pixel in 11 x 11, with a standard deviation of 5; what of the Gaussian lies
    outside is mirrored back into it, so that it is nearly a mean of these. For other sizes it is in proportion, 3 x 3
    at least. Around the image is zero, as there. "mean": each image's own mean per channel. "zero": zero, which after
    the usual preprocessing is the training pictures' mean colour, or a grey. Raises `GradcamError` for another kind."""
    if not isinstance(kind, str) or kind not in BASELINES:
        offers = nearest(kind, BASELINES) if isinstance(kind, str) else []
        raise GradcamError(f"There is no baseline {shorten(kind)}. Choose {join_names(offers or BASELINES)}.")
    if kind == "zero":
        return torch.zeros_like(images)
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    if kind == "mean":
        return torch.zeros_like(images) + values.mean((2, 3), keepdim=True).to(images.dtype)
    radius = max(1, int(RADIUS * min(images.shape[2:]) / SIDE + 0.5))
    width = 2 * radius + 1
    # A row of the kernel: a Gaussian whose standard deviation is the radius, mirrored; then a convolution down, one across.
    offsets = torch.arange(-CUT * radius, CUT * radius + 1, dtype=torch.int64, device="cpu")
    gaussian = torch.exp(-offsets.double().square() / (2 * radius**2))
    places = (offsets + radius) % (2 * width)
    inside = torch.minimum(places, 2 * width - 1 - places)
    row = torch.zeros(width, dtype=torch.float64, device="cpu").index_add(0, inside, gaussian / gaussian.sum())
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        kernel = row.to(values).reshape(shape).expand(images.shape[1], -1, -1, -1)
        values = nn.functional.conv2d(values, kernel, padding="same", groups=images.shape[1])
    return values.to(images.dtype)


def check_heatmaps(heatmaps: Any, size: Sequence[int] | None = None, device: torch.device | None = None) -> Tensor:
    """Heatmaps as float32 (N,H,W) on `device`: tensors or arrays (N,H,W) or (N,1,H,W), or an `Explanation` of one
    class. `size`: (N,H,W), that of the images, None where they do not matter. Values may be of any sign and scale.
    Raises `ImageError` for heatmaps of another form or size, and for NaN and infinite values."""
    try:
        found = to_tensor(heatmaps.heatmaps if isinstance(heatmaps, Explanation) else heatmaps)
    except (TypeError, ValueError, RuntimeError):
        raise ImageError(f"The heatmaps are {shorten(heatmaps)}, expected a tensor or an array (N,H,W).") from None
    if found.ndim == 4 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim != 3 or found.is_complex():
        raise ImageError(f"The heatmaps have the shape {tuple(found.shape)}, expected (N,H,W), one per image.")
    if size is not None and tuple(found.shape) != tuple(size):
        raise ImageError(
            f"The heatmaps have the shape {tuple(found.shape)}, expected {tuple(size)}: one per image, of its size. Resize "
            'them with torch.nn.functional.interpolate(maps[:, None], size=(H, W), mode="bilinear").'
        )
    found = found.to(device if device is not None else found.device, torch.float32)
    if not found.isfinite().all():
        raise ImageError("The heatmaps contain NaN or infinite values, which cannot be evaluated.")
    return found


def to_tensor(values: Any) -> Tensor:
    """A tensor itself, detached; arrays and nested sequences on the processor, whatever PyTorch's default device is."""
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def to_unit(heatmaps: Tensor) -> Tensor:
    """Heatmaps (N,H,W) in [0,1]: negative values are zero, and each is divided by its maximum; a blank one stays zero."""
    positive = heatmaps.clamp(min=0)
    largest = positive.amax((1, 2), keepdim=True)
    return positive / torch.where(largest > 0, largest, 1.0)


def draw(seed: int, *names: object) -> torch.Generator:
    """PyTorch's generator, on the CPU, for one seed and one purpose: the same numbers on every device."""
    return torch.Generator("cpu").manual_seed(derive(seed, *names))


def derive(seed: int, *names: object) -> int:
    """A seed of its own for one purpose."""
    text = "\n".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big") >> 1


def rank_pixels(heatmaps: Tensor, seed: int = 0) -> Tensor:
    """Each pixel's place in its map's order, int64 (N,H,W): 0 for the most relevant one, of heatmaps (N,H,W). Pixels of
    one value are in an order by chance, the same for the same seed: a constant map has no order by rows."""
    values = heatmaps.flatten(1)
    generator = draw(seed, "ties")
    shuffled = torch.randperm(values.shape[1], generator=generator, dtype=torch.int64, device="cpu").to(values.device)
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]
    places = torch.arange(values.shape[1], dtype=torch.int64, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places).reshape(heatmaps.shape)


def count_pixels(share: float, pixels: int) -> int:
    """How many pixels a share of them is, to the nearest; halves are rounded up."""
    return int(share * pixels + 0.5)
