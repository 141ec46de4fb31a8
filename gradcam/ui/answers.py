"""From what a page asks to what it shows: the data of a page of one picture, or, under the brush, one map and all scores."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradcam.cam.methods.table import METHODS, find_method
from gradcam.errors import GradcamError, printable
from gradcam.images.edit import MOST_POINTS, to_edit
from gradcam.layers.find import unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.labels import name_class
from gradcam.models.pages import find_stages, page
from gradcam.models.preprocess import Prepared, edit_reading
from gradcam.models.shown import to_set
from gradcam.options import Progress
from gradcam.targets import Text
from gradcam.ui.models import Loaded, Models, Wanted
from gradcam.ui.pictures import Pictures

NAN = "The model's output contains NaN or infinite values: check its weights."


@dataclass(frozen=True)
class Question:
    """What is asked of a picture. `first`: the class that is shown; `quick`: for its map alone, while a brush moves."""

    picture: int
    wanted: Wanted
    layer: str | None = None
    method: str | None = None
    edits: tuple[str, ...] = ()
    first: int | None = None
    quick: bool = False
    other: Wanted | None = None

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Question:
        """From the page's JSON. Raises `GradcamError` for another form."""
        try:
            texts = _to_texts(asked.get("texts"))
            other = asked.get("other")
            found = cls(
                picture=_to_number(asked["picture"]),
                wanted=_to_wanted(asked, texts),
                layer=_to_name(asked.get("layer")),
                method=_to_name(asked.get("method")),
                edits=_to_texts(asked.get("edits")),
                first=None if asked.get("first") is None else _to_number(asked["first"]),
                quick=bool(asked.get("quick")),
                other=None if other is None else _to_wanted(other, texts),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise GradcamError("The page sent an invalid request: reload the page.") from None
        if len(found.edits) > MOST_POINTS:
            raise GradcamError("Too many edits: undo some of them.")
        for each in found.edits:
            to_edit(each)
        return found


class Answers:
    """Answers, by these models of these pictures; of one thread at a time."""

    def __init__(self, models: Models, pictures: Pictures) -> None:
        self.models, self.pictures = models, pictures
        self._read: dict[tuple[int, Wanted], Prepared] = {}  # the last one or two that were read
        self._stages: dict[Wanted, list[str]] = {}

    def answer(self, question: Question, progress: Progress) -> dict[str, Any]:
        """What is asked. Raises `GradcamError`."""
        return self.models.with_room(lambda: self._answer(question, progress))

    def warm_up(self) -> None:
        """Explain nothing once with the usual classifier: the first time takes a second more."""
        loaded = self.models.get(Wanted())
        classifier = loaded.classifier
        if classifier.task == "classification":
            with contextlib.suppress(GradcamError):  # it is told when a picture is there
                page(np.full((64, 64, 3), 128, np.uint8), classifier, layers=[classifier.layer], reshape=loaded.reshape)

    def _answer(self, question: Question, progress: Progress) -> dict[str, Any]:
        loaded = self.models.get(question.wanted)
        prepared = self._prepare(question.picture, question.wanted, loaded, question.edits)
        if question.quick and loaded.classifier.task == "classification":
            return self._explain_one(loaded, prepared, question)
        found: dict[str, Any] = {
            "page": self._make_page(loaded, prepared, question, progress),
            "task": loaded.classifier.task,
            "layers": self._list_layers(question.wanted, loaded.classifier, prepared),
            "methods": list(METHODS),
            "notes": [printable(each) for each in loaded.classifier.notes],
        }
        return found | {"other": self._compare(question, found["page"], progress)}

    def _make_page(self, loaded: Loaded, prepared: Prepared, question: Question, progress: Progress) -> dict[str, Any]:
        classifier, target = loaded.classifier, self._find_target(loaded.classifier, question)
        entry = self.pictures.get(question.picture)
        made = page(
            prepared, classifier, layers=_find_layers(classifier, question), methods=list(filter(None, [question.method])),
            target=target, name=entry.name, progress=progress, reshape=loaded.reshape,
        )  # fmt: skip
        data = replace(made, words=loaded.words, code=loaded.code).to_data()
        if isinstance(entry.source, Path):
            data["image"]["path"] = printable(str(entry.source))
        return data

    def _find_target(self, classifier: Classifier, question: Question) -> Any:
        if classifier.task == "matching":
            if not question.wanted.texts:
                raise GradcamError("This model compares images with sentences: type one or more under Text prompts.")
            return Text(list(question.wanted.texts))
        return question.first if classifier.task == "classification" else None

    def _explain_one(self, loaded: Loaded, prepared: Prepared, question: Question) -> dict[str, Any]:
        """The map of the class that is shown, and all probabilities."""
        classifier = loaded.classifier
        method = find_method(question.method or "gradcam")
        layer = question.layer or (classifier.layer_for(method) if method.has_layer else None)
        evidence: Any = "signed" if method.is_signed else "positive"
        options: Any = {"evidence": evidence, "reshape": loaded.reshape}
        one = classifier.explain(prepared, layer, method=method, target=question.first, **options).cpu()
        shares = one.probabilities()[0]
        if not shares.isfinite().all():
            raise GradcamError(NAN)
        maps = to_set(one.maps[0].numpy(), one).to_data(1)
        return {"quick": {"shares": [float(f"{it:.4g}") for it in shares.tolist()], "map": maps}}

    def _prepare(self, picture: int, wanted: Wanted, loaded: Loaded, edits: tuple[str, ...]) -> Prepared:
        key = picture, wanted
        if key not in self._read:
            entry = self.pictures.get(picture)
            found = loaded.classifier.prepare(entry.open())
            self._read = {**dict(list(self._read.items())[-1:]), key: found}
        found = self._read[key]
        return loaded.classifier.prepare(edit_reading(found.reading, edits)) if edits else found

    def _list_layers(self, wanted: Wanted, classifier: Classifier, prepared: Prepared) -> list[str]:
        if classifier.task != "classification":
            return []
        if wanted not in self._stages:
            images = classifier.batch([prepared])
            self._stages[wanted] = find_stages(unwrap(classifier.model), images, classifier.layer)
        return self._stages[wanted]

    def _compare(self, question: Question, first: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
        """The same of another model: of the same class, where both have it."""
        if question.other is None:
            return None
        loaded = self.models.get(question.other)
        prepared = self._prepare(question.picture, question.other, loaded, question.edits)
        same, things = None, first["targets"]
        if things["kind"] == "class" and loaded.classifier.task == "classification":
            same = _find_same(loaded.classifier, things["names"][first["first"]], things["indices"][first["first"]])
        asked = replace(question, wanted=question.other, layer=None, first=same)
        return self._make_page(loaded, prepared, asked, progress)


def _find_same(classifier: Classifier, name: str, index: int) -> int | None:
    labels = classifier.labels
    if labels is not None:
        names = [name_class(i, label) for i, label in enumerate(labels)]
        if names[index : index + 1] == [name]:  # of several of that name, such as two kinds of cranes, the same one
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


def _to_wanted(asked: Mapping[str, Any], texts: tuple[str, ...]) -> Wanted:
    return Wanted(_to_name(asked.get("model")), _to_name(asked.get("weights")), texts)


def _to_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError
    return value


def _to_name(value: Any) -> str | None:
    found = None if value is None else str(value).strip() or None
    if found is not None and "\0" in found:
        raise GradcamError(f"{found!r} contains a NUL character: remove it.")
    return found


def _to_texts(value: Any) -> tuple[str, ...]:
    return tuple(it for it in (str(each).strip() for each in value or ()) if it)
