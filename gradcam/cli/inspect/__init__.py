"""`gradcam inspect`: the group of commands that look inside a model."""

from __future__ import annotations

import click

from gradcam.cli._commands import Group


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
