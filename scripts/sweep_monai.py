"""Small MONAI networks with random weights, for images and volumes."""

from __future__ import annotations

from typing import Any

from monai.networks import nets
from sweep_cases import CLASSES, Case, make_noise, score_places
from torch import Tensor, nn


class FirstOutput(nn.Module):
    """Returns the scores of a network that returns hidden states as well."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[0]


def build_vit(dimensions: int) -> nn.Module:
    size, patch = ((48, 64), 8) if dimensions == 2 else ((32, 32, 32), 8)
    return FirstOutput(
        nets.ViT(3 if dimensions == 2 else 1, size, patch, 24, 48, 2, 2, classification=True, num_classes=CLASSES,
                 spatial_dims=dimensions)
    )  # fmt: skip


def build_swin(dimensions: int) -> nn.Module:
    return nets.SwinUNETR(
        3 if dimensions == 2 else 1, CLASSES, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), window_size=4, feature_size=12,
        spatial_dims=dimensions,
    )  # fmt: skip


def build_unetr(dimensions: int) -> nn.Module:
    size: Any = (64, 64) if dimensions == 2 else (32, 32, 32)
    return nets.UNETR(
        3 if dimensions == 2 else 1, CLASSES, size, feature_size=4, hidden_size=24, mlp_dim=48, num_heads=2,
        spatial_dims=dimensions,
    )  # fmt: skip


def build_efficientnet() -> nn.Module:
    return nets.EfficientNetBN("efficientnet-b0", pretrained=False, in_channels=3, num_classes=CLASSES)


DENSE = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2, 2)}
UNET = {"channels": (8, 16, 32), "strides": (2, 2)}
STEPS = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 24]}
SENET = {"layers": (1, 1, 1, 1), "groups": 1, "reduction": 8, "inplanes": 16, "num_classes": CLASSES}
WIDTHS = (4, 4, 8, 8, 16, 4)
MEDNEXT = {"blocks_down": (1, 1, 1, 1), "blocks_up": (1, 1, 1, 1)}
FLAT, VOLUME = make_noise(64, 96), make_noise(32, 32, 48, channels=1)

CASES = [
    Case("monai", "densenet-2d", lambda: nets.DenseNet(2, 3, CLASSES, **DENSE), FLAT),
    Case("monai", "densenet-3d", lambda: nets.DenseNet(3, 1, CLASSES, **DENSE), VOLUME),
    Case("monai", "senet-2d", lambda: nets.SENet(2, 3, "se_resnet_bottleneck", **SENET), make_noise(64, 64)),
    Case(
        "monai", "resnet-3d",
        lambda: nets.ResNet("basic", [1, 1, 1, 1], [8, 16, 24, 32], 3, 1, num_classes=CLASSES), VOLUME,
    ),
    Case("monai", "efficientnet-2d", build_efficientnet, make_noise(96, 96)),
    Case("monai", "vit-2d", lambda: build_vit(2), make_noise(48, 64)),
    Case("monai", "vit-3d", lambda: build_vit(3), make_noise(32, 32, 32, channels=1)),
    Case("monai", "swin_unetr-2d", lambda: build_swin(2), make_noise(64, 64), score_places),
    Case("monai", "swin_unetr-3d", lambda: build_swin(3), make_noise(32, 32, 64, channels=1), score_places),
    Case("monai", "unetr-2d", lambda: build_unetr(2), make_noise(64, 64), score_places),
    Case("monai", "unet-2d", lambda: nets.UNet(2, 3, CLASSES, num_res_units=1, **UNET), FLAT, score_places),
    Case("monai", "unet-3d", lambda: nets.UNet(3, 1, CLASSES, **UNET), make_noise(16, 32, 32, channels=1), score_places),
    Case("monai", "attention_unet-2d", lambda: nets.AttentionUnet(2, 3, CLASSES, **UNET), FLAT, score_places),
    Case("monai", "basic_unet-2d", lambda: nets.BasicUNet(2, 3, CLASSES, WIDTHS), make_noise(64, 64), score_places),
    Case(
        "monai", "basic_unet_plus_plus-2d", lambda: nets.BasicUNetPlusPlus(2, 3, CLASSES, WIDTHS),
        make_noise(64, 64), score_places,
    ),
    Case("monai", "segresnet-2d", lambda: nets.SegResNet(2, 8, 3, CLASSES), FLAT, score_places),
    Case("monai", "segresnet_ds-2d", lambda: nets.SegResNetDS(2, 8, 3, CLASSES), FLAT, score_places),
    Case("monai", "dynunet-2d", lambda: nets.DynUNet(2, 3, CLASSES, **STEPS), FLAT, score_places),
    Case("monai", "highresnet-2d", lambda: nets.HighResNet(2, 3, CLASSES), make_noise(32, 48), score_places),
    Case("monai", "mednext-2d", lambda: nets.MedNeXt(2, 4, 3, CLASSES, **MEDNEXT), FLAT, score_places),
    Case("monai", "classifier-2d", lambda: nets.Classifier((3, 64, 96), CLASSES, (8, 16, 16), (2, 2, 2)), FLAT),
    Case(
        "monai", "regressor-2d", lambda: nets.Regressor((3, 64, 96), (1,), (8, 16, 16), (2, 2, 2)), FLAT,
        lambda output: output.flatten(1)[:, 0],
    ),
    Case("monai", "flexible_unet-2d", lambda: nets.FlexibleUNet(3, CLASSES, "resnet10"), make_noise(64, 64), score_places),
]  # fmt: skip
