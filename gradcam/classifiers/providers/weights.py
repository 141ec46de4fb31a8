"""A checkpoint into a model that is built for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from gradcam.classifiers.checkpoints import Checkpoint, count_classes, load_weights

Build = Callable[[int], nn.Module]  # from a number of classes


def build_for(checkpoint: Checkpoint, build: Build, classes: int) -> tuple[nn.Module, int | None, Sequence[str]]:
    """The model with the checkpoint's weights, of as many classes as these have; how many, if that is known; and notes.

    `classes`: how many it has by default. Raises `ModelError` where the checkpoint is of another model.
    """
    model = build(classes)
    count = count_classes(checkpoint, model)
    if count is not None and count != classes:
        model = build(count)
    return model, count, load_weights(model, checkpoint)
