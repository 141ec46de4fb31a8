"""Explain preprocessed images: the computation behind `gradcam run`, `gradcam batch` and `explain_files`."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.explain import Plan
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, TargetError, format_fields
from gradcam.images.draw import overlay as draw_overlay
from gradcam.images.marks import Mark, draw_marks
from gradcam.images.read import Pixels, Region
from gradcam.images.regions import encode_mask
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared
from gradcam.models.results import ImageAttribution, ImageExplanation
from gradcam.storage.records import Explained, Prediction, Record
from gradcam.storage.run_file import list_layers_and_methods
from gradcam.targets import Box, Keypoint, Like, Mask, MissedBox, Text, Token
from gradcam.targets.base import Instance, Target
from gradcam.targets.classes import ClassTarget
from gradcam.web.page import Page

# An image's predictions list this number of its most probable classes.
MAX_PREDICTIONS = 5
NOISE_SIZE = (224, 224)
AnyResult = ImageExplanation | ImageAttribution
MakePage = Callable[[Classifier, Prepared], Page]
Classes = Sequence[int] | None  # One class per image.
DrawnImage = Pixels | bytes  # An image, or the bytes of an encoded image file.
# The model detects instances of these kinds, whatever the target is.
DETECTED_KINDS = ("box", "word", "keypoint")
# For each target class, the name of the field that determines the number of scores. If the field's value is a str or an
# int, there is one score. If the value is a sequence, there is one score per item.
EXPLAINED_FIELDS: dict[Any, str] = {
    Box: "numbers",
    Keypoint: "numbers",
    MissedBox: "boxes",
    Text: "text",
    Token: "position",
}


@dataclass(frozen=True)
class ExplainRequest(Plan):
    """The explanations to compute for each image.

    `methods` are CAM methods, which run at `layers`. If `layers` is empty, each method runs at its default layer
    (`Classifier.layer_for`). `attributions` are methods that attribute to input pixels. If `methods` and `attributions`
    are empty, the default method of the model or the target is used. If `target` is None, the default target of the
    model's task is used. `make_page` is a function that makes an HTML page for each image. `others` are further images in
    the prompt of a vision-language model, by path.
    """

    target: ClassTarget | Target | Callable[[Any], Any] | None = field(default_factory=ClassTarget)
    layers: Sequence[str] = ()
    attributions: Sequence[AttributionMethod] = ()
    make_page: MakePage | None = None
    others: Mapping[str, Prepared] = field(default_factory=dict)

    @property
    def all_methods(self) -> list[Method | AttributionMethod]:
        return [*self.methods, *self.attributions]

    def count_results(self) -> int:
        """Return the number of results per image. If the target's number of scores is unknown, assume one or two."""
        layers_per_method = [(len(self.layers) or 1) if method.has_layer else 1 for method in self.all_methods]
        score_count = count_scores(self.target) or (2 if isinstance(self.target, Target) else 1)
        map_count = (sum(layers_per_method) or len(self.layers) or 1) * (score_count + isinstance(self.target, Like))
        return map_count * (1 + len(self.others))

    def list_layers(self, classifier: Classifier) -> list[str]:
        layers = list(self.layers) or [classifier.layer_for(method) for method in self.methods]
        if not layers or (self.attributions and not self.layers):
            layers.append(classifier.layer)
        return list(dict.fromkeys(filter(None, layers)))

    def to_layer_fields(self, classifier: Classifier, layers: Sequence[str]) -> dict[str, Any]:
        """Return the classifier fields that make these layers the default layers.

        Joined layers ("a + b") are left out. Raises `LayerError` for a layer that the model does not have.
        """
        names = [find_layer(classifier.model, layer).name for layer in layers if " + " not in layer]
        if classifier.task != "classification":
            return {"layer": names[0], "is_chosen": True} if len(names) == 1 else {}
        if self.methods and self.methods[0].assumes_positive:
            names.reverse()
        return {"layer": names[0], "layer_for_positive": names[-1]} if names else {}


def count_scores(target: Any) -> int | None:
    """Return the target's number of scores per image, or None if an image or a custom function decides."""
    if isinstance(target, ClassTarget):
        return target.top if target.classes is None else len(target.classes[0])
    if isinstance(target, Like):
        return 1
    if isinstance(target, Mask):
        return len(target.classes or [None])
    explained = getattr(target, EXPLAINED_FIELDS.get(type(target), ""), None)
    return 1 if isinstance(explained, (str, int)) else None if explained is None else len(explained)


