"""Imputed pixels: against values worked by hand, against the equations solved exactly, and beside grad-cam's solver."""

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
STATED = 1e-3  # of the range of the values: the greatest distance from the exact solution


@pytest.fixture(autouse=True)
def _restart() -> None:
    GENERATOR.manual_seed(0)


def picture(height: int, width: int, channels: int = 3) -> Tensor:
    """Values from -1 to 1: a range of 2."""
    values = 2 * torch.rand(1, channels, height, width, generator=GENERATOR) - 1
    values[0, :, 0, 0], values[0, :, -1, -1] = -1, 1
    return values


def all_but(shape: tuple[int, int], *unknown: tuple[int, int]) -> Tensor:
    known = torch.ones(1, *shape, dtype=torch.bool)
    for place in unknown:
        known[0][place] = False
    return known


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((1, 1), (2 * (1 + 3 + 5 + 7) + (0 + 2 + 6 + 8)) / 12),  # inside: sixths and twelfths
        ((0, 0), (2 * (1 + 3) + 4) / 5),  # in the corner two direct neighbours and one diagonal: 5/12 in all
        ((0, 1), (2 * (0 + 2 + 4) + (3 + 5)) / 8),  # at the border three and two: 8/12
    ],
)
def test_one_pixel_is_the_weighted_mean_of_its_neighbours(place: tuple[int, int], expected: float) -> None:
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    actual = impute(image, all_but((3, 3), place), noise=0)
    assert actual[0, 0][place].item() == pytest.approx(expected, abs=1e-5)


def test_unknown_neighbours_are_found_together() -> None:
    row = torch.tensor([[[[3.0, 0, 0, 0, 7.0]]]])  # a single row has neighbours at its sides alone: a straight line
    actual = impute(row, torch.tensor([[[True, False, False, False, True]]]), noise=0)
    assert actual.flatten().tolist() == pytest.approx([3, 4, 5, 6, 7], abs=1e-3)


def test_two_unknown_pixels_by_hand() -> None:
    image = torch.zeros(1, 1, 3, 4)
    image[0, 0, 0, 0] = 12.0
    actual = impute(image, all_but((3, 4), (1, 1), (1, 2)), noise=0)
    # a = 12/12 + b/6, b = a/6
    assert actual[0, 0, 1, 1].item() == pytest.approx(36 / 35, abs=1e-3)
    assert actual[0, 0, 1, 2].item() == pytest.approx(6 / 35, abs=1e-3)


