"""`gradcam inspect`: the group of commands that look inside a model, and the base class of their results."""

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
class InspectOutcome:
    """The result for one image, or an error. `size`: (height, width) of the image. `seconds`: the total time."""

    image: str
    model: str
    device: str = ""
    size: tuple[int, ...] = (0, 0)
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """Return one line of JSON. Failed images have the same keys; NaN and infinite numbers become null."""
        from gradcam.storage.records import SCHEMA

        status = "ok" if self.error is None else "failed"
        start = {"schema": SCHEMA, "image": self.image, "status": status, "error": self.error, "model": self.model}
        return json.dumps(_replace_non_finite(start | self.to_fields()), allow_nan=False)

    def to_fields(self) -> dict[str, Any]:
        """Return the JSON fields of the command."""
        raise NotImplementedError

    def to_title(self) -> str:
        height, width = self.size
        place = f"{self.model} on {self.device}"
        return "   ".join([format_image_name(self.image), f"{width} x {height}", place, f"{self.seconds:.1f} s"])


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_non_finite(field) for key, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
