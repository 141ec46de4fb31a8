"""Test the layouts that users pass: grids, names, and functions that select and rearrange values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import LayerError
from tests.cam.test_perturbation import SMALL_RUNS, Transformer
from tests.helpers import FunctionModule

IMAGES = torch.randn(3, 3, 12, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
GRID = (3, 4)


def transformer(*, tokens_first: bool = False) -> nn.Module:
    return Transformer(tokens_first=tokens_first).double().eval()


def patches(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].reshape(len(tokens), *GRID, -1).permute(0, 3, 1, 2)


METHODS = [name for name, method in gradcam.METHODS.items() if method.place == "layer"]


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_function_and_a_grid_give_the_maps_of_the_automatic_layout(name: str, *, tokens_first: bool) -> None:
    method = gradcam.METHODS[name].using(**SMALL_RUNS.get(name, {}))
    model = transformer(tokens_first=tokens_first)

    def pick(tensor: Tensor) -> Tensor:
        return patches(tensor.transpose(0, 1) if tokens_first else tensor)

    expected, by_function, by_grid = (
        gradcam.explain(model, IMAGES, "first", method=method, target=[[0, 1]] * 3, reshape=reshape).maps
        for reshape in (None, pick, GRID)
    )
    assert torch.equal(by_grid, expected)
    if name == "ablationcam":  # Without a function, Ablation-CAM also ablates the channel of the class token.
        assert not torch.allclose(by_function, expected)
    else:
        torch.testing.assert_close(by_function, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_ablationcam_does_not_ablate_values_that_a_function_drops() -> None:
    model = transformer()
    explanation = gradcam.explain(model, IMAGES, "first", method="ablationcam", target=1, reshape=patches)
    tokens = model.first(torch.cat([model.token.expand(3, -1, -1), model.stem(IMAGES).flatten(2).mT], 1)).detach()

    def score(tokens: Tensor) -> Tensor:
        return model.head(model.norm(model.second(tokens)[:, 0]))[:, 1].detach()

    plain, weights = score(tokens), torch.zeros(3, 8, dtype=torch.float64)
    for channel in range(8):
        changed = tokens.clone()
        changed[:, 1:, channel] = 0
        weights[:, channel] = (plain - score(changed)) / plain.abs()
    expected = torch.einsum("nc,nchw->nhw", weights, patches(tokens)).relu()[:, None]
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-4, atol=1e-6)


class Windows(nn.Module):
    """A model that stacks windows of 2 x 2 cells in the batch axis, as Swin does; it pads a height of 3 to 4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.mix, self.head = nn.Conv2d(3, 6, 4, stride=4), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = F.pad(self.stem(images), (0, 0, 0, 1))
        x = x.unflatten(2, (2, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2)
        return self.head(join_windows(self.mix(x).tanh()).square().mean((2, 3)))


def join_windows(windows: Tensor) -> Tensor:
    """Join windows: (N*4,2,2,C) to (N,C,3,4), without the row of padding."""
    return windows.unflatten(0, (-1, 2, 2)).permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)[:, :, :3]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", ["gradcam", "hirescam", "ablationcam", "reciprocam", "scorecam"])
