"""What the numbers of the four tests say, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradcam.evaluation.checks.exhibits import NOISE, SAMPLES, Exhibits
from gradcam.evaluation.checks.verdicts import QUESTIONS, Outcome, Test, Thresholds

ALIKE = 0.9  # rank correlation from which on a rival is looked for in the same place


def judge(exhibits: Exhibits, thresholds: Mapping[str, Thresholds], labels: Sequence[str] | None) -> tuple[Test, ...]:
    """The four tests, in the order of `QUESTIONS`."""
    reasons = {
        "randomisation": _tell_randomisation(exhibits),
        "classes": _tell_classes(exhibits, labels),
        "covering": _tell_covering(exhibits),
        "stability": _tell_stability(exhibits),
    }
    return tuple(
        Test(
            name,
            question,
            _decide(name, exhibits, thresholds[name]),
            exhibits.values[name],
            thresholds[name],
            reasons[name],
        )
        for name, question in QUESTIONS.items()
    )


def _decide(name: str, exhibits: Exhibits, thresholds: Thresholds) -> Outcome:
    """A map that is the same everywhere marks nothing, so that there is nothing to cover."""
    if name == "covering" and exhibits.is_constant:
        return "failed"
    return thresholds.judge(exhibits.values[name])


def _tell_randomisation(exhibits: Exhibits) -> str:
    found = exhibits.randomisation
    correlations = found.correlations[0].tolist()
    if all(value == 1 for value in correlations):
        return "It is the same with whatever weights: it tells nothing of what the model has learnt."
    stages = f"{len(correlations)} stage{'' if len(correlations) == 1 else 's'}"
    return (
        f"With weights drawn anew from {found.layers[0]} down to {found.layers[-1]}, in {stages}, the maps' rank "
        f"correlation with it is {exhibits.values['randomisation']:.2f} on average, {max(correlations):.2f} at most."
    )


def _tell_classes(exhibits: Exhibits, labels: Sequence[str] | None) -> str:
    likeness = exhibits.likeness.tolist()
    if all(value == 1 for value in likeness):
        return f"It is the same for {len(likeness)} other class{'' if len(likeness) == 1 else 'es'}: no class is in it."
    rival = _name(exhibits.rivals[0], labels)
    strongest = f"{likeness[0]:.2f} with that of its strongest rival, {rival}"
    if len(likeness) == 1:
        return f"Its rank correlation is {strongest}."
    hint = ", which the model may rightly look for in the same place" if likeness[0] >= ALIKE else ""
    return (
        f"Its rank correlation with the maps of {len(likeness) - 1} classes drawn by chance is "
        f"{exhibits.values['classes']:.2f} on average, and {strongest}{hint}."
    )


def _tell_covering(exhibits: Exhibits) -> str:
    if exhibits.is_constant:
        return "The map is the same everywhere: it marks nothing that could be covered."
    found = exhibits.covering
    places = found.elsewhere.shape[1]
    return (
        f"With {found.shares[0]:.0%} to {found.shares[-1]:.0%} of the picture covered by it, the probability is "
        f"{found.own.mean():.2f} on average, and {found.elsewhere.mean():.2f} by the same map laid elsewhere: it is lower "
        f"than at {exhibits.values['covering']:.0%} of {places} other places."
    )


def _tell_stability(exhibits: Exhibits) -> str:
    return (
        f"Under noise of up to {NOISE:.0%} of the picture's range it changes by {exhibits.sensitivity:.0%} of its own "
        f"length at most, in {SAMPLES} draws."
    )


def _name(index: int, labels: Sequence[str] | None) -> str:
    return f"class {index}" if labels is None else labels[index]
