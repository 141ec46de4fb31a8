"""Small models of segmentation-models-pytorch with random weights."""

from __future__ import annotations

from typing import Any

import segmentation_models_pytorch as smp
from sweep_cases import CLASSES, Case, make_noise, score_places
from torch import nn

MODELS: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (32, 16, 16, 8, 8)},
    "UnetPlusPlus": {"decoder_channels": (32, 16, 16, 8, 8)},
    "MAnet": {"decoder_channels": (32, 16, 16, 8, 8)},
    "Linknet": {},
    "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 32},
    "PAN": {"decoder_channels": 16},
    "DeepLabV3": {"decoder_channels": 16},
    "DeepLabV3Plus": {"decoder_channels": 16},
    "UPerNet": {"decoder_channels": 32},
    "Segformer": {"decoder_segmentation_channels": 32},
}
ENCODERS = {"Unet-mit_b0": ("Unet", "mit_b0"), "FPN-mobilenet_v2": ("FPN", "mobilenet_v2")}


def make_case(title: str, name: str, encoder: str, options: dict[str, Any]) -> Case:
    """Return the case of one architecture on one encoder."""

    def build() -> nn.Module:
        return getattr(smp, name)(encoder, encoder_weights=None, classes=CLASSES, **options)

    side = 128 if name == "PAN" else 96  # PAN pools too often for less
    return Case("smp", title, build, make_noise(side, side), score_places)


def build_dpt() -> nn.Module:
    return smp.DPT(
        "tu-vit_tiny_patch16_224", encoder_weights=None, classes=CLASSES, decoder_readout="ignore", encoder_depth=4,
        decoder_intermediate_channels=(16, 16, 16, 16), decoder_fusion_channels=16, dynamic_img_size=True,
    )  # fmt: skip


CASES = [
    *(make_case(name, name, "timm-mobilenetv3_small_minimal_100" if name == "UnetPlusPlus" else "resnet18", options)
      for name, options in MODELS.items()),
    *(make_case(title, name, encoder, MODELS[name]) for title, (name, encoder) in ENCODERS.items()),
    Case("smp", "DPT", build_dpt, make_noise(64, 64), score_places),
]  # fmt: skip
