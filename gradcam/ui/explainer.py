"""Explain images for the local page: return all data of an image, or one heatmap while the user edits the image."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradcam.cam.methods.table import METHODS, find_method
from gradcam.errors import GradcamError, escape_controls
from gradcam.images.edit import MAX_EDIT_POINTS, parse_edit
from gradcam.layers.find import unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.labels import name_class
from gradcam.models.page_builder import find_stages, page
from gradcam.models.page_contents import to_map_set
from gradcam.models.preprocess import Prepared, edit_reading
from gradcam.options import Progress
from gradcam.targets import Text
from gradcam.ui.model_cache import LoadedModel, ModelCache, ModelRequest
from gradcam.ui.strip import ImageStrip
from gradcam.ui.supported_methods import list_supported_methods
from gradcam.web.page import Page

NOT_FINITE = "The model's output contains NaN or infinite values: check its weights."


@dataclass(frozen=True)
class Question:
    """A request of the page to explain an image.

    `first` is the class to display first. If `quick` is True, the user is editing the image with the brush, and only
    the heatmap of the class `first` is computed. `other_model` is a second model to compare with.
    """

    image: int
    model: ModelRequest
    layer: str | None = None
    method: str | None = None
    edits: tuple[str, ...] = ()
    first: int | None = None
    quick: bool = False
    other_model: ModelRequest | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Question:
        """Convert JSON data from the page to a question. Raise `GradcamError` if the data is malformed."""
        try:
            texts, edits = (_to_texts(data.get(name)) for name in ("texts", "edits"))
            layer, method = (_to_name(data.get(name)) for name in ("layer", "method"))
            first = None if data.get("first") is None else _to_number(data["first"])
            other = None if data.get("other") is None else _to_model_request(data["other"], texts)
            image, model = _to_number(data["picture"]), _to_model_request(data, texts)
            question = cls(image, model, layer, method, edits, first, bool(data.get("quick")), other)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise GradcamError("The page sent an invalid request: reload the page.") from None
        if len(question.edits) > MAX_EDIT_POINTS:
            raise GradcamError("Too many edits: undo some of them.")
        for edit in question.edits:
            parse_edit(edit)
        return question


class Explainer:
    """Answers questions about the images in the page's image strip, with cached models. Not thread-safe."""

    def __init__(self, models: ModelCache, images: ImageStrip) -> None:
        self.models, self.images = models, images
        self._prepared: dict[tuple[int, ModelRequest], Prepared] = {}  # for the last two pairs of image and model
        self._stages: dict[ModelRequest, list[str]] = {}
        self._methods: dict[ModelRequest, list[str]] = {}
        self._last_page: tuple[Question, Page] | None = None

    def answer(self, question: Question, progress: Progress) -> dict[str, Any]:
        """Return the answer to a question as JSON data. Raise `GradcamError` if the image cannot be explained."""
        return self.models.retry_out_of_memory(lambda: self._answer(question, progress))

    def save(self, question: Question, progress: Progress) -> str:
        """Return the answer as a standalone HTML page. Reuse the last answer's maps if they are the same."""
        return self.models.retry_out_of_memory(lambda: self._save(question, progress))

    def warm_up(self) -> None:
        """Explain a grey image with the default model, because the first pass of a model is slow."""
        request = ModelRequest()
        loaded = self.models.get(request)
        classifier = loaded.classifier
        if classifier.task == "classification":
            with contextlib.suppress(GradcamError):  # The user's first image will raise the same error.
                prepared = classifier.prepare(np.full((64, 64, 3), 128, np.uint8))
                page(prepared, classifier, layers=[classifier.layer], reshape=loaded.reshape)
                self._list_layers(request, classifier, prepared)
                self._list_methods(request, loaded, prepared, None)

    def _answer(self, question: Question, progress: Progress) -> dict[str, Any]:
        loaded = self.models.get(question.model)
        prepared = self._prepare(question.image, question.model, loaded, question.edits)
        if question.quick and loaded.classifier.task == "classification":
            return self._explain_one(loaded, prepared, question)
        image_page = self._make_page(loaded, prepared, question, progress)
        self._last_page = _forget_view(question), image_page
        data: dict[str, Any] = {
            "page": self._to_data(image_page, question),
            "task": loaded.classifier.task,
            "layers": self._list_layers(question.model, loaded.classifier, prepared),
            "methods": self._list_methods(question.model, loaded, prepared, question),
            "notes": [escape_controls(note) for note in loaded.classifier.notes],
        }
        return data | {"other": self._compare(question, data["page"], progress)}

    def _save(self, question: Question, progress: Progress) -> str:
        if self._last_page is None or self._last_page[0] != _forget_view(question):
            self._answer(replace(question, quick=False, other_model=None), progress)
        assert self._last_page is not None
        image_page = self._last_page[1]
        targets, first = image_page.targets, question.first
        if first is not None and targets.kind == "class":
            first = list(targets.indices).index(first) if first in targets.indices else None
        if first is not None and 0 <= first < len(targets.names):
            image_page = replace(image_page, first=first)
        words, code = list(image_page.words), image_page.code
        for path in filter(os.path.isabs, image_page.words):  # Hide local folders, because the page may be published.
            words[words.index(path)] = os.path.basename(path)
            code = code.replace(path, os.path.basename(path))
        return replace(image_page, words=words, code=code).to_html()

    def _make_page(self, loaded: LoadedModel, prepared: Prepared, question: Question, progress: Progress) -> Page:
        classifier, target = loaded.classifier, self._find_target(loaded.classifier, question)
        entry = self.images.get(question.image)
        methods = [] if question.method is None else [question.method]
        options: Any = {"name": entry.name, "progress": progress, "reshape": loaded.reshape}
        layers = _find_layers(classifier, question)
        image_page = page(prepared, classifier, layers=layers, methods=methods, target=target, **options)
        return replace(image_page, words=loaded.words, code=loaded.code, edits=question.edits)

    def _to_data(self, image_page: Page, question: Question) -> dict[str, Any]:
        data, source = image_page.to_data(), self.images.get(question.image).source
        if isinstance(source, Path):
            data["image"]["path"] = escape_controls(str(source))
        return data

    def _find_target(self, classifier: Classifier, question: Question) -> Any:
        if classifier.task == "matching":
            if not question.model.texts:
                problem = "This model compares images with sentences"
                raise GradcamError(f"{problem}: type one or more sentences under Text prompts.")
            return Text(list(question.model.texts))
        return question.first if classifier.task == "classification" else None

    def _explain_one(self, loaded: LoadedModel, prepared: Prepared, question: Question) -> dict[str, Any]:
        """Return the heatmap of one class, and the probabilities of all classes."""
        classifier = loaded.classifier
        method = find_method(question.method or "gradcam")
        layer = question.layer or (classifier.layer_for(method) if method.has_layer else None)
        evidence: Any = "signed" if method.is_signed else "positive"
        options: Any = {"evidence": evidence, "reshape": loaded.reshape}
        explanation = classifier.explain(prepared, layer, method=method, target=question.first, **options).cpu()
        probabilities = explanation.probabilities()[0]
        if not probabilities.isfinite().all():
            raise GradcamError(NOT_FINITE)
        maps = to_map_set(explanation.maps[0].numpy(), explanation).to_data(1)
        shares = [float(f"{probability:.4g}") for probability in probabilities.tolist()]
        return {"quick": {"shares": shares, "map": maps}}

    def _prepare(self, image: int, model: ModelRequest, loaded: LoadedModel, edits: tuple[str, ...]) -> Prepared:
        key = image, model
        if key not in self._prepared:
            entry = self.images.get(image)
            prepared = loaded.classifier.prepare(entry.open())
            self._prepared = dict([*self._prepared.items()][-1:]) | {key: prepared}
        prepared = self._prepared[key]
        return loaded.classifier.prepare(edit_reading(prepared.reading, edits)) if edits else prepared

    def _list_layers(self, model: ModelRequest, classifier: Classifier, prepared: Prepared) -> list[str]:
        if classifier.task != "classification":
            return []
        if model not in self._stages:
            images = classifier.batch([prepared])
            self._stages[model] = find_stages(unwrap(classifier.model), images, classifier.layer)
        return self._stages[model]

    def _list_methods(
        self, model: ModelRequest, loaded: LoadedModel, prepared: Prepared, question: Question | None
    ) -> list[str]:
        if model not in self._methods:
            target = None if question is None else self._find_target(loaded.classifier, question)
            self._methods[model] = list_supported_methods(loaded.classifier, prepared, target, loaded.reshape)
        return self._methods[model]

    def _compare(self, question: Question, first: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
        """Return the page data of the second model, for the same class if possible; None without a second model."""
        if question.other_model is None:
            return None
        loaded = self.models.get(question.other_model)
        prepared = self._prepare(question.image, question.other_model, loaded, question.edits)
        same_class, targets = None, first["targets"]
        if targets["kind"] == "class" and loaded.classifier.task == "classification":
            name, index = (targets[key][first["first"]] for key in ("names", "indices"))
            same_class = _find_same_class(loaded.classifier, name, index)
        method, supported = question.method, self._list_methods(question.other_model, loaded, prepared, question)
        method = None if method in METHODS and method not in supported else method
        other_question = replace(question, model=question.other_model, layer=None, method=method, first=same_class)
        return self._to_data(self._make_page(loaded, prepared, other_question, progress), question)


def _forget_view(question: Question) -> Question:
    """Reset the fields of a question that do not affect the maps, so that questions with equal maps are equal."""
    return replace(question, first=None, quick=False, other_model=None)


def _find_same_class(classifier: Classifier, name: str, index: int) -> int | None:
    labels = classifier.labels
    if labels is not None:
        names = [name_class(i, label) for i, label in enumerate(labels)]
        if names[index : index + 1] == [name]:  # Names may repeat: ImageNet has two classes "crane".
            return index
        return names.index(name) if name in names else None
    return index if index < classifier.classes else None


def _find_layers(classifier: Classifier, question: Question) -> list[str] | None:
    if question.layer is not None:
        return [question.layer]
    if classifier.task != "classification":
        return None
    method = find_method(question.method or "gradcam")
    return [classifier.layer_for(method)] if method.has_layer else None


def _to_model_request(data: Mapping[str, Any], texts: tuple[str, ...]) -> ModelRequest:
    return ModelRequest(_to_name(data.get("model")), _to_name(data.get("weights")), texts)


def _to_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError
    return value


def _to_name(value: Any) -> str | None:
    name = None if value is None else str(value).strip() or None
    if name is not None and "\0" in name:
        raise GradcamError(f"{name!r} contains a NUL character: remove it.")
    return name


def _to_texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in (str(item).strip() for item in value or ()) if text)
