"""Test `gradcam inspect features`: its file against the Python API, and its output."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torchvision
from PIL import Image

import gradcam
from gradcam.batch import features as feature_file
from gradcam.batch.features import Extractor, FeatureFile, check_feature_file
from gradcam.errors import LayerError, OutputError
from gradcam.inspection import extraction
from tests.cli.test_cli import Command, Photo, files, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

NAMES = ["chelsea.png", "macaw.png", "b/koala.png"]

MODEL = """
import torch
from torch import nn

class Turned(nn.Module):
    def forward(self, x):
        return x.flatten(2).permute(2, 0, 1)

class Tiny(nn.Sequential):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, stride=8)
        self.names = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flat = nn.Flatten()
        self.head = nn.Linear(4, 3)
        self.turned = Turned()
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        print("the model speaks")
        x = self.names(self.conv(x))
        self.turned(x)
        return self.head(self.flat(self.pool(x)))

def make():
    return Tiny()
"""


@pytest.fixture
def inspect(gradcam_command: Command) -> Command:
    """Return a function that runs `gradcam inspect features` on the CPU."""
    return lambda *arguments: gradcam_command("inspect", "features", "--device", "cpu", *arguments)


@pytest.fixture
def tiny(gradcam_command: Command, folder: Path) -> Command:
    """Return a function that runs `gradcam inspect features` with a user's model that prints, on 32 x 32 images."""
    (folder / "tiny.py").write_text(MODEL)
    return lambda *arguments: gradcam_command(
        "inspect", "features", "--model", "tiny.py:make", "--size", "32x32", *arguments
    )


@pytest.fixture
def photos(folder: Path, photo: Photo) -> Path:
    root = folder / "photos"
    for name, place in zip(["chelsea.jpg", "macaw.webp", "koala.webp"], NAMES):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.open(photo(name)).convert("RGB").reduce(4).save(root / place)
    (root / "notes.md").write_text("nothing to see")
    return root


def record_features(classifier: gradcam.Classifier, path: Path, layer: str) -> torch.Tensor:
    """Return the reference features of one image, recorded by a plain forward hook."""
    results: list[torch.Tensor] = []
    module = classifier.model.get_submodule(layer)
    handle = module.register_forward_hook(lambda module, args, output: results.append(output.clone()))
    with torch.no_grad():
        classifier.model(classifier.batch([gradcam.read_image(path)]))
    handle.remove()
    return results[0][0]


def test_an_npz_file_has_every_pictures_features_and_their_names(
    inspect: Command, folder: Path, photos: Path, classifier: gradcam.Classifier
) -> None:
    outcome = inspect("photos", "-l", "head.1", "-l", "layer4", "-o", "out/features.npz", "--batch-size", 2)
    assert (outcome.status, outcome.err) == (0, ""), outcome.err
    with np.load(folder / "out" / "features.npz", allow_pickle=False) as file:
        assert set(file) == {"head.1", "layer4", "names"}
        assert file["names"].tolist() == NAMES
        for layer in ("head.1", "layer4"):
            assert file[layer].dtype == np.float32
            for row, name in zip(file[layer], NAMES, strict=True):
                expected = record_features(classifier, photos / name, layer).numpy()
                np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)
    first, blank, *rows, file_line = outcome.out.splitlines()
    assert first.startswith("efficientnet_lite0 on cpu   3 images, 1 non-image file left out   ")
    assert rows == ["  head.1   3 x 1280 x 1 x 1   float32", "  layer4   3 x 320 x 7 x 7    float32"]
    assert (blank, file_line) == ("", "  →  out/features.npz")
    assert files(folder / "out") == ["features.npz"]


