from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from gradcam.errors import LayerError, nearest
from gradcam.layers import find_layer, layers_with_grid, norm_before_last_attention, unwrap


def test_a_layer_by_name_and_as_a_module() -> None:
    model = torchvision.models.resnet18(weights=None)
    assert find_layer(model, "layer3.1.conv2") == ("layer3.1.conv2", model.layer3[1].conv2)
    assert find_layer(model, model.layer3[1].conv2) == ("layer3.1.conv2", model.layer3[1].conv2)


def test_a_model_without_modules_has_nothing_to_offer() -> None:
    with pytest.raises(LayerError, match=r"no layer 'x' in Identity. There are no modules in it\.$"):
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
    names = layers_with_grid(model, (torch.zeros(1, 3, 64, 64),), {}, 1, (64, 64))
    assert names[:3] == ["layer4", "layer4.1", "layer4.1.bn2"]
    assert "layer4.1.relu" not in names  # runs twice
    assert "avgpool" not in names
    assert names[-1] == "conv1"


@pytest.mark.parametrize(
    ("library", "name", "expected"),
    [
        ("torchvision", "vit_b_16", "encoder.layers.encoder_layer_11.ln_1"),
        ("timm", "vit_tiny_patch16_224", "blocks.11.norm1"),
        ("torchvision", "resnet18", None),
    ],
)
def test_the_norm_before_the_last_attention(library: str, name: str, expected: str | None) -> None:
    import timm

    with torch.device("meta"):
        model = timm.create_model(name) if library == "timm" else torchvision.models.get_model(name, weights=None)
    assert norm_before_last_attention(model) == expected


def test_nearest_prefers_the_word_itself_then_what_looks_alike_then_what_contains_it() -> None:
    known = ["tabby", "tiger cat", "Egyptian cat", "catamaran", "espresso"]
    assert nearest("tigr cat", known)[0] == "tiger cat"
    assert nearest("cat", known) == ["tiger cat", "Egyptian cat", "catamaran"]
    assert nearest("qqqq", known) == []
