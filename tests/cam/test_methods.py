"""Compare the formula of each method with a second implementation in `method_oracles`; check the method table."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_method, find_methods
from gradcam.errors import GradcamError, LayerError
from tests import method_oracles

GRADIENTS = [name for name, method in METHODS.items() if method.needs == ("activations", "gradients")]
ACTIVATIONS = [name for name, method in METHODS.items() if method.needs == ("activations",)]
ORACLES: dict[str, Any] = {
    "gradcam": method_oracles.gradcam, "finercam": method_oracles.gradcam, "gradcam-pp": method_oracles.gradcam_pp,
    "xgradcam": method_oracles.xgradcam, "hirescam": method_oracles.hirescam,
    "elementwise-gradcam": method_oracles.elementwise_gradcam, "layercam": method_oracles.layercam,
    "eigengradcam": method_oracles.eigengradcam, "eigencam": method_oracles.eigencam,
    "kpcacam": method_oracles.kpcacam, "fem": method_oracles.fem,
}  # fmt: skip
GRIDS = [(4, 5), (2, 3, 4), (1, 7)]


def draw(grid: tuple[int, ...], channels: int) -> tuple[Tensor, Tensor]:
    activations = torch.randn(2, channels, *grid, dtype=torch.float64)
    activations[:, 0] = activations[:, 0].relu()
    gradients = torch.randn(2, 3, channels, *grid, dtype=torch.float64)
    activations[0, 1], gradients[1, 2, 0] = 0, 0  # a channel that is zero, and one without gradient
    return activations, gradients


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_and_activations_give_what_the_paper_says(name: str, channels: int, grid: tuple[int, ...]) -> None:
    activations, gradients = draw(grid, channels)
    maps = METHODS[name].compute(activations, gradients)
    assert maps.shape == (2, 3, *grid)
    for image, k in np.ndindex(2, 3):
        expected = ORACLES[name](activations[image].numpy(), gradients[image, k].numpy())
        np.testing.assert_allclose(maps[image, k].numpy(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_give_what_the_paper_says(name: str, channels: int, grid: tuple[int, ...]) -> None:
    activations, _ = draw(grid, channels)
    maps = METHODS[name].compute(activations)
    assert maps.shape == (2, *grid)
    for image in range(2):
        np.testing.assert_allclose(maps[image].numpy(), ORACLES[name](activations[image].numpy()), rtol=1e-7, atol=1e-9)


def test_every_method_of_one_pass_has_an_oracle() -> None:
    assert {*GRADIENTS, *ACTIVATIONS} == ORACLES.keys()
    assert METHODS["shapleycam"].needs == ("activations", "gradients", "curvatures")


def test_gradcam_pp_equals_the_derivatives_of_the_exponential() -> None:
    # Equation 10, with the derivatives of Y = exp(S) by autograd, for a score S that is linear in A.
    weights = torch.randn(2, 3, 4, dtype=torch.float64)
    activations = torch.rand(2, 3, 4, dtype=torch.float64)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for channel in range(2):
        weight = 0.0
        for cell in np.ndindex(3, 4):
            value = activations[(channel, *cell)].clone().requires_grad_()
            y = (weights[(channel, *cell)] * value + 0.3).exp()
            (first,) = torch.autograd.grad(y, value, create_graph=True)
            (second,) = torch.autograd.grad(first, value, create_graph=True)
            (third,) = torch.autograd.grad(second, value)
            alpha = second / (2 * second + activations[channel].sum() * third)
            weight += (alpha * first.relu() / y).item()  # dropping the common factor exp(S)
        expected += weight * activations[channel]
    heatmap = METHODS["gradcam-pp"].compute(activations[None], weights[None, None])[0, 0]
    torch.testing.assert_close(heatmap, expected)


def test_shapleycam_by_hand() -> None:
    activations = torch.tensor([[[[1.0, 2.0]]]])
    gradients, curvatures = torch.tensor([[[[[2.0, 4.0]]]]]), torch.tensor([[[[[4.0, 0.0]]]]])  # means 3 and 2
    assert METHODS["shapleycam"].compute(activations, gradients, curvatures).tolist() == [[[[2.0, 4.0]]]]


@pytest.mark.parametrize("name", ["eigencam", "kpcacam"])
def test_a_component_points_where_the_activations_are(name: str) -> None:
    activations = torch.full((1, 6, 5, 5), 0.1)
    activations[0, :, 1, 3] = torch.arange(1.0, 7)
    component = METHODS[name].compute(activations)[0]
    assert divmod(int(component.argmax()), 5) == (1, 3)
    opposite = METHODS[name].compute(-activations)[0]
    torch.testing.assert_close(opposite, component)


def test_a_component_by_hand() -> None:
    activations = torch.tensor([[[[3.0, -1.0]], [[-3.0, 1.0]]]])  # one direction, (1, -1) / sqrt(2)
    torch.testing.assert_close(METHODS["eigencam"].compute(activations), torch.tensor([[[3.0, -1.0]]]) * 2**0.5)


def test_evidence_against_the_class_stays_negative_in_eigengradcam() -> None:
    activations, gradients = torch.rand(1, 3, 4, 4) + 0.1, -torch.rand(1, 1, 3, 4, 4) - 0.1
    assert METHODS["eigengradcam"].compute(activations, gradients).max() < 0
    assert METHODS["eigengradcam"].compute(activations, -gradients).min() > 0


def test_eigencam_behind_a_relu_is_positive_everywhere() -> None:
    assert METHODS["eigencam"].compute(torch.rand(3, 50, 6, 6)).min() > 0


def test_kpcacam_refuses_a_large_grid() -> None:
    with pytest.raises(LayerError, match="1056 cells, and KPCA-CAM takes at most 1024"):
        METHODS["kpcacam"].compute(torch.rand(1, 2, 32, 33))


def test_the_table_is_keyed_by_name_and_cites_its_papers() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert method.cost
        assert method.paper[-4:].isdigit()
        entry = method.source.entry
        assert entry.startswith("@")
        assert entry.count("{") == entry.count("}")
        assert str(method.source.year) in entry
    assert METHODS["gradcam"].paper.startswith("Selvaraju et al., Grad-CAM: Visual Explanations")
    assert METHODS["gradcam"].paper.endswith("ICCV 2017")


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("grad-camera", "Nearest: 'gradcam'"),
        ("zzzzzz", "`gradcam methods` lists them"),
        (3, "`gradcam methods` lists them"),
        (["gradcam"], "`gradcam methods` lists them"),
    ],
)
def test_an_unknown_name_offers_what_is_near_or_where_to_look(name: object, offer: str) -> None:
    with pytest.raises(GradcamError) as caught:
        find_method(name)  # type: ignore[arg-type]
    assert offer in str(caught.value)
    assert str(caught.value).count("'") <= 2 + 2 * 5


@pytest.mark.parametrize("name", ["chefer", "Chefer", "gradient-rollout", "GradientRollout"])
def test_a_method_is_found_by_its_aliases(name: str) -> None:
    assert find_method(name) is METHODS["gradient-rollout"]


@pytest.mark.parametrize("name", ["gradcam++", "Grad-CAM++", "GRADCAM-PP", METHODS["gradcam-pp"]])
def test_names_are_understood(name: str | Method) -> None:
    assert find_method(name) is METHODS["gradcam-pp"]


@pytest.mark.parametrize("methods", ["gradcam", METHODS["gradcam"], [], None])
def test_several_methods_are_a_list(methods: object) -> None:
    with pytest.raises(GradcamError, match="expected a list of at least one name"):
        find_methods(methods)  # type: ignore[arg-type]


def test_an_unknown_option() -> None:
    with pytest.raises(GradcamError, match="gradcam has no option 'masks'; its options are: none"):
        METHODS["gradcam"].using(masks=3)


def test_the_table_is_read_without_torch() -> None:
    code = "import sys; from gradcam import METHODS; assert len(METHODS) > 11; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_points_that_are_all_alike_have_no_component() -> None:
    assert not METHODS["kpcacam"].compute(torch.full((1, 8, 7, 7), 0.7)).any()
    assert not METHODS["kpcacam"].compute(torch.zeros(1, 8, 7, 7)).any()


def test_where_the_denominator_of_gradcam_pp_is_zero() -> None:
    activations = torch.tensor([[[[-1.0, -1.0]], [[1.0, 1.0]]]])  # sums -2 and 2
    # At the first place of channel 0, the denominator 2 - 2 g is zero.
    gradients = torch.tensor([[[[[1.0, 3.0]], [[1.0, 0.0]]]]])
    # Channel 0: 0 where the denominator is zero, and 3 / (2 - 6). Channel 1: 1 / (2 + 2).
    expected = -0.75 * -1 + 0.25 * 1
    assert METHODS["gradcam-pp"].compute(activations, gradients).tolist() == [[[[expected, expected]]]]
