"""Advice for cases in which PyTorch refuses a backward pass through a whole model."""

from __future__ import annotations

from gradcam.hooks import pytorch
from gradcam.hooks.autograd import ADVICE_AFTER_LAYER, CHANGED_VALUE

# Messages for a failed backward pass through a whole model.
ADVICE_IN_MODEL = ADVICE_AFTER_LAYER | {
    pytorch.CHANGED_IN_PLACE: f"The model {CHANGED_VALUE}",
    **dict.fromkeys((pytorch.UNRECORDED_VIEW, pytorch.CHANGED_LEAF), "The model overwrites its input, or a view created "
    "without gradient recording: replace the in-place operation with an out-of-place one."),
    pytorch.RECURRENT: "The model contains a recurrent network. cuDNN computes its gradients in training mode only: run "
    "this inside `with torch.backends.cudnn.flags(enabled=False):`.",
    pytorch.REENTRANT: "The model has a reentrant checkpoint, so PyTorch computes gradients of parameters only: "
    "set use_reentrant=False, or switch checkpointing off for this call.",
}  # fmt: skip
