"""Check the default layer of models with branches, of dense outputs and detectors, and for each kind of method."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamWarning, TargetError
from gradcam.targets import ClassTarget

ASSETS = Path(__file__).parents[2] / "assets"


def randomise(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode with random weights that carry a signal, in its heads as well."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=(2 / parameter[0].numel()) ** 0.5)
    return model.eval()


def correlate(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]).double())[0, 1])


class UNet(nn.Module):
    """A U-Net with two steps down, two up, skip connections, and a head of 1 x 1 or 3 x 3."""

    def __init__(self, kernel: int = 1) -> None:
        super().__init__()
        self.stem, self.down, self.bottom = (self.unit(a, b) for a, b in ((3, 8), (8, 16), (16, 32)))
        self.up1, self.up2 = self.unit(48, 16), self.unit(24, 8)
        self.head = nn.Conv2d(8, 5, kernel, padding=kernel // 2)

    def unit(self, inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, images: Tensor) -> Tensor:
        fine = self.stem(images)
        middle = self.down(F.max_pool2d(fine, 2))
        x = self.bottom(F.max_pool2d(middle, 2))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), middle], 1))
        return self.head(self.up2(torch.cat([F.interpolate(x, scale_factor=2), fine], 1)))


def segmenter(name: str) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=5)


def segformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(num_labels=5, hidden_sizes=[8, 16, 24, 32], depths=[1] * 4)
    return transformers.SegformerForSemanticSegmentation(config)


def depth() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=112, patch_size=14,
        out_indices=[1, 2, 3, 4], reshape_hidden_states=False,
    )  # fmt: skip
    return transformers.DepthAnythingForDepthEstimation(
        transformers.DepthAnythingConfig(
            backbone_config=backbone, patch_size=14, reassemble_hidden_size=32, neck_hidden_sizes=[8, 16, 32, 32],
            fusion_hidden_size=16, head_hidden_size=8,
        )
    )  # fmt: skip


Read = Callable[[Any], Tensor]
DENSE: list[tuple[str, Callable[[], nn.Module], Read, str, int]] = [
    ("unet", UNet, lambda output: output[:, 3], "bottom", 4),
    ("unet with a 3 x 3 head", lambda: UNet(3), lambda output: output[:, 3], "bottom", 4),
    ("fcn", lambda: segmenter("fcn_resnet50"), lambda output: output["out"][:, 3], "backbone", 8),
    ("deeplab", lambda: segmenter("deeplabv3_resnet50"), lambda output: output["out"][:, 3], "classifier.0", 8),
    ("lraspp", lambda: segmenter("lraspp_mobilenet_v3_large"), lambda output: output["out"][:, 3], "backbone.16", 16),
    ("segformer", segformer, lambda output: output.logits[:, 3], "decode_head.linear_projections.3", 32),
    ("depth", depth, lambda output: output.predicted_depth, "neck.fusion_stage.layers.0.residual_layer2", 28),
]


@pytest.mark.parametrize(("name", "build", "read", "layer", "stride"), DENSE, ids=[item[0] for item in DENSE])
def test_a_dense_output_is_explained_at_the_encoders_end_and_not_by_itself(
    name: str, build: Callable[[], nn.Module], read: Read, layer: str, stride: int
) -> None:
    model = randomise(build())
    images = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(1))
    explanation = gradcam.explain(model, images, target=lambda output: read(output).mean((1, 2)), evidence="signed")
    assert explanation.layer == layer
    assert explanation.maps.shape[2] == -(-112 // stride)
    with torch.no_grad():
        values = read(model(images))[:, None]
    size = explanation.maps.shape[2:]
    assert abs(correlate(explanation.maps[0, 0], F.interpolate(values, size, mode="area")[0, 0])) < 0.95


class AttentionLevel(nn.Module):
    """A U-Net level: one step down and up again, with a gate on the skip connection; it contains the level below."""

    def __init__(self, channels: int, below: nn.Module) -> None:
        super().__init__()
        self.below, self.gate = below, nn.Conv2d(channels, channels, 1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(self.below(x))
        return up + self.gate(up).sigmoid() * x


class DownBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.ReLU())


def test_layers_inside_modules_named_attention_are_candidates() -> None:
    below = nn.Sequential(DownBlock(8, 16), AttentionLevel(16, DownBlock(16, 32)))
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), AttentionLevel(8, below), nn.Conv2d(8, 2, 1)))
    explanation = gradcam.explain(model, torch.randn(1, 3, 32, 32), target=lambda output: output[:, 1].mean((1, 2)))
    assert explanation.layer == "1.below.1.below"


class FrozenTower(nn.Module):
    """A model with a tower without gradients, so that only the decoder's tokens and the output are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.up = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.ReLU()), nn.ConvTranspose2d(16, 1, 8, 8)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            rows = self.tower(images).flatten(2).transpose(1, 2)
        output: Tensor = self.up(self.decoder(rows, rows).transpose(1, 2).unflatten(2, (4, 4)))
        return output


