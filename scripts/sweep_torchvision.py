"""Small torchvision models with random weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torchvision
from sweep_cases import CLASSES, Case, make_noise, score_places
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

CLASSIFIERS = [
    "alexnet", "squeezenet1_1", "resnet18", "resnext50_32x4d", "densenet121", "googlenet", "inception_v3",
    "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "efficientnet_b0", "regnet_y_400mf",
    "convnext_tiny",
]  # fmt: skip
SEGMENTERS = ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"]
VIDEOS = ["r3d_18", "r2plus1d_18"]
OPTIONS = {"googlenet": {"init_weights": False, "aux_logits": False}, "inception_v3": {"init_weights": False}}


def build_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES
    )


def build_swin(version: int) -> nn.Module:
    shape = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": [4, 4]}
    parts = {} if version == 1 else {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return torchvision.models.SwinTransformer(**shape, **parts, num_classes=CLASSES)


def build_maxvit() -> nn.Module:
    return torchvision.models.MaxVit(
        input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[8, 16], block_layers=[1, 1],
        head_dim=4, stochastic_depth_prob=0.0, num_classes=CLASSES,
    )  # fmt: skip


def build_swin3d() -> nn.Module:
    return torchvision.models.video.SwinTransformer3d(
        patch_size=[2, 4, 4], embed_dim=12, depths=[1, 1], num_heads=[1, 2], window_size=[2, 4, 4], num_classes=CLASSES
    )


def build_mvit() -> nn.Module:
    block = torchvision.models.video.mvit.MSBlockConfig
    settings = [
        block(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        block(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return torchvision.models.video.MViT(
        spatial_size=(64, 64), temporal_size=8, block_setting=settings, residual_pool=False, residual_with_cls_embed=True,
        rel_pos_embed=False, proj_after_attn=False, num_classes=CLASSES,
    )  # fmt: skip


def build_vgg() -> nn.Module:
    """Return VGG's convolutions with a small head: its usual one has a hundred million weights."""
    features = torchvision.models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M", 64, "M"])
    return nn.Sequential(
        OrderedDict(features=features, avgpool=nn.AdaptiveAvgPool2d(2), flat=nn.Flatten(), head=nn.Linear(256, CLASSES))
    )


def build_fcn() -> nn.Module:
    backbone = IntermediateLayerGetter(torchvision.models.resnet18(), {"layer4": "out"})
    return torchvision.models.segmentation.FCN(backbone, FCNHead(512, CLASSES))


def find_builder(name: str) -> Callable[[], nn.Module]:
    """Return the builder of a torchvision model by its name."""
    options = {"weights": None, "num_classes": CLASSES, **OPTIONS.get(name, {})}
    if name in SEGMENTERS:
        options["weights_backbone"] = None
    return lambda: torchvision.models.get_model(name, **options)


SIZES = {"inception_v3": 128}
CASES = [
    *(Case("torchvision", name, find_builder(name), make_noise(*[SIZES.get(name, 96)] * 2)) for name in CLASSIFIERS),
    Case("torchvision", "vgg", build_vgg, make_noise(64, 64)),
    Case("torchvision", "vit", build_vit, make_noise(64, 64)),
    Case("torchvision", "swin", lambda: build_swin(1), make_noise(64, 96)),
    Case("torchvision", "swin_v2", lambda: build_swin(2), make_noise(64, 96)),
    Case("torchvision", "maxvit", build_maxvit, make_noise(64, 64)),
    *(Case("torchvision", name, find_builder(name), make_noise(96, 96), score_places) for name in SEGMENTERS),
    Case("torchvision", "fcn_resnet18", build_fcn, make_noise(96, 96), score_places),
    *(Case("torchvision", name, find_builder(name), make_noise(8, 32, 32)) for name in VIDEOS),
    Case("torchvision", "swin3d", build_swin3d, make_noise(8, 32, 48)),
    Case("torchvision", "mvit", build_mvit, make_noise(8, 64, 64)),
]
