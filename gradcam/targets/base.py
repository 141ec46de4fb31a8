"""What all targets share: how one is bound to a model, the scores that it reads, and what each map is of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import TargetError, join_names, nearest, shorten
from gradcam.families.base import LocalGradient
from gradcam.hooks.nested import Batch, Window

LOCAL = "hirescam"  # of one object or place, where pooled gradients would be of all that are of its class
Box4 = tuple[float, float, float, float]
Differentiate = Callable[[Sequence[Tensor]], "list[list[LocalGradient]] | None"]


@dataclass(frozen=True, eq=False)
class Instance:
    """The target that one map explains, if it is not a plain class: a box, a mask, a sentence and so on.

    Attributes
    ----------
    kind : str
        "box", "missed", "mask", "text", "like", "keypoint" or "word".
    name : str
        Its readable name: "person", a sentence, a word.
    index : int or None
        The index of its class.
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

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.targets import Instance, Mask
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1)).eval()
    >>> found = gradcam.explain(model, torch.rand(1, 3, 64, 64), "1", target=Mask(0, (0, 0, 32, 32)))
    >>> instance: Instance = found.instances[0][0]
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
        down, across = (new / old for new, old in zip(target[2:], source[2:]))
        top, left = source[0] - target[0] / down, source[1] - target[1] / across
        box, point, mask = self.box, self.point, self.mask

        def move(x: float, y: float) -> tuple[float, float]:
            return (x - left) * across, (y - top) * down

        return replace(
            self,
            box=None if box is None else (*move(*box[:2]), *move(*box[2:])),
            point=None if point is None else move(*point),
            mask=None if mask is None else take_window(mask, (top, left, size[0] / down, size[1] / across), size),
        )


def take_window(mask: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """Return a mask (H,W) of `size` that shows a window of a mask, by its nearest pixels; zero outside of the mask."""
    steps = (torch.arange(count, dtype=torch.float32, device=mask.device) + 0.5 for count in size)
    places = [(step * (window[2 + i] / size[i]) + window[i]).floor().long() for i, step in enumerate(steps)]
    inside = [(place >= 0) & (place < side) for place, side in zip(places, mask.shape)]
    rows, columns = (place.clamp(0, side - 1) for place, side in zip(places, mask.shape))
    return mask[rows[:, None], columns] * (inside[0][:, None] & inside[1])


@dataclass(frozen=True)
class Scored:
    """Scores (N,K) with their graph; the classes (N,K) and the logits (N,C) that they are of, None for a function's.

    `target` gives the scores of the same things in another output. `instances`: for each image what each of its scores
    is of, where that is more than a class; fewer than K where an image has fewer. `differentiate`: of scores that depend
    on small parts of a layer, what knows a shorter way than autograd's to their gradients at some inputs (N,C,H,W), for
    each of them a list; or gives None. `settled` (N,K): the scores that nothing can raise or lower, of which no map is
    more than rounding.
    """

    values: Tensor
    classes: Tensor | None
    logits: Tensor | None
    target: Any
    instances: Sequence[Sequence[Instance]] | None = None
    differentiate: Differentiate | None = None
    settled: Tensor | None = None


class Reader(ABC):
    """What reads the scores of a bound target in an output of what is run for it."""

    @abstractmethod
    def score(self, output: Any, images: int) -> Scored:
        """The scores of so many images. Raises `TargetError` where what is to be explained is not there."""


@dataclass(frozen=True)
class Bound:
    """A target that knows the model. `model`: what is run, with `batch`. `target`: what `compute_scores` takes. `layer`,
    `method`: what is taken where nothing is said; `layer` None for the last one with a grid. `own_output`: the model's own
    output in what is run for it, None for the output itself. `list_found`: all that the model found in each image, in
    that. `has_places`: whether it names a place in the picture, which other views of it would have elsewhere. `mirror`: of
    a likeness, the other picture, and what is explained there: (images, target). `layers`: several in place of `layer`, to
    be added up. `reshape`: how tokens lie on the pictures, where nothing is said and counting does not tell."""

    model: nn.Module
    batch: Batch
    target: Any
    layer: str | None = None
    method: str = "gradcam"
    own_output: Callable[[Any], Any] | None = None
    list_found: Callable[[Any], Sequence[Sequence[Instance]]] | None = None
    has_places: bool = False
    mirror: Callable[[Scored], tuple[Any, Any]] | None = None
    layers: Sequence[str] = ()
    reshape: Callable[[Tensor], Tensor] | None = None


class Target(ABC):
    """A target whose score depends on the kind of model: a box, a mask, a sentence."""

    @abstractmethod
    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        """Bind the target to a model and a batch.

        Parameters
        ----------
        model : nn.Module
            The model that is explained.
        batch : Batch
            The model's input, with the images.

        Returns
        -------
        Bound
            The module to run instead of the model, and the reader of the scores.

        Raises
        ------
        TargetError
            If the model does not support this kind of target, or has no such class, box or word.
        """


def bind(target: Any, model: nn.Module, batch: Batch) -> Bound:
    """A target of any kind for a model; classes and functions need to know nothing of it."""
    return target.bind(model, batch) if isinstance(target, Target) else Bound(model, batch, target)


def find_overlaps(boxes: Tensor, box: Sequence[float]) -> Tensor:
    """Intersection over union of boxes (M,4) with one of them."""
    from torchvision.ops import box_iou  # which takes as long to import as torch, and classes need nothing of it

    found: Tensor = box_iou(boxes, boxes.new_tensor([box]))[:, 0]
    return found


def to_label(wanted: int | str | None, labels: Sequence[str] | None) -> int | None:
    """A class by its index or its label. Raises `TargetError` for an unknown one."""
    if wanted is None or is_number(wanted):
        return wanted  # type: ignore[return-value]  # no text
    if labels is None:
        raise TargetError(f"The model has no class names: pass the index of {shorten(wanted)} instead.")
    known = {label.casefold(): index for index, label in reversed(list(enumerate(labels)))}
    if not isinstance(wanted, str) or wanted.casefold() not in known:
        offers = nearest(str(wanted), labels) or labels[:5]
        raise TargetError(f"There is no class {shorten(wanted)}. Nearest: {join_names(offers)}.")
    return known[wanted.casefold()]


def is_number(value: Any) -> bool:
    """Whether it counts things from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