@pytest.mark.parametrize(
    ("model", "layer"),
    [(FrozenTower(), "tower"), (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3)), "1")],
    ids=["a tower without gradients", "a convolution before the output"],
)
def test_the_output_itself_is_not_explained_where_there_is_a_layer_before_it(model: nn.Module, layer: str) -> None:
    images = torch.randn(1, 3, 32, 32)
    options = {"target": lambda output: output.mean((1, 2, 3)), "evidence": "signed"}
    explanation = gradcam.explain(randomise(model), images, **options)
    assert explanation.layer == layer
    assert explanation.maps.any()


def test_a_model_with_a_grid_only_at_the_output_gives_a_warning() -> None:
    model = randomise(nn.Sequential(nn.Conv2d(3, 1, 3)))
    with pytest.warns(GradcamWarning, match="Layer '0' returns the model's output.*Name an earlier layer"):
        gradcam.explain(model, torch.randn(1, 3, 32, 32), target=lambda output: output.mean((1, 2, 3)))


def test_a_pyramid_level_of_a_few_cells_is_no_default_layer() -> None:
    def step(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 16, 3, 2, 1), nn.ReLU())

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c3, self.c4, self.c5, self.head = step(3), step(16), step(16), nn.Conv2d(16, 2, 1)
            self.mix = nn.Conv2d(16, 16, 1)

        def forward(self, images: Tensor) -> Tensor:
            fine = self.c4(self.c3(images))
            output: Tensor = self.head(self.mix(fine + F.interpolate(self.c5(fine), scale_factor=2)))
            return output

    model, images = randomise(Pyramid()), torch.randn(1, 3, 16, 16)
    explanation = gradcam.explain(model, images, target=lambda output: output[:, 1].amax((1, 2)))
    assert (explanation.layer, explanation.maps.shape[2:]) == ("c4", (4, 4))


class Detector(nn.Module):
    """A detector with two levels, and a tower and class logits at each; the logits are concatenated or a list."""

    def __init__(self, is_joined: bool) -> None:
        super().__init__()
        self.stem, self.c4, self.c5 = (nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 8), (8, 16), (16, 16)))
        self.towers = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.classes = nn.ModuleList(nn.Conv2d(16, 6, 1) for _ in range(2))
        self.is_joined = is_joined

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        fine = self.c4(self.stem(images).relu()).relu()
        coarse = self.c5(fine).relu()
        levels = [head(tower(x)) for head, tower, x in zip(self.classes, self.towers, (fine, coarse))]
        return torch.cat([level.flatten(2) for level in levels], 2).sigmoid() if self.is_joined else levels


@pytest.mark.filterwarnings("ignore:.*for some of the images")  # some images score highest at the finer level
@pytest.mark.parametrize("is_joined", [True, False])
def test_the_class_logits_of_a_detector_are_not_explained(is_joined: bool) -> None:
    model = randomise(Detector(is_joined))

    def target(output: Any) -> Tensor:
        joined = output if is_joined else torch.cat([level.flatten(2) for level in output], 2)
        return joined[:, 2].amax(1)

    explanation = gradcam.explain(model, torch.randn(2, 3, 32, 32), target=target, evidence="signed")
    assert explanation.layer == "c5"
    assert explanation.maps.any()


def test_a_target_of_one_level_is_explained_on_its_own_path() -> None:
    model = randomise(Detector(False))
    explanation = gradcam.explain(model, torch.randn(1, 3, 32, 32), target=lambda output: output[0][:, 2].amax((1, 2)))
    assert explanation.layer == "c4"  # the score does not depend on the coarser c5


