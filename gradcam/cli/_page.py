"""How a page is made of each picture, from what was typed: by `gradcam page`, and by `gradcam batch --pages`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcam.cam.methods.base import Method
from gradcam.cli._job import OF_TASKS
from gradcam.cli._settings import ModelChoice, Settings, to_target

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier
    from gradcam.models.preprocess import Prepared
    from gradcam.options import Progress
    from gradcam.web.page import Page

TOP = 50  # classes with maps, where those of all cost too much


@dataclass(frozen=True)
class PageMaking:
    """How pages are made of pictures. `is_whole`: at several layers where none is named. `is_checked`: with a verdict on
    the map that is shown first."""

    settings: Settings
    top: int = TOP
    is_whole: bool = False
    is_checked: bool = False

    def __call__(self, classifier: Classifier, picture: Prepared, progress: Progress | None = None) -> Page:
        """The page of a picture. Raises `GradcamError`."""
        from gradcam.models.pages import page

        settings = self.settings
        is_class = classifier.task == "classification"
        target: Any = list(settings.classes) or None
        if settings.target is not None or not is_class:
            target = None if _says_nothing(settings) else to_target(settings, classifier)
        layers: Any = list(settings.layers) or None
        if layers is None and is_class and not self.is_whole:
            layers = [classifier.layer]
        methods = [method for method in settings.methods if isinstance(method, Method)]
        options: Any = {"reshape": settings.options.get("reshape"), "progress": progress}
        made = page(picture, classifier, layers=layers, methods=methods, target=target, top=self.top, **options)
        model = _to_model(settings.model)
        made = replace(made, words=model.to_words(), code=to_code(model, is_class=is_class))
        return self._judge(classifier, picture, made) if self.is_checked else made

    def _judge(self, classifier: Classifier, picture: Prepared, made: Page) -> Page:
        from gradcam.evaluation.checks.check import check

        shown, things = made.maps[0], made.targets
        target = things.indices[made.first] if things.kind == "class" else None
        if classifier.task != "classification" and not _says_nothing(self.settings):
            target = to_target(self.settings, classifier)
        layer = None if shown.layer in ("input", "attention") else shown.layer
        verdict = check(classifier, picture, method=shown.method, layer=layer, target=target)
        tests = [{name: getattr(test, name) for name in ("question", "outcome", "reason")} for test in verdict.tests]
        place = "" if verdict.layer is None else f" at {verdict.layer}"
        of = f"Heatmap of {verdict.class_name}: {verdict.method}{place}. "
        of += "A passed test does not prove that the heatmap is right."
        return made.with_verdict({"of": of, "outcome": verdict.outcome, "summary": verdict.summary, "tests": tests})


def _says_nothing(settings: Settings) -> bool:
    return settings.target is None and not settings.wanted.given and not settings.classes


def _to_model(choice: ModelChoice) -> ModelChoice:
    """The choice without what only the other options said, and without the way to files: a page may be given to others."""
    files = {name: getattr(choice, name) for name in ("weights", "labels")}
    short: Any = {name: Path(file.name) for name, file in files.items() if file is not None and file.is_absolute()}
    return replace(choice, prompts=(), task=None if choice.task == "auto" else choice.task, **short)


def to_code(choice: ModelChoice, *, is_class: bool) -> str:
    """The line of Python that loads a model as the shell does."""
    usual = ModelChoice()
    choice = replace(choice, activation="none") if choice.task == "regression" else choice
    names = [each.name for each in fields(choice) if each.name not in ("model", *OF_TASKS)]
    given = {name: getattr(choice, name) for name in names if getattr(choice, name) != getattr(usual, name)}
    said = [] if choice.model is None else [_quote(choice.model)]
    said += [f"{name}={_quote(str(it)) if name in ('weights', 'labels') else _quote(it)}" for name, it in given.items()]
    return f"gradcam.{'load_classifier' if is_class else 'load_model'}({', '.join(said)})"


def _quote(value: Any) -> str:
    text = repr(value)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text
