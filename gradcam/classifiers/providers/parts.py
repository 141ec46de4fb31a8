"""What a provider gives: a model, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gradcam.classifiers.preprocessing import Preprocess, Preprocessing


@dataclass(frozen=True, eq=False)
class Parts:
    """A model with what its provider knows of it; what is None is found by looking at the model.

    `plain`: the same preprocessing as steps that can be changed one by one, where `preprocess` is not made of such.
    `is_assumed`: whether the preprocessing is a guess. `activation`: how logits become probabilities, where that is
    certain. `notes`: what a person should know. `layer_for_positive`: in place of `layer` for methods that assume
    activations that are not negative, where that is another one.
    """

    model: nn.Module
    preprocess: Preprocess
    plain: Preprocessing | None = None
    is_assumed: bool = False
    labels: Sequence[str] | None = None
    classes: int | None = None
    layer: str | None = None
    layer_for_positive: str | None = None
    activation: str | None = None
    notes: Sequence[str] = ()
