"""What a study costs, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from gradcam.evaluation.study.plan import Plan
from gradcam.methods import METHODS

# Forward passes for one map beside those of the method itself. Average drop, increase, gain and ADCC share one.
PASSES = {"insertion": 49, "deletion": 49, "road": 18, "sufficiency": 1}
SHARED = ("average-drop", "increase", "average-gain", "adcc")
# How often the method itself is run again for one map.
AGAIN = {"coherency": 1, "class-difference": 1, "randomisation": 8, "max-sensitivity": 10}


def count_passes(plan: Plan) -> int:
    """About how many forward passes the metrics of one map of a picture take, beside those that run the method again."""
    return sum(PASSES.get(name, 0) for name in plan.metrics) + any(name in SHARED for name in plan.metrics)


def count_explanations(plan: Plan) -> int:
    """How often each method explains a picture, or a variant of it."""
    again = {name: AGAIN[name] for name in plan.metrics if name in AGAIN}
    if "adcc" in plan.metrics:
        again["coherency"] = AGAIN["coherency"]
    return 1 + sum(again.values())


def describe_cost(plan: Plan, pictures: int, mosaics: int) -> list[str]:
    """Lines for a person who decides whether to wait: how much is computed, and which methods are the dear ones."""
    maps, passes, runs = len(plan.names), count_passes(plan), count_explanations(plan)
    of_pictures = f"{_count(maps, 'map')} x {_count(passes, 'forward pass')} x {_count(pictures, 'picture')}"
    of_mosaics = f", 1 for each of {_count(mosaics, 'mosaic')}" if mosaics else ""
    again = f"{_count(runs, 'run')} of each method a picture{of_mosaics}"
    lines = [f"Cost: {of_pictures} = {maps * passes * pictures:,}, and {again}."]
    dear = [name for name in plan.methods if not METHODS[name].needs]
    if dear:
        lines.append(f"Methods that run the model again, forward passes a run: {_list(dear)}.")
    return lines


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}" + ("" if number == 1 else plural)


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"{name} {METHODS[name].cost}" for name in names)
