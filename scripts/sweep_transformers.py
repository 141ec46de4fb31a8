"""Small Hugging Face transformers with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from sweep_cases import CLASSES, Case, make_noise, score_depth, score_places
from torch import Tensor, nn

TOKENS = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PATCHES = {**TOKENS, "image_size": (48, 64), "patch_size": 8}
SQUARE = {**TOKENS, "image_size": 64, "patch_size": 8}
PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
MIXED = {**PYRAMID, "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]}
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 12, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
DONUT = {**SWIN, "image_size": [64, 64]}
HGNET = {
    "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 24], "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 24, 32], "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 24, 32], "depths": [1, 1, 1, 1], "embedding_size": 8,
}  # fmt: skip
EFFICIENT = {
    "image_size": 96, "width_coefficient": 0.5, "depth_coefficient": 0.2, "hidden_dim": 640, "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 32], "kernel_sizes": [3, 3, 3], "strides": [1, 2, 2], "num_block_repeats": [1, 1, 1],
    "expand_ratios": [1, 2, 2],
}  # fmt: skip
HIERA = {
    "image_size": [64, 64], "embed_dim": 12, "depths": [1, 1, 1], "num_heads": [1, 2, 2], "num_query_pool": 2,
    "masked_unit_size": [4, 4], "masked_unit_attention": [True, True, False],
}  # fmt: skip

# Model, options of its configuration, size of the image.
CLASSIFIERS: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("ViT", PATCHES, (48, 64)),
    ("DeiT", PATCHES, (48, 64)),
    ("Beit", PATCHES, (48, 64)),
    ("Data2VecVision", SQUARE, (64, 64)),
    ("ViTMSN", SQUARE, (64, 64)),
    ("IJepa", SQUARE, (64, 64)),
    ("Dinov2", {**TOKENS, "image_size": 64, "patch_size": 8, "mlp_ratio": 2}, (48, 64)),
    ("Dinov2WithRegisters", {**TOKENS, "image_size": 64, "patch_size": 8, "mlp_ratio": 2}, (48, 64)),
    ("Swin", SWIN, (64, 64)),
    ("Swinv2", SWIN, (64, 64)),
    ("DonutSwin", DONUT, (64, 64)),
    ("ConvNext", {**PYRAMID, "image_size": 64}, (64, 96)),
    ("ConvNextV2", {**PYRAMID, "image_size": 64}, (64, 96)),
    ("ResNet", {**PYRAMID, "embedding_size": 8, "layer_type": "basic"}, (64, 96)),
    ("RegNet", {**PYRAMID, "embedding_size": 8, "groups_width": 8}, (64, 96)),
    ("Bit", {"hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "embedding_size": 32, "num_groups": 8}, (64, 96)),
    ("MobileNetV1", {"image_size": 96, "depth_multiplier": 0.25}, (96, 96)),
    ("MobileNetV2", {"image_size": 96, "depth_multiplier": 0.25}, (96, 96)),
    ("MobileViT", {"image_size": 96, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
     (96, 96)),
    ("MobileViTV2", {"image_size": 96, "width_multiplier": 0.25, "base_attn_unit_dims": [64, 64, 64],
      "n_attn_blocks": [1, 1, 1]}, (96, 96)),
    ("PoolFormer", PYRAMID, (64, 96)),
    ("Pvt", {**MIXED, "image_size": 96}, (96, 96)),
    ("PvtV2", MIXED, (64, 96)),
    ("Segformer", MIXED, (64, 96)),
    ("Levit", {"image_size": 96, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
      "key_dim": [4, 4, 4], "down_ops": [["Subsample", 4, 4, 2, 2, 2], ["Subsample", 4, 4, 2, 2, 2]]}, (96, 96)),
    ("Cvt", {"embed_dim": [8, 16, 24], "num_heads": [1, 1, 2], "depth": [1, 2, 3]}, (64, 96)),
    ("FocalNet", {"image_size": 64, "embed_dim": 8, "hidden_sizes": [8, 16, 24], "depths": [1, 1, 1],
      "focal_levels": [2, 2, 2], "focal_windows": [3, 3, 3]}, (64, 64)),
    ("EfficientNet", EFFICIENT, (96, 96)),
    ("HGNetV2", HGNET, (64, 96)),
    ("Hiera", HIERA, (64, 64)),
    ("SwiftFormer", {"image_size": 96, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32]}, (96, 96)),
    ("TextNet", {"hidden_sizes": [8, 8, 16, 16, 24], "stem_out_channels": 8, "image_size": [96, 96]}, (96, 96)),
    ("PPLCNet", {"scale": 0.25}, (96, 96)),
]  # fmt: skip

# Models whose configuration contains that of the image encoder.
TOWERS = {
    "CLIP": "clip_vision_model", "Siglip": "siglip_vision_model", "MetaClip2": "metaclip_2_vision_model",
}  # fmt: skip


def make_classifier(name: str, options: dict[str, Any], size: tuple[int, int]) -> Case:
    """Return the case of an image classifier."""

    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)
        return getattr(transformers, f"{name}ForImageClassification")(config)

    return Case("transformers", name, build, make_noise(*size))


def make_tower(name: str) -> Case:
    """Return the case of a classifier on the vision tower of a model of images and texts."""

    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(vision_config=SQUARE, num_labels=CLASSES)
        return getattr(transformers, f"{name}ForImageClassification")(config)

    return Case("transformers", name, build, make_noise(64, 64))


class Probe(nn.Module):
    """A linear classifier on a backbone: on its class token, or on the mean of all tokens."""

    def __init__(self, backbone: nn.Module, width: int, *, mean: bool = True) -> None:
        super().__init__()
        self.backbone, self.head, self.mean = backbone, nn.Linear(width, CLASSES), mean

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.backbone(pixel_values=images).last_hidden_state
        hidden = hidden.flatten(2).transpose(1, 2) if hidden.ndim == 4 else hidden
        return self.head(hidden.mean(1) if self.mean else hidden[:, 0])


class Clips(nn.Module):
    """Passes clips (N,C,T,H,W) to a video model, which takes (N,T,C,H,W)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, clips: Tensor) -> Tensor:
        return self.model(clips.transpose(1, 2)).logits


