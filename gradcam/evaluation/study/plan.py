"""Which methods a study compares, and by which metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradcam.cam.methods.table import METHODS, find_method, offer
from gradcam.errors import GradcamError, join_names, shorten, show_fields
from gradcam.evaluation.metrics import DEFAULT, GROUPS, METRICS, find_metrics

# No torch is imported here: the shell checks what was typed before there is anything to compute.


DEFAULT_METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
SINGLE_PASS = tuple(name for name, method in METHODS.items() if method.needs)  # the others run the model again
METHOD_GROUPS = {"all": tuple(METHODS), "single-pass": SINGLE_PASS}
CONTROL_NAMES = ("random", "centre", "edges", "constant")  # those of `CONTROLS`, which needs torch


@dataclass(frozen=True)
class Plan:
    """What is compared, by which metrics.

    `methods`, `controls`, `metrics`: keys of `METHODS`, `CONTROLS` and `METRICS`, in these tables' order.
    `asked_methods`, `asked_metrics`: those of them that somebody named, or whose group of metrics: if one of these cannot
    be had, that is an error; others are left out.
    """

    methods: tuple[str, ...]
    controls: tuple[str, ...]
    metrics: tuple[str, ...]
    asked_methods: frozenset[str] = frozenset()
    asked_metrics: frozenset[str] = frozenset()

    __repr__ = show_fields

    @property
    def names(self) -> tuple[str, ...]:
        """Methods and controls."""
        return self.methods + self.controls

    def of_group(self, *groups: str) -> tuple[str, ...]:
        """The metrics of these groups."""
        return tuple(name for name in self.metrics if METRICS[name].group in groups)

    @property
    def of_pictures(self) -> tuple[str, ...]:
        """The metrics of single pictures; the others are of mosaics."""
        return tuple(name for name in self.metrics if METRICS[name].group != "grid")


def make_plan(
    methods: Sequence[str],
    metrics: Sequence[str] | None = None,
    *,
    controls: Sequence[str] | None = None,
    has_annotations: bool = False,
) -> Plan:
    """A plan of methods and metrics by name.

    `methods`: names, "single-pass" or "all"; those of controls too. `metrics`: names, those of groups, or "all"; None for
    those that need nothing but pictures, and with annotations those too. `controls`: names of them, None for all.
    Raises `GradcamError` for unknown names, for none at all, and for metrics that were named and need annotations.
    """
    chosen, asked_methods = _choose_methods(_check(methods, "methods"))
    added = CONTROL_NAMES if controls is None else _check_controls(controls)
    if metrics is None:
        names = [
            name for name, it in METRICS.items() if name in DEFAULT or (it.group == "annotations" and has_annotations)
        ]
        asked = frozenset[str]()
    else:
        names = find_metrics(_check(metrics, "metrics"))
        asked = frozenset(find_metrics([it for it in metrics if it.strip().lower() != "all"]))
    if not has_annotations:
        names = _without_annotations(names, asked)
    return Plan(
        methods=tuple(name for name in METHODS if name in chosen),
        controls=tuple(name for name in CONTROL_NAMES if name in added or name in chosen),
        metrics=tuple(names),
        asked_methods=asked_methods,
        asked_metrics=asked,
    )


def _check(names: Sequence[str], what: str) -> Sequence[str]:
    if isinstance(names, str) or not isinstance(names, Iterable) or not names:
        raise GradcamError(f"{what} is {shorten(names)}, expected a list of at least one name.")
    return names


def _check_controls(names: Sequence[str]) -> Sequence[str]:
    unknown = [name for name in names if name not in CONTROL_NAMES]
    if isinstance(names, str) or unknown:
        raise GradcamError(f"controls is {shorten(names)}, expected a list of some of {join_names(CONTROL_NAMES)}.")
    return names


def _choose_methods(names: Sequence[str]) -> tuple[set[str], frozenset[str]]:
    """Those that are meant, and those of them that were named themselves."""
    chosen: set[str] = set()
    asked: set[str] = set()
    for name in names:
        wanted = name.strip().lower()
        if wanted in METHOD_GROUPS:
            chosen.update(METHOD_GROUPS[wanted])
        else:
            asked.add(wanted if wanted in CONTROL_NAMES else _find(name.strip()))
    return chosen | asked, frozenset(asked)


def _find(name: str) -> str:
    try:
        return find_method(name).name
    except GradcamError:
        known = [*METHODS, *METHOD_GROUPS, *CONTROL_NAMES]
        raise GradcamError(f"There is no method or control {name!r}. {offer(name, known)}") from None


def _without_annotations(names: Sequence[str], asked: frozenset[str]) -> list[str]:
    needing = [name for name in names if METRICS[name].group == "annotations"]
    named = [name for name in needing if name in asked]
    if named:
        raise GradcamError(
            f"{join_names(named)} ask whether the map is on the object: give annotations, which say where that is "
            "(--annotations PATH)."
        )
    kept = [name for name in names if name not in needing]
    if not kept:
        raise GradcamError(f"There is no metric left, expected one of {join_names([*GROUPS, 'all'])}, or names.")
    return kept


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
