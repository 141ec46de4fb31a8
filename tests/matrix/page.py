"""Write the results of all cells to docs/reference/matrix.md, and read them back as expectations."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.matrix.commands import COMMANDS, Cell
from tests.matrix.models import PROVIDERS, TASKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "matrix.md"
HEAD = """# Providers, tasks and commands

The table shows which commands of gradcam work with which models and tasks. A *provider* is the source of a model: the
package itself (`embedded`), a library such as timm, or a function in your own file (`FILE.py`).
`scripts/check_matrix` repeats all tests of the table.

- For `embedded`, the tested model is the package's own classifier. For every other provider, the tested models have
  random weights.
- If a provider has no model for a task, the commands were tested with a model for another task. For example, the
  provider `timm` was tested for detection with a classifier.
- The task `text` compares an image with sentences. The task `likeness` compares two images. On the command line,
  `text` and `likeness` are `--task matching`.
- On the command line, the task `caption` is `--task captioning`, and the task `keypoints` is `--task pose`.
- The column `--json` shows the results of `gradcam run --json`.

Each cell of the table has a ✓, a number, or nothing:

- ✓ means that the command passed its test:
  - The test of `run` paints a square into the image. The heatmap must change more at the square than elsewhere.
  - The test of `batch` compares its maps with the maps of `run`. The maps must be the same.
  - The test of `batch --resume` interrupts and resumes a run. The maps must be the same as the maps of an
    uninterrupted run.
  - The test of `diff` compares a model with itself. `diff` must report no difference.
  - The tests of the other commands check that the output is complete.
- A number means that the command ended with an error message. The list below the table shows the error message with
  this number. In the error messages, `painted.png`, `plain.png` and `other.png` are the test images. `OLD` is the
  first of the two models that `diff` compares.
- An empty cell means that the command was not tested. `diff` and `ui` were tested only if the provider has a model
  for the task.

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
