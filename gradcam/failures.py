"""What PyTorch says when a gradient cannot be had for reasons that lie in the model, and what is the matter then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from gradcam.errors import ModelError

OTHER_VIEW = (
    "Behind the layer the model reads, or changes in place, another view of the layer's memory or of what came to it, "
    "where no gradient can be followed: choose a layer further up."
)
# By what PyTorch says, in part, where what lies behind a layer is differentiated.
BEHIND_A_LAYER = {
    "BackwardHookFunction": (
        "A full backward hook that somebody put on the model stands in front of an operation in place, which PyTorch "
        "forbids (pytorch issue 61519): remove that hook, or make the operation behind it one that is not in place."
    ),
    "Inference tensors cannot be saved for backward": (
        "The model has parameters or buffers that were made in torch.inference_mode(), and autograd cannot use those: "
        "build or load it outside that mode."
    ),
    "has been modified by an inplace operation": (
        "Behind the layer the model changes a value in place that its own gradient needs, so that it could not be trained "
        "either: make that operation one that is not in place."
    ),
    "created in no_grad mode": OTHER_VIEW,
    "a leaf Variable that requires grad": OTHER_VIEW,
    "cudnn RNN backward can only be called in training mode": (
        "Behind the layer there is a recurrent network, for which cuDNN has a gradient in training mode only: explain "
        "inside `with torch.backends.cudnn.flags(enabled=False):`."
    ),
    "backward is not implemented": (
        "Behind the layer there is an operation, such as fused attention, that has no second derivative: "
        "choose a method that needs the first only, such as 'gradcam', or a layer behind it."
    ),
    "no autograd formula was registered": (
        "Behind the layer there is an operation that has no second derivative, or none at all: choose a layer behind it, "
        "or a method that needs the first derivative only, such as 'gradcam'."
    ),
    "is incompatible with .grad()": (
        "Behind the layer there is a reentrant checkpoint, through which PyTorch takes no gradient at a layer: "
        "give the checkpoint use_reentrant=False, or switch checkpointing off meanwhile."
    ),
    "the derivative for": (
        "Behind the layer there is an operation without a derivative, so that nothing before it has a gradient: "
        "choose a layer behind it."
    ),
}

# The same of a whole model, where there is no layer to speak of.
VIEW_IN_PLACE = (
    "The model changes in place what is a view made without gradient recording, or what it was given: make that "
    "operation one that is not in place."
)
IN_A_MODEL = BEHIND_A_LAYER | {
    "has been modified by an inplace operation": (
        "The model changes a value in place that its own gradient needs, so that it could not be trained either: "
        "make that operation one that is not in place."
    ),
    "created in no_grad mode": VIEW_IN_PLACE,
    "a leaf Variable that requires grad": VIEW_IN_PLACE,
    "cudnn RNN backward can only be called in training mode": (
        "There is a recurrent network in the model, for which cuDNN has a gradient in training mode only: do this "
        "inside `with torch.backends.cudnn.flags(enabled=False):`."
    ),
    "is incompatible with .grad()": (
        "The model has a reentrant checkpoint, through which PyTorch takes no gradient but at parameters: "
        "give the checkpoint use_reentrant=False, or switch checkpointing off meanwhile."
    ),
}


@contextlib.contextmanager
def known_failures(explanations: Mapping[str, str]) -> Iterator[None]:
    """PyTorch's own errors for what is known to go wrong become a `ModelError` that says what to do.

    `explanations`: by what PyTorch says, in part.
    """
    try:
        yield
    except RuntimeError as error:
        for part, explanation in explanations.items():
            if part in str(error):
                raise ModelError(explanation) from error
        raise
