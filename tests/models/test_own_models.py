"""Test user-defined models: factory functions, assumed settings, the first forward pass, and modules of the caller."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam import plugins
from gradcam.errors import LayerError, ModelError
from gradcam.hooks.pytorch import VERSION
from gradcam.models.device import find_input_dtype, is_spread
from gradcam.models.labels import read_labels
from gradcam.models.preprocess import Reading
from gradcam.models.providers import torchvision
from gradcam.models.skeletons import survey
from tests.helpers import TINY, assert_same, tiny_model, traces

Photo = Callable[[str], Path]

FACTORY = """
import torch
from torch import nn
import sibling
def make():
    torch.manual_seed(0)
    return sibling.net(3, 5)
def grey():
    return sibling.net(1, 5)
class Net(nn.Sequential):
    def __init__(self, classes=2):
        super().__init__(*sibling.net(3, classes))
def needs(classes, width=3):
    return sibling.net(width, classes)
def boom():
    return sibling.fail()
def leaves():
    raise SystemExit(3)
def state():
    return make().state_dict()
ready = make()
number = 3
"""
SIBLING = """
from torch import nn
def net(channels, classes):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)
    )
def fail():
    return nn.Linear(2, 2)(0)
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of factory functions that imports the module beside it."""
    (tmp_path / "own.py").write_text(FACTORY)
    (tmp_path / "sibling.py").write_text(SIBLING)
    monkeypatch.delitem(sys.modules, "sibling", raising=False)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return tmp_path / "own.py"


def load(name: Any, **options: Any) -> gradcam.Classifier:
    return gradcam.load_classifier(name, **{"device": "cpu", **options})


def refusal(name: Any, kind: type[gradcam.GradcamError] = gradcam.GradcamError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        gradcam.load_classifier(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Factories


@pytest.mark.parametrize(("function", "classes"), [("make", 5), ("ready", 5), ("Net", 2)])
def test_a_function_in_a_file_gives_the_model(factory: Path, function: str, classes: int) -> None:
    before = list(sys.path)
    classifier = load(f"{factory}:{function}")
    assert sys.path == before
    assert (classifier.classes, classifier.labels, classifier.layer) == (classes, None, "1")
    assert classifier.name == f"{factory}:{function}"
    assert not classifier.model.training
    assert not any(parameter.requires_grad for parameter in classifier.model.parameters())


def test_a_function_in_a_module_gives_the_model(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = factory.parent / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text("import own\nclass Zoo:\n    make = staticmethod(own.make)\n")
    monkeypatch.syspath_prepend(str(factory.parent))
    for name in ("own:make", "package_of_mine.models:Zoo.make"):
        assert load(name).classes == 5
    for name in ("package_of_mine.models", "package_of_mine"):
        sys.modules.pop(name)


def test_a_model_of_an_installed_package_is_named_as_its_entry_point(
    factory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info := factory.parent / "own-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gradcam.models]\nmynet = own:make\nresnet18 = own:make\ngone = own:gone\n")
    monkeypatch.syspath_prepend(str(factory.parent))
    monkeypatch.setattr(plugins, "_read_entry_points", entry_points)
    monkeypatch.setattr(plugins, "list_entry_points", plugins.list_entry_points.__wrapped__)
    assert torchvision.list_installed() == {"mynet": "own:make, from own", "gone": "own:gone, from own"}
    assert "own" not in sys.modules
    assert (load("mynet").name, load("mynet").classes) == ("mynet", 5)
    assert survey("resnet18").skeleton.model.fc.out_features == 1000  # torchvision's names have priority
    assert "gone (own:gone of the package own) cannot be imported" in refusal("gone")
    assert "Nearest: 'mynet'" in refusal("mynett")


def test_the_layers_of_a_network_with_another_number_of_channels(tmp_path: Path) -> None:
    file = tmp_path / "grey.py"
    file.write_text(
        "from torch import nn\n"
        "def network(channels):\n"
        "    layers = [nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]\n"
        "    return nn.Sequential(*layers)\n"
        "def grey():\n    return network(1)\n"
        "def five():\n    return network(5)\n"
        "def wrong():\n    return nn.Sequential(network(3), nn.Linear(7, 2))\n"
    )
    for name in ("grey", "five"):
        assert survey(f"{file}:{name}").rows[0].shape[1:2] == (4,)
    with pytest.raises(ModelError):
        survey(f"{file}:wrong")


def test_weights_are_loaded_into_the_functions_model(factory: Path, tmp_path: Path) -> None:
    weights = {f"module.{name}": tensor + 1 for name, tensor in load(f"{factory}:make").model.state_dict().items()}
    torch.save(weights, tmp_path / "weights.pth")
    classifier = load(f"{factory}:make", weights=tmp_path / "weights.pth")
    for name, tensor in classifier.model.state_dict().items():
        assert torch.equal(tensor, weights[f"module.{name}"])
    assert any("module." in note for note in classifier.notes)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("{file}:mak", ["There is no 'mak' in ", "Nearest: 'make'."]),
        ("{file}:zzzzzz", ["There is no 'zzzzzz' in ", "Nearest: 'make', 'grey', 'Net'"]),
        ("{file}", ["names no function: expected FILE.py:FUNCTION"]),
        ("{file}:", ["names no function: expected FILE.py:FUNCTION", "own.py:make"]),
        ("{folder}/missing.py:make", ["missing.py: does not exist, expected a Python file."]),
        ("{file}:needs", ["needs arguments, needs(classes, width=3), but is", "def make(): return needs("]),
        ("{file}:boom", ["boom raised TypeError: linear()", "sibling.py:8)"]),
        ("{file}:leaves", ["leaves raised SystemExit: 3 (", "own.py:18)"]),
        ("{file}:state", ["OrderedDict, expected a torch.nn.Module. Give a checkpoint with --weights."]),
        ("{file}:number", ["own.py:number is 3, expected a function that returns a torch.nn.Module."]),
        ("{folder}/broken.py:make", ["broken.py cannot be imported: SyntaxError", "broken.py:1)"]),
        ("{folder}/lacks.py:make", ["lacks.py cannot be imported: ModuleNotFoundError: No module named 'not_there'"]),
        ("not_there.models:make", ["There is no module 'not_there.models': Python searched"]),
        ("a..b:make", ["There is no module 'a..b'"]),
    ],
)
def test_errors_of_a_factory_are_reported(factory: Path, name: str, parts: list[str]) -> None:
    (factory.parent / "broken.py").write_text("def make(:\n")
    (factory.parent / "lacks.py").write_text("import not_there\n")
    message = refusal(name.format(file=factory, folder=factory.parent), device="cpu")
    for part in parts:
        assert part in message
    assert "_gradcam_" not in message


# Preprocessing


@pytest.mark.parametrize(
    ("options", "size", "resize"),
    [
        ({}, (224, 224), 256),
        ({"size": 299}, (299, 299), 341),
        ({"size": 64, "crop": 1}, (64, 64), 64),
        ({"crop": 0.95}, (224, 224), 235),
        ({"size": (48, 96)}, (48, 96), (48, 96)),
        ({"size": (48, 96), "crop": 0.5}, (48, 96), (96, 192)),
        ({"size": [32, 32]}, (32, 32), (32, 32)),
    ],
)
def test_size_and_crop_of_a_user_defined_model(
    factory: Path, options: dict[str, Any], size: tuple[int, int], resize: Any
) -> None:
    preprocess = load(f"{factory}:make", **options).preprocess
    assert (preprocess.size, preprocess.resize, preprocess.interpolation) == (size, resize, "bilinear")
    assert (preprocess.mean, preprocess.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_options_change_a_library_models_preprocessing_step_by_step() -> None:
    plain = load("efficientnet_lite0").preprocess
    larger = load("efficientnet_lite0", size=448)
    assert (larger.preprocess.size, larger.preprocess.resize, larger.preprocess.mean) == ((448, 448), 512, plain.mean)
    assert (larger.classes, larger.layer, larger.activation) == (1000, "layer4", "softmax")
    shifted = load("efficientnet_lite0", mean=np.array([0.1, 0.2, 0.3]), crop=1).preprocess
    assert (shifted.mean, shifted.std, shifted.resize) == ((0.1, 0.2, 0.3), plain.std, 224)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "Assumed a size of 224, a crop of 0.875, ImageNet's mean and std. "),
        ({"size": 64, "std": (1, 1, 1)}, "Assumed a crop of 0.875, ImageNet's mean. "),
        ({"size": (64, 64)}, "Assumed ImageNet's mean and std. "),
        ({"size": 64, "crop": 1, "mean": (0, 0, 0), "std": (1, 1, 1)}, None),
        (
            {"size": (64, 64), "mean": (124, 1, 1), "std": (1, 1, 1)},
            "There are values above 1 in mean, but 8-bit and 16-bit images",
        ),
    ],
)
def test_assumed_settings_are_noted(factory: Path, options: dict[str, Any], note: str | None) -> None:
    notes = load(f"{factory}:make", activation="softmax", **options).notes
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": 0.5}, "mean has 1 value(s) and std has 3: give both"),
        ({"mean": "x"}, "mean is 'x', expected one number per channel"),
        ({"mean": (0.5, float("nan"), 0.5)}, "expected one number per channel"),
        ({"std": (0, 1, 1)}, "std is (0, 1, 1), expected values above 0"),
        ({"size": 0}, "size is 0, expected a number of pixels"),
        ({"size": 2.5}, "size is 2.5, expected a number of pixels"),
        ({"size": (1, 2, 3)}, "expected a number of pixels, or (height, width)"),
        ({"crop": 0}, "crop is 0, expected the share"),
        ({"crop": 1.2}, "crop is 1.2, expected the share"),
        ({"crop": 224}, "crop is 224, expected the share"),
        ({"activation": "relu"}, "There is no activation 'relu': choose one of auto, softmax, sigmoid, none, applied."),
        ({"labels": 3}, "labels are 3, expected class names, or the path of a file"),
        ({"labels": ["a", 1]}, "expected class names"),
        ({"reader": 3}, "The reader is 3, expected a function"),
        ({"reader": "no.such:function"}, "There is no module 'no.such'"),
        ({"weights": 3}, "weights are 3, expected the path of a checkpoint"),
    ],
)
def test_impossible_options_are_refused(factory: Path, options: dict[str, Any], message: str) -> None:
    assert message in refusal(f"{factory}:make", device="cpu", **options)


def test_the_wrong_number_of_channels_is_reported(factory: Path) -> None:
    message = refusal(f"{factory}:make", device="cpu", mean=0.5, std=0.5)
    assert "fails on an image of 224 x 224 with 1 channel(s), RuntimeError: " in message
    assert "--mean and --std with one value per channel" in message
    assert load(f"{factory}:grey", mean=0.5, std=0.5, size=32).classes == 5
    assert "fails on an image of 224 x 224 with 1 channel(s)" in refusal("efficientnet_lite0", mean=0.5, std=0.5)


def test_a_model_with_one_channel_gets_greyscale_images(factory: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 2**16, (40, 50), dtype=np.uint16)
    classifier = load(f"{factory}:grey", mean=0.5, std=0.25, size=(40, 50))
    expected = (torch.from_numpy(pixels.astype(np.float32)) / 65535 - 0.5) / 0.25
    with torch.no_grad():
        logits = classifier.model(expected[None, None])
    torch.testing.assert_close(classifier.explain(pixels).output, logits)


def test_values_of_another_reader_may_have_any_scale(factory: Path, photo: Photo) -> None:
    def read(path: Any) -> Reading:
        pixels = gradcam.read_image(path)
        return Reading(255 - pixels, pixels, "negative")

    classifier = load(f"{factory}:make", reader=read, mean=(124, 116, 104), std=(58, 57, 57))
    explanation = classifier.explain(photo("koala.webp"))
    assert np.array_equal(explanation.images[0], gradcam.read_image(photo("koala.webp")))
    assert list(explanation.notes) == ["negative"]


# Labels


ANIMALS = ["cat", "dog", "sea lion"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("l.txt", "cat\ndog\nsea lion\n", ANIMALS),
        ("l.txt", "\ufeffcat\r\ndog  \r\nsea lion\r\n\r\n", ANIMALS),
        ("l.json", '["cat", "dog", "sea lion"]', ANIMALS),
        ("l.json", '{"1": "dog", "0": "cat", "2": "sea lion"}', ANIMALS),
        ("l.json", '{"cat": 0, "sea lion": 2, "dog": 1}', ANIMALS),
        ("l.txt", '["cat", "dog", "sea lion"]', ANIMALS),
        ("l.json", '{"0": ["n01", "cat"], "1": ["n02", "dog"], "2": ["n03", "sea lion"]}', ANIMALS),
        ("config.json", '{"num_labels": 2, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0}}', ["a", "b"]),
        ("l.csv", "cat\ndog\nsea lion\n", ANIMALS),
        ("l.csv", "1,dog\n0,cat\n2,sea lion\n", ANIMALS),
        ("l.csv", '\ufeffindex,name\r\n0,cat\r\n1, "dog"\r\n2,"sea lion"\r\n', ANIMALS),
        # A table is only read if its columns are certain; here nothing says what the three columns mean.
        ("l.csv", "0,shark, great\n1,eel", ["0,shark, great", "1,eel"]),
        ("l.csv", "shark,1\neel,0", ["shark,1", "eel,0"]),
        ("l.csv", '0,"shark, great"\n1,eel', ["shark, great", "eel"]),
        ("l.txt", "0,shark\n1,eel", ["0,shark", "1,eel"]),
        ("l.txt", "sh\x0cark\neel\u2028s", ["sh\x0cark", "eel\u2028s"]),
    ],
)
def test_labels_are_read_in_the_order_of_their_indices(
    tmp_path: Path, name: str, text: str, expected: list[str]
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_labels(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("l.txt", None, "cannot be read as labels (No such file or directory)"),
        ("l.txt", b"\xff\xfe\x00", "it is not UTF-8 text"),
        ("l.txt", b" \n", "is empty, expected one label per line"),
        ("l.txt", b"cat\n\ndog", "line 2 is empty, expected one label per line"),
        ("l.txt", b'{"0": "cat", "2": "dog"}', "there are 2 labels, but none for class 1"),
        ("l.txt", b'["cat"', "is not valid JSON"),
        ("l.txt", b'["cat", 3]', "expected a list of names"),
        ("l.txt", b"{}", "expected a list of names"),
        ("l.csv", b"0,cat\n2,dog", "there are 2 labels, but none for class 1."),
        ("l.csv", b"index,name\n0,cat\n0,dog", "there are 2 labels, but none for class 1."),
        ("l.csv", b"1,cat\n2,dog", "there are 2 labels, but none for class 0."),
    ],
)
def test_files_that_are_no_labels_are_refused(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_labels(tmp_path / name)
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_labels_of_another_length_are_refused_with_both_numbers(factory: Path, tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("a\nb\nc\n")
    for labels, start in ((tmp_path / "l.txt", f"{tmp_path / 'l.txt'} has 3"), (["a", "b"], "There are 2")):
        message = refusal(f"{factory}:make", labels=labels, device="cpu")
        assert message == f"{start} labels, but the model has 5 classes."
    assert load(f"{factory}:make", labels=list("abcde")).find_class("d") == 3


# The first forward pass


class NetworkWithEnd(nn.Module):
    """A small network whose logits pass through a user-defined function."""

    def __init__(self, classes: int, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, classes)
        self.end = end

    def forward(self, images: Tensor) -> Any:
        return self.end(self.head(self.features(images).mean((2, 3))))


@pytest.mark.parametrize(
    ("classes", "end", "activation", "expected_classes", "notes"),
    [
        (4, lambda x: x, "softmax", 4, 1),
        (4, lambda x: x.softmax(1), "none", 4, 1),
        (4, lambda x: {"logits": x.softmax(1)[:, :3]}, "none", 3, 1),
        (4, lambda x: x.sigmoid(), "none", 4, 1),
        (4, lambda x: x.log_softmax(1), "softmax", 4, 0),
        (4, lambda x: (x.exp() / x.exp().sum(1, keepdim=True), x), "softmax", 4, 0),
        (4, lambda x: x.detach().softmax(1), "none", 4, 1),
        (4, lambda x: 1 / (1 + (-x).exp()), "softmax", 4, 1),
        (1, lambda x: x, "sigmoid", 2, 1),
        (1, lambda x: x.squeeze(1), "sigmoid", 2, 1),
        (1, lambda x: torch.sigmoid(x).squeeze(1), "applied", 2, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:The model's output is log-probabilities")
def test_the_activation_is_inferred_if_it_is_certain(
    classes: int, end: Callable[[Tensor], Any], activation: str, expected_classes: int, notes: int
) -> None:
    classifier = gradcam.load_classifier(NetworkWithEnd(classes, end), size=16, crop=1, mean=(0, 0, 0), std=(1, 1, 1))
    assert (classifier.activation, classifier.classes, len(classifier.notes)) == (activation, expected_classes, notes)
    if activation in ("none", "applied"):
        assert "The gradient of such an output vanishes for confident predictions" in classifier.notes[0]
        assert f"--activation {activation}" in classifier.notes[0]
    elif activation == "sigmoid":
        assert "--task regression" in classifier.notes[0]
    elif notes:
        assert "--activation sigmoid" in classifier.notes[0]
        assert ("The output is between 0 and 1" in classifier.notes[0]) == (end(torch.zeros(1, 1)).item() == 0.5)
    picture = np.full((16, 16, 3), 100, np.uint8)
    probabilities = classifier.explain(picture).probabilities() if classifier.layer and activation != "none" else None
    if probabilities is not None:
        assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)


def test_a_given_activation_is_used() -> None:
    assert gradcam.load_classifier(NetworkWithEnd(4, lambda x: x), activation="sigmoid").activation == "sigmoid"
    assert "whose softmax is always 1" in refusal(NetworkWithEnd(1, lambda x: x), activation="softmax")


@pytest.mark.parametrize(
    ("labels", "expected"), [(["crack"], ["not crack", "crack"]), (["sound", "crack"], ["sound", "crack"])]
)
def test_labels_of_a_single_logit(labels: list[str], expected: list[str]) -> None:
    classifier = gradcam.load_classifier(NetworkWithEnd(1, lambda x: x), labels=labels)
    assert classifier.labels == expected
    assert "a single logit: expected one label, or two" in refusal(NetworkWithEnd(1, lambda x: x), labels=list("abc"))


def test_a_head_that_is_all_zeros_can_be_loaded() -> None:
    model = NetworkWithEnd(3, lambda x: x)
    nn.init.zeros_(model.head.weight)
    assert gradcam.load_classifier(model).layer == "features"


def test_the_default_layer_is_that_of_explain() -> None:
    class WithDeadEnd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = tiny_model()[:5]
            self.dead_end = nn.Conv2d(6, 2, 1)
            self.head = nn.Linear(6, 3)

        def forward(self, images: Tensor) -> Tensor:
            features = self.features(images)
            self.dead_end(features)
            return self.head(features.mean((2, 3)))

    model = WithDeadEnd()
    classifier = gradcam.load_classifier(model)
    assert classifier.layer == gradcam.explain(model, torch.randn(1, 3, 224, 224)).layer == "features"
    assert gradcam.load_classifier(model, layer="features.0").layer == "features.0"
    assert "Nearest: 'features'" in refusal(model, LayerError, layer="feature")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Conv2d(3, 4, 3), "The model returns a tensor (1, 4, 222, 222) for one image, expected (1, classes)"),
        (nn.Conv2d(5, 4, 3), "fails on an image of 224 x 224 with 3 channel(s), RuntimeError: "),
    ],
)
def test_models_that_are_no_image_classifiers_are_refused(model: nn.Module, message: str) -> None:
    assert message in refusal(model)


# Models of other frameworks and formats, and the hints in their error messages


def exported(folder: Path) -> tuple[nn.Module, Any]:
    model = tiny_model().eval()
    program = torch.export.export(model, (TINY[:1],))
    torch.export.save(program, folder / "tiny.pt2")
    return model, program


@pytest.mark.skipif(VERSION < (2, 5), reason="PyTorch cannot unflatten this program")
def test_the_hint_for_an_exported_program_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, program = exported(tmp_path)
    monkeypatch.chdir(tmp_path)
    for explain in (lambda: gradcam.explain(program, TINY), lambda: gradcam.load_classifier(program)):
        with pytest.raises(ModelError, match=r"explain torch\.export\.unflatten\(program\)"):
            explain()
    with pytest.raises(gradcam.GradcamError, match=r"exported program, explain torch\.export\.unflatten\(program\)"):
        gradcam.explain(program.module(), TINY[:1])
    models = model, torch.export.unflatten(program)
    expected, actual = (gradcam.explain(item, TINY[:1], "3", target=1).maps for item in models)
    torch.testing.assert_close(actual, expected)
    message = refusal("tiny.pt2")
    (tmp_path / "own.py").write_text("import torch\n" + message.partition("`")[2].partition("`")[0])
    assert gradcam.load_classifier("own.py:build", size=(12, 16)).layer == "3"
    message = refusal("own.py:build", weights="tiny.pt2", size=(12, 16))
    exec(message.partition("with ")[2].rstrip("."), {"torch": torch, "path": "tiny.pt2"})
    (tmp_path / "plain.py").write_text("from tests.helpers import tiny_model")
    loaded = gradcam.load_classifier("plain.py:tiny_model", weights="weights.pth", size=(12, 16)).model
    assert_same({**loaded.state_dict()}, {**model.state_dict()})


class Inner:
    """A class that holds a network, like a pipeline or a learner."""

    def __init__(self) -> None:
        self.model = tiny_model().eval()


class YOLO(nn.Module):
    """Stands in for ultralytics' YOLO: calling it does not call its network, which returns probabilities and logits."""

    __module__ = "ultralytics.models.yolo.model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(tiny_model(), Both()).eval()

    def forward(self, *_: Any) -> Any:
        raise RuntimeError("this would predict")


