"""Test imputed pixels: by hand, against the exact solution of the equations, and against grad-cam's solver."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import impute
from gradcam.evaluation.explainers import make_centre, make_edges, make_random
from gradcam.evaluation.metrics import imputation as multigrid
from gradcam.evaluation.subject import rank_pixels
from tests.imputation_oracle import impute_exactly

GENERATOR = torch.Generator()
DOCUMENTED_ERROR = 1e-3  # documented limit of the distance from the exact solution, as a share of the values' range


@pytest.fixture(autouse=True)
def _restart() -> None:
    GENERATOR.manual_seed(0)


def picture(height: int, width: int, channels: int = 3) -> Tensor:
    """Return random values from -1 to 1."""
    values = 2 * torch.rand(1, channels, height, width, generator=GENERATOR) - 1
    values[0, :, 0, 0], values[0, :, -1, -1] = -1, 1
    return values


def mark_known(shape: tuple[int, int], *unknown_pixels: tuple[int, int]) -> Tensor:
    is_known = torch.ones(1, *shape, dtype=torch.bool)
    for pixel in unknown_pixels:
        is_known[0][pixel] = False
    return is_known


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        # Inside: four neighbours weigh 2/12 each, and four diagonal ones 1/12 each.
        ((1, 1), (2 * (1 + 3 + 5 + 7) + (0 + 2 + 6 + 8)) / 12),
        ((0, 0), (2 * (1 + 3) + 4) / 5),  # in the corner: two neighbours and one diagonal one, with 5/12 in all
        # At the border: three neighbours and two diagonal ones, with 8/12 in all.
        ((0, 1), (2 * (0 + 2 + 4) + (3 + 5)) / 8),
    ],
)
def test_one_pixel_is_the_weighted_mean_of_its_neighbours(place: tuple[int, int], expected: float) -> None:
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    imputed = impute(image, mark_known((3, 3), place), noise=0)
    assert imputed[0, 0][place].item() == pytest.approx(expected, abs=1e-5)


def test_unknown_neighbours_are_found_together() -> None:
    row = torch.tensor([[[[3.0, 0, 0, 0, 7.0]]]])  # in a single row, interpolation is linear
    imputed = impute(row, torch.tensor([[[True, False, False, False, True]]]), noise=0)
    assert imputed.flatten().tolist() == pytest.approx([3, 4, 5, 6, 7], abs=1e-3)


def test_two_unknown_pixels_by_hand() -> None:
    image = torch.zeros(1, 1, 3, 4)
    image[0, 0, 0, 0] = 12.0
    imputed = impute(image, mark_known((3, 4), (1, 1), (1, 2)), noise=0)
    # The equations of the two pixels are a = 12/12 + b/6 and b = a/6.
    assert imputed[0, 0, 1, 1].item() == pytest.approx(36 / 35, abs=1e-3)
    assert imputed[0, 0, 1, 2].item() == pytest.approx(6 / 35, abs=1e-3)


@pytest.mark.parametrize("size", [(7, 7), (12, 16), (1, 19), (23, 2), (31, 17), (2, 2)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_scattered_pixels_equal_the_exact_solution(size: tuple[int, int], share: float) -> None:
    image = picture(*size)
    is_known = torch.rand(1, *size, generator=GENERATOR) > share
    is_known[0, 0, 0] = True
    imputed = impute(image, is_known, noise=0)[0]
    assert (imputed - impute_exactly(image[0], is_known[0])).abs().max() < DOCUMENTED_ERROR * 2


def shapes(size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield masks (H,W) of known pixels that a solver may find hard."""
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = torch.rand(1, 3, size, size, generator=GENERATOR)
    for make in (make_edges, make_centre, make_random):
        places = rank_pixels(make(images, 0))[0]
        yield f"{make.__name__}, least", places < size * size // 10
        yield f"{make.__name__}, most", places >= 9 * size * size // 10
        yield f"{make.__name__}, half", places >= size * size // 2
    yield "two corners", (row + column == 0) | (row + column == 2 * size - 2)
    yield "one row", row == 0
    yield "two sides", (column == 0) | (column == size - 1)
    yield "a diagonal wall", row == column
    yield "chessboard", (row + column) % 2 == 0
    yield "large chessboard", (row // 8 + column // 8) % 2 == 0
    yield "comb with gaps", (column % 8 == 0) & (row % 13 != 5)
    yield "grid", (column % 5 == 0) & (row % 5 == 0)
    yield "rooms", (column % 7 == 0) | (row % 7 == 0)


@pytest.mark.parametrize("name", [name for name, _ in shapes(8)])
def test_large_areas_equal_the_exact_solution_within_a_few_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "MAX_STEPS", 9)
    size = 40
    image, is_known = picture(size, size), dict(shapes(size))[name]
    imputed = impute(image, is_known[None], noise=0)[0]
    assert (imputed - impute_exactly(image[0], is_known)).abs().max() < DOCUMENTED_ERROR * 2


