"""Record forward passes from the images onwards, and compute the gradients of scores at the images."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.deferred_checks import read_range
from gradcam.cam.dependence_warnings import warn_of_shared_statistics
from gradcam.cam.forward import caller_autocast, has_float16
from gradcam.errors import ImageError, ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import TranslatedErrors, jacobian
from gradcam.hooks.containers import Batch, at_least_float32, detach_input, has_rows, map_tensors, take_rows, to_batch
from gradcam.hooks.model_advice import ADVICE_IN_MODEL
from gradcam.hooks.preserve import preserve_state
from gradcam.images.write import ARRAY_SUFFIXES, check_suffix, write_arrays
from gradcam.layers.find import unwrap
from gradcam.options import Progress
from gradcam.targets.base import ScoreExtractor, bind_target
from gradcam.targets.classes import ClassTarget, compute_scores

# The memory for the gradients at the images in one backward pass, which limits the number of classes per pass. The
# gradients inside a network need up to twenty times as much memory.
GRADIENT_BUDGET_BYTES = 2**23
INPUT_FAILURES = ADVICE_IN_MODEL | {
    "the derivative for": (
        "The model contains an operation without a derivative, so the image has no gradient: use gradcam.explain() at a "
        "layer after that operation."
    )
}
Point = tuple[float, Tensor]  # (weight, images (N,C,...))


@dataclass(frozen=True, eq=False)
class Attribution:
    """Pixel attributions: how much each value of N images contributes to K scores.

    Tensors are on the images' device.

    Attributes
    ----------
    values : Tensor (N,K,C,H,W)
        float32; (N,K,C,D,H,W) for volumes. Values are signed, neither clipped nor normalised. Integrated gradients are
        in units of the score. The values of all other methods are changes of the score per unit change of
        a pixel.
    classes : Tensor (N,K) or None
        The explained classes, int64; None if the target was a function.
    scores : Tensor (N,K)
        The explained scores, float32.
    output : Any
        The model's output, detached.
    method : str
        The method's name.
    layer : str or None
        The target layer of Grad-CAM; None for other methods.
    gaps : Tensor (N,K) or None
        The completeness gap of integrated gradients, float32; None for other methods.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> attribution = gradcam.attributions.input_gradients(classifier.model, classifier.batch(["photo.jpg"]))
    >>> isinstance(attribution, gradcam.attributions.Attribution), attribution.classes.tolist()
    (True, [[285]])
    >>> attribution.save("gradients.npz")
    """

    values: Tensor
    classes: Tensor | None
    scores: Tensor
    output: Any = field(repr=False)
    method: str
    layer: str | None
    gaps: Tensor | None

    def __repr__(self) -> str:
        images, count, channels, *size = self.values.shape
        method = self.method if self.layer is None else f"{self.method} at {self.layer}"
        gap = "" if self.gaps is None else f"gap at most {self.gaps.abs().max().item():.2g}, "
        pixels = " x ".join(map(str, size))
        shape = f"{images} image(s), {count} score(s) each, {method}, {channels} channel(s) of {pixels}"
        return f"{type(self).__name__}({shape}, {gap}{self.values.device})"

    def save(self, path: str | os.PathLike[str], i: int | None = None, k: int | None = None) -> None:
        """Write the whole attribution to an ``.npz`` file, or the values (C,H,W) of one score to an ``.npy`` file.

        An ``.npz`` file has `values`, `classes`, `scores`, `gaps`, `method` and `layer`. If an attribute is None, it is
        left out.

        Parameters
        ----------
        path : str or path
            The file, ending in ``.npz`` or ``.npy``. The folder of the file must exist.
        i : int, default None
            The image to save; None for all.
        k : int, default None
            The score of that image to save; None for all.

        Raises
        ------
        ImageError
            If the suffix is neither ``.npz`` nor ``.npy``, if an ``.npy`` file would hold more than one score, if there
            is no such image or score, or if the file cannot be written.
        """
        if check_suffix(path) not in ARRAY_SUFFIXES:
            raise ImageError(
                f"{path}: this attribution has no image to draw on. Use gradcam.write_image({os.fspath(path)!r}, "
                "gradcam.attributions.draw_attribution(attribution.values[0, 0])), or save the attribution as .npz"
            )
        tensors = {name: getattr(self, name) for name in ("values", "classes", "scores", "gaps")}
        write_arrays(path, tensors, {"method": self.method, "layer": self.layer}, i, k)


@dataclass(frozen=True)
class AttributionPass:
    """A forward pass that autograd recorded, from the leaf (the images, (N,C,...)) to the scores (N,K)."""

    leaf: Tensor
    model_input: Tensor  # The copy of the leaf that the model received.
    output: Any
    scores: Tensor
    classes: Tensor | None
    target: Any  # A target that selects the same classes or objects in the output of another pass.


@dataclass(frozen=True)
class DifferentiableModel:
    """A model whose state is preserved, with the images (N,C,...) and the target of an attribution.

    `own_output` extracts the output of the user's model from the output of `model`. If both outputs are the same,
    `own_output` is None.
    """

    model: nn.Module
    modules: list[nn.Module]
    batch: Batch
    images: Tensor
    target: Any
    own_output: Callable[[Any], Any] | None

    def run(self, images: Tensor, target: Any) -> AttributionPass:
        """Record a forward pass in which these images replace the caller's images in the batch.

        `images` may hold several versions of the caller's images, concatenated. The target is applied to the output of
        each version separately.
        """
        count = self.batch.images
        leaf = images.detach().requires_grad_(torch.is_grad_enabled())
        model_input = leaf.clone()  # The model may change its input in place, which autograd forbids for a leaf.
        copies = len(model_input) // count

        def copy_input(tensor: Tensor) -> Tensor:
            """Return a copy of the caller's tensor, repeated for each version, that the model may change in place."""
            tensor = detach_input(tensor).clone()
            return torch.cat([tensor] * copies) if copies > 1 and tensor.ndim and len(tensor) == count else tensor

        output = self.batch.copy(copy_input, pictures=model_input).run(self.model)
        scored = [compute_scores(target, part_output, count) for part_output in _split(output, len(images), count)]
        scores = torch.cat([part.values for part in scored])
        return AttributionPass(leaf, model_input, output, scores, scored[0].classes, scored[0].target)

    def gradients(self, run: AttributionPass) -> Tensor:
        """Return the gradients (N,K,C,...) at the images in at least float32. Raise `ModelError` if there are none."""
        gradients: list[Tensor] = []
        if run.scores.requires_grad:
            device = run.scores.device.type
            is_scaled = caller_autocast(device) == torch.float16 or has_float16((run.leaf, run.output), self.modules)
            with pytorch.without_autocast(device):
                parts = jacobian(run.scores, [run.leaf], scaled=is_scaled, most_bytes=GRADIENT_BUDGET_BYTES)
                gradients = [part for (part,) in parts if part is not None]
        if not gradients:
            raise ModelError(
                "The score does not depend on the images: no recorded operation leads from the images to the score. "
                "Possible causes: torch.no_grad in a forward method, a detached value, or an operation without a derivative "
                "(argmax, rounding, 8-bit layers). Remove the cause, or use gradcam.explain() at a later layer."
            )
        return at_least_float32(torch.cat(gradients).transpose(0, 1))

    def sum_gradients(
        self, points: Iterable[Point], target: Any, *, count: int, chunk: int, progress: Progress | None
    ) -> Tensor:
        """Return the weighted sum (N,K,C,...) of the gradients at `count` points, with `chunk` points per forward pass.

        `progress` is called with the number of finished points and `count`. Raise `ModelError` if the sum is zero or
        not finite.
        """
        total: Tensor | None = None
        finished, points = 0, iter(points)
        while group := list(itertools.islice(points, chunk)):
            # Do not store the pass in a variable, because its autograd graph would stay in memory during the next pass.
            gradients = self.gradients(self.run(torch.cat([images for _, images in group]), target))
            gradients = gradients.unflatten(0, (len(group), self.batch.images))
            for (weight, _), gradient in zip(group, gradients):
                total = gradient * weight if total is None else total.add_(gradient, alpha=weight)
            finished += len(group)
            if progress is not None:
                progress(finished, count)
        assert total is not None  # There is at least one point.
        require_nonzero(total)
        return total

    def attribution(self, run: AttributionPass, values: Tensor, method: str, gaps: Tensor | None = None) -> Attribution:
        """Return an `Attribution` of these values, with the scores and output of the pass `run` of the caller's images.

        Raise `ModelError` if a score or a value is NaN or infinite.
        """
        read_range(run.scores.detach(), "The scores are")
        read_range(values, "The attributions are")
        device = self.batch.device
        values, scores = (tensor.detach().float().to(device) for tensor in (values.contiguous(), run.scores))
        gaps = None if gaps is None else gaps.detach().float().to(device)
        classes = None if run.classes is None else run.classes.to(device)
        output = map_tensors(run.output if self.own_output is None else self.own_output(run.output), Tensor.detach)
        return Attribution(values, classes, scores, output, method, None, gaps)