@dataclass(frozen=True, eq=False)
class ExplanationResult:
    """One explanation of an image: the data for its record, and methods that draw it.

    `entry` contains no file names. `grid` is the spatial size of the values. `k` is the index of the explained score in
    `source`. If the device has drawn the overlay, `drawn_overlay` holds the overlay.
    """

    entry: Explained
    grid: tuple[int, ...]
    source: AnyResult = field(repr=False)
    k: int = 0
    drawn_overlay: DrawnImage | None = field(default=None, repr=False)

    __repr__ = format_fields

    @property
    def values(self) -> Tensor:
        """Return the method's float32 values: a map (h,w) of the network's input region, or an attribution (C,H,W)."""
        return (self.source.maps if isinstance(self.source, ImageExplanation) else self.source.values)[0, self.k]

    def draw(self, **look: Any) -> DrawnImage:
        """Return an RGB image, uint8 (H,W,3), or the bytes of an image file.

        A map is drawn over the image. An attribution is drawn in colour on grey.
        """
        if self.drawn_overlay is not None:
            return self.drawn_overlay
        if isinstance(self.source, ImageExplanation):
            return self.source.overlay(0, self.k, **look)
        return self.source.draw(0, self.k)

    def draw_kinds(self, kinds: Sequence[str], *, box_threshold: float, box_method: str, **look: Any) -> dict[str, Any]:
        """Return the requested outputs, except the panel, by their keys in a record.

        Each output is an image or the bytes of a file, except the boxes.
        """
        outputs: dict[str, Any] = {}
        source = self.source
        if "overlay" in kinds:
            outputs["overlay"] = self.draw(**look)
        if "heatmap" in kinds:
            if isinstance(source, ImageExplanation):
                black, signed = np.zeros_like(source.images[0]), source.evidence == "signed"
                options: Any = {**look, "alpha": 1, "region": source.regions[0], "signed": signed}
                outputs["heatmap"] = draw_overlay(black, source.heatmaps[0, self.k], **options)
            else:
                outputs["heatmap"] = source.draw(0, self.k)
        if "map" in kinds:
            file = io.BytesIO()
            np.save(file, np.ascontiguousarray(self.values.float().cpu().numpy()))
            outputs["map"] = file.getvalue()
        if "mask" in kinds and isinstance(source, ImageExplanation):
            outputs["mask_file"] = encode_mask(source.masks(0, self.k, threshold=box_threshold)[0])
        if "boxes" in kinds and isinstance(source, ImageExplanation):
            boxes = source.boxes(0, self.k, threshold=box_threshold, method=box_method)
            outputs["boxes"] = tuple((*box.edges, round(box.score, 4)) for box in boxes)
            if "overlay" in outputs:
                marks = [Mark(box.label or "", number=self.k, box=box.edges) for box in boxes]
                outputs["overlay"] = draw_marks(outputs["overlay"], marks)
        return outputs


@dataclass(frozen=True, eq=False)
class ExplainedImage:
    """All explanations of one image, and its predictions.

    `maps` has the type of the results of `Classifier.compare`. If the image is a tensor (H,W,3) on a device, its
    heatmaps are on the same device. If the device has drawn the overlays, `drawn_results` are the results with these
    overlays. `others` are the maps on further images of the prompt, by path.
    """

    maps: Mapping[tuple[str, str], ImageExplanation]
    attributions: Sequence[ImageAttribution]
    predictions: Sequence[Prediction]
    target: ClassTarget | Target | Callable[[Any], Any] | None = None
    page: Page | None = None
    drawn_results: Sequence[ExplanationResult] | None = field(default=None, repr=False)
    others: Mapping[str, Sequence[ImageExplanation]] = field(default_factory=dict, repr=False)

    __repr__ = format_fields

    @property
    def picture(self) -> Pixels:
        return self._sources[0].images[0]

    @property
    def region(self) -> Region:
        """Return the region of the image that the network saw."""
        return self._sources[0].regions[0]

    @property
    def note(self) -> str | None:
        return self._sources[0].notes[0]

    @cached_property
    def results(self) -> list[ExplanationResult]:
        """Return all results: first the maps and attributions of the image, then the maps of reference images."""
        if self.drawn_results is not None:
            return list(self.drawn_results)
        references = [item.reference for item in self.maps.values() if isinstance(item.reference, ImageExplanation)]
        return [
            _to_result(source, k, self.target, on)
            for on, sources in ((None, self._sources), *self.others.items(), ("reference", references))
            for source in sources
            for k in range(source.scores.shape[1])
        ]

    def to_record(self, image: str, model: str, files: Sequence[Mapping[str, Any]]) -> Record:
        explained = tuple(replace(result.entry, **names) for result, names in zip(self.results, files))
        size, fit = tuple(self.picture.shape[:2]), self._sources[0].fit
        facts: dict[str, Any] = {"note": self.note, "size": size, "region": self.region, "fit": fit}
        facts |= {name: getattr(self._sources[0], name, None) for name in ("prompt", "answer")}
        return Record(image, model, predictions=tuple(self.predictions), explained=explained, **facts)

    @property
    def _sources(self) -> list[AnyResult]:
        return [*self.maps.values(), *self.attributions]


