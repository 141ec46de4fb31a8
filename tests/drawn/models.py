"""Small models of drawn images: a detector, a segmenter, image and text towers, a Swin Transformer, and a VGG11."""

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.vgg import VGG, make_layers
from torchvision.ops import FeaturePyramidNetwork

from tests.drawn.pictures import COLOURS, SHAPES, SIZE

WEIGHTS = Path(__file__).parent / "weights"
EMBEDDING = 64
# The vocabulary of 40 words. Index 0 is the padding.
WORDS = (
    *SHAPES, *COLOURS, *("a", "an", "the", "of", "and", "is", "there", "picture", "photo", "something", "shape", "on", "at"),
    *("small", "large", "left", "right", "top", "bottom", "side", "above", "below", "beside", "to", "in", "middle"),
)  # fmt: skip


def unit(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Backbone(nn.Module):
    """A feature pyramid of two levels, with strides of 4 and 8 pixels and 32 channels each."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 16, stride=2), unit(16, 24))
        self.fine = nn.Sequential(unit(24, 32, stride=2), unit(32, 32))
        self.coarse = nn.Sequential(unit(32, 48, stride=2), unit(48, 48))
        self.fpn = FeaturePyramidNetwork([32, 48], self.out_channels)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        fine = self.fine(self.stem(images))
        return self.fpn(OrderedDict(fine=fine, coarse=self.coarse(fine)))


def make_detector() -> RetinaNet:
    """Return torchvision's RetinaNet, with heads of half the depth.

    Class 0 is the background; the shapes begin at 1.
    """
    anchors = AnchorGenerator(((14, 19), (26, 36)), ((1.0,),) * 2)
    head = RetinaNetHead(Backbone.out_channels, 2, 1 + len(SHAPES))
    for branch in (head.classification_head, head.regression_head):
        branch.conv = branch.conv[:2]
        for module in branch.conv.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
    return RetinaNet(
        Backbone(),
        1 + len(SHAPES),
        min_size=SIZE,
        max_size=2 * SIZE,
        image_mean=[0.45] * 3,
        image_std=[0.25] * 3,
        anchor_generator=anchors,
        head=head,
        score_thresh=0.5,
        nms_thresh=0.5,
        detections_per_img=20,
    )


class UNet(nn.Module):
    """A segmenter with logits (N,C,H,W) of the background and the shapes. The deepest layer is `bottleneck`."""

    def __init__(self, classes: int = 1 + len(SHAPES), widths: Sequence[int] = (8, 16, 32, 48)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.first = unit(3, first)
        self.second = nn.Sequential(unit(first, second, stride=2), unit(second, second))
        self.third = nn.Sequential(unit(second, third, stride=2), unit(third, third))
        self.bottleneck = nn.Sequential(unit(third, last, stride=2), unit(last, last), unit(last, last))
        self.to_third = unit(last + third, third)
        self.to_second = unit(third + second, second)
        self.to_first = unit(second + first, first)
        self.head = nn.Conv2d(first, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first((images - 0.45) / 0.25)
        second = self.second(first)
        third = self.third(second)
        features = self.to_third(join(self.bottleneck(third), third))
        features = self.to_second(join(features, second))
        return self.head(self.to_first(join(features, first)))


def join(coarse: Tensor, fine: Tensor) -> Tensor:
    return torch.cat([F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear", align_corners=False), fine], 1)


class Tokenizer:
    """A tokenizer from sentences to word indices: (T,length) int64, padded with 0."""

    length = 16

    def __call__(self, sentences: Sequence[str] | str) -> Tensor:
        sentences = [sentences] if isinstance(sentences, str) else sentences
        tokens = torch.zeros(len(sentences), self.length, dtype=torch.int64)
        for row, sentence in zip(tokens, sentences):
            indices = [1 + WORDS.index(word) for word in re.findall(r"[a-z]+", sentence.lower())]
            row[: len(indices)] = torch.tensor(indices[: self.length], dtype=torch.int64)
        return tokens


class ConvolutionalTower(nn.Module):
    """An image tower: generalised mean pooling of `features`, which emphasises small objects, and a projection."""

    power = 3

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            unit(3, 16, stride=2), unit(16, 32, stride=2), unit(32, 32), unit(32, 64, stride=2), unit(64, 96),
        )  # fmt: skip
        self.project = nn.Linear(96, EMBEDDING)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features((images - 0.45) / 0.25).clamp(min=1e-6)
        return self.project(features.pow(self.power).mean((2, 3)).pow(1 / self.power))


class TransformerTower(VisionTransformer):
    """torchvision's vision transformer, small, as an image tower.

    Convolutions make a token of 8 x 8 pixels; the first of them are those of the convolutional tower. The class token
    becomes the embedding.
    """

    def __init__(self) -> None:
        super().__init__(
            image_size=SIZE, patch_size=8, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=EMBEDDING
        )
        first = [unit(3, 16, stride=2), unit(16, 32, stride=2), unit(32, 32), unit(32, 64, stride=2)]
        self.conv_proj = nn.Sequential(*first, nn.Conv2d(64, 64, 1))
        nn.init.normal_(self.heads.head.weight, std=0.1)  # torchvision initialises it with zeros

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images - 0.45) / 0.25)


class SwinClassifier(SwinTransformer):
    """torchvision's Swin Transformer, small: logits (N,14) of the six shapes and the eight colours in an image.

    The first convolutions are those of the convolutional tower. The maximum over the tokens, instead of their mean,
    emphasises small objects.
    """

    width = 48

    def __init__(self) -> None:
        super().__init__(
            patch_size=[8, 8], embed_dim=self.width, depths=[2, 2], num_heads=[3, 6], window_size=[4, 4], mlp_ratio=2.0,
            stochastic_depth_prob=0.0, num_classes=len(SHAPES) + len(COLOURS),
        )  # fmt: skip
        first = [unit(3, 16, stride=2), unit(16, 32, stride=2), unit(32, 32), unit(32, 64, stride=2)]
        self.features[0][0] = nn.Sequential(*first, nn.Conv2d(64, self.width, 1))
        self.avgpool = nn.AdaptiveMaxPool2d(1)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images - 0.45) / 0.25)


class NarrowVGG11(VGG):
    """torchvision's VGG11, narrow: logits (N,14) of the six shapes and the eight colours in an image.

    As in VGG11, a ReLU that works in place follows every convolution. The maximum over the positions, instead of their
    mean, emphasises small objects.
    """

    layout: tuple[str | int, ...] = (8, "M", 16, "M", 32, 32, "M", 64, 64, "M", 64, 64, "M")

    def __init__(self) -> None:
        with torch.device("meta"):  # VGG creates a head of 120 million weights, which is replaced below.
            super().__init__(nn.Identity(), init_weights=False)
        self.features = make_layers(list(self.layout))
        self.avgpool = nn.AdaptiveMaxPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 14))
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images - 0.45) / 0.25)


class SentenceTower(nn.Module):
    """A text tower: one transformer layer over tokens (T,length), and the mean over words as the embedding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(1 + len(WORDS), width, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(Tokenizer.length, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.project = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, EMBEDDING))

    def forward(self, tokens: Tensor) -> Tensor:
        missing = tokens == 0
        values = self.block(self.words(tokens) + self.places, src_key_padding_mask=missing)
        present = (~missing)[..., None].to(values.dtype)
        return self.project((values * present).sum(1) / present.sum(1))


class Matcher(nn.Module):
    """A model that embeds images and sentences in one space, with open_clip's names.

    These are `encode_image`, `encode_text` and `visual`; the tokenizer is `tokenizer`.
    """

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual
        self.text = SentenceTower()
        self.tokenizer = Tokenizer()
        self.context_length = Tokenizer.length
        self.logit_scale = nn.Parameter(torch.tensor(2.5))  # the logarithm of the scale
        self.logit_bias = nn.Parameter(torch.tensor(-6.0))

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        embeddings = self.visual(image)
        return F.normalize(embeddings, dim=-1) if normalize else embeddings

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        embeddings = self.text(text)
        return F.normalize(embeddings, dim=-1) if normalize else embeddings

    def forward(self, image: Tensor, text: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.encode_image(image, True), None if text is None else self.encode_text(text, True)


MODELS = {
    "detector": make_detector,
    "segmenter": UNet,
    "convolutional": lambda: Matcher(ConvolutionalTower()),
    "transformer": lambda: Matcher(TransformerTower()),
    "swin": SwinClassifier,
    "vgg11": NarrowVGG11,
}


def load(name: str) -> nn.Module:
    """Return one of the `MODELS` with its trained weights, for inference."""
    model = MODELS[name]()
    state = {
        key: value.float() if value.is_floating_point() else value
        for key, value in load_file(WEIGHTS / f"{name}.safetensors").items()
    }
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
