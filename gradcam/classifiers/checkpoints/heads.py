"""A model's last layer, which gives the logits, and the tensors of a checkpoint that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

Tensors = dict[str, Tensor]


def find_head(model: nn.Module) -> str | None:
    """The dotted name of the last module with parameters, if each of its rows gives one logit; else None.

    That is a linear layer, or a convolution of 1 x 1, by its weight's shape alone: (classes, features) or
    (classes, features, 1, 1).
    """
    last = None
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            last = name, module
    if last is None:
        return None
    weight = getattr(last[1], "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2 or any(side != 1 for side in weight.shape[2:]):
        return None
    return last[0]


def rename_head(tensors: Tensors, expected: Mapping[str, Tensor], head: str | None) -> tuple[Tensors, Sequence[str]]:
    """The tensors with the head under the model's name, where it is certain which they are; with notes.

    A `Sequential` around the last layer puts a number into its name: `classifier.0.weight` for `classifier.weight`, as
    CheXNet's linear layer and sigmoid. It is followed if it has the very parameters that the head would have, and nothing
    else lies there; their shapes are for others to check.
    """
    owner = _find_owner(tensors, expected, head) if head else None
    if not owner:
        return tensors, ()
    renamed = {
        f"{head}{name.removeprefix(owner)}" if name.startswith(f"{owner}.") else name: tensor
        for name, tensor in tensors.items()
    }
    return renamed, [
        f"'{owner}' taken as the last layer, '{head}'; a sigmoid behind it, as in training, is not in the file."
    ]


def _find_owner(tensors: Tensors, expected: Mapping[str, Tensor], head: str) -> str | None:
    """The module that has the head's parameters in the checkpoint, if there can be no other."""
    own = {name.removeprefix(head) for name in expected if name.startswith(f"{head}.")}
    if any(f"{head}{name}" in tensors for name in own):
        return None
    left = [name for name in tensors if name not in expected]
    owners = {name.rpartition(".")[0] for name in left if name.startswith(f"{head.partition('.')[0]}.")}
    owner = owners.pop() if len(owners) == 1 else ""
    if not (owner.startswith(f"{head}.") or head.startswith(f"{owner}.")):
        return None
    is_whole = {name.removeprefix(owner) for name in left if name.startswith(f"{owner}.")} == own
    return owner if is_whole else None
