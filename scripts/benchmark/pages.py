"""The tables of docs/benchmarks.md, and the few of the README."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from benchmark.cases import ROOT
from benchmark.contenders import CONTENDERS
from benchmark.tables import Table

PAGES = ("README.md", "docs/benchmarks.md")


def fill_pages(tables: Sequence[Table], environment: dict[str, str], *, only: Sequence[str]) -> None:
    """Put every table between its marks, with a line on where the figures are from; marks without a table are an error.

    `only`: the sections of a run in part. Then the other marks are left alone, and each table has a line of its own.
    """
    origin = describe_briefly(environment)
    parts = {table.key: f"{table.lines()}\n\n{origin}" if only else table.lines() for table in tables}
    if not only:
        parts |= {"environment": origin, "summary": summarise(tables).lines()}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for key in re.findall(r"<!-- bench (.+?) -->", text):
            if key not in parts and (only or key.endswith(" cuda")):  # no machine has to have a GPU
                continue
            if not parts.get(key):
                raise click.ClickException(
                    f"{page} has marks for '{key}', but this run has no such table. Run all sections."
                )
            pattern = rf"(<!-- bench {key} -->\n).*?(<!-- end -->)"
            text = re.sub(
                pattern, lambda marks, key=key: f"{marks[1]}\n{parts[key]}\n\n{marks[2]}", text, flags=re.DOTALL
            )
        (ROOT / page).write_text(text, encoding="utf-8")


def describe_briefly(environment: dict[str, str]) -> str:
    versions = ("Python", "torch", "torchvision", *(name for name, it in CONTENDERS.items() if it.distribution))
    present = [name for name in versions if not environment[name].startswith("missing")]
    listed = ", ".join(f"{name} {environment[name].split('+')[0]}" for name in present)
    return f"*{environment['date'][:10]}; {environment['CPU']}; GPU: {environment['GPU']}; {listed}.*"


def summarise(tables: Sequence[Table]) -> Table:
    """The few figures for the first screen."""
    network, rows = "ResNet-50", []
    for title, key, batch in (
        ("one class, batch 8", "time cpu", "8"),
        ("20 classes of one image", "classes cpu", "1"),
        ("peak memory, batch 32", "memory cpu", "32"),
    ):
        found = [row for table in tables if table.key == key for row in table.rows]
        for row in found:
            if row[0].startswith(network) and row[1] == batch:
                bare, _, own, *others = (cell.partition(" (")[0] for cell in row[2:])
                rows.append([title, bare if "memory" in key else "1", f"**{own}**", *others])
    return Table("summary", network, [network, *(name for name in CONTENDERS if name != "by hand")], rows)
