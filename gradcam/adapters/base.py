"""Define what each model family provides: the module to run, the outputs to record, and the default layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradcam.errors import ModelError, TargetError
from gradcam.hooks.containers import Batch
from gradcam.hooks.hooks import Hooks

MODEL = "model"  # key of the model in the result of `Family.watched`


@dataclass(frozen=True)
class ModuleCall:
    """One call of a watched module: the arguments and the output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class ModelRun:
    """One run of a model: the model's output, and the calls of each watched module in order of execution."""

    output: Any
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)

    def last_output(self, name: str = MODEL) -> Any:
        """Return the output of the last call of a watched module."""
        if not self.calls[name]:
            problem = f"The target needs the output of submodule '{name}', but the model does not call this submodule"
            advice = "explain the submodule alone, or pass a function of the model's output as the target."
            raise ModelError(f"{problem}: {advice}")
        return self.calls[name][-1].output


class RecordingModel(nn.Module):
    """A wrapper that runs a model, records calls of its modules, and returns a `ModelRun`.

    As in `DataParallel`, the model is the submodule `module` of the wrapper, so layer names stay the same. If `run` is
    given, the wrapper calls `run` instead of the model, for example to run only a part of the model.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], run: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.module, self._run = model, run
        self._watched = dict(modules)  # A dict, because nn.Module would register an attribute as a submodule.

    def forward(self, *args: Any, **kwargs: Any) -> ModelRun:
        calls: dict[str, list[ModuleCall]] = {}
        with Hooks() as hooks:
            for name, module in self._watched.items():
                hooks.after_forward(module, partial(_record, calls.setdefault(name, [])))
            return ModelRun((self._run or self.module)(*args, **kwargs), calls)


def _record(calls: list[ModuleCall], module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    calls.append(ModuleCall(args, kwargs, output))


# The user's class names and thresholds, by model. A `Family` cannot store these settings, because each search for an
# adapter creates a new `Family`.
_NAMES: WeakKeyDictionary[nn.Module, Sequence[str]] = WeakKeyDictionary()
_THRESHOLDS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


def name_classes(model: nn.Module, labels: Sequence[str]) -> None:
    """Store class names for a model, outside the module."""
    _NAMES[model] = labels


class Family(ABC):
    """An adapter for one model; each subclass supports one family of models.

    `model` is the supported module. `prefix` is the dotted name of `model` inside the explained model, or "" if
    `model` is the explained model. `has_own_scale` is True if the model takes images in [0,1], and itself resizes and
    normalises the images. `takes_pieces` is True for vision-language models, whose processor cuts images into pieces.
    """

    task: ClassVar[str]
    has_own_scale: ClassVar[bool] = False
    takes_pieces: ClassVar[bool] = False

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model: Any = model
        self.prefix = prefix

    @property
    def layer(self) -> str | None:
        """Return the default layer's name in the explained model; None stands for the last layer with a grid."""
        return next(iter(self.layers), None)

    @property
    def own_layer(self) -> str | None:
        """Return the default layer's name in `self.model`; None stands for the last layer with a grid."""
        return None

    @property
    def layers(self) -> Sequence[str]:
        """Return the default layers' names in the explained model. The maps of these layers are added up."""
        return [f"{self.prefix}.{name}".lstrip(".") for name in self.own_layers]

    @property
    def own_layers(self) -> Sequence[str]:
        """Return the default layers' names in `self.model`. A feature pyramid has several default layers."""
        return [] if self.own_layer is None else [self.own_layer]

    def reshape(self, batch: Batch) -> Callable[[Tensor], Tensor] | None:
        """Return a function that arranges tokens on a grid; None if the grid follows from the number of tokens."""
        return None

    @property
    def labels(self) -> Sequence[str] | None:
        """Return the class names: the names set by `name_classes`, or else the names stored in the model."""
        return _NAMES.get(self.model) or self.own_labels

    @property
    def own_labels(self) -> Sequence[str] | None:
        """Return the class names that are stored in the model; None if there are none."""
        return None

    @property
    def class_count(self) -> int | None:
        """Return the number of output classes, including the background; None if unknown before a forward pass."""
        return None if self.own_labels is None else len(self.own_labels)

    def watched(self) -> dict[str, nn.Module]:
        """Return the modules whose calls are recorded for `read`, by name. The default is `self.model` alone."""
        return {MODEL: self.model}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a module that runs the explained model and returns a `ModelRun`, the input of `read`."""
        return RecordingModel(model, self.watched())

    def set_threshold(self, threshold: float) -> None:
        """Set the minimum score of detections. Raise `ModelError` if the model has no threshold."""
        raise ModelError(f"{type(self.model).__name__} takes no threshold: leave the threshold out.")

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        """Return the default text prompts; None for models without text prompts."""
        return None

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the model's inputs for these text prompts. Raise `ModelError` for models without text input."""
        raise ModelError(f"{type(self.model).__name__} takes no text prompts: leave the prompts out.")

    def to_inputs(self, images: Tensor) -> Any:
        """Convert preprocessed images (N,C,H,W) to the input format of this family."""
        return images