class Spectrograms(nn.Module):
    """Passes spectrograms (N,1,time,frequency) to an audio model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images[:, 0]).logits


def build_dinov3(*, mean: bool) -> nn.Module:
    config = transformers.DINOv3ViTConfig(**SQUARE, num_register_tokens=4)
    return Probe(transformers.DINOv3ViTModel(config), 24, mean=mean)


def build_dinov3_convnext() -> nn.Module:
    return Probe(transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(**PYRAMID, image_size=64)), 32)


def build_perceiver(kind: str, latents: int) -> nn.Module:
    name = f"PerceiverForImageClassification{kind}"
    config = transformers.PerceiverConfig(
        num_latents=latents, d_latents=32, d_model=32, num_blocks=1, num_self_attends_per_block=1,
        num_self_attention_heads=2, num_cross_attention_heads=1, image_size=32, num_labels=CLASSES,
    )  # fmt: skip
    return getattr(transformers, name)(config)


def build_ast(*, square: bool = False) -> nn.Module:
    config = transformers.ASTConfig(
        **TOKENS, patch_size=8, frequency_stride=8, time_stride=8, max_length=64, num_mel_bins=64 if square else 32,
        num_labels=CLASSES,
    )  # fmt: skip
    return Spectrograms(transformers.ASTForAudioClassification(config))


def build_vilt() -> nn.Module:
    config = transformers.ViltConfig(**SQUARE, vocab_size=30, max_position_embeddings=16, num_labels=CLASSES)
    return transformers.ViltForQuestionAnswering(config)


def make_vilt_inputs() -> dict[str, Tensor]:
    words = torch.tensor([[1, 5, 7, 9, 3]])
    masks = {"attention_mask": torch.ones_like(words), "pixel_mask": torch.ones(1, 64, 64, dtype=torch.long)}
    return {"input_ids": words, "pixel_values": make_noise(64, 64)(), **masks}


def build_blip2_vision() -> nn.Module:
    return Probe(transformers.Blip2VisionModel(transformers.Blip2VisionConfig(**SQUARE)), 24)


def build_blip2_qformer() -> nn.Module:
    """Return BLIP-2's queries on its vision tower, with a linear classifier."""
    qformer = transformers.Blip2QFormerConfig(**TOKENS, vocab_size=30, encoder_hidden_size=24)
    text = transformers.OPTConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32,
                                  word_embed_proj_dim=16)  # fmt: skip
    config = transformers.Blip2Config(
        vision_config=SQUARE, qformer_config=qformer.to_dict(), text_config=text.to_dict(), num_query_tokens=16
    )
    return Queries(transformers.Blip2Model(config))


