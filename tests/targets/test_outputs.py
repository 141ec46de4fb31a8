"""Test how outputs are recognised: logits beside probabilities, embeddings, action values, keypoints, other maps."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import GradcamError, GradcamWarning, ModelError, TargetError
from gradcam.targets.classes import ClassTarget, find_logits
from gradcam.targets.heads import require_class_head

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
Named = namedtuple("Named", ["first", "second"])
PROBABILITIES = "The heatmap explains this output instead of logits"


@dataclasses.dataclass
class Record:
    first: Tensor
    second: Tensor


class Net(nn.Module):
    """A small classifier of five classes, with a function that arranges its logits and eight features as the output."""

    def __init__(self, finish: Callable[[Tensor, Tensor], Any] = lambda z, f: z) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.linear, self.finish = nn.Linear(8, 5), finish
        nn.init.normal_(self.linear.weight, std=3)

    def forward(self, images: Tensor) -> Any:
        features = self.body(images).mean((2, 3))
        return self.finish(self.linear(features), features)


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module, finish: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.net, self.finish = net, finish

    def forward(self, images: Tensor) -> Any:
        return self.finish(self.net(images))


@pytest.mark.parametrize(
    "finish",
    [
        lambda z, f: (z.softmax(1), z),
        lambda z, f: [z.softmax(1), z],
        lambda z, f: (z, z.softmax(1)),
        lambda z, f: Named(z.softmax(1), z),
        lambda z, f: Record(z.softmax(1), z),
        lambda z, f: {"a": z.softmax(1), "b": z},
        lambda z, f: (z.sigmoid(), z),
        lambda z, f: (z.log_softmax(1), z),
        lambda z, f: ((z / 3).softmax(1), z),
        lambda z, f: (z.softmax(1), z.log_softmax(1), z),
        lambda z, f: ((z.softmax(1), z), f),
    ],
)
def test_logits_are_explained_in_place_of_their_probabilities(finish: Callable[..., Any]) -> None:
    expected = gradcam.explain(Net().eval(), IMAGES, "body")
    explanation = gradcam.explain(Net(finish).eval(), IMAGES, "body")
    torch.testing.assert_close(explanation.scores, expected.scores)
    torch.testing.assert_close(explanation.heatmaps, expected.heatmaps)


def test_a_single_score_beside_features() -> None:
    z = torch.tensor([[-1.0], [2.0]])
    assert torch.equal(find_logits({"features": torch.rand(2, 8), "score": z, "share": z.sigmoid()}, 2), z)


@pytest.mark.parametrize("shape", [lambda z: z[:, :1], lambda z: z[:, 0]])
def test_a_single_logit_beside_its_probability(shape: Callable[[Tensor], Tensor]) -> None:
    z = torch.tensor([[-1.0], [2.0]])
    assert torch.equal(find_logits((shape(z).sigmoid(), shape(z)), 2), z)


def test_half_precision_probabilities_are_recognised() -> None:
    z = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(find_logits((z.softmax(1), z), 2), z.float())


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        (lambda z, f: z.softmax(1), "probabilities"),
        (lambda z, f: z.sigmoid(), "probabilities"),
        (lambda z, f: z.log_softmax(1), "log-probabilities"),
        (lambda z, f: (z.softmax(1) + (2 * z).softmax(1)) / 2, "probabilities"),
        (lambda z, f: {"scores": z.softmax(1)}, "probabilities"),
        (lambda z, f: z[:, :1].sigmoid(), "probabilities"),
    ],
)
def test_probabilities_alone_are_explained_with_a_warning(finish: Callable[..., Any], kind: str) -> None:
    model = Net(finish).eval()
    with pytest.warns(GradcamWarning, match=f"output is {kind}. {PROBABILITIES}") as caught:
        gradcam.explain(model, IMAGES, "body")
    assert len(caught) == 1
    gradcam.explain(model, IMAGES, "body", target=ClassTarget(activation="none"))


def test_a_classifier_of_probabilities_has_a_note_and_no_warning() -> None:
    classifier = gradcam.load_classifier(Net(lambda z, f: z.softmax(1)), size=32, layer="body")
    assert classifier.activation == "none"
    assert "The gradient of such an output vanishes" in classifier.notes[-1]
    classifier.explain(IMAGES[0].permute(1, 2, 0).mul(255).byte().numpy())


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_probabilities_beside_logits_tell_the_activation(activation: str) -> None:
    first = {"softmax": lambda z: z.softmax(1), "sigmoid": torch.sigmoid}[activation]
    classifier = gradcam.load_classifier(Net(lambda z, f: (first(z), z)), size=32)
    assert classifier.activation == activation


@pytest.mark.parametrize(
    "finish",
    [
        lambda z, f: (f, z),
        lambda z, f: (z[:, :1], z),
        lambda z, f: (z, z[:, :1], z[:, 0]),
    ],
)
def test_the_first_of_several_tensors_is_explained_with_a_warning(finish: Callable[..., Any]) -> None:
    model = Net(finish).eval()
    with pytest.warns(GradcamWarning, match=r"The output has several tensors \(2, C\).* output=1\)"):
        gradcam.explain(model, IMAGES, "body")
    gradcam.explain(model, IMAGES, "body", target=ClassTarget(output=0))


@pytest.mark.parametrize(
    "finish", [lambda z, f: (z, f), lambda z, f: (z.argmax(1), z), lambda z, f: {"features": f, "a": z}]
)
def test_logits_beside_features_are_explained_without_a_word(finish: Callable[..., Any]) -> None:
    explanation = gradcam.explain(Net(finish).eval(), IMAGES, "body")
    torch.testing.assert_close(explanation.scores, gradcam.explain(Net().eval(), IMAGES, "body").scores)


def test_a_named_tuple_is_chosen_from_by_name_and_by_index() -> None:
    output = Named(torch.zeros(2, 3), torch.ones(2, 4))
    for head in ("second", 1):
        assert torch.equal(find_logits(output, 2, head=head), output.second)
    with pytest.raises(TargetError, match="2 tensors .*'first', 'second'"):
        find_logits(output, 2)


@pytest.mark.parametrize(
    "finish",
    [
        lambda z, f: (z.argmax(1), z[:, :1], z[:, 0]),
        lambda z, f: (z.argsort(1), z[:, :1], z[:, 0]),
        lambda z, f: (z.argmax(1), z[:, 0], z[:, 1]),
        lambda z, f: {"action": z.argmax(1), "value": z[:, :1], "log_prob": z[:, 0]},
    ],
)
def test_the_value_of_an_action_is_no_class(finish: Callable[..., Any]) -> None:
    model = Net(finish).eval()
    with pytest.raises(TargetError, match="3 tensors .*Choose the class scores.*or pass a function as target="):
        gradcam.explain(model, IMAGES, "body")
    with pytest.raises(ModelError, match="pass a function as target="):
        gradcam.load_classifier(model, size=32)


@pytest.mark.parametrize("name", ["keypoints", "boxes"])
def test_scores_of_objects_are_no_classes(name: str) -> None:
    model = Net(lambda z, f: {name: torch.rand(2, 5, 4), "scores": z}).eval()
    with pytest.raises(TargetError, match=f"The output has '{name}', so its scores belong to objects"):
        gradcam.explain(model, IMAGES, "body")


# Embeddings


def headless(name: str, *path: str) -> nn.Module:
    model = getattr(torchvision.models, name)(weights=None).eval()
    model.get_submodule(".".join(path[:-1])).__setattr__(path[-1], nn.Identity())
    return model


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("resnet18", ["fc"]),
        ("vgg11", ["classifier"]),
        ("densenet121", ["classifier"]),
        ("vit_b_32", ["heads", "head"]),
        ("swin_t", ["head"]),
    ],
)
def test_a_model_without_its_head_has_no_classes(name: str, path: list[str]) -> None:
    model = headless(name, *path)
    for full in (model, nn.Sequential(nn.Identity(), model), Wrapper(model)):
        with pytest.raises(TargetError, match="has no classification head.*Pass target=.*--task matching"):
            require_class_head(full)
    with pytest.raises(ModelError, match="has no classification head"):
        gradcam.load_model(model)


def test_a_layer_that_is_named_makes_no_difference() -> None:
    with pytest.raises(TargetError, match="ResNet has no classification head"):
        gradcam.explain(headless("resnet18", "fc"), IMAGES, "layer4")


def test_a_cut_network_may_give_an_embedding() -> None:
    model = nn.Sequential(*list(torchvision.models.resnet18(weights=None).eval().children())[:-1], nn.Flatten())
    with pytest.warns(GradcamWarning, match="ends in BasicBlock without a linear layer"):
        gradcam.explain(model, IMAGES, "6")


class Prototypes(nn.Module):
    """A head that returns cosine similarities to prototypes: class scores from an embedding."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.net = headless("resnet18", "fc")
        vectors = torch.rand(4, 512)
        if is_trained:
            self.prototypes = nn.Parameter(vectors)
        else:
            self.register_buffer("prototypes", vectors)

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.net(images)) @ F.normalize(self.prototypes).T


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output, self.backbone = nn.Linear(512, 512), headless("resnet18", "fc")

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.backbone(images))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prototypes(True),
        lambda: Prototypes(False),
        HeadFirst,
        lambda: nn.Sequential(headless("resnet18", "fc"), nn.Linear(512, 512)),
        lambda: nn.Sequential(headless("resnet18", "fc"), nn.Linear(512, 3), nn.BatchNorm1d(3), nn.Dropout()),
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(3600, 512), nn.Identity()),
        lambda: torchvision.models.squeezenet1_1(weights=None),
        lambda: torchvision.models.mobilenet_v3_small(weights=None),
        lambda: torch.jit.trace(torchvision.models.resnet18(weights=None).eval(), IMAGES),
    ],
)
def test_a_head_of_any_kind_is_a_head(make: Callable[[], nn.Module]) -> None:
    require_class_head(make().eval())


