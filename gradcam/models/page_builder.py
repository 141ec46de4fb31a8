"""Make the interactive page of one image.

If the maps of all classes are cheap to compute, the page contains all classes. Otherwise, the page contains the most
probable classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradcam.cam.all_classes import count_directions, explain_all_classes, record_layer_outputs
from gradcam.cam.explain import Plan
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.errors import GradcamError, ModelError
from gradcam.hooks.hooks import Hooks, grad_mode_off
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier, ImageInput
from gradcam.models.load import load_classifier
from gradcam.models.page_contents import describe_model, list_classes, list_things, to_map_set
from gradcam.models.preprocess import Prepared, find_windows
from gradcam.models.results import ImageExplanation
from gradcam.options import DEFAULTS, ExplainOptions, accept_old_parameters, check_count
from gradcam.targets.classes import ClassTarget
from gradcam.targets.masks import Mask
from gradcam.web.page import MapSet, Page

MODEL_FORMS = "a model from gradcam.load_classifier or load_model."
CLASS_LIMIT_NOTE = "This page has heatmaps of {some} of {total} predicted classes. For more, use gradcam page --top N."
REFERENCE_NOTE = "This page does not show the heatmap on the reference image. To write both heatmaps, use gradcam run."
MAX_DEFAULT_LAYERS = 4
DEFAULT_TOP_CLASSES = 50  # default number of classes, if the page does not contain all classes
MAX_MAP_CELLS = 2**18  # for the maps of all classes, per method and layer; a cell takes one byte


@accept_old_parameters
def page(
    image: ImageInput,
    classifier: Classifier | None = None,
    *,
    layers: Sequence[str] | None = None,
    methods: Sequence[str | Method] = (),
    target: Any = None,
    top: int = DEFAULT_TOP_CLASSES,
    name: str | None = None,
    **options: Any,
) -> Page:
    """Make an interactive page of an image: heatmaps of every class, in one HTML file that needs no server.

    The heatmaps are signed if the method supports signed evidence. With Grad-CAM and HiResCAM, the page covers all
    classes. The heatmaps of all classes are computed together, from the derivatives of the network after the layer.
    This computation takes one additional pass, and a partial pass per cell or channel of the layer. With other methods,
    or if the derivatives cannot be computed, the page covers the `top` most probable classes.

    Parameters
    ----------
    image : image
        As in `Classifier.explain`.
    classifier : Classifier, default None
        None uses the included model. For other models, such as the detectors of `gradcam.load_model`, the page
        shows the model's results instead of classes: for example, all boxes, or the masks of all predicted classes.
    layers : sequence of str, default None
        Dotted names of target layers. None uses the default layer, and up to three earlier layers: the last layer of
        each higher resolution.
    methods : sequence of str or Method, default ()
        As in `gradcam.compare`. The default is "gradcam" for classifiers, and the task's default method otherwise.
    target : Any, default None
        For a classifier, the class to show first, or several classes to include, by index or label. For other models, as
        in `explain`.
    top : int, default 50
        The number of most probable classes to include, if the page does not cover all classes. For segmenters, the
        number of predicted classes to include, in decreasing order of area.
    name : str, default None
        The title of the image. None uses the file name, or "image" for an image that is not given by its path.
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
        raise ModelError(f"classifier is {type(classifier).__name__}, expected {MODEL_FORMS}")
    is_file = isinstance(image, (str, os.PathLike))
    title = name or (PurePath(os.fspath(image)).name if is_file else "image")  # type: ignore[arg-type]  # a path
    builder = _PageBuilder(classifier, classifier.prepare(image), options)
    chosen_methods = find_methods(methods) if methods else []
    if classifier.task != "classification" or callable(target):
        sets = builder.explain_instances(layers, chosen_methods, target, top)
    else:
        sets = builder.explain_classes(layers, chosen_methods or find_methods(["gradcam"]), target, top)
    return builder.to_page(title, sets)


