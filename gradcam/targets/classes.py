"""Define class targets, and compute the scores of all targets: logits, probabilities, contrasts and functions."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import TargetError, format_fields, shorten, warn
from gradcam.hooks.containers import find_floating_tensor, has_rows, take_rows
from gradcam.hooks.pytorch import find_last_operation
from gradcam.options import ACTIVATIONS, SCORES, keep_old_names
from gradcam.targets.base import ScoreExtractor, Target, TargetScores
from gradcam.targets.heads import NO_CLASSES

VALID_TARGETS = (
    "an int for all images, one int per image, a nested (N,K) sequence for K classes per image, or a function of the "
    "output"
)
PROBABILITIES_WARNING = (
    "The model's output is {}, which the heatmap explains instead of logits. The gradient of such an output vanishes for "
    "confident predictions. Explain the model without its last activation, or confirm with "
    'targets.ClassTarget(..., activation="none") (--activation none).'
)
BINARY_LOGIT_WARNING = (
    "Assumed that the single output is a binary logit: class 1 is positive, class 0 negative. If the output is a "
    "regression value, pass {}."
)
MIN_HALF_PRECISION_LENGTH = 64  # dimensions: shorter half-precision vectors may have norm 1 by chance
ACTIVATED = {"softmax": "probabilities", "sigmoid": "probabilities", "log_softmax": "log-probabilities"}
LOGIT_NAMES = ("logits", "logits_per_image")
EMBEDDING_NAME = re.compile("embed|pool|feature|hidden|flatten|latent|descriptor", re.IGNORECASE)
# If a part of an output has such a name, the output's scores belong to objects, and not to the image.
OBJECT_NAME = re.compile("keypoint|boxes|descriptor|matches", re.IGNORECASE)
MAX_SUM_ERROR = 1e-2  # the rounding error of the sum of a thousand half-precision probabilities
MAX_RIVALS = 5
MAX_FINER_RIVALS = 3
FINER_RIVAL_WEIGHT = 0.6


def check_classes(classes: Any, images: int, count: int) -> Tensor:
    """Convert classes in any form to int64 (N,K). Raise `TargetError` if they are invalid."""
    if type(classes) is int:
        check_class_range([classes], count)
        return torch.full((images, 1), classes, dtype=torch.int64, device="cpu")
    values = _to_integers(classes)
    if values.ndim == 0:
        values = np.full((images, 1), values)
    elif values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or len(values) != images or values.shape[1] == 0:
        is_row = images == 1 and values.ndim == 2
        hint = f" For several classes of one image, write [{list(classes)}]." if is_row else ""
        raise TargetError(f"The target {shorten(classes)} does not fit {images} image(s): pass {VALID_TARGETS}.{hint}")
    check_class_range(values.flatten().tolist(), count)
    return torch.from_numpy(values.astype(np.int64))


def check_class_range(classes: Sequence[int], count: int) -> None:
    """Raise `TargetError` for a class that a model with `count` classes does not have."""
    if min(classes) < 0 or max(classes) >= count:
        class_ = min(classes) if min(classes) < 0 else max(classes)
        raise TargetError(f"Class {class_} does not exist: this model has {count} classes, 0 to {count - 1}.")


def to_rivals(against: Any) -> np.ndarray[Any, Any]:
    """Return the distinct classes to contrast with, int64 (R,)."""
    is_empty = not against if isinstance(against, (list, tuple)) else np.size(against) == 0
    if against is None or is_empty:
        return np.empty(0, np.int64)
    with contextlib.suppress(TargetError):
        values = _to_integers(against)
        if values.ndim <= 1:
            return np.unique(values).astype(np.int64)
    raise TargetError(f"against is {shorten(against)}, expected a class index, or a list of class indices.")


def _to_integers(classes: Any) -> np.ndarray[Any, Any]:
    try:
        values = np.asarray(classes.detach().cpu() if isinstance(classes, Tensor) else _without_tensors(classes))
    except (ValueError, TypeError, RuntimeError):  # a ragged sequence, or a tensor that NumPy cannot represent
        values = np.asarray(None)
    if values.dtype.kind not in "iu":
        raise TargetError(f"The target {shorten(classes)} does not contain class indices: pass {VALID_TARGETS}.")
    return values


def _without_tensors(classes: Any) -> Any:
    """Convert nested sequences of tensors and arrays to plain ones; return None if one contains a bool."""
    if isinstance(classes, (list, tuple)):
        values = [_without_tensors(value) for value in classes]
        return None if any(value is None or isinstance(value, (bool, np.bool_)) for value in values) else values
    if isinstance(classes, (Tensor, np.ndarray)):
        return _without_tensors(classes.tolist())
    return classes


def logit(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the logits of the classes."""
    return logits.gather(1, classes)


