"""Read the weights in a file without running code in it, and explain why a file cannot be read."""

from __future__ import annotations

import codecs
import io
import os
import pickle
import pickletools
import re
import shlex
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from gradcam.errors import ModelError, join_names, shorten
from gradcam.images.files import hash_file, open_file

# Keys of averaged weights. Averages have priority, as in timm, because such models are evaluated with their averages.
AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema", "ema_model")
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net", "module", "network", "weights", "params")
KNOWN_KEYS = AVERAGES + STATE_DICT_KEYS
MAX_KEY_DEPTH = 3
# Before zip files, torch.save wrote several pickles. The first is this number, and the fourth is the content.
TORCH_MAGIC = 0x1950A86A20F9469CFC6C
TENSOR_NAMES = re.compile(r"torch\.(_utils|_tensor|storage)\.\w+|torch\.\w+|collections\.OrderedDict")
REBUILT_TENSOR = re.compile(r"torch\._(utils|tensor)\._rebuild_\w+")
# No checkpoint needs these modules and functions. If a file names one of them, the error message warns of the file.
# `commands` and `__builtin__` are the names of `subprocess` and `builtins` in older protocols.
DANGEROUS = re.compile(
    r"(os|posix|nt|subprocess|sys|runpy|importlib|shutil|socket|pty|ctypes|webbrowser|pdb|timeit|_posixsubprocess"
    r"|multiprocessing|asyncio|commands)\..*|(builtins|__builtin__|_?io)\.(eval|exec|execfile|compile|open|__import__)"
)
MAX_LISTED_NAMES = 4
# Limits for pickles. For comparison, ResNet-152 with its optimizer has 76,000 instructions (steps). A step takes one or
# two microseconds.
MAX_PICKLE_STEPS = 1_000_000
MAX_VALUES = 20_000_000  # A value that occurs several times is counted several times.
MAX_NESTING = 200
# Pickle instructions that change an existing object.
MUTATING_STEPS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
BYTEARRAYS = ("builtins bytearray", "__builtin__ bytearray")  # torch.load creates bytearrays of any length
MAX_UNPACK_RATIO = 4  # unpacked size / file size; torch.save does not compress
MAX_BYTES = 2**26  # maximum size of a bytearray; an unpacked file may exceed MAX_UNPACK_RATIO by this size
FACTORY_HINT = "To load the file with your own function, give --model FILE.py:FUNCTION."
HEADER_BYTES = 512
# Suffixes that checkpoints share with other kinds of files.
PYTORCH_SUFFIXES = (".pt", ".pth", ".ts", ".torchscript", ".bin", ".ckpt")
EXPORT_HINT = "which PyTorch does not load: save the state dict of the original PyTorch model"
# Descriptions of files by their suffixes, regardless of their content.
OTHER_FORMATS = {
    ".onnx": "an ONNX model",
    ".h5": "an HDF5 file (Keras)",
    ".keras": "a Keras model",
    ".pb": "a TensorFlow graph",
    ".tflite": "a TensorFlow Lite model",
    **dict.fromkeys((".engine", ".trt"), "a TensorRT engine"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), "a Core ML model"),
    ".pte": "an ExecuTorch program",
}
LFS_HINT = "is a git-LFS pointer, not the file itself: run 'git lfs pull', or download the file"
TAR_HINT = "is a tar archive (torch.save wrote these before 2017): unpack it, or save the weights again with torch.save"
TORCHSCRIPT_HINT = (
    "is a TorchScript archive (torch.jit.save), whose layers cannot be inspected. If you trust the file, save its "
    "weights with torch.save(torch.jit.load(path).state_dict(), 'weights.pth')"
)
EXPORTED_PROGRAM_HINT = (
    "is an exported program (torch.export.save). Save its weights with "
    "torch.save(torch.export.load(path).state_dict, 'weights.pth')"
)
WEB_PAGE_HINT = "is a web page, not a checkpoint: download the file itself"
# (offset, bytes, description)
SIGNATURES = (
    (0, b"version https://git-lfs", LFS_HINT),
    (0, b"\x89HDF\r\n\x1a\n", f"is an HDF5 file (Keras), {EXPORT_HINT}"),
    (0, b"\x93NUMPY", "is a NumPy array, expected a checkpoint"),
    (0, b"GGUF", "is a GGUF file, which PyTorch does not load"),
    (4, b"TFL3", f"is a TensorFlow Lite model, {EXPORT_HINT}"),
    (0, b"\x1f\x8b", "is compressed with gzip: unpack it first"),
    (0, b"7z\xbc\xaf", "is a 7z archive: unpack it first"),
    (257, b"ustar", TAR_HINT),
    *((0, start, WEB_PAGE_HINT) for start in (b"<!DOCTYPE", b"<!doctype", b"<html")),
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The weights in a file by name, on the CPU. If the file has several state dicts, `notes` report the choice."""

    path: Path
    tensors: dict[str, Tensor] = field(repr=False)
    notes: Sequence[str] = ()


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the weights in a safetensors or torch.save file, whatever its suffix, without executing code in it.

    Raises `ModelError` if the file is missing, damaged or not a checkpoint, would run code, or has no weights.
    """
    path = Path(path)
    try:
        head = b""
        if not (path.is_dir() and path.suffix.lower() in OTHER_FORMATS):
            with open_file(path) as file:
                head = file.read(HEADER_BYTES)
        if problem := describe_non_checkpoint(head, path):
            raise ModelError(f"{path}: {problem}.")
        if is_safetensors(head):
            tensors = load_file(path)  # safetensors files contain only named tensors.
            return Checkpoint(path, tensors) if tensors else _choose(path, tensors)
        check_pickles(path)
        with path.open("rb") as file, warnings.catch_warnings():  # Given a path, torch.load would check the suffix.
            warnings.simplefilter("ignore")  # warnings about old storage formats
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
        # On broken files, readers raise RuntimeError, EOFError, IndexError, BadZipFile, zlib.error and other types.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "magic number" in reason:  # torch.save did not write this pickle.
            raise explain_refusal(path) from None
        raise ModelError(f"{path}: is damaged or cut off ({reason})") from error
    return _choose(path, content)


def hash_weights(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, cached until the file changes; raise `OSError` on failure."""
    status = path.stat()
    return _hash(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=4)
def _hash(path: Path, *state: int) -> str:
    return hash_file(path)


def _choose(path: Path, content: object) -> Checkpoint:
    state_dicts = find_state_dicts(content, lambda value: isinstance(value, Tensor))
    if not state_dicts:
        keys = ", ".join(map(shorten, list(content)[:5])) if isinstance(content, dict) else ""
        description = f"a dictionary of {keys}" if keys else shorten(content)
        raise ModelError(f"{path}: contains {description}, expected a state dict of named weights. {FACTORY_HINT}")
    best, *ignored = state_dicts
    if ignored and not best.is_known:
        names = join_names(state_dict.name for state_dict in state_dicts)
        raise ModelError(f"{path}: contains several state dicts, {names}, but none has a standard name. {FACTORY_HINT}")
    tensors = {name: value.detach() for name, value in best.values.items() if isinstance(value, Tensor)}
    if unusable := [name for name, t in tensors.items() if t.is_meta or t.is_quantized or t.is_sparse]:
        description = f"'{unusable[0]}' is quantised, sparse or without values, expected plain tensors"
        raise ModelError(f"{path}: {description}. {FACTORY_HINT}")
    storages = [tensor.untyped_storage() for tensor in tensors.values()]
    stored_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    # A tensor may be an expanded view of a few stored values, whose contiguous copy would fill the memory.
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_UNPACK_RATIO * stored_bytes + MAX_BYTES:
        name, largest = max(tensors.items(), key=lambda item: item[1].nbytes)
        problem = f"'{name}' declares a shape of {' x '.join(map(str, largest.shape))}"
        raise ModelError(f"{path}: {problem}, but the file contains only {stored_bytes} bytes of values.")
    names = join_names(state_dict.name for state_dict in ignored)
    note = f"The file has several state dicts: '{best.name}' was loaded, and {names} ignored."
    return Checkpoint(path, tensors, [note] if ignored else ())


@dataclass(frozen=True)
class StateDict:
    """Weights by name, and the path of keys to the weights in the file; an empty path if the file is a state dict."""

    keys: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return ".".join(self.keys)

    @property
    def is_known(self) -> bool:
        return all(key in KNOWN_KEYS for key in self.keys)


def find_state_dicts(content: object, is_tensor: Callable[[object], bool]) -> Sequence[StateDict]:
    """Return the state dicts in a file's content: first averages, then other common keys, then unknown keys."""
    order = {key: rank for rank, key in enumerate(KNOWN_KEYS)}
    state_dicts = list(_search_state_dicts(content, is_tensor, MAX_KEY_DEPTH))
    state_dicts.sort(key=lambda state_dict: [order.get(key, len(order)) for key in state_dict.keys])
    if not any(state_dict.is_known for state_dict in state_dicts) and is_state_dict(content, is_tensor):
        return [StateDict((), content)]  # type: ignore[arg-type]  # a mapping, as checked by is_state_dict
    return state_dicts


def is_state_dict(content: object, is_tensor: Callable[[object], bool]) -> bool:
    """Return whether the content is a mapping from names to values, and most values are tensors."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return False
    return 2 * sum(is_tensor(value) for value in content.values()) > len(content)


def _search_state_dicts(content: object, is_tensor: Callable[[object], bool], depth: int) -> Iterator[StateDict]:
    if not isinstance(content, Mapping) or depth == 0:
        return
    for name, value in content.items():
        if is_state_dict(value, is_tensor) and isinstance(name, str):
            yield StateDict((name,), value)
        elif name in KNOWN_KEYS:
            for state_dict in _search_state_dicts(value, is_tensor, depth - 1):
                yield StateDict((name, *state_dict.keys), state_dict.values)


def is_safetensors(head: bytes) -> bool:
    """Return whether a file begins like safetensors: eight bytes with a length below 4 GiB, and then JSON."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32


def describe_non_checkpoint(head: bytes, path: Path) -> str | None:
    """Return why a file is certainly not a checkpoint, with advice; None if the file may be a checkpoint."""
    for offset, signature, description in SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return description
    other_format = OTHER_FORMATS.get(path.suffix.lower())
    if other_format or (head[:1] == b"\x08" and b"pytorch" in head[:40]):
        return f"is {other_format or OTHER_FORMATS['.onnx']}, {EXPORT_HINT}"
    if head[:2] == b"PK":
        return _describe_zip(path)
    # In the older format, torch.save writes pickles of protocol 2 or later.
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return None if is_safetensors(head) or is_pickle else _describe_bytes(head)


def describe_unsupported_model(path: Path) -> str | None:
    """Return why a file given as the model cannot be explained, with advice; None if the file may be a checkpoint."""
    suffix, advice = path.suffix.lower(), "Give FILE.py:build, with `def build(): return"
    if suffix in OTHER_FORMATS:
        hint = "gradients need a PyTorch model. Give a PyTorch model, and its state dict with --weights"
        return f"is {OTHER_FORMATS[suffix]}, which cannot be explained: {hint}"
    if suffix == ".pt2":
        return f"is an exported program. {advice} torch.export.unflatten(torch.export.load({str(path)!r}))`"
    if suffix == ".pt" and "yolo" in path.stem.lower():
        return f"looks like an ultralytics model. {advice} ultralytics.YOLO({str(path)!r}).model`"
    if suffix in PYTORCH_SUFFIXES and path.is_file():
        with path.open("rb") as file:
            return describe_non_checkpoint(file.read(HEADER_BYTES), path)
    return None


def _describe_zip(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return "is damaged or cut off: the end of the torch.save file is missing"
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    if "constants.pkl" in names:
        return TORCHSCRIPT_HINT
    if any(name.startswith("models/") for name in names):
        return EXPORTED_PROGRAM_HINT
    return None if "data.pkl" in names else "is a zip file that torch.save did not write: unpack it first"


def _describe_bytes(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "is empty" if not head else "is damaged: it begins with zeros, not with a checkpoint's header"
    try:
        # Use an incremental decoder, because `head` may end within a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        text = "\0"
    is_text = all(character.isprintable() or character.isspace() for character in text)
    kind = "a text file" if is_text else "in an unknown format"
    return f"is {kind}, expected a checkpoint written by safetensors or torch.save"


def explain_refusal(path: Path) -> ModelError:
    """Return the error for a file that `torch.load(weights_only=True)` refused. Nothing in the file is executed."""
    try:
        content, names = _read_outline(path)
    except Exception as error:  # Broken pickles raise errors of any type.
        reason = " ".join(str(error).split()) or type(error).__name__
        return ModelError(f"{path}: is damaged, or not a checkpoint ({reason})")
    foreign = [name for name in names if not TENSOR_NAMES.fullmatch(name)]
    if not foreign:
        return ModelError(f"{path}: is damaged, or a pickle that torch.save did not write")
    if dangerous := [name for name in foreign if DANGEROUS.fullmatch(name)]:
        problem = f"contains code that runs when the file is loaded ({_list_names(dangerous)})"
        advice = "This code was not run. Do not load this file with other tools."
        return ModelError(f"{path}: {problem}, which no checkpoint needs. {advice}")
    if state_dicts := find_state_dicts(content, _is_tensor_stub):
        return _suggest_conversion(path, state_dicts[0], foreign)
    if any(name.startswith("ultralytics.") for name in foreign):
        problem = "contains a pickled ultralytics model, and reading it would run code"
        function = f"`def build(): return ultralytics.YOLO({str(path)!r}).model`"
        advice = f"If you trust the file, give --model FILE.py:build, with {function}, and no --weights."
        return ModelError(f"{path}: {problem}. {advice}")
    values = list(content.values()) if isinstance(content, dict) else [content]
    states = [value.state for value in values if isinstance(value, ObjectStub)]
    is_model = any(isinstance(state, dict) and {"_parameters", "_modules"} <= set(state) for state in states)
    description = "a whole pickled model" if is_model else "pickled objects instead of plain weights"
    problem = f"contains {description} ({_list_names(foreign)}), and reading it would run code"
    advice = "Save only the weights, in the environment where the file was made"
    return ModelError(f"{path}: {problem}. {advice}: torch.save(model.state_dict(), 'weights.pth'). {FACTORY_HINT}")


def _is_tensor_stub(value: object) -> bool:
    return isinstance(value, ObjectStub) and REBUILT_TENSOR.fullmatch(value.name) is not None


def _read_outline(path: Path) -> tuple[object, Sequence[str]]:
    with io.BytesIO(_read_contents(path)[0]) if is_zip(path) else path.open("rb") as file:
        outline = Outline(file)
        content = outline.load()
        if content == TORCH_MAGIC:
            content = [outline.load() for _ in range(3)][-1]
    return content, list(outline.names)


def _read_contents(path: Path) -> Sequence[bytes]:
    """Return the pickles in a zip file. Raise `ExcessError` if the content is too large."""
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_UNPACK_RATIO * path.stat().st_size + MAX_BYTES:
            raise ExcessError("it unpacks to far more than its file size")
        # Compare in lower case, because torch.load ignores the case of names.
        return [archive.read(member) for member in archive.infolist() if member.filename.lower().endswith("/data.pkl")]


def _suggest_conversion(path: Path, state_dict: StateDict, foreign: Sequence[str]) -> ModelError:
    expression = f"torch.load({str(path)!r}, map_location='cpu', weights_only=False)"
    expression += "".join(f"[{key!r}]" for key in state_dict.keys)
    weights = f"dict((k, v) for k, v in {expression}.items() if isinstance(v, torch.Tensor))"
    code = f"import torch; torch.save({weights}, {str(path.with_name(f'{path.stem}-weights.pth'))!r})"
    # Use double quotes, which are easier to read, unless the command line would expand characters inside them.
    command = shlex.join(["python", "-c", code]) if re.search(r'["$`\\!]', code) else f'python -c "{code}"'
    problem = "besides plain weights, the file contains objects that run code when they are read"
    advice = "If you trust the file, you can also convert it. This command runs that code:"
    return ModelError(f"{path}: {problem} ({_list_names(foreign)}). {FACTORY_HINT} {advice}", command)


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more


class ObjectStub:
    """A stub that replaces an object in the pickle: it stores the object's pickled state, and runs no code."""

    name: ClassVar[str]
    state: Any = None

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, *values: object) -> None: ...

    __setitem__ = extend = append


class OrderedDictStub(dict[Any, Any]):
    """A stub for an OrderedDict, the type of state dicts."""

    def __setstate__(self, state: object) -> None: ...


class Outline(pickle._Unpickler):
    """An unpickler that creates only dictionaries, lists and values. Stubs replace classes and functions."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.names: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        self.names[full] = None
        return OrderedDictStub if full == "collections.OrderedDict" else type("NotMade", (ObjectStub,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        """Return None for a tensor's values. Old files store a module's class and source: return the class."""
        return pid[1] if isinstance(pid, tuple) and pid[:1] == ("module",) else None

    def get_extension(self, code: int) -> None:  # The meaning of a code depends on this process.
        raise pickle.UnpicklingError(f"extension {code}")


class ExcessError(Exception):
    """The error for a file that exceeds a limit; the message names the limit."""


@dataclass(slots=True, eq=False)
class _ObjectSize:
    """The size of a pickled object: its nesting depth, and its number of values, including repeated values."""

    largest: int = 0  # largest integer in the object
    name: str = ""  # name of a class or function
    values: int = 1
    depth: int = 1


def check_pickles(path: Path) -> None:
    """Check the pickles of a checkpoint against limits, without creating any object.

    A small pickle can define a huge object. For example, ten nested tuples, each with ten references to the previous
    tuple, take a hundred bytes in a file, but a comparison or a print processes ten billion values. Raises
    `ModelError` if a limit is exceeded. For a damaged file, any exception may be raised.
    """
    try:
        if is_zip(path):
            for content in _read_contents(path):
                _check_pickle(io.BytesIO(content))
        elif tarfile.is_tarfile(path):  # the format before 2017; torch.load would unpack the archive
            raise ExcessError("it is a tar archive")
        else:
            with path.open("rb") as file:
                # Four pickles follow the magic number: the version, the machine, the content and the storage keys.
                for _ in range(4 if _check_pickle(file) == TORCH_MAGIC else 0):
                    _check_pickle(file)
    except ExcessError as error:
        raise ModelError(f"{path}: was not read, because it exceeds the limits for model weights ({error}).") from None


def is_zip(path: Path) -> bool:
    """Return whether `torch.load` treats the file as a zip file."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def _check_pickle(file: IO[bytes]) -> object:
    walk, last = _PickleSizer(), None
    for step, (code, argument, _) in enumerate(pickletools.genops(file)):
        if step >= MAX_PICKLE_STEPS:
            raise ExcessError(f"it has more than {MAX_PICKLE_STEPS} pickle instructions")
        last = last if argument is None else argument
        walk.execute(code, argument)
    return last


class _PickleSizer:
    """An unpickler whose stack and memo contain sizes instead of objects. On the stack, None is a mark."""

    def __init__(self) -> None:
        self._stack: list[_ObjectSize | None] = []
        self._memo: dict[int, _ObjectSize] = {}
        self._values = 0

    def execute(self, code: pickletools.OpcodeInfo, argument: Any) -> None:
        """Process one pickle instruction; raise `ExcessError` if an object or all objects exceed the limits."""
        name, stack = code.name, self._stack
        if name == "MARK":
            stack.append(None)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1] or _ObjectSize()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        elif code.stack_before:
            parts = self._pop_parts(code)
            if name == "REDUCE" and parts[-1].name in BYTEARRAYS and parts[0].largest > MAX_BYTES:
                raise ExcessError(f"it has an array of {parts[0].largest} bytes")
            result = parts.pop() if name in MUTATING_STEPS and parts else _ObjectSize()
            stack.extend(result for _ in code.stack_after)
            for part in parts:
                self._values += part.values
                result.values += part.values
                result.depth = max(result.depth, part.depth + 1)
                result.largest = max(result.largest, part.largest)
            if self._values > MAX_VALUES or result.depth > MAX_NESTING:
                raise ExcessError(f"it contains more than {MAX_VALUES} values, or is nested deeper than {MAX_NESTING}")
        else:  # The instruction pushes objects (or, for FRAME, nothing).
            largest, class_name = argument if isinstance(argument, int) else 0, argument if name == "GLOBAL" else ""
            stack.extend(_ObjectSize(largest, class_name) for _ in code.stack_after)

    def _pop_parts(self, code: pickletools.OpcodeInfo) -> list[_ObjectSize]:
        parts = []
        for kind in reversed(code.stack_before):
            if kind is pickletools.stackslice:
                while (part := self._stack.pop()) is not None:
                    parts.append(part)
            elif kind is not pickletools.markobject and (part := self._stack.pop()) is not None:
                parts.append(part)
        return parts
