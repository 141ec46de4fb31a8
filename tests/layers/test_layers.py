from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from gradcam.errors import LayerError, find_similar_names
from gradcam.hooks.containers import to_batch
from gradcam.layers.find import find_layer, unwrap
from gradcam.layers.grids import list_layers_with_grid
from tests.helpers import FunctionModule


def test_a_layer_is_found_by_name_and_as_a_module() -> None:
    model = torchvision.models.resnet18(weights=None)
    assert find_layer(model, "layer3.1.conv2")[:2] == ("layer3.1.conv2", model.layer3[1].conv2)
    assert find_layer(model, model.layer3[1].conv2)[:2] == ("layer3.1.conv2", model.layer3[1].conv2)


def test_a_model_without_modules_has_nothing_to_offer() -> None:
    with pytest.raises(LayerError, match=r"no layer 'x' in Identity. The model has no submodules\.$"):
        find_layer(nn.Identity(), "x")


@pytest.mark.parametrize(
    ("name", "offer"), [("layer_4", "layer4"), ("layer4.1.conv3", "layer4.1.conv2"), ("zzz", "layer1")]
)
def test_an_unknown_name_offers_the_nearest(name: str, offer: str) -> None:
    with pytest.raises(LayerError, match=f"'{offer}'"):
        find_layer(torchvision.models.resnet18(weights=None), name)


def test_wrappers_are_removed() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    assert unwrap(nn.DataParallel(torch.compile(nn.DataParallel(inner), backend="eager"))) is inner


def test_a_named_layer_that_is_compiled_is_found_without_its_wrapper() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(nn.ReLU(), torch.compile(inner, backend="eager"))
    for name in ("1", "1._orig_mod"):
        assert find_layer(model, name).module is inner


def test_layers_are_listed_from_last_to_first_and_blocks_before_their_parts() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    names = list_layers_with_grid(model, to_batch(torch.zeros(1, 3, 64, 64)))
    assert names[:3] == ["layer4", "layer4.1", "layer4.1.bn2"]
    assert "layer4.1.relu" not in names  # It runs twice, so each call has its own entry.
    assert "avgpool" not in names
    last = names.index("conv1")
    # The later calls of modules that run more than once come last.
    assert names[last + 1 :][:2] == ["layer4.1.relu#1", "layer4.0.relu#1"]
    assert all("#" in name for name in names[last + 1 :])


def test_nearest_prefers_a_whole_word_then_similar_spelling_then_a_part() -> None:
    labels = ["tabby", "tiger cat", "Egyptian cat", "catamaran", "espresso"]
    assert find_similar_names("tigr cat", labels)[0] == "tiger cat"
    assert find_similar_names("cat", labels) == ["tiger cat", "Egyptian cat", "catamaran"]
    assert find_similar_names("qqqq", labels) == []


def names_of(model: nn.Module, images: torch.Tensor) -> list[str]:
    return list_layers_with_grid(model.eval(), to_batch(images))


def test_identities_are_skipped_and_in_place_modules_are_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Dropout(), nn.Identity(), nn.Sequential())
    assert names_of(model, torch.zeros(2, 3, 8, 8)) == ["1", "0"]


def test_auxiliary_heads_and_adaptive_pooling_are_skipped() -> None:
    def forward(module: Any, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = module.body(images)
        return module.pool(x).mean((2, 3)), module.aux_head(x).mean((2, 3)), module.auxiliary(x).mean((2, 3))

    heads = {"aux_head": nn.Conv2d(4, 5, 1), "auxiliary": nn.Sequential(nn.Conv2d(4, 5, 1))}
    model = FunctionModule(forward, body=nn.Conv2d(3, 4, 3), pool=nn.AdaptiveMaxPool2d(2), **heads)
    assert names_of(model, torch.zeros(2, 3, 8, 8)) == ["body"]


def test_modules_with_several_outputs_come_last() -> None:
    parts = {"one": nn.Conv2d(3, 4, 3), "other": nn.Conv2d(3, 4, 1)}
    pair = FunctionModule(lambda module, images: (module.one(images), module.other(images)), **parts)
    model = FunctionModule(lambda module, images: sum(x.mean((2, 3)) for x in module.pair(images)), pair=pair)
    assert names_of(model, torch.zeros(2, 3, 8, 8)) == ["pair.other", "pair.one", "pair"]


def test_decoder_queries_are_no_grid() -> None:
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


def test_blocks_named_attention_are_searched_and_attention_modules_are_not() -> None:
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
