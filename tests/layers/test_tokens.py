import pytest
import torch
from torch import Tensor, nn

from gradcam.layers.layout import Layout, Patch, find_layout, find_patches


def edge(*sides: int) -> Patch:
    """Patches of these sides, edge to edge."""
    return Patch(sides, sides, (0,) * len(sides))


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((2, 512, 7, 7), (224, 224), Layout((7, 7), "channels first")),
        ((2, 512, 7, 10), (224, 320), Layout((7, 10), "channels first")),
        ((2, 7, 7, 768), (224, 224), Layout((7, 7), "channels last")),
        ((2, 7, 10, 768), (224, 320), Layout((7, 10), "channels last")),
        ((2, 7, 7, 7), (224, 224), Layout((7, 7), "channels first")),
        ((2, 2048, 8, 8), (299, 299), Layout((8, 8), "channels first")),
        ((2, 64, 63, 1), (2000, 3), Layout((63, 1), "channels first")),
        ((2, 16, 20, 5), (40, 40), None),  # neither has the aspect
        ((2, 16, 4, 5, 6), (16, 20, 24), Layout((4, 5, 6), "channels first")),
        ((2, 4, 5, 6, 16), (16, 20, 24), Layout((4, 5, 6), "channels last")),
        ((2, 197, 768), (224, 224), Layout((14, 14), "tokens", 1)),
        ((2, 196, 768), (224, 224), Layout((14, 14), "tokens", 0)),
        ((2, 198, 768), (224, 224), Layout((14, 14), "tokens", 2)),
        ((2, 261, 384), (224, 224), Layout((16, 16), "tokens", 5)),
        ((2, 141, 768), (224, 160), Layout((14, 10), "tokens", 1)),
        ((2, 200, 30), (224, 224), Layout((14, 14), "tokens", 4)),
        ((2, 204, 30), (224, 224), Layout((14, 14), "tokens", 8)),
        ((2, 205, 30), (224, 224), None),
        ((2, 181, 30), (224, 224), None),
        ((2, 10, 30), (6, 6), None),  # 3 x 3 and one, or 2 x 2 and six
        ((2, 1000), (224, 224), None),
        ((2, 512, 1, 1), (224, 224), None),
    ],
)
def test_layout(shape: tuple[int, ...], size: tuple[int, ...], expected: Layout | None) -> None:
    assert find_layout(shape, size) == expected


def test_values_of_tokens_and_of_channels_last_land_in_their_cells() -> None:
    tokens = torch.arange(2 * 7 * 3).reshape(2, 7, 3)
    grid = Layout((2, 3), "tokens", 1).to_grid(tokens)
    last = torch.arange(2 * 2 * 3 * 4).reshape(2, 2, 3, 4)
    for image in range(2):
        for row in range(2):
            for column in range(3):
                assert grid[image, :, row, column].tolist() == tokens[image, 1 + row * 3 + column].tolist()
                actual = Layout((2, 3), "channels last").to_grid(last)[image, :, row, column]
                assert actual.tolist() == last[image, row, column].tolist()


def test_a_convolution_gives_channels_first_whatever_the_shape_looks_like() -> None:
    shape, size = (2, 16, 16, 8), (16, 16)
    assert find_layout(shape, size) == Layout((16, 16), "channels last")
    assert find_layout(shape, size, torch.nn.Conv2d(3, 16, 3)) == Layout((16, 8), "channels first")


