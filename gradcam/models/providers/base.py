"""What providers share: how a model and what is known of it are handed over, and how files are fetched and recognised."""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from gradcam.errors import ModelError, to_pip_command
from gradcam.hooks.nested import tensors
from gradcam.models.checkpoints.fit import count_classes, load_weights
from gradcam.models.checkpoints.read import Checkpoint, hash_weights
from gradcam.models.preprocess import Preprocess, Preprocessing

USUAL_SIZE = (224, 224)
PATIENCE = 5.0  # seconds
WITHOUT = "The included model 'efficientnet_lite0' needs no download."
HASH = re.compile(r"-([0-9a-f]{8,})$")  # the first digits of the file's SHA-256, at the end of the name of each
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # what every module has: its tensors, submodules and hooks

Build = Callable[[int], nn.Module]  # from a number of classes


@dataclass(frozen=True)
class Blueprint:
    """A model to be built: `build` makes it with random weights, for pictures of `size` with so many channels. `layer`:
    what is explained where nothing else is said, None for the one that `gradcam.explain` takes; `layer_for_positive`:
    the same for methods that assume activations that are not negative."""

    build: Callable[[], Any]
    size: tuple[int, int] = USUAL_SIZE
    channels: int = 3
    layer: str | None = None
    layer_for_positive: str | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """A model with what its provider knows of it; what is None is found by looking at the model. `is_assumed`: whether
    the preprocessing is a guess; `is_of_part`: whether it is that of a part of the model, such as a backbone.
    `activation`: how logits become probabilities, if that is certain. `notes`: what a person should know. `layer`,
    `layer_for_positive`: as in a `Blueprint`. `task`: what the model does, if that is not to classify and its family does
    not tell. `inputs`: what the model takes beside images, a row for each."""

    model: nn.Module
    preprocess: Preprocess
    is_assumed: bool = False
    is_of_part: bool = False
    labels: Sequence[str] | None = None
    classes: int | None = None
    layer: str | None = None
    layer_for_positive: str | None = None
    activation: str | None = None
    notes: Sequence[str] = ()
    task: str | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


_building = threading.local()  # `is_empty`: whether this thread builds a model without values


def _set_aside(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if not getattr(_building, "is_empty", False) or parameter.is_meta or type(parameter) is not nn.Parameter:
        return None  # one that is shared stays shared
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _Undrawn(TorchFunctionMode):
    """To draw from a normal distribution for what has no values does nothing, for which PyTorch loads its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        is_idle = isinstance(tensor, Tensor) and tensor.is_meta and getattr(func, "__name__", "").endswith("normal_")
        return tensor if is_idle else func(*args, **kwargs)


@functools.cache
def _watch_parameters() -> None:
    """For as long as the process lives: to take a hook away would be in the way of threads that build models meanwhile."""
    register_module_parameter_registration_hook(cast("Callable[..., None]", _set_aside))  # what its type leaves out


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Parameters that modules get in this thread have a shape and no values: nothing is drawn at random for them. Numbers
    that a model computes while it is built, such as widths, are real: `torch.device("meta")` has none."""
    _watch_parameters()
    before, _building.is_empty = getattr(_building, "is_empty", False), True
    try:
        with _Undrawn():
            yield
    finally:
        _building.is_empty = before


def fill(checkpoint: Checkpoint, build: Callable[[], nn.Module]) -> tuple[nn.Module, Sequence[str]]:
    """Return the model with the checkpoint's weights, and notes.

    The model is built without values, because sampling random ones takes longer than reading a file. It is built with
    values if it reads them while it is built, or needs some that are not in the checkpoint.
    """
    with contextlib.suppress(
        Exception
    ):  # A model that reads its values fails here. Any other error is raised again below.
        with empty_parameters():
            model = build()
        parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        if len(set(map(id, parameters))) == len(parameters):  # Loading would separate shared parameters.
            notes = load_weights(model, checkpoint)
            if not _lacks_values(model):
                return model, notes
    model = build()
    return model, load_weights(model, checkpoint)


def _lacks_values(model: nn.Module) -> bool:
    """Return True if a parameter, a buffer or an attribute of a module holds a tensor without values."""
    attributes = [
        value for module in model.modules() for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES
    ]
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *tensors(attributes)))


def build_for(checkpoint: Checkpoint, build: Build, classes: int) -> tuple[nn.Module, int | None, Sequence[str]]:
    """The model with the checkpoint's weights, of as many classes as these have; how many, if that is known; and notes."""

    def build_fitting() -> nn.Module:
        model = build(classes)
        count = count_classes(checkpoint, model)
        return model if count in (None, classes) else build(count)

    model, notes = fill(checkpoint, build_fitting)
    return model, count_classes(checkpoint, model), notes


def import_extra(package: str, extra: str) -> ModuleType:
    """Import a package of an extra. Raises `ModelError` with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = "is not installed" if is_missing else f"cannot be imported ({' '.join(str(error).split())})"
        raise ModelError(f"{package} {what}: {to_pip_command(extra)}") from error


def hub_address() -> str:
    """Where Hugging Face's files are fetched from, as its own library finds that."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def reason_unreachable(url: str) -> str | None:
    """Why there is no answer from where `url` points, None if there is one: asked before a library tries over and over."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in (404, 407, 410) else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def fetch(url: str, path: Path, hash_prefix: str | None) -> None:
    """Download to `path`, all of it or nothing. Raises `ModelError` with what to do where that fails."""
    reason = reason_unreachable(url)
    if reason is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix, progress=sys.stderr.isatty())
            return
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
    raise ModelError(
        f"The weights cannot be downloaded ({reason}). Download {url} on another computer. Save the file as {path}, or "
        f"give it with --weights FILE (weights= in Python). {WITHOUT}"
    )


@dataclass(frozen=True)
class Recognised:
    """The library's own `name` of a file, and whether the content says so, or the file's name alone."""

    name: str
    is_certain: bool


def recognise(path: Path, names: Iterable[str]) -> Recognised | None:
    """Which of the library's files, such as mobilenet_v2-b0353104.pth, this is: by its content, or else by its name."""
    stems = {name.rpartition(".")[0]: name for name in names}
    hashes = {found.group(1): name for stem, name in stems.items() if (found := HASH.search(stem))}
    digest = hash_weights(path) if hashes and path.is_file() else ""
    certain = [Recognised(name, True) for prefix, name in hashes.items() if digest.startswith(prefix)]
    # Saved in another form, or tuned further: mobilenet_v2-b0353104.safetensors.
    alike = [Recognised(name, False) for stem, name in stems.items() if path.name.startswith(stem)]
    return next(iter([*certain, *alike]), None)


def describe_preprocessing(
    path: Path, found: Recognised | None, library: str, name: str, preprocess: Preprocessing
) -> str:
    """Return a sentence on the preprocessing for a checkpoint: that of the library's weights called `name`."""
    both = (each if isinstance(each, tuple) else (each, each) for each in (preprocess.resize, preprocess.size))
    resize, size = (f"{height}" if height == width else f"{height} x {width}" for height, width in both)
    steps = f"resize {resize}, centre crop {size}"
    if found is None:
        start = f"{path.name} is not an official {library} file: using the preprocessing of {name} ({steps})"
        return f"{start}. Override with --size, --crop, --mean, --std."
    how = "content" if found.is_certain else "name"
    return f"{path.name} was recognised as {name} by the file's {how}: using the preprocessing of {name} ({steps})."
