"""Which methods a study compares, and by which metrics."""

# No torch is imported here: the shell checks what was typed before there is anything to compute.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcam import plugins
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_methods
from gradcam.errors import GradcamError, join_names, shorten, show_fields
from gradcam.evaluation.controls import CONTROLS, Control, Explained, OwnFunction, find_explained
from gradcam.evaluation.metrics import DEFAULT, GROUPS, METRICS, Metric, find_metrics
from gradcam.options import refuse

DEFAULT_METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
SINGLE_PASS = tuple(name for name, method in METHODS.items() if method.needs)  # the others run the model again
METHOD_GROUPS = {"all": tuple(METHODS), "single-pass": SINGLE_PASS}


@dataclass(frozen=True)
class StudyOptions:
    """What is asked beside methods and metrics, as `evaluate` takes it."""

    layer: str | None = None
    target: Any = None
    score: str = "logit"
    reshape: Any = None
    annotations: Path | None = None
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Agenda:
    """What is compared, by which metrics: names, in the order of the tables; what users add comes last.
    `asked_methods`, `asked_metrics`: those that somebody named, or whose group of metrics: if one of these cannot be
    had, that is an error; others are left out. `own_methods`, `own_metrics`: by name, what is not in those tables."""

    methods: tuple[str, ...]
    controls: tuple[str, ...]
    metrics: tuple[str, ...]
    asked_methods: frozenset[str] = frozenset()
    asked_metrics: frozenset[str] = frozenset()
    own_methods: Mapping[str, Explained] = field(default_factory=dict, repr=False)
    own_metrics: Mapping[str, Metric] = field(default_factory=dict, repr=False)

    __repr__ = show_fields

    @property
    def names(self) -> tuple[str, ...]:
        return self.methods + self.controls

    def explained(self, name: str) -> Any:
        return self.own_methods.get(name) or METHODS.get(name) or CONTROLS[name]

    def metric(self, name: str) -> Metric:
        return self.own_metrics.get(name) or METRICS[name]

    @property
    def of_pictures(self) -> tuple[Metric, ...]:
        return tuple(it for it in map(self.metric, self.metrics) if not it.is_of_mosaics)

    @property
    def of_mosaics(self) -> tuple[Metric, ...]:
        return tuple(it for it in map(self.metric, self.metrics) if it.is_of_mosaics)

    def describe_own(self) -> dict[str, Any]:
        """For a journal, what users added, each with the file it is from and its options; nothing where nobody did."""
        found: dict[str, Any] = {}
        for kind, own in (("method", self.own_methods), ("metric", self.own_metrics)):
            for name, it in own.items():
                options = {key: shorten(value) for key, value in getattr(it, "options", {}).items()}
                found[f"{kind} {name}"] = {**(plugins.fingerprint(it) or {}), **options}
        return {"own": found} if found else {}


def make_plan(
    methods: Sequence[Any],
    metrics: Sequence[str | Metric] | None = None,
    *,
    controls: Sequence[str] | None = None,
    has_annotations: bool = False,
) -> Agenda:
    """A plan of methods, metrics and controls as `evaluate` takes them. Raises `GradcamError` for unknown names, for
    none at all, for two of one name, and for metrics that were named and need annotations."""
    found, asked_methods = _find_methods(_check(methods, "methods"))
    if controls is not None and (isinstance(controls, str) or any(name not in CONTROLS for name in controls)):
        raise refuse(controls, "controls", f"a list of some of {join_names(CONTROLS)}.")
    if metrics is None:
        wanted, asked = find_metrics((*(("annotations",) if has_annotations else ()), *DEFAULT)), []
    else:
        wanted = find_metrics(_check(metrics, "metrics"))
        asked = find_metrics([it for it in metrics if not isinstance(it, str) or it.strip().lower() != "all"])
    if not has_annotations:
        if named := [it.name for it in wanted if it.needs_annotations and it in asked]:
            raise GradcamError(
                f"{join_names(named)} {'needs' if len(named) == 1 else 'need'} annotations of the objects: give "
                "--annotations PATH (annotations= in Python)."
            )
        wanted = [it for it in wanted if not it.needs_annotations]
        if not wanted:
            raise GradcamError(f"No metric is left: give metrics by name, or a group ({join_names([*GROUPS, 'all'])}).")
    ours = [it.name for it in found.values() if not isinstance(it, Control)]
    return Agenda(
        methods=tuple(sorted(ours, key=[*METHODS, *ours].index)),
        controls=tuple(name for name in CONTROLS if controls is None or name in controls or name in found),
        metrics=tuple(it.name for it in wanted),
        asked_methods=asked_methods,
        asked_metrics=frozenset(it.name for it in asked),
        own_methods={name: it for name, it in found.items() if it not in (METHODS.get(name), CONTROLS.get(name))},
        own_metrics={it.name: it for it in wanted if it.name not in METRICS},
    )


def _check(given: Sequence[Any], what: str) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable) or not given:
        raise refuse(given, what, "a list of at least one name.")
    return given


def _find_methods(wanted: Sequence[Any]) -> tuple[dict[str, Explained], frozenset[str]]:
    """Those that are meant, by name, and the names of those that were named themselves."""
    members = [METHOD_GROUPS.get(each.strip().lower()) if isinstance(each, str) else None for each in wanted]
    groups = [METHODS[name] for group in members for name in group or ()]
    asked = [find_explained(each, *METHOD_GROUPS) for each, group in zip(wanted, members) if group is None]
    methods = [*groups, *(it for it in asked if isinstance(it, Method))]
    found: dict[str, Explained] = {it.name: it for it in (find_methods(methods) if methods else ())}
    for it in asked:
        if isinstance(it, OwnFunction) and it.name in (*METHODS, *CONTROLS):
            raise GradcamError(f"There is already a method {it.name!r}: rename your function.")
        if not isinstance(it, Method) and found.setdefault(it.name, it) != it:
            raise GradcamError(f"There are two methods {it.name!r}: rename one of them.")
    return found, frozenset({it.name for it in asked} | found.keys() - {it.name for it in groups})


def count_passes(plan: Agenda) -> int:
    """About how many forward passes the metrics of one map of a picture take, beside those that run the method again."""
    return sum({it.key: it.passes for it in _list_computed(plan)}.values())


def count_explanations(plan: Agenda) -> int:
    """How often each method explains a picture, or a variant of it."""
    return 1 + sum({it.key: it.reruns for it in _list_computed(plan)}.values())


def _list_computed(plan: Agenda) -> list[Metric]:
    metrics = [plan.metric(name) for name in plan.metrics]
    return metrics + [METRICS[need] for it in metrics for need in it.needs if need in METRICS]


def describe_cost(plan: Agenda, pictures: int, mosaics: int) -> list[str]:
    """Lines for a person who decides whether to wait: how much is computed, and which methods cost the most."""
    maps, passes, runs = len(plan.names), count_passes(plan), count_explanations(plan)
    of_pictures = f"{_count(maps, 'heatmap')} x {_count(passes, 'forward pass')} x {_count(pictures, 'image')}"
    of_mosaics = f" and 1 per mosaic ({mosaics})" if mosaics else ""
    again = f"{_count(runs, 'run')} of each method per image{of_mosaics}"
    methods = map(plan.explained, plan.methods)
    costs = ", ".join(f"{it.name} {it.cost}" for it in methods if isinstance(it, Method) and not it.needs)
    lines = [f"Cost: {of_pictures} = {maps * passes * pictures:,} forward passes, plus {again}."]
    return lines + ([f"Methods with several forward passes per run: {costs}."] if costs else [])


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}" + ("" if number == 1 else plural)
