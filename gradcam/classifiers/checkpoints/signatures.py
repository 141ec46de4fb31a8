"""Files that are no checkpoints, told by their first bytes, with what to do about each."""

from __future__ import annotations

import codecs
import struct
import zipfile
from pathlib import Path

PEEK = 512
OF_PYTORCH = (".pt", ".pth", ".ts", ".torchscript", ".bin", ".ckpt")  # suffixes of files that may be something else
EXPORTED = "which PyTorch does not load: save the state dict of the PyTorch model that it was made from"
# What files of these suffixes are, whatever is in them.
OTHERS = {
    ".onnx": "an ONNX model",
    ".h5": "an HDF5 file, as Keras writes",
    ".keras": "a Keras model",
    ".pb": "a TensorFlow graph",
    ".tflite": "a TensorFlow Lite model",
    ".engine": "a TensorRT engine",
    ".trt": "a TensorRT engine",
    ".mlmodel": "a Core ML model",
    ".mlpackage": "a Core ML model",
    ".pte": "an ExecuTorch program",
}
# (offset, bytes, what the file is)
SIGNATURES = (
    (
        0,
        b"version https://git-lfs",
        "is a git-LFS pointer, not the file itself: fetch that with 'git lfs pull', or download it",
    ),
    (0, b"\x89HDF\r\n\x1a\n", f"is an HDF5 file, as Keras writes, {EXPORTED}"),
    (0, b"\x93NUMPY", "is a NumPy array, expected a checkpoint"),
    (0, b"GGUF", "is a GGUF file, which PyTorch does not load"),
    (4, b"TFL3", f"is a TensorFlow Lite model, {EXPORTED}"),
    (0, b"\x1f\x8b", "is compressed with gzip: unpack it first"),
    (0, b"7z\xbc\xaf", "is a 7z archive: unpack it first"),
    (
        257,
        b"ustar",
        "is a tar archive, as torch.save wrote before 2017 or as people pack files: unpack it, or save it anew",
    ),
    (0, b"<!DOCTYPE", "is a web page, not what was to be downloaded from it"),
    (0, b"<!doctype", "is a web page, not what was to be downloaded from it"),
    (0, b"<html", "is a web page, not what was to be downloaded from it"),
)


def is_safetensors(head: bytes) -> bool:
    """Whether the file begins as those of safetensors do: with eight bytes of length, not a large one, and JSON."""
    return head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < 1 << 32


def is_pickle(head: bytes) -> bool:
    """Whether the file begins as a pickle does, of protocol 2 or later: torch.save's format before zip files."""
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


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
    return None if is_safetensors(head) or is_pickle(head) else _describe_bytes(head)


def describe_other_model(path: Path) -> str | None:
    """Why a file, named in place of a model, cannot be explained, and what can; None where it may be a checkpoint."""
    suffix = path.suffix.lower()
    if suffix in OTHERS:
        return (
            f"is {OTHERS[suffix]}, which cannot be explained: gradients need a PyTorch model. Name that, "
            "and its state dict with --weights"
        )
    if suffix == ".pt2":
        return (
            "is an exported program. Give FILE.py:build, where "
            f"`def build(): return torch.export.unflatten(torch.export.load({str(path)!r}))`"
        )
    if suffix == ".pt" and "yolo" in path.stem.lower():
        return (
            "is a model of ultralytics, as a rule. Give FILE.py:build, where "
            f"`def build(): return ultralytics.YOLO({str(path)!r}).model`"
        )
    if suffix in OF_PYTORCH and path.is_file():
        with path.open("rb") as file:
            return describe_stranger(file.read(PEEK), path)
    return None


def _describe_zip(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return "is damaged or cut off: it begins as torch.save's files do, and its end is missing"
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    if "constants.pkl" in names:
        return (
            "is a TorchScript archive (torch.jit.save), whose layers cannot be looked into. Save the weights in it with "
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pth'), which needs trust in where it comes from"
        )
    if any(name.startswith("models/") for name in names):
        return (
            "is an exported program (torch.export.save). Save the weights in it with "
            "torch.save(torch.export.load(path).state_dict, 'weights.pth')"
        )
    return None if "data.pkl" in names else "is a zip file that torch.save did not write: unpack it first"


def _describe_bytes(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "is empty" if not head else "holds nothing but zeros where a checkpoint begins: it is damaged"
    return (
        f"is {'text' if _is_text(head) else 'of no known format'}, expected a checkpoint of safetensors or torch.save"
    )


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # of what may end within a character
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)