class Branches(nn.Module):
    """A model with two branches, joined by a module or by an operator."""

    def __init__(self, join: nn.Module | None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.one, self.other, self.join = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), join
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu()
        x = self.one(x) * self.other(x).sigmoid()
        x = x if self.join is None else self.join(x)
        return self.head(x.mean((2, 3)))


def test_a_layer_on_every_path_is_preferred_to_a_branch() -> None:
    assert gradcam.explain(Branches(nn.ReLU()), torch.randn(1, 3, 16, 16)).layer == "join"
    model, images = Branches(None), torch.randn(1, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradcam.explain(model, images).layer == "stem"
    rows = {row.name: row.is_suggested for row in gradcam.list_layers(model, images)}
    assert [name for name, is_suggested in rows.items() if is_suggested] == ["stem"]


def test_a_traced_resnet_is_explained_at_the_last_run_of_its_last_relu() -> None:
    """Check that the second run of the ReLU is explained, which is the output of the block in the untraced model."""
    model, images = torchvision.models.resnet18(weights=None).eval(), torch.randn(1, 3, 64, 64)
    traced = torch.fx.symbolic_trace(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in ("gradcam", "ablationcam"):
            explanation = gradcam.explain(traced, images, target=1, method=method)
            assert explanation.layer == "layer4.1.relu#1"
            assert torch.equal(explanation.maps, gradcam.explain(model, images, "layer4", target=1, method=method).maps)
        plain = torch.fx.symbolic_trace(torchvision.models.mobilenet_v2(weights=None).eval())
        assert gradcam.explain(plain, images, target=1).layer == "features.18.2"  # there is no branch after it
    rows = {row.name: (row.cam, row.is_suggested) for row in gradcam.list_layers(traced, images)}
    assert [name for name, (_, is_suggested) in rows.items() if is_suggested] == ["layer4.1.relu#1"]
    assert (rows["layer4.1.relu"], rows["layer4.1.relu#1"]) == ((False, False), (True, True))


def test_a_model_with_a_grid_only_on_a_branch_gives_a_warning() -> None:
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.left(x) + self.right(x)).mean((2, 3)))

    with pytest.warns(GradcamWarning, match="The default layer 'right' is on a branch") as caught:
        gradcam.explain(randomise(Forks()), torch.randn(1, 3, 16, 16), target=1)
    assert len(str(caught[0].message)) < 250
    assert caught[0].filename == __file__