def resolve_settings(classifier: Classifier, request: ExplainRequest) -> dict[str, Any]:
    """Explain a noise image, and return the layers, methods, layouts and output that were used.

    The noise image is always the same. If two runs of the same model use different layers for this image, gradcam's
    rules for choosing layers have changed.
    """
    layers, methods, resolved = request.layers or None, request.methods, {}
    if classifier.task == "classification":
        layers, methods = request.list_layers(classifier), [METHODS["gradcam"]]
        resolved = {"layers": layers, "methods": [method.name for method in request.all_methods]}
    elif request.attributions or request.runs_again:
        return {}
    noise = np.random.default_rng(0).integers(0, 256, (*NOISE_SIZE, 3), dtype=np.uint8)
    # The explanation fails if a detector detects nothing in noise.
    with contextlib.suppress(Exception, SystemExit), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = replace(request, methods=methods, target=_to_target(request.target, None, 1))
        results = classifier.run_plan(noise, layers, plan)
        layouts = {layer: result.layout for (layer, _), result in results.items() if result.layout is not None}
        output = next(iter(results.values())).output_name
        return {**(resolved or list_layers_and_methods(results)), "layouts": layouts, "output": output}
    return resolved


def name_target_function(target: Any) -> str:
    """Return the name of a user-defined target function, or "" for gradcam's own targets."""
    is_built_in = target is None or isinstance(target, (ClassTarget, Target))
    return "" if is_built_in else getattr(target, "__name__", type(target).__name__)


def explain_batch(
    classifier: Classifier, request: ExplainRequest, pictures: Sequence[Prepared], *, classes: Classes = None
) -> list[ExplainedImage | GradcamError]:
    """Explain a batch of images of equal size, and return a result or an error for each image.

    If the model's output for an image is NaN or infinite, that image gets an error. `classes` gives one class per
    image, and replaces the classes of the request. Raises the errors of `Classifier.compare`.
    """
    if len(pictures) > 1 and _requires_single_images(classifier, classes):
        rows: list[Classes] = [None] * len(pictures) if classes is None else [[index] for index in classes]
        pairs = zip(pictures, rows)
        return [explain_batch(classifier, request, [prepared], classes=row)[0] for prepared, row in pairs]
    if request.others:
        pictures = [replace(prepared, further_images=list(request.others.values())) for prepared in pictures]
    target = _to_target(request.target, classes, len(pictures))
    maps: dict[tuple[str, str], ImageExplanation] = {}
    if request.methods or not request.attributions:
        maps = classifier.run_plan(pictures, request.layers or None, replace(request, target=target))
    attributions: list[ImageAttribution] = []
    options: dict[str, Any] = {"target": target, "progress": request.options["progress"]}
    for method in request.attributions:
        options["reshape"] = request.options["reshape"] if method.has_layer else None
        layers: Sequence[str | None] = (method.has_layer and request.layers) or [None]
        attributions += [classifier.attribute(pictures, method, layer=layer, **options) for layer in layers]
    others = {path: [item.select(i).cpu() for item in maps.values()] for i, path in enumerate(request.others, 1)}
    maps = {key: item.select(0) for key, item in maps.items()} if others else maps
    first: Any = [*maps.values(), *attributions][0]
    predictions = _predict_all(classifier, first, target, len(pictures))
    maps, attributions = {key: _move_to_cpu(item) for key, item in maps.items()}, [item.cpu() for item in attributions]
    results: list[ExplainedImage | GradcamError] = []
    for i, image_predictions in enumerate(predictions):
        if image_predictions is None:
            results.append(GradcamError("The model's output contains NaN or infinite values: check its weights."))
            continue
        result: ExplainedImage | GradcamError
        try:
            maps_of_image, selected = maps, attributions
            if len(pictures) > 1:
                maps_of_image = {key: explanation.select(i) for key, explanation in maps.items()}
                selected = [attribution.select(i) for attribution in attributions]
            result = ExplainedImage(maps_of_image, selected, image_predictions, request.target, others=others)
            if not result.results and len(pictures) > 1:
                # Explain this image alone, because the error for a single image says why there is no result.
                result = explain_batch(classifier, request, [pictures[i]], classes=classes)[0]
            if request.make_page is not None and isinstance(result, ExplainedImage):
                result = replace(result, page=request.make_page(classifier, pictures[i]))
        except GradcamError as error:
            # Return a new error, because the traceback of the original would keep tensors alive.
            result = GradcamError(str(error))
        results.append(result)
    return results


