"""Conditions on the numbers of a comparison, for continuous integration: `correlation<0.9`, `mean agree<1`; JUnit XML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from gradcam.errors import GradcamError, printable, shorten, show_fields

ALIKE = 0.9  # the rank correlation from which on maps count as alike

# What conditions may name, and what it says, for the docs and for who mistypes one.
NAMES = {
    "agree": "1 if the predictions agree, 0 if they do not",
    "correlation": "the rank correlation of the heatmaps, -1 to 1",
    "overlap": "the overlap of the top 30 % of the pixels, 0 to 1",
    "moved": "how far the centre of mass moved, as a share of the diagonal, 0 to 1",
    "drop": "how much less probable the new model finds the old model's class, -1 to 1",
}
FORM = re.compile(r"\s*(?P<mean>mean\s+)?(?P<name>\w+)\s*(?P<sign>[<>])\s*(?P<number>\S+?)\s*")
MEAN = "the mean of all images"
SUITE = "gradcam diff"


@dataclass(frozen=True)
class Condition:
    """A number that is not to be below, or above, another one: of each picture, or of their mean."""

    text: str
    name: str
    sign: str
    number: float
    of_mean: bool

    def is_met(self, values: Mapping[str, float]) -> bool:
        """Whether it is true of these values."""
        value = values[self.name]
        return value < self.number if self.sign == "<" else value > self.number


def read_condition(text: str) -> Condition:
    """The condition that a text says. Raises `GradcamError` for a text of another form."""
    found = FORM.fullmatch(text)
    number = math.nan
    if found is not None:
        try:
            number = float(found["number"])
        except ValueError:
            found = None
    if found is None or not math.isfinite(number) or found["name"] not in NAMES:
        raise GradcamError(
            f"{shorten(text)} is not a condition: expected NAME<NUMBER or NAME>NUMBER, such as 'correlation<0.9' or 'mean "
            f"agree<1'. Names: {', '.join(NAMES)}."
        )
    plain = f"{'mean ' if found['mean'] else ''}{found['name']}{found['sign']}{found['number']}"
    return Condition(plain, found["name"], found["sign"], number, found["mean"] is not None)


@dataclass(frozen=True)
class Case:
    """A picture, or the mean of all: the numbers, the conditions that they meet, or why there are none."""

    name: str
    values: Mapping[str, float]
    met: tuple[str, ...] = ()
    error: str | None = None

    __repr__ = show_fields


@dataclass(frozen=True)
class Gate:
    """The result of checking conditions on a comparison, as returned by `Diff.gate`.

    Attributes
    ----------
    conditions : tuple of str
        The conditions.
    cases : tuple of Case
        One case per image, in the order of the comparison, and one for the mean if a condition is on the mean. Each case
        has a `name`, its `values`, the conditions that are `met`, and an `error` if the image could not be compared.

    Examples
    --------
    >>> import gradcam
    >>> old, new = gradcam.load_classifier(), gradcam.load_classifier(layer="layer3")
    >>> gate = gradcam.evaluation.diff(old, new, "photos/").gate(["correlation<0.9"])
    >>> gate.is_met, [(case.name, case.met) for case in gate.cases]
    (True, [('...', ('correlation<0.9',)), ('...', ('correlation<0.9',))])
    >>> gate.to_junit().decode().count("<failure ")
    2
    """

    conditions: tuple[str, ...]
    cases: tuple[Case, ...]

    __repr__ = show_fields

    @property
    def is_met(self) -> bool:
        """Whether at least one case meets a condition."""
        return any(case.met for case in self.cases)

    def to_junit(self) -> bytes:
        """Return JUnit XML with one test case per image, for continuous integration services."""
        failures, errors = (sum(bool(getattr(it, name)) for it in self.cases) for name in ("met", "error"))
        counts = {"tests": str(len(self.cases)), "failures": str(failures), "errors": str(errors), "skipped": "0"}
        root = ElementTree.Element("testsuites", counts)
        suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **counts})
        for case in self.cases:
            made = ElementTree.SubElement(suite, "testcase", {"classname": SUITE, "name": _to_xml(case.name)})
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in case.values.items())
            if case.error is not None:
                ElementTree.SubElement(made, "error", {"message": _to_xml(case.error)})
            elif case.met:
                met = " and ".join(case.met)
                ElementTree.SubElement(made, "failure", {"message": f"{met}: {numbers}", "type": "condition"})
            else:
                ElementTree.SubElement(made, "system-out").text = numbers
        ElementTree.indent(root)
        return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _to_xml(text: str) -> str:
    """The text without characters that XML has not."""
    return re.sub("[\ufffe\uffff]", "\ufffd", printable(text))


def judge(
    conditions: Sequence[str],
    pictures: Mapping[str, Mapping[str, float]],
    means: Mapping[str, float],
    failures: Mapping[str, str],
) -> Gate:
    """Which conditions are met by which picture, or by the mean. Raises `GradcamError` for one of another form."""
    read = [read_condition(text) for text in conditions]

    def try_all(values: Mapping[str, float], *, of_mean: bool) -> tuple[str, ...]:
        return tuple(it.text for it in read if it.of_mean is of_mean and it.is_met(values))

    cases = [Case(name, values, try_all(values, of_mean=False)) for name, values in pictures.items()]
    cases += [Case(name, {}, error=reason) for name, reason in failures.items()]
    if any(it.of_mean for it in read):
        none: Any = {"error": "no image could be compared"}
        cases.append(Case(MEAN, means, try_all(means, of_mean=True)) if means else Case(MEAN, {}, **none))
    return Gate(tuple(it.text for it in read), tuple(cases))
