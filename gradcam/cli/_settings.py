"""Collect the values of command-line options, and check options that depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.errors import TargetError
from gradcam.options import BOX_THRESHOLD, DEFAULTS, LOOK_OPTIONS, ExplainOptions

if TYPE_CHECKING:
    from gradcam.images.edit import Edit
    from gradcam.models.classifier import Classifier

ALL = "all"  # value of --box and --keypoint
OPTION_NAMES_BY_FIELD = {"boxes": "box", "texts": "text", "words": "word", "keypoints": "keypoint"}
OPTION_NAMES_BY_FIELD |= {"with_images": "with"}
# For each task of a model, these options choose the target.
OPTIONS_BY_TASK = {
    "classification": ("--class", "--top-k", "--score", "--against"),
    "detection": ("--box", "--edge", "--missed", "--class", "--threshold"),
    "segmentation": ("--mask", "--class"),
    "matching": ("--text", "--against", "--like"),
    "captioning": ("--caption", "--word", "--prompt", "--say", "--against", "--with"),
    "pose": ("--keypoint", "--axis", "--box"),
}


@dataclass(frozen=True)
class ModelChoice:
    """The arguments of `load_model`.

    If `task` is None, every model is loaded as a classifier. `prompts` are the text prompts of a text-prompted
    detector.
    """

    model: str | None = None
    weights: Path | None = None
    labels: Path | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: int | tuple[int, ...] | None = None
    crop: float | None = None
    activation: str = "auto"
    reader: str | None = None
    device: str = "auto"
    precision: str = "fp32"
    fit: str = "crop"
    predictions: str = "own"
    task: str | None = None
    threshold: float | None = None
    prompts: tuple[str, ...] = ()

    def to_words(self) -> list[str]:
        """Return the command-line options that select this model."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}
        return [word for name, value in changed.items() for word in (f"--{name}", to_word(value))]


@dataclass(frozen=True)
class TargetChoice:
    """The values of the options that choose a target other than a class, such as boxes, a mask or sentences."""

    boxes: tuple[int | str, ...] = ()
    edge: str | None = None
    missed: tuple[tuple[float, ...], ...] = ()
    mask: tuple[float, ...] | Path | None = None
    texts: tuple[str, ...] = ()
    like: Path | None = None
    caption: bool = False
    words: tuple[int, ...] = ()
    prompt: str | None = None
    say: str | None = None
    with_images: tuple[Path, ...] = ()
    keypoints: tuple[int | str, ...] = ()
    axis: str | None = None

    @property
    def _given_values(self) -> dict[str, Any]:
        """Return the values of the given options, by option name."""
        values = {OPTION_NAMES_BY_FIELD.get(name, name): value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value not in (None, False, ())}

    @property
    def option_names(self) -> list[str]:
        """List the options that were given, such as "--box"."""
        return [f"--{name}" for name in self._given_values]

    @property
    def task(self) -> str | None:
        """Return the task that the options imply, or None. The task matters for models that support several tasks."""
        return "matching" if self.like is not None else "pose" if self.keypoints or self.axis else None

    def describe(self) -> dict[str, Any]:
        """Return the given options for run.json. Files are described by their names and SHA-256 hashes."""
        from gradcam.images.files import hash_file

        description = {name: value for name, value in self._given_values.items() if name != "caption"}
        if isinstance(self.mask, tuple):
            description["mask"] = to_word(self.mask)
        for name, value in description.items():
            if isinstance(value, Path):
                description[name] = {"file": value.name, "sha256": hash_file(value)}
            elif name == "with":
                description[name] = [{"file": path.name, "sha256": hash_file(path)} for path in value]
        return description


@dataclass(frozen=True)
class Settings:
    """The values of the options for the model, target, methods, drawing and output."""

    model: ModelChoice
    options: ExplainOptions
    layers: tuple[str, ...] = ()
    methods: tuple[Method | AttributionMethod, ...] = ()
    classes: tuple[str, ...] = ()
    top_k: int = 1
    score: str = "logit"
    against: tuple[str, ...] = ()
    target: Callable[[Any], Any] | None = None
    output: str = "."
    alpha: float | None = None
    colormap: str | None = None
    base: str | None = None
    blend: str | None = None
    saved: tuple[str, ...] = ("overlay",)
    box_threshold: float = BOX_THRESHOLD
    box_method: str = "largest"
    target_choice: TargetChoice = TargetChoice()
    edits: tuple[Edit, ...] = ()
    figure: Path | None = None

    @property
    def appearance(self) -> dict[str, Any]:
        """Return the options of overlays, masks and boxes, by name."""
        return self.look | {"box_threshold": self.box_threshold, "box_method": self.box_method}

    @property
    def look(self) -> dict[str, Any]:
        """Return the values of the drawing options that the user gave, by name."""
        return {name: getattr(self, name) for name in LOOK_OPTIONS if getattr(self, name) is not None}


