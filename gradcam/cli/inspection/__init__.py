"""`gradcam inspect`: looking inside a network, one file for each command."""

from __future__ import annotations

import click

from gradcam.cli.commands import Group


@click.group(
    "inspect",
    cls=Group,
    short_help="Look inside a network: its calls, features, activations, gradients.",
    places={
        "trace": "gradcam.cli.inspection.trace:trace_command",
        "features": "gradcam.cli.inspection.features:features_command",
        "activations": "gradcam.cli.inspection.activations:activations_command",
        "gradients": "gradcam.cli.inspection.gradients:gradients_command",
    },
)
def inspect_group() -> None:
    """Look inside a network: what its layers give, and what comes back to them."""
