"""Test checkpoints as training scripts write them, read without running code, and files that are no checkpoints."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import pathlib
import pickle
import shlex
import struct
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from gradcam.errors import ModelError
from gradcam.models.checkpoints.read import Outline, read_checkpoint

Weights = dict[str, Tensor]


@pytest.fixture
def weights() -> Weights:
    generator = torch.Generator().manual_seed(5)
    shapes = {"body.weight": (4, 3, 3, 3), "body.bias": (4,), "fc.weight": (5, 4), "fc.bias": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def have_same_tensors(ours: Weights, theirs: Weights) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def save(weights: Weights, path: Path, kind: str) -> Path:
    if kind == "safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def refuse(path: Path) -> str:
    """Return the message that refuses the file, without the path at its beginning."""
    with pytest.raises(ModelError) as caught:
        read_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


class Plan:
    """A class from a user's training script."""

    def __init__(self) -> None:
        self.rate = 0.1


class Trap:
    """An object that runs a command when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


LAYOUTS: dict[str, Callable[[Weights], Any]] = {
    "bare": lambda w: w,
    "ordered": collections.OrderedDict,
    "state_dict": lambda w: {"epoch": 3, "state_dict": w, "optimizer": {"state": {0: {"step": torch.ones(1)}}}},
    "model": lambda w: {"model": w, "args": {"lr": 0.1}, "scaler": None},
    "model_state_dict": lambda w: {"model_state_dict": w, "loss": torch.tensor(0.5)},
    "net": lambda w: {"net": w, "acc": 93.1, "epoch": 7},
    "nested": lambda w: {"model": {"state_dict": w, "name": "small"}},
    "unusual": lambda w: {"epoch": 3, "classifier_weights": w},
    "lightning": lambda w: {
        "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.4.0", "state_dict": collections.OrderedDict(w),
        "loops": {}, "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.9)}}, "optimizer_states": [{}],
        "lr_schedulers": [], "hparams_name": "kwargs", "hyper_parameters": {"lr": 0.1},
    },
    "parameters": lambda w: {"state_dict": {name: nn.Parameter(tensor) for name, tensor in w.items()}},
    "with other values": lambda w: {**w, "version": 3, "name": "small"},
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["pth", "pt", "ckpt", "bin", "pth.tar", "safetensors"])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_the_suffix_of_a_file_of_torch_does_not_matter(
    tmp_path: Path, weights: Weights, suffix: str, is_zip: bool
) -> None:
    path = tmp_path / f"weights.{suffix}"
    torch.save({"state_dict": weights}, path, _use_new_zipfile_serialization=is_zip)
    checkpoint = read_checkpoint(str(path))
    assert have_same_tensors(checkpoint.tensors, weights)
    assert (checkpoint.path, list(checkpoint.notes)) == (path, [])


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt"])
def test_the_suffix_of_safetensors_does_not_matter(tmp_path: Path, weights: Weights, suffix: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    tensors = read_checkpoint(path).tensors
    assert have_same_tensors(dict(sorted(tensors.items())), dict(sorted(weights.items())))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_are_read_from_the_layouts_of_training_libraries(
    tmp_path: Path, weights: Weights, layout: Callable[[Weights], Any]
) -> None:
    torch.save(layout(weights), tmp_path / "run.ckpt")
    checkpoint = read_checkpoint(tmp_path / "run.ckpt")
    assert have_same_tensors(checkpoint.tensors, weights)
    assert not any(tensor.requires_grad for tensor in checkpoint.tensors.values())
    assert list(checkpoint.notes) == []


@pytest.mark.parametrize("average", ["state_dict_ema", "model_ema", "ema", "ema_state_dict"])
@pytest.mark.parametrize("plain", ["state_dict", "model", "net"])
def test_averaged_weights_are_preferred_and_a_note_says_so(
    tmp_path: Path, weights: Weights, average: str, plain: str
) -> None:
    other_weights = {name: tensor + 1 for name, tensor in weights.items()}
    torch.save({plain: other_weights, average: weights}, tmp_path / "run.pt")
    checkpoint = read_checkpoint(tmp_path / "run.pt")
    assert have_same_tensors(checkpoint.tensors, weights)
    (note,) = checkpoint.notes
    assert note == f"The file has several state dicts: '{average}' was loaded, and '{plain}' ignored."


def test_averaged_weights_may_be_nested(tmp_path: Path, weights: Weights) -> None:
    other_weights = {name: tensor + 1 for name, tensor in weights.items()}
    torch.save({"model": other_weights, "ema": {"module": weights, "updates": 100}}, tmp_path / "run.pt")
    checkpoint = read_checkpoint(tmp_path / "run.pt")
    assert have_same_tensors(checkpoint.tensors, weights)
    assert list(checkpoint.notes) == ["The file has several state dicts: 'ema.module' was loaded, and 'model' ignored."]


def test_several_unusual_sets_of_weights_are_refused(tmp_path: Path, weights: Weights) -> None:
    torch.save({"student": weights, "teacher": weights}, tmp_path / "run.pt")
    assert refuse(tmp_path / "run.pt").startswith(
        "contains several state dicts, 'student', 'teacher', but none has a standard name"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "optimizer": {}}, "contains a dictionary of 'epoch', 'optimizer', expected a state dict"),
        ({}, "contains {}, expected a state dict"),
        (torch.ones(3), r"contains tensor([1., 1., 1.]), expected a state dict"),
        ([torch.ones(3)], "contains [tensor("),
        ({"state_dict": {"a": torch.ones(3, device="meta")}}, "'a' is quantised, sparse or without values"),
        ({"a": torch.ones(3).to_sparse()}, "'a' is quantised, sparse or without values"),
    ],
)
def test_a_file_without_plain_weights_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "run.pt")
    assert refuse(tmp_path / "run.pt").startswith(message)


# Objects that checkpoints contain besides weights: from argparse, pathlib and NumPy, and of users' classes.
EXTRA_OBJECTS = {
    "argparse.Namespace": argparse.Namespace(lr=0.1, data="x"),
    "pathlib": {"folder": pathlib.PurePosixPath("/data")},
    "numpy": {"best": np.float64(0.9)},
    "tests.models.test_checkpoints.Plan": Plan(),
}


def read_program(message: str) -> str:
    """Return the Python program in the second line of a two-line message."""
    _, line = message.splitlines()
    python, option, program = shlex.split(line)
    assert (python, option) == ("python", "-c")
    return program


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize(("name", "extra_object"), EXTRA_OBJECTS.items(), ids=EXTRA_OBJECTS)
def test_objects_beside_the_weights_are_named_with_the_line_that_converts(
    tmp_path: Path, weights: Weights, name: str, extra_object: object, is_zip: bool
) -> None:
    path = tmp_path / "it's a run.ckpt"
    content = {"epoch": 1, "state_dict": collections.OrderedDict(weights), "hyper_parameters": extra_object}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    message = refuse(path)
    assert message.startswith("besides plain weights, the file contains objects")
    assert name in message.splitlines()[0]
    assert "If you trust the file" in message
    assert "with your own function, give --model FILE.py:FUNCTION." in message
    exec(read_program(message), {})
    converted = read_checkpoint(tmp_path / "it's a run-weights.pth")
    assert have_same_tensors(converted.tensors, weights)


@pytest.mark.slow
def test_the_conversion_command_works_in_a_shell(tmp_path: Path, weights: Weights) -> None:
    torch.save({"state_dict": weights, "hyper_parameters": argparse.Namespace()}, tmp_path / "run.ckpt")
    line = refuse(tmp_path / "run.ckpt").splitlines()[1].replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(line, shell=True, check=True, timeout=300)
    assert have_same_tensors(read_checkpoint(tmp_path / "run-weights.pth").tensors, weights)


@pytest.mark.parametrize("layout", ["bare", "nested", "average"])
def test_the_conversion_command_reads_nested_weights(tmp_path: Path, weights: Weights, layout: str) -> None:
    other_weights = {name: tensor + 1 for name, tensor in weights.items()}
    contents: dict[str, Any] = {
        "bare": {**weights, "args": argparse.Namespace()},
        "nested": {"model": {"state_dict": weights}, "args": argparse.Namespace()},
        "average": {"model": other_weights, "model_ema": weights, "args": argparse.Namespace()},
    }
    torch.save(contents[layout], tmp_path / "run.pt")
    exec(read_program(refuse(tmp_path / "run.pt")), {})
    assert have_same_tensors(read_checkpoint(tmp_path / "run-weights.pth").tensors, weights)


class Small(nn.Module):
    """A model that a user pickled as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"epoch": 1, "model": m}], ids=["bare", "in a dictionary"])
