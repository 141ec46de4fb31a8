"""Check automatic choices: the default layer, the order of its tokens, and what is cached about a model."""

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamWarning, LayerError
from tests.helpers import FunctionModule

IMAGE_SIZE, PATCH, WIDTH = 64, 8, 32
CELLS = (IMAGE_SIZE // PATCH) ** 2


def make_block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=True)


class Tokens(nn.Module):
    """A transformer over patches and extra tokens. `arrange` joins them; the head reads what `read` returns."""

    def __init__(
        self, arrange: Callable[[Tensor, Tensor], Tensor], read: Callable[[Tensor], Tensor], extra_count: int = 1
    ) -> None:
        super().__init__()
        self.patches, self.others = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Parameter(torch.randn(1, extra_count, WIDTH))
        self.blocks, self.norm = nn.Sequential(make_block(), make_block()), nn.LayerNorm(WIDTH)
        self.head, self.arrange, self.read = nn.Linear(WIDTH, 5), arrange, read

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = self.arrange(patches, self.others.expand(len(images), -1, -1))
        return self.head(self.read(self.norm(self.blocks(tokens))))


def put_last(patches: Tensor, extra: Tensor) -> Tensor:
    return torch.cat([patches, extra], 1)


def put_in_the_middle(patches: Tensor, extra: Tensor) -> Tensor:
    half = patches.shape[1] // 2
    return torch.cat([patches[:, :half], extra, patches[:, half:]], 1)


def put_at_both_ends(patches: Tensor, extra: Tensor) -> Tensor:
    return torch.cat([extra[:, :1], patches, extra[:, 1:]], 1)


def count_columns_first(patches: Tensor, extra: Tensor) -> Tensor:
    side = IMAGE_SIZE // PATCH
    return torch.cat([extra, patches.unflatten(1, (side, side)).transpose(1, 2).flatten(1, 2)], 1)