class Both(nn.Module):
    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.softmax(1), logits


@pytest.mark.parametrize("wrapper", [Inner, YOLO])
def test_wrappers_are_refused_with_a_hint_at_their_network(wrapper: Callable[[], Any]) -> None:
    wrapped = wrapper()
    for explain in (lambda: gradcam.explain(wrapped, TINY), lambda: gradcam.load_classifier(wrapped)):
        with pytest.raises(ModelError, match=rf"The model, {wrapper.__name__}, is .*: explain its \.model\.$"):
            explain()
    assert gradcam.explain(wrapped.model, TINY).maps.any()
    assert gradcam.load_classifier(wrapped.model, size=(12, 16)).classes == 5


def test_a_checkpoint_of_ultralytics_says_how_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ultralytics.nn.tasks"
    tasks = type(sys)(name)
    tasks.ClassificationModel = type("ClassificationModel", (nn.Sequential,), {"__module__": name})
    for package in ("ultralytics", "ultralytics.nn"):
        monkeypatch.setitem(sys.modules, package, type(sys)(package))
    monkeypatch.setitem(sys.modules, name, tasks)
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": -1, "model": tasks.ClassificationModel(*tiny_model())}, "yolov8n-cls.pt")
    way = "`def build(): return ultralytics.YOLO('yolov8n-cls.pt').model`"
    assert way in refusal("yolov8n-cls.pt")
    assert way in refusal("resnet18", weights="yolov8n-cls.pt")