@pytest.mark.parametrize(
    ("shape", "images", "expected"),
    [
        ((197, 2, 768), 2, Layout((14, 14), "tokens first", 1)),
        ((197, 1, 768), 1, Layout((14, 14), "tokens first", 1)),
        ((2, 197, 768), 2, Layout((14, 14), "tokens", 1)),
        ((197, 197, 768), 197, Layout((14, 14), "tokens", 1)),  # images first, where both could be meant
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
    """A block, whose parts may work on another layout than it gives."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class NormOverChannelsFirst(nn.LayerNorm):
    """As ConvNeXt's stem has it; `timm` has a subclass that works on channels last as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class NormByHand(nn.LayerNorm):
    """The same without a permutation, which broadcasts its weights."""

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
        ((2, 96, 96, 96), Permuted(nn.LayerNorm(96)), None),  # it may give either
        ((2, 96, 96, 96), Permuted(nn.Conv2d(3, 96, 1), nn.Linear(384, 96)), None),
        ((2, 96, 96, 96), NormOverChannelsFirst(96), "channels first"),
        ((2, 96, 96, 96), NormByHand(96), "channels first"),
        ((2, 96, 96, 96), NormOfAnotherName(96), "channels last"),
        ((2, 96, 96, 96), nn.Dropout(), None),  # behind either
        ((2, 97, 97, 96), nn.Dropout(), "channels last"),  # of which alone the cells are squares
        ((2, 96, 97, 97), nn.Dropout(), "channels first"),
        ((2, 24, 24, 192), Permuted(nn.LayerNorm(192)), "channels last"),
        ((2, 192, 24, 24), Permuted(nn.LayerNorm(192)), "channels first"),
        ((2, 48, 24, 24), NormOverChannelsFirst(48), "channels first"),
        ((2, 24, 20, 24), NormOverChannelsFirst(24), "channels first"),
        ((2, 24, 20, 24), NormOfAnotherName(24), None),  # windows in rows
        ((2, 16, 49, 64), nn.Linear(8, 64), None),  # windows in rows
        ((2, 16, 49, 64), nn.Sequential(nn.LayerNorm(64), nn.Dropout()), None),
        ((2, 16, 20, 5), nn.Sequential(nn.Conv2d(3, 16, 1)), "channels first"),  # of strides that are not alike
        ((2, 16, 20, 5), nn.ReLU(), "channels first"),
        ((2, 16, 20, 5), nn.GELU(), None),
        ((2, 16, 20, 5), nn.Sequential(nn.Conv2d(3, 8, 1), nn.Dropout()), None),
        ((2, 197, 3, 64), nn.Identity(), None),  # (N, tokens, heads, D)
        ((2, 12, 48, 48), nn.Softmax(-1), None),  # of attention, which has a square picture's aspect
        ((2, 12, 48, 48), nn.Softmax(1), "channels first"),
        ((2, 16, 7, 5), nn.AdaptiveAvgPool2d((7, 5)), "channels first"),
    ],
)
def test_the_kind_of_module_tells_where_the_shape_does_not(
    shape: tuple[int, ...], module: nn.Module, expected: str | None
) -> None:
    layout = find_layout(shape, (384, 384), module)
    assert (layout and layout.kind) == expected
    if layout is not None:
        assert layout.grid == (shape[1:3] if expected == "channels last" else shape[2:])


