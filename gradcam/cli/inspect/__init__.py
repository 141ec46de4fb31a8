"""`gradcam inspect`: looking inside a network, one file for each command."""

from __future__ import annotations

import click

from gradcam.cli._commands import Group


@click.group(
    "inspect",
    cls=Group,
    short_help="Look inside a network: its calls, features, activations, gradients.",
    places={
        "trace": "gradcam.cli.inspect.trace:trace_command",
        "features": "gradcam.cli.inspect.features:features_command",
        "activations": "gradcam.cli.inspect.activations:activations_command",
        "gradients": "gradcam.cli.inspect.gradients:gradients_command",
    },
)
def inspect_group() -> None:
    """Look inside a network: what its layers give, and what comes back to them."""