@pytest.mark.parametrize(
    "name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto", "levit_128s", "efficientformer_l1"]
)
def test_models_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name)
    require_class_head(model)
    model.reset_classifier(0)
    with pytest.raises(TargetError, match="has no classification head"):
        require_class_head(Wrapper(model))


def test_the_image_tower_of_open_clip() -> None:
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
    visual = open_clip.model.CLIP(16, vision, text).visual
    with pytest.raises(TargetError, match="VisionTransformer has no classification head"):
        gradcam.explain(visual, IMAGES)
    require_class_head(nn.Sequential(visual, nn.Linear(16, 3)))


def test_backbones_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    require_class_head(transformers.ViTForImageClassification(config))
    pooled = Wrapper(transformers.ViTModel(config), lambda output: output.pooler_output)
    config.num_labels = 0
    for model in (pooled, transformers.ViTForImageClassification(config)):
        with pytest.raises(TargetError, match="has no classification head"):
            gradcam.explain(model, IMAGES)


# Models for other tasks


def test_models_of_hugging_face_for_other_tasks_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    point = transformers.SuperPointForKeypointDetection(
        transformers.SuperPointConfig(
            encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=32, descriptor_decoder_dim=16
        )
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vit = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, encoder_stride=8)
    for model, task in (
        (point, "keypoint detection"),
        (transformers.ViTForMaskedImageModeling(vit), "masked image modeling"),
    ):
        for load in (gradcam.load_model, gradcam.load_classifier):
            with pytest.raises(ModelError, match=rf"is a model for {task}, .* with a function"):
                load(model)


