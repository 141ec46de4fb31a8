"""Check that cells are drawn at their place in the image, for models that reorder tokens and for altered orders."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

import gradcam
from gradcam.cam.listing import list_layers
from gradcam.errors import GradcamWarning, LayerError
from gradcam.evaluation.checks.check import check
from gradcam.hooks import model_facts
from tests.helpers import assert_same, traces

WRONG = "may be misplaced: 6 places of .* the layer responded at [0-3] of them, expected at least 4"


def hiera() -> nn.Module:
    """Return a Hiera whose tokens are in its own order until the last stages; at 160 pixels these have 5 x 5 cells."""
    torch.manual_seed(0)
    model = timm.create_model("hiera_tiny_224", img_size=160, num_classes=5).eval()
    nn.init.normal_(model.head.fc.weight)
    return model


def unit_order(model: Any) -> Tensor:
    """Return the image token that each of the model's tokens comes from, according to the model's own module."""
    return model.unroll(torch.arange(1600.0)[None, :, None])[0, :, 0].long()


def test_reordered_units_give_a_warning_and_a_reshape_function_corrects_them() -> None:
    model, images = hiera(), torch.randn(2, 3, 160, 160)
    with pytest.warns(GradcamWarning, match=f"layer 'blocks.0.norm1' {WRONG}") as messages:
        wrong = gradcam.explain(model, images, "blocks.0.norm1", target=1)
    assert messages[0].filename == __file__
    assert len(str(messages[0].message)) < 250
    order = unit_order(model)

    def reshape(x: Tensor) -> Tensor:
        return x[:, order.argsort()].unflatten(1, (40, 40)).movedim(-1, 1)

    right = gradcam.explain(model, images, "blocks.0.norm1", target=1, reshape=reshape)
    assert wrong.maps.shape == right.maps.shape == (2, 1, 40, 40)
    shuffled = torch.empty_like(right.maps).flatten(2)
    shuffled[..., order] = wrong.maps.flatten(2)
    torch.testing.assert_close(shuffled.unflatten(2, (40, 40)), right.maps)
    assert not torch.allclose(wrong.maps, right.maps, atol=float(right.maps.max()) / 2)


def test_the_list_marks_only_layers_with_misplaced_cells() -> None:
    rows = [row for row in list_layers(hiera(), 160) if row.guessed]
    outside = {row.name for row in rows if row.is_out_of_place}
    first_stages = {f"blocks.{block}" for block in range(10)}
    within = {row.name for row in rows if row.name.startswith(("blocks.11", "patch_embed")) or row.name == "blocks.10"}
    assert first_stages <= outside
    assert within
    assert not within & outside
    assert {row.places for row in rows if row.name in within} <= {5, 6}
    assert max(row.places or 0 for row in rows if row.name in first_stages) <= 3


def test_unfolded_patches_are_no_map_of_places() -> None:
    torch.manual_seed(0)
    model, images = timm.create_model("mobilevitv2_050", num_classes=5).eval(), torch.randn(1, 3, 192, 192)
    for layer, grid in (("stages.2.1.transformer", (4, 144)), ("stages.3.1.transformer.0", (4, 36))):
        with pytest.warns(GradcamWarning, match=f"layer '{layer}' {WRONG}"):
            assert gradcam.explain(model, images, layer, target=1).maps.shape[2:] == grid
    assert gradcam.explain(model, images, "stages.3.1", target=1).maps.shape[2:] == (12, 12)


class ReorderTokens(nn.Module):
    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, tokens: Tensor) -> Tensor:
        return self.turn(tokens)


class Tokens(nn.Module):
    """A transformer over 36 patches and prefix tokens; a module before the last norm may reorder the tokens."""

    def __init__(self, turn: Callable[[Tensor], Tensor] = torch.clone, prefix: int = 1) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, prefix, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.turned, self.norm, self.head = ReorderTokens(turn), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = self.block(torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1))
        return self.head(self.norm(self.turned(tokens)).mean(1))


def on_grid(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def turn(tokens: Tensor) -> Tensor:
        grid = tokens[:, 1:].unflatten(1, (6, 6))
        return torch.cat([tokens[:, :1], change(grid).flatten(1, 2)], 1)

    return turn


SHUFFLED = torch.randperm(36, generator=torch.Generator().manual_seed(1))
CHANGES = {
    "mirrored": lambda grid: grid.flip(2),
    "upside down": lambda grid: grid.flip(1),
    "shifted": lambda grid: grid.roll((3, 3), (1, 2)),
    "windows": lambda grid: grid.unflatten(2, (2, 3)).unflatten(1, (2, 3)).transpose(2, 3).reshape(grid.shape),
    "shuffled": lambda grid: grid.flatten(1, 2)[:, SHUFFLED].unflatten(1, (6, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unusual_token_orders_give_a_warning(change: str) -> None:
    model, images = Tokens(on_grid(CHANGES[change])).eval(), torch.randn(2, 3, 48, 48)
    with pytest.warns(GradcamWarning, match=f"layer 'norm' {WRONG}"):
        gradcam.compare(model, images, layers=["block", "norm"], methods=["gradcam"], target=1)
    gradcam.explain(model, images, "block", target=1)  # before the reordering, there is no warning


# By name: the function that reorders the tokens, and the number of tokens outside the grid.
USUAL_ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "transposed": (on_grid(lambda grid: grid.transpose(1, 2)), 1),
    "class token last": (lambda tokens: torch.cat([tokens[:, 1:], tokens[:, :1]], 1), 1),
    "class token in the middle": (lambda tokens: torch.cat([tokens[:, 1:19], tokens[:, :1], tokens[:, 19:]], 1), 1),
    "registers last": (lambda tokens: torch.cat([tokens[:, :1], tokens[:, 5:], tokens[:, 1:5]], 1), 5),
}


@pytest.mark.parametrize("order", USUAL_ORDERS)
def test_usual_orders_are_corrected_without_a_warning(order: str) -> None:
    turn, prefix = USUAL_ORDERS[order]
    model, images = Tokens(turn, prefix).eval(), torch.randn(2, 3, 48, 48)
    expected = gradcam.explain(model, images, "block", target=[[0, 1, 2]] * 2)
    assert expected.maps.flatten(2).amax(2).min() > 0
    for _ in range(2):  # first measured, then cached
        corrected = gradcam.explain(model, images, "turned", target=[[0, 1, 2]] * 2)
        torch.testing.assert_close(corrected.maps, expected.maps)


def test_cells_that_all_change_alike_respond_to_no_place() -> None:
    where = torch.randn(1, 37, 16)  # the values are rounded to whole numbers, which add up exactly
    model = Tokens(lambda tokens: (64 * tokens.mean(1, keepdim=True)).round() + where.round()).eval().double()
    with pytest.warns(GradcamWarning, match="the layer responded at 0 of them"):
        gradcam.explain(model, torch.randn(1, 3, 48, 48).double(), "turned", method="eigencam", target=1)


def count_runs(module: nn.Module) -> list[int]:
    runs: list[int] = []
    module.register_forward_hook(lambda module, args, output: runs.append(len(args[0])))
    return runs


def test_passes_to_locate_cells_run_once_and_only_for_a_guess() -> None:
    model, images = Tokens().eval(), torch.randn(1, 3, 48, 48)
    runs = count_runs(model.patches)
    gradcam.explain(model, images, "norm", target=1)
    assert runs == [1] * 2  # the map's own pass, and one with changed images
    gradcam.explain(model, torch.randn(1, 3, 48, 48), "norm", target=1)
    assert runs == [1] * 3
    gradcam.explain(model, images.repeat(8, 1, 1, 1), "block", target=1)
    assert runs[3:] == [8] * 2 + [1] * 8  # plus one pass per image
    runs.clear()
    for passes in (2, 1):  # the layer has to be found, but its cells are already located
        gradcam.explain(model, images, target=1)
        assert runs == [1] * passes
        runs.clear()
    cnn = models.resnet18(num_classes=5).eval()
    runs = count_runs(cnn.conv1)
    for layer in ("layer4", "layer4.1.bn2", "layer3.0.bn1", "conv1"):
        gradcam.explain(cnn, torch.randn(1, 3, 64, 64), layer, target=1)
    assert runs == [1] * 4


def test_places_are_changed_one_by_one_if_changing_all_does_not_decide() -> None:
    model = Tokens(on_grid(CHANGES["mirrored"])).eval()
    runs = count_runs(model.patches)
    for passes in ((2 + 7, 2 + 2 * 7), (1,)):  # the assumed layout is measured, and possibly a better one
        with pytest.warns(GradcamWarning, match=WRONG):
            gradcam.explain(model, torch.randn(1, 3, 48, 48), "norm", target=1)
        assert len(runs) in passes
        runs.clear()


def test_cached_facts_disappear_with_the_model() -> None:
    gc.collect()
    before = len(model_facts._cached_states)
    model = Tokens().eval()
    gradcam.explain(model, torch.randn(1, 3, 48, 48), "norm", target=1)
    assert len(model_facts._cached_states) == before + 1
    del model
    gc.collect()
    assert len(model_facts._cached_states) == before


def test_the_model_the_images_and_the_random_state_are_unchanged() -> None:
    model, images = Tokens().train(), torch.randn(1, 3, 48, 48)
    before, original, state = traces(model), images.clone(), torch.get_rng_state()
    gradcam.explain(model, images, "norm", target=1)
    assert_same(before, traces(model))
    assert torch.equal(images, original)
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_that_can_run_only_once_is_explained() -> None:
    class Once(Tokens):
        runs = 0

        def forward(self, images: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 1:
                raise RuntimeError("once")
            return super().forward(images)

    model, images = Once(on_grid(CHANGES["mirrored"])).eval(), torch.randn(1, 3, 48, 48)
    plain = copy.deepcopy(model)
    explanation = gradcam.explain(model, images, "norm", target=1)
    assert model.runs == 2
    plain.__class__ = Tokens
    with pytest.warns(GradcamWarning, match=WRONG):
        torch.testing.assert_close(explanation.maps, gradcam.explain(plain, images, "norm", target=1).maps)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("not enough memory")])
@pytest.mark.parametrize("run", [2, 3, 4])
def test_running_out_of_memory_is_reported(error: Exception, run: int) -> None:
    class Large(Tokens):
        runs = 0

        def forward(self, images: Tensor) -> Tensor:
            self.runs += 1
            if self.runs >= run:
                raise error
            return super().forward(images)

    with pytest.raises(type(error), match="memory"):
        gradcam.explain(Large(on_grid(CHANGES["mirrored"])).eval(), torch.randn(1, 3, 48, 48), "norm", target=1)


def plain_attention_vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=96, num_classes=5).eval()
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def test_attention_matrices_are_not_maps_after_any_module() -> None:
    model, images, name = plain_attention_vit(), torch.randn(2, 3, 96, 96), "blocks.1.attn.attn_drop"
    with pytest.raises(
        LayerError, match=r"\(2, 3, 37, 37\) with rows that sum to 1. Such rows are attention weights"
    ) as caught:
        gradcam.explain(model, images, name, target=1)
    assert len(str(caught.value)) < 250
    for network in (model, plain_attention_vit().to("meta")):
        rows = {row.name: row for row in list_layers(network, 96)}
        assert rows[name].reason == "it returns attention weights"
        assert rows["blocks.1.norm1"].cam
    explanation = gradcam.explain(model, images[:1], "blocks.1.norm1", target=1)
    assert explanation.maps.shape[2:] == (6, 6)


def test_a_verdict_fails_where_the_cells_lie_elsewhere() -> None:
    image = torch.randint(0, 256, (48, 48, 3), dtype=torch.uint8).numpy()
    for change, doubts in (("mirrored", True), (None, False)):
        model = Tokens(on_grid(CHANGES[change]) if change else torch.clone).eval()
        classifier = gradcam.load_classifier(model, size=48, layer="norm")
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            verdict = check(classifier, image)
        assert bool(verdict.doubt) == doubts == any(item.category is GradcamWarning for item in messages)
        assert verdict.to_record()["doubt"] == verdict.doubt
        if doubts:
            assert verdict.outcome == "failed"
            assert verdict.summary.startswith("The heatmap at layer 'norm' may be misplaced: ")


class PassThrough(nn.Module):
    """A module that returns maps unchanged or with rows and columns swapped."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        self.is_turned = is_turned

    def forward(self, x: Tensor) -> Tensor:
        return x.mT if self.is_turned else x


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_module_that_returns_maps_of_a_convolution_is_no_guess(is_turned: bool) -> None:
    passes = []
    strided = (nn.Upsample(72), nn.Conv2d(3, 4, 3, 2, 1))  # the total stride, 64 / 36 pixels, is not whole
    model = nn.Sequential(*strided, PassThrough(is_turned), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.register_forward_hook(lambda *_: passes.append(1))
    rows = {row.name: row for row in list_layers(model.eval(), 64)}
    assert rows["2"].cam
    assert rows["2"].guessed == is_turned
    assert len(passes) == (8 if is_turned else 1)