class Detections(NamedTuple):
    """The detections of one image, sorted by decreasing score, as tensors with an autograd graph.

    `boxes` (B,4) are left, top, right, bottom in pixels of the model's input image. `scores` and `labels` (int64) are
    (B,). `masks` (B,H,W) are in [0,1] at the input size, or None.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor | None = None


class Candidates(NamedTuple):
    """All candidates of one image before postprocessing: boxes (M,4), scores (M,) and labels (M,)."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor


def to_candidates(boxes: Tensor, scores: Tensor, label: int | None) -> Candidates:
    """Return candidates with their scores for `label`; None means each candidate's highest-scoring label.

    `scores` (M,C) has the scores of all labels.
    """
    best_scores, labels = scores.max(1)
    if label is None:
        return Candidates(boxes, best_scores, labels)
    return Candidates(boxes, scores[:, label], torch.full_like(labels, label))


class LocalGradient(NamedTuple):
    """The gradient of one score at a tensor (N,C,H,W). Outside a small window, the gradient is zero.

    `image` and `score` are the indices of the image and of the score. `values` (C,h,w) is the gradient in the window.
    The window starts at row `top` and column `left`.
    """

    image: int
    score: int
    top: int
    left: int
    values: Tensor


class DetectorAdapter(Family):
    """A model that outputs boxes, each with a label and a score."""

    task = "detection"
    default_threshold = 0.5

    @cached_property
    def threshold(self) -> float:
        """Return the minimum score of detections. Only adapters of models without a threshold use this property."""
        return _THRESHOLDS.get(self.model, self.default_threshold)

    def set_threshold(self, threshold: float) -> None:
        self.threshold = _THRESHOLDS[self.model] = threshold

    @abstractmethod
    def read(self, run: ModelRun, batch: Batch) -> list[Detections]:
        """Return each image's detections after the model's own postprocessing, attached to the graph."""

    @abstractmethod
    def list_candidates(self, run: ModelRun, batch: Batch, label: int | None) -> list[Candidates]:
        """Return each image's candidates, scored for `label`; None means each candidate's highest-scoring label."""

    def differentiate(
        self, run: ModelRun, batch: Batch, detections: Sequence[Detections], edge: int | None, inputs: Sequence[Tensor]
    ) -> list[list[LocalGradient]] | None:
        """Return the local gradients of the detections' scores or box edges, as one list per input (N,C,H,W).

        If `edge` is None, scores are differentiated. Otherwise, `edge` is the index of a box edge. If the
        adapter cannot compute local gradients, the result is None, and the caller has to use autograd.
        """
        return None


