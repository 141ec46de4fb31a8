"""The plan of a study: the methods to compare, and the metrics."""

# The command line checks arguments with this module. The module does not import torch, because the import takes
# seconds.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcam import plugins
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_methods
from gradcam.errors import GradcamError, format_fields, join_names, shorten
from gradcam.evaluation.heatmap_sources import CONTROLS, Control, CustomFunction, Explainable, find_explainable
from gradcam.evaluation.metrics import DEFAULT_GROUPS, GROUPS, METRICS, Metric, find_metrics
from gradcam.options import argument_error

DEFAULT_METHODS = ("gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam")
# If `needs` is empty, the method runs the model several times.
SINGLE_PASS = tuple(name for name, method in METHODS.items() if method.needs)
METHOD_GROUPS = {"all": tuple(METHODS), "single-pass": SINGLE_PASS}


@dataclass(frozen=True)
class StudyOptions:
    """The options of a study, except methods and metrics, as in `evaluate`."""

    layer: str | None = None
    target: Any = None
    score: str = "logit"
    reshape: Any = None
    annotations: Path | None = None
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class StudyPlan:
    """The names of methods, controls and metrics: built-in names in the order of their tables, then user-defined names.

    `requested_methods` are the methods that the user requested by name. `requested_metrics` are the metrics that the
    user requested by name or by group. If a requested method or metric cannot be used, the study raises an error. Other
    unusable methods and metrics are left out. `custom_methods` and `custom_metrics` are user-defined.
    """

    methods: tuple[str, ...]
    controls: tuple[str, ...]
    metrics: tuple[str, ...]
    requested_methods: frozenset[str] = frozenset()
    requested_metrics: frozenset[str] = frozenset()
    custom_methods: Mapping[str, Explainable] = field(default_factory=dict, repr=False)
    custom_metrics: Mapping[str, Metric] = field(default_factory=dict, repr=False)

    __repr__ = format_fields

    @property
    def names(self) -> tuple[str, ...]:
        return self.methods + self.controls

    def method(self, name: str) -> Any:
        return self.custom_methods.get(name) or METHODS.get(name) or CONTROLS[name]

    def metric(self, name: str) -> Metric:
        return self.custom_metrics.get(name) or METRICS[name]

    @property
    def image_metrics(self) -> tuple[Metric, ...]:
        return tuple(metric for metric in map(self.metric, self.metrics) if not metric.is_of_mosaics)

    @property
    def mosaic_metrics(self) -> tuple[Metric, ...]:
        return tuple(metric for metric in map(self.metric, self.metrics) if metric.is_of_mosaics)

    def describe_custom(self) -> dict[str, Any]:
        """Describe the files and options of user-defined methods and metrics, for a journal; {} if there are none."""
        description: dict[str, Any] = {}
        for kind, custom in (("method", self.custom_methods), ("metric", self.custom_metrics)):
            for name, value in custom.items():
                options = {key: shorten(option) for key, option in getattr(value, "options", {}).items()}
                description[f"{kind} {name}"] = {**(plugins.fingerprint(value) or {}), **options}
        return {"own": description} if description else {}


