"""Where models come from: one small table. Each provider is a module that is imported when one of its models is named."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradcam.errors import ModelError, shorten

if TYPE_CHECKING:
    from gradcam.classifiers.providers.parts import Parts

DEFAULT = "efficientnet_lite0"


@dataclass(frozen=True)
class Provider:
    """Models that are named in one way: `form`, for people, and `pattern`, whose group is the name that `module` gets.

    `module` has `load(name, weights) -> Parts`. `weights`: a checkpoint in place of the model's own.
    """

    form: str
    summary: str
    pattern: str
    module: str

    def load(self, name: str, weights: Path | None) -> Parts:
        """The model of that name. Raises `ModelError` where it cannot be had."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        parts: Parts = module.load(name, weights)
        return parts


# The first whose pattern fits the whole name. A file or a dotted module is a factory's; a plain word before a colon may be a
# model of torchvision with its weights, or a module with its function, which torchvision's provider tells apart.
PROVIDERS = (
    Provider(DEFAULT, "comes with gradcam, needs no download", rf"({DEFAULT})", "embedded"),
    Provider("timm:NAME", "a model of timm, or a folder that timm saved", r"timm:(.*)", "timm"),
    Provider("hf:NAME", "a Hugging Face image classifier, by name or by folder", r"hf:(.*)", "huggingface"),
    Provider("FILE.py:FUNCTION", "your own: what the function gives", r"(.+\.py(?::.*)?)", "factory"),
    Provider("MODULE:FUNCTION", "your own, from a module", r"([^:]*\.[^:]*:.*)", "factory"),
    Provider("NAME[:WEIGHTS]", "a classification model of torchvision", r"(.*)", "torchvision"),
)


def load_parts(name: str, weights: Path | None) -> Parts:
    """The model of that name, from whichever provider knows it. Raises `ModelError` where there is none."""
    if not isinstance(name, str):
        raise ModelError(
            f"There is no model {shorten(name)}: expected a name, such as '{DEFAULT}', or a torch.nn.Module."
        )
    for provider in PROVIDERS:
        found = re.fullmatch(provider.pattern, name, re.DOTALL)
        if found:
            return provider.load(found.group(1), weights)
    raise ModelError(f"There is no model {shorten(name)}.")  # the last pattern fits anything