class SegmenterAdapter(Family):
    """A model that outputs class scores for each pixel."""

    task = "segmentation"

    @abstractmethod
    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        """Return the class logits (N,C,h,w) at the model's output resolution, attached to the graph.

        The grid of the logits covers the model's input image. If the model predicts masks with classes, each
        pixel's class scores are computed from all masks, and take the place of logits.
        """

    @property
    def background(self) -> int | None:
        """Return the index of the background class; None if there is no background class."""
        names = [label.casefold().strip("_") for label in self.labels or ()]
        return names.index("background") if "background" in names else None

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Convert the output of `read` to class probabilities (N,C,h,w)."""
        return logits.softmax(1)


class Embedder(Family):
    """A model that embeds images, and possibly sentences, as vectors."""

    task = "matching"

    @abstractmethod
    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        """Return the image embeddings (N,D), not normalised and attached to the graph."""

    @property
    def is_transformer(self) -> bool:
        """Return whether the image tower is a plain transformer, which attention-based methods support."""
        return False

    @property
    def takes_mean(self) -> bool:
        """Return whether the image tower averages its tokens; False if this is unknown."""
        return False

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings (T,D) of sentences, not normalised and detached from the graph.

        Raises `TargetError` if the model has no text encoder or no tokenizer, or if a sentence is too long.
        """
        raise TargetError(f"{type(self.model).__name__} has no text encoder: compare images with targets.Like(...).")


class CaptionerAdapter(Family):
    """A model that writes a text about an image, token by token. `processor` prepares images and text; None if unknown."""

    task = "captioning"
    processor: Any = None

    @abstractmethod
    def write(self, images: Any, max_tokens: int = 40) -> list[int]:
        """Generate a caption of one image (1,C,H,W) greedily; return the caption's tokens without start and end tokens.

        Raises `TargetError` for a batch of several images, and for an empty caption.
        """

    @abstractmethod
    def bind(self, model: nn.Module, batch: Batch, tokens: Sequence[int]) -> tuple[nn.Module, Batch]:
        """Return the module and the batch to run. `read` takes the logits of these tokens from the module's output.

        Raises `TargetError` for tokens outside the vocabulary, for too many tokens, and for a missing prompt.
        """

    @abstractmethod
    def read(self, run: ModelRun, batch: Batch, tokens: Sequence[int]) -> Tensor:
        """Return the logits (N,T,V) over the vocabulary for each token, given the image and the earlier tokens."""

    @abstractmethod
    def decode_tokens(self, tokens: Sequence[int]) -> list[str]:
        """Decode each token to readable text. Raise `TargetError` if there is no tokenizer."""

    def split_caption(self, tokens: Sequence[int]) -> list[str]:
        """Return the part of the caption, with spaces, that each token adds. Raise errors as `decode_tokens` does.

        Together, the parts are the caption. If several tokens write one character, the first of them adds it, and the
        parts of the others are empty.
        """
        return [f" {text}" for text in self.decode_tokens(tokens)]

    @abstractmethod
    def encode_sentence(self, text: str, batch: Batch) -> list[int]:
        """Return the tokens of a sentence that follows the batch's prompt, without special tokens.

        Raises `TargetError` if there is no tokenizer, or if the tokenizer does not know a part of the sentence.
        """

    @abstractmethod
    def encode_alternative(self, text: str, token: int) -> int:
        """Return the first token of a text that could stand in place of `token`. Raise errors as `encode_sentence`."""


class Poses(NamedTuple):
    """The keypoint heatmaps of one image, sorted by decreasing score of the box.

    `heatmaps` (B,P,h,w) are attached to the graph. `regions` (B,4) are the boxes that the heatmaps cover: left, top,
    right and bottom in pixels of the model's input image, detached from the graph. `scores` (B,) are the scores of the
    boxes; None if the heatmaps cover the whole image.
    """

    heatmaps: Tensor
    regions: Tensor
    scores: Tensor | None = None


class PoseAdapter(Family):
    """A model that locates keypoints by heatmaps.

    A heatmap is divided by `temperature`. A softmax then converts the heatmap to a distribution over positions.
    """

    task = "pose"
    temperature: ClassVar[float] = 1.0

    def to_confidence(self, peak: float) -> float | None:
        """Return a keypoint's confidence, given its heatmap's maximum; by default, None outside [0,1]."""
        return peak if 0 <= peak <= 1 else None

    @abstractmethod
    def find_poses(self, run: ModelRun, batch: Batch) -> list[Poses]:
        """Return each image's heatmaps, the regions covered by the heatmaps, and the scores of the regions."""
