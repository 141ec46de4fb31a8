"""The attention of a transformer's blocks, kept while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradcam.attention.blocks import Blocks, is_over_picture
from gradcam.attention.interception import Interception
from gradcam.errors import ModelError
from gradcam.hooks import is_backward_running
from gradcam.recording import Recorded, has_float16

Keep = Callable[[Tensor], Tensor]


def plain(probabilities: Tensor) -> Tensor:
    """Nothing is recorded."""
    return probabilities


def differentiable(probabilities: Tensor) -> Tensor:
    """Recorded from here on: the first block's become a leaf that requires gradients, and later ones depend on it."""
    if not probabilities.requires_grad:
        probabilities = probabilities.detach().requires_grad_()
    torch.set_grad_enabled(True)
    return probabilities


@contextlib.contextmanager
def attention_kept(blocks: Blocks, recorded: Recorded, keep: Keep) -> Iterator[list[Tensor]]:
    """Around runs of the model: a list that gets the attention (N,heads,T,T) of each block, as `keep` gives it.

    The backward pass belongs in here too: a checkpoint repeats blocks there, which then have to compute what they did
    before, in this thread, whose attention is the one that is met. An attention takes N heads T T numbers for each
    block, 1.8 MB for an image and a block of ViT-B/16; what is recorded behind it for
    autograd takes as much as a step of training.
    """
    batch, found = recorded.batch, list[Tensor]()

    def meet(shape: tuple[int, ...]) -> Keep | None:
        return take if shape[-1] == blocks.tokens and is_over_picture(shape, recorded) else None

    def take(probabilities: Tensor) -> Tensor:
        by_head = probabilities if probabilities.ndim == 4 else probabilities.unflatten(0, (batch.images, -1))
        kept = keep(by_head)
        if not is_backward_running():
            found.append(kept)
        return kept.view_as(probabilities)

    with Interception(meet), torch.autograd.set_multithreading_enabled(False):
        yield found


def require_all(attentions: list[Tensor], blocks: Blocks) -> None:
    """Raises `ModelError` where there is not one attention for each block."""
    if len(attentions) != len(blocks.modules):
        raise ModelError(
            f"The model's {len(blocks.modules)} blocks computed {len(attentions)} attentions when they ran again, expected "
            "one each: it does not do the same each time. Choose a method that looks at a layer, such as 'gradcam'."
        )


def passes_float16(recorded: Recorded) -> bool:
    """Whether gradients at the attention may pass through float16."""
    return recorded.autocast == torch.float16 or has_float16(recorded.output, recorded.modules)
