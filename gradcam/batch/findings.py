"""From pictures to what was found in them: the computation that `gradcam run`, `gradcam batch` and Python share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gradcam.attributions.table import ATTRIBUTIONS
from gradcam.cam.budget import Progress
from gradcam.errors import GradcamError, show_fields
from gradcam.images.read import Pixels, Region
from gradcam.models.classifier import Classifier, Prepared
from gradcam.models.results import PictureAttribution, PictureExplanation
from gradcam.storage.records import Explained, Prediction
from gradcam.targets import ClassTarget

if TYPE_CHECKING:
    from torch import Tensor

LISTED = 5  # predictions


@dataclass(frozen=True)
class Question:
    """What is asked of each picture: `methods` make maps at `layers`, `attributions` say what each pixel matters.

    Without layers, each method looks at its own: `Classifier.layer_for`.
    """

    layers: Sequence[str] = ()
    methods: Sequence[str] = ("gradcam",)
    attributions: Sequence[str] = ()
    target: ClassTarget = field(default_factory=ClassTarget)
    evidence: str = "positive"
    augmentation: str = "none"
    smoothing: str = "none"
    reshape: str | tuple[int, ...] | None = None

    @property
    def classes(self) -> int:
        """How many of each picture are explained."""
        return self.target.top if self.target.classes is None else len(self.target.classes[0])

    def list_layers(self, classifier: Classifier) -> list[str]:
        """The layers, those of the methods' own too."""
        own = [classifier.layer_for(name) for name in self.methods]
        return list(self.layers) or list(dict.fromkeys([*own, *([classifier.layer] if self.attributions else [])]))


@dataclass(frozen=True, eq=False)
class Drawing:
    """One result for a picture: what it is of, how fine it is, whether there is anything on it, and how to draw it."""

    index: int
    score: float
    layer: str
    method: str
    evidence: str
    grid: tuple[int, ...]
    is_blank: bool
    source: PictureExplanation | PictureAttribution = field(repr=False)
    k: int = 0

    __repr__ = show_fields

    @property
    def map(self) -> Tensor | None:
        """The method's own values (h,w), float32 on the region that the network saw; None for an attribution."""
        return self.source.maps[0, self.k] if isinstance(self.source, PictureExplanation) else None

    def to_entry(self, label: str | None) -> Explained:
        """What a record says of it, without any file yet; `label`: the class's name."""
        return Explained(
            index=self.index,
            label=label,
            score=self.score,
            layer=self.layer,
            method=self.method,
            overlay=None,
            blank=self.is_blank,
            evidence=self.evidence,
        )

    def draw(self, *, alpha: float = 0.5, colormap: str = "turbo") -> Pixels:
        """RGB, uint8 (H,W,3): the overlay, or an attribution in colour on grey."""
        if isinstance(self.source, PictureExplanation):
            return self.source.overlay(0, self.k, alpha=alpha, colormap=colormap)
        return self.source.picture(0, self.k)


@dataclass(frozen=True, eq=False)
class Finding:
    """What was found in one picture: maps as `compare` gives them, attributions, and the most probable classes."""

    maps: Mapping[tuple[str, str], PictureExplanation]
    attributions: Sequence[PictureAttribution]
    predictions: Sequence[Prediction]

    __repr__ = show_fields

    @property
    def picture(self) -> Pixels:
        """What is drawn on: RGB, uint8 (H,W,3)."""
        return self._first.pictures[0]

    @property
    def region(self) -> Region:
        """The pixels of it that the network saw."""
        return self._first.regions[0]

    @property
    def fit(self) -> str | None:
        """How the network was shown these, where that is not as its own preprocessing does."""
        return self._first.fit

    @property
    def note(self) -> str | None:
        """What a person should know of how the picture is shown."""
        return self._first.notes[0]

    @property
    def drawings(self) -> list[Drawing]:
        """All results, one by one: the maps first, and the classes of each in their order."""
        found = _all(self.maps, self.attributions)
        return [_to_drawing(each, k) for each in found for k in range(each.scores.shape[1])]

    @property
    def _first(self) -> PictureExplanation | PictureAttribution:
        return _all(self.maps, self.attributions)[0]