def int8() -> tuple[nn.Module, nn.Module]:
    from torch.ao import quantization

    plain = tiny_model().eval()
    parts = [quantization.QuantStub(), quantization.fuse_modules(copy.deepcopy(plain), [["0", "1", "2"]])]
    model = nn.Sequential(*parts, quantization.DeQuantStub()).eval()
    model.qconfig = quantization.default_qconfig
    model = quantization.prepare(model)
    model(TINY)
    return plain, quantization.convert(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_hint_for_8_bit_models_works() -> None:
    plain, quantised = int8()
    for layer in (None, "1.3"):
        with pytest.raises(gradcam.GradcamError, match="8-bit integers, which have no gradient") as message:
            gradcam.explain(quantised, TINY, layer)
        assert "the original floating-point model, or use method='rise'" in str(message.value)
    with pytest.raises(ModelError, match="8-bit integers, which have no gradient"):
        gradcam.load_classifier(quantised, size=(12, 16))
    assert gradcam.explain(plain, TINY, "3").maps.any()
    assert gradcam.explain(quantised, TINY, method="rise").maps.any()


@pytest.mark.parametrize(
    "suffix", [".onnx", ".h5", ".keras", ".pb", ".tflite", ".engine", ".trt", ".mlmodel", ".mlpackage", ".pte"]
)
def test_a_file_of_another_framework_is_no_model(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"resnet{suffix}"
    for is_there in (False, True):
        if is_there:
            file.mkdir() if suffix == ".mlpackage" else file.write_bytes(b"\x08\x07 something")
        message = refusal(str(file))
        assert "gradients need a PyTorch model. Give a PyTorch model, and its state dict with --weights" in message
        assert "Nearest" not in message
    assert "save the state dict of the original PyTorch model" in refusal("resnet18", weights=file)


def test_a_torchscript_file_in_place_of_a_model_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(tiny_model().eval(), TINY), tmp_path / "tiny.pt")
    assert "torch.save(torch.jit.load(path).state_dict(), 'weights.pth')" in refusal(str(tmp_path / "tiny.pt"))


@pytest.mark.parametrize("module", ["onnxruntime.capi.session", "tensorflow.python.keras", "keras.src.models"])
def test_a_model_object_of_another_framework_says_what_to_explain(module: str) -> None:
    model = type("Model", (), {"__module__": module})()
    with pytest.raises(ModelError, match=r"The model, Model, is .*: explain (the|a) PyTorch model"):
        gradcam.explain(model, TINY)
    assert "The model, Model, is " in refusal(model)


# Modules of the caller


def test_a_callers_module_is_unchanged(photo: Photo) -> None:
    model = tiny_model().train()
    model[0].requires_grad_(False)
    before = traces(model)
    classifier = gradcam.load_classifier(model, size=32, labels=list("abcde"))
    explanation = classifier.explain(photo("koala.webp"))
    assert_same(before, traces(model))
    assert classifier.model is model
    assert (classifier.name, classifier.classes) == ("Sequential", 5)
    assert explanation.heatmaps.max() == 1
    assert "A model object keeps its device and precision" in refusal(model, device="cpu")
    assert "A model object keeps" in refusal(model, precision="bf16")


def test_weights_go_into_a_callers_module(tmp_path: Path) -> None:
    torch.save({name: tensor + 1 for name, tensor in tiny_model().state_dict().items()}, tmp_path / "x.pth")
    model = tiny_model()
    expected = model[0].weight + 1
    gradcam.load_classifier(model, size=32, weights=tmp_path / "x.pth")
    assert torch.equal(model[0].weight, expected)
    assert model.training


def test_a_module_in_half_precision_is_given_pictures_in_it(photo: Photo) -> None:
    model = tiny_model().bfloat16()
    explanation = gradcam.load_classifier(model, size=32).explain(photo("koala.webp"))
    assert explanation.output.dtype == torch.bfloat16


def test_the_precision_of_the_input_is_that_of_the_weights_not_of_the_norms() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3).bfloat16())
    assert find_input_dtype(model) == torch.bfloat16
    assert find_input_dtype(nn.ReLU()) == torch.float32


