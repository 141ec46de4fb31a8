"""Warn of models in which the images of a batch depend on one another."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradcam.errors import warn

DEPENDENT = (
    "The images of this batch depend on one another in the model (for example, by batch norm without running statistics): "
    "each heatmap depends on the other images. To avoid this, explain the images one by one."
)


def warn_of_shared_statistics(modules: Iterable[nn.Module]) -> None:
    """Warn if a batch norm has no running statistics, because it then uses the statistics of the whole batch."""
    if _share_statistics(modules):
        warn(DEPENDENT)


def _share_statistics(modules: Iterable[nn.Module]) -> bool:
    kinds = {kind for kind in set(map(type, modules)) if issubclass(kind, _BatchNorm)}
    # The attribute of a module takes several times as long as its dictionary of buffers.
    return any(type(module) in kinds and module._buffers.get("running_mean") is None for module in modules)


def warn_of_dependence(modules: Iterable[nn.Module]) -> None:
    """Warn that images depend on one another, unless `warn_of_shared_statistics` has warned already."""
    if not _share_statistics(modules):
        warn(DEPENDENT)