class Queries(nn.Module):
    """A linear classifier on the query tokens of BLIP-2."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.vision, self.qformer = model.vision_model, model.qformer
        self.queries, self.head = model.query_tokens, nn.Linear(24, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.vision(pixel_values=images).last_hidden_state
        queries = self.queries.expand(len(images), -1, -1)
        hidden = self.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
        return self.head(hidden.mean(1))


def build_align() -> nn.Module:
    return Probe(transformers.AlignVisionModel(transformers.AlignVisionConfig(**EFFICIENT)), 16)


def build_sam() -> nn.Module:
    config = transformers.SamVisionConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8, output_channels=16,
        mlp_dim=48, window_size=4, global_attn_indexes=[1],
    )  # fmt: skip
    return Probe(transformers.SamVisionModel(config), 16)


def build_pixio() -> nn.Module:
    config = transformers.PixioConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=64,
        patch_size=8,
        n_cls_tokens=8,
    )
    return Probe(transformers.PixioModel(config), 24)


def build_vitdet() -> nn.Module:
    config = transformers.VitDetConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=64, patch_size=8,
        window_block_indices=[0], window_size=3,
    )  # fmt: skip
    return Probe(transformers.VitDetModel(config), 24)


def build_video(name: str) -> nn.Module:
    options = {
        "VideoMAE": {**TOKENS, "image_size": 32, "patch_size": 8, "num_frames": 8},
        "Vivit": {**TOKENS, "image_size": 32, "num_frames": 8, "tubelet_size": [2, 8, 8]},
        "Timesformer": {**TOKENS, "image_size": 32, "patch_size": 8, "num_frames": 4},
        "VJEPA2": {
            "patch_size": 8, "crop_size": 32, "frames_per_clip": 8, "hidden_size": 24, "num_attention_heads": 2,
            "num_hidden_layers": 2, "mlp_ratio": 2.0, "num_pooler_layers": 1, "pred_hidden_size": 24,
            "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
        },
    }[name]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)
    return Clips(getattr(transformers, f"{name}ForVideoClassification")(config))


STEPS = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
STAGES = ["stage1", "stage2", "stage3", "stage4"]


def build_dpt(kind: str) -> nn.Module:
    config = transformers.DPTConfig(
        **{**SQUARE, "num_hidden_layers": 4}, **STEPS, backbone_out_indices=[0, 1, 2, 3], num_labels=CLASSES,
        is_hybrid=False, use_auxiliary_head=False,
    )  # fmt: skip
    return getattr(transformers, f"DPTFor{kind}")(config)


def build_depth_anything() -> nn.Module:
    backbone = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=2, image_size=64, patch_size=8,
        out_features=STAGES, reshape_hidden_states=False,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=8, reassemble_hidden_size=24, head_hidden_size=8, **STEPS
    )
    return transformers.DepthAnythingForDepthEstimation(config)


def build_upernet(backbone: Any) -> nn.Module:
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, pool_scales=[1, 2], num_labels=CLASSES, use_auxiliary_head=False
    )
    return transformers.UperNetForSemanticSegmentation(config)


def build_upernet_swin() -> nn.Module:
    swin = {**SWIN, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "out_features": STAGES}
    return build_upernet(transformers.SwinConfig(**swin))


def make_segmenter(name: str, options: dict[str, Any], size: tuple[int, int]) -> Case:
    """Return the case of a semantic segmentation model."""

    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)
        return getattr(transformers, f"{name}ForSemanticSegmentation")(config)

    return Case("transformers", f"{name}-segmentation", build, make_noise(*size), score_places)


def make_model_case(
    name: str, build: Callable[[], nn.Module], images: Callable[[], Any] | None = None, target: Any = 1
) -> Case:
    """Return the case of a model that the other functions do not cover."""
    return Case("transformers", name, build, images or make_noise(64, 64), target)


BEIT = {
    **SQUARE, "num_hidden_layers": 4, "use_relative_position_bias": True, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2],
    "use_auxiliary_head": False,
}  # fmt: skip
VIT_OPTIONS = dict(options[:2] for options in CLASSIFIERS)

CASES = [
    *(make_classifier(*options) for options in CLASSIFIERS),
    *(make_tower(name) for name in TOWERS),
    make_model_case("DINOv3-mean", lambda: build_dinov3(mean=True)),
    make_model_case("DINOv3-class-token", lambda: build_dinov3(mean=False)),
    make_model_case("DINOv3ConvNext", build_dinov3_convnext),
    make_model_case("Pixio", build_pixio),
    make_model_case("VitDet", build_vitdet),
    make_model_case("SamVision", build_sam),
    make_model_case("AlignVision", build_align, make_noise(96, 96)),
    make_model_case("Blip2Vision", build_blip2_vision),
    make_model_case("Blip2QFormer-16", build_blip2_qformer),
    make_model_case("Vilt", build_vilt, make_vilt_inputs),
    make_model_case("PerceiverConvProcessing-16", lambda: build_perceiver("ConvProcessing", 16), make_noise(32, 32)),
    make_model_case("PerceiverLearned-16", lambda: build_perceiver("Learned", 16), make_noise(32, 32)),
    make_model_case("PerceiverLearned-20", lambda: build_perceiver("Learned", 20), make_noise(32, 32)),
    make_model_case("AST", build_ast, make_noise(64, 32, channels=1)),
    make_model_case("AST-square", lambda: build_ast(square=True), make_noise(64, 64, channels=1)),
    *(make_model_case(name, lambda name=name: build_video(name), make_noise(4 if name == "Timesformer" else 8, 32, 32))
      for name in ("VideoMAE", "Vivit", "Timesformer", "VJEPA2")),
    make_segmenter("Segformer", {**MIXED, "decoder_hidden_size": 16}, (64, 96)),
    make_segmenter("Beit", BEIT, (64, 64)),
    make_segmenter("Data2VecVision", BEIT, (64, 64)),
    make_segmenter("MobileNetV2", VIT_OPTIONS["MobileNetV2"], (96, 96)),
    make_segmenter("MobileViT", {**VIT_OPTIONS["MobileViT"], "aspp_out_channels": 16}, (96, 96)),
    make_segmenter("MobileViTV2", {**VIT_OPTIONS["MobileViTV2"], "aspp_out_channels": 16}, (96, 96)),
    make_model_case("DPT-segmentation", lambda: build_dpt("SemanticSegmentation"), make_noise(64, 64), score_places),
    make_model_case("DPT-depth", lambda: build_dpt("DepthEstimation"), make_noise(64, 64), score_depth),
    make_model_case("DepthAnything", build_depth_anything, make_noise(64, 64), score_depth),
    make_model_case(
        "GLPN", lambda: transformers.GLPNForDepthEstimation(transformers.GLPNConfig(**MIXED, decoder_hidden_size=16)),
        make_noise(64, 96), score_depth,
    ),
    make_model_case(
        "UperNet-convnext",
        lambda: build_upernet(transformers.ConvNextConfig(**PYRAMID, out_features=STAGES)), make_noise(64, 96), score_places,
    ),
    make_model_case("UperNet-swin", build_upernet_swin, make_noise(64, 64), score_places),
]  # fmt: skip