# Models on several devices


class Spread(nn.Module):
    """A model whose second part stays on the meta device until it runs, as with accelerate's offloading."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 5, device="meta")
        self.kept = {"weight": torch.randn(5, 4), "bias": torch.randn(5)}

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(self.features(images).mean((2, 3)), self.kept["weight"], self.kept["bias"])


def test_a_model_on_several_devices_is_explained_on_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photo: Photo
) -> None:
    (tmp_path / "spread.py").write_text("from tests.models.test_own_models import Spread as make\n")
    classifier = gradcam.load_classifier(f"{tmp_path / 'spread.py'}:make", size=32)
    assert is_spread(classifier.model)
    model = tiny_model()
    assert not is_spread(model)
    model.hf_device_map = {"": 0}
    assert is_spread(model)
    assert {parameter.device.type for parameter in classifier.model.parameters()} == {"cpu", "meta"}
    assert classifier.device == torch.device("cpu")
    assert not classifier.model.training
    assert classifier.explain(photo("koala.webp")).maps.isfinite().all()
    for options in ({"device": "cpu"}, {"precision": "bf16"}):
        message = refusal(f"{tmp_path / 'spread.py'}:make", **options)
        assert message.startswith("The model is spread over several devices")


def test_a_model_that_accelerate_offloads_is_explained(tmp_path: Path, photo: Photo) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "aside.py").write_text(
        "import accelerate\nfrom tests.helpers import tiny_model\n"
        "def make(): return accelerate.cpu_offload(tiny_model().eval(), execution_device='cpu')\n"
    )
    classifier = gradcam.load_classifier(f"{tmp_path / 'aside.py'}:make", size=32)
    assert {parameter.device.type for parameter in classifier.model.parameters()} == {"meta"}
    expected = gradcam.load_classifier(tiny_model(), size=32).explain(photo("koala.webp"))
    explanation = classifier.explain(photo("koala.webp"))
    torch.testing.assert_close(explanation.maps, expected.maps)
    torch.testing.assert_close(explanation.output, expected.output)


def test_a_model_without_values_cannot_be_moved(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 2, device='meta')\n")
    message = refusal(f"{tmp_path / 'empty.py'}:make", device="cpu")
    assert message.startswith("The model cannot be moved to cpu in fp32: ")


def test_pictures_of_several_sizes_do_not_fit_one_batch(photo: Photo) -> None:
    class AsItIs:
        def __call__(self, image: np.ndarray) -> Tensor:
            return torch.from_numpy(image).permute(2, 0, 1).float()

        def region(self, height: int, width: int) -> tuple[int, int, int, int]:
            return 0, 0, height, width

    classifier = gradcam.Classifier("own", tiny_model(), AsItIs(), 5, None, "4")
    pictures = [np.zeros((20, 30, 3), np.uint8), np.zeros((30, 20, 3), np.uint8)]
    with pytest.raises(gradcam.GradcamError, match="20 x 30 and 30 x 20 after preprocessing"):
        classifier.explain(pictures)


def test_the_random_state_is_unchanged(factory: Path) -> None:
    before = torch.get_rng_state()
    load(f"{factory}:make")
    assert torch.equal(torch.get_rng_state(), before)
