"""Check conditions on a comparison (`correlation<0.9`, `mean agree<1`), and write JUnit XML for CI services."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from gradcam.errors import GradcamError, escape_controls, format_fields, shorten

MIN_ALIKE_CORRELATION = 0.9  # smallest rank correlation at which two heatmaps count as alike

# The names that conditions can use, with descriptions for the help.
CONDITION_NAMES = {
    "agree": "1 if the predictions agree, 0 if they do not",
    "correlation": "the rank correlation of the heatmaps, -1 to 1",
    "overlap": "the overlap of the top 30 % of the pixels, 0 to 1",
    "moved": "the distance between the centres of mass, as a share of the diagonal, 0 to 1",
    "drop": "OLD's probability of the class that OLD predicts, minus NEW's probability of this class, -1 to 1",
}
NUMBER_PATTERN = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
CONDITION_PATTERN = re.compile(rf"\s*(mean\s+)?({'|'.join(CONDITION_NAMES)})\s*([<>])\s*({NUMBER_PATTERN})\s*")
MEAN_CASE = "the mean of all images"
SUITE = "gradcam diff"


@dataclass(frozen=True)
class Condition:
    """A condition such as `correlation<0.9`, on each image or on the mean over images (`of_mean`)."""

    text: str
    name: str
    sign: str
    limit: float
    of_mean: bool

    def is_met(self, values: Mapping[str, float]) -> bool:
        """Return True if the values meet the condition."""
        value = values[self.name]
        return value < self.limit if self.sign == "<" else value > self.limit


def parse_condition(text: str) -> Condition:
    """Parse a condition. Raise `GradcamError` if the text is not a condition."""
    match = CONDITION_PATTERN.fullmatch(text)
    if match is None:
        raise GradcamError(
            f"{shorten(text)} is not a condition: expected NAME<NUMBER or NAME>NUMBER, such as 'correlation<0.9' or 'mean "
            f"agree<1'. Names: {', '.join(CONDITION_NAMES)}."
        )
    mean, name, sign, number = match.groups()
    return Condition(f"{'mean ' if mean else ''}{name}{sign}{number}", name, sign, float(number), mean is not None)


@dataclass(frozen=True)
class Case:
    """The values of one image, or the means over images, and the conditions that the values meet."""

    name: str
    values: Mapping[str, float]
    met: tuple[str, ...] = ()
    error: str | None = None

    __repr__ = format_fields


@dataclass(frozen=True)
class Gate:
    """The result of checking conditions on a comparison, as returned by `Diff.gate`.

    Attributes
    ----------
    conditions : tuple of str
        The conditions.
    cases : tuple of Case
        One case per image, in the order of `Diff.rows`, followed by the images that failed. If a condition concerns the
        mean, the last case is the mean. Each case has a `name`, its `values`, the conditions that are `met`, and an
        `error` if the image could not be compared.

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

    __repr__ = format_fields

    @property
    def is_met(self) -> bool:
        """Return True if at least one case meets a condition."""
        return any(case.met for case in self.cases)

    def to_junit(self) -> bytes:
        """Return JUnit XML with one test case per image, for CI services. A test fails if a condition is met."""
        failures, errors = (str(sum(bool(getattr(case, name)) for case in self.cases)) for name in ("met", "error"))
        counts = {"tests": str(len(self.cases)), "failures": failures, "errors": errors, "skipped": "0"}
        root = ElementTree.Element("testsuites", counts)
        suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **counts})
        for case in self.cases:
            test_case = ElementTree.SubElement(suite, "testcase", {"classname": SUITE, "name": _to_xml(case.name)})
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in case.values.items())
            if case.error is not None:
                ElementTree.SubElement(test_case, "error", {"message": _to_xml(case.error)})
            elif case.met:
                met = " and ".join(case.met)
                ElementTree.SubElement(test_case, "failure", {"message": f"{met}: {numbers}", "type": "condition"})
            else:
                ElementTree.SubElement(test_case, "system-out").text = numbers
        ElementTree.indent(root)
        return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _to_xml(text: str) -> str:
    """Replace the characters that XML does not allow."""
    return re.sub("[\ufffe\uffff]", "\ufffd", escape_controls(text))


def check_conditions(
    conditions: Sequence[str],
    values_by_image: Mapping[str, Mapping[str, float]],
    means: Mapping[str, float],
    failures: Mapping[str, str],
) -> Gate:
    """Check conditions on each image and on the means. Raise `GradcamError` if a condition is invalid."""
    parsed = [parse_condition(text) for text in conditions]

    on_image = [condition for condition in parsed if not condition.of_mean]
    on_mean = [condition for condition in parsed if condition.of_mean]
    cases = [_check_case(name, values, on_image) for name, values in values_by_image.items()]
    cases += [Case(name, {}, error=reason) for name, reason in failures.items()]
    if on_mean and means:
        cases.append(_check_case(MEAN_CASE, means, on_mean))
    elif on_mean:
        cases.append(Case(MEAN_CASE, {}, error="no image could be compared"))
    return Gate(tuple(condition.text for condition in parsed), tuple(cases))


def _check_case(name: str, values: Mapping[str, float], conditions: Sequence[Condition]) -> Case:
    return Case(name, values, tuple(condition.text for condition in conditions if condition.is_met(values)))
