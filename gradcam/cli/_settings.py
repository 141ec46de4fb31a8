"""What was chosen on the command line, and what options mean together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.images.files import READ_SUFFIXES, WRITE_SUFFIXES, to_plain
from gradcam.options import DEFAULTS, ExplainOptions

if TYPE_CHECKING:
    from gradcam.images.edit import Edit
    from gradcam.models.classifier import Classifier

ALL = "all"  # of a picture's boxes
SINGULARS = {"boxes": "box", "texts": "text", "words": "word", "keypoints": "keypoint"}  # what options are called
# Which options say what is explained, by the task of the model.
TAKES = {
    "classification": ("--class", "--top-k", "--score", "--against"),
    "detection": ("--box", "--edge", "--missed", "--class", "--threshold"),
    "segmentation": ("--mask", "--class"),
    "matching": ("--text", "--against", "--like"),
    "captioning": ("--caption", "--word"),
    "pose": ("--keypoint", "--axis", "--box"),
}


@dataclass(frozen=True)
class ModelChoice:
    """Which model, as `load_model` has it; the defaults are what nothing was said of. `task`: None for a classifier,
    whatever the model is. `prompts`: what a detector that is told by words looks for."""

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
        """The options that say the same, for a line to type."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        return [
            word for name, value in said.items() if value != defaults[name] for word in (f"--{name}", to_word(value))
        ]

    @property
    def ending(self) -> str:
        """What ends a picture's name: the model, its weights and the fit, where they are not the usual."""
        from gradcam.models.providers import DEFAULT

        named = [] if self.model in (None, DEFAULT) else [str(self.model).rpartition("/")[2]]
        named += [] if self.weights is None else [self.weights.stem]
        named += [] if self.fit == "crop" else [self.fit.replace(":", "-")]
        return "".join(f"-{to_plain(name)}" for name in named) + ".png"


@dataclass(frozen=True)
class TargetChoice:
    """What is explained in place of a class, as typed: boxes by their numbers, or all of them; places where something was
    missed; pixels; sentences; another picture; words of a caption; keypoints."""

    boxes: tuple[int | str, ...] = ()
    edge: str | None = None
    missed: tuple[tuple[float, ...], ...] = ()
    mask: tuple[float, ...] | Path | None = None
    texts: tuple[str, ...] = ()
    like: Path | None = None
    caption: bool = False
    words: tuple[int, ...] = ()
    keypoints: tuple[int | str, ...] = ()
    axis: str | None = None

    @property
    def _typed(self) -> dict[str, Any]:
        """What was typed, by the names of the options."""
        said = {SINGULARS.get(name, name): value for name, value in vars(self).items()}
        return {name: value for name, value in said.items() if value not in (None, False, ())}

    @property
    def given(self) -> list[str]:
        """The options that were typed."""
        return [f"--{name}" for name in self._typed]

    @property
    def task(self) -> str | None:
        """The task of models that have other uses as well, where an option says which is meant."""
        return "matching" if self.like is not None else "pose" if self.keypoints or self.axis else None

    @property
    def files(self) -> list[Path]:
        """Files that are read beside the pictures, and never written over."""
        return [path for path in (self.like, self.mask) if isinstance(path, Path)]

    def describe(self) -> dict[str, Any]:
        """What was asked, for run.json: a key for each option, files by their names and their SHA-256."""
        from gradcam.images.files import hash_file

        said = {name: value for name, value in self._typed.items() if name != "caption"}
        if isinstance(self.mask, tuple):
            said["mask"] = to_word(self.mask)
        for name, value in said.items():
            if isinstance(value, Path):
                said[name] = {"file": value.name, "sha256": hash_file(value)}
        return said


@dataclass(frozen=True)
class Settings:
    """What was chosen, as typed; methods as they are called, and how they explain. `wanted`: what in place of a class."""

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
    alpha: float = 0.5
    colormap: str = "turbo"
    saved: tuple[str, ...] = ("overlay",)
    wanted: TargetChoice = TargetChoice()
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class OutputPlace:
    """A folder for results, and, if there is to be one only, its file."""

    folder: Path
    file: Path | None = None


@dataclass(frozen=True)
class Output:
    """How results are told: as JSON, or not at all, or for people."""

    as_json: bool
    quiet: bool


def to_word(value: object) -> str:
    """An option's value as it is typed: sides have an x between them, other numbers commas."""
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if not isinstance(value, tuple):
        return str(value)
    return ("x" if all(isinstance(each, int) for each in value) else ",").join(map(to_word, value))


