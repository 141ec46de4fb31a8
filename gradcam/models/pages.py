"""The page of one picture: the maps of all classes where these are cheap, of the most probable ones otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.every_class import Products, Values, count_directions, explain_every_class, recording
from gradcam.cam.explain import Plan
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.errors import GradcamError, ModelError
from gradcam.hooks.hooks import Hooks, recording_off
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier, Picture
from gradcam.models.load import load_classifier
from gradcam.models.preprocess import Prepared, find_windows
from gradcam.models.providers import DEFAULT
from gradcam.models.results import ImageExplanation
from gradcam.models.shown import list_classes, list_things, to_set
from gradcam.options import DEFAULTS, ExplainOptions, accept_old_parameters, check_count
from gradcam.targets.classes import ClassTarget
from gradcam.web.page import MapSet, Page

MOST_LAYERS = 4
TOP = 50  # classes, where maps of all of them cost too much
MOST_CELLS = 2**18  # of the maps by one method at one layer: a byte each in the page


@accept_old_parameters
def page(
    image: Picture,
    classifier: Classifier | None = None,
    *,
    layers: Sequence[str] | None = None,
    methods: Sequence[str | Method] = (),
    target: Any = None,
    top: int = TOP,
    name: str | None = None,
    **options: Any,
) -> Page:
    """Make an interactive page of an image: heatmaps of every class, in one HTML file that needs no server.

    The heatmaps are signed if the method supports that. With Grad-CAM and HiResCAM, the page covers all classes: their
    heatmaps are computed together, from the derivatives of the part of the network after the layer. This takes one
    additional pass, and a partial pass per cell or channel of the layer. With other methods, or if these derivatives
    cannot be computed, the page covers the `top` most probable classes.

    Parameters
    ----------
    image : image
        As in `Classifier.explain`.
    classifier : Classifier, default None
        None uses the included model. Models that are not classifiers, such as the detectors of `gradcam.load_model`,
        are accepted as well. For these, the page shows the model's results, such as boxes, instead of classes.
    layers : sequence of str, default None
        Dotted names of target layers. None uses the default layer and up to three earlier layers: for each higher
        resolution, the last layer that has it.
    methods : sequence of str or Method, default ()
        As in `gradcam.compare`. The default is "gradcam" for classifiers, and the task's default method otherwise.
    target : Any, default None
        For a classifier, the class to show first, or several classes to include, by index or label. For other models, as
        in `explain`.
    top : int, default 50
        The number of most probable classes to include, if the page does not cover all classes.
    name : str, default None
        The title of the image. None uses the file name. Give a title if the image is not given by its path.
    **options : Any
        The options "reshape" and "progress" of `explain`.

    Returns
    -------
    Page
        It has the methods `save`, `to_html` and `to_data`. A notebook displays it automatically.

    Raises
    ------
    GradcamError
        As in `Classifier.explain`. Also if the output contains NaN or infinite values, or `top` is invalid.

    Examples
    --------
    >>> import gradcam
    >>> page = gradcam.page("photo.jpg", layers=["layer4"], target="espresso")
    >>> page.targets.names[page.first], page.maps[0]
    ('espresso', MapSet(layer='layer4', method='gradcam', evidence='signed', ...))
    >>> page.save("photo.html")
    """
    check_count(top, "top", "a number of classes, 1 or more.")
    classifier = load_classifier() if classifier is None else classifier
    if not isinstance(classifier, Classifier):
        raise ModelError(
            f"classifier is {type(classifier).__name__}, expected a model from gradcam.load_classifier or load_model."
        )
    is_file = isinstance(image, (str, os.PathLike))
    title = name or (PurePath(os.fspath(image)).name if is_file else "picture")  # type: ignore[arg-type]  # it is one
    making = _Making(classifier, classifier.prepare(image), options)
    chosen = find_methods(methods) if methods else []
    if classifier.task != "classification" or callable(target):
        sets = making.explain_things(layers, chosen, target)
    else:
        sets = making.explain_classes(layers, chosen or find_methods(["gradcam"]), target, top)
    return making.to_page(title, sets)


class _Making:
    """A page that is being made: of one picture, by one model."""

    def __init__(self, classifier: Classifier, prepared: Prepared, options: dict[str, Any]) -> None:
        unknown = set(options) - {"reshape", "progress"}
        if unknown:
            raise TypeError(f"page() got an unexpected keyword argument {min(unknown)!r}")
        self.classifier, self.prepared = classifier, prepared
        self.options: ExplainOptions = {**DEFAULTS, **options}  # type: ignore[typeddict-item]  # they are
        self.notes: list[str] = []
        self.first = 0
        self.one: ImageExplanation

    def explain(self, layers: Sequence[str] | None, methods: Sequence[Method], target: Any) -> Any:
        """Explanations by layer and method: signed by methods that can be."""
        found: dict[tuple[str, str], ImageExplanation] = {}
        for signed in (True, False):
            own = [method for method in methods if method.is_signed == signed]
            if own or (signed and not methods):
                options: Any = self.options | {"evidence": "signed" if signed and methods else "positive"}
                plan = Plan.of(own, target, options, "page", prefers_signed=not methods)
                found |= self.classifier.run_plan([self.prepared], layers, plan)
        return {key: each.cpu() for key, each in found.items()}

    def explain_things(self, layers: Sequence[str] | None, methods: Sequence[Method], target: Any) -> list[MapSet]:
        """The maps of what is explained in place of classes."""
        if target is None:
            target = getattr(self.classifier, "list_all", lambda: None)()
        found = self.explain(layers, methods, target)
        self.one = next(iter(found.values()))
        if not self.one.scores.isfinite().all():
            raise GradcamError("The model's output contains NaN or infinite values: check its weights.")
        if self.one.reference is not None:
            self.notes.append(
                "This page leaves out the heatmap on the reference image: gradcam run writes both heatmaps."
            )
        self.things, order = list_things(self.one)
        self.total = 0
        return [to_set(each.maps[0].numpy()[order], each) for each in found.values()]

    def explain_classes(
        self, layers: Sequence[str] | None, methods: Sequence[Method], target: Any, top: int
    ) -> list[MapSet]:
        """The maps of classes: of all at once where that can be done."""
        wanted = self._find_wanted(target)
        named = list(layers) if layers is not None else self._choose_layers(methods)
        outlets = {name: outlet for name in named if (outlet := self._find_plain(name)) is not None}
        with recording(outlets) as recorded:
            known = self.explain(named, methods, ClassTarget([wanted]) if wanted else ClassTarget())
        self.recorded = {name: runs[-1] for name, runs in recorded.items() if runs}
        self.outlets = outlets
        self.one = next(iter(known.values()))
        shares = self.one.probabilities()[0]
        if not shares.isfinite().all():
            raise GradcamError("The model's output contains NaN or infinite values: check its weights.")
        ranked = shares.argsort(descending=True, stable=True)
        places = torch.empty_like(ranked)
        places[ranked] = torch.arange(len(ranked), dtype=ranked.dtype, device=ranked.device)
        self.total = len(ranked)
        self.things = list_classes(ranked.tolist(), self.one.labels, shares[ranked].tolist())
        self.first = int(places[wanted[0]]) if wanted else 0
        by_name = {method.name: method for method in methods}
        sets: dict[tuple[str, str], MapSet] = {}
        self.told = self._count(known)
        for (layer, method), one in known.items():
            each = self._explain_all(layer, by_name.get(method), one, ranked)
            if each is not None:
                sets[layer, method] = each
        some = [*dict.fromkeys([*(int(places[it]) for it in wanted), *range(min(top, self.total))])]
        missing = [key for key in known if key not in sets]
        if missing:
            if len(some) < self.total:
                self.notes.append(_say_few(missing, len(some), self.total))
            for key, one in self._explain_some(missing, by_name, ranked[some].tolist()).items():
                sets[key] = to_set(one.maps[0].numpy(), one, some)
        return [sets[key] for key in known]

    def _count(self, known: Mapping[tuple[str, str], Any]) -> Callable[[], None] | None:
        """What is called after each derivative; it says how many are done, of all."""
        progress, done = self.options["progress"], count(1)
        given = [(self.recorded.get(layer), method) for layer, method in known]
        total = sum(count_directions(each, method) or 0 for each, method in given if each is not None)
        return None if progress is None else lambda: progress(next(done), total)

    def _find_plain(self, layer: str) -> nn.Module | None:
        """The module of that name; None for one of several tensors or runs."""
        outlet = find_layer(unwrap(self.classifier.model), layer)
        return None if outlet.keys or outlet.run is not None else outlet.module

    def _find_wanted(self, target: Any) -> list[int]:
        each = target if isinstance(target, (list, tuple)) else [] if target is None else [target]
        return [self.classifier.find_class(it) if isinstance(it, str) else int(it) for it in each]

    def _choose_layers(self, methods: Sequence[Method]) -> list[str]:
        """The one that the methods explain, and those before it."""
        named = [self.classifier.layer_for(it) for it in methods]
        last = named[0] if named else self.classifier.layer
        images = self.classifier.batch([self.prepared])
        stages = find_stages(unwrap(self.classifier.model), images, last)
        return [*dict.fromkeys([*named, *stages])][:MOST_LAYERS]

    def _explain_all(self, layer: str, method: Method | None, one: ImageExplanation, ranked: Tensor) -> MapSet | None:
        """The maps of all classes, in this order; None where there is no short way."""
        is_plain = one.evidence == "signed" and one.fit is None and one.classes is not None
        is_plain = is_plain and find_windows(self.classifier.preprocess, [self.prepared]) is None
        if not is_plain or method is None or one.maps.ndim != 4:
            return None
        if len(ranked) * one.maps[0, 0].numel() > MOST_CELLS and method.name != "gradcam":
            return None
        activations = self.recorded.get(layer)
        if activations is None:
            return None
        images = self.classifier.batch([self.prepared])
        classes: Any = one.classes
        given: dict[str, Any] = {"activations": activations, "known": one.maps[0], "classes": classes[0]}
        model, outlet = self.classifier.model, self.outlets[layer]
        found = explain_every_class(model, images, outlet, method, told=self.told, **given)
        if found is None:
            return None
        kept: dict[str, Any] = {"evidence": "signed"}
        if isinstance(found, Products):
            kept |= {"weights": _to_numpy(found.weights[ranked.to(found.weights.device)])}
            kept |= {"channels": _to_numpy(found.channels)}
        elif isinstance(found, Values):
            kept["maps"] = _to_numpy(found.maps[ranked.to(found.maps.device)])
        return MapSet(layer, method.name, **kept)

    def _explain_some(
        self, missing: Sequence[tuple[str, str]], by_name: dict[str, Method], classes: list[int]
    ) -> dict[tuple[str, str], ImageExplanation]:
        found: dict[tuple[str, str], ImageExplanation] = {}
        for layer in dict.fromkeys(layer for layer, _ in missing):
            own = [by_name[method] for at, method in missing if at == layer]
            named = [layer] if own[0].place == "layer" else None
            found |= self.explain(named, own, ClassTarget([classes]))
        return {key: each for key, each in found.items() if key in set(missing)}

    def to_page(self, title: str, sets: list[MapSet]) -> Page:
        """All of it."""
        one, model = self.one, self.classifier
        notes = [*self.notes, *(note for note in one.notes if note)]
        load = "load_classifier" if model.task == "classification" else "load_model"
        is_usual = model.name == DEFAULT
        more: dict[str, Any] = {
            "code": f"gradcam.{load}({'' if is_usual else json.dumps(model.name)})",
            "words": [] if is_usual else ["--model", model.name],
            "reshape": None if callable(self.options["reshape"]) else self.options["reshape"],
        }
        seen = one.images[0], one.regions[0]
        return Page(title, *seen, model.name, self.things, sets, self.total, notes=notes, first=self.first, **more)


def find_stages(model: nn.Module, images: Tensor, last: str) -> list[str]:
    """The layer of this name, and before it, at each finer resolution, the last of the layers that are least deep in the
    model: for ResNet layer4, layer3, layer2, layer1. From one pass."""
    outlet = find_layer(model, last)
    names = {module: name for name, module in model.named_modules() if name}
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.is_floating_point():
            seen.append((names[module], tuple(output.shape)))

    with preserve_state(model), recording_off(), Hooks() as hooks:
        for module in names:
            hooks.after_forward(module, note)
        model(images.clone())
    own = next((shape for name, shape in seen if name == outlet.name), None)
    is_grid = own is not None and own[2:] != (1, 1) and own[1] > min(own[2:])
    before = seen[: [name for name, _ in seen].index(outlet.name)] if own is not None and is_grid else []
    stages: dict[tuple[int, ...], str] = {}
    for name, shape in before:
        is_finer = (
            own is not None and shape[2] > own[2] and shape[3] > own[3] and max(shape[2:]) < max(images.shape[2:])
        )
        best = stages.get(shape[2:])
        if is_finer and (best is None or name.count(".") <= best.count(".")):
            stages[shape[2:]] = name
    finest_last = sorted(stages.items(), key=lambda item: np.prod(item[0]))
    return [last, *(name for _, name in finest_last)]


def _to_numpy(values: Tensor) -> Any:
    return values.detach().float().cpu().numpy()


def _say_few(missing: Sequence[tuple[str, str]], some: int, total: int) -> str:
    where = ", ".join(f"{method} at {layer}" for layer, method in missing[:3]) + (" and more" if missing[3:] else "")
    return (
        f"Heatmaps of {where} are limited to {some} of {total} classes, because each class needs a backward pass. "
        "For more classes, use gradcam page --top N or --class NAME."
    )
