import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradcam.layers.layout import Layout
from gradcam.layers.token_layout import Patch, find_layout, find_patches


def edge(*sides: int) -> Patch:
    """Return patches of these sizes without gaps or overlap."""
    return Patch(sides, sides, (0,) * len(sides))


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((2, 512, 7, 10), (224, 320), Layout((7, 10), "channels first")),
        ((2, 7, 10, 768), (224, 320), Layout((7, 10), "channels last")),
        ((2, 7, 7, 7), (224, 224), Layout((7, 7), "channels first")),
        ((2, 2048, 8, 8), (299, 299), Layout((8, 8), "channels first")),
        ((2, 64, 63, 1), (2000, 3), Layout((63, 1), "channels first")),
        ((2, 16, 20, 5), (40, 40), None),  # Neither pair of axes has the image's aspect ratio.
        ((2, 16, 4, 5, 6), (16, 20, 24), Layout((4, 5, 6), "channels first")),
        ((2, 4, 5, 6, 16), (16, 20, 24), Layout((4, 5, 6), "channels last")),
        ((2, 197, 768), (224, 224), Layout((14, 14), "tokens", 1)),
        ((2, 196, 768), (224, 224), Layout((14, 14), "tokens", 0)),
        ((2, 261, 384), (224, 224), Layout((16, 16), "tokens", 5)),
        ((2, 141, 768), (224, 160), Layout((14, 10), "tokens", 1)),
        ((2, 200, 30), (224, 224), Layout((14, 14), "tokens", 4)),
        ((2, 204, 30), (224, 224), Layout((14, 14), "tokens", 8)),
        ((2, 205, 30), (224, 224), None),
        ((2, 181, 30), (224, 224), None),
        ((2, 10, 30), (6, 6), None),  # Ten tokens are 3 x 3 and one more, or 2 x 2 and six more.
        ((2, 1000), (224, 224), None),
        ((2, 512, 1, 1), (224, 224), None),
    ],
)
def test_layout(shape: tuple[int, ...], size: tuple[int, ...], expected: Layout | None) -> None:
    assert find_layout(shape, size) == expected


@pytest.mark.parametrize("kind", ["tokens", "tokens first"])
def test_rows_have_the_images_first(kind: str) -> None:
    output, layout = torch.rand(5, 6, 7), Layout((2, 2), kind, 1)
    rows = layout.to_rows(output)
    assert torch.equal(rows, output if kind == "tokens" else output.transpose(0, 1))
    assert torch.equal(layout.from_rows(rows), output)


def test_token_and_channels_last_values_go_to_the_right_cells() -> None:
    tokens = torch.arange(2 * 7 * 3).reshape(2, 7, 3)
    grid = Layout((2, 3), "tokens", 1).to_grid(tokens)
    channels_last = torch.arange(2 * 2 * 3 * 4).reshape(2, 2, 3, 4)
    moved = Layout((2, 3), "channels last").to_grid(channels_last)
    for image, row, column in np.ndindex(2, 2, 3):
        assert grid[image, :, row, column].tolist() == tokens[image, 1 + row * 3 + column].tolist()
        assert torch.equal(moved[image, :, row, column], channels_last[image, row, column])


def test_a_convolution_is_channels_first_for_every_shape() -> None:
    shape, size = (2, 16, 16, 8), (16, 16)
    assert find_layout(shape, size) == Layout((16, 16), "channels last")
    assert find_layout(shape, size, torch.nn.Conv2d(3, 16, 3)) == Layout((16, 8), "channels first")


