"""What a pickle would make, found out without making it: why a checkpoint cannot be read, and what can be done."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import shlex
import tarfile
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
# What a pickle may ask for. That of a ResNet-152 and its optimizer has 76,000 steps, each of a microsecond or two.
MOST_STEPS = 1_000_000
MOST_VALUES = 20_000_000  # with those that stand in several places counted in each
DEEPEST = 200
CHANGES = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # steps that change what is there
BYTEARRAYS = ("builtins bytearray", "__builtin__ bytearray")  # which torch.load makes of any length
UNPACKED = 4  # times the size of the file: torch.save does not compress
MOST_BYTES = 2**26  # of a bytearray, and of what a small file may unpack to
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


class ExcessError(Exception):
    """A file would make more than it should, and this is what."""


class _Size:
    """What an object would be: how many values, those inside of its parts counted with each part, and how deep they lie.

    `largest`: of the numbers in it. `name`: of a class or function.
    """

    __slots__ = ("depth", "largest", "name", "values")

    def __init__(self, largest: int = 0, name: str = "") -> None:
        self.values, self.depth, self.largest, self.name = 1, 1, largest, name


def check_pickles(path: Path) -> None:
    """Go through the pickles of a checkpoint as `torch.load` reads it, and make nothing.

    Ten tuples of ten times the one before are a hundred bytes, and ten billion values for whoever compares or prints them.
    Raises `ModelError` for a file that asks for more than any training does, and anything for a broken one.
    """
    try:
        if is_zip(path):
            for content in _read_contents(path):
                _check_pickle(io.BytesIO(content))
        elif tarfile.is_tarfile(path):  # of before 2017, which torch.load would unpack
            raise ExcessError("it is a tar archive")
        else:
            with path.open("rb") as file:
                is_of_torch = _check_pickle(file) == TORCH_MAGIC
                for _ in range(4 if is_of_torch else 0):  # version, machine, content, and the storages' names
                    _check_pickle(file)
    except ExcessError as error:
        raise ModelError(f"{path}: asks for more than the weights of a model do ({error}), and was not read.") from None


def is_zip(path: Path) -> bool:
    """Whether `torch.load` takes it for a zip file."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def _check_pickle(file: IO[bytes]) -> object:
    """Go through one pickle, and give the last of its arguments."""
    walk, last = _Walk(), None
    for step, (code, argument, _) in enumerate(pickletools.genops(file)):
        if step >= MOST_STEPS:
            raise ExcessError(f"it has more than {MOST_STEPS} steps")
        last = last if argument is None else argument
        walk.follow(code, argument)
    return last


class _Walk:
    """A pickle's stack and memo, with sizes in place of objects; None is a mark."""

    def __init__(self) -> None:
        self._stack: list[_Size | None] = []
        self._known: dict[int, _Size] = {}
        self._values = 0

    def follow(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Take one step. Raises `ExcessError` where the objects become more than a training has."""
        name, stack = code.name, self._stack
        if name == "MARK":
            stack.append(None)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._known[len(self._known) if argument is None else argument] = stack[-1] or _Size()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._known[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        elif code.stack_before:
            parts = self._take(code)
            if name == "REDUCE" and parts[-1].name in BYTEARRAYS and parts[0].largest > MOST_BYTES:
                raise ExcessError(f"it has an array of {parts[0].largest} bytes")
            whole = parts.pop() if name in CHANGES and parts else _Size()
            self._grow(whole, parts)
            stack.extend(whole for _ in code.stack_after)
        elif isinstance(argument, int):
            stack.extend(_Size(argument) for _ in code.stack_after)  # the length of a frame is no value
        else:
            called = argument if name == "GLOBAL" else ""
            stack.extend(_Size(name=called) for _ in code.stack_after)

    def _take(self, code: pickletools.OpcodeInfo) -> list[_Size]:
        """What a step takes from the stack, the last first."""
        parts = []
        for kind in reversed(code.stack_before):
            if kind is pickletools.stackslice:
                while (part := self._stack.pop()) is not None:
                    parts.append(part)
            elif kind is not pickletools.markobject and (part := self._stack.pop()) is not None:
                parts.append(part)
        return parts

    def _grow(self, whole: _Size, parts: Sequence[_Size]) -> None:
        for part in parts:
            self._values += part.values
            whole.values += part.values
            whole.depth = max(whole.depth, part.depth + 1)
            whole.largest = max(whole.largest, part.largest)
        if self._values > MOST_VALUES or whole.depth > DEEPEST:
            raise ExcessError(f"it holds more than {MOST_VALUES} values, or is nested deeper than {DEEPEST}")


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
        return _conversion(path, found[0], foreign)
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
    if is_zip(path):
        outline = Outline(io.BytesIO(_read_contents(path)[0]))
        return outline.load(), list(outline.names)
    with path.open("rb") as file:
        outline = Outline(file)
        content = outline.load()
        if content == TORCH_MAGIC:
            content = [outline.load() for _ in range(3)][-1]
    return content, list(outline.names)


def _read_contents(path: Path) -> Sequence[bytes]:
    """The pickles in a zip: one, if torch.save wrote it. Raises `ExcessError` for one that unpacks to too much."""
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > UNPACKED * path.stat().st_size + MOST_BYTES:
            raise ExcessError("it unpacks to far more than its own size")
        # The case of names does not count for torch.load.
        return [archive.read(each) for each in archive.infolist() if each.filename.lower().endswith("/data.pkl")]


def _is_tensor(value: object) -> bool:
    return isinstance(value, NotMade) and REBUILT_TENSOR.fullmatch(value.name) is not None


def _holds_model(content: object) -> bool:
    values = list(content.values()) if isinstance(content, dict) else [content]
    states = [value.state for value in values if isinstance(value, NotMade)]
    return any(isinstance(state, dict) and {"_parameters", "_modules"} <= set(state) for state in states)


def _conversion(path: Path, found: StateDict, foreign: Sequence[str]) -> ModelError:
    loaded = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    loaded += "".join(f"[{key!r}]" for key in found.keys)
    weights = f"dict((k, v) for k, v in {loaded}.items() if isinstance(v, torch.Tensor))"
    code = f"import torch; torch.save({weights}, {str(path.with_name(f'{path.stem}-weights.pth'))!r})"
    # Easier to read in double quotes, where a shell leaves it alone in them.
    command = shlex.join(["python", "-c", code]) if re.search(r'["$`\\!]', code) else f'python -c "{code}"'
    return ModelError(
        f"{path}: its weights are plain, but beside them lie objects that cannot be read without running code "
        f"({_list(foreign)}). {FACTORY} Only if you trust where the file comes from, convert it, which runs that code:",
        command,
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
