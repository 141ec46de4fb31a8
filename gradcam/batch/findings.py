"""From pictures to what was found in them: the computation that `gradcam run`, `gradcam batch` and Python share."""

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
from gradcam.errors import GradcamError, TargetError, show_fields
from gradcam.images.draw import overlay as draw_overlay
from gradcam.images.read import Pixels, Region
from gradcam.layers.find import find_layer
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared
from gradcam.models.results import ImageAttribution, ImageExplanation
from gradcam.storage.records import Explained, Prediction, Record
from gradcam.storage.run_file import list_places
from gradcam.targets import Box, Keypoint, Like, Mask, MissedBox, Text, Token
from gradcam.targets.base import Instance, Target
from gradcam.targets.classes import ClassTarget
from gradcam.web.page import Page

LISTED = 5  # predictions
NOISE_SIZE = (224, 224)  # pixels
MakePage = Callable[[Classifier, Prepared], Page]
Drawn = Pixels | bytes  # a picture, or one as the bytes of its file
FOUND = ("box", "word", "keypoint")  # kinds of instances that are found by the model, whoever asks


@dataclass(frozen=True)
class Request(Plan):
    """What is asked of each picture: `methods` make maps at `layers`, or else at their own, as `Classifier.layer_for`
    finds it; `attributions` say what each pixel matters. Without any of these, the target's own method makes the maps.
    `target`: None for what the model's kind explains where nothing is said. `make_page`: of each picture a page as well."""

    target: ClassTarget | Target | Callable[[Any], Any] | None = field(default_factory=ClassTarget)
    layers: Sequence[str] = ()
    attributions: Sequence[AttributionMethod] = ()
    make_page: MakePage | None = None

    @property
    def all_methods(self) -> list[Method | AttributionMethod]:
        return [*self.methods, *self.attributions]

    @property
    def classes(self) -> int | None:
        """How many things of each picture are explained; None where a function of the user's, or the picture, says it."""
        return count_things(self.target)

    def count_results(self) -> int:
        """Of each picture; as many as nobody knows yet count as one, or as two where there may well be more."""
        each = [(len(self.layers) or 1) if method.has_layer else 1 for method in self.all_methods]
        things = self.classes or (2 if isinstance(self.target, Target) else 1)
        return (sum(each) or len(self.layers) or 1) * (things + isinstance(self.target, Like))

    def list_layers(self, classifier: Classifier) -> list[str]:
        own = [classifier.layer_for(method) for method in self.methods]
        named = list(self.layers) or [*own, *([classifier.layer] if self.attributions or not own else [])]
        return list(dict.fromkeys(filter(None, named)))

    def to_layer_fields(self, classifier: Classifier, layers: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a classifier for which `list_layers` gives these layers; none for joined ones. Raises
        `LayerError` for a layer that the model does not have."""
        names = [find_layer(classifier.model, layer).name for layer in layers if " + " not in layer]
        if classifier.task != "classification":
            return {"layer": names[0], "is_chosen": True} if len(names) == 1 else {}
        if self.methods and self.methods[0].assumes_positive:
            names.reverse()
        return {"layer": names[0], "layer_for_positive": names[-1]} if names else {}


def count_things(target: Any) -> int | None:
    """How many scores of each picture a target explains; None where only the picture, or a function, says it."""
    if isinstance(target, ClassTarget):
        return target.top if target.classes is None else len(target.classes[0])
    found: Any = None
    if isinstance(target, (Box, Keypoint)):
        found = target.numbers
    elif isinstance(target, MissedBox):
        found = target.boxes
    elif isinstance(target, Mask):
        found = target.classes or [None]
    elif isinstance(target, Text):
        found = [target.text] if isinstance(target.text, str) else target.text
    elif isinstance(target, Like):
        found = [target]
    elif isinstance(target, Token):
        found = [target.position] if isinstance(target.position, int) else target.position
    return None if found is None else len(found)


@dataclass(frozen=True, eq=False)
class MapResult:
    """One result for a picture: what a record says of it, without any file yet, how fine it is, and how to draw it.
    `drawn`: its overlay, where that was drawn already."""

    entry: Explained
    grid: tuple[int, ...]
    source: ImageExplanation | ImageAttribution = field(repr=False)
    k: int = 0
    drawn: Drawn | None = field(default=None, repr=False)

    __repr__ = show_fields

    @property
    def values(self) -> Tensor:
        """The method's own, float32: a map (h,w) on the region that the network saw, or an attribution's (C,H,W)."""
        return (self.source.maps if isinstance(self.source, ImageExplanation) else self.source.values)[0, self.k]

    def draw(self, *, alpha: float = 0.5, colormap: str = "turbo") -> Drawn:
        """RGB, uint8 (H,W,3): the overlay, or an attribution in colour on grey; or the bytes of its file."""
        if self.drawn is not None:
            return self.drawn
        if isinstance(self.source, ImageExplanation):
            return self.source.overlay(0, self.k, alpha=alpha, colormap=colormap)
        return self.source.draw(0, self.k)

    def draw_kinds(self, overlay: Drawn | None, kinds: Sequence[str], colormap: str) -> list[tuple[str, Drawn]]:
        """Of each of these kinds, but the panel, a picture, or a map as the bytes of its file; the overlay is given."""
        made: list[tuple[str, Drawn]] = []
        if "overlay" in kinds and overlay is not None:
            made.append(("overlay", overlay))
        if "heatmap" in kinds:
            source = self.source
            if isinstance(source, ImageExplanation):
                black, signed = np.zeros_like(source.images[0]), source.evidence == "signed"
                how: Any = {"alpha": 1, "colormap": colormap, "region": source.regions[0], "signed": signed}
                made.append(("heatmap", draw_overlay(black, source.heatmaps[0, self.k], **how)))
            else:
                made.append(("heatmap", source.draw(0, self.k)))
        if "map" in kinds:
            file = io.BytesIO()
            np.save(file, np.ascontiguousarray(self.values.float().cpu().numpy()))
            made.append(("map", file.getvalue()))
        return made


@dataclass(frozen=True, eq=False)
class PictureResult:
    """What was found in one picture: maps as `compare` gives them, attributions, and the most probable classes. Its
    picture may lie on a device, as a tensor (H,W,3), and the heatmaps then do. `made`: the results, where these were
    drawn there already."""

    maps: Mapping[tuple[str, str], ImageExplanation]
    attributions: Sequence[ImageAttribution]
    predictions: Sequence[Prediction]
    target: ClassTarget | Target | Callable[[Any], Any] | None = None
    page: Page | None = None
    made: Sequence[MapResult] | None = field(default=None, repr=False)

    __repr__ = show_fields

    @property
    def picture(self) -> Pixels:
        return self._sources[0].images[0]

    @property
    def region(self) -> Region:
        """The pixels of it that the network saw."""
        return self._sources[0].regions[0]

    @property
    def note(self) -> str | None:
        return self._sources[0].notes[0]

    @cached_property
    def results(self) -> list[MapResult]:
        """All of this picture; behind them those on another one that it was likened to."""
        if self.made is not None:
            return list(self.made)
        found = [_to_result(each, k, self.target) for each in self._sources for k in range(each.scores.shape[1])]
        others = [each.reference for each in self.maps.values() if isinstance(each.reference, ImageExplanation)]
        for each in others:
            here = [_to_result(each, k, self.target) for k in range(each.scores.shape[1])]
            found += [replace(it, entry=replace(it.entry, on="reference")) for it in here]
        return found

    def to_record(self, image: str, model: str, files: Sequence[Mapping[str, Any]]) -> Record:
        height, width = self.picture.shape[:2]
        return Record(
            image=image,
            model=model,
            predictions=tuple(self.predictions),
            explained=tuple(replace(result.entry, **its) for result, its in zip(self.results, files)),
            note=self.note,
            size=(height, width),
            region=self.region,
            fit=self._sources[0].fit,
        )

    @property
    def _sources(self) -> list[ImageExplanation | ImageAttribution]:
        return [*self.maps.values(), *self.attributions]


def resolve(classifier: Classifier, request: Request) -> dict[str, Any]:
    """Return the layers, methods, layouts and output of a run, as far as an explanation of noise tells them.

    The noise is always the same, so that two runs differ here only where the rules of their versions do.
    """
    layers, methods, resolved = request.layers or None, request.methods, {}
    if classifier.task == "classification":
        layers, methods = request.list_layers(classifier), [METHODS["gradcam"]]
        resolved = {"layers": layers, "methods": [method.name for method in request.all_methods]}
    elif request.attributions or request.runs_again:
        return {}
    noise = np.random.default_rng(0).integers(0, 256, (*NOISE_SIZE, 3), dtype=np.uint8)
    with contextlib.suppress(Exception, SystemExit), warnings.catch_warnings():  # A detector finds nothing in noise.
        warnings.simplefilter("ignore")
        plan = replace(request, methods=methods, target=_to_target(request.target, None, 1))
        results = classifier.run_plan(noise, layers, plan)
        layouts = {layer: result.layout for (layer, _), result in results.items() if result.layout is not None}
        output = next(iter(results.values())).output_name
        return {**(resolved or list_places(results)), "layouts": layouts, "output": output}
    return resolved


def name_target(target: Any) -> str:
    """What a function of the user's is called; nothing for what is none."""
    is_ours = target is None or isinstance(target, (ClassTarget, Target))
    return "" if is_ours else getattr(target, "__name__", type(target).__name__)


def find(
    classifier: Classifier, request: Request, pictures: Sequence[Prepared], *, classes: Sequence[int] | None = None
) -> list[PictureResult | GradcamError]:
    """What is found in pictures of one size, all in one batch; an error for each whose output is NaN or infinite.
    `classes`: one for each picture, in place of the request's own. Raises as `Classifier.compare` does."""
    if len(pictures) > 1 and _must_be_alone(classifier, classes):
        chosen = [None] * len(pictures) if classes is None else [[index] for index in classes]
        return [found for one, its in zip(pictures, chosen) for found in find(classifier, request, [one], classes=its)]
    target = _to_target(request.target, classes, len(pictures))
    maps: dict[tuple[str, str], ImageExplanation] = {}
    if request.methods or not request.attributions:
        maps = classifier.run_plan(pictures, request.layers or None, replace(request, target=target))
    attributions: list[ImageAttribution] = []
    more: dict[str, Any] = {"target": target, "progress": request.options["progress"]}
    for method in request.attributions:
        more["reshape"] = request.options["reshape"] if method.has_layer else None
        own: Sequence[str | None] = (method.has_layer and request.layers) or [None]
        attributions += [classifier.attribute(pictures, method, layer=layer, **more) for layer in own]
    first: Any = [*maps.values(), *attributions][0]
    predictions = _predict_all(classifier, first, target, len(pictures))
    maps, attributions = {key: _fetch(each) for key, each in maps.items()}, [each.cpu() for each in attributions]
    results: list[PictureResult | GradcamError] = []
    for i, said in enumerate(predictions):
        if said is None:
            results.append(GradcamError("The model's output contains NaN or infinite values: check its weights."))
            continue
        found = PictureResult(maps, attributions, said, request.target)
        if len(pictures) > 1:
            own_maps = {key: explanation.select(i) for key, explanation in maps.items()}
            found = replace(found, maps=own_maps, attributions=[each.select(i) for each in attributions])
        is_empty = not found.results and len(pictures) > 1
        results.append(_tell_why(classifier, request, pictures[i], classes) if is_empty else found)
        if request.make_page is not None and isinstance(results[i], PictureResult):
            results[i] = _with_page(classifier, request.make_page, pictures[i], found)
    return results


def _fetch(found: ImageExplanation) -> ImageExplanation:
    """With its tensors on the processor; heatmaps stay where their pictures are."""
    if not any(isinstance(picture, Tensor) for picture in found.images):
        return found.cpu()
    own = {name: value for name, value in vars(found).items() if isinstance(value, Tensor)}
    fetched: dict[str, Any] = {name: own[name].cpu() for name in own.keys() - {"heatmaps", "output"}}
    return replace(found, **fetched)


def _with_page(
    classifier: Classifier, make_page: MakePage, picture: Prepared, found: PictureResult
) -> PictureResult | GradcamError:
    try:
        return replace(found, page=make_page(classifier, picture))
    except GradcamError as error:
        return GradcamError(str(error))  # a new one: that one would keep all that its traceback refers to


def _must_be_alone(classifier: Classifier, classes: Sequence[int] | None) -> bool:
    """Whether pictures cannot be explained in one batch: they may be shown in different sizes, have captions of their own,
    or have classes of their own where a target is of one at a time."""
    is_of_classes = classifier.task == "classification"
    return classifier.fit != "crop" or classifier.task == "captioning" or (classes is not None and not is_of_classes)


def _to_target(target: Any, classes: Sequence[int] | None, pictures: int) -> Any:
    """What is explained in so many pictures. Raises `TargetError` for classes that a target cannot be of."""
    if isinstance(target, ClassTarget):
        if classes is not None:
            return replace(target, classes=[[index] for index in classes])
        # one row for each
        return target if target.classes is None else replace(target, classes=list(target.classes) * pictures)
    if classes is None:
        return target
    if target is None or isinstance(target, (Box, MissedBox, Mask)):
        return classes[0] if target is None else replace(target, class_=classes[0])
    what = "a function" if not isinstance(target, Target) else f"a {type(target).__name__}"
    raise TargetError(f"A class is given, but the target is {what}: give only one of them.")


def _tell_why(
    classifier: Classifier, request: Request, picture: Prepared, classes: Sequence[int] | None
) -> PictureResult | GradcamError:
    """Why there is nothing to explain in a picture: what is said of it where no other stands beside it."""
    try:
        return find(classifier, request, [picture], classes=classes)[0]
    except GradcamError as error:
        return GradcamError(str(error))  # a new one: that one would keep all that its traceback refers to


def _predict_all(
    classifier: Classifier, first: ImageExplanation | ImageAttribution, target: Any, pictures: int
) -> list[list[Prediction] | None]:
    """What the model says of each picture: its most probable classes, or all that it found; None where it is NaN."""
    if classifier.task != "classification":
        instances = getattr(first, "instances", None)
        seen = [[it for it in own if it.kind in FOUND] for own in instances or [[]] * pictures]
        counts = [first.scores.shape[1] if instances is None else len(own) for own in instances or seen]
        is_finite = [bool(own[:count].isfinite().all()) for own, count in zip(first.scores, counts)]
        found = getattr(first, "detections", None) or seen
        sure = [[it for it in own if it.score is not None] for own in found]
        return [[*map(_to_prediction, own)] if fine else None for own, fine in zip(sure, is_finite)]
    probabilities = first.scores.cpu()
    with contextlib.suppress(*() if isinstance(target, ClassTarget) else (TargetError,)):
        # What a function of the user's makes a score of need not be classes.
        return _predict(classifier, first.probabilities().cpu(), first.classes)
    return [[] if own.isfinite().all() else None for own in probabilities]


def _to_prediction(instance: Instance) -> Prediction:
    index = (instance.number or 0) if instance.index is None else instance.index
    box, point = to_tenths(instance.box), to_tenths(instance.point)
    return Prediction(index, instance.name, float(instance.score or 0), instance.number, box, point)


def to_tenths(numbers: Sequence[float] | None) -> Any:
    """Pixels, to a tenth of one."""
    return None if numbers is None else tuple(round(float(number), 1) + 0.0 for number in numbers)  # no -0.0


def _predict(classifier: Classifier, probabilities: Tensor, explained: Tensor | None) -> list[list[Prediction] | None]:
    """List the most probable classes of each image, and after them the explained ones (N,K) that are less probable."""
    labels, top = classifier.labels, probabilities.topk(min(LISTED, probabilities.shape[1])).indices.tolist()
    more = [[]] * len(top) if explained is None else explained.tolist()
    predictions: list[list[Prediction] | None] = []
    for shares, first, others in zip(probabilities, top, more):
        classes = [*first, *sorted({*others} - {*first}, key=lambda index: -float(shares[index]))]
        listed = [Prediction(i, None if labels is None else labels[i], shares[i].item()) for i in classes]
        predictions.append(listed if shares.isfinite().all() else None)
    return predictions


def _to_result(found: ImageExplanation | ImageAttribution, k: int, target: Any) -> MapResult:
    instance = found.instances[0][k] if isinstance(found, ImageExplanation) and found.instances is not None else None
    name = name_target(target) if found.scores.shape[1] == 1 else f"{name_target(target)} {k}"
    index = None if found.classes is None else int(found.classes[0, k])
    label = name if index is None else None if found.labels is None else found.labels[index]
    if instance is not None:
        index, label = instance.index, _name(instance, target)
    values = found.maps if isinstance(found, ImageExplanation) else found.values[:, :, 0]
    entry = Explained(
        index=index,
        label=label,
        score=found.scores[0, k].item(),
        layer=found.layer or "input",
        method=found.method,
        overlay=None,
        blank=not values[0, k].any().item(),
        evidence=found.evidence if isinstance(found, ImageExplanation) else "signed",
        **({} if instance is None else describe_instance(instance, target)),
    )
    return MapResult(entry, tuple(values.shape[2:]), found, k)


def _name(instance: Instance, target: Any) -> str:
    if instance.kind == "like":
        return PurePath(instance.name).name
    axis = getattr(target, "axis", None)
    return instance.name if axis is None else instance.name.removesuffix(f", {axis}")


def describe_instance(instance: Instance, target: Any) -> dict[str, Any]:
    """What a record says of an instance, beside its class."""
    number = instance.number
    kinds: dict[str, dict[str, Any]] = {
        "box": {"number": number, "edge": instance.edge},
        "missed": {"missed": True},
        "mask": {"mask": _name_mask(target)},
        "text": {"text": instance.name, "against": tuple(instance.against) or None},
        "like": {"like": _name_like(target) or instance.name},
        "word": {"word": number},
        "keypoint": {"keypoint": number, "axis": getattr(target, "axis", None), "point": to_tenths(instance.point)},
    }
    return {"box": to_tenths(instance.box), **kinds[instance.kind]}


def _name_mask(target: Any) -> str:
    """How a mask was named: "predicted", "x,y", the sides of a box, or a file's name."""
    mask = getattr(target, "mask", None)
    if mask is None:
        return "predicted"
    if isinstance(mask, (str, os.PathLike)):
        return PurePath(mask).name
    return ",".join(f"{number:g}" for number in mask) if isinstance(mask, (tuple, list)) else "array"


def _name_like(target: Any) -> str | None:
    reference = getattr(target, "reference", None)
    return os.fspath(reference) if isinstance(reference, (str, os.PathLike)) else None