@pytest.mark.parametrize("shape", [(1, 151), (151, 1)])
def test_a_long_line_takes_a_few_steps_too(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "MAX_STEPS", 15)
    straight = torch.linspace(-1, 1, 151).reshape(1, 1, *shape)
    is_known = torch.tensor([True, *[False] * 149, True]).reshape(1, *shape)
    assert (impute(straight * is_known, is_known, noise=0) - straight).abs().max() < DOCUMENTED_ERROR * 2


@pytest.mark.parametrize("name", ["make_edges, least", "make_random, most", "two sides", "large chessboard"])
def test_more_steps_lead_to_the_exact_solution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "TOLERANCE", 1e-12)
    image, is_known = picture(37, 37).double(), dict(shapes(37))[name]
    imputed = impute(image, is_known[None], noise=0)[0]
    assert imputed.dtype == torch.float64
    assert (imputed - impute_exactly(image[0], is_known)).abs().max() < 1e-9


@pytest.fixture(scope="module")
def photograph(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> Tensor:
    return classifier.batch([gradcam.read_image(photo("chelsea.jpg"))])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_photograph_is_imputed_as_grad_cam_does(photograph: Tensor, share: float) -> None:
    road = pytest.importorskip("pytorch_grad_cam.metrics.road")
    for make in (make_random, make_edges):
        ranks = rank_pixels(make(photograph, 0))
        is_known = ranks >= share * ranks.numel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # grad-cam's calls make NumPy warn
            expected = road.NoisyLinearImputer(noise=0)(photograph[0], is_known[0].float())
        imputed = impute(photograph, is_known, noise=0)[0]
        assert (imputed - expected).abs().max() < 1e-3  # a tenth of the default noise


def test_known_pixels_stay_and_unknown_ones_are_not_read() -> None:
    image = picture(13, 10)
    is_known = torch.rand(1, 13, 10, generator=GENERATOR) > 0.6
    hidden = image.masked_fill(~is_known[:, None], torch.nan)
    imputed = impute(hidden, is_known, noise=0.5)
    in_all_channels = is_known[:, None].expand_as(image)
    assert torch.equal(imputed[in_all_channels], image[in_all_channels])
    assert torch.equal(imputed, impute(image, is_known, noise=0.5))
    assert imputed.isfinite().all()


def test_nothing_is_imputed_where_everything_is_known() -> None:
    image = picture(6, 7)
    assert torch.equal(impute(image, torch.ones(1, 6, 7, dtype=torch.bool)), image)


def test_a_constant_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "MAX_STEPS", 0)
    image = torch.full((1, 2, 21, 21), 0.3)
    is_known = torch.zeros(1, 21, 21, dtype=torch.bool)
    is_known[0, 20, 3] = True
    torch.testing.assert_close(impute(image, is_known, noise=0), image)


def test_an_image_of_which_nothing_is_known_is_zero_and_leaves_the_others_alone() -> None:
    images = torch.cat([picture(9, 9), picture(9, 9)])
    is_known = torch.rand(2, 9, 9, generator=GENERATOR) > 0.5
    is_known[0] = False
    imputed = impute(images, is_known, noise=0)
    assert torch.equal(imputed[0], torch.zeros(3, 9, 9))
    assert torch.equal(imputed[1:], impute(images[1:], is_known[1:], noise=0))


def test_an_image_becomes_what_it_becomes_alone() -> None:
    images = torch.cat([picture(40, 33) for _ in range(7)])
    is_known = torch.rand(7, 40, 33, generator=GENERATOR) > torch.linspace(0.05, 0.999, 7)[:, None, None]
    is_known[3, :30] = False
    is_known[:, 39, 32] = True
    imputed = impute(images, is_known)
    for number in range(7):
        alone = impute(images[number : number + 1], is_known[number : number + 1])
        torch.testing.assert_close(imputed[number], alone[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 255.0])