@dataclass(frozen=True)
class OutputMode:
    """The form of printed results: text, JSON, or nothing."""

    as_json: bool
    quiet: bool


def to_word(value: object) -> str:
    """Format an option's value for a command line: integers as 320x240, other numbers as 0.5,0.5,0.5."""
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if not isinstance(value, tuple):
        return str(value)
    return ("x" if all(isinstance(number, int) for number in value) else ",").join(map(to_word, value))


def to_model_choice(params: dict[str, Any]) -> ModelChoice:
    """Select the model options from all options of a command."""
    return ModelChoice(**{field.name: params[field.name] for field in fields(ModelChoice) if field.name in params})


def to_settings(params: dict[str, Any]) -> Settings:
    """Return the settings. Raise `click.UsageError` if two options contradict each other."""
    names = [field.name for field in fields(TargetChoice) if field.name in params]
    target_choice = TargetChoice(**{name: params[name] for name in names})
    model = replace(to_model_choice(params), prompts=target_choice.texts)
    if model.task == "auto" and target_choice.task is not None:
        model = replace(model, task=target_choice.task)
    options: Any = {name: params[name] for name in DEFAULTS if name in params}
    used_names = {*vars(model), *options, *vars(target_choice)}
    remaining = {name: value for name, value in params.items() if name not in used_names}
    settings = Settings(model=model, options=options, target_choice=target_choice, **remaining)
    if settings.target is not None and (settings.classes or settings.top_k > 1 or settings.score != "logit"):
        raise click.UsageError("--target replaces --class, --top-k and --score: remove --target, or these options.")
    if settings.classes and settings.top_k > 1:
        raise click.UsageError("--class and --top-k both choose the classes to explain: give only one of them.")
    _check_targets(settings)
    words = {"--text", "--prompt", "--caption", "--word", "--say"} & {*target_choice.option_names}
    if settings.against and not words and settings.score != "contrast":
        raise click.UsageError("--against needs --score contrast, --text or --prompt: add one, or remove --against.")
    _check_for_attributions(settings)
    if model.fit == "crop" and model.predictions == "seen":
        raise click.UsageError("The option '--predictions seen' needs --fit whole or --fit tiles: add one of them.")
    return settings


def to_single_target_settings(params: dict[str, Any], class_: str | None) -> Settings:
    """Return the settings of a command that evaluates heatmaps of one target. Drawing options keep their defaults."""
    accepted_names = {field.name for kind in (ModelChoice, TargetChoice) for field in fields(kind)}
    accepted_names |= {"score", "against", "reshape"}
    selected = {name: value for name, value in params.items() if name in accepted_names}
    return to_settings({**selected, "classes": () if class_ is None else (class_,)})


# Only options of the same group can be combined. --box can be combined with --text, because the texts are the prompts
# of a text-prompted detector.
COMPATIBLE_OPTIONS = (
    ("--box", "--edge", "--text"), ("--missed", "--text"), ("--mask",), ("--like",),
    ("--caption", "--word", "--text", "--prompt", "--say", "--with"),
    ("--keypoint", "--axis", "--box"), ("--target",), ("--top-k",),
)  # fmt: skip


def _check_targets(settings: Settings) -> None:
    """Raise `click.UsageError` if two options choose different targets."""
    names = settings.target_choice.option_names
    if names:
        names += ["--target"] if settings.target is not None else []
        names += ["--top-k"] if settings.top_k > 1 else []
    if names and not any(set(names) <= set(group) for group in COMPATIBLE_OPTIONS):
        first = names[0]
        second = next(name for name in names if not any({first, name} <= set(group) for group in COMPATIBLE_OPTIONS))
        raise click.UsageError(f"{first} and {second} each choose what is explained: give only one of them.")


def to_target(settings: Settings, model: Classifier) -> Any:
    """Return the target for a model that is not a classifier. Raise `click.UsageError` if an option is missing."""
    from gradcam import targets

    if settings.target is not None:
        return settings.target
    target_choice = settings.target_choice
    classes = [model.find_class(name) for name in dict.fromkeys(settings.classes)]
    makers: dict[str, Callable[[], Any]] = {
        "detection": lambda: _to_boxes(target_choice, classes),
        "segmentation": lambda: targets.Mask(classes or None, target_choice.mask),
        "matching": lambda: _to_match(settings, model.name),
        "captioning": lambda: _to_words(settings, model),
        "pose": lambda: _to_keypoints(target_choice),
    }
    return makers[model.task]()


def to_single_target(settings: Settings, model: Classifier) -> Any:
    """Return the target of a command that evaluates heatmaps.

    The target is a class index, None for the top class, or a target of another task. Raise `click.UsageError` if
    an option does not fit the model.
    """
    check_task(settings, model)
    if model.task != "classification":
        return to_target(settings, model)
    if settings.against:
        raise click.UsageError("In this command, --against works only with --text or --prompt: remove --against.")
    return model.find_class(settings.classes[0]) if settings.classes else None