def test_mvit_is_explained_before_its_last_attention_and_not_at_the_pool_of_a_branch() -> None:
    """Check that the right grid is determined from the model, although the number of tokens fits several grids."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    def block(heads: int, inputs: int, outputs: int, stride: int) -> MSBlockConfig:
        return MSBlockConfig(heads, inputs, outputs, [3, 3, 3], [3, 3, 3], [1, stride, stride], [1, 2, 2])

    blocks = [block(1, 16, 16, 1), block(2, 16, 32, 2), block(2, 32, 32, 1)]
    model = randomise(MViT((64, 64), 8, blocks, residual_pool=False, residual_with_cls_embed=True,
                            rel_pos_embed=False, proj_after_attn=False, num_classes=5))  # fmt: skip
    images = torch.randn(1, 3, 8, 64, 64)
    expected = gradcam.explain(model, images, target=1, reshape=(4, 8, 8))
    assert (expected.layer, expected.maps.shape[2:]) == ("blocks.2.norm1", (4, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = gradcam.explain(model, images, target=1)
    assert explanation.layer == expected.layer
    assert torch.equal(explanation.maps, expected.maps)


def heads() -> nn.Module:
    class Heads(nn.Module):
        def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())
            self.kind, self.colour, self.make = nn.Linear(6, 4), nn.Linear(6, 3), make

        def forward(self, images: Tensor) -> Any:
            x = self.body(images).mean((2, 3))
            return self.make(self.kind(x), self.colour(x))

    return Heads(lambda kind, colour: (kind, colour))


@pytest.mark.parametrize(
    ("make", "names", "head"),
    [
        (lambda kind, colour: {"kind": kind, "colour": colour}, "'kind', 'colour'", "colour"),
        (lambda kind, colour: OrderedDict(kind=kind, colour=colour), "'kind', 'colour'", "colour"),
        (lambda kind, colour: (kind, colour), None, 1),
    ],
)
def test_one_of_several_heads_is_chosen_by_its_key(make: Any, names: str | None, head: str | int) -> None:
    model, images = heads(), torch.randn(2, 3, 8, 8)
    model.make = make
    if names is not None:
        message = rf"2 tensors \(2, C\): {names}. Choose the class scores .*output='kind'\)"
        with pytest.raises(TargetError, match=message):
            gradcam.explain(model, images)
    logits = model.colour(model.body(images).mean((2, 3)))
    explanation, expected = (
        gradcam.explain(model, images, target=target, augmentation="flip")
        for target in (ClassTarget(2, output=head), lambda output: output[head][:, 2])
    )
    torch.testing.assert_close(explanation.heatmaps, expected.heatmaps)
    torch.testing.assert_close(explanation.scores[:, 0], logits[:, 2].detach())
    predicted = gradcam.explain(model, images, target=ClassTarget(output=head), augmentation="flip").classes
    assert torch.equal(predicted[:, 0], logits.argmax(1))
    gradcam.explain(model, images, target=ClassTarget(0, score="contrast", output=head), augmentation="flip")
    for augmentation in ("none", "flip"):
        ablated, slow = (
            gradcam.explain(model, images, target=target, method="ablationcam", augmentation=augmentation)
            for target in (ClassTarget(2, output=head), lambda output: output[head][:, 2])
        )
        torch.testing.assert_close(ablated.maps, slow.maps)


def test_a_missing_head_is_an_error() -> None:
    model = heads()
    model.make = lambda kind, colour: {"kind": kind, "colour": colour}
    with pytest.raises(TargetError, match=r"has no 'shape': it has 'kind', 'colour'\."):
        gradcam.explain(model, torch.randn(1, 3, 8, 8), target=ClassTarget(1, output="shape"))
    with pytest.raises(TargetError, match="has no 'kind': it is a single tensor"):
        gradcam.explain(model.body, torch.randn(1, 3, 8, 8), target=ClassTarget(1, output="kind"))


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (
            lambda x: F.normalize(x),
            "vectors have norm 1, so they are probably embeddings, not logits: the model has no image classes. Pass target=",
        ),
        (lambda x: {"image_embeds": x}, "'image_embeds' is an embedding: the model has no image classes. Pass target="),
    ],
)
def test_an_embedding_has_no_classes(finish: Callable[[Tensor], Any], message: str) -> None:
    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 16)

        def forward(self, images: Tensor) -> Any:
            return finish(self.last(self.body(images).relu().mean((2, 3))))

    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    with pytest.raises(TargetError, match=message):
        gradcam.explain(Embedder(), images)

    def similarity(output: Any) -> Tensor:
        vector = output["image_embeds"] if isinstance(output, dict) else output
        return vector @ torch.ones(16)

    assert gradcam.explain(Embedder(), images, target=similarity, evidence="signed").maps.any()


def test_saturated_probabilities_are_not_called_an_embedding() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(1))
    with torch.no_grad():
        model[0].bias[2] = 200.0
    # There is no message about embeddings, and the warning about probabilities comes before the error.
    warned = pytest.warns(gradcam.errors.GradcamWarning, match="output is probabilities")
    with pytest.raises(gradcam.GradcamError, match="exactly zero"), warned:
        gradcam.explain(model, torch.randn(1, 3, 8, 8))


class TwoTowers(nn.Module):
    """A CLIP as in open_clip: the image tower is `visual`, and the blocks of the text tower are last."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = _vit(num_classes=0), nn.Embedding(9, 192)
        self.transformer = _vit().blocks

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.visual(images), self.transformer(self.text(words)).mean(1)


def _vit(**options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{"img_size": 64, "depth": 2, "num_classes": 5, **options}).eval()