@pytest.mark.parametrize("size", [(7, 7), (12, 16), (1, 19), (23, 2), (31, 17), (2, 2)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_scattered_pixels_equal_the_exact_solution(size: tuple[int, int], share: float) -> None:
    image = picture(*size)
    known = torch.rand(1, *size, generator=GENERATOR) > share
    known[0, 0, 0] = True
    actual = impute(image, known, noise=0)[0]
    assert (actual - impute_exactly(image[0], known[0])).abs().max() < STATED * 2


def shapes(size: int) -> Iterator[tuple[str, Tensor]]:
    """Known pixels (H,W) that a solver may find hard."""
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
    image, known = picture(size, size), dict(shapes(size))[name]
    actual = impute(image, known[None], noise=0)[0]
    assert (actual - impute_exactly(image[0], known)).abs().max() < STATED * 2


@pytest.mark.parametrize("shape", [(1, 151), (151, 1)])
def test_a_long_line_takes_a_few_steps_too(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "MAX_STEPS", 15)
    straight = torch.linspace(-1, 1, 151).reshape(1, 1, *shape)
    known = torch.tensor([True, *[False] * 149, True]).reshape(1, *shape)
    assert (impute(straight * known, known, noise=0) - straight).abs().max() < STATED * 2


@pytest.mark.parametrize("name", ["make_edges, least", "make_random, most", "two sides", "large chessboard"])
def test_more_steps_lead_to_the_exact_solution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "TOLERANCE", 1e-12)
    image, known = picture(37, 37).double(), dict(shapes(37))[name]
    actual = impute(image, known[None], noise=0)[0]
    assert actual.dtype == torch.float64
    assert (actual - impute_exactly(image[0], known)).abs().max() < 1e-9


@pytest.fixture(scope="module")
def photograph(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> Tensor:
    return classifier.batch([gradcam.read_image(photo("chelsea.jpg"))])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_photograph_is_imputed_as_grad_cam_does(photograph: Tensor, share: float) -> None:
    road = pytest.importorskip("pytorch_grad_cam.metrics.road")
    for make in (make_random, make_edges):
        places = rank_pixels(make(photograph, 0))
        known = places >= share * places.numel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy, about how that package calls it
            expected = road.NoisyLinearImputer(noise=0)(photograph[0], known[0].float())
        actual = impute(photograph, known, noise=0)[0]
        assert (actual - expected).abs().max() < 1e-3  # a tenth of the noise that comes on top


def test_known_pixels_stay_and_unknown_ones_are_not_read() -> None:
    image = picture(13, 10)
    known = torch.rand(1, 13, 10, generator=GENERATOR) > 0.6
    hidden = image.masked_fill(~known[:, None], torch.nan)
    actual = impute(hidden, known, noise=0.5)
    kept = known[:, None].expand_as(image)
    assert torch.equal(actual[kept], image[kept])
    assert torch.equal(actual, impute(image, known, noise=0.5))
    assert actual.isfinite().all()


def test_nothing_is_imputed_where_everything_is_known() -> None:
    image = picture(6, 7)
    assert torch.equal(impute(image, torch.ones(1, 6, 7, dtype=torch.bool)), image)


def test_a_constant_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "MAX_STEPS", 0)
    image = torch.full((1, 2, 21, 21), 0.3)
    tensor = torch.zeros(1, 21, 21, dtype=torch.bool)
    tensor[0, 20, 3] = True
    torch.testing.assert_close(impute(image, tensor, noise=0), image)


def test_an_image_of_which_nothing_is_known_is_zero_and_leaves_the_others_alone() -> None:
    images = torch.cat([picture(9, 9), picture(9, 9)])
    known = torch.rand(2, 9, 9, generator=GENERATOR) > 0.5
    known[0] = False
    actual = impute(images, known, noise=0)
    assert torch.equal(actual[0], torch.zeros(3, 9, 9))
    assert torch.equal(actual[1:], impute(images[1:], known[1:], noise=0))


def test_an_image_becomes_what_it_becomes_alone() -> None:
    images = torch.cat([picture(40, 33) for _ in range(7)])
    known = torch.rand(7, 40, 33, generator=GENERATOR) > torch.linspace(0.05, 0.999, 7)[:, None, None]
    known[3, :30] = False
    known[:, 39, 32] = True
    actual = impute(images, known)
    for number in range(7):
        alone = impute(images[number : number + 1], known[number : number + 1])
        torch.testing.assert_close(actual[number], alone[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 255.0])
def test_units_of_any_size_are_as_exact(factor: float) -> None:
    image, known = picture(30, 30), dict(shapes(30))["make_random, most"][None]
    actual = impute(image * factor, known, noise=0) / factor
    torch.testing.assert_close(actual, impute(image, known, noise=0), rtol=0, atol=1e-4)


def test_the_noise_is_normal_and_of_unknown_pixels_alone() -> None:
    image = picture(64, 64)
    known = torch.rand(1, 64, 64, generator=GENERATOR) > 0.8
    added = impute(image, known, noise=0.05) - impute(image, known, noise=0)
    noise = added.movedim(1, -1)[~known]
    assert noise.std().item() == pytest.approx(0.05, rel=0.03)
    assert noise.mean().item() == pytest.approx(0, abs=0.002)
    assert (noise.abs() < 0.05).float().mean().item() == pytest.approx(0.683, abs=0.02)
    correlations = torch.corrcoef(noise.T)
    assert (correlations - torch.eye(3)).abs().max() < 0.05  # each channel has its own
    by_default = impute(image, known) - impute(image, known, noise=0)
    torch.testing.assert_close(by_default, added / 5, rtol=0, atol=1e-6)


def test_the_noise_is_the_generators_and_the_same_for_every_image() -> None:
    image, known = picture(9, 8).expand(2, -1, -1, -1), torch.zeros(2, 9, 8, dtype=torch.bool)
    before = torch.get_rng_state()
    one = impute(image, known, generator=torch.Generator().manual_seed(3))
    assert torch.equal(one, impute(image, known, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(one[0], one[1])
    assert not torch.equal(one, impute(image, known, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(impute(image, known), impute(image, known))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    image, known = picture(20, 20).to(dtype), dict(shapes(20))["make_random, most"][None]
    actual = impute(image, known, noise=0)
    assert actual.dtype == dtype
    assert torch.equal(actual, impute(image.float(), known, noise=0).to(dtype))


def test_no_gradient_is_recorded_and_the_image_is_left_alone() -> None:
    image = picture(8, 8).requires_grad_()
    before = image.detach().clone()
    assert not impute(image, dict(shapes(8))["one row"][None]).requires_grad
    assert torch.equal(image, before)


IMAGE, KNOWN = torch.zeros(1, 3, 4, 5), torch.ones(1, 4, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("images", "known", "options", "kind", "message"),
    [
        (IMAGE[0], KNOWN, {}, ImageError, r"images are torch.float32 \(3, 4, 5\), expected a floating-point tensor"),
        (IMAGE.int(), KNOWN, {}, ImageError, "images are torch.int32"),
        ("cat", KNOWN, {}, ImageError, "images are 'cat'"),
        (IMAGE, KNOWN.float(), {}, ImageError, r"known is torch.float32 \(1, 4, 5\), expected torch.bool \(1, 4, 5\)"),
        (IMAGE, KNOWN[:, :3], {}, ImageError, r"known is torch.bool \(1, 3, 5\), expected torch.bool \(1, 4, 5\)"),
        (IMAGE, KNOWN.numpy(), {}, ImageError, "known is array"),
        (IMAGE, KNOWN, {"noise": -0.1}, GradcamError, "noise is -0.1, expected a standard deviation"),
        (IMAGE, KNOWN, {"noise": float("nan")}, GradcamError, "noise is nan"),
        (IMAGE, KNOWN, {"noise": True}, GradcamError, "noise is True"),
        (IMAGE, KNOWN, {"noise": "much"}, GradcamError, "noise is 'much'"),
    ],
)
def test_what_cannot_be_imputed(images: Any, known: Any, options: dict[str, Any], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        impute(images, known, **options)


@pytest.mark.cuda
def test_cpu_and_cuda_agree() -> None:
    image, known = picture(64, 64), dict(shapes(64))["make_random, most"][None]
    actual = impute(image.cuda(), known)
    assert actual.is_cuda
    torch.testing.assert_close(actual.cpu(), impute(image, known), rtol=0, atol=1e-4)
