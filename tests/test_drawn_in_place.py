"""Test Grad-CAM at a convolution whose output a ReLU overwrites in place, beside other libraries and plain autograd."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import gradcam
from tests import drawn
from tests.drawn import peers
from tests.drawn.heads import list_properties
from tests.drawn.pictures import draw_scenes, to_images

SEED = 90211  # training uses another seed


@dataclass(frozen=True)
class Case:
    """A model with its images, their classes, and the exact maps, scaled to a maximum of 1."""

    model: nn.Module
    images: Tensor
    classes: Tensor
    exact: Tensor

    def find_deviations(self, explain: peers.Explain) -> Tensor:
        maps = peers.scale_to_one(explain(self.model, self.images, self.classes).float())
        return (maps - self.exact).abs().amax((1, 2))


@pytest.fixture(scope="module")
def case() -> Case:
    model, images = drawn.load("vgg11"), to_images(list(draw_scenes(SEED, 8)))
    classes, layer = model(images).argmax(1), peers.find_last_convolution(model)
    explanation = gradcam.explain(model, images, layer, method="gradcam", target=classes.tolist())
    return Case(model, images, classes, peers.scale_to_one(explanation.maps[:, 0]))


def test_the_model_is_a_vgg11_whose_relus_work_in_place(case: Case) -> None:
    modules = list(case.model.features)
    followers = [after for before, after in itertools.pairwise(modules) if isinstance(before, nn.Conv2d)]
    assert len(followers) == 8
    assert all(isinstance(module, nn.ReLU) and module.inplace for module in followers)


def test_the_model_knows_more_of_shapes_and_colours_than_their_frequency(case: Case) -> None:
    scenes = list(draw_scenes(SEED, 100))
    with torch.no_grad():
        scores = case.model(to_images(scenes))
    contents = list_properties(scenes) > 0
    frequent = torch.maximum(contents.float().mean(0), 1 - contents.float().mean(0)).mean()
    assert ((scores > 0) == contents).float().mean() >= frequent + 0.03


def test_the_map_is_that_of_plain_autograd(case: Case) -> None:
    assert case.find_deviations(peers.explain_by_hand).max() < 1e-5


def test_captum_agrees(case: Case) -> None:
    pytest.importorskip("captum")
    assert case.find_deviations(peers.explain_with_captum).max() < 1e-4


@pytest.mark.parametrize(("name", "package"), [("pytorch-grad-cam", "pytorch_grad_cam"), ("torchcam", "torchcam")])
def test_libraries_that_keep_a_reference_deviate(name: str, package: str, case: Case) -> None:
    pytest.importorskip(package)
    assert (case.find_deviations(peers.PEERS[name]) > 0.01).float().mean() >= 0.75


@pytest.mark.parametrize(("name", "package"), [("pytorch-grad-cam", "pytorch_grad_cam"), ("torchcam", "torchcam")])
def test_the_deviation_is_due_to_the_relu_in_place(name: str, package: str, case: Case) -> None:
    pytest.importorskip(package)
    model = drawn.load("vgg11")
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    assert replace(case, model=model).find_deviations(peers.PEERS[name]).max() < 1e-4