@pytest.mark.parametrize("method", ["gradcam", "reciprocam"])
@pytest.mark.parametrize("layer", ["blocks.1", "blocks.1.norm2", "norm", "blocks.1.attn"])
@pytest.mark.parametrize("towers", [False, True])
def test_the_suggested_layer_works_if_the_score_ignores_the_patches(towers: bool, layer: str, method: str) -> None:
    images = torch.randn(2, 3, 64, 64)
    model, inputs, target = _vit(), images, 1
    if towers:
        model, inputs, layer = TwoTowers().eval(), (images, torch.randint(0, 9, (4, 5))), f"visual.{layer}"
        target = lambda output: output[0] @ output[1].T  # noqa: E731
    with pytest.raises(gradcam.errors.BlindLayerError, match=f"layer '{layer}'") as message:
        gradcam.explain(model, inputs, layer, method=method, target=target)
    ((advised),) = re.findall("Choose '([^']+)', whose patches affect the score", str(message.value))
    assert advised == ("visual." if towers else "") + "blocks.1.norm1"
    assert gradcam.explain(model, inputs, advised, method=method, target=target).maps.any()


def test_no_message_about_a_class_token_without_a_gradient() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("hiera_tiny_224", num_classes=5, img_size=64).eval()
    nn.init.zeros_(model.head.fc.weight)
    expected = "exactly zero at every layer that has a grid.*zero weights"
    with pytest.raises(gradcam.GradcamError, match=expected) as message:
        gradcam.explain(model, torch.randn(1, 3, 64, 64), "blocks.11.norm1", target=1)
    assert "token" not in str(message.value)
    assert "norm" not in str(message.value)


def test_a_timm_model_without_classes_says_so() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", num_classes=0)
    with pytest.raises(TargetError, match="num_classes is 0, so its output is an embedding"):
        gradcam.explain(model, torch.randn(1, 3, 64, 64))
    assert gradcam.explain(model, torch.randn(1, 3, 64, 64), target=lambda output: output[:, 7]).layer == "layer4"


def test_tables_that_modules_keep_for_the_next_pass_are_free_of_a_graph() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.kept = nn.Parameter(torch.randn(4)), {}

        def forward(self, x: Tensor) -> Tensor:
            if "cpu" not in self.kept:
                self.kept["cpu"] = self.table * 2
            return x * self.kept["cpu"][:, None, None]

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Keeps(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    gradcam.list_layers(model, torch.randn(1, 3, 8, 8))
    assert model[1].kept["cpu"].grad_fn is None
    model[1].kept.clear()
    gradcam.explain(model, torch.randn(1, 3, 8, 8), target=1)
    assert model[1].kept["cpu"].grad_fn is None


PHOTOGRAPHS = {"koala.webp": 105, "panda.webp": 388, "macaw.webp": 88, "coffee.jpg": 967}
POSITIVE = [method.name for method in METHODS.values() if method.assumes_positive]


@pytest.fixture(scope="module")
def classifier() -> gradcam.Classifier:
    return gradcam.load_classifier(device="cpu")


@pytest.fixture(scope="module")
def mosaic(classifier: gradcam.Classifier) -> Tensor:
    images = classifier.batch([gradcam.read_image(ASSETS / name) for name in PHOTOGRAPHS])
    return torch.cat([torch.cat([*images[:2]], 2), torch.cat([*images[2:]], 2)], 1)[None]


def mass_in_own_quarter(heatmaps: Tensor) -> float:
    """Return the share of the positive evidence in the right quarter (the grid pointing game); chance level is 0.25."""
    half = heatmaps.shape[-1] // 2
    quarters = [(0, 0), (0, half), (half, 0), (half, half)]
    masses = [
        heatmap[y0 : y0 + half, x0 : x0 + half].sum() / heatmap.sum().clamp(min=1e-9)
        for heatmap, (y0, x0) in zip(heatmaps[0], quarters)
    ]
    return float(torch.stack(masses).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "least", "before"), [("xgradcam", 0.7, 0.5), ("reciprocam", 0.7, 0.5), ("fasterscorecam", 0.45, 0.45)]
)
def test_methods_that_assume_positive_activations_find_the_image_at_their_own_layer(
    classifier: gradcam.Classifier, mosaic: Tensor, method: str, least: float, before: float
) -> None:
    target = [list(PHOTOGRAPHS.values())]
    explanation = gradcam.explain(classifier.model, mosaic, classifier.layer_for(method), method=method, target=target)
    assert mass_in_own_quarter(explanation.heatmaps) > least
    with pytest.warns(GradcamWarning, match=rf"'layer4' have both signs, but {method} assumes? no negative values"):
        explanation_of_layer4 = gradcam.explain(classifier.model, mosaic, "layer4", method=method, target=target)
    assert mass_in_own_quarter(explanation_of_layer4.heatmaps) < before
    automatic = gradcam.explain(classifier.model, mosaic, method=method, target=target)
    assert automatic.layer == "head.0"


