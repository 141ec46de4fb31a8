"""Load users' extensions: `FILE.py:NAME`, `PACKAGE.MODULE:NAME`, or the name of an installed entry point.

A package extends gradcam by entry points in its pyproject.toml, in the groups `gradcam.methods`, `gradcam.metrics`,
`gradcam.targets`, `gradcam.models`, `gradcam.formats` and `gradcam.commands`. Each entry point is imported at its first
use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gradcam.errors import GradcamError, ModelError, describe_unexpected, find_similar_names, join_names, shorten

FUNCTION_NAME_FORMS = "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"

PluginKind = Literal["methods", "metrics", "targets", "models", "formats", "commands"]


@functools.cache
def list_entry_points(kind: PluginKind) -> dict[str, EntryPoint]:
    """Return all entry points of a kind by name, without importing any of them."""
    entries = _read_entry_points().select(group=f"gradcam.{kind}")
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


_read_entry_points = functools.cache(entry_points)  # `entry_points` is slow: it reads all installed metadata.


def is_custom(name: object) -> bool:
    """Return whether the name has the form "FILE.py:NAME" or "PACKAGE.MODULE:NAME" of a user's object."""
    return isinstance(name, str) and ":" in name


_loaded_names = set[str]()  # The names of all custom objects that were loaded.
# The remedies of all active `refuse_new_code` contexts. Error messages end with the last remedy.
_remedies = list[str]()


def has_loaded_custom_code() -> bool:
    """Return whether this process has run a user's code, or a package that extends gradcam."""
    return bool(_loaded_names)


@contextlib.contextmanager
def refuse_new_code(remedy: str) -> Iterator[None]:
    """Refuse to load users' objects whose names were not loaded before. The error message ends with `remedy`.

    The context applies to all threads, because any thread of a server may receive such a name in a request.
    """
    _remedies.append(remedy)
    try:
        yield
    finally:
        _remedies.pop()


def register_code(name: str) -> None:
    """Register a custom object whose code is about to run. Raise `ModelError` if `refuse_new_code` forbids the code."""
    if _remedies and name not in _loaded_names:
        raise ModelError(f"{shorten(name)} can run code on this machine, so it is refused. {_remedies[-1]}")
    _loaded_names.add(name)


def load_plugin(kind: PluginKind, name: str) -> Any:
    """Return the named object from a file, a module, or an installed package.

    A file is run again only if the file or the current folder has changed. Otherwise, the cached object is returned.

    Raises
    ------
    GradcamError
        If the file, module or name does not exist, or cannot be imported. The message states the reason.
    """
    if is_custom(name):
        location = _split_name(name)[0]
        path = _expand_path(location)
        if not location.endswith(".py") or not path.is_file():
            return import_object(name)
        return _load_once(name, path.resolve(), hashlib.sha256(path.read_bytes()).hexdigest(), os.getcwd())
    if name not in list_entry_points(kind):
        raise GradcamError(f"There is no entry point {shorten(name)} in the group gradcam.{kind}.")
    entry, matches = list_entry_points(kind)[name], _read_entry_points().select(group=f"gradcam.{kind}", name=name)
    packages = sorted({match.dist.name for match in matches if match.dist})
    if len(packages) > 1:
        subject = f"{name} is registered in gradcam.{kind} by several packages, {join_names(packages)}"
        raise GradcamError(f"{subject}: keep only one of them installed.")
    _loaded_names.add(name)
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # Importing a package may raise any error, or exit.
        package = f" of the package {entry.dist.name}" if entry.dist else ""
        subject = f"{name} ({entry.value}{package})"
        raise GradcamError(f"{subject} cannot be imported: {describe_unexpected(error)}") from error


@functools.lru_cache(maxsize=256)
def _load_once(name: str, path: Path, sha256: str, folder: str) -> Any:
    return import_object(name)


