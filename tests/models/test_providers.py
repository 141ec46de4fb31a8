"""Test models by name: each provider against its library, on photographs, with files made here, without a network."""

from __future__ import annotations

import hashlib
import re
import shutil
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import nn
from torchvision import models

import gradcam
from gradcam.errors import ModelError
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.preprocess import Preprocessing
from gradcam.models.providers import base as network
from gradcam.models.providers import load_parts
from gradcam.models.providers import timm as timm_provider
from gradcam.models.providers import torchvision as provider
from gradcam.models.providers.huggingface import make_preprocess

Photo = Callable[[str], Path]
PHOTOGRAPHS = ("cat_and_espresso.jpg", "koala.webp", "rocket.jpg")
LEVEL = 1 / 255 / 0.225  # one of 256 levels, in the units of most models' input


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any, **_: Any) -> Any:
        url = request if isinstance(request, str) else request.full_url
        if not url.startswith("file:"):
            raise urllib.error.URLError("no network here")
        return opened(request)

    opened = urllib.request.urlopen
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty checkpoint folder of torch hub."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


def picture(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def refusal(name: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        gradcam.load_classifier(name, device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def randomise(model: nn.Module) -> nn.Module:
    """Re-initialise weights and statistics, so that no two layers share them and none is zero."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.is_floating_point() and tensor.ndim < 2:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:  # Batch norms estimate their statistics, so that the input affects the output.
        norm.train().momentum = 0.9
    with torch.no_grad():
        for _ in range(2 if norms else 0):
            model(torch.randn(8, 3, 96, 96, generator=generator))
    return model.eval()


def save_cached(name: str, model: nn.Module, change: Callable[[str], str] = str) -> Path:
    """Save the weights under the name of the file that torchvision would download to torch hub's cache."""
    path = provider.find_cache_path(provider.list_weights(name).DEFAULT)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({change(key): tensor for key, tensor in model.state_dict().items()}, path)
    return path


# torchvision


def check_alike(photo: Photo, ours: Preprocessing, theirs: Any) -> None:
    for name in PHOTOGRAPHS:
        image = picture(photo(name))
        difference = abs(ours(np.array(image)) - theirs(image)) / LEVEL
        assert difference.max() < 2.1  # Both round to 8 bits after each axis.
        assert difference.mean() < 0.01


WEIGHTS = {"resnet50": "IMAGENET1K_V2", "vit_b_16": "IMAGENET1K_SWAG_E2E_V1"}


class OddModule(nn.Module):
    """A model with one property that complicates loading, such as an unsaved buffer or a shared weight."""

    def __init__(self, classes: int, property_name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, classes)
        if property_name == "buffer":
            self.register_buffer("factor", torch.empty(2).fill_(3.0), persistent=False)
        elif property_name == "own buffer":
            self.register_buffer("first", self.layer.weight.detach() * 0 + 2, persistent=False)
        elif property_name == "read":
            self.norm = self.layer.weight.detach().norm().item()
        elif property_name == "list":
            self.held = [self.layer.weight]
        elif property_name == "shared":
            self.other = nn.Linear(3, classes)
            self.other.weight = self.layer.weight


MODEL_BUILDERS: dict[str, network.Build] = {
    "mobilenet_v3_small": lambda classes: models.mobilenet_v3_small(num_classes=classes),
    "regnet_y_400mf": lambda classes: models.regnet_y_400mf(num_classes=classes),
    "swin_t": lambda classes: models.swin_t(num_classes=classes),
    "timm's ViT": lambda classes: timm.create_model("vit_tiny_patch16_224", num_classes=classes),
    "timm's MaxViT": lambda classes: timm.create_model("maxvit_rmlp_pico_rw_256", num_classes=classes),
    "an LSTM": lambda classes: nn.Sequential(OrderedDict(a=nn.LSTM(3, 3), head=nn.Linear(3, classes))),
} | {
    f"odd: {property_name}": partial(OddModule, property_name=property_name)
    for property_name in ("buffer", "own buffer", "read", "list", "shared")
}


@pytest.mark.parametrize("name", MODEL_BUILDERS)
def test_skipping_the_initialisation_gives_the_same_model(tmp_path: Path, name: str) -> None:
    model = MODEL_BUILDERS[name](7)
    state = model.state_dict()
    if name == "mobilenet_v3_small":  # A training in another memory format stores its weights like this.
        weights = {key: entry for key, entry in state.items() if entry.ndim == 4}
        state |= {key: entry.to(memory_format=torch.channels_last) for key, entry in weights.items()}
    torch.save(state, tmp_path / "mine.pth")
    before = torch.get_rng_state()
    loaded, count, _ = network.build_for(read_checkpoint(tmp_path / "mine.pth"), MODEL_BUILDERS[name], 1000)
    assert count == 7
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(loaded, kind)())
        for key, tensor in getattr(model, kind)():
            assert torch.equal(tensors[key], tensor), key
            assert tensors.pop(key).stride() == tensor.stride(), key
        assert not tensors
    for module in loaded.modules():
        module_tensors = [*module.parameters(), *getattr(module, "held", []), *getattr(module, "_flat_weights", [])]
        assert not any(tensor.is_meta for tensor in module_tensors)
    assert name != "odd: shared" or loaded.other.weight is loaded.layer.weight
    if name in ("mobilenet_v3_small", "regnet_y_400mf"):
        assert torch.equal(before, torch.get_rng_state()), "nothing is drawn for what the checkpoint has"


def test_computed_buffers_of_a_detector_have_values(tmp_path: Path) -> None:
    model = models.get_model("ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None).eval()
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    detector = gradcam.load_detector("ssdlite320_mobilenet_v3_large", weights=tmp_path / "mine.pth", device="cpu")
    assert isinstance(detector.model, type(model))
    image = torch.rand(3, 320, 320)
    (detections,), (expected,) = detector.model([image]), model([image])
    assert torch.equal(detections["boxes"], expected["boxes"])
    assert torch.equal(detections["scores"], expected["scores"])


@pytest.mark.parametrize("model", ["mobilenet_v2", "efficientnet_b1", "inception_v3", "swin_v2_t", *WEIGHTS])
def test_preprocessing_equals_torchvisions_transforms(photo: Photo, model: str) -> None:
    transforms = provider.find_weights(model, WEIGHTS.get(model, "IMAGENET1K_V1")).transforms()
    check_alike(photo, provider.to_preprocessing(transforms), transforms)


def test_the_transforms_of_all_torchvision_weights_are_supported() -> None:
    names = provider.list_names()
    assert len(names) == len(set(names)) >= 90
    assert {"resnet50", "vit_b_16", "googlenet", "fasterrcnn_resnet50_fpn", "deeplabv3_resnet50"} <= set(names)
    assert not any(name.startswith(("quantized", "r3d", "raft")) for name in names)
    for name in names:
        if provider.find_task(name) != "classification":
            continue
        for weights in provider.list_weights(name):
            transforms = weights.transforms()
            preprocessing = provider.to_preprocessing(transforms)
            assert preprocessing.size == (transforms.crop_size[0],) * 2
            assert preprocessing.resize == transforms.resize_size[0]
            assert preprocessing.interpolation == transforms.interpolation.value


def test_a_cached_file_is_used_without_the_network(hub: Path, photo: Photo) -> None:
    model = randomise(models.mobilenet_v3_small())
    path = save_cached("mobilenet_v3_small", model)
    before = torch.get_rng_state()
    classifier = gradcam.load_classifier("mobilenet_v3_small", device="cpu")
    assert torch.equal(before, torch.get_rng_state())
    weights = models.MobileNet_V3_Small_Weights.DEFAULT
    assert path.parent == hub
    with torch.no_grad():
        expected = model(weights.transforms()(picture(photo("koala.webp")))[None]).softmax(1)
    explanation = classifier.explain(photo("koala.webp"))
    torch.testing.assert_close(explanation.probabilities(), expected, rtol=0, atol=2e-4)
    assert list(classifier.labels) == weights.meta["categories"]
    assert (classifier.classes, classifier.activation, classifier.notes) == (1000, "softmax", ())
    assert classifier.layer == gradcam.explain(model, classifier.batch([gradcam.read_image(photo("koala.webp"))])).layer


def test_old_names_in_densenet_files_are_renamed(hub: Path, photo: Photo) -> None:
    model = randomise(models.densenet121())

    path = save_cached("densenet121", model, partial(re.sub, r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2."))
    assert "features.denseblock1.denselayer1.norm.1.weight" in torch.load(path)
    classifier = gradcam.load_classifier("densenet121:DEFAULT", device="cpu")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(images), model(images))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_models_with_auxiliary_heads_equal_those_with_torchvisions_weights(hub: Path, name: str) -> None:
    save_cached(name, randomise(models.get_model(name, init_weights=False, aux_logits=True)))
    theirs = models.get_model(name, weights="DEFAULT").eval()  # from the cache
    ours = load_parts(name, None).model.eval()
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        output = ours(images)
        torch.testing.assert_close(output, theirs(images), rtol=0, atol=1e-4)
    assert (output[0] - output[1]).std() > 0.01


def test_a_vit_has_the_size_of_its_weights() -> None:
    with torch.device("meta"):
        large = provider._build("vit_b_16", provider.find_weights("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"), 7)
    assert (large.image_size, large.heads.head.out_features) == (384, 7)


def test_without_a_network_the_error_says_which_file_to_fetch(hub: Path) -> None:
    message = refusal("resnet18")
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    for part in ("no network here", url, str(hub / "resnet18-f37072fd.pth"), "--weights FILE", "'efficientnet_lite0'"):
        assert part in message
    assert not hub.exists()


def test_a_file_is_fetched_whole_or_not_at_all(tmp_path: Path, hub: Path) -> None:
    source = tmp_path / "weights.pth"
    source.write_bytes(b"weights" * 1000)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    with pytest.raises(ModelError, match="invalid hash value"):
        network.fetch(source.as_uri(), hub / "a.pth", "0" * 8)
    assert list(hub.iterdir()) == []
    network.fetch(source.as_uri(), hub / "a.pth", digest)
    assert [path.name for path in hub.iterdir()] == ["a.pth"]
    assert (hub / "a.pth").read_bytes() == source.read_bytes()


def test_a_cached_file_that_is_cut_off_is_named(hub: Path) -> None:
    path = save_cached("squeezenet1_1", models.squeezenet1_1())
    path.write_bytes(path.read_bytes()[:-5000])
    message = refusal("squeezenet1_1")
    assert message.startswith(f"{path}: is damaged or cut off")
    assert message.endswith("squeezenet1_1-b8a52dc0.pth")
    assert "Delete the file" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50:V3", "resnet50 has no weights 'V3': choose one of 'IMAGENET1K_V1', 'IMAGENET1K_V2'."),
        ("vgg16:IMAGENET1K_FEATURES", "have no classifier"),
        ("resnet51", "There is no model 'resnet51'. Nearest: 'resnet50', 'resnet18'"),
        ("resnet51:IMAGENET1K_V1", "There is no model 'resnet51:IMAGENET1K_V1'. Nearest: 'resnet50'"),
        ("ResNet50", "Nearest: 'resnet50'"),
        ("efficientnet_lite", "Nearest: 'efficientnet_lite0'"),
        ("raft_large", "There is no model 'raft_large'"),
        ("zzz", "A model can also be given as open_clip:NAME, smp:FOLDER, yolo:FILE.pt, timm:NAME"),
        ("", "There is no model ''. `gradcam models`"),
        ("weights.pth", "There is no model 'weights.pth'. A checkpoint needs an architecture: --model NAME --weights"),
        ("google/vit-base-patch16", "give hf:google/vit-base-patch16"),
        ("tests", "hf:tests if transformers saved it, or timm:tests if timm did"),
        (3, "There is no model 3: expected a name, such as 'efficientnet_lite0', or a torch.nn.Module."),
    ],
)
def test_an_unknown_name_is_refused_with_suggestions(name: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert message in refusal(name)


def test_a_checkpoint_determines_the_number_of_classes(tmp_path: Path, hub: Path, photo: Photo) -> None:
    model = randomise(models.densenet121(num_classes=14))
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "x.pth")
    options: dict[str, Any] = {"activation": "sigmoid", "size": 64, "device": "cpu"}
    classifier = gradcam.load_classifier("densenet121", weights=tmp_path / "x.pth", **options)
    assert (classifier.classes, classifier.labels, classifier.activation) == (14, None, "sigmoid")
    assert not hub.exists()
    explanation = classifier.explain(photo("koala.webp"), target=13)
    with torch.no_grad():
        expected = model(classifier.batch([gradcam.read_image(photo("koala.webp"))])).sigmoid()
    torch.testing.assert_close(explanation.probabilities(), expected, rtol=0, atol=1e-4)


def test_a_checkpoint_with_1000_classes_gets_the_labels_of_imagenet(tmp_path: Path, hub: Path) -> None:
    torch.save(models.squeezenet1_1().state_dict(), tmp_path / "x.pth")
    classifier = gradcam.load_classifier("squeezenet1_1", weights=tmp_path / "x.pth", device="cpu")
    assert (classifier.labels[105], classifier.activation) == ("koala", "softmax")
    assert any("Assuming the 1000 classes of ImageNet" in note for note in classifier.notes)


def test_a_checkpoint_with_one_logit_is_binary(tmp_path: Path, hub: Path, photo: Photo) -> None:
    model = randomise(models.mobilenet_v3_small(num_classes=1))
    torch.save(model.state_dict(), tmp_path / "x.pth")
    options: dict[str, Any] = {"labels": ["crack"], "device": "cpu"}
    classifier = gradcam.load_classifier("mobilenet_v3_small", weights=tmp_path / "x.pth", **options)
    assert (classifier.classes, classifier.labels, classifier.activation) == (2, ["not crack", "crack"], "sigmoid")
    explanation = classifier.explain(photo("koala.webp"), target=[["crack", "not crack"]])
    logit = explanation.output.item()
    assert explanation.scores.tolist() == [[pytest.approx(logit), pytest.approx(-logit)]]


def test_the_embedded_model_loads_a_checkpoint_with_other_classes(
    tmp_path: Path, classifier: gradcam.Classifier
) -> None:
    weights = dict(classifier.model.state_dict())
    weights["head.3.weight"], weights["head.3.bias"] = weights["head.3.weight"][:5], weights["head.3.bias"][:5]
    torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "five.pth")
    five_classes = gradcam.load_classifier(weights=tmp_path / "five.pth", device="cpu", labels=list("abcde"))
    assert (five_classes.classes, five_classes.labels, five_classes.layer) == (5, list("abcde"), "layer4")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(five_classes.model(images), classifier.model(images)[:, :5])


# timm


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with three named classes, as timm saves it."""
    folder = tmp_path_factory.mktemp("timm") / "model"
    model = randomise(timm.create_model("test_resnet", num_classes=3))
    config = {"num_classes": 3, "label_names": ["ant", "bee", "cow"]}
    timm.models.save_for_hf(model, str(folder), model_config=config, safe_serialization=True)
    return folder


def predict_by_timm(model: nn.Module, path: Path) -> torch.Tensor:
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad():
        return model.eval()(transform(picture(path))[None]).softmax(1)


@pytest.mark.parametrize("form", ["timm:{}", "timm:local-dir:{}"])
def test_timms_folder_gives_its_predictions_and_labels(timm_folder: Path, photo: Photo, form: str) -> None:
    classifier = gradcam.load_classifier(form.format(timm_folder), device="cpu")
    theirs = timm.create_model(f"local-dir:{timm_folder}", pretrained=True)
    assert (classifier.classes, classifier.labels, classifier.activation) == (3, ["ant", "bee", "cow"], "softmax")
    assert any("--activation" in note for note in classifier.notes)
    probabilities = classifier.explain(photo("koala.webp")).probabilities()
    torch.testing.assert_close(probabilities, predict_by_timm(theirs, photo("koala.webp")), rtol=0, atol=1e-4)


def test_timms_cached_file_is_used_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photo: Photo
) -> None:
    import huggingface_hub
    import safetensors.torch

    theirs = randomise(timm.create_model("test_resnet.r160_in1k"))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, path)
    requests = []

    def find_cached(repository: str, name: str, revision: str | None = None) -> str | None:
        requests.append((repository, name))
        return str(path) if name == path.name else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find_cached)
    classifier = gradcam.load_classifier("timm:test_resnet.r160_in1k", device="cpu")
    assert requests[0] == ("timm/test_resnet.r160_in1k", "model.safetensors")
    assert (classifier.classes, classifier.labels[105], classifier.notes) == (1000, "koala", ())
    probabilities = classifier.explain(photo("koala.webp")).probabilities()
    torch.testing.assert_close(probabilities, predict_by_timm(theirs, photo("koala.webp")), rtol=0, atol=1e-4)


def test_timms_model_takes_a_checkpoint_of_other_classes(tmp_path: Path) -> None:
    model = randomise(timm.create_model("test_vit", num_classes=7))
    torch.save(model.state_dict(), tmp_path / "seven.pth")
    classifier = gradcam.load_classifier("timm:test_vit", weights=tmp_path / "seven.pth", device="cpu")
    assert (classifier.classes, classifier.labels) == (7, None)
    images = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(images), model(images))


@pytest.mark.parametrize(
    "config",
    [
        {"input_size": (3, 224, 224), "crop_pct": 0.95, "crop_mode": "center", "interpolation": "bicubic"},
        {"input_size": (3, 288, 288), "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"},
        {"input_size": (3, 384, 384), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"},
        {"input_size": (3, 128, 192), "crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic"},
    ],
)
def test_preprocessing_equals_timms_transforms(photo: Photo, config: dict[str, Any]) -> None:
    config = {**config, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    check_alike(photo, timm_provider.to_preprocessing(config), timm.data.create_transform(**config))


@pytest.mark.parametrize(("mode", "size"), [("border", (224, 224)), ("center", (224, 320))])
def test_preprocessing_of_timms_that_pads_is_refused(mode: str, size: tuple[int, int]) -> None:
    config = {"input_size": (3, *size), "crop_pct": 0.9, "crop_mode": mode, "interpolation": "bicubic"}
    with pytest.raises(ModelError, match="pads images"):
        timm_provider.to_preprocessing({**config, "mean": (0,) * 3, "std": (1,) * 3})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("timm:resnet19", ["timm has no model 'resnet19'. Nearest: 'resnet18'"]),
        ("timm:resnet18.a9_in1k", ["timm has no model 'resnet18.a9_in1k'. Nearest: ", "'resnet18.a1_in1k'"]),
        ("timm:", ["timm has no model ''", "timm.list_models() lists them"]),
        ("timm:./nothing", ["nothing: is not a folder, expected a folder written by timm.models.save_for_hf()"]),
        ("timm:resnet18.a1_in1k", ["no network here", "huggingface.co/timm/resnet18.a1_in1k", "--weights FILE"]),
        ("timm:hf-hub:timm/nothing", ["no network here", "huggingface.co/timm/nothing", "'efficientnet_lite0'"]),
        ("timm:test_resnet", ["no network here"]),
    ],
)
def test_models_that_timm_cannot_load_are_refused(name: str, parts: list[str]) -> None:
    message = refusal(name)
    for part in parts:
        assert part in message


# Hugging Face


def save_classifier(folder: Path, config: Any, processor: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForImageClassification.from_config(config)
    randomise(model).save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return folder


def make_label_options(count: int) -> dict[str, Any]:
    labels = {index: f"kind {index}" for index in range(count)}
    return {"id2label": labels, "label2id": {label: index for index, label in labels.items()}}


def vit_config(**options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **options)


def resnet_config(**options: Any) -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    return transformers.ResNetConfig(**sizes, layer_type="basic", **options)


def convnext_config(**options: Any) -> Any:
    return transformers.ConvNextConfig(depths=[1] * 4, hidden_sizes=[8] * 4, **options)


def vit_processor(height: int = 32, width: int = 32, **options: Any) -> Any:
    return transformers.ViTImageProcessor(size={"height": height, "width": width}, **options)


def bit_processor(side: int, height: int, width: int, **options: Any) -> Any:
    size, crop = {"shortest_edge": side}, {"height": height, "width": width}
    return transformers.BitImageProcessor(size=size, crop_size=crop, **options)


def convnext_processor(side: int) -> Any:
    return transformers.ConvNextImageProcessor(size={"shortest_edge": side})


FAMILIES: dict[str, tuple[Any, Any, tuple[int, int]]] = {
    "vit": (vit_config, vit_processor, (32, 32)),
    "resnet": (resnet_config, lambda: bit_processor(72, 64, 64), (64, 64)),
    "convnext": (convnext_config, lambda: convnext_processor(64), (64, 64)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_faces_folder_gives_its_pixels_predictions_and_labels(
    tmp_path: Path, photo: Photo, family: str
) -> None:
    make_config, make_processor, size = FAMILIES[family]
    folder = save_classifier(tmp_path / "folder", make_config(**make_label_options(4)), make_processor())
    classifier = gradcam.load_classifier(f"hf:{folder}", device="cpu")
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    for name in PHOTOGRAPHS:
        image = picture(photo(name))
        pixels = processor(image, return_tensors="pt")["pixel_values"]
        assert pixels.shape[2:] == size
        assert torch.equal(classifier.preprocess(np.array(image)), pixels[0])
        with torch.no_grad():
            expected = theirs(pixels).logits
        explanation = classifier.explain(photo(name))
        torch.testing.assert_close(explanation.output["logits"], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(explanation.probabilities(), expected.softmax(1), rtol=0, atol=1e-5)
    assert classifier.labels == [f"kind {index}" for index in range(4)]
    assert (classifier.classes, classifier.activation, classifier.notes) == (4, "softmax", ())


@pytest.mark.parametrize(
    ("processor", "region"),
    [
        (vit_processor, (0, 0, 300, 400)),
        (lambda: bit_processor(256, 224, 224), (19, 69, 262, 262)),
        (lambda: convnext_processor(224), (19, 69, 262, 262)),
        (lambda: convnext_processor(384), (0, 0, 300, 400)),
        (lambda: transformers.ViTImageProcessor(do_resize=False), (0, 0, 300, 400)),
        (lambda: bit_processor(224, 100, 200, do_resize=False), (100, 100, 100, 200)),
        (lambda: transformers.BitImageProcessor(size={"shortest_edge": 90}, do_center_crop=False), (0, 0, 300, 400)),
    ],
)
def test_the_region_is_that_of_the_processor(processor: Any, region: tuple[int, ...]) -> None:
    preprocess, notes = make_preprocess(processor())
    assert preprocess.region(300, 400) == region
    assert notes == []
    # If exactly the region is grey, the output is even; if the grey area is smaller, the edge shows.
    y0, x0, height, width = region
    image = np.full((300, 400, 3), 255, np.uint8)
    image[y0 : y0 + height, x0 : x0 + width] = 128
    values = preprocess(image)[0]
    assert values[2:-2, 2:-2].std() < 0.02
    if (height, width) != (300, 400):
        image[y0 : y0 + height // 3] = 255
        assert preprocess(image)[0, 0].mean() > values.mean() + 0.5


def test_a_processor_whose_steps_are_not_known_is_measured() -> None:
    # It scales its size by 256 / 224, which its settings do not say.
    preprocess, notes = make_preprocess(transformers.LevitImageProcessor())
    assert notes == []
    assert preprocess.region(300, 400) == pytest.approx((19, 69, 262, 262), abs=1)


def test_a_processors_steps_may_be_changed(tmp_path: Path, photo: Photo) -> None:
    folder = save_classifier(tmp_path / "folder", resnet_config(**make_label_options(2)), FAMILIES["resnet"][1]())
    plain = gradcam.load_classifier(f"hf:{folder}", device="cpu")
    image = gradcam.read_image(photo("koala.webp"))
    preprocess = gradcam.load_classifier(f"hf:{folder}", device="cpu", mean=plain.preprocess.plain.mean).preprocess
    assert isinstance(preprocess, Preprocessing)
    difference = abs(preprocess(image) - plain.preprocess(image)) / LEVEL
    assert difference.max() < 3.1
    assert difference.mean() < 0.1  # torchvision resizes tensors with other rounding than Pillow.
    changed_preprocess = gradcam.load_classifier(f"hf:{folder}", device="cpu", size=128, std=(1, 1, 1)).preprocess
    assert (changed_preprocess.size, changed_preprocess.resize, changed_preprocess.std) == ((128, 128), 144, (1, 1, 1))


def test_a_multi_label_model_has_sigmoids(tmp_path: Path) -> None:
    config = vit_config(problem_type="multi_label_classification", **make_label_options(3))
    folder = save_classifier(tmp_path / "folder", config, vit_processor())
    assert gradcam.load_classifier(f"hf:{folder}", device="cpu").activation == "sigmoid"


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    transformers.ViTModel(vit_config()).save_pretrained(tmp_path / "backbone")
    vit_processor().save_pretrained(tmp_path / "backbone")
    message = "is not a trained classifier: 2 weights are missing, such as 'classifier.bias', 'classifier.weight'"
    assert message in refusal(f"hf:{tmp_path / 'backbone'}")


def test_a_checkpoint_for_hugging_faces_architecture(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "folder", vit_config(**make_label_options(3)), vit_processor())
    model = transformers.AutoModelForImageClassification.from_config(vit_config(num_labels=5)).eval()
    torch.save(model.state_dict(), tmp_path / "five.pth")
    classifier = gradcam.load_classifier(f"hf:{folder}", weights=tmp_path / "five.pth", device="cpu")
    assert (classifier.classes, classifier.labels) == (5, None)
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(images).logits, model(images).logits)


def test_a_folder_without_a_processor_gets_assumed_settings_and_a_note(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "folder", vit_config(**make_label_options(3)), None)
    classifier = gradcam.load_classifier(f"hf:{folder}", device="cpu")
    assert (classifier.preprocess.size, classifier.preprocess.resize) == ((32, 32), 37)
    assert "has no preprocessor_config.json" in classifier.notes[0]
    assert "Assumed a size of 32, a crop of 0.875, ImageNet's mean and std" in classifier.notes[1]


def test_a_size_that_a_vit_does_not_take(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "folder", vit_config(**make_label_options(3)), vit_processor())
    message = refusal(f"hf:{folder}", size=64)
    assert "fails on an image of 64 x 64 with 3 channel(s), ValueError: " in message
    assert "(64*64) doesn't match model (32*32)" in message


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:", ["does not exist"]),
        ("hf:./nothing", ["hf:./nothing does not exist: there is no such folder"]),
        ("hf:{empty}", ["has no config.json, expected a folder written by save_pretrained()"]),
        ("hf:nobody/nothing", ["no network here", "hf download nobody/nothing", "'efficientnet_lite0'"]),
        ("hf:{text}", ["cannot be loaded", "transformers has no image classifier of the model's type"]),
        ("hf:{broken}", ["cannot be loaded"]),
    ],
)
def test_models_that_hugging_face_cannot_load_are_refused(tmp_path: Path, name: str, parts: list[str]) -> None:
    folders = {kind: tmp_path / kind for kind in ("empty", "text", "broken")}
    folders["empty"].mkdir()
    transformers.BertConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(folders["text"])
    vit_processor().save_pretrained(folders["text"])
    folders["broken"].mkdir()
    (folders["broken"] / "config.json").write_text("{")
    message = refusal(name.format(**folders))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("timm:resnet18", "timm", "timm"), ("hf:x/y", "transformers", "hf")]
)
def test_a_missing_extra_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    import importlib

    imported = importlib.import_module

    def without(module_name: str, *arguments: Any) -> Any:
        if module_name == package:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)
        return imported(module_name, *arguments)

    monkeypatch.setattr(importlib, "import_module", without)
    assert refusal(name) == f'{package} is not installed: pip install ".[{extra}]" in a clone of gradcam'
    assert f'\n{extra} = ["{package}' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_the_logging_settings_of_hugging_face_are_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    folder = save_classifier(tmp_path / "folder", vit_config(**make_label_options(3)), vit_processor())
    logging.enable_progress_bar()
    before = logging.get_verbosity(), True
    capsys.readouterr()
    gradcam.load_classifier(f"hf:{folder}", device="cpu")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capsys.readouterr().err == ""
    shutil.rmtree(folder)


class Malice:
    """An object that runs code when it is unpickled: it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_no_library_reads_a_pickle_that_would_run_code(timm_folder: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "evil", tmp_path / "mark"
    shutil.copytree(timm_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Malice(mark)}, folder / "pytorch_model.bin")
    assert "contains code that runs when the file is loaded" in refusal(f"timm:{folder}")
    save_classifier(tmp_path / "hf", vit_config(), vit_processor())
    (tmp_path / "hf/model.safetensors").unlink()
    torch.save({"weight": Malice(mark)}, tmp_path / "hf/pytorch_model.bin")
    message = refusal(f"hf:{tmp_path / 'hf'}")
    assert message.endswith("would run code when it is loaded. Use a model with safetensors weights")
    assert not mark.exists()


def test_a_processor_gives_deep_pictures_through_the_same_steps(photo: Photo) -> None:
    preprocess, notes = make_preprocess(vit_processor(64, 48))
    assert notes == []
    grey = np.array(Image.open(photo("camera.png")).convert("L"))
    eight_bits = preprocess(np.repeat(grey[..., None], 3, axis=2))
    sixteen_bits = preprocess(grey.astype(np.uint16) * 257)  # the same image, with 16-bit values
    assert abs(sixteen_bits - eight_bits).max() < 3 / 255 / 0.5  # The 8-bit image is rounded while it is resized.
    darker = preprocess(grey.astype(np.uint16) * 257 - (grey > 0))
    assert 0 < abs(darker - sixteen_bits).max() < 1e-3


@pytest.mark.parametrize(("resample", "name"), [(0, "nearest"), (2, "bilinear"), (3, "bicubic")])
def test_a_processors_interpolation(resample: int, name: str) -> None:
    processor = vit_processor(64, 64, resample=resample)
    preprocess, notes = make_preprocess(processor)
    assert (preprocess.plain.interpolation, notes) == (name, [])


def test_a_processor_that_pads_is_measured() -> None:
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 80, "width": 80})
    preprocess, notes = make_preprocess(processor)
    assert notes == []
    assert preprocess(np.zeros((100, 100, 3), np.uint8)).shape == (3, 80, 80)
    assert (preprocess.region(100, 100), preprocess.window(100, 100)) == ((0, 0, 100, 100), (8, 8, 64, 64))
    with pytest.raises(gradcam.GradcamError, match="takes 8-bit RGB: convert the image"):
        preprocess(np.zeros((100, 100), np.uint16))


def test_a_regression_is_distinguished_from_a_probability(tmp_path: Path, photo: Photo) -> None:
    save_classifier(tmp_path, vit_config(num_labels=1, problem_type="regression"), vit_processor())
    classifier = gradcam.load_classifier(f"hf:{tmp_path}", device="cpu")
    assert (classifier.activation, classifier.classes, classifier.labels) == ("none", 1, ["output"])
    assert "The model is a regression" in classifier.notes[-1]
    explanation = classifier.explain(photo("koala.webp"))
    assert explanation.scores[0, 0] == pytest.approx(explanation.output.logits[0, 0].item())


@pytest.mark.parametrize("size", [8193, (16, 10**9)])
def test_a_size_that_no_model_has_is_refused(size: Any) -> None:
    assert "expected at most 8192 pixels" in refusal("efficientnet_lite0", size=size)
