"""Adapters for segmenters of torchvision and segmentation-models-pytorch, and for any output (N,C,h,w)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gradcam.adapters.base import MODEL, ModelRun, SegmenterAdapter
from gradcam.errors import TargetError
from gradcam.hooks.containers import Batch

LOGIT_KEYS = ("out", "logits")  # keys of the class logits in an output with several entries
ACTIVATION = "activation"


class GenericSegmenter(SegmenterAdapter):
    """Any model that returns class logits (N,C,h,w): alone, under the name "out" or "logits", or as first output."""

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        """Return the class logits. Raise `TargetError` for an output of any other form."""
        return self.check(find_pixel_logits(run.last_output()), run.last_output(), batch)

    def check(self, logits: Any, output: Any, batch: Batch) -> Tensor:
        """Return the logits (N,C,h,w). Raise `TargetError` for logits of another form."""
        if isinstance(logits, Tensor) and logits.ndim == 3:  # CLIPSeg's output has no class axis.
            logits = logits[:, None]
        is_usable = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 4
        if not is_usable or len(logits) != batch.images or 0 in logits.shape:
            output_type = f"tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
            images = batch.images
            expected = f"class scores per pixel for {images} image(s): a tensor ({images}, classes, h, w)"
            container = "The model may also return a dict with this tensor under the key 'out' or 'logits'."
            advice = "For any other output, pass target=, a function from the model's output to one score per image."
            problem = f"{type(self.model).__name__} returned a {output_type}, expected {expected}"
            raise TargetError(f"{problem}. {container} {advice}")
        return logits


def find_pixel_logits(output: Any) -> Any:
    """Return the part of a model's output that may be the logits, without checking the form."""
    for name in LOGIT_KEYS:
        if isinstance(output, Mapping) and name in output:
            return output[name]
        if hasattr(output, name) and not isinstance(output, Tensor):
            return getattr(output, name)
    return output[0] if isinstance(output, (tuple, list)) and output else output


class TorchvisionSegmenter(GenericSegmenter):
    """FCN, DeepLabV3 and LR-ASPP, whose class 0 is the background."""

    background = 0

    @property
    def own_layer(self) -> str:
        # The backbone may return several stages. Select the last stage by its key.
        return "backbone:high" if type(self.model).__name__ == "LRASPP" else "backbone:out"


class EncoderSegmenter(GenericSegmenter):
    """A segmentation-models-pytorch model: an encoder that returns all its stages, a decoder and a head."""

    @property
    def own_layer(self) -> str | None:
        depths = getattr(self.model.encoder, "out_channels", None)
        if not depths:
            return None
        # DPT's encoder returns two lists: the stages, and the prefix tokens (such as class tokens) of each stage.
        stages = "encoder:0" if type(self.model).__name__ == "DPT" else "encoder"
        return f"{stages}:{len(depths) - 1}"

    def watched(self) -> dict[str, nn.Module]:
        parts = self.model.segmentation_head.modules()
        activation = next((part for part in parts if type(part).__name__ == "Activation"), None)
        return super().watched() | ({} if activation is None else {ACTIVATION: activation})

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        """Return the input of the head's activation: the logits. The activation may convert logits to probabilities."""
        if not run.calls.get(ACTIVATION):
            return super().read(run, batch)
        return self.check(run.calls[ACTIVATION][-1].args[0], run.last_output(MODEL), batch)