class _PageBuilder:
    """A builder that collects the maps, class names and notes for the page of one image and one model."""

    def __init__(self, classifier: Classifier, prepared: Prepared, options: dict[str, Any]) -> None:
        if unknown := set(options) - {"reshape", "progress"}:
            raise TypeError(f"page() got an unexpected keyword argument {min(unknown)!r}")
        self.classifier, self.prepared = classifier, prepared
        self.options: ExplainOptions = {**DEFAULTS, **options}  # type: ignore[typeddict-item]  # checked above
        self.notes: list[str] = []
        self.first = 0
        self.first_explanation: ImageExplanation

    def explain(self, layers: Sequence[str] | None, methods: Sequence[Method], target: Any) -> Any:
        """Return explanations by (layer, method), with signed evidence for methods that support signed evidence."""
        explanations: dict[tuple[str, str], ImageExplanation] = {}
        for signed in (True, False):
            group = [method for method in methods if method.is_signed == signed]
            if group or (signed and not methods):
                options: Any = self.options | {"evidence": "signed" if signed and methods else "positive"}
                plan = Plan.of(group, target, options, "page", prefers_signed=not methods)
                explanations |= self.classifier.run_plan([self.prepared], layers, plan)
        return {key: explanation.cpu() for key, explanation in explanations.items()}

    def explain_instances(
        self, layers: Sequence[str] | None, methods: Sequence[Method], target: Any, top: int
    ) -> list[MapSet]:
        """Return the maps of a target that is not a class, such as a detector's boxes, or a function."""
        if target is None and self.classifier.task == "segmentation":
            target = self._list_predicted_classes(layers, top)
        elif target is None:
            target = getattr(self.classifier, "list_all", lambda: None)()
        explanations = self.explain(layers, methods, target)
        self.first_explanation = next(iter(explanations.values()))
        if not self.first_explanation.scores.isfinite().all():
            raise GradcamError("The model's output contains NaN or infinite values: check its weights.")
        if self.first_explanation.reference is not None:
            self.notes.append(REFERENCE_NOTE)
        self.page_targets, order = list_things(self.first_explanation)
        self.total = 0
        return [to_map_set(explanation.maps[0].numpy()[order], explanation) for explanation in explanations.values()]

    def _list_predicted_classes(self, layers: Sequence[str] | None, top: int) -> Mask:
        """Return the target for a segmenter's predicted classes, in decreasing order of area.

        The page first shows the default class of `explain`: the largest class that is not the background.
        """
        explanation = next(iter(self.explain(layers and layers[:1], [], None).values()))
        default = explanation.instances[0][0].index
        indices = [instance.index for instance in explanation.detections[0]]
        included = [index for index in indices if index in {default, *[i for i in indices if i != default][: top - 1]}]
        if len(included) < len(indices):
            self.notes.append(CLASS_LIMIT_NOTE.format(some=len(included), total=len(indices)))
        self.first = included.index(default)
        return Mask(included)

    def explain_classes(self, layers: Any, methods: Sequence[Method], target: Any, top: int) -> list[MapSet]:
        """Return the maps of all classes if one computation gives all maps. Otherwise, return the `top` classes' maps."""
        class_indices = self._to_indices(target)
        layer_names = list(layers) if layers is not None else self._choose_layer_names(methods)
        self.modules = {name: module for name in layer_names if (module := self._find_module(name)) is not None}
        class_target = ClassTarget([class_indices]) if class_indices else ClassTarget()
        with record_layer_outputs(self.modules) as recorded:
            explanations = self.explain(layer_names, methods, class_target)
        self.recorded = {name: runs[-1] for name, runs in recorded.items() if runs}
        self.first_explanation = next(iter(explanations.values()))
        probabilities = self.first_explanation.probabilities()[0]
        if not probabilities.isfinite().all():
            raise GradcamError("The model's output contains NaN or infinite values: check its weights.")
        ranked = probabilities.argsort(descending=True, stable=True)
        ranks = ranked.argsort()  # ranks[c] is the rank of class c.
        self.total = len(ranked)
        self.page_targets = list_classes(ranked.tolist(), self.first_explanation.labels, probabilities[ranked].tolist())
        self.first = int(ranks[class_indices[0]]) if class_indices else 0
        by_name = {method.name: method for method in methods}
        self.on_direction = self._count(explanations)
        sets: dict[tuple[str, str], Any] = {}
        for (layer, method), explanation in explanations.items():
            sets[layer, method] = self._explain_all(layer, by_name.get(method), explanation, ranked)
        included = [*dict.fromkeys([*(int(ranks[index]) for index in class_indices), *range(min(top, self.total))])]
        missing = [key for key, map_set in sets.items() if map_set is None]
        if missing and len(included) < self.total:
            self.notes.append(_describe_limit(missing, len(included), self.total))
        for key, explanation in self._explain_some(missing, by_name, ranked[included].tolist()).items():
            sets[key] = to_map_set(explanation.maps[0].numpy(), explanation, included)
        return list(sets.values())

    def _count(self, explanations: Mapping[tuple[str, str], Any]) -> Callable[[], None] | None:
        """Return a callback that reports each finished derivative; None if the user passed no `progress`."""
        progress, counter = self.options["progress"], count(1)
        pairs = [(self.recorded.get(layer), method) for layer, method in explanations]
        total = sum(count_directions(values, method) or 0 for values, method in pairs if values is not None)
        return None if progress is None else lambda: progress(next(counter), total)

    def _find_module(self, layer: str) -> nn.Module | None:
        """Return the module with this layer name; None if the name selects one output or one call."""
        layer_ref = find_layer(unwrap(self.classifier.model), layer)
        return None if layer_ref.keys or layer_ref.run is not None else layer_ref.module

    def _to_indices(self, target: Any) -> list[int]:
        classes = target if isinstance(target, (list, tuple)) else [] if target is None else [target]
        return [self.classifier.find_class(entry) if isinstance(entry, str) else int(entry) for entry in classes]

    def _choose_layer_names(self, methods: Sequence[Method]) -> list[str]:
        """Return the default layers of the methods, and earlier layers with higher resolutions."""
        names = [self.classifier.layer_for(method) for method in methods]
        stages = find_stages(unwrap(self.classifier.model), self.classifier.batch([self.prepared]), names[0])
        return [*dict.fromkeys([*names, *stages])][:MAX_DEFAULT_LAYERS]

    def _explain_all(self, layer: str, method: Method | None, explanation: Any, ranked: Tensor) -> MapSet | None:
        """Return the maps of all classes, in the order of `ranked`; None if these maps cannot be computed together."""
        is_supported = explanation.evidence == "signed" and explanation.fit is None and explanation.classes is not None
        is_supported = is_supported and find_windows(self.classifier.preprocess, [self.prepared]) is None
        if not is_supported or method is None or explanation.maps.ndim != 4 or self.recorded.get(layer) is None:
            return None
        if len(ranked) * explanation.maps[0, 0].numel() > MAX_MAP_CELLS and method.name != "gradcam":
            return None
        model, images, module = self.classifier.model, self.classifier.batch([self.prepared]), self.modules[layer]
        options: dict[str, Any] = {"activations": self.recorded[layer], "report": self.on_direction}
        options |= {"known": explanation.maps[0], "classes": explanation.classes[0]}
        result = explain_all_classes(model, images, module, method, **options)
        if result is None:
            return None
        values = _to_numpy(result.values[ranked.to(result.values.device)])
        if result.channels is None:
            return MapSet(layer, method.name, "signed", values)
        return MapSet(layer, method.name, "signed", weights=values, channels=_to_numpy(result.channels))

    def _explain_some(self, missing: Sequence[tuple[str, str]], by_name: dict[str, Method], classes: list[int]) -> Any:
        explanations: dict[tuple[str, str], ImageExplanation] = {}
        for layer in dict.fromkeys(layer for layer, _ in missing):
            layer_methods = [by_name[method] for missing_layer, method in missing if missing_layer == layer]
            layer_names = [layer] if layer_methods[0].has_layer else None
            explanations |= self.explain(layer_names, layer_methods, ClassTarget([classes]))
        return {key: explanation for key, explanation in explanations.items() if key in set(missing)}

    def to_page(self, title: str, sets: list[MapSet]) -> Page:
        """Return the finished page."""
        explanation, model = self.first_explanation, self.classifier
        prompt = [] if explanation.prompt is None else [f"Prompt: {explanation.prompt}"]
        notes = [*prompt, *self.notes, *(note for note in explanation.notes if note)]
        words, code = describe_model(model.name, explanation.fit, is_class=model.task == "classification")
        reshape = None if callable(self.options["reshape"]) else self.options["reshape"]
        visible, first = (explanation.images[0], explanation.regions[0]), self.first
        fields: dict[str, Any] = {"code": code, "words": words, "reshape": reshape, "first": first}
        return Page(title, *visible, model.name, self.page_targets, sets, self.total, notes=notes, **fields)


