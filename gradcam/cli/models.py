"""`gradcam models`: list the models that --model accepts."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import asdict, dataclass, field

import click

from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_models
from gradcam.cli._terminal import import_torch
from gradcam.errors import ModelError, find_similar_names, join_names, shorten


@dataclass(frozen=True)
class ModelEntry:
    """A model, or a pattern for the names of a provider's models.

    `weights` maps each name of weights to True if these weights are already downloaded.
    """

    name: str
    summary: str
    weights: dict[str, bool] = field(default_factory=dict)
    task: str | None = None


@click.command("models", cls=Command)
@click.argument("pattern", required=False, shell_complete=complete(list_models))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record per model, and nothing else.")
def models_command(pattern: str | None, as_json: bool) -> int:
    """List the models.

    With PATTERN, such as resnet or 'vit*', only models whose names contain or match the pattern are listed. To choose
    pretrained weights, write the name of the weights after a colon: resnet50:IMAGENET1K_V1. Without a colon, the first
    weights in the list are used. Weights that are not marked as downloaded are downloaded when they are first needed.
    """
    entries = [*_list_models(), *_list_forms()]
    lowered = (pattern or "").lower()
    matching = [
        entry for entry in entries if lowered in entry.name.lower() or fnmatch.fnmatch(entry.name.lower(), lowered)
    ]
    if not matching:
        offers = find_similar_names(pattern or "", [entry.name for entry in entries])
        hint = f"Nearest: {join_names(offers)}." if offers else "`gradcam models` lists all models."
        raise ModelError(f"There is no model whose name contains {shorten(pattern)}. {hint}")
    width = max(len(entry.name) for entry in matching)
    for entry in matching:
        if as_json:
            click.echo(json.dumps(asdict(entry)))
        else:
            click.echo(f"{click.style(f'{entry.name:<{width}}', bold=True)}  {entry.summary or _describe(entry)}")
    return 0


def _list_models() -> list[ModelEntry]:
    import_torch()

    from gradcam.models.providers import PROVIDERS
    from gradcam.models.providers.torchvision import find_cache_path, find_task, list_names, list_weights

    entries = [ModelEntry(PROVIDERS[0].form, PROVIDERS[0].summary)]
    for name in list_names():
        enum = list_weights(name)
        members = [enum.DEFAULT, *(member for member in enum if member is not enum.DEFAULT)]
        members = [member for member in members if member.meta.get("categories")]
        weights = {member.name: find_cache_path(member).exists() for member in members}
        entries.append(ModelEntry(name, "", weights, find_task(name)))
    return entries


def _list_forms() -> list[ModelEntry]:
    from gradcam.models.providers import PROVIDERS
    from gradcam.models.providers.torchvision import list_installed

    forms = [ModelEntry(provider.form, provider.summary) for provider in PROVIDERS[1:-1]]
    return [*forms, *(ModelEntry(name, origin) for name, origin in list_installed().items())]


def _describe(entry: ModelEntry) -> str:
    names = ", ".join(f"{name} (downloaded)" if downloaded else name for name, downloaded in entry.weights.items())
    return f"torchvision{'' if entry.task == 'classification' else f', {entry.task}'}: {names}"
