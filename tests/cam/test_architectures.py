"""Explain small timm and transformers models with random weights: check the default layer, its layout and the map."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamWarning
from tests import oracles
from tests.helpers import FunctionModule

# Layouts; a number stands for the tokens before the grid.
CHANNELS_FIRST, CHANNELS_LAST = "channels first", "channels last"

TIMM: list[tuple[str, dict[str, Any], tuple[int, int], str, str | int]] = [
    ("vit_tiny_patch16_224", {"depth": 2}, (64, 96), "blocks.1.norm1", 1),
    ("deit_tiny_distilled_patch16_224", {"depth": 2}, (64, 64), "blocks.1.norm1", 2),
    ("vit_small_patch14_reg4_dinov2", {"depth": 2}, (70, 42), "blocks.1.norm1", 5),
    ("vit_base_patch16_clip_224", {"depth": 1, "embed_dim": 192, "num_heads": 3}, (64, 64), "blocks.0.norm1", 1),
    ("vit_base_patch16_rope_reg1_gap_256", {"depth": 1}, (64, 64), "blocks.0", 1),
    ("beit_base_patch16_224", {"depth": 1}, (64, 64), "blocks.0", 1),
    ("eva02_tiny_patch14_224", {"depth": 2}, (70, 56), "blocks.1", 1),
    ("swin_tiny_patch4_window7_224", {}, (64, 96), "norm", CHANNELS_LAST),
    ("swinv2_tiny_window8_256", {}, (64, 64), "norm", CHANNELS_LAST),
    ("maxvit_rmlp_pico_rw_256", {}, (64, 64), "norm", CHANNELS_FIRST),
    ("convnext_atto", {}, (64, 96), "stages", CHANNELS_FIRST),
    ("convnextv2_atto", {}, (64, 64), "stages", CHANNELS_FIRST),
    ("efficientnet_b0", {}, (64, 64), "bn2", CHANNELS_FIRST),
    ("regnety_002", {}, (64, 64), "s4", CHANNELS_FIRST),
    ("inception_v3", {}, (128, 107), "Mixed_7c", CHANNELS_FIRST),
    ("pvt_v2_b0", {}, (64, 96), "stages", CHANNELS_FIRST),
    ("mobilevit_xxs", {}, (64, 64), "final_conv", CHANNELS_FIRST),
    ("levit_128s", {}, (224, 224), "stages", 0),
    ("cait_xxs24_224", {"depth": 2}, (64, 64), "blocks_token_only.1.norm1", 1),
    ("coat_lite_tiny", {}, (64, 64), "serial_blocks4.1.norm1", 1),
    ("coat_tiny", {}, (64, 64), "parallel_blocks.5.norm14", 1),
    ("volo_d1_224", {}, (64, 64), "norm", 1),  # not the auxiliary head, although the patches reach the score through it
    ("xcit_nano_12_p16_224", {}, (64, 64), "cls_attn_blocks.1.norm1", 1),
    ("poolformer_s12", {}, (64, 64), "stages", CHANNELS_FIRST),
    ("hiera_tiny_224", {}, (64, 64), "blocks.11", 0),
    ("efficientformer_l1", {}, (224, 224), "norm", 0),
    ("mixer_s32_224", {}, (64, 64), "norm", 0),
]
# With random weights, all cells of these models respond alike, so the warning about that is right.
RESPOND_ALIKE = ("levit_128s",)
SIZED = ("vit", "deit", "beit", "eva", "swin", "maxvit", "cait", "coat", "volo", "xcit", "hiera", "mixer")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DEEP = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
WINDOWS = {"patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2]}
PATCHES = {"image_size": (32, 48), "patch_size": 8}
HUGGING_FACE: list[tuple[str, str, dict[str, Any], tuple[int, int], str, str | int]] = [
    ("ViT", "", {**SIZES, **PATCHES}, (32, 48), "vit.layers.1.layernorm_before", 1),
    ("DeiT", "", {**SIZES, **PATCHES}, (32, 48), "deit.layers.1.layernorm_before", 2),
    ("Beit", "", {**SIZES, **PATCHES}, (32, 48), "beit.layers.1", 1),
    ("Dinov2", "", {**SIZES, "image_size": 32, "patch_size": 8}, (32, 48), "dinov2.layernorm", 1),
    (
        "Dinov2WithRegisters", "", {**SIZES, "image_size": 32, "patch_size": 8}, (32, 48),
        "dinov2_with_registers.layernorm", 5,
    ),
    ("CLIP", "vision_config", {**SIZES, "image_size": 32, "patch_size": 8}, (32, 32), "vision_model.encoder", 1),
    ("Swin", "", {**WINDOWS, "image_size": 32, "window_size": 4}, (32, 48), "swin.layernorm", 0),
    ("Swinv2", "", {**WINDOWS, "image_size": 32, "window_size": 4}, (32, 48), "swinv2.layernorm", 0),
    ("ConvNextV2", "", DEEP, (64, 96), "convnextv2.encoder", CHANNELS_FIRST),
    (
        "PvtV2", "", {**DEEP, "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2] * 4}, (64, 96), "pvt_v2",
        CHANNELS_FIRST,
    ),
    (
        "Pvt", "", {**DEEP, "image_size": 128, "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2] * 4},
        (128, 128), "pvt.encoder.block.3.0.layer_norm_1", 1,
    ),
    (
        "Levit",
        "",
        {"hidden_sizes": [16] * 3, "num_attention_heads": [2] * 3, "depths": [1] * 3, "key_dim": [4] * 3},
        (224, 224),
        "levit.encoder",
        0,
    ),
    ("PoolFormer", "", DEEP, (64, 64), "norm", CHANNELS_FIRST),
    (
        "MobileViT",
        "",
        {"image_size": 64, "hidden_sizes": [16] * 3, "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
        (64, 64),
        "mobilevit.conv_1x1_exp",
        CHANNELS_FIRST,
    ),
]  # fmt: skip


def randomise(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode; its weights are non-zero, and carry a signal through narrow layers."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=(2 / parameter[0].numel()) ** 0.5)
        elif name.endswith("weight"):  # the weight of a norm
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def slow_map(model: nn.Module, images: Tensor, layer: str, layout: str | int, grid: tuple[int, ...]) -> Tensor:
    """Return Grad-CAM of class 3 without its ReLU, by plain autograd on a copy of the model."""
    model, images = copy.deepcopy(model), images.requires_grad_()
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Any) -> Any:
        tensor = output if isinstance(output, Tensor) else output[0]
        tensor.retain_grad()
        outputs.append(tensor)
        return tensor.clone() if isinstance(output, Tensor) else output

    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    model.get_submodule(layer).register_forward_hook(keep)
    output = model(images)
    (output if isinstance(output, Tensor) else output.logits)[:, 3].sum().backward()
    (activations,) = outputs
    values, weights = activations.detach(), activations.grad
    if isinstance(layout, int):
        assert values.shape[1] == layout + grid[0] * grid[1]
        values, weights = (item[:, layout:].reshape(len(item), *grid, -1) for item in (values, weights))
    if layout != CHANNELS_FIRST:
        values, weights = (item.permute(0, 3, 1, 2) for item in (values, weights))
    return torch.einsum("nc,nchw->nhw", weights.mean((2, 3)), values)[:, None]


def check(model: nn.Module, size: tuple[int, int], layer: str, layout: str | int) -> None:
    model, images = model.double(), torch.randn(2, 3, *size, dtype=torch.float64)
    explanation = gradcam.explain(model, images, target=3, evidence="signed")
    assert explanation.layer == layer
    grid = tuple(explanation.maps.shape[2:])
    assert max(grid) > 1
    assert grid[0] * size[1] == pytest.approx(grid[1] * size[0], rel=0.25)
    expected = slow_map(model, images, layer, layout, grid)
    for image, single in zip(explanation.maps.double(), expected):
        assert single.amax() - single.amin() > 1e-3 * single.abs().amax()
        torch.testing.assert_close(image, single, rtol=1e-4, atol=1e-5 * single.abs().max().item())


@pytest.mark.parametrize(("name", "options", "size", "layer", "layout"), TIMM, ids=[item[0] for item in TIMM])
def test_timm(name: str, options: dict[str, Any], size: tuple[int, int], layer: str, layout: str | int) -> None:
    timm = pytest.importorskip("timm")
    sized = {"img_size": size} if name.startswith(SIZED) else {}
    with warnings.catch_warnings():
        if name in RESPOND_ALIKE:
            warnings.filterwarnings("ignore", "The heatmap at layer .* may be misplaced", GradcamWarning)
        check(randomise(timm.create_model(name, num_classes=7, **sized, **options)), size, layer, layout)


@pytest.mark.parametrize(
    ("name", "part", "options", "size", "layer", "layout"), HUGGING_FACE, ids=[item[0] for item in HUGGING_FACE]
)
def test_transformers(  # noqa: PLR0917
    name: str, part: str, options: dict[str, Any], size: tuple[int, int], layer: str, layout: str | int
) -> None:
    transformers = pytest.importorskip("transformers")
    make: Callable[..., Any] = getattr(transformers, f"{name}Config")
    config = make(num_labels=7, **({part: options} if part else options))
    check(randomise(getattr(transformers, f"{name}ForImageClassification")(config)), size, layer, layout)


class Attend(nn.Module):
    """Self-attention as in tutorials, with an `nn.Softmax`; the short class name does not contain "Attention"."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.softmax, self.proj = nn.Linear(width, 3 * width), nn.Softmax(dim=-1), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        images, count, width = tokens.shape
        queries, keys, values = self.qkv(tokens).view(images, count, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = self.softmax(queries @ keys.transpose(-1, -2)) @ values
        return self.proj(mixed.transpose(1, 2).reshape(images, count, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(width), Attend(width)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.mix(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class TutorialViT(nn.Module):
    """A vision transformer as in a tutorial. With `keep`, it drops all patches after the first `keep`."""

    def __init__(self, patch: int = 8, keep: int | None = None) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, 16, patch, patch), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks, self.head, self.keep = nn.ModuleList([Block(16), Block(16)]), nn.Linear(16, 5), keep

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = self.blocks[0](torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1))
        if self.keep is not None:
            tokens = tokens[:, : self.keep + 1]
        return self.head(self.blocks[1](tokens)[:, 0])


@pytest.mark.parametrize("size", [(32, 32), (48, 64)])
def test_an_attention_matrix_is_not_a_map(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    check(TutorialViT(), size, "blocks.1.norm1", 1)


@pytest.mark.parametrize("keep", [64, 69])  # 65 tokens could be 1 + 8 x 8, and 70 could be 6 + 8 x 8
def test_a_subset_of_the_tokens_is_no_grid(keep: int) -> None:
    torch.manual_seed(0)
    model, images = TutorialViT(patch=16, keep=keep).eval(), torch.randn(1, 3, 224, 224)
    assert gradcam.explain(model, images, target=1).layer == "blocks.0"
    with pytest.raises(gradcam.GradcamError, match="spatial grid of this output is ambiguous: pass the grid of its"):
        gradcam.explain(model, images, "blocks.1.norm1", target=1)
    assert {row.name: row.cam for row in gradcam.list_layers(model)}["blocks.1.norm1"] is False


def test_a_row_of_channels_is_no_grid() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 56, 16, 16), nn.Flatten(2), nn.ReLU(), nn.Flatten(), nn.Linear(56 * 196, 5))
    explanation = gradcam.explain(model, torch.randn(1, 3, 224, 224), target=1)
    assert (explanation.layer, explanation.maps.shape[2:]) == ("0", (14, 14))


def test_frames_before_channels_are_refused() -> None:
    model = nn.Sequential(nn.Flatten(0, 1), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 2))
    with pytest.raises(gradcam.GradcamError, match=r"\(2, 4, 3, 5, 5\), with frames before channels: pass"):
        gradcam.explain(model, torch.randn(2, 4, 3, 5, 5), "1", target=1)