def find_stages(model: nn.Module, images: Tensor, last: str) -> list[str]:
    """Return the layer `last`, then earlier layers with finer grids: layer4, layer3, layer2 and layer1 for a ResNet.

    For each resolution, the layer with the fewest dots in its name is chosen. If several names have equally few dots,
    the last layer is chosen. The model is run once, to record the resolutions.
    """
    layer_ref = find_layer(model, last)
    names = {module: name for name, module in model.named_modules() if name}
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.is_floating_point():
            shapes.append((names[module], tuple(output.shape)))

    with preserve_state(model), grad_mode_off(), Hooks() as hooks:
        for module in names:
            hooks.after_forward(module, record)
        model(images.clone())
    index = next((index for index, (name, _) in enumerate(shapes) if name == layer_ref.name), None)
    if index is None:
        return [last]
    channels, rows, columns = shapes[index][1][1:]
    is_grid = (rows, columns) != (1, 1) and channels > min(rows, columns)
    stages: dict[tuple[int, ...], str] = {}
    for name, shape in shapes[:index] if is_grid else []:
        is_finer = shape[2] > rows and shape[3] > columns and max(shape[2:]) < max(images.shape[2:])
        best = stages.get(shape[2:])
        if is_finer and (best is None or name.count(".") <= best.count(".")):
            stages[shape[2:]] = name
    return [last, *(name for _, name in sorted(stages.items(), key=lambda item: np.prod(item[0])))]


def _to_numpy(values: Tensor) -> Any:
    return values.detach().float().cpu().numpy()


def _describe_limit(missing: Sequence[tuple[str, str]], count: int, total: int) -> str:
    examples = ", ".join(f"{method} at {layer}" for layer, method in missing[:3]) + (" and more" if missing[3:] else "")
    limit = f"limited to {count} of {total} classes, because each class needs a backward pass"
    return f"Heatmaps of {examples} are {limit}. For more classes, use gradcam page --top N or --class NAME."
