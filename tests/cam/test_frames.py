"""Explain images that fill a part of a canvas: lists of several sizes, resized or padded inside the model or before."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import ImageError
from gradcam.hooks.containers import Batch, to_batch
from tests.detectors import lay, make_detector, make_pictures, run, sample
from tests.helpers import FunctionModule, tiny_model

VIEWS = ["none", "flip"]


class PaddedListModel(nn.Module):
    """A model that pads a list of images of different sizes to one canvas, each in its top-left corner."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.features = nn.Conv2d(1, 3, 3, padding=1, dtype=torch.float64)

    def forward(self, images: list[Tensor]) -> Tensor:
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        canvas = [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
        scores: Tensor = self.features(torch.stack(canvas)).tanh()
        return scores


def make(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(1, *size, generator=generator, dtype=torch.float64) for size in sizes]


def at(row: int, column: int) -> Any:
    return lambda output: output[:, :, row, column].sum(1)


def test_images_of_one_size_fill_the_canvas() -> None:
    images, model = make((8, 10), (8, 10)), PaddedListModel()
    explanation = gradcam.explain(model, images, "features", method="gradcam", target=lambda item: item.sum((1, 2, 3)))
    activations = model.features(torch.stack(images)).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(activations.tanh().sum(), activations)
    expected = (gradients.mean((2, 3), keepdim=True) * activations).sum(1).relu().detach()
    torch.testing.assert_close(explanation.maps[:, 0], expected.float())


@pytest.mark.parametrize("augmentation", VIEWS)
def test_each_image_has_its_own_map(augmentation: str) -> None:
    """Explain a canvas position that is inside the first image and outside the second."""
    images = make((8, 10), (8, 5))
    options = {"method": "hirescam", "target": at(3, 2), "evidence": "signed", "augmentation": augmentation}
    explanation = gradcam.explain(PaddedListModel(), images, "features", **options)
    assert [tuple(heatmap.shape) for heatmap in explanation.heatmaps] == [(1, 8, 10), (1, 8, 5)]
    # In a mirrored image, canvas column 2 is column 9 - 2 or 4 - 2.
    expected = {"none": ([2], [2]), "flip": ([2, 7], [2])}[augmentation]
    for heatmap, columns in zip(explanation.heatmaps, expected):
        places = (heatmap[0].abs() > 0.05).nonzero().tolist()
        peak = [divmod(int(k), heatmap.shape[2]) for k in heatmap[0].abs().flatten().topk(len(columns)).indices]
        assert sorted(column for _, column in peak) == columns
        assert {row for row, _ in places} <= {2, 3, 4}


def test_a_place_outside_an_image_is_not_drawn_in_it() -> None:
    images = make((8, 10), (8, 5))
    options = {"method": "hirescam", "target": at(3, 8), "evidence": "signed"}
    explanation = gradcam.explain(PaddedListModel(), images, "features", **options)
    assert explanation.maps[0].any()
    assert not explanation.heatmaps[1].any()


def two_scores(output: Any) -> Tensor:
    return torch.stack([item["scores"][[0, 3]] for item in output])


@pytest.mark.parametrize("kind", ["fasterrcnn", "fcos", "ssdlite"])
@pytest.mark.parametrize("augmentation", VIEWS)
def test_maps_of_a_model_that_resizes_and_pads(kind: str, augmentation: str) -> None:
    """Compare with a slow mean of raw maps, each cropped to its view's part of the canvas and mirrored back."""
    model, pictures = make_detector(kind), make_pictures()
    inputs = pictures if augmentation == "none" else [*pictures, *(image.flip(-1) for image in pictures)]
    output, record = run(model, inputs)
    images, _ = record.outputs["transform"]
    canvas, sizes, levels = images.tensors.shape[2:], images.image_sizes, list(record.levels.values())
    options = {"method": "hirescam", "target": two_scores, "evidence": "positive", "augmentation": augmentation}
    explanation = gradcam.explain(model, pictures, "backbone", **options)
    for i, image in enumerate(pictures):
        for k in (0, 1):
            views = [
                [None if g is None else (g * a)[n].sum(0).detach().numpy() for g, a in zip(gradients, levels)]
                for n in range(i, len(inputs), len(pictures))
                for gradients in [
                    torch.autograd.grad(two_scores(output)[n, k], levels, retain_graph=True, allow_unused=True)
                ]
            ]
            finest = next(tuple(raw.shape) for raw in views[0] if raw is not None)
            total = np.zeros(1)
            for of_level in zip(*views):
                if of_level[0] is not None:
                    upright = [upright_part(raw, n, sizes[i], canvas, sizes) for n, raw in enumerate(of_level)]
                    mean = np.maximum(sum(upright) / len(upright), 0)
                    total = total + sample(mean, cells(finest, canvas, sizes), (0, 0), mean.shape)
            assert total.any()
            np.testing.assert_allclose(explanation.maps[i, k].numpy(), total, rtol=0, atol=1e-6 * total.max())
            heatmap = sample(total, image.shape[1:], (0, 0), total.shape)
            np.testing.assert_allclose(explanation.heatmaps[i][k].numpy(), heatmap / heatmap.max(), rtol=0, atol=1e-6)


def cells(grid: Any, canvas: Any, sizes: Any) -> list[int]:
    return [int(np.ceil(max(size[a] for size in sizes) * grid[a] / canvas[a] - 1e-6)) for a in (0, 1)]


def upright_part(raw: np.ndarray, view: int, size: Any, canvas: Any, sizes: Any) -> np.ndarray:
    """Crop a raw map of either sign from the canvas to one image; mirror it back for the second view."""
    positive, negative = (lay(sign * raw, size, canvas, sizes, raw.shape) for sign in (1, -1))
    part = positive - negative
    return part[:, ::-1] if view else part


def test_a_list_is_for_models_that_take_one() -> None:
    with pytest.raises(ImageError, match=r"list of 2 tensors \(3, 16, 16\), expected one tensor \(N,C,H,W\)"):
        gradcam.explain(tiny_model(), [torch.rand(3, 16, 16)] * 2)


@pytest.mark.parametrize(
    "images",
    [
        [torch.rand(3, 8, 8), torch.rand(1, 8, 8)],
        [torch.rand(3, 8, 8), torch.rand(3, 8, 8, dtype=torch.float64)],
        [torch.rand(3, 8, 8), torch.rand(3, 0, 8)],
    ],
)
def test_images_of_several_kinds(images: list[Tensor]) -> None:
    with pytest.raises(ImageError, match=r"expected \(C,H,W\) with equal channels, dtype and device"):
        gradcam.explain(make_detector("ssd"), images, target=two_scores)


def make_letterboxed_batch(window: tuple[int, int, int, int]) -> Batch:
    images = torch.zeros(1, 1, 12, 16, dtype=torch.float64)
    top, first_column, height, width = window
    images[:, :, top : top + height, first_column : first_column + width] = 1.0
    return replace(to_batch(images), windows=(window,))


@pytest.mark.parametrize("augmentation", VIEWS)
def test_images_letterboxed_into_a_window(augmentation: str) -> None:
    """Explain a canvas position of a letterboxed image, mirrored or not.

    The mirrored image begins at canvas column 4, so canvas column 5 is its second-to-last column.
    """
    model = FunctionModule(lambda module, x: (module.features(x) * 1.0).sum(1), features=nn.Identity())
    options = {"method": "hirescam", "target": lambda item: item[:, 4, 5], "augmentation": augmentation}
    explanation = gradcam.explain(model, make_letterboxed_batch((2, 2, 8, 10)), "features", **options)
    assert tuple(explanation.heatmaps.shape) == (1, 1, 8, 10)
    expected = [[2, 3]] if augmentation == "none" else [[2, 3], [2, 8]]
    assert explanation.heatmaps[0, 0].gt(0.5).nonzero().tolist() == expected
