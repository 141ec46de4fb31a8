"""`gradcam inspect`: looking inside a network, one file for each command."""

from __future__ import annotations

import click

from gradcam.cli.inspection.activations import activations_command
from gradcam.cli.inspection.features import features_command
from gradcam.cli.inspection.gradients import gradients_command
from gradcam.cli.inspection.trace import trace_command


@click.group("inspect", short_help="Look inside a network: its calls, features, activations, gradients.")
def inspect_group() -> None:
    """Look inside a network: what its layers give, and what comes back to them."""


for command in (trace_command, features_command, activations_command, gradients_command):
    inspect_group.add_command(command)
