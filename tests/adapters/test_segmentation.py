"""Test segmentation models of all families, small and with random weights: outputs, positions of maps, all values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import interpolate

import gradcam
from gradcam.adapters import find_family
from gradcam.adapters.base import SegmenterAdapter
from gradcam.errors import TargetError
from gradcam.targets import Mask

CLASSES = 4
LABELS = {0: "background", 1: "cat", 2: "dog", 3: "red fox"}


def first(value: Any) -> Tensor:
    """Return the first tensor of a module's output."""
    value = getattr(value, "last_hidden_state", value)
    return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Case:
    """A model of a family.

    `layers` are the names of the default layer, which differ between versions of the library. `pick` takes its tensor
    from the output of the module, and `grid` turns that into (N,C,h,w). `logits` takes (N,C,h,w) from the output of the
    model.
    """

    build: Callable[[], nn.Module]
    layers: str | tuple[str, str]
    pick: Callable[[Any], Tensor] = first
    logits: Callable[[Any], Tensor] = lambda output: output.logits
    size: tuple[int, int] = (64, 96)
    grid: Callable[[Tensor], Tensor] = lambda tensor: tensor
    processor: str | None = None
    seed: int = 3

    def find_layer(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Return the name of the layer, and its module."""
        modules = dict(model.named_modules())
        names = (self.layers,) if isinstance(self.layers, str) else self.layers
        return next((name, modules[item]) for name in names if (item := name.partition(":")[0]) in modules)


def torchvision_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    make = getattr(torchvision.models.segmentation, name)
    return lambda: make(weights=None, weights_backbone=None, num_classes=CLASSES, **options)


def smp_model(name: str, encoder: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        smp = pytest.importorskip("segmentation_models_pytorch")
        return getattr(smp, name)(encoder, encoder_weights=None, classes=CLASSES, **options)

    return build


def hf_model(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        keywords = {key: value(transformers) if callable(value) else value for key, value in options.items()}
        return getattr(transformers, name)(getattr(transformers, config)(id2label=LABELS, **keywords))

    return build


def swin(transformers: Any) -> Any:
    stages = [f"stage{i}" for i in range(1, 5)]
    sizes = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2}
    return transformers.SwinConfig(out_features=stages, **sizes)


def tokens(prefix: int, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[:, prefix:].transpose(1, 2).unflatten(2, (rows, columns))


def add_up(size: Sequence[int] | None) -> Callable[[Any], Tensor]:
    """Sum the semantic scores query by query; masks are resized before the sigmoid."""

    def score(output: Any) -> Tensor:
        total: Any = 0
        for query in range(output.class_queries_logits.shape[1]):
            classes = output.class_queries_logits[:, query].exp()
            chances = classes[:, :-1] / classes.sum(1, keepdim=True)
            mask = output.masks_queries_logits[:, query : query + 1]
            mask = mask if size is None else interpolate(mask, size=size, mode="bilinear", align_corners=False)
            total = total + chances[:, :, None, None] / (1 + (-mask).exp())
        return total

    return score


def last_map(output: Any) -> Tensor:
    return output.feature_maps[-1]


def out(output: Any) -> Tensor:
    return output["out"]


VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
BEIT = VIT | {"image_size": 64, "patch_size": 8, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2]}
PYRAMID = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 5, "dim_feedforward": 16}
WIDE = 64  # channels: each group of a GroupNorm has two, because with one channel the pooled gradients would be zero
ENCODER = "model.pixel_level_module.encoder"

CASES = {
    "fcn": Case(torchvision_model("fcn_resnet50"), "backbone:out", out, out, (32, 48)),
    "deeplabv3": Case(torchvision_model("deeplabv3_mobilenet_v3_large", aux_loss=True), "backbone:out", out, out),
    "lraspp": Case(torchvision_model("lraspp_mobilenet_v3_large"), "backbone:high", lambda item: item["high"], out),
    "smp-unet": Case(smp_model("Unet", "resnet18"), "encoder:5", lambda item: item[-1], lambda item: item),
    "smp-pspnet": Case(
        smp_model("PSPNet", "resnet18", encoder_depth=3), "encoder:3", lambda item: item[-1], lambda item: item
    ),
    "smp-dpt": Case(
        smp_model("DPT", "tu-vit_tiny_patch16_224", dynamic_img_size=True, decoder_intermediate_channels=(8, 8, 8, 8),
                  decoder_fusion_channels=8),
        "encoder:0:3", lambda item: item[0][-1], lambda item: item,
    ),
    "segformer": Case(
        hf_model("SegformerForSemanticSegmentation", "SegformerConfig", depths=[1, 1, 1, 1], decoder_hidden_size=16,
                 hidden_sizes=[8, 8, 12, 16], num_attention_heads=[1, 1, 2, 2]),
        ("segformer.stages.3", "segformer.encoder:last_hidden_state"), processor="SegformerImageProcessor",
    ),
    "upernet": Case(
        hf_model("UperNetForSemanticSegmentation", "UperNetConfig", backbone_config=swin, hidden_size=16,
                 auxiliary_in_channels=32, auxiliary_channels=8),
        "backbone:feature_maps:3", last_map, processor="SegformerImageProcessor",
    ),
    "dpt": Case(
        hf_model("DPTForSemanticSegmentation", "DPTConfig", **VIT, image_size=64, patch_size=8,
                 backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 12, 16], fusion_hidden_size=16),
        "dpt.encoder.layer.3", size=(64, 64), grid=tokens(1, 8, 8), processor="DPTImageProcessor",
    ),
    "beit": Case(
        hf_model("BeitForSemanticSegmentation", "BeitConfig", **BEIT),
        ("beit.layers.2", "beit.encoder.layer.2"), grid=tokens(1, 8, 8), size=(64, 64), processor="BeitImageProcessor",
    ),
    "data2vec": Case(
        hf_model("Data2VecVisionForSemanticSegmentation", "Data2VecVisionConfig", **BEIT),
        "data2vec_vision.encoder.layer.2", grid=tokens(1, 8, 8), size=(64, 64), processor="BeitImageProcessor",
    ),
    "mobilenet_v2": Case(
        hf_model("MobileNetV2ForSemanticSegmentation", "MobileNetV2Config", depth_multiplier=0.25, min_depth=4),
        "mobilenet_v2.layer.15", processor="MobileNetV2ImageProcessor",
    ),
    "mobilevit": Case(
        hf_model("MobileViTForSemanticSegmentation", "MobileViTConfig", hidden_sizes=[16, 16, 16], num_attention_heads=2,
                 neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], aspp_out_channels=8),
        "mobilevit.encoder.layer.4", size=(64, 128), processor="MobileViTImageProcessor", seed=204,
    ),
    "mobilevitv2": Case(
        hf_model("MobileViTV2ForSemanticSegmentation", "MobileViTV2Config", width_multiplier=0.125, n_attn_blocks=[1, 1, 1],
                 base_attn_unit_dims=[32, 32, 32], aspp_out_channels=8),
        "mobilevitv2.encoder.layer.4", size=(64, 128), seed=10, processor="MobileViTImageProcessor",
    ),
    "mask2former": Case(
        hf_model("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig", **PYRAMID, backbone_config=swin,
                 feature_size=WIDE, mask_feature_size=WIDE, hidden_dim=WIDE, encoder_feedforward_dim=16),
        f"{ENCODER}:feature_maps:3", last_map, add_up((384, 384)), processor="Mask2FormerImageProcessor", seed=5,
    ),
    "maskformer": Case(
        hf_model("MaskFormerForInstanceSegmentation", "MaskFormerConfig", backbone_config=swin, fpn_feature_size=WIDE,
                 mask_feature_size=WIDE, decoder_config=lambda transformers: transformers.DetrConfig(
                     d_model=WIDE, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
                     encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5)),
        f"{ENCODER}:feature_maps:3", last_map, add_up(None), processor="MaskFormerImageProcessor", seed=42,
    ),
    "oneformer": Case(
        hf_model("OneFormerForUniversalSegmentation", "OneFormerConfig", **PYRAMID, backbone_config=swin, hidden_dim=WIDE,
                 mask_dim=WIDE, conv_dim=WIDE, encoder_feedforward_dim=16, text_encoder_width=16, query_dec_layers=1,
                 text_encoder_num_layers=1, text_encoder_vocab_size=50, text_encoder_context_length=7, task_seq_len=7,
                 text_encoder_n_ctx=2, is_training=False),
        f"{ENCODER}:feature_maps:3", last_map, add_up(None), processor="OneFormerImageProcessor", seed=10,
    ),
    "eomt": Case(
        hf_model("EomtForUniversalSegmentation", "EomtConfig", hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                 image_size=64, patch_size=8, num_blocks=1, num_queries=5, mlp_ratio=2),
        "layers.1", logits=add_up((64, 64)), size=(64, 64), grid=tokens(5, 8, 8),
    ),
}  # fmt: skip


# Parts of the names of the layers that classify a query or a pixel. Their weights are scaled, so that classes differ.
DECIDING = ("class_predictor", "class_embed", "queries_", "query_embed")


@functools.cache
def model_of(name: str) -> nn.Module:
    """Return the model with weights that preserve the scale of activations, so that the output depends on the image."""
    model = CASES[name].build()
    generator = torch.Generator().manual_seed(CASES[name].seed)
    with torch.no_grad():
        buffers = dict(model.named_buffers()).items()
        statistics = [item for item in buffers if item[0].endswith(("running_mean", "running_var"))]
        for key, values in (*model.named_parameters(), *statistics):
            if key.endswith("running_var") or (values.ndim == 1 and not key.endswith(("bias", "running_mean"))):
                values.uniform_(0.7, 1.3, generator=generator)
            elif values.ndim == 1:
                values.normal_(0, 0.1, generator=generator)
            elif key.endswith("weight"):
                values.normal_(0, values[0].numel() ** -0.5, generator=generator)
            if any(word in key for word in DECIDING):
                values.mul_(8)
    return model.double().eval()


def inputs_of(name: str, pictures: Tensor) -> Any:
    if name != "oneformer":
        return pictures
    return {"pixel_values": pictures, "task_inputs": torch.arange(7).expand(len(pictures), -1)}


def run(name: str, pictures: Tensor) -> Any:
    inputs = inputs_of(name, pictures)
    return model_of(name)(**inputs) if isinstance(inputs, dict) else model_of(name)(inputs)


def by_hand(name: str, pictures: Tensor, index: int, box: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (N,), the last stage and its gradient (N,C,h,w), by a plain hook and autograd through the model."""
    case, activations = CASES[name], []
    module = case.find_layer(model_of(name))[1]
    handle = module.register_forward_hook(lambda *hook_args: activations.append(case.pick(hook_args[2])))
    try:
        output = run(name, pictures)
    finally:
        handle.remove()
    large = interpolate(case.logits(output), size=case.size, mode="bilinear", align_corners=False)
    left, top, right, bottom = box
    scores = large[:, index, top:bottom, left:right].mean((1, 2))
    (gradient,) = torch.autograd.grad(scores.sum(), activations[0])
    return scores.detach(), case.grid(activations[0]).detach(), case.grid(gradient)


def noise(name: str, images: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(images, 3, *CASES[name].size, generator=generator, dtype=torch.float64)


BOX = (10, 6, 40, 52)


@pytest.mark.parametrize("name", CASES)
def test_maps_of_the_last_stage_are_those_of_plain_autograd(name: str):
    pictures = noise(name, 2)
    scores, stage, gradient = by_hand(name, pictures, 1, BOX)
    expected = {
        "gradcam": (gradient.mean((2, 3), keepdim=True) * stage).sum(1).relu(),
        "hirescam": (gradient * stage).sum(1).relu(),
    }
    for method, maps in expected.items():
        explanation = gradcam.explain(model_of(name), inputs_of(name, pictures), method=method, target=Mask(1, BOX))
        assert explanation.layer == CASES[name].find_layer(model_of(name))[0]
        assert explanation.maps.shape == (2, 1, *stage.shape[2:])
        assert (maps.amax((1, 2)) > 0).any()
        assert (explanation.maps[:, 0] - maps).abs().max() <= 1e-6 * maps.abs().max()
        assert (explanation.scores[:, 0] - scores).abs().max() <= 1e-6 * scores.abs().max()


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


# Parts of the names of layers for positions, sampling offsets, the classes of queries, and attention outputs.
SILENT = ("position", "pos_", "offsets", "class_", "attn.proj", ".out_proj", ".o_proj", "attention.output")


def transparent(name: str) -> nn.Module:
    """Make each position depend only on the pixels there.

    All weights are positive, convolutions use only their centre, attention between positions returns zero, and nothing
    is normalised. Black stays zero.
    """
    model = CASES[name].build().eval()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.forward = lambda tensor: tensor
        elif isinstance(module, nn.MaxPool2d):
            module.kernel_size, module.padding = 1, 0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, values in model.named_parameters():
            if values.ndim < 2 or not key.endswith("weight") or any(word in key for word in SILENT):
                values.fill_(1.0 if "lambda" in key else 0.01 if "mask_embed" in key else 0.0)
                continue
            values.uniform_(0, 2 / values[0].numel(), generator=generator)
            sides = values.shape[2:]
            if len(sides) == 2 and sides[0] % 2:
                middle = values[:, :, sides[0] // 2, sides[1] // 2].clone()
                values.zero_()[:, :, sides[0] // 2, sides[1] // 2] = middle * sides.numel()
    return model.double()


@pytest.mark.parametrize("name", [case for case in CASES if case not in ("fcn", "deeplabv3", "smp-unet", "data2vec")])
def test_the_map_of_a_painted_square_lies_on_the_square(name: str):
    height, width = CASES[name].size
    side = height // 2
    square = (..., slice(0, side), slice(width - side, width))
    picture = torch.zeros(1, 3, height, width, dtype=torch.float64)
    picture[square] = 0.1
    target = Mask(2, (0, 0, width, height))
    explanation = gradcam.explain(transparent(name), inputs_of(name, picture), method="hirescam", target=target)
    heatmap = explanation.heatmaps[0, 0]
    assert heatmap[square].max() == 1
    assert heatmap[square].sum() > 0.75 * heatmap.sum()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.processor])
def test_predicted_masks_are_those_of_the_models_own_postprocessing(name: str):
    transformers = pytest.importorskip("transformers")
    pictures = noise(name, 2)
    with torch.no_grad():
        output = run(name, pictures)
    postprocess = getattr(transformers, CASES[name].processor).post_process_semantic_segmentation
    predicted_masks = postprocess(None, output, target_sizes=[CASES[name].size] * 2)
    assert any(len(actual.unique()) > 1 for actual in predicted_masks)
    for i, actual in enumerate(predicted_masks):
        classes = sorted({*actual.flatten().tolist()})
        explanation = gradcam.explain(model_of(name), inputs_of(name, pictures[i : i + 1]), target=Mask(classes))
        assert [instance.index for instance in explanation.instances[0]] == classes
        for instance in explanation.instances[0]:
            assert torch.equal(instance.mask, actual == instance.index)
            assert instance.name == LABELS[instance.index]


class Plain(nn.Module):
    """A user-defined model that returns its logits in one form or another."""

    def __init__(self, form: Callable[[Tensor], Any], classes: int = 3) -> None:
        super().__init__()
        self.stage, self.head, self.form = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, classes, 1), form

    def forward(self, pictures: Tensor) -> Any:
        return self.form(self.head(self.stage(pictures).relu()))


@dataclass
class Output:
    logits: Tensor


FORMS = {
    "tensor": lambda logits: logits,
    "out": lambda logits: {"aux": logits[:, :1] * 0, "out": logits},
    "logits": lambda logits: {"loss": None, "logits": logits},
    "attribute": Output,
    "namespace": lambda logits: SimpleNamespace(out=logits),
    "tuple": lambda logits: (logits, logits.mean((2, 3))),
    "list": lambda logits: [logits, logits[:, :, ::2, ::2]],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_ones_own_may_give_its_logits_in_any_usual_form(form: str):
    model, pictures = Plain(FORMS[form]).double(), torch.randn(2, 3, 12, 16, dtype=torch.float64)
    explanation = gradcam.explain(model, pictures, "stage", target=Mask(2, BOX := (3, 2, 9, 11)))
    left, top, right, bottom = BOX
    stage = model.stage(pictures)
    scores = model.head(stage.relu())[:, 2, top:bottom, left:right].mean((1, 2))
    (gradient,) = torch.autograd.grad(scores.sum(), stage)
    maps = (gradient * stage).sum(1).relu().detach()
    assert (explanation.maps[:, 0] - maps).abs().max() <= 1e-6 * maps.max()
    assert explanation.scores[:, 0].tolist() == pytest.approx(scores.tolist(), rel=1e-6)


def test_a_models_own_layer_is_found_inside_a_module_around_it():
    class Wrapper(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, pictures: Tensor) -> Tensor:
            return self.net(pictures)["out"].argmax(1)

    net, pictures = model_of("lraspp"), noise("lraspp")
    inner, outer = (gradcam.explain(item, pictures, target=Mask(1, BOX)) for item in (net, Wrapper(net)))
    assert outer.layer == "net.backbone:high"
    assert torch.equal(outer.maps, inner.maps)
    assert outer.output.shape == (1, 64, 96)


def test_a_head_that_gives_probabilities_is_read_before_it_makes_them():
    smp = pytest.importorskip("segmentation_models_pytorch")
    options = {"encoder_weights": None, "classes": CLASSES, "encoder_depth": 3, "aux_params": {"classes": 2}}
    model = smp.PSPNet("resnet18", activation="softmax2d", **options).eval().double()
    plain = smp.PSPNet("resnet18", **options).eval().double()
    plain.load_state_dict(model.state_dict())
    actual, expected = (gradcam.explain(item, noise("smp-pspnet"), target=Mask(1, BOX)) for item in (model, plain))
    assert expected.scores.abs().max() > 0
    assert torch.equal(actual.scores, expected.scores)
    assert torch.equal(actual.maps, expected.maps)


def test_class_0_is_the_background_of_torchvisions_models():
    model, picture = torchvision_model("lraspp_mobilenet_v3_large")().eval(), noise("lraspp").float()
    with torch.no_grad():
        logits = model(picture)["out"]
        # Now three of four pixels are background.
        model.classifier.low_classifier.bias[0] += (logits[:, 1:].amax(1) - logits[:, 0]).quantile(0.75)
        counts = model(picture)["out"].argmax(1).flatten().bincount(minlength=CLASSES)
        assert counts[0] > counts[1:].max() > 0
        assert gradcam.explain(model, picture, target=Mask()).classes.item() == int(counts[1:].argmax()) + 1
        model.classifier.low_classifier.bias[0] += 100
    assert gradcam.explain(model, picture, target=Mask()).classes.item() == 0


def test_labels_that_nobody_gave_are_none():
    transformers = pytest.importorskip("transformers")
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, min_depth=4, num_labels=3)
    unnamed = find_family(transformers.MobileNetV2ForSemanticSegmentation(config), SegmenterAdapter)
    assert unnamed.labels is None
    assert find_family(model_of("mobilenet_v2"), SegmenterAdapter).labels == list(LABELS.values())
    actual = gradcam.explain(unnamed.model.eval(), noise("mobilenet_v2").float(), target=Mask(2, BOX)).instances[0][0]
    assert actual.name == "class 2"


def test_a_detector_has_no_mask_for_each_pixel():
    model = torchvision.models.get_model("ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None)
    with pytest.raises(TargetError, match=r"SSD returned a list") as caught:
        gradcam.explain(model, [torch.rand(3, 64, 64)], target=Mask(1))
    assert "(1, classes, h, w)" in str(caught.value)
