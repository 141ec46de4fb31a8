"""User-defined models, one for each task; most are one convolution that reports each colour where it appears."""

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

WORDS = ("red", "green", "blue")


class ColourMaps(nn.Module):
    """A model that returns maps of three colours, in cells of `stride` pixels."""

    def __init__(self, stride: int = 8) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 3, stride, stride, bias=False)
        self.head = nn.Conv2d(3, 3, 1, bias=False)
        with torch.no_grad():
            for layer in (self.cells, self.head):
                weights = 1.5 * torch.eye(3) - 0.5
                layer.weight.copy_(weights[:, :, None, None].expand_as(layer.weight) / layer.weight[0, 0].numel())

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.cells(images).relu())


class Classifier(ColourMaps):
    """A model that returns logits of three colours."""

    def forward(self, images: Tensor) -> Tensor:
        return 20 * super().forward(images).mean((2, 3))


class Segmenter(ColourMaps):
    """A model that returns the logits of each class at each pixel."""

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.interpolate(super().forward(images), images.shape[2:], mode="nearest")


class Backbone(nn.Module):
    """A backbone with one feature level, for a detector."""

    out_channels = 4

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, 8, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"0": self.convolution(images).relu()}


class Towers(nn.Module):
    """A CLIP-like model: images become their mean colours, and sentences become the colours that they name."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = ColourMaps()
        self.embedding = nn.Embedding.from_pretrained(torch.eye(3))

    def tokenizer(self, sentences: list[str]) -> Tensor:
        colours = [[WORDS.index(word) for word in text.split() if word in WORDS] for text in sentences]
        return torch.tensor([indices[:1] or [0] for indices in colours])

    def encode_image(self, images: Tensor) -> Tensor:
        return self.visual(images).mean((2, 3))

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode_image(images), self.encode_text(tokens)


def make_classification() -> nn.Module:
    return Classifier()


def make_segmentation() -> nn.Module:
    return Segmenter()


def make_keypoints() -> nn.Module:
    return ColourMaps(4)


def make_text() -> nn.Module:
    return Towers()


make_likeness = make_text


def make_detection() -> nn.Module:
    torch.manual_seed(3)
    anchors = AnchorGenerator(((24, 40),), ((1.0,),))
    sizes = {"min_size": 64, "max_size": 96}
    model = RetinaNet(Backbone(), 3, anchor_generator=anchors, score_thresh=0.0, detections_per_img=12, **sizes)
    nn.init.normal_(model.head.classification_head.cls_logits.weight, std=1.0)
    return model


def make_caption() -> nn.Module:
    from transformers import GitConfig, GitForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision = small | {"image_size": 64, "patch_size": 8}
    return GitForCausalLM(GitConfig(vision_config=vision, vocab_size=30, bos_token_id=1, eos_token_id=29, **small))
