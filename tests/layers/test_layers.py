from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from gradcam.errors import LayerError, nearest
from gradcam.hooks.nested import to_batch
from gradcam.layers.find import find_layer, layers_with_grid, unwrap


def test_a_layer_by_name_and_as_a_module() -> None:
    model = torchvision.models.resnet18(weights=None)
    assert find_layer(model, "layer3.1.conv2")[:2] == ("layer3.1.conv2", model.layer3[1].conv2)
    assert find_layer(model, model.layer3[1].conv2)[:2] == ("layer3.1.conv2", model.layer3[1].conv2)


def test_a_model_without_modules_has_nothing_to_offer() -> None:
    with pytest.raises(LayerError, match=r"no layer 'x' in Identity. It has no submodules\.$"):
        find_layer(nn.Identity(), "x")


@pytest.mark.parametrize(
    ("name", "offer"), [("layer_4", "layer4"), ("layer4.1.conv3", "layer4.1.conv2"), ("zzz", "layer1")]
)
def test_an_unknown_name_offers_the_nearest(name: str, offer: str) -> None:
    with pytest.raises(LayerError, match=f"'{offer}'"):
        find_layer(torchvision.models.resnet18(weights=None), name)


def test_wrappers_are_taken_off() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    assert unwrap(nn.DataParallel(torch.compile(nn.DataParallel(inner), backend="eager"))) is inner


def test_the_last_to_finish_comes_first_and_a_block_before_its_parts() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    names = layers_with_grid(model, to_batch(torch.zeros(1, 3, 64, 64)))
    assert names[:3] == ["layer4", "layer4.1", "layer4.1.bn2"]
    assert "layer4.1.relu" not in names  # runs twice
    assert "avgpool" not in names
    last = names.index("conv1")
    assert names[last + 1 :][:2] == ["layer4.1.relu#1", "layer4.0.relu#1"]  # the last runs of others
    assert all("#" in name for name in names[last + 1 :])


def test_nearest_prefers_the_word_itself_then_what_looks_alike_then_what_contains_it() -> None:
    known = ["tabby", "tiger cat", "Egyptian cat", "catamaran", "espresso"]
    assert nearest("tigr cat", known)[0] == "tiger cat"
    assert nearest("cat", known) == ["tiger cat", "Egyptian cat", "catamaran"]
    assert nearest("qqqq", known) == []


def names_of(model: nn.Module, images: torch.Tensor) -> list[str]:
    return layers_with_grid(model.eval(), to_batch(images))


def test_what_gives_its_input_back_is_passed_over_and_what_works_in_place_is_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Dropout(), nn.Identity(), nn.Sequential())
    assert names_of(model, torch.zeros(2, 3, 8, 8)) == ["1", "0"]


def test_auxiliary_heads_and_adaptive_pooling_are_passed_over() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(2)
            self.aux_head, self.auxiliary = nn.Conv2d(4, 5, 1), nn.Sequential(nn.Conv2d(4, 5, 1))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.body(images)
            return self.pool(x).mean((2, 3)), self.aux_head(x).mean((2, 3)), self.auxiliary(x).mean((2, 3))

    assert names_of(Heads(), torch.zeros(2, 3, 8, 8)) == ["body"]


def test_what_gives_several_tensors_comes_last() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 1)

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(images), self.other(images)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return sum(x.mean((2, 3)) for x in self.pair(images))

    assert names_of(Model(), torch.zeros(2, 3, 8, 8)) == ["pair.other", "pair.one", "pair"]


def test_a_decoders_queries_are_no_places_and_its_maps_are() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 4, stride=4)
            self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
            self.query = nn.Parameter(torch.randn(1, 16, 8))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.stem(images).flatten(2).mT
            return self.transformer(x, self.query.expand(len(x), -1, -1))

    names = names_of(Detector(), torch.randn(2, 3, 16, 16))  # 16 queries, and 4 x 4 patches
    assert names[0] == "transformer"
    assert names[1] == "transformer.encoder"
    assert not [name for name in names if name.startswith("transformer.decoder")]

    class MapDecoder(nn.Sequential):
        pass

    assert names_of(nn.Sequential(MapDecoder(nn.Conv2d(3, 4, 3))), torch.zeros(2, 3, 8, 8))[0] == "0"


def test_a_block_with_attention_in_its_name_is_looked_into_and_attention_is_not() -> None:
    class ClassAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.qkv(x).mean(1)

    class ClassAttentionBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(8), ClassAttention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(self.norm(x))

    class Patches(nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images).flatten(2).mT

    names = names_of(nn.Sequential(Patches(3, 8, 4, 4), ClassAttentionBlock()), torch.randn(2, 3, 16, 16))
    assert names == ["1.norm"]
