"""Write the results of all cells to docs/reference/matrix.md, and read them back as expectations."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.matrix.commands import COMMANDS, Cell
from tests.matrix.models import PROVIDERS, TASKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "matrix.md"
HEAD = """# Providers, tasks and commands

A provider is the source of a model: the package itself (`embedded`), a library, or a function in your own file
(`FILE.py`). For every provider and task, the commands were tested with one model: for `embedded`, the package's
classifier; otherwise, a model with random weights. If the test has no model of the provider for a task, it uses the
provider's model for another task, such as a classifier.

The task `text` compares an image with sentences, and `likeness` compares two images: on the command line, both are
`--task matching`. The task `caption` is `--task captioning`, and `keypoints` is `--task pose`. The column `--json` is
`gradcam run --json`. `scripts/check_matrix` repeats all tests. Each cell has one of three values:

- ✓ means that the command passed its test. `run`: if a square is painted into the image, the heatmap changes at the
  square. `batch`: the maps are the same as with `run`. `batch --resume`: an interrupted run, once resumed, gives the same
  maps as an uninterrupted run. `diff`: a model compared with itself shows no difference. For the other commands, the test
  checks that the output is complete.
- A number means that the command reported an error instead of a result. The list below the table has the message with
  this number. In the messages, `painted.png`, `plain.png` and `other.png` are the test images, and `OLD` is the first
  model that was passed to `diff`.
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
