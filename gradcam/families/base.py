"""What a family of models says of itself: what is run and watched, what is explained by default, and how it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from gradcam.errors import ModelError, TargetError
from gradcam.hooks.hooks import ForwardHook, Hooks
from gradcam.hooks.nested import Batch

MODEL = "model"  # what the family's own model is called among what is watched


@dataclass(frozen=True)
class Call:
    """One run of a module: its arguments, and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class Seen:
    """A model's output, and the runs of the modules that were watched meanwhile, by their names, in their order."""

    output: Any
    calls: dict[str, list[Call]] = field(default_factory=dict)

    def last(self, name: str = MODEL) -> Any:
        """What a watched module gave in its last run."""
        if not self.calls[name]:
            raise ModelError(
                f"The model does not call its submodule '{name}', from which the target is read: explain that submodule "
                "alone, or pass a function of the model's output as the target."
            )
        return self.calls[name][-1].output


class Watched(nn.Module):
    """A model that gives `Seen`: its output with what some of its modules gave, recorded wherever that is. The model is
    its `module`, so that layers keep their names."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.module = model
        self._watched = dict(modules)  # by a dict, which registers nothing

    def forward(self, *args: Any, **kwargs: Any) -> Seen:
        calls: dict[str, list[Call]] = {}
        with Hooks() as hooks:
            for name, module in self._watched.items():
                hooks.after_forward(module, _keep_in(calls.setdefault(name, [])))
            return Seen(self.module(*args, **kwargs), calls)


def _keep_in(calls: list[Call]) -> ForwardHook:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(args, kwargs, output))

    return keep


_NAMES: WeakKeyDictionary[nn.Module, Sequence[str]] = WeakKeyDictionary()


def name_classes(model: nn.Module, labels: Sequence[str]) -> None:
    """Call the classes of a model so, wherever they are named; a module has no place for that."""
    _NAMES[model] = labels


class Family(ABC):
    """A model of one family. `model`: itself; `prefix`: its dotted name inside the model that is explained, "" if it is
    that."""

    task: ClassVar[str]

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model, self.prefix = model, prefix

    @property
    def layer(self) -> str | None:
        """The dotted name, in the model that is explained, of the layer where nothing else is said; None where the last
        layer with a grid is right."""
        own = self.own_layer
        return None if own is None else f"{self.prefix}.{own}".lstrip(".")

    @property
    def own_layer(self) -> str | None:
        """The same, in the family's own model."""
        return None

    @property
    def layers(self) -> Sequence[str]:
        """The layers whose maps are added up where nothing else is said, by their names as `layer` has them."""
        return [f"{self.prefix}.{own}".lstrip(".") for own in self.own_layers]

    @property
    def own_layers(self) -> Sequence[str]:
        """The same, in the family's own model. Several where a pyramid's levels are outputs of several modules."""
        return [] if self.own_layer is None else [self.own_layer]

    def reshape(self, batch: Batch) -> Callable[[Tensor], Tensor] | None:
        """What brings tokens on a grid, where counting them cannot tell; None where it can."""
        return None

    @property
    def labels(self) -> Sequence[str] | None:
        """The names of the classes: those that a person gave, or those that the model itself knows."""
        return _NAMES.get(self.model) or self.own_labels

    @property
    def own_labels(self) -> Sequence[str] | None:
        """Those that the model itself knows."""
        return None

    @property
    def class_count(self) -> int | None:
        """Return the number of classes in the model's output, the background included; None if only running it tells."""
        return None if self.own_labels is None else len(self.own_labels)

    def watched(self) -> dict[str, nn.Module]:
        """The modules whose runs `read` needs, by any names; the family's own model among them."""
        return {MODEL: self.model}

    def wrap(self, model: nn.Module) -> nn.Module:
        """What is run in place of the model that is explained; its output is what this family reads."""
        return Watched(model, self.watched())

    @property
    def has_own_scale(self) -> bool:
        """Whether the model itself resizes and normalises pictures with values from 0 to 1."""
        return False

    def set_threshold(self, threshold: float) -> None:
        """Have the model give boxes from this score on. Raises `ModelError` for one that has no such."""
        raise ModelError(f"{type(self.model).__name__} takes no threshold: leave the threshold out.")

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        """What a model that is told something by words is told where nobody says; None for a model that is not."""
        return None

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """What it takes of these words beside one picture. Raises `ModelError` for a model that is not told by words."""
        raise ModelError(f"{type(self.model).__name__} takes no text prompts: leave the prompts out.")

    def to_inputs(self, images: Tensor) -> Any:
        """Pictures (N,C,H,W), preprocessed, as this family takes them."""
        return images


class Detections(NamedTuple):
    """What was found in one picture, the surest first, with their graph. `boxes` (B,4): left, top, right and bottom, in
    pixels of the picture as the model was given it. `scores` (B,). `labels` (B,): int64. `masks` (B,H,W): in [0,1], of
    the same size as that picture, None for a detector without. `keypoints` (B,P,h,w): heatmaps over the boxes."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor | None = None
    keypoints: Tensor | None = None


class Candidates(NamedTuple):
    """What a detector weighed in one picture before it chose: boxes (M,4) as in `Detections`, scores (M,), and the label
    (M,) that each score is for."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor


