"""The weights in a file: read without running what is in it, or why they cannot be read and what can be done."""

from __future__ import annotations

import codecs
import io
import os
import pickle
import pickletools
import re
import shlex
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from gradcam.errors import ModelError, join_names, shorten
from gradcam.images.files import hash_file, open_file

# Averages of the weights over the training come first, as timm takes them: they are what such a training is judged by.
AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema", "ema_model")
PLAIN = ("state_dict", "model_state_dict", "model", "net", "module", "network", "weights", "params")
DEEPEST_KEY = 3
# The first pickle of torch.save's format before zip files; the fourth is the content.
TORCH_MAGIC = 0x1950A86A20F9469CFC6C
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
FACTORY = "To load the file with your own function, give --model FILE.py:FUNCTION."
PEEK = 512  # bytes
OF_PYTORCH = (".pt", ".pth", ".ts", ".torchscript", ".bin", ".ckpt")  # suffixes of files that may be something else
EXPORTED = "which PyTorch does not load: save the state dict of the original PyTorch model"
# What files of these suffixes are, whatever is in them.
OTHERS = {
    ".onnx": "an ONNX model",
    ".h5": "an HDF5 file (Keras)",
    ".keras": "a Keras model",
    ".pb": "a TensorFlow graph",
    ".tflite": "a TensorFlow Lite model",
    **dict.fromkeys((".engine", ".trt"), "a TensorRT engine"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), "a Core ML model"),
    ".pte": "an ExecuTorch program",
}
LFS = "is a git-LFS pointer, not the file itself: run 'git lfs pull', or download the file"
TAR = "is a tar archive (torch.save wrote these before 2017): unpack it, or save the weights again with torch.save"
PAGE = "is a web page, not a checkpoint: download the file itself"
# (offset, bytes, what the file is)
SIGNATURES = (
    (0, b"version https://git-lfs", LFS),
    (0, b"\x89HDF\r\n\x1a\n", f"is an HDF5 file (Keras), {EXPORTED}"),
    (0, b"\x93NUMPY", "is a NumPy array, expected a checkpoint"),
    (0, b"GGUF", "is a GGUF file, which PyTorch does not load"),
    (4, b"TFL3", f"is a TensorFlow Lite model, {EXPORTED}"),
    (0, b"\x1f\x8b", "is compressed with gzip: unpack it first"),
    (0, b"7z\xbc\xaf", "is a 7z archive: unpack it first"),
    (257, b"ustar", TAR),
    *((0, start, PAGE) for start in (b"<!DOCTYPE", b"<!doctype", b"<html")),
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A file's weights by name, as they lie in it, on the processor. `notes`: what a person should know of the choice."""

    path: Path
    tensors: dict[str, Tensor] = field(repr=False)
    notes: Sequence[str] = ()


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The weights in a file of safetensors or of torch.save, whatever its suffix; nothing in it is executed, ever.
    Raises `ModelError` for a file that is missing, cut or no checkpoint, that would run code, or that holds no
    weights."""
    path = Path(path)
    try:
        head = b""
        if not (path.is_dir() and path.suffix.lower() in OTHERS):
            with open_file(path) as file:
                head = file.read(PEEK)
        if what := describe_stranger(head, path):
            raise ModelError(f"{path}: {what}.")
        if is_safetensors(head):
            tensors = load_file(path)  # Named tensors and nothing else: there is no state dict to search for.
            return Checkpoint(path, tensors) if tensors else _choose(path, tensors)
        check_pickles(path)
        with path.open("rb") as file, warnings.catch_warnings():  # a file: of a path, torch.load goes by the suffix
            warnings.simplefilter("ignore")  # of storages as they were saved years ago
            content = torch.load(file, map_location="cpu", weights_only=True)
    except ModelError:
        raise
    except pickle.UnpicklingError:
        raise explain_refusal(path) from None
    except MemoryError:
        raise ModelError(f"{path}: does not fit into memory") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise ModelError(f"{path}: cannot be opened ({error.strerror}), expected a checkpoint") from None
        # Readers raise RuntimeError, EOFError, IndexError, BadZipFile, zlib.error, struct.error and more on broken files.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "magic number" in reason:  # a pickle that begins otherwise than those of torch.save
            raise explain_refusal(path) from None
        raise ModelError(f"{path}: is damaged or cut off ({reason})") from error
    return _choose(path, content)


def hash_weights(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits: read once for as long as the file stays as it is. Raises `OSError`."""
    found = path.stat()
    return _hash(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=4)
def _hash(path: Path, *state: int) -> str:
    return hash_file(path)


def _choose(path: Path, content: object) -> Checkpoint:
    found = find_state_dicts(content, lambda value: isinstance(value, Tensor))
    if not found:
        what = shorten(content)
        if isinstance(content, dict) and content:
            what = f"a dictionary of {', '.join(map(shorten, list(content)[:5]))}"
        raise ModelError(f"{path}: contains {what}, expected a state dict of named weights. {FACTORY}")
    chosen, *others = found
    if others and not chosen.is_known:
        names = join_names(each.name for each in found)
        raise ModelError(f"{path}: contains several state dicts, {names}, none under a standard name. {FACTORY}")
    tensors = {name: value.detach() for name, value in chosen.values.items() if isinstance(value, Tensor)}
    odd = [name for name, tensor in tensors.items() if tensor.is_meta or tensor.is_quantized or tensor.is_sparse]
    if odd:
        what = f"'{odd[0]}' is quantised, sparse or without values, expected plain tensors"
        raise ModelError(f"{path}: {what}. {FACTORY}")
    storages = [each.untyped_storage() for each in tensors.values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    # Tensors may share, or repeat, so few values that copies of them would fill the memory.
    if sum(each.nbytes for each in tensors.values()) > UNPACKED * held + MOST_BYTES:
        name = max(tensors, key=lambda name: tensors[name].nbytes)
        shape = " x ".join(map(str, tensors[name].shape))
        raise ModelError(
            f"{path}: '{name}' declares a shape of {shape}, but the file contains only {held} bytes of values."
        )
    if not others:
        return Checkpoint(path, tensors)
    left = join_names(each.name for each in others)
    return Checkpoint(
        path, tensors, [f"The file has several state dicts: '{chosen.name}' was loaded, and {left} ignored."]
    )


@dataclass(frozen=True)
class StateDict:
    """Weights by name, and the keys under which they lie in the file: none where the file is nothing else."""

    keys: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return ".".join(self.keys)

    @property
    def is_known(self) -> bool:
        return all(key in AVERAGES + PLAIN for key in self.keys)

    @property
    def rank(self) -> Sequence[int]:
        order = AVERAGES + PLAIN
        return tuple(order.index(key) if key in order else len(order) for key in self.keys)


def find_state_dicts(content: object, is_tensor: Callable[[object], bool]) -> Sequence[StateDict]:
    """The state dicts in what a file holds, the best first: averages, then under the usual names, then any others."""
    inside = sorted(_inside(content, is_tensor, DEEPEST_KEY), key=attrgetter("rank"))
    if not any(found.is_known for found in inside) and is_state_dict(content, is_tensor):
        return [StateDict((), content)]  # type: ignore[arg-type]  # is_state_dict says that it is a mapping
    return inside


def is_state_dict(content: object, is_tensor: Callable[[object], bool]) -> bool:
    """Whether this is a mapping from names to tensors, a few other things beside them allowed."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return False
    return 2 * sum(is_tensor(value) for value in content.values()) > len(content)


def _inside(content: object, is_tensor: Callable[[object], bool], depth: int) -> Iterator[StateDict]:
    if not isinstance(content, Mapping) or depth == 0:
        return
    for name, value in content.items():
        if is_state_dict(value, is_tensor) and isinstance(name, str):
            yield StateDict((name,), value)
        elif name in AVERAGES + PLAIN:
            for found in _inside(value, is_tensor, depth - 1):
                yield StateDict((name, *found.keys), found.values)


def is_safetensors(head: bytes) -> bool:
    """Whether the file begins as those of safetensors do: with eight bytes of length, not a large one, and JSON."""
    return head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < 1 << 32


def describe_stranger(head: bytes, path: Path) -> str | None:
    """What a file is, and what to do, if it is certainly no checkpoint; None for what may be one."""
    for offset, signature, what in SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return what
    other = OTHERS.get(path.suffix.lower())
    if other or (head[:1] == b"\x08" and b"pytorch" in head[:40]):
        return f"is {other or OTHERS['.onnx']}, {EXPORTED}"
    if head[:2] == b"PK":
        return _describe_zip(path)
    # A pickle of protocol 2 or later is torch.save's format before zip files.
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return None if is_safetensors(head) or is_pickle else _describe_bytes(head)


def describe_other_model(path: Path) -> str | None:
    """Why a file, named in place of a model, cannot be explained, and what can; None where it may be a checkpoint."""
    suffix, give = path.suffix.lower(), "Give FILE.py:build, with `def build(): return"
    if suffix in OTHERS:
        hint = "gradients need a PyTorch model. Give that model, and its state dict with --weights"
        return f"is {OTHERS[suffix]}, which cannot be explained: {hint}"
    if suffix == ".pt2":
        return f"is an exported program. {give} torch.export.unflatten(torch.export.load({str(path)!r}))`"
    if suffix == ".pt" and "yolo" in path.stem.lower():
        return f"looks like an ultralytics model. {give} ultralytics.YOLO({str(path)!r}).model`"
    if suffix in OF_PYTORCH and path.is_file():
        with path.open("rb") as file:
            return describe_stranger(file.read(PEEK), path)
    return None


def _describe_zip(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return "is damaged or cut off: the end of the torch.save file is missing"
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    if "constants.pkl" in names:
        return (
            "is a TorchScript archive (torch.jit.save), whose layers cannot be inspected. If you trust the file, save its "
            "weights with torch.save(torch.jit.load(path).state_dict(), 'weights.pth')"
        )
    if any(name.startswith("models/") for name in names):
        return (
            "is an exported program (torch.export.save). Save its weights with "
            "torch.save(torch.export.load(path).state_dict, 'weights.pth')"
        )
    return None if "data.pkl" in names else "is a zip file that torch.save did not write: unpack it first"


def _describe_bytes(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "is empty" if not head else "is damaged: it begins with zeros, not with a checkpoint's header"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # of what may end within a character
    except UnicodeDecodeError:
        text = "\0"
    kind = "a text file" if all(it.isprintable() or it.isspace() for it in text) else "in an unknown format"
    return f"is {kind}, expected a checkpoint written by safetensors or torch.save"


def explain_refusal(path: Path) -> ModelError:
    """Why `torch.load(weights_only=True)` did not take this file: an error to raise. Nothing in it is executed."""
    try:
        content, names = _outline(path)
    except Exception as error:  # a broken pickle raises anything
        reason = " ".join(str(error).split()) or type(error).__name__
        return ModelError(f"{path}: is damaged, or not a checkpoint ({reason})")
    foreign = [name for name in names if not PARTS_OF_TENSORS.fullmatch(name)]
    if not foreign:
        return ModelError(f"{path}: is damaged, or a pickle that torch.save did not write")
    dangerous = [name for name in foreign if DANGEROUS.fullmatch(name)]
    if dangerous:
        return ModelError(
            f"{path}: contains code that runs when the file is loaded ({_list(dangerous)}), which no checkpoint needs. "
            "It was not run. Do not load this file with other tools."
        )
    found = find_state_dicts(
        content, lambda it: isinstance(it, NotMade) and REBUILT_TENSOR.fullmatch(it.name) is not None
    )
    if found:
        return _conversion(path, found[0], foreign)
    if any(name.startswith("ultralytics.") for name in foreign):
        return ModelError(
            f"{path}: contains a pickled ultralytics model, and reading it would run code. If you trust the file, give "
            f"--model FILE.py:build, with `def build(): return ultralytics.YOLO({str(path)!r}).model`, and no --weights."
        )
    values = list(content.values()) if isinstance(content, dict) else [content]
    states = [value.state for value in values if isinstance(value, NotMade)]
    is_model = any(isinstance(state, dict) and {"_parameters", "_modules"} <= set(state) for state in states)
    what = "a whole pickled model" if is_model else "pickled objects instead of plain weights"
    return ModelError(
        f"{path}: contains {what} ({_list(foreign)}), and reading it would run code. Save only the weights, "
        f"in the environment where the file was made: torch.save(model.state_dict(), 'weights.pth'). {FACTORY}"
    )


def _outline(path: Path) -> tuple[object, Sequence[str]]:
    with io.BytesIO(_read_contents(path)[0]) if is_zip(path) else path.open("rb") as file:
        outline = Outline(file)
        content = outline.load()
        if content == TORCH_MAGIC:
            content = [outline.load() for _ in range(3)][-1]
    return content, list(outline.names)


def _read_contents(path: Path) -> Sequence[bytes]:
    """The pickles in a zip: one, if torch.save wrote it. Raises `ExcessError` for one that unpacks to too much."""
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > UNPACKED * path.stat().st_size + MOST_BYTES:
            raise ExcessError("it unpacks to far more than its file size")
        # The case of names does not count for torch.load.
        return [archive.read(each) for each in archive.infolist() if each.filename.lower().endswith("/data.pkl")]


def _conversion(path: Path, found: StateDict, foreign: Sequence[str]) -> ModelError:
    loaded = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    loaded += "".join(f"[{key!r}]" for key in found.keys)
    weights = f"dict((k, v) for k, v in {loaded}.items() if isinstance(v, torch.Tensor))"
    code = f"import torch; torch.save({weights}, {str(path.with_name(f'{path.stem}-weights.pth'))!r})"
    # Easier to read in double quotes, where a shell leaves it alone in them.
    command = shlex.join(["python", "-c", code]) if re.search(r'["$`\\!]', code) else f'python -c "{code}"'
    return ModelError(
        f"{path}: besides plain weights, the file contains objects that run code when they are read "
        f"({_list(foreign)}). {FACTORY} If you trust the file, you can also convert it. This command runs that code:",
        command,
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class NotMade:
    """Stands for an object that the pickle would make. It keeps what it was given, and does nothing."""

    name: ClassVar[str]
    state: Any = None

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state

    def _ignore(self, *values: object) -> None: ...

    __setitem__ = append = extend = _ignore


class OrderedNames(dict[Any, Any]):
    """Stands for an OrderedDict, which state dicts are."""

    def __setstate__(self, state: object) -> None: ...


class Outline(pickle._Unpickler):
    """Reads a pickle with nothing but dictionaries, lists and values: a `NotMade` stands for each class and function."""

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


@dataclass(slots=True, eq=False)
class _Size:
    """What an object would be: how many values, those inside of its parts counted with each part, and how deep they lie."""

    largest: int = 0  # of the numbers in it
    name: str = ""  # of a class or function
    values: int = 1
    depth: int = 1


def check_pickles(path: Path) -> None:
    """Go through the pickles of a checkpoint as `torch.load` reads it, and make nothing: ten tuples of ten times the
    one before are a hundred bytes, and ten billion values for whoever compares or prints them. Raises `ModelError` for
    a file that asks for more than any training does, and anything for a broken one."""
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
        raise ModelError(f"{path}: was not read, because it exceeds the limits for model weights ({error}).") from None


def is_zip(path: Path) -> bool:
    """Whether `torch.load` takes it for a zip file."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def _check_pickle(file: IO[bytes]) -> object:
    walk, last = _Walk(), None
    for step, (code, argument, _) in enumerate(pickletools.genops(file)):
        if step >= MOST_STEPS:
            raise ExcessError(f"it has more than {MOST_STEPS} pickle instructions")
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
            stack.extend(whole for _ in code.stack_after)
            for part in parts:
                self._values += part.values
                whole.values += part.values
                whole.depth = max(whole.depth, part.depth + 1)
                whole.largest = max(whole.largest, part.largest)
            if self._values > MOST_VALUES or whole.depth > DEEPEST:
                raise ExcessError(f"it contains more than {MOST_VALUES} values, or is nested deeper than {DEEPEST}")
        else:  # the length of a frame is no value
            largest, called = argument if isinstance(argument, int) else 0, argument if name == "GLOBAL" else ""
            stack.extend(_Size(largest, called) for _ in code.stack_after)

    def _take(self, code: pickletools.OpcodeInfo) -> list[_Size]:
        parts = []
        for kind in reversed(code.stack_before):
            if kind is pickletools.stackslice:
                while (part := self._stack.pop()) is not None:
                    parts.append(part)
            elif kind is not pickletools.markobject and (part := self._stack.pop()) is not None:
                parts.append(part)
        return parts
