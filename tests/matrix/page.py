"""Write the results of all cells to docs/reference/matrix.md, and read them back as expectations."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.matrix.commands import COMMANDS, Cell
from tests.matrix.models import PROVIDERS, TASKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "matrix.md"
HEAD = """# Providers, tasks and commands

For every provider and task, the commands were run with a small, randomly initialised model. The task `text` compares an
image with sentences, and `likeness` compares two images. Repeat all tests with `scripts/check_matrix`. Each cell has
one of three values:

- ✓ is a verified result. If a square is painted into the image, the heatmap changes at the square. `batch` gives the
  same maps as `run`. A resumed run gives the same maps as an uninterrupted run. `diff` of a model with itself finds no
  difference.
- A number refers to an error message in the list below the table.
- An empty cell was not tested.

"""
Cells = Mapping[tuple[str, str, str], Cell]


def write_page(path: Path, cells: Cells) -> None:
    refusals: dict[str, int] = {}
    lines = [f"| provider | task | {' | '.join(f'`{command}`' for command in COMMANDS)} |"]
    lines.append("| --- " * (2 + len(COMMANDS)) + "|")
    for provider in PROVIDERS:
        for task in TASKS:
            row = []
            for command in COMMANDS:
                cell = cells.get((provider, task, command))
                refusal = None if cell is None else cell.refusal
                mark = "" if cell is None else "✓"
                row.append(mark if refusal is None else str(refusals.setdefault(refusal, len(refusals) + 1)))
            lines.append(f"| {provider} | {task} | {' | '.join(row)} |")
    listed = [f"{number}. `` {refusal} ``" for refusal, number in refusals.items()]
    path.write_text(HEAD + "\n".join(lines) + "\n\n## Error messages\n\n" + "\n".join(listed) + "\n", encoding="utf-8")


def read_cells(path: Path) -> dict[tuple[str, str, str], Cell]:
    if not path.exists():
        return {}
    table, _, listed = path.read_text(encoding="utf-8").partition("## Error messages")
    refusals = dict(re.findall(r"^(\d+)\. `` (.*) ``$", listed, re.M))
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    cells = {}
    for provider, task, *marks in ([part.strip() for part in row] for row in rows):
        for command, mark in zip(COMMANDS, marks):
            if mark:
                cells[provider, task, command] = Cell(provider, task, command, refusals.get(mark))
    return cells