@pytest.mark.parametrize(
    ("shape", "images", "expected"),
    [
        ((197, 2, 768), 2, Layout((14, 14), "tokens first", 1)),
        ((197, 1, 768), 1, Layout((14, 14), "tokens first", 1)),
        ((2, 197, 768), 2, Layout((14, 14), "tokens", 1)),
        # If both axes have the batch size, the first is the batch.
        ((197, 197, 768), 197, Layout((14, 14), "tokens", 1)),
        ((196, 197, 768), 196, Layout((14, 14), "tokens", 1)),
        ((197, 2, 768), 3, None),
        ((3, 2, 768), 2, None),
        ((8, 512, 7, 7), 2, None),
    ],
)
def test_tokens_may_come_before_images(shape: tuple[int, ...], images: int, expected: Layout | None) -> None:
    assert find_layout(shape, (224, 224), images=images) == expected
    tokens = torch.arange(7 * 2 * 3).reshape(7, 2, 3)
    grid = Layout((2, 3), "tokens first", 1).to_grid(tokens)
    assert torch.equal(grid, Layout((2, 3), "tokens", 1).to_grid(tokens.transpose(0, 1)))


class Permuted(nn.Module):
    """A block whose parts may use a different layout from its output."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class NormOverChannelsFirst(nn.LayerNorm):
    """A layer norm over channels first, as in ConvNeXt's stem; `timm` also has a subclass for channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class NormByHand(nn.LayerNorm):
    """A layer norm over channels first that broadcasts its weights instead of permuting axes."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.square().mean(1, keepdim=True) + self.eps).sqrt() * self.weight[:, None, None]


class NormOfAnotherName(nn.LayerNorm):
    pass


@pytest.mark.parametrize(
    ("shape", "module", "expected"),
    [
        ((2, 96, 96, 96), nn.LayerNorm(96), "channels last"),
        ((2, 96, 96, 96), nn.Linear(384, 96), "channels last"),
        ((2, 96, 96, 96), nn.Conv2d(3, 96, 1), "channels first"),
        ((2, 96, 96, 96), nn.MaxPool2d(2), "channels first"),
        ((2, 96, 96, 96), nn.InstanceNorm2d(96), "channels first"),
        ((2, 96, 96, 96), nn.ReLU(), "channels first"),
        ((2, 96, 96, 96), nn.Sequential(nn.Conv2d(3, 96, 1), nn.BatchNorm2d(96)), "channels first"),
        ((2, 96, 96, 96), Permuted(nn.LayerNorm(96)), None),  # The block may return either layout.
        ((2, 96, 96, 96), Permuted(nn.Conv2d(3, 96, 1), nn.Linear(384, 96)), None),
        ((2, 96, 96, 96), NormOverChannelsFirst(96), "channels first"),
        ((2, 96, 96, 96), NormByHand(96), "channels first"),
        ((2, 96, 96, 96), NormOfAnotherName(96), "channels last"),
        ((2, 96, 96, 96), nn.Dropout(), None),  # Dropout keeps the layout of its input, which may be either.
        ((2, 97, 97, 96), nn.Dropout(), "channels last"),  # Only this layout has square cells.
        ((2, 96, 97, 97), nn.Dropout(), "channels first"),
        ((2, 24, 24, 192), Permuted(nn.LayerNorm(192)), "channels last"),
        ((2, 192, 24, 24), Permuted(nn.LayerNorm(192)), "channels first"),
        ((2, 48, 24, 24), NormOverChannelsFirst(48), "channels first"),
        ((2, 24, 20, 24), NormOverChannelsFirst(24), "channels first"),
        ((2, 24, 20, 24), NormOfAnotherName(24), None),  # windows stacked in the batch axis
        ((2, 16, 49, 64), nn.Linear(8, 64), None),  # windows stacked in the batch axis
        ((2, 16, 49, 64), nn.Sequential(nn.LayerNorm(64), nn.Dropout()), None),
        ((2, 16, 20, 5), nn.Sequential(nn.Conv2d(3, 16, 1)), "channels first"),  # The strides differ between the axes.
        ((2, 16, 20, 5), nn.ReLU(), "channels first"),
        ((2, 16, 20, 5), nn.GELU(), None),
        ((2, 16, 20, 5), nn.Sequential(nn.Conv2d(3, 8, 1), nn.Dropout()), None),
        ((2, 197, 3, 64), nn.Identity(), None),  # (N, tokens, heads, D)
        ((2, 12, 48, 48), nn.Softmax(-1), None),  # Attention weights can have the aspect ratio of a square image.
        ((2, 12, 48, 48), nn.Softmax(1), "channels first"),
        ((2, 16, 7, 5), nn.AdaptiveAvgPool2d((7, 5)), "channels first"),
    ],
)
def test_the_module_decides_an_ambiguous_shape(shape: tuple[int, ...], module: nn.Module, expected: str | None) -> None:
    layout = find_layout(shape, (384, 384), module)
    assert (layout and layout.kind) == expected
    if layout is not None:
        assert layout.grid == (shape[1:3] if expected == "channels last" else shape[2:])


@pytest.mark.parametrize(
    ("shape", "module", "is_certain"),
    [
        ((2, 64, 16), nn.Flatten(2), False),  # 64 tokens on 8 x 8 cells, or 64 channels on 4 x 4 cells
        ((2, 64, 16), nn.Sequential(nn.Conv2d(3, 64, 1), nn.Flatten(2)), False),
        ((2, 64, 16), nn.LayerNorm(16), True),
        ((2, 64, 16), nn.Sequential(nn.Linear(4, 16), nn.Dropout()), True),
        ((2, 64, 64), nn.LayerNorm(64), True),
        ((2, 64, 20), nn.Dropout(), True),
        ((2, 65, 20), nn.Dropout(), True),
        ((2, 65, 16), nn.Dropout(), False),  # 65 channels on 4 x 4 cells
        ((2, 64, 16), nn.Conv1d(8, 64, 1), False),
        ((2, 64, 16), nn.BatchNorm1d(64), False),
        ((2, 16, 64), nn.Flatten(2), False),
    ],
)
def test_a_flattened_map_is_no_row_of_tokens(shape: tuple[int, ...], module: nn.Module, *, is_certain: bool) -> None:
    layout = find_layout(shape, (64, 64), module)
    if is_certain:
        assert layout == Layout((8, 8), "tokens", shape[1] - 64)
    else:
        assert layout is None


@pytest.mark.parametrize(
    ("tokens", "size", "patches", "expected"),
    [
        (10, (6, 6), [edge(2, 2)], Layout((3, 3), "tokens", 1)),
        (65, (64, 64), [edge(4, 16)], Layout((16, 4), "tokens", 1)),  # not 8 x 8
        (197, (230, 230), [edge(16, 16)], Layout((14, 14), "tokens", 1)),
        (226, (230, 230), [edge(16, 16)], Layout((15, 15), "tokens", 1)),  # padded
        (197, (230, 230), [], None),
        (49, (224, 224), [edge(16, 16), edge(2, 2)], Layout((7, 7), "tokens")),  # after two patch mergers
        (1568, (16, 224, 224), [edge(2, 16, 16)], Layout((8, 14, 14), "tokens")),
        (1568, (16, 224, 224), [], None),  # or 2 x 28 x 28
        (217, (96, 96, 96), [edge(16, 16, 16)], Layout((6, 6, 6), "tokens", 1)),
        (217, (96, 96, 96), [edge(16, 16)], None),  # or 24 x 3 x 3
        (46, (5, 6, 6), [], Layout((5, 3, 3), "tokens", 1)),
        (26, (2, 10, 10), [], Layout((1, 5, 5), "tokens", 1)),
        # Patches that overlap, as a first convolution with a small stride cuts them.
        (10, (64, 64), [Patch((32, 32), (16, 16), (0, 0))], Layout((3, 3), "tokens", 1)),
        (17, (64, 64), [Patch((7, 7), (4, 4), (3, 3))], Layout((4, 4), "tokens", 1)),  # 16 tokens and a class token
        (257, (62, 62), [Patch((7, 7), (4, 4), (3, 3))], Layout((16, 16), "tokens", 1)),  # 14 x 14 without its padding
        # Selected or learned tokens are no grid: their number is no whole number of patches.
        (65, (224, 224), [edge(16, 16)], None),
        (70, (224, 224), [edge(16, 16)], None),
        (8, (224, 224), [edge(16, 16)], None),
        (55, (224, 224), [edge(32, 32)], Layout((7, 7), "tokens", 6)),  # register tokens before the patch tokens
        # 4 x 4 cells after a merger would leave four registers, but the model declares none.
        (20, (224, 224), [edge(28, 28)], None),
    ],
)
def test_the_models_patches_decide_where_the_token_count_is_ambiguous(
    tokens: int, size: tuple[int, ...], patches: list[Patch], expected: Layout | None
) -> None:
    assert find_layout((2, tokens, 30), size, patches=patches) == expected


def test_the_models_patches_win_over_a_width_that_could_be_a_grid() -> None:
    shape, size = (2, 197, 1024), (224, 224)  # 1024 could also be 32 x 32 cells of 7 pixels.
    assert find_layout(shape, size, nn.Dropout()) is None
    assert find_layout(shape, size, nn.Dropout(), patches=[edge(16, 16)]) == Layout((14, 14), "tokens", 1)
    # The shape could also mean 56 channels on 14 x 14 cells.
    assert find_layout((2, 56, 196), size, nn.ReLU(), patches=[edge(16, 16)]) is None


def test_patches_are_read_from_convolutions() -> None:
    volumes = nn.Conv3d(1, 8, (2, 4, 4), (2, 4, 4), padding="valid")
    others = nn.Conv2d(3, 8, 3, 2, padding=1), nn.Conv2d(8, 8, 3, 2), nn.Conv2d(3, 8, 3)
    model = nn.Sequential(nn.Conv2d(3, 8, 16, 16), *others, volumes)
    expected = [edge(16, 16), Patch((3, 3), (2, 2), (1, 1)), edge(2, 4, 4)]
    assert find_patches(model.modules()) == expected


@pytest.mark.parametrize(
    ("shape", "size", "reshape", "expected"),
    [
        ((2, 197, 768), (230, 230), (14, 14), Layout((14, 14), "tokens", 1)),
        ((197, 2, 768), (230, 230), (14, 14), Layout((14, 14), "tokens first", 1)),
        ((2, 197, 768), (224, 224), (13, 14), None),  # 15 tokens before the grid are too many.
        ((2, 197, 768), (224, 224), (13, 13), None),
        ((2, 197, 768), (224, 224), (15, 14), None),
        ((2, 433, 16), (4, 99, 99), (3, 12, 12), Layout((3, 12, 12), "tokens", 1)),
        ((2, 433, 16), (4, 99, 99), (12, 36), None),
        ((2, 14, 14, 16), (224, 224), (14, 14), None),
        ((3, 197, 768), (224, 224), (14, 14), None),
        ((2, 96, 96, 96), (384, 384), "channels last", Layout((96, 96), "channels last")),
        ((2, 96, 96, 96), (384, 384), "channels first", Layout((96, 96), "channels first")),
        ((2, 7, 9, 5), (384, 384), "channels last", Layout((7, 9), "channels last")),
        ((2, 7, 9, 5), (384, 384), "channels first", Layout((9, 5), "channels first")),
        ((2, 7, 9, 5), (384, 384), "tokens", None),
        ((2, 64, 16), (64, 64), "tokens", Layout((8, 8), "tokens")),
        ((64, 2, 16), (64, 64), "tokens", None),
        ((64, 2, 16), (64, 64), "tokens first", Layout((8, 8), "tokens first")),
        ((2, 64, 16), (64, 64), "channels first", None),
    ],
)
def test_a_custom_layout_of_a_layer(
    shape: tuple[int, ...], size: tuple[int, ...], reshape: str | tuple[int, ...], expected: Layout | None
) -> None:
    assert find_layout(shape, size, nn.Flatten(), images=2, reshape=reshape) == expected