def _move_to_cpu(explanation: ImageExplanation) -> ImageExplanation:
    """Move an explanation's tensors to the CPU. If the images are tensors, the heatmaps stay on the device."""
    if not any(isinstance(image, Tensor) for image in explanation.images):
        return explanation.cpu()
    tensors = {name: value for name, value in vars(explanation).items() if isinstance(value, Tensor)}
    moved: dict[str, Any] = {name: tensors[name].cpu() for name in tensors.keys() - {"heatmaps", "output"}}
    return replace(explanation, **moved)


def _requires_single_images(classifier: Classifier, classes: Classes) -> bool:
    """Return True if each image needs a separate batch.

    All images of a batch must have the same size, which only the fit "crop" ensures. A captioning model explains the
    caption of one image. A model that is not a classifier accepts only one requested class per batch.
    """
    is_classifier = classifier.task == "classification"
    return classifier.fit != "crop" or classifier.task == "captioning" or (classes is not None and not is_classifier)


def _to_target(target: Any, classes: Classes, image_count: int) -> Any:
    """Return the target of a batch, with the requested class of each image.

    Raises `TargetError` if classes are requested, but the target accepts no classes.
    """
    if isinstance(target, ClassTarget):
        if classes is not None:
            return replace(target, classes=[[index] for index in classes])
        # The target has at most one row of classes, which applies to every image.
        return target if target.classes is None else replace(target, classes=list(target.classes) * image_count)
    if classes is None:
        return target
    if target is None or isinstance(target, (Box, MissedBox, Mask)):
        return classes[0] if target is None else replace(target, class_=classes[0])
    target_name = "a function" if not isinstance(target, Target) else f"a {type(target).__name__}"
    raise TargetError(f"A class is given, but the target is {target_name}: give only one of them.")


def _predict_all(classifier: Classifier, first: AnyResult, target: Any, count: int) -> list[list[Prediction] | None]:
    """Return each image's most probable classes or detections, or None for an image whose output is not finite."""
    if classifier.task != "classification":
        instances = getattr(first, "instances", None)
        rows = instances or [[]] * count
        detected = [[instance for instance in row if instance.kind in DETECTED_KINDS] for row in rows]
        counts = [first.scores.shape[1] if instances is None else len(row) for row in instances or detected]
        is_finite = [bool(row[:end].isfinite().all()) for row, end in zip(first.scores, counts)]
        detections = getattr(first, "detections", None) or detected
        scored = [[instance for instance in row if instance.score is not None] for row in detections]
        return [[*map(_to_prediction, row)] if finite else None for row, finite in zip(scored, is_finite)]
    scores = first.scores.cpu()
    with contextlib.suppress(*() if isinstance(target, ClassTarget) else (TargetError,)):
        # The scores of a user-defined function may not be class scores. The image then has no predictions.
        return _predict(classifier, first.probabilities().cpu(), first.classes)
    return [[] if row.isfinite().all() else None for row in scores]


