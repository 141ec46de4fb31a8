"""One picture, or one mosaic, judged: all methods explain it, and all metrics judge their maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcam.classifiers import Classifier, Prepared
from gradcam.classifiers.preparation import find_input_dtype
from gradcam.evaluation.explainers import Explainer
from gradcam.evaluation.seeds import derive
from gradcam.evaluation.study.entries import Entry
from gradcam.evaluation.study.measures import Case, list_curves, measure, measure_mosaic
from gradcam.evaluation.study.plan import Plan
from gradcam.evaluation.subject import Subject

if TYPE_CHECKING:
    from gradcam.evaluation.annotations.reading import Truth
    from gradcam.evaluation.mosaics import Mosaic

Step = Callable[[], None]  # told after each map


@dataclass(frozen=True, eq=False)
class Judge:
    """What is the same for all pictures: the model, the plan, the layer, the score and the seed.

    Chance is drawn from the seed and the picture's own bytes, so that neither its name nor its neighbours change its
    numbers, and all methods meet the same.
    """

    classifier: Classifier
    plan: Plan
    layer: str | Mapping[str, str]
    score: str = "logit"
    reshape: Any = None
    seed: int = field(default=0, kw_only=True)

    def explain(self, images: Tensor, classes: Tensor, sha256: str) -> dict[str, Tensor]:
        """Heatmaps (1,K,H,W) of one image for classes (1,K), by method."""
        return self._explainer(sha256).explain(self.classifier.model, images, classes)

    def look(self, prepared: Prepared, index: int | None) -> Subject:
        """One picture and its class, by default the most probable one; it runs the model once."""
        return Subject(
            self.classifier.model,
            self._to_batch(prepared.image),
            None if index is None else [index],
            activation=self.classifier.activation,
        )

    def judge(
        self, name: str, sha256: str, subject: Subject, truth: Truth | None, step: Step
    ) -> tuple[Entry, Mapping[str, Tensor]]:
        """The numbers of one picture's maps by all methods, and the heatmaps (1,H,W) themselves."""
        index = int(subject.classes)
        explainer = self._explainer(sha256)
        found = explainer.explain(self.classifier.model, subject.images, subject.classes[:, None])
        heatmaps = {method: maps[:, 0] for method, maps in found.items()}
        values, curves = {}, {}
        for method, maps in heatmaps.items():
            case = Case(subject, maps, explainer.only(method), truth, seed=derive(self.seed, sha256))
            values[method] = measure(case, self.plan.of_pictures)
            curves[method] = list_curves(case, self.plan.of_pictures)
            step()
        entry = Entry(
            image=name,
            sha256=sha256,
            index=index,
            label=self.classifier.label(index),
            probability=float(subject.probabilities),
            values=values,
            curves=curves,
        )
        return entry, heatmaps

    def judge_mosaic(self, mosaic: Mosaic, sha256: str, step: Step) -> Entry:
        """The numbers of one mosaic's maps by all methods, each a mean over its four classes."""
        classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=self.classifier.device)
        values = {}
        for method, maps in self.explain(self._to_batch(mosaic.image), classes, sha256).items():
            values[method] = measure_mosaic(maps, self.plan.metrics)
            step()
        labels = [self.classifier.label(index) or f"class {index}" for index in mosaic.classes]
        return Entry(name_mosaic(mosaic), "mosaic", sha256, label=" + ".join(labels), values=values)

    def _explainer(self, sha256: str) -> Explainer:
        return Explainer(
            names=self.plan.names,
            layer=self.layer,
            score=self.score,
            activation=self.classifier.activation,
            reshape=self.reshape,
            seed=derive(self.seed, sha256),
        )

    def _to_batch(self, image: Tensor) -> Tensor:
        return image[None].to(self.classifier.device, find_input_dtype(self.classifier.model))


def name_mosaic(mosaic: Mosaic) -> str:
    """Its four pictures' names."""
    return " + ".join(mosaic.names)