def test_a_function_joins_windows_and_cuts_their_padding_off(name: str, images: int) -> None:
    model = Windows().double().eval()

    class Joined(Windows):
        def forward(self, images: Tensor) -> Tensor:
            x = self.mix(F.pad(self.stem(images), (0, 0, 0, 1)).movedim(1, -1)).movedim(-1, 1)
            return self.head(self.seen(x[:, :, :3]).tanh().square().mean((2, 3)))

    joined = Joined().double().eval()
    joined.seen = nn.Identity()
    explanation = gradcam.explain(model, IMAGES[:images], "mix", method=name, target=2, reshape=join_windows)
    expected = gradcam.explain(joined, IMAGES[:images], "seen", method=name, target=2)
    assert explanation.maps.shape == (images, 1, 3, 4)
    torch.testing.assert_close(explanation.maps, expected.maps, rtol=1e-4, atol=1e-5)
    if images > 1:
        with pytest.raises(LayerError, match=r"its first axis is not the batch"):
            gradcam.explain(model, IMAGES, "mix")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:, 1:].reshape(3, 13, 13, -1), r"\(3, 13, 8\).*raised RuntimeError: shape"),
        (lambda x: x[:, 1:].mT, r"returned \(3, 8, 12\), expected \(3, C, h, w\)"),
        (lambda x: patches(x)[:2], r"returned \(2, 8, 3, 4\), expected \(3, C, h, w\)"),
        (lambda x: patches(x)[0], r"returned \(8, 3, 4\), expected"),
        (lambda x: patches(x)[..., :1, :1], r"returned \(3, 8, 1, 1\), expected"),
        (lambda x: "tokens", r"returned 'tokens', expected a tensor"),
        (lambda x: patches(x) * 2, "only pick and move values"),
        (lambda x: patches(x) + 1, "only pick and move values"),
        (lambda x: patches(x).relu(), "only pick and move values"),
        (lambda x: patches(x - x.mean(1, keepdim=True)), "only pick and move values"),
        (lambda x: F.max_pool2d(patches(x), 2), "only pick and move values"),
        (lambda x: patches(x).sort(1, descending=True).values, "only pick and move values"),
        (lambda x: F.pad(patches(x), (0, 1)), "only pick and move values"),
        (lambda x: patches(x).clamp(max=1e6).round(), "only pick and move values"),
        (lambda x: patches(x) / 0, "only pick and move values"),
        (lambda x: patches(x).repeat_interleave(2, 2), "more than once"),
        (lambda x: patches(x).flip(0), r"mixed the \d+ images"),
        (lambda x: patches(x).transpose(0, 2).reshape(3, 8, 3, 4), r"mixed the \d+ images"),
    ],
)
def test_unusable_functions_are_rejected(function: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(LayerError, match=message) as error:
        gradcam.explain(transformer(), IMAGES, "first", target=1, reshape=function)
    assert "'first'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_function_sees_the_layers_tensor_and_leaves_it_alone() -> None:
    tensors = []

    def pick(tensor: Tensor) -> Tensor:
        tensors.append((tuple(tensor.shape), tensor.requires_grad))
        grid = patches(tensor).clone()
        tensor.zero_()
        return grid

    explanation = gradcam.explain(transformer(), IMAGES, "first", target=1, reshape=pick)
    assert set(tensors) == {((3, 13, 8), False)}
    torch.testing.assert_close(explanation.maps, gradcam.explain(transformer(), IMAGES, "first", target=1).maps)


@pytest.mark.parametrize(
    "reshape",
    ["tokens last", "14x14", 14, (14,), (14, 0), (14, -1), (14, 14.0), (True, 14), (1, 1), (1, 2, 3, 4), [], {}, 1.5],
    ids=repr,
)
def test_an_unusable_reshape_is_rejected(reshape: Any) -> None:
    with pytest.raises(LayerError, match=r"reshape is .*, expected the token grid \(h, w\)"):
        gradcam.explain(transformer(), IMAGES, "first", reshape=reshape)


def test_a_grid_that_does_not_fit_is_rejected_with_the_shape_and_a_suggestion() -> None:
    with pytest.raises(LayerError, match=r"\(3, 13, 8\) for 3 image.* 12 x 16, but reshape=\(5, 4\).*reshape=\(3, 4\)"):
        gradcam.explain(transformer(), IMAGES, "first", reshape=(5, 4))
    with pytest.raises(LayerError, match=r"reshape='channels last' does not fit"):
        gradcam.explain(transformer(), IMAGES, "first", reshape="channels last")
    with pytest.raises(
        LayerError, match=r"\(3, 8, 3, 4\).*reshape=\(3, 4\) does not fit .*: pass reshape='channels first'"
    ):
        gradcam.explain(transformer(), IMAGES, "stem", reshape=[3, 4])


def test_the_error_for_an_uncertain_layout_suggests_a_reshape() -> None:
    model = FunctionModule(
        lambda module, images: module.head(module.row(module.stem(images)).tanh().mean(2)),
        stem=nn.Conv2d(3, 16, 8, stride=8), row=nn.Flatten(2), head=nn.Linear(16, 5),
    ).double()  # fmt: skip
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with pytest.raises(LayerError) as error:
        gradcam.explain(model, images, "row")
    assert str(error.value) == (
        "Layer 'row' returns (2, 16, 4) for images of 16 x 16, but the spatial grid of this output is ambiguous: pass the "
        "grid of its 16 tokens, reshape=(h, w), such as reshape=(4, 4), or a function that returns (N, C, h, w). Up to 8 "
        "extra tokens may precede the grid."
    )
    assert gradcam.explain(model, images).layer == "stem"
    expected = gradcam.explain(model, images, "stem", target=1)
    explanation = gradcam.explain(model, images, "row", target=1, reshape=lambda x: x.unflatten(2, (2, 2)))
    torch.testing.assert_close(explanation.maps, expected.maps)


def test_channels_last_may_be_given_for_an_ambiguous_shape() -> None:
    def forward(module: Any, images: Tensor) -> Tensor:
        return module.head(module.block(module.stem(images).movedim(1, -1)).square().mean((1, 2)))

    parts = {"stem": nn.Conv2d(3, 8, 2, stride=2), "block": nn.Sequential(nn.Linear(8, 8), nn.Tanh())}
    model = FunctionModule(forward, **parts, head=nn.Linear(8, 5)).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with pytest.raises(LayerError, match=r"\(2, 8, 8, 8\).*pass reshape='channels first' or 'channels last'"):
        gradcam.explain(model, images, "block")
    explanation = gradcam.explain(model, images, "block", target=1, reshape="channels-last")
    values = model.block(model.stem(images).movedim(1, -1)).detach()
    weights = (2 * values * model.head.weight[1] / 64).mean((1, 2)).detach()
    expected = torch.einsum("nc,nhwc->nhw", weights, values).relu()[:, None]
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-5, atol=1e-8)


