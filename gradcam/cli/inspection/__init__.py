"""`gradcam inspect`: looking inside a network, one file for each command."""

from __future__ import annotations

import click

from gradcam.cli.inspection.gradients import gradients_command


@click.group("inspect", short_help="Look inside a network: its calls, features, activations, gradients.")
def inspect_group() -> None:
    """Look inside a network: what its layers give, and what comes back to them."""


inspect_group.add_command(gradients_command)
