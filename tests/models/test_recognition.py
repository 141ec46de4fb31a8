"""Test that files of official weights get the preprocessing of their training, and that a note says which it is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import gradcam
from gradcam.batch.save import describe_weights
from gradcam.cli import cli
from gradcam.models.checkpoints.read import hash_weights
from gradcam.models.providers import torchvision as provider
from gradcam.models.providers.base import recognise

WEIGHTS = torchvision.models.MobileNet_V2_Weights
V1, V2 = "mobilenet_v2-b0353104.pth", "mobilenet_v2-7ebf99e0.pth"
PICTURE = (np.random.default_rng(0).random((300, 280, 3)) * 255).astype(np.uint8)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return torchvision.models.mobilenet_v2().state_dict()


def load(weights: object, name: str = "mobilenet_v2") -> gradcam.Classifier:
    return gradcam.load_classifier(name, weights=weights, device="cpu", layer="features.18")


def assert_prepared_as(classifier: gradcam.Classifier, weights: torchvision.models.WeightsEnum) -> None:
    """Compare with torchvision's transforms, up to rounding to 8 bits."""
    theirs = weights.transforms()
    expected = theirs(Image.fromarray(PICTURE))
    levels = (classifier.preprocess(PICTURE) - expected).abs() * torch.tensor(theirs.std)[:, None, None] * 255
    assert levels.mean() < 0.2  # In this noise, a misplaced pixel differs by 80 levels on average.


