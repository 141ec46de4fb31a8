"""The parts that all targets share: binding to a model, score extraction, and the description of each map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradcam.hooks.containers import Batch, Window

if TYPE_CHECKING:
    from gradcam.adapters.base import LocalGradient

# The default method for a single object or region. Pooled gradients would show all objects of the class.
LOCAL_METHOD = "hirescam"
Box4 = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Instance:
    """The target that one map explains, if it is not a plain class: a box, a mask, a sentence and so on.

    Attributes
    ----------
    kind : str
        "box", "missed", "mask", "text", "like", "keypoint" or "word".
    name : str
        The readable name: "person", a sentence, a word.
    index : int or None
        The class index.
    score : float or None
        The model's confidence, from 0 to 1, or the cosine similarity for text and reference images. None if there is no
        score.
    number : int or None
        The number of the box, keypoint or word within its image.
    box : (float, float, float, float) or None
        Left, top, right and bottom, in pixels of the image.
    edge : str or None
        "left", "top", "right" or "bottom", if that edge is explained instead of the score.
    mask : Tensor (H,W) or None
        The explained mask, or the mask of the box, bool.
    point : (float, float) or None
        The keypoint, or the point that selected the mask: x and y, in pixels.
    against : sequence of str
        The sentences that a text is contrasted with.
    form : str or None
        How the target was passed: a mask as "predicted", "point", "box", "array" or "file", and a sentence as "text" or
        "embedding".
    text : str or None
        A word as it is written in the caption, with the spaces before it.
    axis : str or None
        "x" or "y", if that coordinate of a keypoint is explained instead of its score.
    box_number : int or None
        The number of the box that contains the keypoint.

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.targets import Instance, Mask
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1)).eval()
    >>> explanation = gradcam.explain(model, torch.rand(1, 3, 64, 64), "1", target=Mask(0, (0, 0, 32, 32)))
    >>> instance: Instance = explanation.instances[0][0]
    >>> instance.kind, instance.box
    ('mask', (0.0, 0.0, 32.0, 32.0))
    """

    kind: str
    name: str
    index: int | None = None
    score: float | None = None
    number: int | None = None
    box: Box4 | None = None
    edge: str | None = None
    mask: Tensor | None = None
    point: tuple[float, float] | None = None
    against: Sequence[str] = ()
    form: str | None = None
    text: str | None = None
    axis: str | None = None
    box_number: int | None = None

    def moved(self, source: Window, target: Window, size: Sequence[int]) -> Instance:
        """Map the box, point and mask from a region of this canvas to a region of another canvas.

        Parameters
        ----------
        source : (float, float, float, float)
            Top, left, height and width of the region on the present canvas, in pixels.
        target : (float, float, float, float)
            The region on the new canvas.
        size : (int, int)
            Height and width of the new canvas, and of the new mask; the mask is zero outside the present canvas.

        Returns
        -------
        Instance
            A copy in pixels of the new canvas.
        """
        down, across = (new_length / old_length for new_length, old_length in zip(target[2:], source[2:]))
        y0, x0 = source[0] - target[0] / down, source[1] - target[1] / across
        box, point, mask = self.box, self.point, self.mask

        def move(x: float, y: float) -> tuple[float, float]:
            return (x - x0) * across, (y - y0) * down

        return replace(
            self,
            box=None if box is None else (*move(*box[:2]), *move(*box[2:])),
            point=None if point is None else move(*point),
            mask=None if mask is None else crop_mask(mask, (y0, x0, size[0] / down, size[1] / across), size),
        )


def crop_mask(mask: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """Resample a window of a mask (H,W) to `size` by nearest-neighbour sampling; pixels outside the mask are zero."""
    steps = (torch.arange(count, dtype=torch.float32, device=mask.device) + 0.5 for count in size)
    positions = [(step * (window[2 + i] / size[i]) + window[i]).floor().long() for i, step in enumerate(steps)]
    is_inside = [(position >= 0) & (position < side) for position, side in zip(positions, mask.shape)]
    rows, columns = (position.clamp(0, side - 1) for position, side in zip(positions, mask.shape))
    return mask[rows[:, None], columns] * (is_inside[0][:, None] & is_inside[1])


@dataclass(frozen=True)
class TargetScores:
    """Scores (N,K), attached to the graph, and descriptions of the scored objects.

    `classes` (N,K) and `logits` (N,C) are None for a function's scores. `target` computes the scores of the same
    objects for another output. `instances` describe the scored objects of each image, which may be fewer than K; None
    for scores of plain classes. `differentiate` is set for scores that depend on small parts of a layer. This function
    takes tensors (N,C,H,W) and returns a list of local gradients for each tensor, or None if the gradients have to be
    computed by autograd. `settled` (N,K) marks scores whose true gradient is zero, so that the computed gradient is
    only rounding error.
    """

    values: Tensor
    classes: Tensor | None
    logits: Tensor | None
    target: Any
    instances: Sequence[Sequence[Instance]] | None = None
    differentiate: Callable[[Sequence[Tensor]], list[list[LocalGradient]] | None] | None = None
    settled: Tensor | None = None


class ScoreExtractor(ABC):
    """The score extractor of a bound target: it computes scores from the output of the module that is run."""

    @abstractmethod
    def score(self, output: Any, images: int) -> TargetScores:
        """Return the scores of the images. Raise `TargetError` if the explained object is not in the output."""


@dataclass(frozen=True)
class BoundTarget:
    """A target bound to a model.

    `model` is the module to run, and `batch` its input. `target` is the argument of `compute_scores`. `layer` and
    `method` are the defaults. If `layer` is None, the last layer with a grid is explained. If `layers` is not empty,
    these layers are explained instead of `layer`, and their maps are added. `own_output` converts the output of `model`
    to the output of the explained model; None if both are the same. `list_found` takes the output of `model`, and lists
    all objects or classes that are detected in each image. `has_places` is True if the target names a position in the
    image, which augmented views would move. `mirror` is set for the similarity to reference images. It returns the
    reference images, and the target that explains the similarity on them. `reshape` arranges tokens on a grid if their
    number alone does not determine the grid.
    """

    model: nn.Module
    batch: Batch
    target: Any
    layer: str | None = None
    method: str = "gradcam"
    own_output: Callable[[Any], Any] | None = None
    list_found: Callable[[Any], Sequence[Sequence[Instance]]] | None = None
    has_places: bool = False
    mirror: Callable[[TargetScores], tuple[Any, Any]] | None = None
    layers: Sequence[str] = ()
    reshape: Callable[[Tensor], Tensor] | None = None


class Target(ABC):
    """A target whose score depends on the kind of model: a box, a mask, a sentence."""

    @abstractmethod
    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        """Bind the target to a model and a batch.

        Parameters
        ----------
        model : nn.Module
            The model that is explained.
        batch : Batch
            The model's input, with the images.

        Returns
        -------
        BoundTarget
            The module to run instead of the model, and the score extractor.

        Raises
        ------
        TargetError
            If the model does not support this kind of target, or has no such class, box or word.
        """


def bind_target(target: Any, model: nn.Module, batch: Batch) -> BoundTarget:
    """Bind a target of any kind to a model. Classes and functions need no information about the model."""
    return target.bind(model, batch) if isinstance(target, Target) else BoundTarget(model, batch, target)
