"""What a pickle would make, found out without making it: why a checkpoint cannot be read, and what can be done."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from gradcam.classifiers.checkpoints.state_dicts import StateDict, find_state_dicts
from gradcam.errors import ModelError

TORCH_MAGIC = (
    0x1950A86A20F9469CFC6C  # the first pickle of torch.save's format before zip files; the fourth is the content
)
PARTS_OF_TENSORS = re.compile(r"torch\.(_utils|_tensor|storage)\.\w+|torch\.\w+|collections\.OrderedDict")
REBUILT_TENSOR = re.compile(r"torch\._(utils|tensor)\._rebuild_\w+")
# Modules with which no training describes itself: a file that names one is not to be opened by anybody.
# `commands` and `__builtin__` are what older protocols call `subprocess` and `builtins`.
DANGEROUS = re.compile(
    r"(os|posix|nt|subprocess|sys|runpy|importlib|shutil|socket|pty|ctypes|webbrowser|pdb|timeit|_posixsubprocess"
    r"|multiprocessing|asyncio|commands)\..*|(builtins|__builtin__|_?io)\.(eval|exec|execfile|compile|open|__import__)"
)
MOST_NAMES = 4
FACTORY = "A factory (--model file.py:function) may load it in its own way."


class NotMade:
    """Stands for an object that the pickle would make. It keeps what it was given, and does nothing."""

    name: ClassVar[str]
    state: Any = None

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...


class OrderedNames(dict[Any, Any]):
    """Stands for an OrderedDict, which state dicts are."""

    def __setstate__(self, state: object) -> None: ...


class Outline(pickle._Unpickler):
    """Reads a pickle with nothing but dictionaries, lists and values: every class and function is replaced by a `NotMade`.

    Python's own slow unpickler, since that is only asked about small files of names, and can be read.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.names: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        self.names[full] = None
        return OrderedNames if full == "collections.OrderedDict" else type("NotMade", (NotMade,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        """Nothing for a tensor's numbers; before zip files, modules' classes came this way too, with their source."""
        return pid[1] if isinstance(pid, tuple) and pid[:1] == ("module",) else None

    def get_extension(self, code: int) -> None:  # looks into a table of the process, which is not the file's to use
        raise pickle.UnpicklingError(f"extension {code}")


def explain_refusal(path: Path) -> ModelError:
    """Why `torch.load(weights_only=True)` did not take this file: an error to raise. Nothing in it is executed."""
    try:
        content, names = _outline(path)
    except Exception as error:  # a broken pickle raises anything
        reason = " ".join(str(error).split()) or type(error).__name__
        return ModelError(f"{path}: is damaged, or no checkpoint ({reason})")
    foreign = [name for name in names if not PARTS_OF_TENSORS.fullmatch(name)]
    if not foreign:
        return ModelError(f"{path}: is a pickle that torch.save did not write, or damaged")
    dangerous = [name for name in foreign if DANGEROUS.fullmatch(name)]
    if dangerous:
        return ModelError(
            f"{path}: would run code on being read ({_list(dangerous)}), which no checkpoint needs. It was not run. "
            "Do not open the file with anything that does."
        )
    found = find_state_dicts(content, _is_tensor)
    if found:
        return ModelError(_conversion(path, found[0], foreign))
    if any(name.startswith("ultralytics.") for name in foreign):
        return ModelError(
            f"{path}: holds a whole model of ultralytics, which cannot be read without running code. If you trust it, give "
            f"--model FILE.py:build, where `def build(): return ultralytics.YOLO({str(path)!r}).model`, and no --weights."
        )
    what = "a whole pickled model" if _holds_model(content) else "objects in place of plain weights"
    return ModelError(
        f"{path}: holds {what} ({_list(foreign)}), which cannot be read without running code. Where it was made, "
        f"save the weights alone: torch.save(model.state_dict(), 'weights.pth'). {FACTORY}"
    )


def _outline(path: Path) -> tuple[object, Sequence[str]]:
    """What the file would hold, and the full names of all classes and functions in it."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            outline = Outline(file)
            content = outline.load()
            if content == TORCH_MAGIC:
                content = [outline.load() for _ in range(3)][-1]
            return content, list(outline.names)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"])
        outline = Outline(io.BytesIO(archive.read(name)))
    return outline.load(), list(outline.names)


def _is_tensor(value: object) -> bool:
    return isinstance(value, NotMade) and REBUILT_TENSOR.fullmatch(value.name) is not None


def _holds_model(content: object) -> bool:
    values = list(content.values()) if isinstance(content, dict) else [content]
    states = [value.state for value in values if isinstance(value, NotMade)]
    return any(isinstance(state, dict) and {"_parameters", "_modules"} <= set(state) for state in states)


def _conversion(path: Path, found: StateDict, foreign: Sequence[str]) -> str:
    loaded = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    loaded += "".join(f"[{key!r}]" for key in found.keys)
    weights = f"dict((k, v) for k, v in {loaded}.items() if isinstance(v, torch.Tensor))"
    target = path.with_name(f"{path.stem}-weights.pth")
    return (
        f"{path}: its weights are plain, but beside them lie objects that cannot be read without running code "
        f"({_list(foreign)}). Only if you trust where the file comes from, convert it with these two lines of Python, "
        "which run that code:\n"
        "import torch\n"
        f"torch.save({weights}, {str(target)!r})\n"
        f"{FACTORY}"
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