def test_units_of_any_size_are_as_exact(factor: float) -> None:
    image, is_known = picture(30, 30), dict(shapes(30))["make_random, most"][None]
    imputed = impute(image * factor, is_known, noise=0) / factor
    torch.testing.assert_close(imputed, impute(image, is_known, noise=0), rtol=0, atol=1e-4)


def test_the_noise_is_normal_and_of_unknown_pixels_alone() -> None:
    image = picture(64, 64)
    is_known = torch.rand(1, 64, 64, generator=GENERATOR) > 0.8
    added = impute(image, is_known, noise=0.05) - impute(image, is_known, noise=0)
    noise = added.movedim(1, -1)[~is_known]
    assert noise.std().item() == pytest.approx(0.05, rel=0.03)
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    assert (noise.abs() < 0.05).float().mean().item() == pytest.approx(0.683, abs=0.02)
    correlations = torch.corrcoef(noise.T)
    assert (correlations - torch.eye(3)).abs().max() < 0.05  # each channel has independent noise
    by_default = impute(image, is_known) - impute(image, is_known, noise=0)
    torch.testing.assert_close(by_default, added / 5, rtol=0, atol=1e-6)


def test_the_noise_is_the_generators_and_the_same_for_every_image() -> None:
    image, is_known = picture(9, 8).expand(2, -1, -1, -1), torch.zeros(2, 9, 8, dtype=torch.bool)
    before = torch.get_rng_state()
    imputed = impute(image, is_known, generator=torch.Generator().manual_seed(3))
    assert torch.equal(imputed, impute(image, is_known, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(imputed[0], imputed[1])
    assert not torch.equal(imputed, impute(image, is_known, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(impute(image, is_known), impute(image, is_known))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    image, is_known = picture(20, 20).to(dtype), dict(shapes(20))["make_random, most"][None]
    imputed = impute(image, is_known, noise=0)
    assert imputed.dtype == dtype
    assert torch.equal(imputed, impute(image.float(), is_known, noise=0).to(dtype))


def test_no_gradient_is_recorded_and_the_image_is_left_alone() -> None:
    image = picture(8, 8).requires_grad_()
    before = image.detach().clone()
    assert not impute(image, dict(shapes(8))["one row"][None]).requires_grad
    assert torch.equal(image, before)


IMAGE, ALL_KNOWN = torch.zeros(1, 3, 4, 5), torch.ones(1, 4, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("images", "is_known", "options", "kind", "message"),
    [
        (IMAGE[0], ALL_KNOWN, {}, ImageError, r"images are torch.float32 \(3, 4, 5\), expected a floating-point tensor"),
        (IMAGE.int(), ALL_KNOWN, {}, ImageError, "images are torch.int32"),
        ("cat", ALL_KNOWN, {}, ImageError, "images are 'cat'"),
        (IMAGE, ALL_KNOWN.float(), {}, ImageError, r"known is torch.float32 \(1, 4, 5\), expected torch.bool"),
        (IMAGE, ALL_KNOWN[:, :3], {}, ImageError, r"known is torch.bool \(1, 3, 5\), expected torch.bool \(1, 4, 5\)"),
        (IMAGE, ALL_KNOWN.numpy(), {}, ImageError, "known is array"),
        (IMAGE, ALL_KNOWN, {"noise": -0.1}, GradcamError, "noise is -0.1, expected a standard deviation"),
        (IMAGE, ALL_KNOWN, {"noise": True}, GradcamError, "noise is True"),
        (IMAGE, ALL_KNOWN, {"noise": "much"}, GradcamError, "noise is 'much'"),
    ],
)  # fmt: skip
def test_what_cannot_be_imputed(images: Any, is_known: Any, options: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        impute(images, is_known, **options)


@pytest.mark.cuda
def test_cpu_and_cuda_agree() -> None:
    image, is_known = picture(64, 64), dict(shapes(64))["make_random, most"][None]
    imputed = impute(image.cuda(), is_known)
    assert imputed.is_cuda
    torch.testing.assert_close(imputed.cpu(), impute(image, is_known), rtol=0, atol=1e-4)
