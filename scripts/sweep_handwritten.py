"""Handwritten models that break conventions on purpose, and right and wrong layouts of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sweep_cases import CLASSES, Case, make_noise
from torch import Tensor, nn
from torch.nn import functional as F

SIZE, PATCH, WIDTH = (32, 48), 4, 16
CELLS = (SIZE[0] // PATCH, SIZE[1] // PATCH)
COUNT = CELLS[0] * CELLS[1]


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        normal = self.norm1(tokens)
        tokens = tokens + self.attn(normal, normal, normal, need_weights=False)[0]
        return tokens + self.mlp(self.norm2(tokens))


class TokenNet(nn.Module):
    """A transformer on patches in any order, with extra tokens before, between or after them."""

    def __init__(
        self,
        order: Tensor | None = None,
        *,
        before: int = 0,
        between: int = 0,
        after: int = 0,
        reads: int | None = None,
        tokens_first: bool = False,
        size: tuple[int, int] = SIZE,
    ) -> None:
        super().__init__()
        count = (size[0] // PATCH) * (size[1] // PATCH)
        self.register_buffer("order", torch.arange(count) if order is None else order)
        self.extra = nn.ParameterList([torch.randn(1, length, WIDTH) for length in (before, between, after)])
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(1, count, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)
        self.reads, self.tokens_first = reads, tokens_first

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        patches = patches[:, self.order]
        half = patches.shape[1] // 2
        before, between, after = (extra.expand(len(images), -1, -1) for extra in self.extra)
        tokens = torch.cat([before, patches[:, :half], between, patches[:, half:], after], 1)
        tokens = self.norm(self.blocks(tokens))
        return self.head(tokens.mean(1) if self.reads is None else tokens[:, self.reads])


class TokensFirst(nn.Module):
    """A transformer with tokens as (T,N,D), the default of `nn.TransformerEncoder`."""

    def __init__(self, *, after: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.extra = nn.Parameter(torch.randn(after, 1, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).permute(2, 0, 1)
        tokens = torch.cat([tokens, self.extra.expand(-1, len(images), -1)])
        return self.head(self.encoder(tokens).mean(0))


class Latents(nn.Module):
    """Learned queries that read the patches, as in a Perceiver, a resampler or a Q-Former."""

    def __init__(self, count: int, *, sharpness: float = 4.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(1, COUNT, WIDTH))
        self.queries = nn.Parameter(torch.randn(1, count, WIDTH))
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.blocks, self.head = nn.LayerNorm(WIDTH), nn.Sequential(Block()), nn.Linear(WIDTH, CLASSES)
        self.sharpness = sharpness

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        # Each query reads a few patches, which depend on their positions alone.
        queries = F.normalize(self.queries, dim=-1) * self.sharpness
        keys = F.normalize(self.keys(self.positions), dim=-1) * self.sharpness
        weights = (queries @ keys.transpose(1, 2)).softmax(-1)
        return self.head(self.blocks(self.norm(weights @ self.values(patches))).mean(1))


class PatchMerger(nn.Module):
    """A transformer that merges its patches into a few tokens after the first block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first, self.second = Block(), Block()
        self.norm, self.queries = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(count, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.first(self.patches(images).flatten(2).transpose(1, 2)))
        weights = (self.queries @ tokens.transpose(1, 2)).softmax(-1)
        return self.head(self.second(weights @ tokens).mean(1))


def make_cnn(channels: int = 3, width: int = WIDTH) -> nn.Sequential:
    """Return a convolutional trunk of stride 8."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
    )  # fmt: skip


class ChangedInput(nn.Module):
    """A convolutional network that first transforms the image."""

    def __init__(self, change: Callable[[Tensor], Tensor], channels: int = 3) -> None:
        super().__init__()
        self.trunk, self.head, self.change = make_cnn(channels), nn.Linear(WIDTH, CLASSES), change

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.trunk(self.change(images)).mean((2, 3)))


class ChangedMap(nn.Module):
    """A convolutional network that transforms its activations before the last layers."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.trunk, self.head, self.change = make_cnn(), nn.Linear(WIDTH, CLASSES), change
        self.last = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.last(self.change(self.trunk(images))).mean((2, 3)))


class FlippedViews(nn.Module):
    """A network that averages the scores of an image and of its mirror image, in two passes."""

    def __init__(self, *, flipped_last: bool, axis: int = 3) -> None:
        super().__init__()
        self.trunk, self.head = make_cnn(), nn.Linear(WIDTH, CLASSES)
        self.flipped_last, self.axis = flipped_last, axis

    def forward(self, images: Tensor) -> Tensor:
        views = [images, images.flip(self.axis)]
        scores = [self.head(self.trunk(view).mean((2, 3))) for view in (views if self.flipped_last else views[::-1])]
        return torch.stack(scores).mean(0)


