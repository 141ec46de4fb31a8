"""Check the list of layers against numbers worked by hand, the model itself, and `explain` at each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

import gradcam
from gradcam.cam.listing import LayerRow, list_layers
from gradcam.errors import ImageError, LayerError, ModelError
from tests.helpers import TINY, assert_same, tiny_model, tiny_vit, traces


def by_name(rows: tuple[LayerRow, ...]) -> dict[str, LayerRow]:
    return {row.name: row for row in rows}


def suggestion(rows: tuple[LayerRow, ...]) -> str | None:
    names = [row.name for row in rows if row.is_suggested]
    assert len(names) <= 1
    return names[0] if names else None


def on_meta(build: Any, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(weights=None, **options)


def test_the_numbers_of_resnet50_are_those_of_its_paper() -> None:
    rows = by_name(list_layers(on_meta(models.resnet50)))
    size = 14_964_736
    assert rows["layer4"] == LayerRow("layer4", "Sequential", (1, 2048, 7, 7), (7, 7), (32, 32), size, True, None, True)
    assert rows["conv1"].parameters == 64 * 3 * 7 * 7
    assert rows["fc"].parameters == 2048 * 1000 + 1000
    strides = [rows[name].stride for name in ("conv1", "maxpool", "layer1", "layer2", "layer3")]
    assert strides == [(2, 2), (4, 4), (4, 4), (8, 8), (16, 16)]
    assert rows["avgpool"].shape == (1, 2048, 1, 1)
    assert (rows["avgpool"].cam, rows["avgpool"].grid, rows["avgpool"].reason) == (False, None, "no grid")
    assert rows["layer1.0.relu"].reason == "runs 3 times"


def test_every_layer_has_a_row_and_its_own_parameters() -> None:
    model = models.densenet121(weights=None).to("meta")
    rows = by_name(list_layers(model, 64))
    modules = dict(model.named_modules())
    assert list(rows) == [name for name in modules if name]
    for name, row in rows.items():
        assert row.parameters == sum(parameter.numel() for parameter in modules[name].parameters())
        assert row.type == type(modules[name]).__name__
    assert sum(rows[name].parameters for name, _ in model.named_children()) == 7_978_856


def small_vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
    model = models.VisionTransformer(32, 8, **sizes, **options)
    nn.init.normal_(model.heads.head.weight)  # they are initialised to zero
    return model


class Registers(nn.Module):
    """A ViT with four register tokens after the class token; the score reads some or all of them."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.prefix = nn.Parameter(torch.randn(1, 5, 16))
        self.norm1, self.norm2, self.norm = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.prefix.expand(len(images), -1, -1), patches], 1)
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed)[0]
        x = self.norm(x + self.mlp(self.norm2(x)))
        if self.read == "slice":
            return self.head(x[:, :5].mean(1))
        if self.read == "too much":
            return self.head(x[:, :6].mean(1))
        return self.head(x[:, 0] + x[:, 5:].mean(1))


BUILDERS = {
    "resnet18": (models.resnet18, 64), "vgg11": (models.vgg11, 64), "squeezenet1_1": (models.squeezenet1_1, 64),
    "shufflenet_v2_x0_5": (models.shufflenet_v2_x0_5, 64), "mobilenet_v3_small": (models.mobilenet_v3_small, 64),
    "vit": (small_vit, 32),
}  # fmt: skip
LISTED = {name: (lambda build=build: build(), size) for name, (build, size) in BUILDERS.items()}
LISTED |= {f"registers, {read}": (lambda read=read: Registers(read), 32) for read in ("slice", "too much", "all")}


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_a_map_can_be_taken_exactly_where_explain_takes_one(name: str) -> None:
    build, size = LISTED[name]
    torch.manual_seed(0)
    model, images = build(), torch.randn(1, 3, size, size)
    rows = list_layers(model, size)
    for row in rows:
        try:
            gradcam.explain(model, images, row.name, target=1)
            can_be_taken = True
        except LayerError:
            can_be_taken = False
        assert row.cam == can_be_taken, row
        assert row.cam == (row.reason is None)
        assert (row.grid is None) == (row.stride is None)
    assert suggestion(rows) == gradcam.explain(model, images, target=1).layer


