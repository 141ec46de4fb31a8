"""What was chosen on the command line, and what options mean together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from gradcam.attributions.table import AttributionMethod
from gradcam.cam.methods.base import Method
from gradcam.images.files import READ_SUFFIXES, WRITE_SUFFIXES, to_plain
from gradcam.options import DEFAULTS, ExplainOptions


@dataclass(frozen=True)
class ModelChoice:
    """Which model, as `load_classifier` has it; the defaults are what nothing was said of."""

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
class Settings:
    """What was chosen, as typed; methods as they are called, and how they explain."""

    model: ModelChoice
    options: ExplainOptions
    layers: tuple[str, ...]
    methods: tuple[Method | AttributionMethod, ...]
    classes: tuple[str, ...]
    top_k: int
    score: str
    against: tuple[str, ...]
    target: Callable[[Any], Any] | None
    output: str
    alpha: float
    colormap: str
    saved: tuple[str, ...] = ("overlay",)


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
    model = to_model_choice(chosen)
    options: Any = {name: chosen[name] for name in DEFAULTS if name in chosen}
    others = {name: value for name, value in chosen.items() if not hasattr(model, name) and name not in options}
    found = Settings(model=model, options=options, **others)
    if found.target is not None and (found.classes or found.top_k > 1 or found.score != "logit"):
        raise click.UsageError(
            "--target says what is explained, and so do --class, --top-k and --score: give one of them."
        )
    if found.classes and found.top_k > 1:
        raise click.UsageError("--class and --top-k both say which classes to explain: give one of them.")
    if found.against and found.score != "contrast":
        raise click.UsageError("--against names the classes to contrast with: give --score contrast as well.")
    _check_for_attributions(found)
    if model.fit == "crop" and model.predictions == "seen":
        raise click.UsageError("--predictions seen is of what --fit whole or tiles shows: give one of these as well.")
    return found


def _check_for_attributions(found: Settings) -> None:
    attributions = [method.name for method in found.methods if isinstance(method, AttributionMethod)]
    if not attributions:
        return
    # The names are the options' own, which a type checker does not see.
    given = {name for name, value in found.options.items() if value != DEFAULTS[name]}  # type: ignore[literal-required]
    unheeded = ["--fit tiles"] if found.model.fit.startswith("tiles") else []
    unheeded += [f"--{name}" for name in found.options if name in given and name != "reshape"]
    if not any(isinstance(method, Method) or method.has_layer for method in found.methods):
        unheeded += ["--layer"] if found.layers else []
        unheeded += ["--reshape"] if "reshape" in given else []
    if unheeded:
        raise click.UsageError(
            f"{unheeded[0]} is for maps at layers, which {attributions[0]} does not make: leave it out."
        )


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
        what = "pictures" if suffixes is WRITE_SUFFIXES else "maps"
        raise click.UsageError(f"{path}: {what} are written as {', '.join(sorted(suffixes))}.")
    if results > 1:
        raise click.UsageError(f"{path} is one file, and there are several results: give a folder to --output.")
    if any(is_same(path, image) for image in images):
        raise click.UsageError(f"{path} is the picture itself, which is never overwritten: choose another name.")
    return OutputPlace(path.parent, path)


def is_same(one: Path, other: Path) -> bool:
    """Whether both are one file, by whatever names."""
    with contextlib.suppress(OSError):  # of one that is not there, or where nobody may look
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)
