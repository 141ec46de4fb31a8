"""`gradcam recommend`: which method, score and layer are best for a model, on one's own pictures."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradcam.choices import SCORES
from gradcam.cli import options
from gradcam.cli.commands import Command
from gradcam.cli.completion import complete, list_layers
from gradcam.cli.evaluation.recommend_outcome import Outcome
from gradcam.cli.preparation import load_model, say
from gradcam.cli.progress import shown_passes
from gradcam.cli.settings import ModelChoice, Output, to_model_choice
from gradcam.cli.waiting import import_torch, telling_waits
from gradcam.errors import GradcamError, LayerError, printable
from gradcam.methods import METHODS, find_methods

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.batch.items import Item
    from gradcam.classifiers import Classifier

LIMIT = 24  # pictures


@dataclass(frozen=True)
class _Wish:
    """What is to be tried on which pictures, as typed."""

    inputs: tuple[str, ...]
    model: ModelChoice
    layers: tuple[str, ...]
    reshape: str | tuple[int, ...] | None
    methods: tuple[str, ...]
    scores: tuple[str, ...]
    limit: int
    least: float
    seed: int
    show_all: bool
    output: Output


def _find_methods(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    found = find_methods(names)
    beside = [method.name for method in found if method.place != "layer"]
    if beside:
        raise GradcamError(f"{beside[0]} looks at no layer: leave it out.")
    return [method.name for method in found]


def _find_scores(names: Sequence[str]) -> list[str]:
    for name in names:
        if name.lower() not in SCORES:
            raise GradcamError(f"There is no score {name!r}: choose some of {', '.join(SCORES)}.")
    return [name.lower() for name in names]


@click.command(
    "recommend", cls=Command, short_help="Find the best method, score and layer for a model on one's pictures."
)
@click.argument("inputs", nargs=-1, required=True, metavar="FOLDER...")
@options.model
@click.option(
    "-l",
    "--layer",
    "layers",
    metavar="NAME",
    multiple=True,
    help="Layer to try, as `gradcam layers` lists it; repeatable.  [default: a handful]",
    shell_complete=complete(list_layers),
)
@options.several(
    "--method",
    "methods",
    metavar="NAME[,NAME]",
    find=_find_methods,
    known=METHODS,
    help="Method to try; repeatable.  [default: those of one forward pass]",
)
@options.several(
    "--score",
    "scores",
    metavar="NAME[,NAME]",
    default=tuple(SCORES),
    find=_find_scores,
    known=SCORES,
    help=f"Score to try; repeatable.  [default: {','.join(SCORES)}]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=4),
    default=LIMIT,
    show_default=True,
    metavar="N",
    help="Pictures at most; of more, so many are drawn.",
)
@click.option(
    "--least",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    metavar="P",
    help="Pictures whose class is less probable are left out.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of all that is drawn."
)
@click.option("--all", "show_all", is_flag=True, help="All rows of the table, however many.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as one line of JSON, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def recommend_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Try methods, scores and layers on pictures, and say which are best: no annotations are needed.

    Takes files, folders, globs, lists and archives, as `gradcam batch` does; a dozen pictures of a dozen classes are enough.
    In mosaics of four pictures of four classes it is measured how much of a class's map is on the class's own picture, and
    how often the maximum is; chance is 0.25. Of the combinations that are not clearly worse than the best in that, the one
    with the best ROAD is recommended: covering what it marks lowers the probability most, against covering the rest.

    Intervals hold 95 % of what other pictures like these would give. A picture that cannot be read is named, left out, and
    the status is 1.

    \b
      gradcam recommend photos/
      gradcam recommend photos/ --model resnet50 --method gradcam,layercam -l layer4 -l layer3
    """
    names = ("layers", "reshape", "methods", "scores", "limit", "least", "seed", "show_all")
    wish = _Wish(
        inputs=inputs,
        model=to_model_choice(chosen),
        output=Output(as_json, quiet),
        **{name: chosen[name] for name in names},
    )
    with telling_waits(wish.output):
        return _recommend(wish)


def _recommend(wish: _Wish) -> int:
    """Measure, say what was found, and give the exit status. All that was typed is checked before the first picture."""
    import_torch()
    from gradcam.batch.inputs.sources import list_inputs
    from gradcam.evaluation.recommendation.candidates import check_layers
    from gradcam.evaluation.recommendation.recommending import recommend

    start = time.perf_counter()
    listing = list_inputs(wish.inputs)
    classifier = _load(wish)
    layers = check_layers(classifier.model, wish.layers) if wish.layers else None
    say(classifier.notes, wish.output)
    items = _draw(listing.items, wish.limit, wish.seed)
    with shown_passes(wish.output) as progress:
        pictures, failed = _read(classifier, items)
        found = recommend(
            classifier,
            pictures,
            methods=wish.methods or None,
            scores=wish.scores,
            layers=layers,
            least=wish.least,
            seed=wish.seed,
            reshape=wish.reshape,
            progress=progress,
        )
    outcome = Outcome(
        found=found,
        choice=wish.model,
        reshape=wish.reshape,
        device=str(classifier.device),
        given=len(listing.items),
        taken=len(items),
        failed=failed,
        seconds=time.perf_counter() - start,
    )
    if wish.output.as_json:
        click.echo(outcome.to_json())
    elif not wish.output.quiet:
        click.echo(outcome.format(show_all=wish.show_all))
    return int(failed > 0)


def _load(wish: _Wish) -> Classifier:
    """The model with its own layer, so that others are compared with that; where it has none, with the first named one."""
    try:
        return load_model(wish.model)
    except LayerError:
        if not wish.layers:
            raise
        return load_model(wish.model, layer=wish.layers[0])


def _draw(items: Sequence[Item], limit: int, seed: int) -> list[Item]:
    """So many of the pictures, by chance, in their order: the first ones of a folder may all be of one class."""
    import torch

    from gradcam.evaluation.seeds import draw

    if len(items) <= limit:
        return list(items)
    places = torch.randperm(len(items), generator=draw(seed, "pictures"), dtype=torch.int64, device="cpu")[:limit]
    return [items[place] for place in sorted(places.tolist())]


def _read(classifier: Classifier, items: Sequence[Item]) -> tuple[dict[str, Tensor], int]:
    """The pictures as the model takes them, by name, and how many failed; these are named on standard error."""
    from dataclasses import replace

    from tqdm import tqdm

    from gradcam.batch.reading import read_item

    pictures, failed = {}, 0
    for item in items:
        picture = read_item(classifier, replace(item, wanted=None)).picture  # what a list asks for is not looked at
        if isinstance(picture, GradcamError):
            failed += 1
            tqdm.write(printable(str(picture)), file=sys.stderr)
        else:
            pictures[item.name] = picture.image
    return pictures, failed