def make_plan(
    methods: Sequence[Any],
    metrics: Sequence[str | Metric] | None = None,
    *,
    controls: Sequence[str] | None = None,
    has_annotations: bool = False,
) -> StudyPlan:
    """Make a plan from methods, metrics and controls, as in `evaluate`.

    Raise `GradcamError` if a name is unknown or duplicate, if no name is left, or if a requested metric needs
    annotations.
    """
    explained, requested_methods = _find_methods(_check_names(methods, "methods"))
    if controls is not None and (isinstance(controls, str) or any(name not in CONTROLS for name in controls)):
        raise argument_error(controls, "controls", f"a list of some of {join_names(CONTROLS)}.")
    if metrics is None:
        selected, requested = find_metrics((*(("annotations",) if has_annotations else ()), *DEFAULT_GROUPS)), []
    else:
        selected = find_metrics(_check_names(metrics, "metrics"))
        requested = find_metrics(name for name in metrics if not isinstance(name, str) or name.strip().lower() != "all")
    if not has_annotations:
        if names := [metric.name for metric in requested if metric.needs_annotations]:
            subject = f"{join_names(names)} {'needs' if len(names) == 1 else 'need'}"
            advice = "give --annotations PATH (annotations= in Python)"
            raise GradcamError(f"{subject} annotations of the objects: {advice}.")
        selected = [metric for metric in selected if not metric.needs_annotations]
        if not selected:
            raise GradcamError(
                f"Without annotations, no metric is left: give other metrics or groups ({join_names([*GROUPS, 'all'])})."
            )
    method_names = [method.name for method in explained.values() if not isinstance(method, Control)]
    built_in = [*METHODS.values(), *CONTROLS.values()]
    return StudyPlan(
        methods=tuple(sorted(method_names, key=[*METHODS, *method_names].index)),
        controls=tuple(name for name in CONTROLS if controls is None or name in controls or name in explained),
        metrics=tuple(metric.name for metric in selected),
        requested_methods=requested_methods,
        requested_metrics=frozenset(metric.name for metric in requested),
        custom_methods={name: method for name, method in explained.items() if method not in built_in},
        custom_metrics={metric.name: metric for metric in selected if metric.name not in METRICS},
    )


def _check_names(values: Sequence[Any], name: str) -> Sequence[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable) or not values:
        raise argument_error(values, name, "a list of at least one name.")
    return values


def _find_methods(methods: Sequence[Any]) -> tuple[dict[str, Explainable], frozenset[str]]:
    """Return the methods by name, and the names of the methods that the user requested by name, not by group."""
    members = [METHOD_GROUPS.get(entry.strip().lower()) if isinstance(entry, str) else None for entry in methods]
    groups = [METHODS[name] for group in members for name in group or ()]
    requested = [find_explainable(entry, *METHOD_GROUPS) for entry, group in zip(methods, members) if group is None]
    methods = [*groups, *(method for method in requested if isinstance(method, Method))]
    by_name: dict[str, Explainable] = {method.name: method for method in (find_methods(methods) if methods else ())}
    for method in requested:
        if isinstance(method, CustomFunction) and method.name in (*METHODS, *CONTROLS):
            raise GradcamError(f"There is already a method {method.name!r}: rename your function.")
        if not isinstance(method, Method) and by_name.setdefault(method.name, method) != method:
            raise GradcamError(f"There are two methods {method.name!r}: rename one of them.")
    in_groups = {method.name for method in groups}
    return by_name, frozenset({method.name for method in requested} | by_name.keys() - in_groups)


def count_passes(plan: StudyPlan) -> int:
    """Estimate the number of forward passes for all metrics of one heatmap. Repeated explanations are not counted."""
    return sum({metric.key: metric.passes for metric in _list_computed_metrics(plan)}.values())


def count_explanations(plan: StudyPlan) -> int:
    """Count how often each method is run for one image, including runs for variants of the image."""
    return 1 + sum({metric.key: metric.reruns for metric in _list_computed_metrics(plan)}.values())


def _list_computed_metrics(plan: StudyPlan) -> list[Metric]:
    metrics = [plan.metric(name) for name in plan.metrics]
    return metrics + [METRICS[need] for metric in metrics for need in metric.needs if need in METRICS]


def describe_cost(plan: StudyPlan, images: int, mosaics: int) -> list[str]:
    """Describe the amount of computation, and list the expensive methods, before the study starts."""
    maps, passes, runs = len(plan.names), count_passes(plan), _count(count_explanations(plan), "run")
    heatmap_passes = f"{_count(maps, 'heatmap')} x {_count(passes, 'forward pass')} x {_count(images, 'image')}"
    reruns = f"{runs} of each method per image{f' and 1 for each of the {mosaics} mosaics' if mosaics else ''}"
    methods = [method for method in map(plan.method, plan.methods) if isinstance(method, Method) and not method.needs]
    costs = ", ".join(f"{method.name} {method.cost}" for method in methods)
    lines = [f"Cost: {heatmap_passes} = {maps * passes * images:,} forward passes, plus {reruns}."]
    return lines + ([f"Methods with several forward passes per run: {costs}."] if costs else [])


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" + ("" if number == 1 else plural)
