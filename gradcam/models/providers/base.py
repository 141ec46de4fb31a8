"""Define parts and blueprints of models; download official weights, and recognise files with these weights."""

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
from gradcam.hooks.containers import list_tensors
from gradcam.models.checkpoints.fit import count_classes, load_weights
from gradcam.models.checkpoints.read import Checkpoint, hash_weights
from gradcam.models.preprocess import Preprocess, Preprocessing

DEFAULT_SIZE = (224, 224)
TIMEOUT_SECONDS = 5.0
NO_DOWNLOAD_HINT = "The included model 'efficientnet_lite0' needs no download."
HASH_SUFFIX = re.compile(r"-([0-9a-f]{8,})$")  # An official name ends with the first digits of the SHA-256.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # the attributes that every module has

Build = Callable[[int], nn.Module]  # from the number of classes to a model


@dataclass(frozen=True)
class Blueprint:
    """A recipe for building a model without its weights.

    `build` creates the model with random weights, for images of `size` with `channels` channels. `layer` is the default
    target layer; if `layer` is None, `gradcam.explain` chooses a layer. `layer_for_positive` is the default target
    layer of methods that assume non-negative activations.
    """

    build: Callable[[], Any]
    size: tuple[int, int] = DEFAULT_SIZE
    channels: int = 3
    layer: str | None = None
    layer_for_positive: str | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """A model with all settings that its provider knows; None means unknown.

    If `classes`, `layer` or `activation` is None, the model is run to find the value. `is_assumed` is True if the
    preprocessing is a guess. `is_of_part` is True if the preprocessing belongs to a part of the model, such as a
    backbone. `activation` names the function from logits to probabilities. `notes` are remarks for the user. `layer`
    and `layer_for_positive` are as in a `Blueprint`. `task` is None for classification, or if the adapter defines the
    task. `inputs` are additional inputs, such as encoded text prompts, each with batch size 1.
    """

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


_building = threading.local()  # `is_empty`: True while this thread builds a model without values


def _move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if not getattr(_building, "is_empty", False) or parameter.is_meta or type(parameter) is not nn.Parameter:
        return None  # Replacing a shared meta parameter would end the sharing.
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _SkipNormalSampling(TorchFunctionMode):
    """A mode that skips normal sampling for meta tensors. To sample, PyTorch would first import its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        is_idle = isinstance(tensor, Tensor) and tensor.is_meta and getattr(func, "__name__", "").endswith("normal_")
        return tensor if is_idle else func(*args, **kwargs)


@functools.cache
def _register_parameter_hook() -> None:
    """Register the hook until the process ends. Removing the hook would disturb threads that are building models."""
    # The cast is needed because PyTorch's annotation says that hooks return None.
    register_module_parameter_registration_hook(cast("Callable[..., None]", _move_to_meta))


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Create parameters without values in this thread, so that no time is spent on sampling random values.

    In contrast to `torch.device("meta")`, all other tensors have values. Constructors need such values,
    for example to compute widths.
    """
    _register_parameter_hook()
    was_empty, _building.is_empty = getattr(_building, "is_empty", False), True
    try:
        with _SkipNormalSampling():
            yield
    finally:
        _building.is_empty = was_empty


def fill(checkpoint: Checkpoint, build: Callable[[], nn.Module]) -> tuple[nn.Module, Sequence[str]]:
    """Build the model and load the checkpoint into it; return the model and notes.

    The model is first built without values, because sampling random values takes longer than reading a file. The model
    is built again with values in three cases: if the first attempt fails, if parameters are shared, or if the
    checkpoint lacks required values.
    """
    # Ignore errors. A constructor that reads parameter values fails only here, and all other errors occur again below.
    with contextlib.suppress(Exception):
        with empty_parameters():
            model = build()
        parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        if len(set(map(id, parameters))) == len(parameters):  # Loading would end the sharing of parameters.
            notes = load_weights(model, checkpoint)
            if not _lacks_values(model):
                return model, notes
    model = build()
    return model, load_weights(model, checkpoint)


def _lacks_values(model: nn.Module) -> bool:
    """Return True if a parameter, a buffer or an attribute of a module holds a tensor without values."""
    items = [item for module in model.modules() for item in vars(module).items()]
    attributes = [value for name, value in items if name not in MODULE_ATTRIBUTES]
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *list_tensors(attributes)))


def build_for(checkpoint: Checkpoint, build: Build, classes: int) -> tuple[nn.Module, int | None, Sequence[str]]:
    """Build and load a model with the checkpoint's number of classes; return model, number and notes."""

    def build_fitting() -> nn.Module:
        model = build(classes)
        count = count_classes(checkpoint, model)
        return model if count in (None, classes) else build(count)

    model, notes = fill(checkpoint, build_fitting)
    return model, count_classes(checkpoint, model), notes


def import_extra(package: str, extra: str) -> ModuleType:
    """Import a package from one of gradcam's extras; raise `ModelError` with the install command if that fails."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        problem = "is not installed" if is_missing else f"cannot be imported ({' '.join(str(error).split())})"
        raise ModelError(f"{package} {problem}: {to_pip_command(extra)}") from error


def hub_address() -> str:
    """Return the address of the Hugging Face hub, determined as in huggingface_hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def reason_unreachable(url: str) -> str | None:
    """Return why a URL cannot be reached; None if the server responds.

    If a server does not respond, libraries retry for a long time. This check prevents the retries.
    """
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in (404, 407, 410) else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def fetch(url: str, path: Path, hash_prefix: str | None) -> None:
    """Download a file completely or not at all; raise `ModelError` with advice if that fails."""
    reason = reason_unreachable(url)
    if reason is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix, progress=sys.stderr.isatty())
            return
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
    advice = f"Save the file as {path}, or give it with --weights FILE (weights= in Python)."
    problem = f"The weights cannot be downloaded ({reason}). Download {url} on another computer"
    raise ModelError(f"{problem}. {advice} {NO_DOWNLOAD_HINT}")


def recognise(path: Path, names: Iterable[str]) -> tuple[str | None, str]:
    """Return a file's official name, and how it was recognised: by "content" (hash) or "name"; else (None, "")."""
    stems = {name.rpartition(".")[0]: name for name in names}
    hashes = {match.group(1): name for stem, name in stems.items() if (match := HASH_SUFFIX.search(stem))}
    digest = hash_weights(path) if hashes and path.is_file() else ""
    certain = [(name, "content") for prefix, name in hashes.items() if digest.startswith(prefix)]
    # Converted and fine-tuned files often keep the official name, such as mobilenet_v2-b0353104, with other content.
    similar = [(name, "name") for stem, name in stems.items() if path.name.startswith(stem)]
    return next(iter([*certain, *similar]), (None, ""))


def describe_preprocessing(path: Path, criterion: str, library: str, name: str, preprocess: Preprocessing) -> str:
    """Return a note that a checkpoint gets the preprocessing of the weights `name`, with the reason."""
    sides = (value if isinstance(value, tuple) else (value, value) for value in (preprocess.resize, preprocess.size))
    resize, size = (f"{height}" if height == width else f"{height} x {width}" for height, width in sides)
    choice = f"using the preprocessing of {name} (resize {resize}, centre crop {size})."
    if not criterion:
        return f"{path.name} is not an official {library} file: {choice} Override with --size, --crop, --mean, --std."
    return f"{path.name} was recognised as {name} by the file's {criterion}: {choice}"
