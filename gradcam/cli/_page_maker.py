"""Make interactive pages of images, for `gradcam page` and `gradcam batch --pages`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcam.cam.methods.base import Method
from gradcam.cli._job import TASK_FIELDS
from gradcam.cli._settings import ModelChoice, Settings, to_target

if TYPE_CHECKING:
    from gradcam.models.classifier import Classifier
    from gradcam.models.preprocess import Prepared
    from gradcam.options import Progress
    from gradcam.web.page import Page

TOP = 50  # number of classes with heatmaps, if heatmaps of all classes would cost too much


@dataclass(frozen=True)
class PageMaker:
    """A function that makes the page of an image.

    If `is_whole` is set and --layer is not given, the page shows several layers. If `is_checked` is set, the first
    heatmap is tested.
    """

    settings: Settings
    top: int = TOP
    is_whole: bool = False
    is_checked: bool = False

    def __call__(self, classifier: Classifier, image: Prepared, progress: Progress | None = None) -> Page:
        """Return the page of an image. Raise `GradcamError` if the image cannot be explained."""
        from gradcam.models.page_builder import page

        settings = self.settings
        is_class = classifier.task == "classification"
        target = self._choose_target(classifier) or list(settings.classes) or None
        layers: Any = list(settings.layers) or None
        if layers is None and is_class and not self.is_whole:
            layers = [classifier.layer]
        methods = [method for method in settings.methods if isinstance(method, Method)]
        options: Any = {"reshape": settings.options.get("reshape"), "progress": progress}
        result = page(image, classifier, layers=layers, methods=methods, target=target, top=self.top, **options)
        model = _to_public_choice(settings.model)
        choice, is_captioner = settings.target_choice, classifier.task == "captioning"
        prompts = (*choice.texts, *filter(None, [choice.prompt]))
        prompts = prompts if classifier.task == "detection" or is_captioner else ()
        option = "--prompt" if is_captioner else "--text"
        words = [*model.to_words(), *(word for text in prompts for word in (option, text))]
        words += [word for path in choice.with_images for word in ("--with", path.name)]
        result = replace(result, words=words, code=to_code(replace(model, prompts=prompts), is_class=is_class))
        if choice.say is not None:
            codes = [code and f"{code[:-1]}, say={choice.say!r})" for code in result.targets.code or ()]
            result = replace(result, words=[*words, "--say", choice.say], targets=replace(result.targets, code=codes))
        return self._add_verdict(classifier, image, result) if self.is_checked else result

    def _choose_target(self, classifier: Classifier) -> Any:
        """Return the target that the user chose, or all words of an answer; None for the model's default target."""
        is_default = classifier.task == "classification" or _has_default_target(self.settings)
        is_chosen = self.settings.target is not None or classifier.task == "captioning"
        return to_target(self.settings, classifier) if is_chosen or not is_default else None

    def _add_verdict(self, classifier: Classifier, image: Prepared, result: Page) -> Page:
        from gradcam.evaluation.checks.check import check

        first_map, targets = result.maps[0], result.targets
        target = targets.indices[result.first] if targets.kind == "class" else None
        if classifier.task != "classification":
            target = self._choose_target(classifier)
        layer = None if first_map.layer in ("input", "attention") else first_map.layer
        verdict = check(classifier, image, method=first_map.method, layer=layer, target=target)
        tests = [{name: getattr(test, name) for name in ("question", "outcome", "reason")} for test in verdict.tests]
        place = "" if verdict.layer is None else f" at {verdict.layer}"
        subject = f"Heatmap of {verdict.class_name}: {verdict.method}{place}. "
        subject += "A passed test does not prove that the heatmap is right."
        summary = {"of": subject, "outcome": verdict.outcome, "summary": verdict.summary, "tests": tests}
        return result.with_verdict(summary)


def _has_default_target(settings: Settings) -> bool:
    return settings.target is None and not settings.target_choice.option_names and not settings.classes


def _to_public_choice(choice: ModelChoice) -> ModelChoice:
    """Return the model options without prompts and absolute paths, because the page may be published."""
    files = {name: getattr(choice, name) for name in ("weights", "labels")}
    file_names: Any = {name: Path(file.name) for name, file in files.items() if file is not None and file.is_absolute()}
    return replace(choice, prompts=(), task=None if choice.task == "auto" else choice.task, **file_names)


def to_code(choice: ModelChoice, *, is_class: bool) -> str:
    """Return the line of Python that loads the same model as these command-line options."""
    from gradcam.models.page_contents import format_arguments

    defaults = ModelChoice()
    choice = replace(choice, activation="none") if choice.task == "regression" else choice
    unused = ("model", *(TASK_FIELDS if is_class else ()))
    names = [field.name for field in fields(choice) if field.name not in unused]
    changed = {name: getattr(choice, name) for name in names if getattr(choice, name) != getattr(defaults, name)}
    arguments = format_arguments([] if choice.model is None else [choice.model], changed)
    return f"gradcam.{'load_classifier' if is_class else 'load_model'}({arguments})"