@pytest.mark.parametrize(("file", "name"), [(V1, "V1"), (V2, "V2"), ("mobilenet_v2-b0353104 (1).pth", "V1")])
def test_a_file_is_known_by_its_name(file: str, name: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    entry = WEIGHTS[f"IMAGENET1K_{name}"]
    torch.save(state, tmp_path / file)
    classifier = load(tmp_path / file)
    assert_prepared_as(classifier, entry)
    assert any(f"{file} was recognised as {entry} by the file's name" in note for note in classifier.notes)
    assert all(len(note) < 250 for note in classifier.notes)


def test_a_file_is_known_by_its_content(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "renamed.pth"
    torch.save(state, file)
    digits = hashlib.sha256(file.read_bytes()).hexdigest()[:8]

    def with_this_hash(entry: torchvision.models.WeightsEnum) -> Path:
        return Path(f"mobilenet_v2-{digits}.pth" if entry is WEIGHTS.IMAGENET1K_V1 else V2)

    monkeypatch.setattr(provider, "find_cache_path", with_this_hash)
    classifier = load(file)
    assert_prepared_as(classifier, WEIGHTS.IMAGENET1K_V1)
    assert classifier.notes == (
        "renamed.pth was recognised as MobileNet_V2_Weights.IMAGENET1K_V1 by the file's content: "
        "using the preprocessing of MobileNet_V2_Weights.IMAGENET1K_V1 (resize 256, centre crop 224).",
    )
    assert list(classifier.labels or ()) == WEIGHTS.IMAGENET1K_V1.meta["categories"]


def test_the_content_has_priority_over_the_name(tmp_path: Path) -> None:
    file = tmp_path / "net-11111111.pth"
    file.write_bytes(b"weights")
    digits = hashlib.sha256(b"weights").hexdigest()[:8]
    names = ["net-11111111.pth", f"net-{digits}.pth"]
    assert recognise(file, names) == (f"net-{digits}.pth", "content")
    assert recognise(file, names[:1]) == (names[0], "name")
    assert recognise(file, ["other-22222222.pth", "plain.pth"]) == (None, "")
    assert recognise(tmp_path / "plain.safetensors", ["plain.pth"]) == ("plain.pth", "name")


def test_a_rewritten_file_of_weights_is_hashed_again(tmp_path: Path) -> None:
    file, new_file = tmp_path / "net.pth", tmp_path / "other"
    for number, content in enumerate([b"weights", b"Weights", b"weights and more"]):
        new_file.write_bytes(content)
        os.utime(new_file, ns=(number, number))
        os.replace(new_file, file)
        for _ in range(2):
            assert hash_weights(file) == hashlib.sha256(content).hexdigest()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        hash_weights(file)


def test_torchvisions_names_have_the_hashes() -> None:
    """The recognition relies on this: nearly all names have a hash, and no two models share one."""
    entries = [entry for model in provider.list_names() for entry in provider.list_weights(model)]
    names = {provider.find_cache_path(entry).name for entry in entries}
    hashed = [name for name in names if torch.hub.HASH_REGEX.search(name)]
    assert len(hashed) > 0.9 * len(names) > 50
    assert provider.find_cache_path(WEIGHTS.IMAGENET1K_V1).name == V1


def test_an_unknown_file_gets_the_preprocessing_of_the_best_weights_and_a_note(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "mine.pth")
    classifier = load(tmp_path / "mine.pth")
    assert_prepared_as(classifier, WEIGHTS.IMAGENET1K_V2)
    (note,) = [note for note in classifier.notes if "preprocessing" in note]
    assert note == (
        "mine.pth is not an official torchvision file: using the preprocessing of MobileNet_V2_Weights.IMAGENET1K_V2 "
        "(resize 232, centre crop 224). Override with --size, --crop, --mean, --std."
    )


def test_weights_given_by_name_have_priority_over_a_file(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for file in ("mine.pth", V2):
        torch.save(state, tmp_path / file)
        classifier = load(tmp_path / file, "mobilenet_v2:IMAGENET1K_V1")
        assert_prepared_as(classifier, WEIGHTS.IMAGENET1K_V1)
        assert any("IMAGENET1K_V1, as requested" in note for note in classifier.notes)


@pytest.fixture
def cache(state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fill torch hub's cache with a file for each of MobileNetV2's weights, so that nothing is downloaded."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    for name, factor in ((V1, 1.0), (V2, 2.0)):
        torch.save({k: v * factor if "classifier" in k else v for k, v in state.items()}, folder / name)
    return folder


@pytest.mark.parametrize("typed", ["IMAGENET1K_V1", "imagenet1k_v1", "MobileNet_V2_Weights.IMAGENET1K_V1"])
@pytest.mark.usefixtures("cache")
def test_weights_by_their_name(typed: str, state: dict[str, torch.Tensor]) -> None:
    classifier = load(typed)
    assert_prepared_as(classifier, WEIGHTS.IMAGENET1K_V1)
    assert classifier.notes == ()
    assert torch.equal(classifier.model.get_parameter("classifier.1.bias"), state["classifier.1.bias"])
    assert describe_weights(classifier, Path(typed))["of"] == "tensors"
    assert load("default").preprocess == load(None).preprocess != classifier.preprocess


@pytest.mark.usefixtures("cache")
def test_a_file_comes_before_a_name(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(state, "IMAGENET1K_V1")
    assert any("IMAGENET1K_V1 is not an official" in note for note in load("IMAGENET1K_V1").notes)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gradcam.GradcamError, match=r"mobilenet_v2 has no weights 'V9': choose one of 'IMAGENET1K_V1'"):
        load("V9")
    with pytest.raises(gradcam.GradcamError, match=r"missing\.pth: cannot be opened"):
        load(tmp_path / "missing.pth")


@pytest.mark.usefixtures("cache")
def test_the_command_line(
    photo: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    def run(weights: str) -> str:
        arguments = [
            "run", str(photo("coffee.jpg")), "--model", "mobilenet_v2", "--weights", weights, "--device", "cpu",
        ]  # fmt: skip
        assert cli.main([*arguments, "--output", str(tmp_path / "out")], standalone_mode=False) == 0
        return " ".join(capsys.readouterr().err.split())

    assert "prepared" not in run("imagenet1k_v1")
    assert f"Note: {V1} was recognised as MobileNet_V2_Weights.IMAGENET1K_V1 by the file's name" in run(str(cache / V1))


def test_timms_files(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet18")
    assert timm.get_pretrained_cfg("resnet18").crop_pct == 0.95
    recognised = "resnet18-f37072fd.pth was recognised as timm's resnet18.tv_in1k by the file's name"
    unknown = "file: using the preprocessing of timm's resnet18.a1_in1k (resize 235, centre crop 224)"
    for file, resize, message in (("resnet18-f37072fd.pth", 256, recognised), ("mine.pth", 235, unknown)):
        torch.save(model.state_dict(), tmp_path / file)
        classifier = gradcam.load_classifier("timm:resnet18", weights=tmp_path / file, device="cpu")
        assert classifier.preprocess.resize == resize
        assert any(message in note for note in classifier.notes)