MODELS = {
    "alexnet": 224, "convnext_tiny": 64, "densenet121": 64, "efficientnet_b0": 64, "googlenet": 64,
    "inception_v3": 128, "maxvit_t": 224, "mnasnet0_5": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64,
    "regnet_y_400mf": 64, "resnet18": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64, "swin_t": 64,
    "swin_v2_t": 64, "vgg11": 64, "vit_b_32": 224,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_suggestion_is_what_explain_takes(name: str) -> None:
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, **options)
    for parameter in model.parameters():
        # A head that is initialised to zero has no gradient, which the graph alone does not reveal.
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    images = torch.randn(1, 3, MODELS[name], MODELS[name])
    layer = gradcam.explain(model, images).layer
    rows = list_layers(model, images)
    assert suggestion(rows) == layer
    assert list_layers(model.to("meta"), images) == rows


def test_behind_the_last_attention_only_the_class_token_counts() -> None:
    rows = by_name(list_layers(small_vit().to("meta"), 32))
    last = "encoder.layers.encoder_layer_1"
    inner = [f"{last}.{name}" for name in ("mlp", "ln_2", "self_attention")]
    for name in ("encoder", "encoder.ln", "encoder.layers", last, *inner):
        assert rows[name].reason == "the score depends only on its class token"
        assert rows[name].grid == (4, 4)
    assert rows["encoder.layers.encoder_layer_0"].cam
    norm = LayerRow(f"{last}.ln_1", "LayerNorm", (1, 17, 16), (4, 4), (8, 8), 32, True, None, True)
    assert rows[norm.name] == norm
    assert rows[f"{last}.self_attention.out_proj"].reason == "not called in evaluation mode"


