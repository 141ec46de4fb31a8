"""Define class targets, and compute the scores of all targets: logits, probabilities, contrasts and functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from gradcam.errors import TargetError, format_fields, shorten, warn
from gradcam.hooks.pytorch import find_last_operation
from gradcam.options import ACTIVATIONS, SCORES
from gradcam.targets.base import ScoreExtractor, Target, TargetScores
from gradcam.targets.class_scores import (
    are_probabilities,
    check_classes,
    describe_type,
    is_dense_float,
    logit,
    probability,
    to_logits,
    to_two_classes,
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
ACTIVATED = {"softmax": "probabilities", "sigmoid": "probabilities", "log_softmax": "log-probabilities"}


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
        if self.score != "contrast" and self.against != () and _has_rivals(self.against):
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
        from gradcam.targets.contrast import choose_rivals

        return replace(self, classes=classes, _rivals=choose_rivals(self.against, logits, classes))

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
        if isinstance(output, Tensor) and self.output is None:
            logits = to_logits(output, Tensor, images)
        else:
            from gradcam.targets.output_heads import find_logits

            logits = find_logits(output, images, head=self.output)
        is_pair = logits.shape[1] == 1 and self.activation in ("sigmoid", "applied")
        return to_two_classes(logits, self.activation) if is_pair else logits

    def compute(self, logits: Tensor) -> Tensor:
        """Compute the scores (N,K) from logits (N,C). The target has to be resolved."""
        if self.score == "contrast":
            from gradcam.targets.contrast import compute_contrast

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


def _has_rivals(against: Any) -> bool:
    from gradcam.targets.contrast import to_rivals

    return len(to_rivals(against)) > 0


def compute_scores(target: Any, output: Any, images: int) -> TargetScores:
    """Compute the scores of a target in any of its forms.

    Raises `TargetError` if the target does not fit the output or the number of images.
    """
    if isinstance(target, ScoreExtractor):
        return target.score(output, images)
    if is_function(target):
        scores = target(output)
        if not isinstance(scores, Tensor) or not is_dense_float(scores):
            description = describe_type(scores) if isinstance(scores, Tensor) else type(scores).__name__
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


def _warn_of_output(target: ClassTarget, output: Any, logits: Tensor, images: int, operation: str) -> None:
    """Warn if the scores are probabilities, or if the first of several tensors is explained."""
    if not isinstance(output, Tensor) and target.output is None:
        from gradcam.targets.output_heads import warn_of_further_heads

        warn_of_further_heads(output, images, is_linear=operation == "linear")
    is_requested = target.score == "probability" and are_probabilities(logits)
    if target.activation in ("none", "applied") or is_requested or operation == "linear":
        return
    kind = ACTIVATED.get(operation) or ("probabilities" if are_probabilities(logits) else None)
    if kind is not None:
        warn(PROBABILITIES_WARNING.format(kind))
