"""Write the tables into docs/benchmarks.md, and the summary into the README."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from benchmark.cases import ROOT
from benchmark.contenders import CONTENDERS
from benchmark.tables import Table

PAGES = ("README.md", "docs/benchmarks.md")


def fill_pages(tables: Sequence[Table], environment: dict[str, str], *, only: Sequence[str]) -> None:
    """Write each table between its marks in the pages. Raise an error for marks without a table.

    If the run is partial, `only` lists its sections. In this case, the other marks stay unchanged, and each table gets
    a line that describes the machine and the versions.
    """
    origin = describe_briefly(environment)
    parts = {table.key: f"{table.lines()}\n\n{origin}" if only else table.lines() for table in tables}
    if not only:
        parts |= {"environment": origin, "summary": summarise(tables).lines()}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for key in re.findall(r"<!-- bench (.+?) -->", text):
            if key not in parts and (only or key.endswith(" cuda")):  # Machines without a GPU lack this table.
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
    versions = (
        "Python",
        "torch",
        "torchvision",
        *(name for name, contender in CONTENDERS.items() if contender.distribution),
    )
    present = [name for name in versions if not environment[name].startswith("missing")]
    listed = ", ".join(f"{name} {environment[name].split('+')[0]}" for name in present)
    return f"*{environment['date'][:10]}; {environment['CPU']}; GPU: {environment['GPU']}; {listed}.*"


def summarise(tables: Sequence[Table]) -> Table:
    """Return a table with a few figures for the beginning of the README."""
    network, rows = "ResNet-50", []
    for title, key, batch in (
        ("one class, batch 8", "time cpu", "8"),
        ("20 classes of one image", "classes cpu", "1"),
        ("peak memory, batch 32", "memory cpu", "32"),
    ):
        selected_rows = [row for table in tables if table.key == key for row in table.rows]
        for row in selected_rows:
            if row[0].startswith(network) and row[1] == batch:
                bare, _, ours, *peers = (cell.partition(" (")[0] for cell in row[2:])
                rows.append([title, bare if "memory" in key else "1", f"**{ours}**", *peers])
    return Table("summary", network, [network, *(name for name in CONTENDERS if name != "by hand")], rows)