def _to_boxes(target_choice: TargetChoice, classes: Sequence[int]) -> Any:
    from gradcam import targets

    if len(classes) > 1:
        raise click.UsageError("Boxes are explained for one class at a time: give only one --class.")
    class_ = classes[0] if classes else None
    if target_choice.missed:
        return targets.MissedBox(list(target_choice.missed), class_)
    numbers = ALL if ALL in target_choice.boxes else list(target_choice.boxes) or [0]
    return targets.Box(numbers, target_choice.edge, class_=class_)


def _to_keypoints(target_choice: TargetChoice) -> Any:
    from gradcam import targets

    if len(target_choice.boxes) > 1 or ALL in target_choice.boxes:
        raise click.UsageError("Keypoints are explained for one box at a time: give a single number to --box.")
    numbers = ALL if ALL in target_choice.keypoints else list(target_choice.keypoints) or [0]
    return targets.Keypoint(numbers, target_choice.axis, box=int(target_choice.boxes[0]) if target_choice.boxes else 0)


def _to_words(settings: Settings, model: Any) -> Any:
    """Return the target of words of the answer; of tokens if the model has no tokenizer."""
    from gradcam import targets

    choice, against = settings.target_choice, settings.against
    prompts = [*choice.texts, *filter(None, [choice.prompt])]
    for option, values in {"--prompt": prompts, "--against": against}.items():
        if len(values) > 1:
            raise click.UsageError(f"A captioner takes one {option}, but {len(values)} were given: remove all but one.")
    fields: Any = {"prompt": next(iter(prompts), None), "against": next(iter(against), None), "say": choice.say}
    fields["control"] = "blank"
    selection: Any = {"word": list(choice.words) or (None if against and not choice.caption else all)}
    try:
        model.family.decode_tokens([0])
    except TargetError:  # The model has no tokenizer.
        selection = {"position": list(choice.words) or None}
    target = targets.Token(**selection, **fields)
    model.for_target(target)  # Raises an error if the model takes no prompt.
    return target


def _to_match(settings: Settings, name: str) -> Any:
    from gradcam import targets

    if settings.target_choice.like is not None:
        return targets.Like(settings.target_choice.like)
    if not settings.target_choice.texts:
        raise click.UsageError(
            f"{name} compares an image with a sentence or another image: add --text SENTENCE or --like FILE."
        )
    return targets.Text(list(settings.target_choice.texts), against=list(settings.against))


def check_task(settings: Settings, model: Classifier) -> None:
    """Raise `click.UsageError` if an option is for models of another task."""
    defaults = {field.name: field.default for field in fields(ModelChoice)}
    names = settings.target_choice.option_names
    model_options = ("threshold", "fit", "activation")
    names += [f"--{name}" for name in model_options if getattr(settings.model, name) != defaults[name]]
    values = {"--class": settings.classes, "--top-k": settings.top_k > 1}
    values |= {"--score": settings.score != "logit", "--against": settings.against}
    names += [name for name, value in values.items() if value]
    takes_text = model.task == "captioning" or getattr(model, "inputs", None)
    suitable = [*OPTIONS_BY_TASK[model.task], *(["--text"] if takes_text else [])]
    shared = ["--fit", "--activation"] if model.task == "classification" else []
    if unsuitable := [name for name in names if name not in [*suitable, *shared]]:
        tasks = [task for task, names in OPTIONS_BY_TASK.items() if unsuitable[0] in names] or ["classification"]
        tasks += ["text-prompted detectors"] if unsuitable[0] == "--text" else []
        accepted = {name for option in click.get_current_context().command.params for name in option.opts}
        usable = [name for name in (*suitable, "--target") if name in accepted]
        listed = " and ".join(filter(None, [", ".join(usable[:-1]), usable[-1]]))
        raise click.UsageError(
            f"{unsuitable[0]} is for {' and '.join(tasks)}, but {model.name} is for {model.task}. You can use {listed}."
        )


def _check_for_attributions(settings: Settings) -> None:
    attributions = [method.name for method in settings.methods if isinstance(method, AttributionMethod)]
    if not attributions:
        return
    changed = {name for name, value in settings.options.items() if value != DEFAULTS[name]}  # type: ignore[literal-required]
    unsuitable = ["--fit tiles"] if settings.model.fit.startswith("tiles") else []
    unsuitable += [f"--{name}" for name in settings.options if name in changed and name != "reshape"]
    if not any(isinstance(method, Method) or method.has_layer for method in settings.methods):
        unsuitable += ["--layer"] if settings.layers else []
        unsuitable += ["--reshape"] if "reshape" in changed else []
    if unsuitable:
        raise click.UsageError(f"{unsuitable[0]} does not work with --method {attributions[0]}: remove one of them.")
