"""What `gradcam check` says of a picture."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradcam.errors import printable
from gradcam.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.evaluation.checks.verdicts import Test, Verdict

COLOURS = {"passed": "green", "doubtful": "yellow", "failed": "red"}
WIDTH = 100  # characters of a line
WORD = len("doubtful")


@dataclass(frozen=True)
class Outcome:
    """What became of one picture: a verdict and the file of its panel, or an error. `size`: its (height, width)."""

    image: str
    model: str
    verdict: Verdict | None = None
    panel: str | None = None
    size: tuple[int, int] = (0, 0)
    device: str = ""
    seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "image": self.image,
            "status": "ok" if self.error is None else "failed",
            "error": self.error,
            "model": self.model,
        }
        if self.verdict is not None:
            record |= {**self.verdict.to_record(), "panel": self.panel}
        return json.dumps(record, allow_nan=False)

    def format(self) -> str:
        """Several lines: what is explained, each test with its outcome and its reason, the verdict and the panel."""
        from gradcam.evaluation.checks.verdicts import PASSED

        verdict = self.verdict
        if verdict is None:
            return ""
        height, width = self.size
        name = click.style(printable(self.image.replace("\\", "/").rpartition("/")[2]), bold=True)
        title = [name, f"{width} x {height}", f"{printable(verdict.model)} on {self.device}", f"{self.seconds:.1f} s"]
        place = "" if verdict.layer is None else f" at {printable(verdict.layer)}"
        what = f"  {printable(verdict.class_name)}, {verdict.probability * 100:.0f} %, by {verdict.method}{place}"
        lines = ["   ".join(title), what, ""]
        for test in verdict.tests:
            lines += [*_format_test(test), ""]
        lines.append(f"  The verdict: {_style(verdict.outcome)}. {PASSED[:1].upper()}{PASSED[1:]}.")
        lines += textwrap.wrap(verdict.caution, WIDTH, initial_indent="  ", subsequent_indent="  ")
        return "\n".join([*lines, f"  →  {click.style(printable(self.panel or ''), fg='green')}", ""])


def _format_test(test: Test) -> list[str]:
    indent = " " * (WORD + 4)
    first = f"  {_style(test.outcome)}{' ' * (WORD - len(test.outcome))}  {click.style(test.question, bold=True)}"
    reason = textwrap.wrap(test.reason, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [first, *reason, f"{indent}{test.name} {test.value:.2f}: {test.thresholds}"]


def _style(outcome: str) -> str:
    return click.style(outcome, fg=COLOURS[outcome])