def fingerprint(user_object: Any) -> dict[str, str] | None:
    """Return the name and hash of the file that defines a user's function or class, as `{"file", "sha256"}`.

    Returns None for objects of gradcam, and for objects without a file, such as functions typed at a prompt.
    """
    target = inspect.unwrap(getattr(user_object, "function", user_object))
    while isinstance(target, functools.partial):
        target = inspect.unwrap(target.func)
    definition = target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
    try:
        file = inspect.getfile(definition)
    except (TypeError, OSError):  # The object has no source file: it is written in C, or was typed at a prompt.
        return None
    if definition.__module__.partition(".")[0] == "gradcam" or not os.path.isfile(file):
        return None
    return {"file": os.path.basename(file), "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}


def import_object(name: str) -> Any:
    """Return the named object of a module or a file. A file can import modules from its own folder.

    Raises `ModelError` if the module or file does not exist, cannot be imported, or does not contain the name.
    """
    location, attribute = _split_name(name)
    register_code(name)
    module = _import_file(_expand_path(location)) if location.endswith(".py") else _import_module(location)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [name for name, member in vars(module).items() if callable(member) and not name.startswith("__")]
            local_names = [name for name in names if getattr(vars(module)[name], "__module__", None) == module.__name__]
            suggestions = find_similar_names(attribute, names) or local_names
            hint = f" Nearest: {join_names(suggestions[:5])}." if suggestions else " The module has no functions."
            raise ModelError(f"There is no {shorten(attribute)} in {location}.{hint}")
        value = getattr(value, part)
    return value


USER_MODULE_PREFIX = "_gradcam_"  # The prefix of the names of modules that were imported from users' files.


def list_files() -> list[str]:
    """Return the users' files that were imported and still exist, for `load_files` in another process."""
    modules = [module for name, module in sys.modules.items() if name.startswith(USER_MODULE_PREFIX)]
    files = (getattr(module, "__file__", None) for module in modules)
    return [file for file in files if file is not None and os.path.isfile(file)]


def load_files(files: Iterable[str]) -> None:
    """Import the files from `list_files`, so that their objects can be unpickled. Raises `ModelError`."""
    for file in files:
        register_code(file)
        _import_file(Path(file))


def call_user_function(function: Any, name: str) -> Any:
    """Call the function without arguments. If it raises an error, raise `ModelError` with the line of the error."""
    location = name.rpartition(":")[0]  # The location is empty for an entry point.
    with _importable_folder(location), _translate_errors(f"{name} raised"):
        return function()


def _split_name(name: str) -> tuple[str, str]:
    location, _, attribute = name.rpartition(":")
    if not location or location.endswith(":") or not attribute:
        file = name.rstrip(":") or "FILE.py"
        raise ModelError(f"{shorten(name)} names no function: expected {FUNCTION_NAME_FORMS}, such as {file}:make.")
    return location, attribute


def _expand_path(path: str) -> Path:
    return Path(os.path.expanduser(path))  # `Path.expanduser` would raise an error for an unknown user.


def _import_module(name: str) -> ModuleType:
    importlib.invalidate_caches()
    with _translate_errors(f"{name} cannot be imported:"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise  # The user's module exists, but imports a module that does not exist.
            searched = f"sys.path{' and the current folder' if os.getcwd() in sys.path else ''}"
            text = f"There is no module {shorten(name)}: Python searched {searched}. For a file, pass FILE.py:FUNCTION."
            raise ModelError(text) from error
        except ValueError as error:  # The name has an empty part between dots.
            raise ModelError(f"There is no module {shorten(name)}: expected {FUNCTION_NAME_FORMS}.") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}, expected a Python file.")
    # The name contains a hash of the path, because a file in another folder may have the same stem.
    name = f"{USER_MODULE_PREFIX}{path.stem}_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"
    module = sys.modules[name] = ModuleType(name)  # Dataclasses look up their module in sys.modules.
    module.__file__ = str(path)
    with _importable_folder(str(path)), _translate_errors(f"{path} cannot be imported:"):
        # Do not use Python's cache of compiled files. If a file is saved twice in one second with the same length, the
        # cache would return the older version.
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    return module


@contextlib.contextmanager
def _importable_folder(location: str) -> Iterator[None]:
    """Allow imports from a file's own folder, as if the file were run as a script."""
    folder = str(_expand_path(location).resolve().parent)
    if not location.endswith(".py") or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # The user's code may have removed the folder.
            sys.path.remove(folder)


@contextlib.contextmanager
def _translate_errors(subject: str) -> Iterator[None]:
    """Turn any error of the user's code, and `sys.exit`, into a `ModelError` with the line of the error."""
    try:
        yield
    except (ModelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__.startswith("gradcam."):
            raise  # A signal handler raised this exception, so the command must end.
        reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
        raise ModelError(f"{subject} {reason} ({_locate_error(error)})") from error


def _locate_error(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    libraries = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    package_folder = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((*libraries, package_folder, "<"))]
    last_frame = (user_frames or list(frames))[-1]
    return f"{last_frame.filename}:{last_frame.lineno}"