def test_a_safetensors_file_has_the_precision_and_the_model(inspect: Command, folder: Path, photos: Path) -> None:
    outcome = inspect("photos", "-l", "layer[13]", "--precision", "bf16", "-o", "f.safetensors", "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out) == {
        "schema": 1,
        "file": "f.safetensors",
        "model": "efficientnet_lite0",
        "images": 3,
        "pictures": 3,  # The old name of "images".
        "failed": 0,
        "layers": {
            "layer1": {"shape": [3, 24, 56, 56], "dtype": "bfloat16"},
            "layer3": {"shape": [3, 112, 14, 14], "dtype": "bfloat16"},
        },
    }
    classifier = gradcam.load_classifier(device="cpu", precision="bf16")
    images = classifier.batch([gradcam.read_image(photos / name) for name in NAMES])
    expected = extraction.features(classifier.model, images, ["layer1", "layer3"])
    tensors = safetensors.torch.load_file(folder / "f.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    with safetensors.safe_open(folder / "f.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about.pop("names")) == NAMES
    assert about == {"model": "efficientnet_lite0", "precision": "bf16", "gradcam": gradcam.__version__}
    assert inspect("photos", "-l", "layer[13]", "--precision", "bf16", "-o", "f.npz", "-q").out == ""
    with np.load("f.npz") as file:
        for name, tensor in expected.items():
            np.testing.assert_array_equal(file[name], tensor.float().numpy())
            assert file[name].dtype == np.float32


def test_without_a_layer_the_default_is_used(inspect: Command, photos: Path, classifier: gradcam.Classifier) -> None:
    assert inspect(photos / "chelsea.png", "-o", "f.npz").status == 0
    assert set(np.load("f.npz")) == {classifier.layer, "names"}


