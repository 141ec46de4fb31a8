"""`gradcam models`: what can be named as a model."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import asdict, dataclass, field

import click

from gradcam.cli._commands import Command
from gradcam.cli._completion import complete, list_models
from gradcam.cli._terminal import import_torch
from gradcam.errors import ModelError, join_names, nearest, shorten


@dataclass(frozen=True)
class Listed:
    """A model, or a form of names: `weights` by name, and whether their files are here; `task`, where the name says it."""

    name: str
    summary: str
    weights: dict[str, bool] = field(default_factory=dict)
    task: str | None = None


@click.command("models", cls=Command)
@click.argument("pattern", required=False, shell_complete=complete(list_models))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record per model, and nothing else.")
def models_command(pattern: str | None, as_json: bool) -> int:
    """List the models.

    With PATTERN, such as resnet or 'vit*', list only models whose names contain or match it. To choose pretrained weights,
    write their name after a colon: resnet50:IMAGENET1K_V1. Otherwise, the first weights in the list are used. Weights that
    are not marked as downloaded are downloaded when they are first needed.
    """
    listed = [*_list_named(), *_list_forms()]
    wanted = (pattern or "").lower()
    chosen = [it for it in listed if wanted in it.name.lower() or fnmatch.fnmatch(it.name.lower(), wanted)]
    if not chosen:
        offers = nearest(pattern or "", [each.name for each in listed])
        hint = f"Nearest: {join_names(offers)}." if offers else "`gradcam models` lists all models."
        raise ModelError(f"There is no model whose name contains {shorten(pattern)}. {hint}")
    width = max(len(each.name) for each in chosen)
    for each in chosen:
        if as_json:
            click.echo(json.dumps(asdict(each)))
        else:
            click.echo(f"{click.style(f'{each.name:<{width}}', bold=True)}  {each.summary or _describe(each)}")
    return 0


def _list_named() -> list[Listed]:
    import_torch()

    from gradcam.models.providers import PROVIDERS
    from gradcam.models.providers.torchvision import cached_file, find_task_of, list_names, list_weights

    found = [Listed(PROVIDERS[0].form, PROVIDERS[0].summary)]
    for name in list_names():
        enum = list_weights(name)
        members = [enum.DEFAULT, *(member for member in enum if member is not enum.DEFAULT)]
        here = {member.name: cached_file(member).exists() for member in members if member.meta.get("categories")}
        found.append(Listed(name, "", here, find_task_of(name)))
    return found


def _list_forms() -> list[Listed]:
    from gradcam.models.providers import PROVIDERS
    from gradcam.models.providers.torchvision import list_installed

    forms = [Listed(provider.form, provider.summary) for provider in PROVIDERS[1:-1]]
    return [*forms, *(Listed(name, origin) for name, origin in list_installed().items())]


def _describe(listed: Listed) -> str:
    names = ", ".join(f"{name} (downloaded)" if is_here else name for name, is_here in listed.weights.items())
    return f"torchvision{'' if listed.task == 'classification' else f', {listed.task}'}: {names}"
