"""Base classes of all targets: they bind a target to a model, extract its scores, and describe each map."""

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

# The default method for targets that are a single object or region. Grad-CAM pools gradients over all positions, so its
# map would show all objects of the class.
LOCAL_METHOD = "hirescam"
# A word is from the text, unless the image multiplies the word's probability at least by this ratio. On drawn scenes,
# all filler words and 6 % of object words are below this ratio (`scripts/bench --only wordchecks`).
MIN_PROBABILITY_RATIO = 1.5
Box4 = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Instance:
    """A description of the box, mask, sentence or other object that one map explains. Plain classes have no instance.

    Attributes
    ----------
    kind : str
        "box", "missed", "mask", "text", "like", "keypoint" or "word".
    name : str
        The display name, such as "person", a sentence, or a word.
    index : int or None
        The class index. For a word of one token, the token's id. None for a word of several tokens.
    score : float or None
        The model's confidence, from 0 to 1. For a word of several tokens, the product of their probabilities. For text
        and reference images, the cosine similarity. None if there is no score.
    number : int or None
        The number of the box or keypoint within its image. For a caption, the number of the word if the target chose
        words, otherwise the position of the first token.
    box : (float, float, float, float) or None
        Left, top, right and bottom, in pixels of the image.
    edge : str or None
        "left", "top", "right" or "bottom" if the map explains this edge of the box instead of its score.
    mask : Tensor (H,W) or None
        The explained mask, or the mask of the detected object, bool.
    point : (float, float) or None
        The keypoint, or the point that selected the mask: x and y, in pixels.
    against : sequence of str
        The sentences whose mean similarity is subtracted from the score of a text, or the word whose logit is
        subtracted from the score of a word.
    form : str or None
        The form in which the target was passed. For a mask: "predicted", "point", "box", "array" or "file". For a
        sentence: "text" or "embedding". For a caption: "token", "phrase" (several tokens chosen by position) or "word".
    text : str or None
        The word or phrase as the caption contains it, with the spaces before it.
    axis : str or None
        "x" or "y" if the map explains this coordinate of the keypoint instead of its score.
    box_number : int or None
        The number of the box that contains the keypoint.
    without_image : float or None
        The probability of a word if the image is blank; None if it was not computed.

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
    without_image: float | None = None

    @property
    def is_from_text(self) -> bool:
        """Return whether the image does not make a word much more probable, so that the word follows from the text."""
        return self.without_image is not None and (self.score or 0) < MIN_PROBABILITY_RATIO * self.without_image

    def moved(self, source: Window, target: Window, size: Sequence[int]) -> Instance:
        """Convert the box, point and mask from pixels of one canvas to pixels of another canvas.

        A canvas is an image, possibly resized and padded. Both canvases contain the same region of the image, at
        different positions and scales.

        Parameters
        ----------
        source : (float, float, float, float)
            The region on the present canvas, in pixels: top, left, height and width.
        target : (float, float, float, float)
            The same region on the new canvas.
        size : (int, int)
            Height and width of the new canvas. The new mask has this size, and is zero outside the present canvas.

        Returns
        -------
        Instance
            A copy with the converted box, point and mask.
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
    """Crop a window from a mask (H,W), and resize it to `size` by nearest neighbours. Pixels outside the mask are 0."""
    steps = (torch.arange(count, dtype=torch.float32, device=mask.device) + 0.5 for count in size)
    positions = [(step * (window[2 + i] / size[i]) + window[i]).floor().long() for i, step in enumerate(steps)]
    is_inside = [(position >= 0) & (position < side) for position, side in zip(positions, mask.shape)]
    rows, columns = (position.clamp(0, side - 1) for position, side in zip(positions, mask.shape))
    return mask[rows[:, None], columns] * (is_inside[0][:, None] & is_inside[1])


@dataclass(frozen=True)
class TargetScores:
    """Scores (N,K) with their autograd graph, and descriptions of the scored objects.

    If a function computed the scores, `classes` (N,K) and `logits` (N,C) are None. `target` computes the scores of the
    same objects from another output of the model. `instances` describe the scored objects of each image. An image may
    have fewer than K objects. For plain classes, `instances` is None.

    `differentiate` is set if each score depends only on a small part of a layer. The function takes activations
    (N,C,H,W) of several layers, and returns a list of `LocalGradient` for each layer, or None if only autograd can
    compute the gradients. `settled` (N,K) is True for scores whose true gradient is zero. The computed gradient of such
    a score is only rounding error. `per_pass` limits the number of scores that share a backward pass, if gradients after
    the layer need more memory than the gradients at the layer.
    """

    values: Tensor
    classes: Tensor | None
    logits: Tensor | None
    target: Any
    instances: Sequence[Sequence[Instance]] | None = None
    differentiate: Callable[[Sequence[Tensor]], list[list[LocalGradient]] | None] | None = None
    settled: Tensor | None = None
    per_pass: int | None = None


class ScoreExtractor(ABC):
    """Base class of score extractors, which compute a target's scores from the output of `BoundTarget.model`."""

    @abstractmethod
    def score(self, output: Any, images: int) -> TargetScores:
        """Return the scores of the images. Raise `TargetError` if the output does not contain the explained object."""


@dataclass(frozen=True)
class BoundTarget:
    """A target bound to a model.

    `model` is the module to run, and `batch` is its input. `target` is passed to `compute_scores`. `layer` and `method`
    are the defaults for this target. If `layer` is None, the default layer is the last layer with a grid. If `layers`
    is not empty, the maps of these layers are added, and `layer` is ignored. `reshape` arranges tokens on a grid, if
    their number alone does not determine the grid.

    `own_output` converts the output of `model` to the output of the explained model. If both outputs are the same,
    `own_output` is None. `list_found` lists all detected objects or classes of each image, from the output of `model`.
    If `has_places` is True, the target has a fixed position in the image, so test-time augmentation that moves the
    image is refused. `mirror` is set if the target is the similarity to reference images. It returns the reference
    images, and the target that explains the reference images. `refine` changes the
    maps (N,K,h,w) before they become heatmaps.
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
    refine: Callable[[Tensor], Tensor] | None = None


class Target(ABC):
    """Base class of targets that need an adapter for the kind of model, such as boxes, masks and sentences."""

    @abstractmethod
    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        """Bind the target to a model and a batch.

        Parameters
        ----------
        model : nn.Module
            The model to explain.
        batch : Batch
            The model's input, which contains the images.

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
    """Bind a target of any kind to a model. Classes and functions are not changed."""
    return target.bind(model, batch) if isinstance(target, Target) else BoundTarget(model, batch, target)
