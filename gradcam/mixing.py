"""Images of a batch that depend on one another, as they do in a batch norm that takes the batch's own statistics.

The gradient of all images' scores together is then no image's own: another image's class would change this one's map.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradcam.errors import warn
from gradcam.gradients import graph_of

Placed = tuple[str, Tensor, Callable[[Tensor], Tensor]]  # a layer, what was recorded, and what brings that to (N,...)

DEPENDENT = (
    "The images of this batch depend on one another in the model (such as a batch norm without running statistics): "
    "a map here is not the one of its image alone. Explain them one by one for that."
)

KINDS = ("_saved_training", "_saved_dim")  # of an operation, what its name does not tell

# By model, what was found to keep images apart: the operations behind the layers, and the layers.
_apart: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()


def warn_of_shared_statistics(modules: Iterable[nn.Module], images: int) -> None:
    """Warn where a batch norm has no running statistics, and so takes those of all images together."""
    if images > 1 and _share_statistics(modules):
        warn(DEPENDENT)


def _share_statistics(modules: Iterable[nn.Module]) -> bool:
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in modules)


def depend_on_one_another(model: nn.Module, scores: Tensor, layers: Sequence[Placed]) -> bool:
    """Whether the first or the last image's scores, of scores (N,K), have a gradient at another image's activations.

    That takes two more backward passes, once for a model, layers and a graph behind them.
    """
    if len(scores) == 1 or not layers:
        return False
    graph = [(node.name(), *(getattr(node, name, None) for name in KINDS)) for node in graph_of(scores)]
    key = hash((*map(str, graph), *(name for name, _, _ in layers)))
    if key in _apart.setdefault(model, set()):
        return False
    tensors = [tensor for _, tensor, _ in layers]
    for image in (0, len(scores) - 1):
        with torch.enable_grad():
            own = scores[image].sum()
        found = torch.autograd.grad(own, tensors, retain_graph=True, allow_unused=True)
        for (_, _, to_grid), gradient in zip(layers, found):
            if gradient is not None and _has_others(to_grid(gradient), image):
                if not _share_statistics(model.modules()):  # of which is warned already
                    warn(DEPENDENT)
                return True
    _apart[model].add(key)
    return False


def _has_others(gradient: Tensor, image: int) -> bool:
    rows = gradient.nan_to_num(0, 0, 0).flatten(1).any(1)
    return bool(rows[:image].any() or rows[image + 1 :].any())
