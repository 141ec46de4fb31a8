"""Load models by name, from a table of providers. A provider's module is imported only when it is needed."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcam.errors import ModelError, shorten

if TYPE_CHECKING:
    from gradcam.models.providers.base import Blueprint, Parts

DEFAULT_MODEL = "efficientnet_lite0"
MODEL_FORMS = f"a name, such as '{DEFAULT_MODEL}', or a torch.nn.Module."


@dataclass(frozen=True)
class Provider:
    """A source of models, chosen by the form of the name.

    `form` describes the names of this source in help texts. `pattern` matches these names. `module` is a module of this
    package with two functions. `load(name, weights) -> Parts` loads the model; if `weights` is None, it loads the
    model's own weights. `plan(name) -> Blueprint` downloads at most a configuration. In both functions, `name` is the
    text that the pattern's group matches. Both functions raise `ModelError`.
    """

    form: str
    summary: str
    pattern: str
    module: str


# The first pattern that matches the full name is used. Names with a Python file or a dotted module stand for a function
# that returns a model. The last pattern matches all other names: torchvision's models, functions in a module without
# dots, and entry points of installed packages. torchvision's provider distinguishes these three cases.
PROVIDERS = (
    Provider(DEFAULT_MODEL, "comes with gradcam, needs no download", rf"({DEFAULT_MODEL})", "embedded"),
    Provider("open_clip:NAME", "an open_clip architecture, with --weights", r"open_clip:(.*)", "open_clip"),
    Provider("smp:FOLDER", "a segmenter saved by segmentation-models-pytorch", r"smp:(.*)", "smp"),
    Provider("yolo:FILE.pt", "an ultralytics detector, if ultralytics is installed", r"yolo:(.*)", "yolo"),
    Provider("timm:NAME", "a timm model, or a folder saved by timm", r"timm:(.*)", "timm"),
    Provider("hf:NAME", "a Hugging Face model, by name or by folder", r"hf:(.*)", "huggingface"),
    Provider("FILE.py:FUNCTION", "your own model, returned by the function", r"(.+\.py(?::.*)?)", "custom"),
    Provider("MODULE:FUNCTION", "your own model, from a Python module", r"([^:]*\.[^:]*:.*)", "custom"),
    Provider("NAME[:WEIGHTS]", "a torchvision model: classification, detection or segmentation", "(.*)", "torchvision"),
)


def load_parts(name: str, weights: Path | None, task: str | None = None, prompts: Sequence[str] = ()) -> Parts:
    """Load the model with this name from its provider; raise `ModelError` if there is no such model.

    `task` is the requested task, if any. `prompts` are for detectors that take text prompts.
    """
    module, provider_name = _find_provider(name)
    parameters = inspect.signature(module.load).parameters
    options = {key: value for key, value in (("task", task), ("prompts", prompts)) if key in parameters}
    with pytorch_defaults():
        return module.load(provider_name, weights, **options)


@contextlib.contextmanager
def pytorch_defaults() -> Iterator[None]:
    """Use PyTorch's initial default dtype and device, float32 and the CPU, while a model is built.

    With the caller's defaults, loaded weights could be rounded (to bfloat16), and a constructor could not compute
    values (on the meta device). If the constructor itself sets another default dtype, this dtype stays the default
    afterwards.
    """
    import torch

    caller_dtype = torch.get_default_dtype()
    default_device = torch.empty(0, dtype=torch.float32, device=None).device
    is_on_cpu = default_device == torch.device("cpu")
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.nullcontext() if is_on_cpu else torch.device("cpu"):
            yield
    finally:
        if torch.get_default_dtype() == torch.float32:
            torch.set_default_dtype(caller_dtype)


def find_blueprint(name: str) -> Blueprint:
    """Return the blueprint of the model with this name; raise `ModelError` if there is no such model."""
    module, provider_name = _find_provider(name)
    return module.plan(provider_name)


def _find_provider(name: str) -> tuple[Any, str]:
    if not isinstance(name, str):
        raise ModelError(f"There is no model {shorten(name)}: expected {MODEL_FORMS}")
    matches = ((provider, re.fullmatch(provider.pattern, name, re.DOTALL)) for provider in PROVIDERS)
    # The last pattern matches any name.
    provider, provider_match = next((provider, match) for provider, match in matches if match)
    return importlib.import_module(f"{__name__}.{provider.module}"), provider_match.group(1)
