"""From pictures to what was found in them: the computation that `gradcam run`, `gradcam batch` and Python share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.explain import Plan
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, TargetError, show_fields
from gradcam.images.draw import overlay as draw_overlay
from gradcam.images.read import Pixels, Region
from gradcam.models.classifier import Classifier, Prepared
from gradcam.models.results import PictureAttribution, PictureExplanation
from gradcam.storage.records import Explained, Prediction, Record
from gradcam.targets.classes import ClassTarget

if TYPE_CHECKING:
    from torch import Tensor

LISTED = 5  # predictions


@dataclass(frozen=True)
class Request(Plan):
    """What is asked of each picture: `methods` make maps at `layers`, or else at their own, as `Classifier.layer_for`
    finds it; `attributions` say what each pixel matters."""

    target: ClassTarget | Callable[[Any], Any] = field(default_factory=ClassTarget)
    layers: Sequence[str] = ()
    attributions: Sequence[AttributionMethod] = ()

    @property
    def all_methods(self) -> list[Method | AttributionMethod]:
        return [*self.methods, *self.attributions]

    @property
    def classes(self) -> int | None:
        """How many of each picture are explained; None where a function of the user's says it."""
        if not isinstance(self.target, ClassTarget):
            return None
        return self.target.top if self.target.classes is None else len(self.target.classes[0])

    def count_results(self) -> int:
        """Of each picture; scores of a function of the user's count as one."""
        places = sum((len(self.layers) or 1) if method.has_layer else 1 for method in self.all_methods)
        return places * (self.classes or 1)

    def list_layers(self, classifier: Classifier) -> list[str]:
        own = [classifier.layer_for(method) for method in self.methods]
        return list(self.layers) or list(dict.fromkeys([*own, *([classifier.layer] if self.attributions else [])]))


@dataclass(frozen=True, eq=False)
class MapResult:
    """One result for a picture: what a record says of it, without any file yet, how fine it is, and how to draw it."""

    entry: Explained
    grid: tuple[int, ...]
    source: PictureExplanation | PictureAttribution = field(repr=False)
    k: int = 0

    __repr__ = show_fields

    @property
    def values(self) -> Tensor:
        """The method's own, float32: a map (h,w) on the region that the network saw, or an attribution's (C,H,W)."""
        return (self.source.maps if isinstance(self.source, PictureExplanation) else self.source.values)[0, self.k]

    def draw(self, *, alpha: float = 0.5, colormap: str = "turbo") -> Pixels:
        """RGB, uint8 (H,W,3): the overlay, or an attribution in colour on grey."""
        if isinstance(self.source, PictureExplanation):
            return self.source.overlay(0, self.k, alpha=alpha, colormap=colormap)
        return self.source.picture(0, self.k)

    def draw_kinds(
        self, overlay: Pixels | None, kinds: Sequence[str], colormap: str
    ) -> list[tuple[str, Pixels | bytes]]:
        """Of each of these kinds, but the panel, a picture, or a map as the bytes of its file; the overlay is given."""
        made: list[tuple[str, Pixels | bytes]] = []
        if "overlay" in kinds and overlay is not None:
            made.append(("overlay", overlay))
        if "heatmap" in kinds:
            source = self.source
            if isinstance(source, PictureExplanation):
                black, signed = np.zeros_like(source.pictures[0]), source.evidence == "signed"
                how: Any = {"alpha": 1, "colormap": colormap, "region": source.regions[0], "signed": signed}
                made.append(("heatmap", draw_overlay(black, source.heatmaps[0, self.k], **how)))
            else:
                made.append(("heatmap", source.picture(0, self.k)))
        if "map" in kinds:
            file = io.BytesIO()
            np.save(file, np.ascontiguousarray(self.values.float().cpu().numpy()))
            made.append(("map", file.getvalue()))
        return made


