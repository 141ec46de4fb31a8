"""Segmentation: torchvision's models, those of segmentation-models-pytorch, and any other that gives (N,C,h,w)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from gradcam.errors import TargetError
from gradcam.families.base import MODEL, Seen, Segmenter
from gradcam.hooks.nested import Batch

NAMES = ("out", "logits")  # what the classes' logits are called in an output that holds more
ACTIVATION = "activation"


class PlainSegmenter(Segmenter):
    """Any model whose output is the classes' logits (N,C,h,w), or has them as "out" or "logits", or first of several."""

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        """Raises `TargetError` for an output of any other form."""
        return self.check(find_logits(seen.last()), seen.last(), batch)

    def check(self, logits: Any, output: Any, batch: Batch) -> Tensor:
        """The logits. Raises `TargetError` for what is none."""
        if isinstance(logits, Tensor) and logits.ndim == 3:  # one class, as CLIPSeg gives for a prompt
            logits = logits[:, None]
        is_usable = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 4
        if not is_usable or len(logits) != batch.images or 0 in logits.shape:
            what = f"a tensor {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__}"
            raise TargetError(
                f"{type(self.model).__name__} returned {what}, expected class scores per pixel ({batch.images}, classes, h, "
                f"w) for {batch.images} image(s), alone or as 'out' or 'logits'. Pass target=, a function from the model's "
                "output to one score per image."
            )
        return cast("Tensor", logits)


def find_logits(output: Any) -> Any:
    """What may be the logits in a model's output."""
    for name in NAMES:
        if isinstance(output, Mapping) and name in output:
            return output[name]
        if hasattr(output, name) and not isinstance(output, Tensor):
            return getattr(output, name)
    return output[0] if isinstance(output, (tuple, list)) and output else output


class TorchvisionSegmenter(PlainSegmenter):
    """FCN, DeepLabV3 and LR-ASPP, whose class 0 is the background."""

    @property
    def own_layer(self) -> str:
        # The backbone gives an earlier stage as well, which the auxiliary head or the last layer reads.
        return "backbone:high" if type(self.model).__name__ == "LRASPP" else "backbone:out"

    @property
    def background(self) -> int:
        return 0


class EncoderSegmenter(PlainSegmenter):
    """segmentation-models-pytorch: an encoder that gives all of its stages, a decoder, and a head."""

    @property
    def own_layer(self) -> str | None:
        depths = getattr(cast("Any", self.model).encoder, "out_channels", None)
        if not depths:
            return None
        # Of a vision transformer the stages come in a list, and beside them the tokens before each one's patches.
        stages = "encoder:0" if type(self.model).__name__ == "DPT" else "encoder"
        return f"{stages}:{len(depths) - 1}"

    def watched(self) -> dict[str, nn.Module]:
        parts = cast("Any", self.model).segmentation_head.modules()
        last = next((part for part in parts if type(part).__name__ == "Activation"), None)
        return super().watched() | ({} if last is None else {ACTIVATION: last})

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        """The logits before the head's activation, which may make probabilities of them."""
        if not seen.calls.get(ACTIVATION):
            return super().read(seen, batch)
        return self.check(seen.calls[ACTIVATION][-1].args[0], seen.last(MODEL), batch)
