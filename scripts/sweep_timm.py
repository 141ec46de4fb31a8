"""Small timm models with random weights, at least one of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
from sweep_cases import CLASSES, Case, make_noise
from timm.models import convmixer, crossvit, focalnet, metaformer, mlp_mixer, mvitv2, nest, volo
from torch import nn

SIZE = 64
VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3}
STAGES = {"depths": (1, 1, 1, 1)}
SWIN = {"depths": (2, 2), "embed_dim": 16, "num_heads": (1, 2), "window_size": 4}
NARROW = {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}

# By name: options of `create_model`. "side" is the image's side; "sized" says whether the model takes it as an option.
MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": VIT,
    "lambda_resnet26t": {"side": 96, "sized": True},
    "botnet26t_256": {"side": 96, "sized": True},
    "gcresnext26ts": {"side": 96},
    "repvgg_a0": {"side": 96},
    "cait_xxs24_224": VIT,
    "coat_lite_tiny": {"sized": True},
    "coat_tiny": {"sized": True},
    "convit_tiny": {"depth": 3, "embed_dim": 12, "num_heads": 4, "sized": True},
    "convnext_atto": {**NARROW, "side": 96},
    "convnextv2_atto": {**NARROW, "side": 96},
    "cpubone_b0_bfrobust": {"side": 96},
    "csatv2": {"side": 96},
    "cspresnet50": {"side": 96},
    "darknet17": {"side": 96},
    "cs3darknet_focus_s": {"side": 96},
    "cspnext_tiny": {"side": 96},
    "davit_tiny": {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (1, 2), "window_size": 4},
    "deit3_small_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "densenet121": {"block_config": (2, 2, 2, 2), "side": 96},
    "dla46_c": {"side": 96},
    "dpn48b": {"side": 96},
    "edgenext_xx_small": {"depths": (1, 1, 1, 1), "side": 96},
    "efficientformer_l1": {"sized": True, "side": 224},
    "efficientformerv2_s0": {"sized": True, "side": 96},
    "mobilenetv2_035": {"side": 96},
    "mixnet_s": {"side": 96},
    "tf_efficientnet_lite0": {"side": 96},
    "efficientvim_m1": {"side": 96},
    "efficientvit_b0": {"side": 96},
    "efficientvit_m0": {"sized": True, "side": 224},
    "eva02_tiny_patch14_224": {**VIT, "side": 70},
    "vit_pe_core_tiny_patch16_384": VIT,
    "vit_small_patch16_dinov3": VIT,
    "fasternet_t0": {"depths": (1, 1, 1, 1), "side": 96},
    "fastvit_t8": {"side": 96},
    "gcvit_xxtiny": {"img_size": 96, "side": 96},
    "ghostnet_050": {"side": 96},
    "hardcorenas_a": {"side": 96},
    "hgnetv2_b0": {"side": 96},
    "hiera_tiny_224": {"embed_dim": 16, "num_heads": 1, "sized": True, "side": 96},
    "hieradet_small": {"embed_dim": 16, "num_heads": 1, "side": 96},
    "hrnet_w18_small": {"side": 96},
    "iformer_t": {"side": 96},
    "inception_next_atto": {"depths": (1, 1, 1, 1), "side": 96},
    "lcnetv2_small": {"side": 96},
    "levit_128s": {"sized": True, "side": 96},
    "levit_conv_128s": {"sized": True, "side": 96},
    "lowformer_b0": {"side": 96},
    "mambaout_femto": {"depths": (1, 1, 1, 1), "side": 96},
    "maxvit_rmlp_pico_rw_256": {"sized": True},
    "coatnet_pico_rw_224": {"sized": True, "side": 96},
    "mobilenetv3_small_050": {"side": 96},
    "mobilenetv4_conv_small": {"side": 96},
    "mobilenetv4_hybrid_medium": {"side": 96},
    "mobilevit_xxs": {"sized": True, "side": 96},
    "mobilevitv2_050": {"sized": True, "side": 96},
    "naflexvit_base_patch16_gap": {"depth": 2, "embed_dim": 48, "num_heads": 3},
    "nextvit_small": {"side": 96},
    "nf_regnet_b0": {"side": 96},
    "pit_ti_224": {"sized": True, "side": 96},
    "pit_ti_distilled_224": {"sized": True, "side": 96},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "side": 96},
    "rdnet_tiny": {"side": 96},
    "regnety_002": {"side": 96},
    "repghostnet_050": {"side": 96},
    "repvit_m0_9": {"side": 96},
    "res2net50_14w_8s": {"layers": (1, 1, 1, 1), "side": 96},
    "resnest14d": {"side": 96},
    "resnet10t": {"side": 96},
    "seresnet18": {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64), "side": 96},
    "resnetv2_18": {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64), "side": 96},
    "rexnet_100": {"side": 96},
    "selecsls42": {"side": 96},
    "legacy_seresnet18": {"layers": (1, 1, 1, 1), "side": 96},
    "sequencer2d_s": {
        "layers": (1, 1, 1, 1),
        "embed_dims": (16, 32, 32, 32),
        "hidden_sizes": (4, 8, 8, 8),
        "sized": True,
    },
    "shvit_s1": {"side": 96},
    "skresnet18": {"layers": (1, 1, 1, 1), "channels": (32, 32, 48, 64), "side": 96},
    "starnet_s050": {"side": 96},
    "swiftformer_xs": {"sized": True, "side": 96},
    "swin_tiny_patch4_window7_224": {**SWIN, "sized": True},
    "swinv2_tiny_window8_256": {**SWIN, "sized": True},
    "swinv2_cr_tiny_ns_224": {**SWIN, "sized": True},
    "swin_s3_tiny_224": {**SWIN, "window_size": (4, 4), "sized": True},
    "tiny_vit_5m_224": {"side": 96},
    "tnt_s_patch16_224": {
        "depth": 2,
        "embed_dim": 48,
        "inner_dim": 8,
        "num_heads_outer": 2,
        "num_heads_inner": 2,
        "sized": True,
    },
    "tresnet_m": {"layers": (1, 1, 1, 1), "side": 96},
    "twins_pcpvt_small": {
        "depths": (1, 1, 1, 1),
        "embed_dims": (16, 32, 32, 32),
        "num_heads": (1, 2, 2, 2),
        "sized": True,
    },
    "twins_svt_small": {
        "depths": (2, 2, 2, 2),
        "embed_dims": (16, 32, 32, 32),
        "num_heads": (1, 2, 2, 2),
        "sized": True,
        "side": 224,
    },
    "visformer_tiny": {"embed_dim": 48, "num_heads": 2, "depth": (1, 2, 2), "sized": True, "side": 96},
    "vit_tiny_patch16_224": VIT,
    "vit_tiny_r_s16_p8_224": {**VIT, "side": 64},
    "vit_relpos_small_patch16_224": VIT,
    "vit_srelpos_small_patch16_224": VIT,
    "samvit_base_patch16": {**VIT, "neck_chans": 16, "window_size": 2, "global_attn_indexes": (1,), "sized": True},
    "ese_vovnet19b_slim_dw": {"side": 96},
    "xception41": {"side": 96},
    "xcit_nano_12_p16_224": {**VIT, "sized": True},
    "qwen3_vit_88m": {"depth": 2, "embed_dim": 64, "num_heads": 2, "sized": True},
    "gemma4_vit_167m": {"depth": 2, "embed_dim": 64, "num_heads": 2, "sized": True},
    "deepseek_vit_412m": {"depth": 2, "embed_dim": 64, "num_heads": 2, "sized": True, "side": 56},
    "vit_base_patch16_siglip_224": VIT,
    "vit_small_patch14_reg4_dinov2": {**VIT, "side": 70},
    "vit_wee_patch16_reg1_gap_256": {**VIT, "sized": True},
    "aimv2_1b_patch14_224": {**VIT, "side": 70},
    "test_vit": {"sized": True},
    "test_efficientnet": {},
    "test_convnext": {},
    "test_resnet": {},
    "test_byobnet": {},
    "test_nfnet": {},
}


def make_case(name: str, options: dict[str, Any]) -> Case:
    """Return the case of a timm model with these options."""
    options = dict(options)
    side = options.pop("side", SIZE)
    if options.pop("sized", options.keys() >= VIT.keys()):
        options["img_size"] = side

    def build() -> nn.Module:
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return Case("timm", name, build, make_noise(side, side))


def build_former(mixers: Any, **options: Any) -> nn.Module:
    return metaformer.MetaFormer(
        num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(32, 32, 64, 64), token_mixers=mixers, **options
    )


def build_caformer() -> nn.Module:
    norms = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
    return build_former([metaformer.SepConv] * 2 + [metaformer.Attention] * 2, norm_layers=norms)


def build_mixer(block: Any, ratio: Any, perceptron: Any = mlp_mixer.Mlp) -> nn.Module:
    return mlp_mixer.MlpMixer(
        num_classes=CLASSES,
        img_size=SIZE,
        patch_size=8,
        num_blocks=2,
        embed_dim=32,
        mlp_ratio=ratio,
        block_layer=block,
        mlp_layer=perceptron,
    )


def build_mvit(*, class_token: bool) -> nn.Module:
    config = mvitv2.MultiScaleVitCfg(
        depths=(1, 1, 1), embed_dim=24, num_heads=1, use_cls_token=class_token, stride_q=((1, 1), (2, 2), (2, 2))
    )
    return mvitv2.MultiScaleVit(config, img_size=SIZE, num_classes=CLASSES)


def build_crossvit() -> nn.Module:
    return crossvit.CrossVit(
        img_size=96, img_scale=(1.0, 2 / 3), patch_size=(12, 16), embed_dim=(24, 48), depth=((1, 1, 0), (1, 1, 0)),
        num_heads=(2, 2), mlp_ratio=(2.0, 2.0, 1.0), num_classes=CLASSES,
    )  # fmt: skip


def build_nest() -> nn.Module:
    return nest.Nest(
        SIZE, patch_size=4, embed_dims=(16, 32, 32), num_heads=(1, 2, 2), depths=(1, 1, 1), num_classes=CLASSES
    )


def build_volo() -> nn.Module:
    return volo.VOLO([1, 1], SIZE, num_classes=CLASSES, embed_dims=[24, 48], num_heads=[2, 2])


# Architectures whose functions fix their depth and width.
BUILDERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "convmixer": (lambda: convmixer.ConvMixer(32, 3, num_classes=CLASSES), 70),
    "crossvit": (build_crossvit, 96),
    "focalnet": (lambda: focalnet.FocalNet(num_classes=CLASSES, embed_dim=16, depths=(1, 1, 1, 1)), 96),
    "poolformer": (lambda: build_former(metaformer.Pooling), 96),
    "caformer": (build_caformer, 96),
    "mixer": (lambda: build_mixer(mlp_mixer.MixerBlock, (0.5, 4.0)), SIZE),
    "gmlp": (lambda: build_mixer(mlp_mixer.SpatialGatingBlock, 6, mlp_mixer.GatedMlp), SIZE),
    "resmlp": (lambda: build_mixer(mlp_mixer.ResBlock, 4), SIZE),
    "mvitv2": (lambda: build_mvit(class_token=False), SIZE),
    "mvitv2_class_token": (lambda: build_mvit(class_token=True), SIZE),
    "nest": (build_nest, SIZE),
    "volo": (build_volo, SIZE),
}

CASES = [
    *(make_case(name, options) for name, options in MODELS.items()),
    *(Case("timm", name, build, make_noise(side, side)) for name, (build, side) in BUILDERS.items()),
]
