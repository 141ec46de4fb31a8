"""Packages that only some models need."""

from __future__ import annotations

import importlib
from types import ModuleType

from gradcam.errors import ModelError


def import_extra(package: str, extra: str) -> ModuleType:
    """A package that comes with `gradcam-torch[extra]`. Raises `ModelError` with the line that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = "is not installed" if is_missing else f"cannot be imported ({' '.join(str(error).split())})"
        raise ModelError(f"{package} {what}: pip install 'gradcam-torch[{extra}]'") from error