class LocalGradient(NamedTuple):
    """The gradient of an image's score at a tensor (N,C,H,W), of either by its number: `values` (C,h,w) from a row and a
    column on, and zero elsewhere."""

    image: int
    score: int
    top: int
    left: int
    values: Tensor


class Detector(Family):
    """Boxes, each with a label and a score."""

    task = "detection"

    @abstractmethod
    def read(self, seen: Seen, batch: Batch) -> list[Detections]:
        """For each picture what is left after the model's own postprocessing. Values have the graph that the model gave
        them."""

    @abstractmethod
    def weigh(self, seen: Seen, batch: Batch, label: int | None) -> list[Candidates]:
        """For each picture all candidates before the choice, with their scores for one class, or for each one's best."""

    def differentiate(
        self, seen: Seen, batch: Batch, found: Sequence[Detections], edge: int | None, inputs: Sequence[Tensor]
    ) -> list[list[LocalGradient]] | None:
        """At each of the inputs (N,C,H,W) the gradients of some of each picture's boxes: of their scores, or of one of their
        four edges. None where there is no shorter way than autograd's."""
        return None


class Segmenter(Family):
    """A class for each pixel."""

    task = "segmentation"

    @abstractmethod
    def read(self, seen: Seen, batch: Batch) -> Tensor:
        """The classes' logits (N,C,h,w) with their graph, at the size that the model gives them; h and w cover the
        picture as the model was given it. Of models that give masks with classes: the classes' scores at each pixel."""

    @property
    def background(self) -> int | None:
        """The class of pixels that show none of the others, None where the model has no such class."""
        names = [label.casefold().strip("_") for label in self.labels or ()]
        return names.index("background") if "background" in names else None

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """The classes' probabilities (N,C,h,w), of what `read` gives."""
        return logits.softmax(1)


class Embedder(Family):
    """A vector for each picture, and for sentences where the model takes those."""

    task = "matching"

    @abstractmethod
    def read(self, seen: Seen, batch: Batch) -> Tensor:
        """The pictures' embeddings (N,D), not normalised, with their graph."""

    @property
    def is_transformer(self) -> bool:
        """Whether the tower of pictures is a transformer, whose attention methods can follow."""
        return False

    @property
    def takes_mean(self) -> bool:
        """Whether the tower is known to take the mean of its tokens, as a convolutional one does of its places."""
        return False

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """The sentences' embeddings (T,D), not normalised and without a graph; tokenised by the model's own parts.
        Raises `TargetError` for a model without text or tokenizer, and for a sentence that is too long, with the words
        at which it would be cut."""
        raise TargetError(f"{type(self.model).__name__} has no text encoder: compare images with targets.Like(...).")


class Captioner(Family):
    """Words, one after another, of a picture."""

    task = "captioning"

    @abstractmethod
    def write(self, images: Any, most: int = 40) -> list[int]:
        """The tokens, `most` of them at most, that the model writes of one picture (1,C,H,W), greedily; without those that
        begin and end it. Raises `TargetError` for several pictures, and for a caption without words."""

    @abstractmethod
    def bind(self, model: nn.Module, batch: Batch, tokens: Sequence[int]) -> tuple[nn.Module, Batch]:
        """What is run, and with what, so that `read` finds the logits of each of these tokens. Raises `TargetError` for
        tokens that the model does not know, for more than it reads, and where it lacks a prompt."""

    @abstractmethod
    def read(self, seen: Seen, batch: Batch, tokens: Sequence[int]) -> Tensor:
        """The logits (N,T,V) for each of the tokens, of all words, given the picture and the tokens before it."""

    @abstractmethod
    def words(self, tokens: Sequence[int]) -> list[str]:
        """Each token as people read it. Raises `TargetError` without a tokenizer."""


class Poses(NamedTuple):
    """What was found in one picture, the surest first. `heatmaps` (B,P,h,w): with their graph. `regions` (B,4): what
    each of them covers from edge to edge, in pixels of the picture as the model was given it, left, top, right and
    bottom; without a graph. `scores` (B,): of the boxes that they are over, None for one over the whole picture."""

    heatmaps: Tensor
    regions: Tensor
    scores: Tensor | None = None


class PoseFinder(Family):
    """Keypoints by their heatmaps. `temperature`: of the softmax that makes a heatmap the distribution of its point."""

    task = "pose"
    temperature: ClassVar[float] = 1.0

    def rate(self, peak: float) -> float | None:
        """How sure the model is of a keypoint, from 0 to 1, by its heatmap's largest value; None where that says nothing."""
        return peak if 0 <= peak <= 1 else None

    @abstractmethod
    def find(self, seen: Seen, batch: Batch) -> list[Poses]:
        """For each picture its heatmaps, over what each of them is, and how sure the model is of that."""