def probability(logits: Tensor, classes: Tensor, activation: str = "auto") -> Tensor:
    """Return the probabilities of the classes."""
    return probabilities(logits, activation).gather(1, classes)


def to_two_classes(logits: Tensor, activation: str) -> Tensor:
    """Convert a single logit z (N,1) to two classes: -z and z, or 1 - p and p if it is a probability p."""
    return torch.cat([1 - logits if activation == "applied" else -logits, logits], 1)


def compute_contrast(logits: Tensor, classes: Tensor, rivals: Tensor, share: float = 1.0) -> Tensor:
    """Return each class's logit minus `share` times the mean logit of its rivals (N,K,R), if there are rivals."""
    class_logits = logit(logits, classes)
    if rivals.shape[2] == 0:
        return class_logits
    return class_logits - share * logits[:, None].expand(-1, classes.shape[1], -1).gather(2, rivals).mean(2)


def find_strongest(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the five strongest rivals of each class, (N,K,R). There are fewer if the model has fewer classes."""
    rival_logits = logits[:, None].expand(-1, classes.shape[1], -1).scatter(2, classes[..., None], float("-inf"))
    return rival_logits.topk(min(MAX_RIVALS, logits.shape[1] - 1), dim=2).indices


def find_nearest_rivals(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the three classes with the logits nearest to each class's logit, (N,K,R); fewer if the model has fewer."""
    distances = (logits[:, None] - logit(logits, classes)[..., None]).abs()
    distances = distances.scatter(2, classes[..., None], float("inf"))
    return distances.topk(min(MAX_FINER_RIVALS, logits.shape[1] - 1), dim=2, largest=False).indices


def probabilities(logits: Tensor, activation: str = "auto") -> Tensor:
    """Return the probabilities (N,C) of all classes, computed by one of the `options.ACTIVATIONS`."""
    if activation in ("none", "applied"):
        return logits
    if activation == "sigmoid" or (activation == "auto" and logits.shape[1] == 1):
        return logits.sigmoid()
    return logits.softmax(1)


@keep_old_names
@dataclass(frozen=True)
class ClassTarget:
    """The classes to explain, and the kind of score.

    Parameters
    ----------
    classes : int, sequence or Tensor, default None
        An int for all images, N ints, or (N,K); None for the `top` most probable classes of each image.
    top : int, default 1
        The number of most probable classes to explain.
    score : str, default "logit"
        "logit", "probability", or "contrast": the class's logit minus the mean of its five strongest rivals.
    against : int or sequence of int, default ()
        The rivals for score "contrast", instead of the five strongest.
    activation : str, default "auto"
        How logits become probabilities: "softmax", "sigmoid" (multi-label), "none" (the output is values or
        probabilities), "applied" (a single output is a probability), or "auto" (sigmoid for a single logit, otherwise
        softmax). With "sigmoid" or "applied", a single output is two classes: 1 is positive, 0 is negative. With
        "none", a single output is a regression value, explained as class 0.
    output : str or int, default None
        The key or index of the class scores in an output with several heads. None works if there is only one head, or
        if one is named `logits`.

    Raises
    ------
    TargetError
        If the score or activation is unknown, `top` is below 1, or `against` is given with a score other than
        "contrast". When used with a model: if the model does not have a class, or a class is contrasted with itself.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.targets.classes import ClassTarget
    >>> why_espresso_and_no_cup = ClassTarget(967, score="contrast", against=968)
    >>> gradcam.load_classifier().explain("photo.jpg", target=why_espresso_and_no_cup).label()
    'espresso'
    """

    classes: Any = None
    top: int = 1
    score: str = "logit"
    against: Any = ()
    activation: str = "auto"
    output: str | int | None = None
    _rivals: Tensor | None = field(default=None, repr=False, compare=False)  # (N,K,R) in a resolved target

    __repr__ = format_fields

    def __post_init__(self) -> None:
        for name, choices in (("score", SCORES), ("activation", ACTIVATIONS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise TargetError(f"There is no {name} {shorten(value)}: choose one of {', '.join(choices)}.")
        if isinstance(self.top, bool) or not isinstance(self.top, int) or self.top < 1:
            raise TargetError(f"top is {self.top!r}, expected the number of classes to explain, 1 or more.")
        if self.score != "contrast" and self.against != () and len(to_rivals(self.against)):
            raise TargetError(
                f"against is {shorten(self.against)}, but the score is {self.score!r}: use score='contrast' with against."
            )

    def resolve(self, logits: Tensor, images: int) -> ClassTarget:
        """Choose the classes (N,K), and the rivals of a contrast, from these logits.

        Parameters
        ----------
        logits : Tensor (N,C)
            The model's logits.
        images : int
            The number of images.

        Returns
        -------
        ClassTarget
            The same target, with `classes` as a tensor.

        Raises
        ------
        TargetError
            If the model does not have a class, or a class is contrasted with itself.
        """
        count = logits.shape[1]
        if self.classes is None:
            if self.top > count:
                raise TargetError(f"The top {self.top} classes were requested, but this model has {count}.")
            classes = logits.topk(self.top, dim=1).indices
        else:
            classes = check_classes(self.classes, images, count).to(logits.device)
        if self.score == "probability" and self.activation != "sigmoid" and are_probabilities(logits):
            return replace(self, classes=classes, activation="none")
        if self.score != "contrast" or self._rivals is not None:
            return replace(self, classes=classes)
        indices = to_rivals(self.against)
        if not len(indices):
            return replace(self, classes=classes, _rivals=find_strongest(logits.detach(), classes))
        check_class_range(indices.tolist(), count)
        self_contrasted = sorted(set(indices.tolist()) & set(classes.flatten().tolist()))
        if self_contrasted:
            raise TargetError(
                f"Class {self_contrasted[0]} cannot be contrasted with itself: leave it out of `against`."
            )
        rivals = torch.from_numpy(indices).to(logits.device).expand(*classes.shape, -1)
        return replace(self, classes=classes, _rivals=rivals)

    def find_logits(self, output: Any, images: int) -> Tensor:
        """Find the logits in a model's output, in the class order of this target.

        Parameters
        ----------
        output : Any
            The model's output.
        images : int
            The number of images.

        Returns
        -------
        Tensor (N,C)
            The logits. A single logit with "sigmoid" or "applied" gives two columns.
        """
        logits = find_logits(output, images, head=self.output)
        is_pair = logits.shape[1] == 1 and self.activation in ("sigmoid", "applied")
        return to_two_classes(logits, self.activation) if is_pair else logits

    def compute(self, logits: Tensor) -> Tensor:
        """Compute the scores (N,K) from logits (N,C). The target has to be resolved."""
        if self.score == "contrast":
            return compute_contrast(logits, self.classes, cast("Tensor", self._rivals))
        is_logit = self.score == "logit"
        return logit(logits, self.classes) if is_logit else probability(logits, self.classes, self.activation)

    def select(self, i: int) -> ClassTarget:
        """Return the resolved target for image i alone."""
        rivals = None if self._rivals is None else self._rivals[i : i + 1]
        return replace(self, classes=self.classes[i : i + 1], _rivals=rivals)

    def repeat(self, times: int) -> ClassTarget:
        """Return the resolved target for a batch that repeats all images `times` times."""
        rivals = None if self._rivals is None else self._rivals.repeat(times, 1, 1)
        return replace(self, classes=self.classes.repeat(times, 1), _rivals=rivals)


@dataclass(frozen=True)
class RepeatedTarget:
    """A target for the output of augmented views: one block of `images` rows for each of the `blocks` views."""

    target: Any
    images: int
    blocks: int

    def score(self, output: Any) -> TargetScores:
        """Return the scores of all rows. If classes or rivals are chosen by rank, the first block determines them."""
        total = self.images * self.blocks
        if is_function(self.target):
            parts = [compute_scores(self.target, self._block(output, i), self.images) for i in range(self.blocks)]
            return TargetScores(torch.cat([part.values for part in parts]), None, None, self, parts[0].instances)
        class_target, logits = resolve_logits(to_class_target(self.target), output, total)
        first = compute_scores(replace(class_target, output=None), logits[: self.images], self.images).target
        target = first.repeat(self.blocks)
        repeated = replace(self, target=replace(first, output=class_target.output))
        return TargetScores(target.compute(logits), target.classes, logits, repeated)

    def find_logits(self, output: Any, rows: int) -> Tensor:
        return to_class_target(self.target).find_logits(output, rows)

    def _block(self, output: Any, block: int) -> Any:
        rows = slice(block * self.images, (block + 1) * self.images)
        total = self.images * self.blocks
        if not has_rows(output, total):
            raise TargetError(
                f"The output, {type(output).__name__}, has no tensor with {total} rows, so it cannot be split into "
                "augmented views: explain without augmentation."
            )
        return take_rows(output, rows, total)


def compute_scores(target: Any, output: Any, images: int) -> TargetScores:
    """Compute the scores of a target in any of its forms.

    Raises `TargetError` if the target does not fit the output or the number of images.
    """
    if isinstance(target, RepeatedTarget):
        return target.score(output)
    if isinstance(target, ScoreExtractor):
        return target.score(output, images)
    if is_function(target):
        scores = target(output)
        if not isinstance(scores, Tensor) or not _is_dense_float(scores):
            description = _describe_type(scores) if isinstance(scores, Tensor) else type(scores).__name__
            raise TargetError(
                f"The target function returned {description}, expected a floating-point tensor ({images},) or ({images}, K)."
            )
        if scores.ndim not in (1, 2) or len(scores) != images or 0 in scores.shape:
            raise TargetError(
                f"The target function returned a tensor {tuple(scores.shape)}, expected ({images},) or ({images}, K): "
                "one score, or K scores, per image."
            )
        scores = scores.reshape(images, -1)
        return TargetScores(scores.to(torch.promote_types(scores.dtype, torch.float32)), None, None, target)
    target, logits = resolve_logits(to_class_target(target), output, images)
    _warn_of_output(target, output, logits, images, find_last_operation(logits))
    target = target.resolve(logits, images)
    return TargetScores(target.compute(logits), target.classes, logits, target)


def is_function(target: Any) -> bool:
    """Return whether a target computes scores itself. A type is callable, but it is not a function of the output."""
    return isinstance(target, (Target, ScoreExtractor)) or (callable(target) and not isinstance(target, type))


def is_custom_function(target: Any) -> bool:
    """Return whether a target is a user's function of the output."""
    return is_function(target) and not isinstance(target, (Target, ScoreExtractor))


def to_class_target(target: Any) -> ClassTarget:
    """Convert classes in any form to a `ClassTarget`."""
    return target if isinstance(target, ClassTarget) else ClassTarget(target)


def resolve_logits(target: ClassTarget, output: Any, images: int) -> tuple[ClassTarget, Tensor]:
    """Return the logits (N,C), and the target with its activation resolved.

    A single output of unknown meaning counts as a binary logit.
    """
    logits = target.find_logits(output, images)
    # If the single output is a probability, `_warn_of_output` reports it later.
    if target.activation != "auto" or logits.shape[1] > 1 or find_last_operation(logits) in ACTIVATED:
        return target, logits
    if target.classes is not None:
        warn(BINARY_LOGIT_WARNING.format('targets.ClassTarget(activation="none")'))
    classes = 1 if target.classes is None and target.top == 1 else target.classes
    return replace(target, activation="sigmoid", classes=classes), to_two_classes(logits, "sigmoid")


def find_logits(output: Any, images: int, *, head: str | int | None = None) -> Tensor:
    """Return the logits (N,C) in a model's output, converted to at least float32.

    The logits are the output itself, its `logits`, or its tensor of shape (N,C). If the output has logits and their
    probabilities, the logits are returned. If it has several other tensors without names, the first one is returned.
    `head` selects a tensor by key or index. A single logit may also have the shape (N,). Raises `TargetError` for other
    shapes, for an embedding, and if there are several named heads but `head` is None.
    """
    heads = _list_heads(output)
    if isinstance(head, int) and isinstance(output, tuple) and head < len(output):
        head = list(heads)[head]  # The fields of a named tuple have indices, too.
    if head is not None and head not in heads:
        names = ", ".join(map(shorten, list(heads)[:6])) + (", ..." if len(heads) > 6 else "")
        content = f"it has {names}" if heads else "it is a single tensor, or has no keys"
        raise TargetError(f"The output has no {shorten(head)}: {content}.")
    logits: Any
    head = next(filter(heads.__contains__, LOGIT_NAMES), None) if head is None else head
    if head is not None:
        logits = heads[head]
    elif heads:
        has_objects = any(isinstance(part, Mapping) and "boxes" in part for part in heads.values())
        logits = None if has_objects else _choose_head(heads, images)
    else:
        logits = getattr(output, "logits", output)
        logits = logits if isinstance(logits, Tensor) else find_floating_tensor(logits)
    if isinstance(logits, Tensor) and logits.shape == (images,):
        logits = logits[:, None]
    is_usable = isinstance(logits, Tensor) and _is_dense_float(logits) and logits.ndim == 2
    if not is_usable or len(logits) != images or logits.shape[1] == 0:
        description = (
            f"{_describe_type(logits)} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        )
        raise TargetError(
            f"The output is {description}, expected class scores ({images}, classes) for {images} image(s): "
            f"{_advise(logits)}pass target=, a function from the model's output to one score per image."
        )
    if _is_normalised(logits):
        raise TargetError(f"The output's vectors have norm 1, like embeddings and unlike logits: {NO_CLASSES}")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _advise(values: Any) -> str:
    """Return a hint for an output that is not (N,C): which target to use, or "" if only a function can help."""
    if isinstance(values, Tensor) and values.ndim == 4:
        return "for a segmentation use targets.Mask(class, mask) (--task segmentation); for anything else "
    is_boxes = not isinstance(values, Tensor) or values.ndim == 3
    return "for a detector use targets.Box(number) (--task detection); for anything else " if is_boxes else ""


def find_output_name(output: Any, logits: Tensor) -> str | None:
    """Return the key or index of the tensor that the logits come from; None if the output is a single tensor."""
    for name, value in _list_heads(output).items():
        is_candidate = isinstance(value, Tensor) and value.is_floating_point() and value.numel() == logits.numel()
        if is_candidate and torch.equal(value.detach().reshape(logits.shape).to(logits), logits.detach()):
            return str(name)
    return None


def find_activation(values: Tensor, logits: Tensor) -> str | None:
    """Return the activation that maps the logits to the values; None if there is no such activation.

    The result is "softmax", "log_softmax" or "sigmoid".
    """
    if values is logits or values.shape != logits.shape or not values.is_floating_point():
        return None
    if are_probabilities(values) and not are_probabilities(logits):
        return "softmax"  # possibly with a temperature
    tolerance = 1e-5 if min(values.dtype.itemsize, logits.dtype.itemsize) > 2 else MAX_SUM_ERROR
    values, logits = values.detach().float(), logits.detach().float()
    results = {"softmax": logits.softmax(-1), "log_softmax": logits.log_softmax(-1), "sigmoid": logits.sigmoid()}
    return next((name for name, result in results.items() if torch.allclose(values, result, 0, tolerance)), None)


def are_probabilities(values: Tensor) -> bool:
    """Return whether the values (N,C) are not negative and each row sums to 1."""
    if values.ndim < 2 or values.shape[1] < 2:
        return False
    values = values.detach().float()
    return bool((values.amin() >= 0) & ((values.sum(1) - 1).abs().amax() < MAX_SUM_ERROR))


def _warn_of_output(target: ClassTarget, output: Any, logits: Tensor, images: int, operation: str) -> None:
    """Warn if the scores are probabilities, or if the first of several tensors is explained."""
    heads = {} if isinstance(output, Tensor) or target.output is not None else _list_heads(output)
    further_heads = (
        [] if not heads or any(name in heads for name in LOGIT_NAMES) else _find_class_scores(heads, images)[1:]
    )
    if operation == "linear":  # A second output often has features, which rarely come from a linear layer.
        further_heads = [name for name in further_heads if find_last_operation(heads[name]) == "linear"]
    if further_heads:
        warn(
            f"The output has several tensors ({images}, C), and the first one is explained. Choose one with "
            f"targets.ClassTarget(..., output={further_heads[0]!r}), or confirm the first with its index."
        )
    is_requested = target.score == "probability" and are_probabilities(logits)
    if target.activation in ("none", "applied") or is_requested or operation == "linear":
        return
    kind = ACTIVATED.get(operation) or ("probabilities" if are_probabilities(logits) else None)
    if kind is not None:
        warn(PROBABILITIES_WARNING.format(kind))


def _list_heads(output: Any) -> dict[str | int, Any]:
    """Return the parts of an output by key or index; an empty dict for a tensor."""
    if isinstance(output, Tensor):
        return {}
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, (tuple, list)):
        return dict(zip(getattr(output, "_fields", range(len(output))), output))
    return dict(output) if isinstance(output, Mapping) else {}


def _choose_head(heads: Mapping[str | int, Any], images: int) -> Tensor | None:
    """Return the class scores, or else the first floating tensor. Raise `TargetError` if the choice is ambiguous."""
    first = next(iter(heads.values()), None)
    if isinstance(first, (tuple, list)) and _find_class_scores(_list_heads(first), images):
        return _choose_head(_list_heads(first), images)
    names = _find_class_scores(heads, images)
    if not names:
        return find_floating_tensor(list(heads.values()))
    logits, form = heads[names[0]], "C"
    rivals = names if isinstance(names[0], str) else names[:1]
    if logits.numel() == images:  # If there are other tensors, a single number may also be a value estimate.
        rows = [name for name in _list_rows(heads, images) if not EMBEDDING_NAME.search(str(name))]
        rows = [name for name in rows if find_activation(heads[name], logits) is None]
        if isinstance(names[0], str) or rows[0] != names[0]:
            rivals, form = rows, "..."
    if len(rivals) > 1:
        raise TargetError(
            f"The output has {len(rivals)} tensors ({images}, {form}): {', '.join(map(shorten, rivals))}. Choose the class "
            f"scores with targets.ClassTarget(..., output={names[0]!r}), or pass a function as target=."
        )
    return logits


def _find_class_scores(heads: Mapping[str | int, Any], images: int) -> list[str | int]:
    """Return the names of tensors that may be logits. Raise `TargetError` for embeddings and object scores."""
    rows = {name: tensor for name, tensor in _list_rows(heads, images).items() if tensor.is_floating_point()}
    rows = {name: tensor for name, tensor in rows.items() if tensor.ndim == 2} or rows
    scores = {name: tensor for name, tensor in rows.items() if not EMBEDDING_NAME.search(str(name))}
    if rows and not scores:
        raise TargetError(f"The output's {next(iter(rows))!r} is an embedding: {NO_CLASSES}")
    if rows and (objects := [name for name in heads if OBJECT_NAME.search(str(name))]):
        raise TargetError(f"The output has {objects[0]!r}, so its scores are those of objects: {NO_CLASSES}")
    logit_names = [
        name
        for name, values in scores.items()
        if not any(find_activation(values, candidate) for candidate in scores.values())
    ]
    return logit_names or list(scores)[:1]


def _list_rows(heads: Mapping[str | int, Any], images: int) -> dict[str | int, Tensor]:
    """Return the tensors (N,) and (N,C) of an output by name."""
    tensors = {name: value for name, value in heads.items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in tensors.items() if tensor.ndim in (1, 2) and len(tensor) == images}


def _is_normalised(logits: Tensor) -> bool:
    """Return whether all rows have norm 1; False for one-hot probabilities and short half-precision vectors."""
    values, itemsize = logits.detach(), logits.dtype.itemsize
    if logits.shape[1] < (MIN_HALF_PRECISION_LENGTH if itemsize < 4 else 2):
        return False
    # A linear layer does not normalise its output.
    if logits.grad_fn is not None and find_last_operation(logits) == "linear":
        return False
    tolerance = torch.finfo(logits.dtype).eps * (4 if itemsize > 2 else 1)
    if not all(abs(length - 1) < tolerance for length in torch.linalg.vector_norm(values, dim=1).tolist()):
        return False
    return not bool((values >= 0).all() and (values.sum(1) - 1).abs().max() < 1e-2)


def _is_dense_float(tensor: Tensor) -> bool:
    """Return whether a tensor supports arithmetic: floats of at least 16 bits, dense, and not on the meta device."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    return is_dense and tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _describe_type(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} ".removeprefix("torch.")
    return f"{'meta ' if tensor.is_meta else layout}{tensor.dtype}"