@dataclass(frozen=True, eq=False)
class PictureResult:
    """What was found in one picture: maps as `compare` gives them, attributions, and the most probable classes."""

    maps: Mapping[tuple[str, str], PictureExplanation]
    attributions: Sequence[PictureAttribution]
    predictions: Sequence[Prediction]
    target: str = ""  # the name of the function that was explained, if it was one

    __repr__ = show_fields

    @property
    def picture(self) -> Pixels:
        return self._sources[0].pictures[0]

    @property
    def region(self) -> Region:
        """The pixels of it that the network saw."""
        return self._sources[0].regions[0]

    @property
    def note(self) -> str | None:
        return self._sources[0].notes[0]

    @cached_property
    def results(self) -> list[MapResult]:
        return [_to_result(each, k, self.target) for each in self._sources for k in range(each.scores.shape[1])]

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
    def _sources(self) -> list[PictureExplanation | PictureAttribution]:
        return [*self.maps.values(), *self.attributions]


def name_target(target: ClassTarget | Callable[[Any], Any]) -> str:
    """What a function of the user's is called; nothing for classes."""
    return "" if isinstance(target, ClassTarget) else getattr(target, "__name__", type(target).__name__)


def find(
    classifier: Classifier, request: Request, pictures: Sequence[Prepared], *, classes: Sequence[int] | None = None
) -> list[PictureResult | GradcamError]:
    """What is found in pictures of one size, all in one batch; an error for each whose output is NaN or infinite.
    `classes`: one for each picture, in place of the request's own. Raises as `Classifier.compare` does."""
    if classifier.fit != "crop" and len(pictures) > 1:  # as they are shown, they may be of different sizes
        chosen = [None] * len(pictures) if classes is None else [[index] for index in classes]
        return [found for one, its in zip(pictures, chosen) for found in find(classifier, request, [one], classes=its)]
    target = request.target
    if not isinstance(target, ClassTarget):
        if classes is not None:
            raise TargetError("A class is asked for, and the target is a function: give one of them.")
    elif classes is not None:
        target = replace(target, classes=[[index] for index in classes])
    elif target.classes is not None:
        target = replace(target, classes=list(target.classes) * len(pictures))  # one row for each
    maps: dict[tuple[str, str], PictureExplanation] = {}
    if request.methods:
        maps = classifier.carry_out(pictures, request.layers or None, replace(request, target=target))
    attributions: list[PictureAttribution] = []
    more: dict[str, Any] = {"target": target, "progress": request.options["progress"]}
    for method in request.attributions:
        more["reshape"] = request.options["reshape"] if method.has_layer else None
        own: Sequence[str | None] = (method.has_layer and request.layers) or [None]
        attributions += [classifier.attribute(pictures, method, layer=layer, **more) for layer in own]
    first = [*maps.values(), *attributions][0]
    probabilities, is_of_classes = first.scores.cpu(), False
    with contextlib.suppress(*() if isinstance(target, ClassTarget) else (TargetError,)):
        # What a function of the user's makes a score of need not be classes.
        probabilities, is_of_classes = classifier.probabilities(first.output, len(pictures)).cpu(), True
    maps, attributions = {key: each.cpu() for key, each in maps.items()}, [each.cpu() for each in attributions]
    return [
        PictureResult(
            maps={key: each.one(i) for key, each in maps.items()},
            attributions=[each.one(i) for each in attributions],
            predictions=_predict(classifier, probabilities[i]) if is_of_classes else (),
            target=name_target(target),
        )
        if probabilities[i].isfinite().all()
        else GradcamError("The model's output is NaN or infinite in places: look at its weights.")
        for i in range(len(pictures))
    ]


def _predict(classifier: Classifier, probabilities: Tensor) -> list[Prediction]:
    top = probabilities.topk(min(LISTED, len(probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist())
    labels = classifier.labels
    return [Prediction(index, None if labels is None else labels[index], share) for index, share in pairs]


def _to_result(found: PictureExplanation | PictureAttribution, k: int, target: str) -> MapResult:
    name = target if found.scores.shape[1] == 1 else f"{target} {k}"
    index = None if found.classes is None else int(found.classes[0, k])
    label = name if index is None else None if found.labels is None else found.labels[index]
    values = found.maps if isinstance(found, PictureExplanation) else found.values[:, :, 0]
    entry = Explained(
        index=index,
        label=label,
        score=found.scores[0, k].item(),
        layer=found.layer or "input",
        method=found.method,
        overlay=None,
        blank=not values[0, k].any().item(),
        evidence=found.evidence if isinstance(found, PictureExplanation) else "signed",
    )
    return MapResult(entry, tuple(values.shape[2:]), found, k)