@pytest.mark.parametrize("method", ["gradcam", "gradient-rollout"])
def test_the_advice_about_frames_works_for_a_videomae(method: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.VideoMAEConfig(**SIZES, image_size=32, patch_size=8, num_frames=8, num_labels=5)
    model = randomise(transformers.VideoMAEForVideoClassification(config))
    frames = torch.randn(2, 8, 3, 32, 32)
    with pytest.raises(gradcam.GradcamError, match=r"pass frames.transpose\(1, 2\), and wrap the model in") as message:
        gradcam.explain(model, frames, method=method, target=1)
    assert "forward(clips) returns model(clips.transpose(1, 2))" in str(message.value)
    # A wrapper as in the error message.
    wrapped = FunctionModule(lambda module, clips: module.model(clips.transpose(1, 2)), model=model)
    explanation = gradcam.explain(wrapped, frames.transpose(1, 2), method=method, target=1)
    assert (explanation.maps.shape, explanation.heatmaps.shape) == ((2, 1, 4, 4, 4), (2, 1, 8, 32, 32))


class Stage(nn.Module):
    """A stage of SlowFast as in pytorchvideo: both pathways, and the connection from the fast to the slow one."""

    def __init__(self, into: tuple[int, int], out: tuple[int, int], *, fuses: bool = True) -> None:
        super().__init__()
        self.fusion = nn.Conv3d(out[1], 2 * out[1], (5, 1, 1), (4, 1, 1), (2, 0, 0)) if fuses else None
        self.pathways = nn.ModuleList(
            nn.Sequential(nn.Conv3d(channels, item, (time, 3, 3), (1, 2, 2), (time // 2, 1, 1)), nn.ReLU(inplace=True))
            for channels, item, time in zip(into, out, (1, 3))
        )

    def forward(self, clips: list[Tensor]) -> list[Tensor]:
        slow, fast = (pathway(clip) for pathway, clip in zip(self.pathways, clips))
        return [slow if self.fusion is None else torch.cat([slow, self.fusion(fast)], 1), fast]


class SlowFast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Stage((3, 3), (8, 8)), Stage((24, 8), (12, 6), fuses=False))
        self.head = nn.Linear(18, 5)

    def forward(self, clips: list[Tensor]) -> Tensor:
        return self.head(torch.cat([block.mean((2, 3, 4)) for block in self.blocks(clips)], 1))


@pytest.mark.filterwarnings("error::gradcam.errors.GradcamWarning")
@pytest.mark.parametrize("pathway", [0, 1, None])
def test_two_pathways_in_a_list(pathway: int | None) -> None:
    torch.manual_seed(0)
    model, fast = SlowFast().double().eval(), torch.randn(2, 3, 32, 16, 16, dtype=torch.float64)
    clips = [fast[:, :, ::4].clone(), fast]  # every fourth frame, because the fusion has a stride of 4
    layer = None if pathway is None else f"blocks.1.pathways.{pathway}"
    explanation = gradcam.explain(model, clips, layer, target=1)
    outputs = model.blocks[1](model.blocks[0](clips))
    for output in outputs:
        output.retain_grad()
    model.head(torch.cat([output.mean((2, 3, 4)) for output in outputs], 1))[:, 1].sum().backward()
    activations = outputs[pathway or 0]
    expected = (activations.grad.mean((2, 3, 4), keepdim=True) * activations).sum(1, keepdim=True).relu()
    torch.testing.assert_close(explanation.maps, expected.float())
    assert explanation.maps.any()
    assert (explanation.layer, explanation.heatmaps.shape) == (f"blocks.1.pathways.{pathway or 0}", (2, 1, 8, 16, 16))


@pytest.mark.slow
def test_a_video_swin() -> None:
    from torchvision.models.video import swin3d_t

    torch.manual_seed(0)
    model = randomise(swin3d_t(num_classes=5))
    images = torch.randn(1, 3, 8, 64, 64)
    explanation = gradcam.explain(model, images, target=1)
    assert (explanation.layer, explanation.maps.shape[2:]) == ("norm", (4, 2, 2))
    output, gradient = oracles.reference(model, images, ["norm"], lambda output: output[0, 1])["norm"]
    expected = (gradient.mean((1, 2, 3), keepdim=True) * output).sum(-1).relu()
    torch.testing.assert_close(explanation.maps[:, 0], expected, rtol=1e-4, atol=1e-6)
