"""Import public names when they are first used, so that importing gradcam does not import PyTorch."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def export_lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package (PEP 562).

    The public names are listed in the package's stub `__init__.pyi`, which type checkers also read. In the stub, each
    name is imported by `from .module import name as name`, and each module by `from . import name as name`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: node.module for node in imports for alias in node.names}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = module if modules[name] is None else getattr(module, name)
        # Store the value, so that Python finds the name without `__getattr__` from now on.
        vars(sys.modules[package])[name] = value
        return value

    return import_name, lambda: sorted(modules), sorted(modules)