class Odd(nn.Module):
    """A model with one layer for each reason why a layer has no map."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.dead_end = nn.Conv2d(4, 4, 1)
        self.detached = nn.Conv2d(4, 4, 1)
        self.parts = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.ReLU()])
        self.training_only = nn.Linear(4, 2)
        self.rows = nn.Flatten(0, 1)
        self.indices = Indices()
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> dict[str, Any]:
        x = self.frozen(self.first(images))
        self.dead_end(x)
        self.rows(x[:, :, None])
        for part in self.parts:
            x = part(x)
        self.indices(x)
        x = x + self.detached(x).detach()
        if self.training:
            self.training_only(x)
        return {"loss": images.sum(), "logits": self.head(x.mean((2, 3)))}


class Indices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


def test_the_reasons_and_strides() -> None:
    model = Odd()
    rows = by_name(list_layers(model, (24, 12)))
    assert {name: row.reason for name, row in rows.items()} == {
        "first": None,
        "frozen": None,
        "dead_end": "the score does not depend on it",
        "detached": "the score does not depend on it",
        "parts": "only its submodules are called",
        "parts.0": None,
        "parts.1": None,
        "training_only": "not called in evaluation mode",
        "rows": "its first axis is not the batch",
        "indices": "returns no floating-point tensor",
        "head": "no grid",
    }
    assert rows["first"].shape == (1, 4, 12, 12)
    assert rows["first"].stride == (2, 1)
    assert (rows["parts"].shape, rows["indices"].shape) == (None, None)
    assert rows["frozen"].parameters == 4 * 4 + 4
    assert suggestion(tuple(rows.values())) == "parts.1"
    assert [type(side) for side in rows["first"].stride or ()] == [int, int]


def test_a_stride_that_does_not_divide_is_a_fraction() -> None:
    rows = by_name(list_layers(on_meta(models.alexnet), 224))
    assert rows["features.0"].grid == (55, 55)
    assert rows["features.0"].stride == (224 / 55, 224 / 55)


def test_volumes_have_three_strides() -> None:
    model = nn.Sequential(nn.Conv3d(1, 2, 3, stride=(1, 2, 4), padding=1), nn.Flatten(), nn.Linear(2 * 8 * 4 * 2, 3))
    (row, *_) = list_layers(model, torch.zeros(1, 1, 8, 8, 8))
    assert (row.grid, row.stride, row.is_suggested) == ((8, 4, 2), (1, 2, 4), True)


def test_rows_are_counted_over_all_images() -> None:
    rows = list_layers(tiny_model(), TINY)
    assert [row.shape for row in rows[:4]] == [(3, 4, 12, 16)] * 3 + [(3, 6, 6, 8)]
    assert suggestion(rows) == gradcam.explain(tiny_model(), TINY).layer


@pytest.mark.parametrize("images", [lambda x: (x,), lambda x: {"input": x}])
def test_images_are_given_as_to_explain(images: Any) -> None:
    assert list_layers(tiny_model(), images(TINY)) == list_layers(tiny_model(), TINY)


def test_a_size_is_that_of_an_rgb_image() -> None:
    assert list_layers(tiny_model(), (12, 16)) == list_layers(tiny_model(), TINY[:1])
    assert list_layers(tiny_model().half(), 12) == list_layers(tiny_model(), 12)


@pytest.mark.parametrize("size", [0, -3, (12, 0), (1, 2, 3), ()])
def test_wrong_sizes_are_errors(size: Any) -> None:
    with pytest.raises(ImageError, match="expected a tensor, or a size: 224"):
        list_layers(tiny_model(), size)


def test_a_model_that_is_no_module_is_an_error() -> None:
    with pytest.raises(ModelError, match="expected a torch.nn.Module"):
        list_layers("resnet50")  # type: ignore[arg-type]


def test_a_model_without_a_grid_has_no_suggestion() -> None:
    rows = list_layers(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2)), (2, 2))
    assert suggestion(rows) is None
    assert [row.reason for row in rows] == ["no grid"] * 3


class Draws(nn.Module):
    """A model that draws random numbers, counts its runs, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        self.runs.add_(1)
        return self.layer(images.mul_(2) + torch.rand(1)).mean((2, 3))


@pytest.mark.parametrize("build", [tiny_model, Draws, Odd])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_images_are_left_as_they_were(build: Any, training: bool) -> None:
    model = build().train(training)
    images, before, original = TINY.clone(), traces(model), TINY.clone()
    list_layers(model, images)
    after = traces(model)
    if isinstance(model, Draws):  # restoring its counter writes to it
        assert model.runs == 0
        before.pop("values"), after.pop("values")
    assert_same(before, after)
    assert torch.equal(images, original)
    assert not images.requires_grad


def test_nothing_is_left_after_an_error() -> None:
    model = tiny_model()
    before = traces(model)
    with pytest.raises(RuntimeError):
        list_layers(model, torch.zeros(1, 4, 12, 12))
    assert_same(before, traces(model))


def test_a_frozen_model_and_no_grad_make_no_difference() -> None:
    expected = list_layers(tiny_model(), TINY)
    with torch.no_grad():
        assert list_layers(tiny_model().requires_grad_(False), TINY) == expected
    model = tiny_model()
    with torch.inference_mode():
        assert list_layers(model, TINY) == expected
        assert list_layers(model, TINY.clone()) == expected


def test_timms_and_transformers_suggestions_are_what_explain_takes() -> None:
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    cases = [
        (timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5), 64),
        (timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, num_classes=5), 64),
        (timm.create_model("resnet10t", num_classes=5), 64),
        (transformers.AutoModelForImageClassification.from_config(tiny_vit()), 32),
    ]
    for model, size in cases:
        images = torch.randn(1, 3, size, size)
        rows = list_layers(model, size)
        assert suggestion(rows) == gradcam.explain(model, images).layer
        assert list_layers(model.to("meta"), size) == rows