def test_the_automatic_layer_is_one_that_a_given_grid_fits() -> None:
    model = transformer()
    assert gradcam.explain(model, IMAGES, target=1, reshape=GRID).layer == "second.norm1"
    assert gradcam.explain(model, IMAGES, target=1, reshape="channels first").layer == "stem"
    with pytest.raises(LayerError, match=r"spatial grid that fits reshape=\(9, 9\) was found .* Name the layer"):
        gradcam.explain(model, IMAGES, reshape=(9, 9))
    with pytest.raises(LayerError, match="fits the tensor of one layer: also pass the name"):
        gradcam.explain(model, IMAGES, reshape=patches)


def test_views_of_the_images_and_several_layers_take_the_same_function() -> None:
    model = transformer()
    methods = ["gradcam", "smoothgradcam-pp"]
    options: dict[str, Any] = {"layers": ["first", "second.norm1"], "methods": methods, "target": 2}
    explanations = gradcam.compare(model, IMAGES, **options, augmentation="flip", reshape=patches)
    expected = gradcam.compare(model, IMAGES, **options, augmentation="flip")
    assert explanations.keys() == expected.keys()
    for key, explanation in explanations.items():
        torch.testing.assert_close(explanation.maps, expected[key].maps)


def test_guided_gradcam_takes_a_reshape() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    images = torch.randn(2, 3, 6, 8)
    guided = gradcam.attributions.guided_gradcam
    attribution = guided(model, images, "2", target=1, reshape=lambda x: x.unflatten(2, (6, 8)))
    expected = guided(model, images, "1", target=1)
    assert expected.values.any()
    torch.testing.assert_close(attribution.values, expected.values)


def test_a_classifier_passes_the_reshape_on(classifier: gradcam.Classifier, photo: Callable[[str], Any]) -> None:
    picture = gradcam.read_image(photo("koala.webp"))
    plain = classifier.explain(picture)
    with pytest.warns(gradcam.GradcamWarning, match="'layer4' may be misplaced"):
        turned = classifier.explain(picture, reshape=lambda x: x.mT)
    torch.testing.assert_close(turned.maps, plain.maps.mT)
    fine = classifier.attribute(picture, reshape="channels first")
    torch.testing.assert_close(fine.values, classifier.attribute(picture).values)
    with pytest.raises(LayerError, match=r"does not fit"):
        classifier.compare(picture, layers=[classifier.layer], methods=["gradcam"], reshape=(7, 7))
    with pytest.raises(LayerError, match="Leave out reshape="):
        classifier.attribute(picture, "smoothgrad", reshape="channels first")