@contextlib.contextmanager
def differentiable(model: nn.Module, images: Any, target: Any) -> Iterator[DifferentiableModel]:
    """Yield the model with gradients enabled, restore its state at the end, and translate known PyTorch errors."""
    bound = bind_target(target, unwrap(model), to_batch(images))
    batch = bound.batch
    if batch.windows is not None:
        problem = "The model's processor pads images, which pixel attributions do not support"
        raise ImageError(f"{problem}: use a CAM method.")
    with preserve_state(bound.model) as modules, torch.enable_grad(), TranslatedErrors(INPUT_FAILURES):
        if batch.images > 1:
            warn_of_shared_statistics(modules)
        images = detach_input(batch.pictures)
        yield DifferentiableModel(bound.model, modules, batch, images, bound.target, bound.own_output)


def fix_target(target: Any, run: AttributionPass) -> Any:
    """Return a target for other images with the classes or objects of `run`. Return target functions unchanged."""
    if isinstance(target, ScoreExtractor):
        return run.target
    return target if run.classes is None else fix_classes(target, run.classes)


def fix_classes(target: Any, classes: Tensor) -> ClassTarget:
    """Return a target that explains these classes and keeps the other settings of `target`."""
    return replace(target, classes=classes) if isinstance(target, ClassTarget) else ClassTarget(classes)


def require_nonzero(gradients: Tensor) -> None:
    """Raise `ModelError` if the gradients of all images and classes are zero, or if a gradient is NaN or infinite."""
    if read_range(gradients, "The gradients at the images are") == (0, 0):
        raise ModelError(
            "The gradient at the images is exactly zero. Possible causes: an operation such as rounding, only dead units, "
            "or a probability of exactly 0 or 1. Choose another score, or use gradcam.explain() at a layer after the "
            "operation that stops the gradient."
        )


def _split(output: Any, rows: int, images: int) -> list[Any]:
    if rows == images:
        return [output]
    if not has_rows(output, rows):
        expected = f"one row for each of the {rows} images in a forward pass"
        raise ModelError(f"The model's output does not have {expected}: pass chunk=1.")
    return [take_rows(output, slice(start, start + images), rows) for start in range(0, rows, images)]