ARRANGED: dict[str, tuple[Any, Callable[[Tensor], Tensor], int, list[int]]] = {
    "registers at the end": (put_last, lambda x: x.mean(1), 4, list(range(CELLS))),
    "class token at the end": (put_last, lambda x: x[:, -1], 1, list(range(CELLS))),
    "class token in the middle": (
        put_in_the_middle, lambda x: x[:, CELLS // 2], 1, [i for i in range(CELLS + 1) if i != CELLS // 2],
    ),
    "class token first, registers at the end": (put_at_both_ends, lambda x: x[:, 0], 5, list(range(1, CELLS + 1))),
    "columns first": (
        count_columns_first, lambda x: x.mean(1), 1,
        (1 + torch.arange(CELLS).unflatten(0, (IMAGE_SIZE // PATCH,) * 2).T.flatten()).tolist(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("arranged", ARRANGED)
def test_a_grid_from_the_user_does_not_fix_the_position_of_extra_tokens(arranged: str) -> None:
    arrange, read, extra_count, _ = ARRANGED[arranged]
    torch.manual_seed(0)
    model, images = Tokens(arrange, read, extra_count).eval(), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    inferred = gradcam.explain(copy.deepcopy(model), images, "blocks.0.norm1", target=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = gradcam.explain(model, images, "blocks.0.norm1", target=1, reshape=(IMAGE_SIZE // PATCH,) * 2)
    torch.testing.assert_close(explanation.maps, inferred.maps)


def record(model: nn.Module, layer: str, images: Tensor, target: int = 1) -> tuple[Tensor, Tensor]:
    """Return a layer's activations and their gradient by plain autograd. `layer` may name a run, such as `conv#1`."""
    name, _, run = layer.partition("#")
    outputs: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    score = model(images)[:, target].sum()
    handle.remove()
    activations = outputs[int(run or 0)]
    (gradient,) = torch.autograd.grad(score, activations)
    return activations.detach(), gradient


@pytest.mark.parametrize("kind", ARRANGED)
@pytest.mark.parametrize("layer", [None, "blocks.0"])
def test_each_cell_is_drawn_at_its_patch_wherever_other_tokens_lie(kind: str, layer: str | None) -> None:
    arrange, read, extra_count, cells = ARRANGED[kind]
    torch.manual_seed(0)
    model, images = Tokens(arrange, read, extra_count).eval(), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = gradcam.explain(model, images, layer, target=1, evidence="signed")
    assert explanation.layer != "patches"
    activations, gradient = record(model, explanation.layer, images)
    if activations.shape[1] == CELLS + extra_count:
        activations, gradient = activations[:, cells], gradient[:, cells]
    expected = torch.einsum("ntc,nc->nt", activations, gradient.mean(1)).unflatten(1, (IMAGE_SIZE // PATCH,) * 2)
    assert gradient.any()
    torch.testing.assert_close(explanation.maps[:, 0], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ARRANGED)
@pytest.mark.parametrize("method", ["rollout", "gradient-rollout", "legrad", "grad-eclip"])
def test_attention_is_followed_to_each_patch_wherever_other_tokens_lie(kind: str, method: str) -> None:
    arrange, read, extra_count, _ = ARRANGED[kind]
    torch.manual_seed(0)
    model, images = Tokens(arrange, read, extra_count).eval(), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    is_mean = kind in ("registers at the end", "columns first")
    usual = Tokens(
        lambda patches, tokens: torch.cat([tokens, patches], 1),
        lambda x: x.mean(1) if is_mean else x[:, 0],
        extra_count,
    )
    usual.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps = [gradcam.explain(item, images, method=method, target=1).maps for item in (model, usual.eval(), model)]
    assert maps[1].any()
    torch.testing.assert_close(maps[0], maps[1], rtol=1e-3, atol=1e-4 * float(maps[1].max()))
    torch.testing.assert_close(maps[2], maps[0])


def test_attention_whose_tokens_lie_in_no_usual_order_is_warned_of() -> None:
    torch.manual_seed(0)
    order = torch.randperm(CELLS)
    model = Tokens(lambda patches, tokens: torch.cat([tokens, patches[:, order]], 1), lambda x: x[:, 0]).eval()
    with pytest.warns(GradcamWarning, match="may be misplaced"):
        gradcam.explain(model, torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE), method="rollout", target=1)


class Resampler(nn.Module):
    """A model in which learned queries, as many as a coarse grid has cells, replace the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.queries = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Parameter(torch.randn(1, 16, WIDTH))
        self.block, self.read = make_block(), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm, self.last, self.head = nn.LayerNorm(WIDTH), make_block(), nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.block(self.patches(images).flatten(2).transpose(1, 2))
        queries = self.queries.expand(len(images), -1, -1)
        return self.head(self.last(self.norm(queries + self.read(queries, tokens, tokens)[0])).mean(1))


def test_learned_queries_are_no_grid() -> None:
    torch.manual_seed(0)
    explanation = gradcam.explain(Resampler().eval(), torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE), target=1)
    assert (explanation.layer, explanation.maps.shape[2:]) == ("block", (8, 8))


class Clips(nn.Module):
    """A video model that cuts 2 x 8 x 8 pixel patches without a convolution: 513 tokens fit several grids."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Linear(2 * PATCH**2 * 3, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks, self.head = nn.Sequential(make_block(), make_block()), nn.Linear(WIDTH, 5)

    def forward(self, clips: Tensor) -> Tensor:
        cut = clips.unfold(2, 2, 2).unfold(3, PATCH, PATCH).unfold(4, PATCH, PATCH)
        rows = self.patches(cut.permute(0, 2, 3, 4, 5, 6, 7, 1).flatten(1, 3).flatten(2))
        tokens = self.blocks(torch.cat([self.token.expand(len(clips), -1, -1), rows], 1))
        return self.head(tokens.mean(1))


def test_the_right_one_of_several_grids_is_determined_from_the_model() -> None:
    torch.manual_seed(0)
    model, clips = Clips().eval(), torch.randn(2, 3, 16, IMAGE_SIZE, IMAGE_SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = gradcam.explain(model, clips, target=1, evidence="signed")
    activations, gradient = (tensor[:, 1:] for tensor in record(model, explanation.layer, clips))
    expected = torch.einsum("ntc,nc->nt", activations, gradient.mean(1)).unflatten(1, (8, 8, 8))
    torch.testing.assert_close(explanation.maps[:, 0], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


class Frames(nn.Module):
    """A video model with a class token and one token for each of four frames, averaged over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.token = nn.Linear(3, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks, self.head = nn.Sequential(make_block(), make_block()), nn.Linear(WIDTH, 5)

    def forward(self, clips: Tensor) -> Tensor:
        rows = self.frames(clips.unflatten(2, (4, -1)).mean((3, 4, 5)).transpose(1, 2))
        return self.head(self.blocks(torch.cat([self.token.expand(len(clips), -1, -1), rows], 1)).mean(1))


def test_too_few_tokens_to_locate_are_no_grid() -> None:
    torch.manual_seed(0)
    with pytest.raises(LayerError, match="Name the layer to explain, with reshape="):
        gradcam.explain(Frames().eval(), torch.randn(2, 3, 8, IMAGE_SIZE, IMAGE_SIZE), target=1)


class PreNormAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.to_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.to_qkv(self.norm(x)).chunk(3, -1)
        return self.to_out((query @ key.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ value)


class PreNorm(nn.Module):
    """A ViT as in vit-pytorch: norms inside the attention modules, residual additions outside of any module."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attentions = nn.ModuleList(PreNormAttention() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(images), -1, -1), patches], 1)
        for attention in self.attentions:
            tokens = tokens + attention(tokens)
        return self.head(tokens[:, 0])


def test_the_norm_before_the_last_attention_comes_before_the_patch_embedding() -> None:
    torch.manual_seed(0)
    explanation = gradcam.explain(PreNorm().eval(), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE), target=1)
    assert explanation.layer == "attentions.3.norm"


def test_a_patch_embedding_before_all_attention_gives_a_warning() -> None:
    class Functional(PreNorm):
        def forward(self, images: Tensor) -> Tensor:
            tokens = self.patches(images).flatten(2).transpose(1, 2)
            # The attention module itself is never called, so no module outputs all tokens after the patches.
            for part in self.attentions:
                query, key, value = nn.functional.linear(tokens, part.to_qkv.weight).chunk(3, -1)
                tokens = tokens + (query @ key.transpose(1, 2)).softmax(-1) @ value @ part.to_out.weight.T
            return self.head(tokens.mean(1))

    torch.manual_seed(0)
    with pytest.warns(GradcamWarning, match="'patches' comes before all attention"):
        gradcam.explain(Functional().eval(), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE), target=1)


class FlipAveraged(nn.Module):
    def __init__(self, flip: Callable[[Tensor], Tensor], *, is_last: bool) -> None:
        super().__init__()
        self.net, self.flip, self.is_last = torchvision.models.resnet18(weights=None, num_classes=5), flip, is_last

    def forward(self, images: Tensor) -> Tensor:
        views = [images, self.flip(images)] if self.is_last else [self.flip(images), images]
        return sum(self.net(view) for view in views)


@pytest.mark.parametrize("flip", [lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.filterwarnings("ignore:The default layer")
def test_the_run_whose_cells_respond_at_their_place_is_explained(flip: Any, *, is_last: bool) -> None:
    torch.manual_seed(0)
    model, images = FlipAveraged(flip, is_last=is_last).eval(), torch.zeros(1, 3, 160, 160)
    images[:, :, 20:60, 100:140] = 3 * torch.randn(1, 3, 40, 40)
    explanation = gradcam.explain(model, images, target=1, method="layercam")
    if flip(torch.arange(4.0).reshape(2, 2))[0, 0] > 0:  # a transposed image can still be mapped upright
        assert explanation.layer == ("net.layer4#0" if is_last else "net.layer4#1")
    heatmap = explanation.heatmaps[0, 0]
    assert heatmap[:80, 80:].sum() > 0.4 * heatmap.sum()


def test_runs_of_mirrored_images_are_not_recommended_for_fusing() -> None:
    model = FlipAveraged(lambda x: x.flip(-1), is_last=False).eval()
    with pytest.warns(GradcamWarning, match="is one run of a module") as caught:
        gradcam.explain(model, torch.randn(1, 3, 160, 160), target=1)
    assert "only if no run sees a mirrored" in str(caught[0].message)


def make_turned(turn: Callable[[Tensor], Tensor]) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())
    return FunctionModule(
        lambda module, images: module.head(module.net(turn(images)).mean((2, 3))), net=net, head=nn.Linear(8, 5)
    ).eval()


def test_a_network_that_sees_the_image_transposed_is_drawn_upright() -> None:
    torch.manual_seed(0)
    model, images = make_turned(lambda images: images.mT), torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)
    explanation = gradcam.explain(model, images, target=1, method="hirescam", evidence="signed")
    activations, gradient = record(model, explanation.layer, images)
    torch.testing.assert_close(explanation.maps[:, 0], (activations * gradient).sum(1).mT, rtol=1e-4, atol=1e-7)
    options = {"method": "hirescam", "evidence": "signed", "reshape": lambda x: x.mT}
    for _ in range(2):
        torch.testing.assert_close(gradcam.explain(model, images, "net", target=1, **options).maps, explanation.maps)
    classifier = gradcam.load_classifier(model, size=IMAGE_SIZE, mean=(0.0,) * 3, std=(1.0,) * 3)
    cell_explanation = classifier.explain(np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 128, np.uint8), target=1)
    assert cell_explanation.layout == "picked"


def test_a_network_that_rotates_the_image_gives_a_warning() -> None:
    torch.manual_seed(0)
    model, images = make_turned(lambda images: images.rot90(1, (2, 3))), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    for _ in range(2):
        with pytest.warns(GradcamWarning, match="may be misplaced: .* the layer did not respond on this side"):
            gradcam.explain(model, images, target=1)


@pytest.mark.parametrize(
    ("change", "is_misplaced"),
    [
        (lambda images: images[..., 16:48, 16:48], True),
        (lambda images: nn.functional.pad(images, (0, 64, 0, 64)), True),
        (lambda images: nn.functional.interpolate(images, (96, 96)), False),
        (lambda images: images[..., 2:62, 2:62], False),
    ],
    ids=["crop", "pad", "resize", "small crop"],
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_network_that_crops_or_pads_the_image_gives_a_warning(
    change: Callable[[Tensor], Tensor], is_misplaced: bool, count: int
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, 2, 1), nn.ReLU()) for i in range(3)))
    model = FunctionModule(
        lambda module, images: module.head(module.net(change(images)).mean((2, 3))), net=net, head=nn.Linear(8, 5)
    ).eval()
    images = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gradcam.explain(model, images, target=1)
        assert len(caught) == is_misplaced
        assert all("the corners of the image were changed one by one" in str(item.message) for item in caught)


def test_a_layer_whose_number_of_tokens_depends_on_the_image_is_not_the_default() -> None:
    def forward(module: Any, images: Tensor) -> Tensor:
        """Remove tokens, as an adaptive token sampler does: how many remain depends on the image."""
        tokens = module.first(module.patches(images).flatten(2).transpose(1, 2))
        count = CELLS if torch.equal(images[0], reference[0]) else 16
        return module.head(module.last(tokens[:, :count]).relu().mean(1))

    torch.manual_seed(0)
    reference = torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    patches, norms = nn.Conv2d(3, 8, PATCH, PATCH), (nn.LayerNorm(8), nn.LayerNorm(8))
    model = FunctionModule(forward, patches=patches, first=norms[0], last=norms[1], head=nn.Linear(8, 5)).eval()
    assert gradcam.explain(model, reference, target=1).layer == "first"
    with pytest.warns(GradcamWarning, match="the number of the layer's cells depends on the content of the image"):
        gradcam.explain(model, reference, "last", target=1)


def test_a_layer_that_does_not_depend_on_the_image_is_never_explained() -> None:
    def forward(module: Any, images: Tensor) -> Tensor:
        """Embed the image by a function, and only the positions by a module."""
        tokens = nn.functional.conv2d(images, weight, stride=PATCH).flatten(2).transpose(1, 2)
        return module.head((tokens * module.positions(torch.arange(CELLS)[None])).relu().mean(1))

    torch.manual_seed(0)
    weight = torch.randn(8, 3, PATCH, PATCH)
    model = FunctionModule(forward, positions=nn.Embedding(CELLS, 8), head=nn.Linear(8, 5)).eval()
    with pytest.raises(LayerError, match="'positions'.*does not depend on the image"):
        gradcam.explain(model, torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE), target=1)


class Gated(nn.Module):
    """A model with a gate at zero; once the gate opens, the images of a batch depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU()), nn.Linear(8, 5)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        means = self.features(images).mean((2, 3))
        return self.head(means + self.gate * ((means @ means.T).softmax(-1) @ means))


def open_gate(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()} | {"gate": torch.full((1,), 2.0)}


def swap_averages(model: nn.Module) -> None:
    values = open_gate(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


WRITES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(open_gate(model)),
    "load_state_dict, assign": lambda model: model.load_state_dict(open_gate(model), assign=True),
    "data copied": lambda model: model.gate.data.copy_(torch.full((1,), 2.0)),
    "data swapped": lambda model: setattr(model.gate, "data", torch.full((1,), 2.0)),
    "NumPy": lambda model: model.gate.detach().numpy().fill(2.0),
    "moving averages": swap_averages,
    "another parameter": lambda model: setattr(model, "gate", nn.Parameter(torch.full((1,), 2.0))),
}


@pytest.mark.parametrize("write", WRITES)
def test_new_weights_are_explained_like_a_new_model(write: str) -> None:
    torch.manual_seed(0)
    model, images = Gated().eval(), torch.randn(4, 3, 32, 32)
    for _ in range(2):
        gradcam.explain(model, images, target=1, method="hirescam")
    WRITES[write](model)
    new = Gated().eval()
    new.load_state_dict(open_gate(model))
    with pytest.warns(GradcamWarning, match="depend on one another"):
        expected = gradcam.explain(new, images, target=1, method="hirescam").maps
    with pytest.warns(GradcamWarning, match="depend on one another"):
        torch.testing.assert_close(gradcam.explain(model, images, target=1, method="hirescam").maps, expected)


class Mixing(nn.Module):
    """A model in which one image of a pair gets part of the other's activations, before or after the layer."""

    def __init__(self, pair: tuple[int, int], *, in_front: bool) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv2d(3, 6, 3, 2), nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU())
        self.head, self.pair, self.in_front = nn.Linear(6, 5), pair, in_front

    def mix(self, x: Tensor) -> Tensor:
        if len(x) <= max(self.pair):
            return x
        rows = list(x)
        rows[self.pair[0]] = rows[self.pair[0]] + rows[self.pair[1]] * rows[self.pair[0]].mean()
        return torch.stack(rows)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.layer(self.mix(x) if self.in_front else x)
        return self.head((x if self.in_front else self.mix(x)).mean((2, 3)))


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("pair", [(2, 3), (0, 1), (5, 0)])
@pytest.mark.parametrize("target", [1, [[1, 2]] * 6])
def test_a_dependent_pair_anywhere_in_the_batch_is_seen(pair: tuple[int, int], target: Any, *, in_front: bool) -> None:
    torch.manual_seed(0)
    model, images = Mixing(pair, in_front=in_front).eval(), torch.randn(6, 3, 16, 16)
    for _ in range(2):
        with pytest.warns(GradcamWarning, match="depend on one another"):
            gradcam.explain(model, images, "layer", target=target, method="hirescam")


def test_a_gate_that_the_images_open_is_seen() -> None:
    class InputGated(Gated):
        def forward(self, images: Tensor) -> Tensor:
            means = self.features(images).mean((2, 3))
            gate = images.mean().relu()
            return self.head(means + gate * ((means @ means.T).softmax(-1) @ means))

    torch.manual_seed(0)
    model, images = InputGated().eval(), torch.rand(4, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradcam.explain(model, -images, "features", target=1)
    with pytest.warns(GradcamWarning, match="depend on one another"):
        gradcam.explain(model, images, "features", target=1)


class Skip(nn.Module):
    """A model that always adds a bypass: the stem's output where `decide` says so, otherwise zeros."""

    def __init__(self, decide: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.stage, self.head = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()), nn.Linear(8, 5)
        self.decide, self.is_open = decide, False

    def forward(self, images: Tensor) -> Tensor:
        low = self.stem(images)
        joined = low if self.decide(self, images) else torch.zeros_like(low)
        return self.head((self.stage(low) + joined).mean((2, 3)))


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "scorecam"])
def test_a_bypass_that_the_images_open_is_seen(method: str) -> None:
    torch.manual_seed(0)
    model = Skip(lambda self, images: bool(images.mean() > 0)).eval()
    dark, bright = -torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16)
    layers = [gradcam.explain(model, images, target=1, method=method).layer for images in (dark, bright, dark, bright)]
    assert layers == ["stage", "stem", "stage", "stem"]


def test_the_first_image_does_not_decide_for_the_batch() -> None:
    torch.manual_seed(0)
    model = Skip(lambda self, images: bool(images[-1].mean() > 0)).eval()
    images = torch.cat([-torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)])
    assert gradcam.explain(model, images, target=1).layer == "stem"


SWITCHES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda model: model.is_open, lambda model: setattr(model, "is_open", True)),
    "configuration": (lambda model: model.config["open"][0], lambda model: model.config["open"].__setitem__(0, True)),
    "tensor": (lambda model: bool(model.switch[0] > 0), lambda model: model.switch.add_(1)),
    "array": (lambda model: bool(model.array[0] > 0), lambda model: model.array.__setitem__(0, 1)),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_settings_of_any_kind_are_part_of_a_models_state(switch: str) -> None:
    read, change = SWITCHES[switch]
    torch.manual_seed(0)
    model: Any = Skip(lambda self, images: read(self)).eval()
    model.config, model.switch, model.array = {"open": [False]}, torch.zeros(1), np.zeros(1)
    images = torch.rand(1, 3, 16, 16)
    assert gradcam.explain(model, images, target=1).layer == "stage"
    change(model)
    assert gradcam.explain(model, images, target=1).layer == "stem"


class Layouts(nn.Module):
    """A layer with 16 channels, 16 rows and 16 columns, whose channels are first or last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 16, 2, 2), nn.Hardtanh(), nn.Linear(16, 5)
        self.channels_last = False

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        x = self.act(x.permute(0, 2, 3, 1) if self.channels_last else x)
        return self.head((x * x.sigmoid()).mean((1, 2) if self.channels_last else (2, 3)))


def test_a_channel_axis_that_depends_on_the_images_is_followed() -> None:
    class Moving(Layouts):
        def forward(self, images: Tensor) -> Tensor:
            self.__dict__["channels_last"] = bool(images.mean() > 0)
            return super().forward(images)

    torch.manual_seed(0)
    model, images = Moving().eval(), torch.rand(2, 3, 32, 32)
    for batch in (images, -images, images):
        reshape = "channels last" if batch.mean() > 0 else "channels first"
        last = gradcam.explain(model, batch, "act", target=1, reshape=reshape)
        torch.testing.assert_close(gradcam.explain(model, batch, "act", target=1).maps, last.maps)


def test_facts_of_zero_weights_are_dropped() -> None:
    torch.manual_seed(0)
    arrange, read, extra_count, _ = ARRANGED["registers at the end"]
    model, images = Tokens(arrange, read, extra_count).eval(), torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    trained = copy.deepcopy(model.state_dict())
    expected = gradcam.explain(Tokens(arrange, read, extra_count).eval(), images, target=1)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in trained.items()})
    with pytest.raises(gradcam.GradcamError):
        gradcam.explain(model, images, target=1)
    model.load_state_dict(trained)
    explanation = gradcam.explain(model, images, target=1)
    assert explanation.layer == expected.layer
    assert explanation.maps.any()


def test_weights_created_in_inference_mode_are_an_error() -> None:
    torch.manual_seed(0)
    model, images = Gated().eval(), torch.randn(4, 3, 32, 32)
    gradcam.explain(model, images, "features", target=1)
    with torch.inference_mode():
        model.gate = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)
    for _ in range(2):
        with pytest.raises(gradcam.GradcamError, match="inference_mode"):  # autograd cannot use such a parameter
            gradcam.explain(model, images, "features", target=1)


def test_weights_whose_memory_is_freed_are_not_read() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    model.unused = nn.Linear(64, 64)
    # Its data does not start at the beginning of its storage.
    model.unused.weight = nn.Parameter(torch.zeros(65, 64)[1:])
    model.forward = lambda images: model[3](model[2](model[1](model[0](images))))  # type: ignore[method-assign]
    model.unused.weight.untyped_storage().resize_(0)
    expected = gradcam.explain(model, torch.ones(1, 3, 16, 16), "0", target=1).heatmaps
    for _ in range(2):
        assert torch.equal(gradcam.explain(model, torch.ones(1, 3, 16, 16), target=1).heatmaps, expected)


def test_random_states_of_python_and_numpy_are_left_alone() -> None:
    class Draws(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            # Draws from the global generators.
            shift = random.gauss(0, 1) + np.random.rand() + np.random.randn() + torch.rand(1)
            return super().forward(images + shift)

    model = Draws(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    for _ in range(2):
        random.seed(1), random.gauss(0, 1), np.random.seed(1), np.random.randn(1), torch.manual_seed(1)
        expected = random.gauss(0, 1), np.random.randn(2).tolist(), torch.rand(2).tolist()
        random.seed(1), random.gauss(0, 1), np.random.seed(1), np.random.randn(1), torch.manual_seed(1)
        gradcam.explain(model, torch.ones(1, 3, 16, 16), "0", target=1)
        assert (random.gauss(0, 1), np.random.randn(2).tolist(), torch.rand(2).tolist()) == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.gauss(0, 1),
        lambda: [random.getrandbits(32) for _ in range(624)],  # The generator's position is the same as before.
        lambda: random.seed(2),
        lambda: np.random.bytes(4 * 624),
        lambda: np.random.randn(),
        lambda: np.random.seed(2),
    ],
)
@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_every_use_of_a_global_generator_is_undone(draw: Callable[[], Any], bits: type) -> None:
    class Draws(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            with contextlib.suppress(TypeError):  # NumPy seeds only an MT19937.
                draw()
            return super().forward(images)

    model = Draws(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(bits(1))
    try:
        for _ in range(2):
            before = random.getstate(), repr(np.random.get_state(legacy=False))
            gradcam.explain(model, torch.ones(1, 3, 16, 16), "0", target=1)
            assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before
            random.random(), np.random.rand()
    finally:
        np.random.set_bit_generator(original)


def test_vilt_whose_token_types_are_embedded_twice_is_explained() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViltConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=64, patch_size=16,
        vocab_size=100, num_labels=5, max_image_length=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.ViltForQuestionAnswering(config).eval(), torch.tensor([[1, 5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    inputs |= {"pixel_values": torch.randn(1, 3, 64, 96), "pixel_mask": torch.ones(1, 64, 96, dtype=torch.long)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert gradcam.explain(model, inputs, target=1).maps.shape[2:] == (4, 6)


def test_a_model_that_stores_its_last_output_is_still_cached() -> None:
    class Stores(Gated):
        def forward(self, images: Tensor) -> Tensor:
            passes.append(len(images))
            scores = super().forward(images)
            self.last = scores.detach()
            return scores

    torch.manual_seed(0)
    passes: list[int] = []
    model, images = Stores().eval(), torch.randn(3, 3, 16, 16)
    for layer, expected in ((None, [3]), ("features", [3])):
        for _ in range(2):
            gradcam.explain(model, images, layer, target=1)
        passes.clear()
        gradcam.explain(model, images, layer, target=1)
        assert passes == expected