def _to_prediction(instance: Instance) -> Prediction:
    index = (instance.number or 0) if instance.index is None else instance.index
    box, point = round_to_tenths(instance.box), round_to_tenths(instance.point)
    return Prediction(index, instance.name, float(instance.score or 0), instance.number, box, point)


def round_to_tenths(numbers: Sequence[float] | None) -> Any:
    """Round pixel coordinates to tenths."""
    # Adding 0.0 turns -0.0 into 0.0.
    return None if numbers is None else tuple(round(float(number), 1) + 0.0 for number in numbers)


def _predict(classifier: Classifier, probabilities: Tensor, explained: Tensor | None) -> list[list[Prediction] | None]:
    """Return each image's most probable classes, then the other explained classes. `explained` has the shape (N,K)."""
    labels, top = classifier.labels, probabilities.topk(min(MAX_PREDICTIONS, probabilities.shape[1]))
    explained_rows = [[]] * len(probabilities) if explained is None else explained.tolist()
    are_finite = probabilities.isfinite().all(1).tolist()
    predictions: list[list[Prediction] | None] = []
    rows = zip(probabilities, top.indices.tolist(), top.values.tolist(), explained_rows, are_finite)
    for row, classes, values, explained_classes, is_finite in rows:
        others = sorted({*explained_classes} - {*classes}, key=lambda index: -float(row[index]))
        pairs = [*zip(classes, values), *((index, row[index].item()) for index in others)]
        listed = [Prediction(i, None if labels is None else labels[i], value) for i, value in pairs]
        predictions.append(listed if is_finite else None)
    return predictions


def _to_result(source: AnyResult, k: int, target: Any, on: str | None = None) -> ExplanationResult:
    instance = source.instances[0][k] if isinstance(source, ImageExplanation) and source.instances is not None else None
    name = name_target_function(target) if source.scores.shape[1] == 1 else f"{name_target_function(target)} {k}"
    index = None if source.classes is None else int(source.classes[0, k])
    label = name if index is None else None if source.labels is None else source.labels[index]
    if instance is not None:
        index, label = instance.index, _name(instance, target)
    score, layer = source.scores[0, k].item(), source.layer or "input"
    if isinstance(source, ImageExplanation):
        values, evidence = source.maps, source.evidence
    else:
        values, evidence = source.values[:, :, 0], "signed"
    blank = not values[0, k].any().item()
    details = {"on": on} if instance is None else {"on": on, **describe_instance(instance, target)}
    entry = Explained(index, label, score, layer, source.method, None, blank, evidence, **details)
    return ExplanationResult(entry, tuple(values.shape[2:]), source, k)


def _name(instance: Instance, target: Any) -> str:
    if instance.kind == "like":
        return PurePath(instance.name).name
    axis = getattr(target, "axis", None)
    return instance.name if axis is None else instance.name.removesuffix(f", {axis}")


def describe_instance(instance: Instance, target: Any) -> dict[str, Any]:
    """Return the fields of a record that describe an instance, except its class."""
    number = instance.number
    kinds: dict[str, dict[str, Any]] = {
        "box": {"number": number, "edge": instance.edge},
        "missed": {"missed": True},
        "mask": {"mask": _name_mask(target)},
        "text": {"text": instance.name, "against": tuple(instance.against) or None},
        "like": {"like": _name_like(target) or instance.name},
        "word": {"word": number, "against": tuple(instance.against) or None, "without_image": instance.without_image}
        | {"from_text": instance.is_from_text or None},
        "keypoint": {"keypoint": number, "axis": getattr(target, "axis", None)}
        | {"point": round_to_tenths(instance.point)},
    }
    return {"box": round_to_tenths(instance.box), **kinds[instance.kind]}


def _name_mask(target: Any) -> str:
    """Return a name for the target's mask: "predicted", "x,y", the sides of a box, the name of a file, or "array"."""
    mask = getattr(target, "mask", None)
    if mask is None:
        return "predicted"
    if isinstance(mask, (str, os.PathLike)):
        return PurePath(mask).name
    return ",".join(f"{number:g}" for number in mask) if isinstance(mask, (tuple, list)) else "array"


def _name_like(target: Any) -> str | None:
    reference = getattr(target, "reference", None)
    return os.fspath(reference).replace(os.sep, "/") if isinstance(reference, (str, os.PathLike)) else None
