"""Class targets, and the scores of targets of any kind: logits, probabilities, contrasts and function values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import TargetError, format_fields, shorten, warn
from gradcam.hooks.containers import at_least_float32
from gradcam.hooks.pytorch import find_last_operation
from gradcam.options import ACTIVATIONS, SCORES
from gradcam.targets.base import ScoreExtractor, Target, TargetScores
from gradcam.targets.heads import NO_CLASSES, are_probabilities

VALID_TARGETS = (
    "an int for all images, one int per image, a nested (N,K) sequence for K classes per image, or a function of the "
    "output"
)
MIN_HALF_PRECISION_LENGTH = 64  # Half-precision vectors with fewer dimensions may have norm 1 by chance.
MAX_RIVALS = 5
MAX_FINER_RIVALS = 3
FINER_RIVAL_WEIGHT = 0.6
PROBABILITIES_WARNING = (
    "The model's output is {}. The heatmap explains this output instead of logits. The gradient of such an output "
    "vanishes for confident predictions. Explain the model without its last activation. To explain this "
    'output without this warning, pass targets.ClassTarget(..., activation="none") (--activation none).'
)
BINARY_LOGIT_WARNING = (
    "Assumed that the single output is a binary logit: class 1 is positive, class 0 negative. If the output is a "
    "regression value, pass {}."
)
ACTIVATED = {"softmax": "probabilities", "sigmoid": "probabilities", "log_softmax": "log-probabilities"}


@dataclass(frozen=True)
class ClassTarget:
    """The classes to explain, and the kind of score.

    Parameters
    ----------
    classes : int, sequence or Tensor, default None
        One class for all images, one class per image (N,), or K classes per image (N,K). None means the `top` most
        probable classes of each image.
    top : int, default 1
        The number of most probable classes to explain.
    score : str, default "logit"
        "logit", "probability" or "contrast". A contrast is the class's logit minus the mean logit of its rivals: the
        five other classes with the largest logits.
    against : int or sequence of int, default ()
        The rivals for the score "contrast", instead of the five classes with the largest logits.
    activation : str, default "auto"
        The function that converts logits to probabilities: "softmax", "sigmoid" (for multi-label models), or "auto"
        (sigmoid for a single logit, otherwise softmax). "none" means that the output is values or probabilities.
        "applied" means that a single output is a probability. With "sigmoid" or "applied", a single output counts as
        two classes: 1 is positive, 0 is negative. With "none", a single output is a regression value, explained as
        class 0.
    output : str or int, default None
        For models with several heads, the key or index of the class scores in the output. None works if there is only
        one head, or if one head is named `logits`.

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

    def __getattr__(self, name: str) -> Any:
        from gradcam.renames import read_old_attribute

        return read_old_attribute(self, name)

    def __post_init__(self) -> None:
        for name, choices in (("score", SCORES), ("activation", ACTIVATIONS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise TargetError(f"There is no {name} {shorten(value)}: choose one of {', '.join(choices)}.")
        if isinstance(self.top, bool) or not isinstance(self.top, int) or self.top < 1:
            raise TargetError(f"top is {self.top!r}, expected the number of classes to explain, 1 or more.")
        if self.score != "contrast" and self.against != () and len(to_rivals(self.against)):
            advice = "use score='contrast' with against."
            raise TargetError(f"against= is {shorten(self.against)}, but the score is {self.score!r}: {advice}")

    def resolve(self, logits: Tensor, images: int) -> ClassTarget:
        """Determine the classes (N,K) and, for a contrast, their rivals from the logits.

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
        rivals = self._rivals
        if self.score == "contrast" and rivals is None:
            rivals = choose_rivals(self.against, logits, classes)
        resolved = object.__new__(ClassTarget)  # `dataclasses.replace` would check all other fields again.
        vars(resolved).update(vars(self), classes=classes, _rivals=rivals)
        return resolved

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
        """Compute the scores (N,K) from logits (N,C), after `resolve` has determined the classes."""
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


def compute_scores(target: Any, output: Any, images: int) -> TargetScores:
    """Compute the scores of a target of any kind.

    Raises `TargetError` if the target does not fit the output or the number of images.
    """
    if is_function(target):
        if isinstance(target, ScoreExtractor):
            return target.score(output, images)
        scores = target(output)
        if not isinstance(scores, Tensor) or not is_dense_float(scores):
            description = describe_type(scores) if isinstance(scores, Tensor) else type(scores).__name__
            expected = f"a floating-point tensor ({images},) or ({images}, K)"
            raise TargetError(f"The target function returned {description}, expected {expected}.")
        if scores.ndim not in (1, 2) or len(scores) != images or 0 in scores.shape:
            expected = f"({images},) or ({images}, K): one score, or K scores, per image."
            raise TargetError(f"The target function returned a tensor {tuple(scores.shape)}, expected {expected}")
        values = at_least_float32(scores.reshape(images, -1))
        return TargetScores(values, None, None, target)
    target, logits = resolve_logits(to_class_target(target), output, images)
    _warn_of_output(target, output, logits, images, find_last_operation(logits))
    target = target.resolve(logits, images)
    return TargetScores(target.compute(logits), target.classes, logits, target)


def is_function(target: Any) -> bool:
    """Return whether a target computes the scores itself. Python types do not, although they are callable."""
    if type(target) in (int, list, ClassTarget, type(None)):  # Checks against abstract classes are slow.
        return False
    return isinstance(target, (Target, ScoreExtractor)) or (callable(target) and not isinstance(target, type))


def is_custom_function(target: Any) -> bool:
    """Return whether a target is a user's function of the output."""
    return is_function(target) and not isinstance(target, (Target, ScoreExtractor))


def to_class_target(target: Any) -> ClassTarget:
    """Convert classes in any form to a `ClassTarget`."""
    return target if isinstance(target, ClassTarget) else ClassTarget(target)


def resolve_logits(target: ClassTarget, output: Any, images: int) -> tuple[ClassTarget, Tensor]:
    """Return the target with its activation determined, and the logits (N,C).

    If `activation` is "auto", a single number per image counts as a binary logit, unless an activation function
    computed the number.
    """
    logits = target.find_logits(output, images)
    # If an activation function computed the output, leave the target unchanged: `_warn_of_output` warns that the output
    # is not a logit.
    if target.activation != "auto" or logits.shape[1] > 1 or find_last_operation(logits) in ACTIVATED:
        return target, logits
    if target.classes is not None:
        warn(BINARY_LOGIT_WARNING.format('targets.ClassTarget(activation="none")'))
    classes = 1 if target.classes is None and target.top == 1 else target.classes
    return replace(target, activation="sigmoid", classes=classes), to_two_classes(logits, "sigmoid")


def _warn_of_output(target: ClassTarget, output: Any, logits: Tensor, images: int, operation: str) -> None:
    """Warn if the scores are not logits, or if the output has several tensors that may be class scores."""
    if not isinstance(output, Tensor) and target.output is None:
        from gradcam.targets.output_heads import warn_of_further_heads

        warn_of_further_heads(output, images, is_linear=operation == "linear")
    is_requested = target.score == "probability" and are_probabilities(logits)
    if target.activation in ("none", "applied") or is_requested or operation == "linear":
        return
    kind = ACTIVATED.get(operation) or ("probabilities" if are_probabilities(logits) else None)
    if kind is not None:
        warn(PROBABILITIES_WARNING.format(kind))


def check_classes(classes: Any, images: int, count: int) -> Tensor:
    """Convert classes in any form to int64 (N,K). Raise `TargetError` if they are invalid."""
    if type(classes) is int:
        check_class_range([classes], count)
        return torch.full((images, 1), classes, dtype=torch.int64, device="cpu")
    is_nested = type(classes) is list and len(classes) == images and set(map(type, classes)) == {list}
    if is_nested and len(set(map(len, classes))) == 1:
        flat = list(itertools.chain.from_iterable(classes))
        if set(map(type, flat)) == {int}:  # the usual form, without conversions
            check_class_range(flat, count)
            if len(set(flat)) == 1:
                return torch.full((images, len(classes[0])), flat[0], dtype=torch.int64, device="cpu")
            return torch.from_numpy(np.array(classes, np.int64))
    values = to_integers(classes)
    if values.ndim == 0:
        values = np.full((images, 1), values)
    elif values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or len(values) != images or values.shape[1] == 0:
        is_row = images == 1 and values.ndim == 2
        hint = f" For several classes of one image, write [{list(classes)}]." if is_row else ""
        raise TargetError(f"The target {shorten(classes)} does not fit {images} image(s): pass {VALID_TARGETS}.{hint}")
    check_class_range(values.flatten().tolist(), count)
    return torch.from_numpy(values.astype(np.int64, copy=False))


def check_class_range(classes: Sequence[int], count: int) -> None:
    """Raise `TargetError` for a class that a model with `count` classes does not have."""
    if min(classes) < 0 or max(classes) >= count:
        class_ = min(classes) if min(classes) < 0 else max(classes)
        raise TargetError(f"Class {class_} does not exist: this model has {count} classes, 0 to {count - 1}.")


def to_integers(classes: Any) -> np.ndarray[Any, Any]:
    """Return class indices in any form as an integer array. Raise `TargetError` for other values."""
    try:
        values = np.asarray(classes.detach().cpu() if isinstance(classes, Tensor) else _without_tensors(classes))
    # NumPy raises these errors for ragged sequences, and for tensors that it cannot represent.
    except (ValueError, TypeError, RuntimeError):
        values = np.asarray(None)
    if values.dtype.kind not in "iu":
        raise TargetError(f"The target {shorten(classes)} does not contain class indices: pass {VALID_TARGETS}.")
    return values


def _without_tensors(classes: Any) -> Any:
    """Convert tensors and arrays, also in nested sequences, to Python numbers; return None if a value is a bool."""
    if isinstance(classes, (list, tuple)):
        values = [_without_tensors(value) for value in classes]
        return None if any(value is None or isinstance(value, (bool, np.bool_)) for value in values) else values
    return _without_tensors(classes.tolist()) if isinstance(classes, (Tensor, np.ndarray)) else classes


def logit(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the logits of the classes."""
    return logits.gather(1, classes)


def probability(logits: Tensor, classes: Tensor, activation: str = "auto") -> Tensor:
    """Return the probabilities of the classes."""
    return probabilities(logits, activation).gather(1, classes)


def to_two_classes(logits: Tensor, activation: str) -> Tensor:
    """Convert a single logit z (N,1) to the logits (-z, z), or a single probability p to (1 - p, p)."""
    return torch.cat([1 - logits if activation == "applied" else -logits, logits], 1)


def probabilities(logits: Tensor, activation: str = "auto") -> Tensor:
    """Return the probabilities (N,C) of all classes, computed by one of the `options.ACTIVATIONS`."""
    if activation in ("none", "applied"):
        return logits
    if activation == "sigmoid" or (activation == "auto" and logits.shape[1] == 1):
        return logits.sigmoid()
    return logits.softmax(1)


def to_probabilities(output: Any, images: int, activation: str) -> Tensor:
    """Return the probabilities of all classes, float32 (N,C), from a model's output for this many images."""
    target, logits = resolve_logits(ClassTarget(activation=activation), output, images)
    return probabilities(logits, target.activation)


def is_dense_float(tensor: Tensor) -> bool:
    """Return whether a tensor supports arithmetic: floats of at least 16 bits, dense, and not on the meta device."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    return is_dense and tensor.is_floating_point() and tensor.dtype.itemsize > 1


def describe_type(tensor: Tensor) -> str:
    """Describe a tensor's dtype, and its layout or device if the tensor is not strided or is on the meta device."""
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} ".removeprefix("torch.")
    return f"{'meta ' if tensor.is_meta else layout}{tensor.dtype}"


def _advise(values: Any) -> str:
    """Suggest a target for an output that is not (N,C); return "" if only a function can explain the output."""
    if isinstance(values, Tensor) and values.ndim == 4:
        return "for a segmentation use targets.Mask(class, mask) (--task segmentation); for anything else "
    is_boxes = not isinstance(values, Tensor) or values.ndim == 3
    return "for a detector use targets.Box(number) (--task detection); for anything else " if is_boxes else ""


def _is_normalised(logits: Tensor) -> bool:
    """Return whether all rows have norm 1. Return False for one-hot probabilities and short half-precision vectors."""
    if logits.shape[1] < (MIN_HALF_PRECISION_LENGTH if logits.dtype.itemsize < 4 else 2):
        return False
    # If a linear layer computed the output, a norm of 1 is only chance.
    if logits.grad_fn is not None and find_last_operation(logits) == "linear":
        return False
    values, tolerance = logits.detach(), torch.finfo(logits.dtype).eps * (4 if logits.dtype.itemsize > 2 else 1)
    if not all(abs(length - 1) < tolerance for length in torch.linalg.vector_norm(values, dim=1).tolist()):
        return False
    return not bool((values >= 0).all() and (values.sum(1) - 1).abs().max() < 1e-2)


def find_logits(output: Any, images: int, *, head: str | int | None = None) -> Tensor:
    """Return the logits (N,C) in a model's output, converted to at least float32.

    The logits are the output itself, its `logits`, or its tensor of shape (N,C). A single logit may also have the shape
    (N,). If the output contains both logits and their probabilities, the logits are returned. If the output contains
    several unnamed tensors, the first one is returned. `head` selects a tensor by key or index. Raises `TargetError`
    for other shapes, for an embedding, and if there are several named heads but `head` is None.
    """
    logits: Any = output
    if not isinstance(output, Tensor) or head is not None:
        from gradcam.targets.output_heads import choose_tensor

        logits = choose_tensor(output, images, head)
    if isinstance(logits, Tensor) and logits.shape == (images,):
        logits = logits[:, None]
    is_usable = isinstance(logits, Tensor) and is_dense_float(logits) and logits.ndim == 2
    if not is_usable or len(logits) != images or logits.shape[1] == 0:
        is_tensor = isinstance(logits, Tensor)
        description = f"{describe_type(logits)} {tuple(logits.shape)}" if is_tensor else type(output).__name__
        expected = f"class scores ({images}, classes) for {images} image(s)"
        advice = f"{_advise(logits)}pass target=, a function from the model's output to one score per image."
        raise TargetError(f"The output is {description}, expected {expected}: {advice}")
    if _is_normalised(logits):
        problem = "The output's vectors have norm 1, so they are probably embeddings, not logits"
        raise TargetError(f"{problem}: {NO_CLASSES}")
    return at_least_float32(logits)


def to_rivals(against: Any) -> np.ndarray[Any, Any]:
    """Return the distinct classes to contrast with, int64 (R,)."""
    is_empty = not against if isinstance(against, (list, tuple)) else np.size(against) == 0
    if against is None or is_empty:
        return np.empty(0, np.int64)
    with contextlib.suppress(TargetError):
        values = to_integers(against)
        if values.ndim <= 1:
            return np.unique(values).astype(np.int64)
    raise TargetError(f"against= is {shorten(against)}, expected a class index, or a list of class indices.")


def choose_rivals(against: Any, logits: Tensor, classes: Tensor) -> Tensor:
    """Return each class's rivals (N,K,R): the classes `against` or, if it is empty, the five with the largest logits.

    Raises `TargetError` if a class of `against` does not exist, or if a class would be contrasted with itself.
    """
    indices = to_rivals(against)
    if not len(indices):
        class_logits = logits.detach()[:, None].expand(-1, classes.shape[1], -1)
        rival_logits = class_logits.scatter(2, classes[..., None], float("-inf"))
        return rival_logits.topk(min(MAX_RIVALS, logits.shape[1] - 1), dim=2).indices
    check_class_range(indices.tolist(), logits.shape[1])
    self_contrasted = sorted(set(indices.tolist()) & set(classes.flatten().tolist()))
    if self_contrasted:
        raise TargetError(f"Class {self_contrasted[0]} cannot be contrasted with itself: leave it out of `against`.")
    return torch.from_numpy(indices).to(logits.device).expand(*classes.shape, -1)


def compute_contrast(logits: Tensor, classes: Tensor, rivals: Tensor, share: float = 1.0) -> Tensor:
    """Return each class's logit minus `share` times the mean logit of its rivals (N,K,R).

    If R is 0, return the logit alone.
    """
    class_logits = logit(logits, classes)
    if rivals.shape[2] == 0:
        return class_logits
    return class_logits - share * logits[:, None].expand(-1, classes.shape[1], -1).gather(2, rivals).mean(2)


def find_nearest_rivals(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the three classes whose logits are nearest to each class's logit (N,K,R), or fewer in small models."""
    distances = (logits[:, None] - logit(logits, classes)[..., None]).abs().scatter(2, classes[..., None], float("inf"))
    return distances.topk(min(MAX_FINER_RIVALS, logits.shape[1] - 1), dim=2, largest=False).indices