class Maps(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body, self.last = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, channels, 1)

    def forward(self, images: Tensor) -> Any:
        return self.last(self.body(images))


class PoseNet(Maps):
    pass


class Pyramid(Maps):
    def forward(self, images: Tensor) -> Any:
        return [self.body(images), F.max_pool2d(super().forward(images), 2)]


def cut() -> nn.Module:
    return nn.Sequential(*list(torchvision.models.resnet18(weights=None).children())[:-2])


@pytest.mark.parametrize("make", [lambda: Maps(17), lambda: PoseNet(5), lambda: Pyramid(6), cut])
def test_maps_that_may_be_of_no_classes_need_a_task(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"may be keypoint heatmaps, depth or features.*--task pose"):
        gradcam.load_model(make(), size=64)
    assert gradcam.load_model(make(), task="segmentation").task == "segmentation"


def test_maps_of_classes_need_none() -> None:
    assert gradcam.load_model(Maps(21), size=64).task == "segmentation"


def test_levels_of_a_detector_are_no_segmentation() -> None:
    class Levels(Maps):
        def forward(self, images: Tensor) -> Any:
            maps = super().forward(images)
            return [maps, F.max_pool2d(maps, 2)], [maps, F.max_pool2d(maps, 2)]

    with pytest.raises(GradcamError, match=r"it is not a classifier.* target="):
        gradcam.load_model(Levels(9), size=64)


# Precision


@pytest.mark.parametrize("exponent", [-39, -50, -200])
def test_a_map_that_float32_cannot_hold_is_reported(exponent: int) -> None:
    model, images = Net().double().eval(), IMAGES.double()
    with pytest.warns(GradcamWarning, match="2 of the gradcam maps at layer 'body' are too small for float32"):
        gradcam.explain(model, images, "body", target=lambda output: output[:, 0] * 10.0**exponent)
    gradcam.explain(model, images, "body", target=lambda output: output[:, 0] * 1e-20)


@pytest.mark.parametrize("method", ["gradcam", "gradcam++", "layercam"])
def test_gradients_that_float32_hardly_holds_are_reported(method: str) -> None:
    model = Net().eval()
    for scale in (1e-36, 1e-40):
        with pytest.warns(GradcamWarning, match="gradients at layer 'body' are too small for float32"):
            gradcam.explain(model, IMAGES, "body", method=method, target=lambda output, s=scale: output[:, 0] * s)
    gradcam.explain(model, IMAGES, "body", method=method, target=lambda output: output[:, 0] * 1e-30)