def test_pooled_features_are_channel_means(inspect: Command, photos: Path, classifier: gradcam.Classifier) -> None:
    layers = ("-l", "layer4", "-l", "head.1", "-l", "head")
    assert inspect(photos, *layers, "--pool", "-o", "p.npz").status == 0
    assert inspect(photos, *layers, "-o", "f.npz").status == 0
    pooled, full = np.load("p.npz"), np.load("f.npz")
    assert pooled["layer4"].shape == (3, 320)
    np.testing.assert_allclose(pooled["layer4"], full["layer4"].mean((2, 3)), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(pooled["head.1"], full["head.1"][:, :, 0, 0])
    np.testing.assert_array_equal(pooled["head"], full["head"])


def vit() -> torch.nn.Module:
    return torchvision.models.VisionTransformer(32, 8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)


def swin() -> torch.nn.Module:
    return torchvision.models.SwinTransformer([4, 4], embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=[4, 4])


@pytest.mark.parametrize(
    ("make", "layer", "places", "options"),
    [
        (vit, "encoder.ln", lambda item: item[:, 1:], ()),
        (vit, "encoder.ln", lambda item: item[:, 1:], ("--reshape", "4x4")),
        (swin, "features", lambda item: item.flatten(1, 2), ()),
        (swin, "features", lambda item: item.flatten(2).mT, ("--reshape", "channels first")),
    ],
)
def test_tokens_are_pooled_over_the_patches_alone(
    gradcam_command: Command, photos: Path, *, make: Any, layer: str, places: Any, options: Any
) -> None:
    network = make().eval()
    classifier = gradcam.load_classifier(network, size=32, layer=layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradcam.cli.inspect.features.load_model", lambda choice, layer: classifier)
        outcome = gradcam_command("inspect", "features", photos, "-l", layer, "--pool", "-o", "p.npz", *options)
    assert outcome.status == 0, outcome.err
    images = classifier.batch([gradcam.read_image(photos / name) for name in NAMES])
    expected = places(extraction.features(network, images, layer)[layer]).mean(1)
    np.testing.assert_allclose(np.load("p.npz")[layer], expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [(), ("--batch-size", 1)])
def test_a_broken_image_is_left_out(tiny: Command, folder: Path, photos: Path, options: tuple[Any, ...]) -> None:
    (photos / "b" / "broken.png").write_bytes((photos / "b" / "koala.png").read_bytes()[:500])
    outcome = tiny("photos", "-l", "conv", "-o", "f.npz", "--json", *options)
    assert outcome.status == 1
    assert "b/broken.png: is damaged or cut off" in outcome.err
    assert np.load("f.npz")["names"].tolist() == NAMES
    (record,) = map(json.loads, outcome.out.splitlines())
    assert (record["images"], record["failed"]) == (3, 1)
    assert record["layers"] == {"conv": {"shape": [3, 4, 4, 4], "dtype": "float32"}}


def test_nothing_is_written_where_every_picture_failed(tiny: Command, folder: Path) -> None:
    (folder / "a.png").write_bytes(b"nothing")
    outcome = tiny("a.png", "-l", "conv", "-o", "f.npz")
    outcome.check_error(1, "a.png: ")
    assert "   0 images, 1 failed   " in outcome.out
    assert outcome.out.endswith("Nothing was written.\n")
    assert json.loads(tiny("a.png", "-l", "conv", "-o", "f.npz", "--json").out)["file"] is None
    assert not (folder / "f.npz").exists()


def test_classes_that_a_list_asks_for_make_no_difference(tiny: Command, folder: Path, photos: Path) -> None:
    (folder / "list.csv").write_text("image,class\nphotos/macaw.png,no such class\nphotos/chelsea.png,1\n")
    assert tiny("list.csv", "-l", "conv", "-o", "f.npz").status == 0
    assert np.load("f.npz")["names"].tolist() == ["macaw.png", "chelsea.png"]


def test_of_a_pattern_what_does_not_run_is_left_out(tiny: Command, photos: Path) -> None:
    assert tiny("photos", "-l", "[fhu]*", "-o", "f.npz").status == 0
    assert set(np.load("f.npz")) == {"flat", "head", "names"}


@pytest.mark.parametrize("suffix", [".png", "", ".npy", ".npz.txt"])
def test_bad_suffixes(
    inspect: Command, folder: Path, photos: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradcam.cli.inspect.features.load_model", lambda *args, **options: pytest.fail("loaded"))
    outcome = inspect("photos", "-o", f"f{suffix}")
    assert outcome.status == 2
    assert "does not end in .npz or .safetensors" in outcome.err
    (folder / "d.npz").mkdir()
    assert inspect("photos", "-o", "d.npz").status == 2
    assert files(folder) == sorted(f"photos/{name}" for name in [*NAMES, "notes.md"])


def test_what_is_read_is_never_overwritten(inspect: Command, tiny: Command, folder: Path, photos: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"weights")
    outcome = inspect("photos", "--weights", "weights.safetensors", "-o", "./weights.safetensors")
    assert (outcome.status, (folder / "weights.safetensors").read_bytes()) == (2, b"weights")
    assert "is an input file and is never overwritten" in outcome.err
    shutil.copy(photos / "macaw.png", folder / "picture.npz")
    before = (folder / "picture.npz").read_bytes()
    (folder / "list.txt").write_text("picture.npz\n")
    (folder / "link.npz").symlink_to(folder / "picture.npz")
    for source, output in (("picture.npz", "picture.npz"), ("list.txt", "picture.npz"), ("picture.npz", "link.npz")):
        outcome = tiny(source, "-l", "conv", "-o", output)
        assert (outcome.status, (folder / "picture.npz").read_bytes()) == (2, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-l", "convv", "-o", "f.npz"], "There is no layer 'convv' in Tiny. Nearest: 'conv'"),
        (["-l", "x*", "-o", "f.npz"], "No layer matches 'x*'"),
        (["-l", "unused", "-o", "f.npz"], "Layer 'unused' did not run in the forward pass"),
        (["-l", "turned", "-o", "f.npz"], "returns (16, 2, 4) for 2 images: its first dimension is not the batch"),
        (["-l", "n*", "-o", "f.npz"], "The layer name 'names' is reserved for the image names in a .npz file: write"),
        (["-l", "conv", "--reshape", "14x14", "-o", "f.npz"], "--reshape is only used with --pool"),
        (["-l", "conv", "--pool", "--reshape", "14x14", "-o", "f.npz"], "its grid cannot be determined"),
        (["-l", "conv", "-o", "tiny.py/f.npz"], "tiny.py/f.npz: cannot be written"),
    ],
)
def test_wrong_usage_is_refused(tiny: Command, folder: Path, photos: Path, arguments: list[str], message: str) -> None:
    outcome = tiny("photos", *arguments)
    outcome.check_error(2, message)
    assert not list(folder.glob("*.npz"))
    assert outcome.out == ""


def test_a_layer_may_be_called_names_in_a_safetensors_file(tiny: Command, folder: Path, photos: Path) -> None:
    assert tiny("photos", "-l", "names", "-o", "f.safetensors").status == 0
    assert safetensors.torch.load_file("f.safetensors")["names"].shape == (3, 4, 4, 4)


def test_layers_that_differ_from_picture_to_picture_are_an_error(
    tiny: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = Extractor.extract

    def grow(self: Extractor, pictures: Any, *, classes: Any = None) -> Any:
        rows = extract(self, pictures, classes=classes)
        return [{"conv": row["conv"][:, : 4 - i]} for i, row in enumerate(rows)]

    monkeypatch.setattr(Extractor, "extract", grow)
    (folder / "f.npz").write_bytes(b"earlier")
    outcome = tiny("photos", "-l", "conv", "-o", "f.npz")
    outcome.check_error(1, "Layer 'conv' returns (4, 3, 4) for macaw.png, but (4, 4, 4) for earlier images")
    assert (folder / "f.npz").read_bytes() == b"earlier"


def test_a_full_disk_keeps_the_file(tiny: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "f.npz").write_bytes(b"earlier")
    before = files(folder)
    monkeypatch.setattr(feature_file, "_copy", fail)
    tiny("photos", "-l", "conv", "-o", "f.npz").check_error(1, "f.npz: cannot be written (no space left on device)")
    assert (folder / "f.npz").read_bytes() == b"earlier"
    assert [name for name in files(folder) if "__pycache__" not in name] == before


def test_interrupts_leave_nothing(tiny: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("add", "write"):
        monkeypatch.setattr(FeatureFile, name, interrupt)
        assert tiny("photos", "-l", "conv", "-o", "f.npz").status == 130
        monkeypatch.undo()
        monkeypatch.chdir(folder)
    assert not [name for name in files(folder) if name.endswith((".npz", ".tmp"))]


def test_a_file_is_replaced_and_the_same_images_give_equal_bytes(tiny: Command, folder: Path, photos: Path) -> None:
    contents = set()
    for workers in (1, 3):
        assert tiny("photos", "-l", "conv", "-o", "f.npz", "--workers", workers).status == 0
        contents.add((folder / "f.npz").read_bytes())
    assert len(contents) == 1


def test_the_models_own_words_do_not_mix_with_the_record(tiny: Command, photos: Path) -> None:
    outcome = tiny("photos", "-l", "conv", "-o", "f.npz", "--json")
    assert json.loads(outcome.out)["images"] == 3
    assert "the model speaks" in outcome.err


# The feature file


def assert_aligned(data: bytes) -> None:
    """Check that every tensor starts at a multiple of its item size, so that it can be used in place."""
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    widths = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    tensors = [item for name, item in header.items() if name != "__metadata__"]
    assert all(tensor["data_offsets"][0] % widths[tensor["dtype"]] == 0 for tensor in tensors)
    assert max(tensor["data_offsets"][1] for tensor in tensors) == len(data) - 8 - size


def test_every_kind_of_row_comes_back(tmp_path: Path) -> None:
    rows = [
        {
            "half": torch.full((3,), i, dtype=torch.bfloat16),
            "number": torch.tensor(float(i), dtype=torch.float64),
            "odd": torch.arange(6.0).reshape(2, 3).T[:, i:],
            "tiny": torch.tensor([i], dtype=torch.float8_e4m3fn),
            "none": torch.empty(0, 4),
            "float16": torch.tensor([i + 0.5, 1], dtype=torch.float16),
        }
        for i in (1, 1)
    ]
    names = ["a/ü \udc80.png", "b" * 300]
    for suffix in (".npz", ".safetensors"):
        with FeatureFile(tmp_path / f"f{suffix}") as file:
            for name, row in zip(names, rows):
                file.add(name, row)
            file.write({"model": "m"})
            shapes = file.layers
        if suffix == ".npz":
            with np.load(tmp_path / "f.npz", allow_pickle=False) as archive:
                tensors = {name: torch.from_numpy(archive[name]) for name in archive if name != "names"}
                assert archive["names"].tolist() == names
            with zipfile.ZipFile(tmp_path / "f.npz") as archive:
                assert archive.testzip() is None
                # The archive has no timestamps, so that equal features give equal bytes.
                assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        else:
            tensors = safetensors.torch.load_file(tmp_path / "f.safetensors")
            assert_aligned((tmp_path / "f.safetensors").read_bytes())
            with safetensors.safe_open(tmp_path / "f.safetensors", "pt") as opened:
                assert json.loads(opened.metadata()["names"]) == names
        for name in rows[0]:
            expected = torch.stack([row[name] for row in rows])
            assert torch.equal(tensors[name].double(), expected.double()), (suffix, name)
            assert (tuple(expected.shape), str(tensors[name].dtype)) == (shapes[name][0], f"torch.{shapes[name][1]}")
        dtypes = {"half": torch.bfloat16 if suffix != ".npz" else torch.float32, "tiny": torch.float32}
        dtypes |= {"float16": torch.float16, "number": torch.float64, "odd": torch.float32}
        assert {name: tensors[name].dtype for name in dtypes} == dtypes


def test_rows_that_do_not_fit_are_refused_before_any_of_them_is_kept(tmp_path: Path) -> None:
    with FeatureFile(tmp_path / "f.npz") as file:
        file.add("a", {"one": torch.ones(2), "two": torch.ones(2)})
        with pytest.raises(LayerError, match=r"Layer 'two' returns \(3,\) for b, but \(2,\) for earlier images"):
            file.add("b", {"one": torch.ones(2), "two": torch.ones(3)})
        file.add("c", {"one": torch.zeros(2), "two": torch.zeros(2)})
        file.write({})
    data = np.load(tmp_path / "f.npz")
    assert data["names"].tolist() == ["a", "c"]
    assert data["one"].tolist() == data["two"].tolist() == [[1, 1], [0, 0]]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are not listed here")
def test_no_layers_rows_keep_a_file_open_behind_the_end(tmp_path: Path) -> None:
    def list_open() -> list[str]:
        links = Path("/proc/self/fd").iterdir()
        return [target for link in links if (target := os.path.realpath(link)).startswith(str(tmp_path))]

    with FeatureFile(tmp_path / "f.npz") as file:
        file.add("a", {"one": torch.ones(2), "two": torch.ones(2)})
        assert len(list_open()) == 2
    assert list_open() == []
    assert file.names == ["a"]  # `file` is still referenced, so garbage collection did not close them.


def test_names_that_exceed_the_header_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_file, "MAX_HEADER_BYTES", 1000)
    check_feature_file(tmp_path / "f.npz", ["a" * 100] * 20)
    check_feature_file(tmp_path / "f.safetensors", ["a" * 100] * 8)
    with pytest.raises(OutputError, match=r"cannot store the names of 20 images; write an \.npz file"):
        check_feature_file(tmp_path / "f.safetensors", ["a" * 100] * 20)
