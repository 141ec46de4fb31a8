"""What users bring: objects of their own, by `FILE.py:NAME`, `PACKAGE.MODULE:NAME`, or the name of an installed entry point.

A package adds to gradcam by entry points in its pyproject.toml, of the groups `gradcam.methods`, `gradcam.metrics`,
`gradcam.targets`, `gradcam.models`, `gradcam.formats` and `gradcam.commands`; nothing of it is imported until it is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from gradcam.errors import GradcamError, ModelError, describe_unexpected, join_names, nearest, shorten

FORMS = "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"

Kind = Literal["methods", "metrics", "targets", "models", "formats", "commands"]


@functools.cache
def installed(kind: Kind) -> dict[str, EntryPoint]:
    """The entry points of that kind by their names, none of them imported."""
    return {each.name: each for each in sorted(_list_all().select(group=f"gradcam.{kind}"), key=lambda it: it.name)}


_list_all = functools.cache(entry_points)  # which reads the metadata of everything that is installed


def is_own(name: object) -> bool:
    """Whether it is spelt as an object of a file or a module of the user's own."""
    return isinstance(name, str) and ":" in name


_loaded = set[str]()  # by name, of what users bring


def has_loaded() -> bool:
    """Whether code of a user's own, or of a package that adds to gradcam, has run in this process."""
    return bool(_loaded)


def load(kind: Kind, name: str) -> Any:
    """The object of that name: of a file, of a module, or of an installed package.

    A file that has not changed is run once, so that the same name is the same object.

    Raises
    ------
    GradcamError
        For a file, module or name that is not there, and for what cannot be imported; the message names it.
    """
    if is_own(name):
        place = _split(name)[0]
        path = _to_path(place)
        if not place.endswith(".py") or not path.is_file():
            return find_function(name)
        path = path.resolve()
        return _load_once(name, path, hashlib.sha256(path.read_bytes()).hexdigest(), os.getcwd())
    if name not in installed(kind):
        raise GradcamError(f"There is no entry point {shorten(name)} in the group gradcam.{kind}.")
    entry, same = installed(kind)[name], _list_all().select(group=f"gradcam.{kind}", name=name)
    owners = sorted({each.dist.name for each in same if each.dist})
    if len(owners) > 1:
        packages = f"several packages, {join_names(owners)}"
        raise GradcamError(f"{name} is registered in gradcam.{kind} by {packages}: keep only one of them installed.")
    _loaded.add(name)
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever somebody's package does when it is imported
        package = f" of the package {entry.dist.name}" if entry.dist else ""
        what = f"{name} ({entry.value}{package})"
        raise GradcamError(f"{what} cannot be imported: {describe_unexpected(error)}") from error


@functools.lru_cache(maxsize=256)
def _load_once(name: str, path: Path, sha256: str, folder: str) -> Any:
    return find_function(name)


def fingerprint(brought: Any) -> dict[str, str] | None:
    """The file that a user's function or class is written in, and its SHA-256: `{"file", "sha256"}`. None for what
    belongs to gradcam, and where there is no file, as at a prompt."""
    made = inspect.unwrap(getattr(brought, "function", brought))
    while isinstance(made, functools.partial):
        made = inspect.unwrap(made.func)
    owner = made if inspect.isroutine(made) or inspect.isclass(made) else type(made)
    try:
        file = inspect.getfile(owner)
    except (TypeError, OSError):  # what is written in C, and what was typed
        return None
    if owner.__module__.partition(".")[0] == "gradcam" or not os.path.isfile(file):
        return None
    return {"file": os.path.basename(file), "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}


def find_function(name: str) -> Any:
    """What is called so in a module or a file; the file's folder can be imported from meanwhile. Raises `ModelError`
    for a module or file that is not there or cannot be imported, and for a name that is not in it."""
    place, attribute = _split(name)
    _loaded.add(name)
    module = _import_file(_to_path(place)) if place.endswith(".py") else _import_module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [each for each, value in vars(module).items() if callable(value) and not each.startswith("__")]
            made = [each for each in own if getattr(vars(module)[each], "__module__", None) == module.__name__]
            offers = nearest(attribute, own) or made
            hint = f" Nearest: {join_names(offers[:5])}." if offers else " It has no functions."
            raise ModelError(f"There is no {shorten(attribute)} in {place}.{hint}")
        found = getattr(found, part)
    return found


PREFIX = "_gradcam_"  # of the names of modules that are files of the user's


def list_files() -> list[str]:
    """The files of the user's that were imported, and are still there, for `load_files` in another process."""
    files = (getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith(PREFIX))
    return [file for file in files if file is not None and os.path.isfile(file)]


def load_files(files: Iterable[str]) -> None:
    """Import them under the names that they have here, by which what is in them can be sent. Raises `ModelError`."""
    for file in files:
        _loaded.add(file)
        _import_file(Path(file))


def call(function: Any, name: str) -> Any:
    """What a function without arguments gives. Raises `ModelError` with the place where it raised, if it did."""
    place = name.rpartition(":")[0]  # nothing of an entry point
    with _folder_of(place), _reported(f"{name} raised"):
        return function()


def _split(name: str) -> tuple[str, str]:
    place, _, attribute = name.rpartition(":")
    if not place or place.endswith(":") or not attribute:
        file = name.rstrip(":") or "FILE.py"
        raise ModelError(f"{shorten(name)} names no function: expected {FORMS}, such as {file}:make.")
    return place, attribute


def _to_path(place: str) -> Path:
    return Path(os.path.expanduser(place))  # which leaves a home that nobody has as it is


def _import_module(name: str) -> ModuleType:
    importlib.invalidate_caches()
    with _reported(f"{name} cannot be imported:"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # it is there, and imports another one that is not
            where = f"sys.path{' and the current folder' if os.getcwd() in sys.path else ''}"
            text = f"There is no module {shorten(name)}: Python searched {where}. For a file, pass FILE.py:FUNCTION."
            raise ModelError(text) from error
        except ValueError as error:  # an empty part between dots
            raise ModelError(f"There is no module {shorten(name)}: expected {FORMS}.") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}, expected a Python file.")
    mark = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
    name = f"{PREFIX}{path.stem}_{mark}"  # not its own: that may be an installed module's, or another folder's
    loader = _AsWritten(name, str(path))
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(path))
    spec.has_location = True  # the module has its `__file__`
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with _folder_of(str(path)), _reported(f"{path} cannot be imported:"):
        loader.exec_module(module)
    return module


class _AsWritten(importlib.machinery.SourceFileLoader):
    """Compile what the file says now: `__pycache__` is also that of a file as long, written in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextlib.contextmanager
def _folder_of(place: str) -> Iterator[None]:
    """A file's own folder can be imported from, as if the file were run as a script."""
    folder = str(_to_path(place).resolve().parent)
    if not place.endswith(".py") or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code in the file may have taken it out
            sys.path.remove(folder)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Whatever the user's code raises, `sys.exit` too, becomes a `ModelError` with the line where it was raised."""
    try:
        yield
    except (ModelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__.startswith("gradcam."):
            raise  # a signal that ends the command
        said = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
        raise ModelError(f"{what} {said} ({_place(error)})") from error


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    libraries = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    here = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, here, "<"))]
    last = (own or list(frames))[-1]
    return f"{last.filename}:{last.lineno}"