def test_each_method_has_its_own_layer_where_none_is_named(classifier: gradcam.Classifier) -> None:
    names = ["fasterscorecam", "gradcam", "xgradcam", "layercam"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanations = classifier.compare(ASSETS / "panda.webp", methods=names)
    assert list(explanations) == list(zip(["head.0", "layer4"] * 2, names))
    assert {classifier.layer_for(name) for name in POSITIVE} == {"head.0"}
    for (layer, method), explanation in explanations.items():
        alone = classifier.explain(ASSETS / "panda.webp", layer, method=method)
        torch.testing.assert_close(explanation.maps, alone.maps)
        assert classifier.explain(ASSETS / "panda.webp", method=method).layer == layer
    classifier_of_layer4 = gradcam.load_classifier(layer="layer4", device="cpu")
    assert {classifier_of_layer4.layer_for(name) for name in METHODS} == {"layer4"}


@pytest.mark.parametrize(
    "build", [torchvision.models.resnet18, torchvision.models.mobilenet_v2, torchvision.models.vgg11_bn]
)
def test_a_layer_after_an_activation_has_no_negative_values(build: Callable[..., nn.Module]) -> None:
    """Compare what `gradcam layers` derives from the graph with the smallest value that each layer outputs."""
    model, images = randomise(build(weights=None)).requires_grad_(False), torch.randn(2, 3, 64, 64)
    least: dict[str, float] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: least.update({name: float(output.detach().min())})

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name))
    with torch.no_grad():
        model(images)
    values = dict(least)
    mapped_rows = [row for row in gradcam.list_layers(model, images) if row.cam]
    assert {row.name: row.both_signs for row in mapped_rows} == {row.name: values[row.name] < 0 for row in mapped_rows}
    assert {row.both_signs for row in mapped_rows} == {False, True}


def test_a_network_that_ends_in_a_bottleneck_has_a_layer_for_each_kind_of_method() -> None:
    def unit(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups), nn.ReLU6())

    bottleneck = nn.Sequential(unit(8, 24, 1), unit(24, 24, 3, 24), nn.Conv2d(24, 8, 1))
    model = randomise(nn.Sequential(unit(3, 8, 3), bottleneck, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
    images = torch.randn(2, 3, 16, 16)
    assert gradcam.explain(model, images).layer == "1"
    assert gradcam.explain(model, images, method="scorecam").layer == "1.1"
    rows = gradcam.list_layers(model, images)
    assert [row.name for row in rows if row.is_suggested] == ["1"]
    assert [row.name for row in rows if row.suggested_for_positive] == ["1.1"]
    loaded = gradcam.load_classifier(model, labels=list("abcde"), mean=(0.5,) * 3, std=(0.5,) * 3, size=(16, 16))
    assert (loaded.layer, loaded.layer_for("gradcam"), loaded.layer_for("scorecam")) == ("1", "1", "1.1")


def test_the_warning_about_signs_appears_once_and_only_for_named_layers() -> None:
    model = randomise(torchvision.models.resnet18(weights=None))
    images = torch.randn(1, 3, 64, 64)
    layers, methods = ["layer4.1.bn2", "layer4", "layer3.1.bn2"], ["xgradcam", "gradcam"]
    with pytest.warns(GradcamWarning) as caught:
        gradcam.compare(model, images, layers=layers, methods=methods)
    assert [str(item.message).split(" assume")[0] for item in caught] == [
        "The activations of 'layer4.1.bn2' and 1 more have both signs, but xgradcam"
    ]
    assert len(str(caught[0].message)) < 250
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradcam.explain(model, images, "layer4", method="xgradcam")
        gradcam.explain(model, images, "layer4.1.bn2", method="gradcam")
        gradcam.explain(torchvision.models.efficientnet_b0(weights=None), images, method="hirescam")


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.hardswish, F.mish])
def test_smooth_activations_count_as_positive(function: Callable[[Tensor], Tensor]) -> None:
    from gradcam.cam.maps import has_both_signs

    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert has_both_signs(values)
    assert not has_both_signs(function(values))
