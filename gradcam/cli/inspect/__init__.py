"""`gradcam inspect`: looking inside a network, one file for each command; and what their reports have in common."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import click

from gradcam.cli._commands import Group
from gradcam.cli._terminal import format_image_name


@click.group(
    "inspect",
    cls=Group,
    places={
        "trace": (
            "gradcam.cli.inspect.trace:trace_command",
            "List every layer call with its shapes, cost, memory and time.",
        ),
        "features": (
            "gradcam.cli.inspect.features:features_command",
            "Write the layer outputs of many images to one file.",
        ),
        "activations": (
            "gradcam.cli.inspect.activations:activations_command",
            "Draw the feature maps of a layer, channel by channel.",
        ),
        "gradients": (
            "gradcam.cli.inspect.gradients:gradients_command",
            "Show vanishing and exploding gradients, layer by layer.",
        ),
    },
)
def inspect_group() -> None:
    """Look inside a model: layer calls, features, feature maps and gradients."""


@dataclass(frozen=True)
class PictureOutcome:
    """What became of one picture, or an error. `size`: the picture's (height, width). `seconds`: all that it took."""

    image: str
    model: str
    device: str = ""
    size: tuple[int, ...] = (0, 0)
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON, of the same keys whatever became of it; numbers that are NaN or infinite are null."""
        from gradcam.storage.records import SCHEMA

        status = "ok" if self.error is None else "failed"
        start = {"schema": SCHEMA, "image": self.image, "status": status, "error": self.error, "model": self.model}
        return json.dumps(_without_infinities(start | self.to_fields()), allow_nan=False)

    def to_fields(self) -> dict[str, Any]:
        """Return what the command says of it in JSON. Each command has its own."""
        raise NotImplementedError

    def to_title(self) -> str:
        height, width = self.size
        place = f"{self.model} on {self.device}"
        return "   ".join([format_image_name(self.image), f"{width} x {height}", place, f"{self.seconds:.1f} s"])


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
