"""Which number of a class is explained: pure functions from logits (N,C) and classes (N,K) to scores (N,K).

A contrast is the difference of a class to its strongest rivals: it asks what speaks for this class rather than another,
where the logit asks what speaks for it at all. What Finer-CAM explains is its difference to 0.6 of its nearest ones,
y_c - gamma y_d averaged over them (Zhang et al., CVPR 2025, section 3).
"""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RIVALS = 5
FINER_RIVALS = 3
FINER_SHARE = 0.6


def logit(logits: Tensor, classes: Tensor) -> Tensor:
    """The classes' own logits."""
    return logits.gather(1, classes)


def probability(logits: Tensor, classes: Tensor, activation: str = "auto") -> Tensor:
    """The classes' probabilities."""
    return probabilities(logits, activation).gather(1, classes)


def difference(logits: Tensor, classes: Tensor, rivals: Tensor, share: float = 1.0) -> Tensor:
    """The classes' logits, minus a share of the mean of each one's rivals (N,K,R); without rivals, the logits."""
    own = logit(logits, classes)
    if rivals.shape[2] == 0:
        return own
    return own - share * logits[:, None].expand(-1, classes.shape[1], -1).gather(2, rivals).mean(2)


def find_strongest(logits: Tensor, classes: Tensor) -> Tensor:
    """Each class's five strongest rivals (N,K,R): as many as there are, none for a single logit."""
    others = logits[:, None].expand(-1, classes.shape[1], -1).scatter(2, classes[..., None], float("-inf"))
    return others.topk(min(RIVALS, logits.shape[1] - 1), dim=2).indices


def find_nearest(logits: Tensor, classes: Tensor) -> Tensor:
    """The three others whose logits are nearest to each class's own (N,K,R): as many as there are."""
    distances = (logits[:, None] - logit(logits, classes)[..., None]).abs()
    distances = distances.scatter(2, classes[..., None], float("inf"))
    return distances.topk(min(FINER_RIVALS, logits.shape[1] - 1), dim=2, largest=False).indices


def probabilities(logits: Tensor, activation: str = "auto") -> Tensor:
    """All classes' probabilities (N,C) by one of `choices.ACTIVATIONS`."""
    if activation == "none":
        return logits
    if activation == "sigmoid" or (activation == "auto" and logits.shape[1] == 1):
        return logits.sigmoid()
    return logits.softmax(1)


def to_two_classes(logits: Tensor, activation: str) -> Tensor:
    """A single logit z (N,1) as two classes, 0 against and 1 for: -z and z, or 1 - p and p where it is a probability."""
    from torch import cat

    return cat([1 - logits if activation == "none" else -logits, logits], 1)
