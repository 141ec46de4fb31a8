"""`gradcam batch`: explain a folder of any size, and go on where it was stopped."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from gradcam.choices import FORMATS, OUTPUT_FORMATS
from gradcam.cli import options
from gradcam.cli.batch_job import BatchChoice, Typed, explain_all
from gradcam.cli.commands import Command
from gradcam.cli.parameters import Folder, Limit, Share
from gradcam.cli.settings import Output, to_settings


@click.command("batch", cls=Command, short_help="Explain a folder of any size, and go on where it was stopped.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    metavar="DIR",
    type=Folder(),
    help="The folder for results, or the URL of one in a store, such as s3://bucket/explained.",
)
@options.choices(methods=("gradcam",))
@options.appearance
@options.save
@click.option("--format", type=click.Choice(list(FORMATS)), default="jpg", show_default=True, help="Of pictures.")
@click.option(
    "--quality",
    type=click.IntRange(1, 100),
    default=90,
    show_default=True,
    metavar="Q",
    help="Quality of jpg and webp.",
)
@click.option(
    "--output-format",
    type=click.Choice(list(OUTPUT_FORMATS)),
    default="files",
    show_default=True,
    help="A file for each result, or .tar shards of a WebDataset.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Pictures in one pass of the model; halved where memory is short.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads that read, draw and write.  [default: one for each core]",
)
@click.option("--resume", is_flag=True, help="Go on with an earlier run: do what is missing, or failed.")
@click.option("--overwrite", is_flag=True, help="Remove what an earlier run wrote, and start anew.")
@click.option("--report", is_flag=True, help="Write index.html as well, a gallery to look through.")
@click.option(
    "--max-failures",
    "limit",
    type=Limit(),
    metavar="N|P%",
    help="Stop when more pictures than that failed; those of an earlier run do not count again with --resume.",
)
@click.option(
    "--shard",
    type=Share(),
    metavar="I/N",
    help="The I-th of N shares alone, for machines that share one output folder.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Who does the work: this process, or actors of Ray.",
)
@click.option(
    "--ray-address",
    "address",
    metavar="HOST:PORT",
    help="The Ray cluster to join.  [default: RAY_ADDRESS, or one that is started here]",
)
@click.option(
    "--actors-per-gpu",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    metavar="N",
    help="Actors of Ray on each GPU, each with a model of its own.",
)
@click.option("--audit", is_flag=True, help="Add each input's SHA-256 to its record.")
@options.printing
def batch_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain many pictures: files, folders, globs, lists (.txt, .csv, or - for standard input), .zip and .tar archives.

    Each may be a URL as well, such as s3://bucket/photos/, and "shards-{000000..000146}.tar" are those of a WebDataset.

    Overlays get the pictures' own relative names; manifest.jsonl has a record of each, as `gradcam run --json` prints it.
    A broken picture never stops the others. However a run ended, --resume does what is missing.
    """
    names = {field.name for field in fields(BatchChoice)}
    choice = BatchChoice(**{name: value for name, value in chosen.items() if name in names})
    settings = to_settings({name: value for name, value in chosen.items() if name not in names} | {"output": ""})
    if choice.resume and choice.overwrite:
        raise click.UsageError("--resume goes on with an earlier run, and --overwrite removes it: give one of them.")
    if choice.report and choice.output_format != "files":
        raise click.UsageError(
            f"--report shows files, and --output-format {choice.output_format} writes none: leave one of them out."
        )
    if choice.address is not None and choice.engine != "ray":
        raise click.UsageError("--ray-address is for --engine ray: give that as well, or leave it out.")
    if choice.actors_per_gpu > 1 and choice.engine != "ray":
        raise click.UsageError("--actors-per-gpu is for --engine ray: give that as well, or leave it out.")
    return explain_all(Typed(inputs, settings, choice, Output(as_json, quiet)))