class FoldedViews(nn.Module):
    """A network that averages the scores of an image and of its mirror image, in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = make_cnn(), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.trunk(torch.cat([images, images.flip(3)])).mean((2, 3))
        return self.head(features).unflatten(0, (2, -1)).mean(0)


class ChannelsLast(nn.Module):
    """A network whose activations are (N,h,w,C) throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in "12")
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        folded = F.pixel_unshuffle(images, PATCH).permute(0, 2, 3, 1)
        return self.head(self.layers(self.patches(folded)).mean((1, 2)))


class Unconnected(nn.Module):
    """A network with a layer that affects the score, but does not depend on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = make_cnn(), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("prior", torch.randn(1, WIDTH, 4, 6))
        self.last = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, images: Tensor) -> Tensor:
        gate = self.trunk(images).mean((2, 3))
        return self.head(gate * self.last(self.prior.expand(len(images), -1, -1, -1)).mean((2, 3)))


def order_windows(height: int, width: int, side: int = 2) -> Tensor:
    """Return the order of patches window by window, like Hiera's units."""
    rows = torch.arange(height * width).reshape(height // side, side, width // side, side)
    return rows.permute(0, 2, 1, 3).flatten()


def order_units(height: int, width: int) -> Tensor:
    """Return the order of patches by their position in a window, then by window."""
    rows = torch.arange(height * width).reshape(height // 2, 2, width // 2, 2)
    return rows.permute(1, 3, 0, 2).flatten()


def order_columns(height: int, width: int) -> Tensor:
    """Return the order of patches column by column, as AST has them."""
    return torch.arange(height * width).reshape(height, width).T.flatten()


def order_snake(height: int, width: int) -> Tensor:
    """Return the order of patches in which every second row runs backwards."""
    rows = torch.arange(height * width).reshape(height, width).clone()
    rows[1::2] = rows[1::2].flip(1)
    return rows.flatten()


def fold_wrongly(images: Tensor) -> Tensor:
    """Fold pixels into channels by `view` alone, which moves strips of the image into the positions of cells."""
    return images.reshape(len(images), 12, images.shape[2] // 2, images.shape[3] // 2)


ORDERS: dict[str, Callable[[int, int], Tensor]] = {
    "columns": order_columns,
    "windows": order_windows,
    "units": order_units,
    "snake": order_snake,
    "backwards": lambda height, width: torch.arange(height * width).flip(0),
}

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "class-token-first": (lambda: TokenNet(before=1, reads=0), SIZE),
    "class-token-in-the-middle": (lambda: TokenNet(between=1, reads=COUNT // 2), SIZE),
    "class-token-in-the-middle-mean": (lambda: TokenNet(between=1), SIZE),
    "class-token-last": (lambda: TokenNet(after=1, reads=-1), SIZE),
    "class-token-last-mean": (lambda: TokenNet(after=1), SIZE),
    "registers-first": (lambda: TokenNet(before=5, reads=0), SIZE),
    "registers-last": (lambda: TokenNet(before=1, after=4, reads=0), SIZE),
    "registers-last-mean": (lambda: TokenNet(after=4), SIZE),
    "no-extra-token": (TokenNet, SIZE),
    **{f"order-{name}": (lambda order=order: TokenNet(order(*CELLS)), SIZE) for name, order in ORDERS.items()},
    "order-columns-square": (lambda: TokenNet(order_columns(8, 8), size=(32, 32)), (32, 32)),
    "order-units-class-token": (lambda: TokenNet(order_units(*CELLS), before=1, reads=0), SIZE),
    "tokens-first": (TokensFirst, SIZE),
    "tokens-first-registers-last": (lambda: TokensFirst(after=3), SIZE),
    "latents-as-many-as-patches": (lambda: Latents(COUNT), SIZE),
    "latents-of-a-coarser-grid": (lambda: Latents(COUNT // 4), SIZE),
    "latents-64": (lambda: Latents(64), (32, 48)),
    "latents-7": (lambda: Latents(7), SIZE),
    "patch-merger-8": (lambda: PatchMerger(8), SIZE),
    "patch-merger-24": (lambda: PatchMerger(24), SIZE),
    "channels-last": (ChannelsLast, SIZE),
    "pixel-unshuffle": (lambda: ChangedInput(lambda images: F.pixel_unshuffle(images, 2), 12), (64, 96)),
    "view-unshuffle": (lambda: ChangedInput(fold_wrongly, 12), (64, 96)),
    "input-mirrored": (lambda: ChangedInput(lambda images: images.flip(3)), (64, 96)),
    "input-transposed": (lambda: ChangedInput(lambda images: images.transpose(2, 3)), (64, 64)),
    "input-rotated": (lambda: ChangedInput(lambda images: images.rot90(1, (2, 3))), (64, 64)),
    "input-centre-crop": (lambda: ChangedInput(lambda images: images[:, :, 24:72, 24:72]), (96, 96)),
    "input-padded": (lambda: ChangedInput(lambda images: F.pad(images, (0, 64, 0, 64))), (64, 64)),
    "input-resized": (lambda: ChangedInput(lambda images: F.interpolate(images, (64, 64))), (48, 80)),
    "map-rolled": (lambda: ChangedMap(lambda maps: maps.roll((3, 5), (2, 3))), (64, 96)),
    "map-rotated": (lambda: ChangedMap(lambda maps: maps.flip(2, 3)), (64, 96)),
    "flipped-view-last": (lambda: FlippedViews(flipped_last=True), (64, 96)),
    "flipped-view-first": (lambda: FlippedViews(flipped_last=False), (64, 96)),
    "flipped-view-vertical": (lambda: FlippedViews(flipped_last=True, axis=2), (64, 96)),
    "flipped-view-folded": (FoldedViews, (64, 96)),
    "image-as-a-gate": (Unconnected, (64, 96)),
}

CASES = [Case("handwritten", name, build, make_noise(*size)) for name, (build, size) in MODELS.items()]


@dataclass(frozen=True)
class Control:
    """A model with a layout that is known to be right or wrong, to test the sweep's own verdicts."""

    name: str
    build: Callable[[], nn.Module]
    layer: str
    reshape: Any
    expected: str
    size: tuple[int, int] = SIZE


def pick_tokens(start: int, order: Tensor | None = None, cells: tuple[int, int] = CELLS) -> Callable[[Tensor], Tensor]:
    """Return a function that lays COUNT tokens from `start` on, in this order, on the grid."""

    def to_grid(tokens: Tensor) -> Tensor:
        rows = tokens[:, start : start + cells[0] * cells[1]]
        rows = rows if order is None else rows[:, order]
        return rows.unflatten(1, cells).movedim(-1, 1)

    return to_grid


def pick_around(gap: int) -> Callable[[Tensor], Tensor]:
    """Return a function that lays the tokens before and after `gap` on the grid."""

    def to_grid(tokens: Tensor) -> Tensor:
        rows = torch.cat([tokens[:, :gap], tokens[:, gap + 1 :]], 1)
        return rows.unflatten(1, CELLS).movedim(-1, 1)

    return to_grid


def list_controls() -> Iterator[Control]:
    """Yield controls: for each broken convention a right and a wrong layout."""
    layer = "blocks.1.norm1"
    for length in (1, 2, 4, 8):
        build = lambda length=length: TokenNet(before=1, after=length, reads=0)  # noqa: E731
        yield Control(
            f"{length} registers last, as registers first", build, layer, pick_tokens(1 + length), "misplaced"
        )
        yield Control(f"{length} registers last", build, layer, pick_tokens(1), "follows")
    token_last, token_middle = MODELS["class-token-last"][0], MODELS["class-token-in-the-middle"][0]
    yield Control("class token last, as first", token_last, layer, pick_tokens(1), "misplaced")
    yield Control("class token last", token_last, layer, pick_tokens(0), "follows")
    yield Control("class token in the middle, as first", token_middle, layer, pick_tokens(1), "misplaced")
    yield Control("class token in the middle", token_middle, layer, pick_around(COUNT // 2), "follows")
    for name, order in ORDERS.items():
        build = MODELS[f"order-{name}"][0]
        yield Control(f"order {name}, as rows", build, layer, pick_tokens(0), "misplaced")
        yield Control(f"order {name}", build, layer, pick_tokens(0, order(*CELLS).argsort()), "follows")
    latents = MODELS["latents-as-many-as-patches"][0]
    yield Control("latents", latents, "blocks.0.norm1", pick_tokens(0), "misplaced")
    mirrored = MODELS["input-mirrored"][0]
    yield Control("mirrored image", mirrored, "trunk.5", lambda maps: maps, "misplaced", (64, 96))
    yield Control("mirrored image, mirrored", mirrored, "trunk.5", lambda maps: maps.flip(3), "follows", (64, 96))
    transposed = MODELS["input-transposed"][0]
    yield Control("transposed image", transposed, "trunk.5", lambda maps: maps, "misplaced", (64, 64))
    transpose = lambda maps: maps.transpose(2, 3)  # noqa: E731
    yield Control("transposed image, transposed", transposed, "trunk.5", transpose, "follows", (64, 64))
    rolled = MODELS["map-rolled"][0]
    yield Control("rolled map", rolled, "last", lambda maps: maps, "misplaced", (64, 96))
    yield Control("rolled map, back", rolled, "last", lambda maps: maps.roll((-3, -5), (2, 3)), "follows", (64, 96))
    folded = MODELS["view-unshuffle"][0]
    yield Control("pixels folded by view", folded, "trunk.5", lambda maps: maps, "misplaced", (64, 96))
    yield Control("pixels unshuffled", MODELS["pixel-unshuffle"][0], "trunk.5", lambda maps: maps, "follows", (64, 96))
    cropped = MODELS["input-centre-crop"][0]
    yield Control("centre crop", cropped, "trunk.5", lambda maps: maps, "misplaced", (96, 96))
    yield Control("image as a gate", Unconnected, "last", lambda maps: maps, "independent", (64, 96))