def to_model_choice(chosen: dict[str, Any]) -> ModelChoice:
    """What was chosen of the model, among all that was."""
    return ModelChoice(**{field.name: chosen[field.name] for field in fields(ModelChoice) if field.name in chosen})


def to_settings(chosen: dict[str, Any]) -> Settings:
    """The settings. Raises `click.UsageError` where two options contradict each other."""
    wanted = TargetChoice(**{field.name: chosen[field.name] for field in fields(TargetChoice) if field.name in chosen})
    model = replace(to_model_choice(chosen), prompts=wanted.texts)
    if model.task == "auto" and wanted.task is not None:
        model = replace(model, task=wanted.task)
    options: Any = {name: chosen[name] for name in DEFAULTS if name in chosen}
    known = {*vars(model), *options, *vars(wanted)}
    others = {name: value for name, value in chosen.items() if name not in known}
    found = Settings(model=model, options=options, wanted=wanted, **others)
    if found.target is not None and (found.classes or found.top_k > 1 or found.score != "logit"):
        raise click.UsageError("--target replaces --class, --top-k and --score: give only one of them.")
    if found.classes and found.top_k > 1:
        raise click.UsageError("--class and --top-k both choose the classes to explain: give only one of them.")
    _check_things(found)
    if found.against and not wanted.texts and found.score != "contrast":
        raise click.UsageError("--against needs --score contrast: add --score contrast, or remove --against.")
    _check_for_attributions(found)
    if model.fit == "crop" and model.predictions == "seen":
        raise click.UsageError("--predictions seen needs --fit whole or --fit tiles: add one of them.")
    return found


def to_judged(chosen: dict[str, Any], class_: str | None) -> Settings:
    """The settings of a command that judges maps, each of one class or thing; they say nothing of how maps are drawn."""
    known = {field.name for kind in (ModelChoice, TargetChoice) for field in fields(kind)} | {
        "score",
        "against",
        "reshape",
    }
    kept = {name: value for name, value in chosen.items() if name in known}
    return to_settings({**kept, "classes": () if class_ is None else (class_,)})


# Options that can stand together; --text stands with those of boxes where a detector is told by words what to look for.
TOGETHER = (
    ("--box", "--edge", "--text"), ("--missed", "--text"), ("--mask",), ("--like",), ("--caption", "--word", "--text"),
    ("--keypoint", "--axis", "--box"), ("--target",), ("--top-k",),
)  # fmt: skip


def _check_things(found: Settings) -> None:
    """Raises `click.UsageError` where two options each say what is explained."""
    given = found.wanted.given
    if given:
        given += ["--target"] if found.target is not None else []
        given += ["--top-k"] if found.top_k > 1 else []
    if given and not any(set(given) <= set(group) for group in TOGETHER):
        first = given[0]
        other = next(it for it in given if not any({first, it} <= set(group) for group in TOGETHER))
        raise click.UsageError(f"{first} and {other} each choose what is explained: give only one of them.")


def to_target(settings: Settings, model: Classifier) -> Any:
    """What is explained by a model that does more than classify. Raises `click.UsageError` where nothing says what."""
    from gradcam import targets

    if settings.target is not None:
        return settings.target
    wanted, classes = settings.wanted, [model.find_class(name) for name in dict.fromkeys(settings.classes)]
    makers: dict[str, Callable[[], Any]] = {
        "detection": lambda: _to_boxes(wanted, classes),
        "segmentation": lambda: targets.Mask(classes or None, wanted.mask),
        "matching": lambda: _to_match(settings, model.name),
        "captioning": lambda: targets.Token(None, list(wanted.words) or None),
        "pose": lambda: _to_keypoints(wanted),
    }
    return makers[model.task]()


def to_judged_target(settings: Settings, model: Classifier) -> Any:
    """The class, by its index, or whatever else is judged; None for the most probable. Raises `click.UsageError` as
    `check_task` and `to_target` do."""
    check_task(settings, model)
    if model.task != "classification":
        return to_target(settings, model)
    if settings.against:
        raise click.UsageError("In this command, --against only works with --text: remove --against.")
    return model.find_class(settings.classes[0]) if settings.classes else None


def _to_boxes(wanted: TargetChoice, classes: Sequence[int]) -> Any:
    from gradcam import targets

    if len(classes) > 1:
        raise click.UsageError("Boxes are explained for one class at a time: give only one --class.")
    class_ = classes[0] if classes else None
    if wanted.missed:
        return targets.MissedBox(list(wanted.missed), class_)
    return targets.Box(ALL if ALL in wanted.boxes else list(wanted.boxes) or [0], wanted.edge, class_=class_)


