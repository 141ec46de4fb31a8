import pytest
import torch

from gradcam.errors import GradcamError
from gradcam.methods import METHODS, find_method
from tests import oracles


@pytest.mark.parametrize("grid", [(4, 5), (2, 3, 4)])
def test_gradcam_equals_the_loop_from_the_paper(grid: tuple[int, ...]) -> None:
    activations = torch.randn(2, 3, *grid, dtype=torch.float64)
    gradients = torch.randn(2, 4, 3, *grid, dtype=torch.float64)
    maps = METHODS["gradcam"].compute(activations, gradients)
    for image in range(2):
        for k in range(4):
            expected = oracles.gradcam_map(activations[image], gradients[image, k])
            torch.testing.assert_close(maps[image, k].relu(), expected, rtol=1e-12, atol=1e-12)


def test_gradcam_by_hand() -> None:
    activations = torch.tensor([[[[1.0, 2.0]], [[3.0, -1.0]]]])
    gradients = torch.tensor([[[[[2.0, 4.0]], [[-1.0, 1.0]]]]])  # means 3 and 0
    assert METHODS["gradcam"].compute(activations, gradients).tolist() == [[[[3.0, 6.0]]]]


def test_the_table_is_keyed_by_name_and_cites_its_papers() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert any(character.isdigit() for character in method.paper)


@pytest.mark.parametrize("name", ["grad-cam", "nothing", 3])
def test_an_unknown_name_offers_what_there_is(name: object) -> None:
    with pytest.raises(GradcamError, match="'gradcam'"):
        find_method(name)  # type: ignore[arg-type]