def test_a_whole_pickled_model_is_refused(tmp_path: Path, wrap: Callable[[nn.Module], Any], is_zip: bool) -> None:
    torch.save(wrap(Small()), tmp_path / "whole.pt", _use_new_zipfile_serialization=is_zip)
    message = refuse(tmp_path / "whole.pt")
    assert message.startswith("contains a whole pickled model (tests.models.test_checkpoints.Small, ")
    assert "torch.save(model.state_dict(), 'weights.pth')" in message
    assert "weights_only=False" not in message


def test_weights_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"fc.weight": np.ones((3, 4))}}, tmp_path / "run.pt")
    assert refuse(tmp_path / "run.pt").startswith("contains pickled objects instead of plain weights (numpy.")


TRAPS: dict[str, Callable[[Path], Trap]] = {
    "command": lambda path: Trap(os.system, f"touch {path}"),
    "exec": lambda path: Trap(exec, f"open({str(path)!r}, 'w')"),
    "open": lambda path: Trap(open, str(path), "w"),
    "path": lambda path: Trap(Path.touch, path),
    "process": lambda path: Trap(subprocess.call, ["touch", str(path)]),
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
@pytest.mark.parametrize("place", ["bare", "beside", "inside", "old", "plain pickle", "protocol 4"])
def test_code_in_a_file_is_not_run(tmp_path: Path, weights: Weights, trap: Callable[[Path], Trap], place: str) -> None:
    sprung = trap(tmp_path / "sprung")
    content: Any = {"state_dict": weights, "callbacks": sprung}
    if place == "bare":
        content = sprung
    if place == "inside":
        content = {"state_dict": {**weights, "fc.scale": sprung}}
    path = tmp_path / "trap.pt"
    if place == "plain pickle":
        path.write_bytes(pickle.dumps(sprung))
    elif place == "protocol 4":
        torch.save(content, path, pickle_protocol=4)
    else:
        torch.save(content, path, _use_new_zipfile_serialization=place != "old")
    message = refuse(path)
    assert not (tmp_path / "sprung").exists()
    if trap is not TRAPS["path"]:
        assert "contains code that runs when the file is loaded" in message
        assert "weights_only=False" not in message


def test_an_outline_creates_no_objects(tmp_path: Path) -> None:
    """An outline holds only this package's classes; the objects of the standard unpickler are not created."""
    trap = {"a": Trap(os.system, f"touch {tmp_path / 'sprung'}"), "b": Plan(), "c": collections.OrderedDict(x=1)}
    for protocol in range(6):
        outline = Outline(io.BytesIO(pickle.dumps(trap, protocol=protocol)))
        content = outline.load()
        assert {f"{os.system.__module__}.system", "collections.OrderedDict"} <= set(outline.names)
        assert {type(value).__module__ for value in content.values()} == {"gradcam.models.checkpoints.read"}
        assert content["c"] == {"x": 1}
    assert not (tmp_path / "sprung").exists()


def test_an_outline_reads_no_global_table() -> None:
    import copyreg

    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(pickle.UnpicklingError, match="extension 240"):
            Outline(io.BytesIO(b"\x80\x02\x82\xf0.")).load()
    finally:
        copyreg.remove_extension("os", "system", 240)


def save_zip(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"data")


def save_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"), io.BytesIO())


def save_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(4, 3)), str(path))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
OTHER_FILES: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "empty": ("w.pth", b"", "is empty."),
    "empty safetensors": ("w.safetensors", b"", "is empty."),
    "zeros": ("w.pth", bytes(1000), "is damaged: it begins with zeros"),
    "text": ("w.pth", b"these are no weights\n" * 50, "is a text file, expected a checkpoint written by"),
    "short text": ("w.safetensors", b"a", "is a text file"),
    "bytes": ("w.pth", bytes(range(255, 0, -1)), "is in an unknown format"),
    "LFS": ("w.pth", LFS, "is a git-LFS pointer, not the file itself: run 'git lfs pull'"),
    "LFS safetensors": ("w.safetensors", LFS, "is a git-LFS pointer"),
    "web page": ("w.pth", b"<!DOCTYPE html><html>", "is a web page"),
    "ONNX": ("w.onnx", b"\x08\x07\x12\x07pytorch\x1a\x052.4.0", "is an ONNX model, which PyTorch does not load: save"),
    "ONNX as pth": ("w.pth", b"\x08\x07\x12\x07pytorch\x1a\x052.4.0", "is an ONNX model"),
    "TensorFlow": ("saved_model.pb", b"\x08\x01\x12\x9f", "is a TensorFlow graph, which PyTorch does not load: save"),
    "TensorFlow Lite": ("w.tflite", b"\x1c\0\0\0TFL3\x14", "is a TensorFlow Lite model"),
    "Keras": ("w.h5", b"\x89HDF\r\n\x1a\n" + bytes(90), "is an HDF5 file (Keras)"),
    "NumPy": ("w.npy", b"\x93NUMPY\x01\0v\0", "is a NumPy array"),
    "NumPy archive": ("w.npz", lambda path: np.savez(path, a=np.ones(3)), "is a zip file that torch.save did not write"),
    "zip": ("w.zip", lambda path: save_zip(path, "weights/model.pth"), "is a zip file that torch.save did not write"),
    "tar": ("w.pth.tar", save_tar, "is a tar archive"),
    "gzip": ("w.pth.gz", b"\x1f\x8b\x08\0", "is compressed with gzip"),
    "TorchScript": ("w.pt", save_script, "is a TorchScript archive (torch.jit.save), whose layers"),
    "plain pickle": ("w.pkl", pickle.dumps({"a": 1}), "is damaged, or a pickle that torch.save did not write"),
    "broken pickle": ("w.pkl", b"\x80\x02}q", "is damaged"),
    "cut header": ("w.safetensors", b"\xff\0\0\0\0\0\0\0{\"a\":{", "is damaged or cut off"),
    "wrong header": ("w.safetensors", b"\x09\0\0\0\0\0\0\0{\"a\":1,}\n", "is damaged or cut off"),
    "huge header": ("w.safetensors", b"\xff" * 7 + b"\x0f{\"a\"", "is in an unknown format"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message_start"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_a_file_that_is_no_checkpoint_is_refused(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], None], message_start: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    message = refuse(path)
    assert message.startswith(message_start)
    assert "\n" not in message


def test_the_command_for_torchscript_works(tmp_path: Path) -> None:
    save_script(tmp_path / "w.pt")
    command = refuse(tmp_path / "w.pt").partition("with ")[2].rstrip(".")
    command = command.replace("path", repr(str(tmp_path / "w.pt"))).replace("weights.pth", str(tmp_path / "new.pth"))
    exec(command, {"torch": torch})
    expected = torch.jit.load(str(tmp_path / "w.pt")).state_dict()
    assert have_same_tensors(read_checkpoint(tmp_path / "new.pth").tensors, expected)


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, weights: Weights, kind: str, share: float) -> None:
    path = save(weights, tmp_path / "cut.pth", kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    message = refuse(path)
    assert "damaged" in message
    assert "\n" not in message


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    assert refuse(tmp_path) == "cannot be opened (Is a directory), expected a checkpoint"
    assert refuse(tmp_path / "no.pth") == "cannot be opened (No such file or directory), expected a checkpoint"


def test_the_forced_unsafe_mode_of_torch_changes_nothing(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state_dict": weights, "x": Trap(os.system, f"touch {tmp_path / 'sprung'}")}, tmp_path / "trap.pt")
    assert "contains code that runs" in refuse(tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def laughs(parts: str, levels: int = 12) -> bytes:
    """Return a short pickle that expands tenfold at each level, as a tuple, a list, or a dictionary's key."""
    make = b"l" if parts == "lists" else b"t"
    content = b"(" + b"K\1" * 10 + make + b"q\0"
    for level in range(1, levels):
        content += b"0(" + bytes([ord("h"), level - 1]) * 10 + make + bytes([ord("q"), level])
    return b"\x80\x02" + (b"}" + content + b"K\1s" if parts == "keys" else content) + b"."


def save_pickle(path: Path, content: bytes, kind: str) -> None:
    """Write the pickle into a checkpoint of torch.save, or as the whole file."""
    if kind == "bare":
        path.write_bytes(content)
        return
    original = io.BytesIO()
    torch.save({"a": torch.ones(3)}, original, _use_new_zipfile_serialization=kind == "zip")
    if kind == "zip":
        with zipfile.ZipFile(original) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                new.writestr(name, content if name.endswith("/data.pkl") else old.read(name))
        return
    original.seek(0)
    for _ in range(3):
        pickle.load(original)
    start = original.tell()
    path.write_bytes(original.getvalue()[:start] + content + original.getvalue()[start:])


BOMBS = {
    "tuples": laughs("tuples"),
    "keys": laughs("keys"),
    "lists": laughs("lists"),
    "deep": b"\x80\x02)" + b"\x85" * 500_000 + b".",
    "deep keys": b"\x80\x02})" + b"\x85" * 500_000 + b"K\1s.",
    "steps": b"\x80\x02" + b"]0" * 5_000_000 + b"N.",
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n\x8a\5\0\0\0\0\x08\x85R.",
    "keys again and again": b"\x80\x02" + laughs("tuples", 6)[2:-1] + b"0" + b"}h\5K\1s0" * 100_000 + b"N.",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "old", "bare"])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_small_file_that_would_become_a_large_one_is_refused_at_once(tmp_path: Path, bomb: bytes, kind: str) -> None:
    save_pickle(tmp_path / "bomb.pt", bomb, kind)
    started = time.process_time()
    assert refuse(tmp_path / "bomb.pt").startswith("was not read, because it exceeds the limits for model weights (it ")
    assert time.process_time() - started < 10


def test_a_checkpoint_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        archive.writestr("a/data/0", bytes(100_000_000))
    assert "it unpacks to far more than its file size" in refuse(tmp_path / "bomb.pt")


@pytest.mark.parametrize("names", [("a/data.pkl", "a/data.pkl"), ("b/data.pkl", "a/data.pkl"), ("a/DATA.PKL",)])
def test_no_pickle_in_a_zip_is_overlooked(tmp_path: Path, names: tuple[str, ...]) -> None:
    for bad in range(len(names)):
        with zipfile.ZipFile(tmp_path / "bomb.pt", "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two members have the same name
            archive.writestr("a/version", b"3\n")
            archive.writestr("a/data.pkl" if len(names) == 1 else "a/other", b"\x80\x02N.")
            for i, name in enumerate(names):
                archive.writestr(name, BOMBS["keys"] if i == bad else b"\x80\x02N.")
        assert "was not read, because it exceeds" in refuse(tmp_path / "bomb.pt")


def test_a_zip_behind_a_pickle_does_not_hide_it(tmp_path: Path, weights: Weights) -> None:
    torch.save(weights, tmp_path / "good.pt")
    (tmp_path / "bomb.pt").write_bytes(BOMBS["keys"] + (tmp_path / "good.pt").read_bytes())
    assert "was not read, because it exceeds" in refuse(tmp_path / "bomb.pt")


@pytest.mark.slow
def test_a_checkpoint_of_a_long_training_is_read(tmp_path: Path, weights: Weights) -> None:
    """Checkpoints of long trainings have histories, nested settings, and tensors that share their values."""
    settings: Any = 1
    for _ in range(40):
        settings = {"inner": [settings]}
    history = [(step, 0.5, {"loss": 0.1, "lr": 1e-3}) for step in range(20_000)]
    content = {"state_dict": {**weights, "tied": weights["fc.weight"]}, "history": history, "settings": settings}
    for kind in (True, False):
        torch.save(content, tmp_path / "run.pt", _use_new_zipfile_serialization=kind)
        assert have_same_tensors(read_checkpoint(tmp_path / "run.pt").tensors, content["state_dict"])


def test_a_tensor_that_repeats_a_few_values_without_an_end_is_refused(tmp_path: Path, weights: Weights) -> None:
    torch.save({**weights, "fc.weight": torch.ones(1, 512).expand(10**9, 512)}, tmp_path / "w.pt")
    assert "'fc.weight' declares a shape of 1000000000 x 512, but the file contains" in refuse(tmp_path / "w.pt")


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_a_changed_byte_is_a_line_or_changes_values_alone(tmp_path: Path, weights: Weights, kind: str) -> None:
    path = save(weights, tmp_path / "w.pth", kind)
    data, messages = path.read_bytes(), []
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        try:
            read_checkpoint(path)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert all(message.startswith(f"{path}: ") and len(message.splitlines()) <= 2 for message in messages)


SAFETENSORS = {
    "length beyond the file": (2**31, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
    "overlapping": (0, {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}),
    "no such dtype": (0, {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}),
    "another size": (0, {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4]}}),
    "behind the end": (0, {"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}),
    "overflowing": (0, {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}),
    "no shape": (0, {"a": {"dtype": "F32", "data_offsets": [0, 4]}}),
    "a number": (0, {"a": 1}),
}


@pytest.mark.parametrize(("length", "header"), SAFETENSORS.values(), ids=SAFETENSORS)
def test_a_header_of_safetensors_that_lies_is_refused(tmp_path: Path, length: int, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", length or len(text)) + text + bytes(4))
    message = refuse(tmp_path / "w.safetensors")
    assert message.startswith("is damaged or cut off (")
    assert "\n" not in message


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")
def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pt")
    assert refuse(tmp_path / "w.pt") == "cannot be opened (it is a pipe, not a file), expected a checkpoint"
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    assert "it is a device" in refuse(tmp_path / "zero.pt")


def test_a_refused_pickle_spoils_no_other(tmp_path: Path) -> None:
    """Text that a pickle grows without limit is limited for that file only."""
    (tmp_path / "bad.pth").write_bytes(b"\x80\x02X\x01\0\0\0a" + b"X\x01\0\0\0ba" * 250 + b".")
    with pytest.raises(ModelError):
        read_checkpoint(tmp_path / "bad.pth")
    torch.save({"weight": torch.ones(2)}, tmp_path / "good.pth")
    assert read_checkpoint(tmp_path / "good.pth").tensors["weight"].tolist() == [1, 1]