def _to_keypoints(wanted: TargetChoice) -> Any:
    from gradcam import targets

    if len(wanted.boxes) > 1 or ALL in wanted.boxes:
        raise click.UsageError("Keypoints are explained for one box at a time: give a single number to --box.")
    numbers = ALL if ALL in wanted.keypoints else list(wanted.keypoints) or [0]
    return targets.Keypoint(numbers, wanted.axis, box=int(wanted.boxes[0]) if wanted.boxes else 0)


def _to_match(settings: Settings, name: str) -> Any:
    from gradcam import targets

    if settings.wanted.like is not None:
        return targets.Like(settings.wanted.like)
    if not settings.wanted.texts:
        raise click.UsageError(
            f"{name} compares an image with a sentence or another image: add --text SENTENCE or --like FILE."
        )
    return targets.Text(list(settings.wanted.texts), against=list(settings.against))


def check_task(settings: Settings, model: Classifier) -> None:
    """Raises `click.UsageError` for options that say something of models of another task."""
    usual = {field.name: field.default for field in fields(ModelChoice)}
    given = settings.wanted.given
    given += [f"--{it}" for it in ("threshold", "fit", "activation") if getattr(settings.model, it) != usual[it]]
    given += ["--class"] if settings.classes else []
    given += ["--top-k"] if settings.top_k > 1 else []
    given += ["--score"] if settings.score != "logit" else []
    given += ["--against"] if settings.against else []
    known = [*TAKES[model.task], *(["--text"] if getattr(model, "inputs", None) else [])]
    more = ["--fit", "--activation"] if model.task == "classification" else []
    if unfit := [name for name in given if name not in [*known, *more]]:
        tasks = [task for task, names in TAKES.items() if unfit[0] in names] or ["classification"]
        tasks += ["text-prompted detectors"] if unfit[0] == "--text" else []
        taken = {name for option in click.get_current_context().command.params for name in option.opts}
        takes = [name for name in (*known, "--target") if name in taken]
        listed = " and ".join(filter(None, [", ".join(takes[:-1]), takes[-1]]))
        raise click.UsageError(
            f"{unfit[0]} is for {' and '.join(tasks)}, but {model.name} is for {model.task}. You can use {listed}."
        )


def _check_for_attributions(found: Settings) -> None:
    attributions = [method.name for method in found.methods if isinstance(method, AttributionMethod)]
    if not attributions:
        return
    given = {name for name, value in found.options.items() if value != DEFAULTS[name]}  # type: ignore[literal-required]  # they are
    unheeded = ["--fit tiles"] if found.model.fit.startswith("tiles") else []
    unheeded += [f"--{name}" for name in found.options if name in given and name != "reshape"]
    if not any(isinstance(method, Method) or method.has_layer for method in found.methods):
        unheeded += ["--layer"] if found.layers else []
        unheeded += ["--reshape"] if "reshape" in given else []
    if unheeded:
        raise click.UsageError(f"{unheeded[0]} does not work with --method {attributions[0]}: remove one of them.")


def find_destination(
    output: str, images: Sequence[Path], results: int, suffixes: frozenset[str] = WRITE_SUFFIXES
) -> OutputPlace:
    """Where so many results go, one file of them with one of these suffixes. Raises `click.UsageError` for one file for
    several, for one of another kind, and for one of the pictures."""
    path = Path(output)
    is_folder = output.endswith(("/", os.sep)) or os.path.isdir(path)
    if path.suffix.lower() not in READ_SUFFIXES | suffixes or is_folder:
        return OutputPlace(path)
    if path.suffix.lower() not in suffixes:
        what = "images" if suffixes is WRITE_SUFFIXES else "maps"
        raise click.UsageError(f"{path}: {what} can only be written as {', '.join(sorted(suffixes))}.")
    if results > 1:
        raise click.UsageError(f"{path} is one file, but there are several results: give a folder to --output.")
    if any(is_same(path, image) for image in images):
        raise click.UsageError(f"{path} is the input image, which is never overwritten: choose another name.")
    return OutputPlace(path.parent, path)


def is_same(one: Path, other: Path) -> bool:
    """Whether both are one file, by whatever names."""
    with contextlib.suppress(OSError):  # of one that is not there, or where nobody may look
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)