@pytest.mark.parametrize(
    ("shape", "module", "is_certain"),
    [
        ((2, 64, 16), nn.Flatten(2), False),  # 64 tokens on 8 x 8, or 64 channels on 4 x 4
        ((2, 64, 16), nn.Sequential(nn.Conv2d(3, 64, 1), nn.Flatten(2)), False),
        ((2, 64, 16), nn.LayerNorm(16), True),
        ((2, 64, 16), nn.Sequential(nn.Linear(4, 16), nn.Dropout()), True),
        ((2, 64, 64), nn.LayerNorm(64), True),
        ((2, 64, 20), nn.Dropout(), True),
        ((2, 65, 20), nn.Dropout(), True),
        ((2, 65, 16), nn.Dropout(), False),  # 65 channels on 4 x 4
        ((2, 64, 16), nn.Conv1d(8, 64, 1), False),
        ((2, 64, 16), nn.BatchNorm1d(64), False),
        ((2, 16, 64), nn.Flatten(2), False),
    ],
)
def test_a_flattened_map_is_not_taken_for_tokens(
    shape: tuple[int, ...], module: nn.Module, *, is_certain: bool
) -> None:
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
        (49, (224, 224), [edge(16, 16), edge(2, 2)], Layout((7, 7), "tokens")),  # behind two mergers
        (1568, (16, 224, 224), [edge(2, 16, 16)], Layout((8, 14, 14), "tokens")),
        (1568, (16, 224, 224), [], None),  # or 2 x 28 x 28
        (217, (96, 96, 96), [edge(16, 16, 16)], Layout((6, 6, 6), "tokens", 1)),
        (217, (96, 96, 96), [edge(16, 16)], None),  # or 24 x 3 x 3
        (46, (5, 6, 6), [], Layout((5, 3, 3), "tokens", 1)),
        (26, (2, 10, 10), [], Layout((1, 5, 5), "tokens", 1)),
        # Patches that overlap, and a first convolution of a few.
        (10, (64, 64), [Patch((32, 32), (16, 16), (0, 0))], Layout((3, 3), "tokens", 1)),
        (17, (64, 64), [Patch((7, 7), (4, 4), (3, 3))], Layout((4, 4), "tokens", 1)),  # of which 16 make one
        (257, (62, 62), [Patch((7, 7), (4, 4), (3, 3))], Layout((16, 16), "tokens", 1)),  # 14 x 14 without its padding
        # Tokens that were chosen or learned are no grid, whatever their number: these are no whole patches.
        (65, (224, 224), [edge(16, 16)], None),
        (70, (224, 224), [edge(16, 16)], None),
        (8, (224, 224), [edge(16, 16)], None),
        (55, (224, 224), [edge(32, 32)], Layout((7, 7), "tokens", 6)),  # registers before the patches' own
        (
            20,
            (224, 224),
            [edge(28, 28)],
            None,
        ),  # four of 4 x 4 behind a merger would be registers, of which none is known
    ],
)
def test_the_models_patches_tell_where_arithmetic_does_not(
    tokens: int, size: tuple[int, ...], patches: list[Patch], expected: Layout | None
) -> None:
    assert find_layout((2, tokens, 30), size, patches=patches) == expected


def test_a_width_that_is_a_grid_too_does_not_make_a_models_own_patches_doubtful() -> None:
    shape, size = (2, 197, 1024), (224, 224)  # 32 x 32 cells of 7 pixels
    assert find_layout(shape, size, nn.Dropout()) is None
    assert find_layout(shape, size, nn.Dropout(), patches=[edge(16, 16)]) == Layout((14, 14), "tokens", 1)
    assert find_layout((2, 56, 196), size, nn.ReLU(), patches=[edge(16, 16)]) is None  # 56 channels on 14 x 14


def test_patches_are_what_convolutions_cut_edge_to_edge_and_what_they_make_of_the_picture() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 16, 16),
        nn.Conv2d(3, 8, 3, 2, padding=1),
        nn.Conv2d(8, 8, 3, 2),
        nn.Conv2d(3, 8, 3),
        nn.Conv3d(1, 8, (2, 4, 4), (2, 4, 4), padding="valid"),
    )
    expected = [edge(16, 16), Patch((3, 3), (2, 2), (1, 1)), edge(2, 4, 4)]
    assert find_patches(model.modules()) == expected


@pytest.mark.parametrize(
    ("shape", "size", "reshape", "expected"),
    [
        ((2, 197, 768), (230, 230), (14, 14), Layout((14, 14), "tokens", 1)),
        ((197, 2, 768), (230, 230), (14, 14), Layout((14, 14), "tokens first", 1)),
        ((2, 197, 768), (224, 224), (13, 14), None),  # 15 before them are too many
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
def test_what_somebody_says_of_a_layer(
    shape: tuple[int, ...], size: tuple[int, ...], reshape: str | tuple[int, ...], expected: Layout | None
) -> None:
    assert find_layout(shape, size, nn.Flatten(), images=2, reshape=reshape) == expected