def find(
    classifier: Classifier,
    question: Question,
    pictures: Sequence[Prepared],
    *,
    classes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Finding | GradcamError]:
    """What is found in pictures of one size, all in one batch; an error for each whose output is NaN or infinite.

    `classes`: one for each picture, in place of the question's own. Raises as `Classifier.compare` does.
    """
    if classifier.fit != "crop" and len(pictures) > 1:  # as they are shown, they may be of different sizes
        chosen = [None] * len(pictures) if classes is None else [[index] for index in classes]
        pairs = zip(pictures, chosen)
        return [
            found for one, its in pairs for found in find(classifier, question, [one], classes=its, progress=progress)
        ]
    target = question.target
    if classes is not None:
        target = replace(target, classes=[[index] for index in classes])
    elif target.classes is not None:
        target = replace(target, classes=list(target.classes) * len(pictures))  # one row for each
    maps = _make_maps(classifier, question, pictures, target, progress) if question.methods else {}
    attributions = _attribute(classifier, question, pictures, target, progress)
    output = _all(maps, attributions)[0].output
    probabilities = classifier.probabilities(output, len(pictures)).cpu()
    maps, attributions = {key: each.cpu() for key, each in maps.items()}, [each.cpu() for each in attributions]
    return [
        _find_one(classifier, i, probabilities[i], maps=maps, attributions=attributions) for i in range(len(pictures))
    ]


def _all(
    maps: Mapping[tuple[str, str], PictureExplanation], attributions: Sequence[PictureAttribution]
) -> list[PictureExplanation | PictureAttribution]:
    return [*maps.values(), *attributions]


def _make_maps(
    classifier: Classifier,
    question: Question,
    pictures: Sequence[Prepared],
    target: ClassTarget,
    progress: Progress | None,
) -> dict[tuple[str, str], PictureExplanation]:
    return classifier.compare(
        pictures,
        layers=question.layers or None,
        methods=question.methods,
        target=target,
        evidence=question.evidence,
        augmentation=question.augmentation,
        smoothing=question.smoothing,
        reshape=question.reshape,
        progress=progress,
    )


def _attribute(
    classifier: Classifier,
    question: Question,
    pictures: Sequence[Prepared],
    target: ClassTarget,
    progress: Progress | None,
) -> list[PictureAttribution]:
    found = []
    for method in question.attributions:
        has_layer = ATTRIBUTIONS[method].has_layer
        layers: Sequence[str | None] = question.layers if has_layer and question.layers else [None]
        for layer in layers:
            reshape = question.reshape if has_layer else None
            found.append(
                classifier.attribute(pictures, method, layer=layer, target=target, reshape=reshape, progress=progress)
            )
    return found


def _find_one(
    classifier: Classifier,
    i: int,
    probabilities: Tensor,
    *,
    maps: Mapping[tuple[str, str], PictureExplanation],
    attributions: Sequence[PictureAttribution],
) -> Finding | GradcamError:
    if not probabilities.isfinite().all():
        return GradcamError("The model's output is NaN or infinite in places: look at its weights.")
    return Finding(
        maps={key: each.one(i) for key, each in maps.items()},
        attributions=[each.one(i) for each in attributions],
        predictions=_predict(classifier, probabilities),
    )


def _predict(classifier: Classifier, probabilities: Tensor) -> list[Prediction]:
    top = probabilities.topk(min(LISTED, len(probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist())
    return [Prediction(index, classifier.label(index), probability) for index, probability in pairs]


def _to_drawing(found: PictureExplanation | PictureAttribution, k: int) -> Drawing:
    """The k-th class's."""
    classes: Any = found.classes  # not None: classes are asked for, never a function
    values = found.maps if isinstance(found, PictureExplanation) else found.values[:, :, 0]
    return Drawing(
        index=int(classes[0, k]),
        score=found.scores[0, k].item(),
        layer=found.layer or "input",
        method=found.method,
        evidence=found.evidence if isinstance(found, PictureExplanation) else "signed",
        grid=tuple(values.shape[2:]),
        is_blank=not values[0, k].any().item(),
        source=found,
        k=k,
    )
