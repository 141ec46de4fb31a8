"""Test methods on whole networks: identities between them, second derivatives, contrasts, evidence, shared passes."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, GradcamWarning, LayerError, ModelError, TargetError
from gradcam.hooks import autograd as gradients
from gradcam.targets import ClassTarget
from tests.helpers import TINY, FunctionModule, assert_same, tiny_model, traces

ONE_PASS = [name for name, method in METHODS.items() if method.needs]
SIGNED = [name for name in ONE_PASS if METHODS[name].is_signed]
CLASS_AGNOSTIC = {name for name in ONE_PASS if METHODS[name].needs == ("activations",)}


class NonlinearModel(nn.Module):
    """A network that is strongly non-linear after its features."""

    def __init__(self, volumes: bool = False) -> None:
        super().__init__()
        self.features: nn.Module = nn.Conv3d(3, 4, 3, 2) if volumes else nn.Conv2d(3, 4, 3, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        return self.head(torch.tanh(features.flatten(2).square()).mean(2)).sinh()


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval().double()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_all_layers_and_methods_come_from_one_forward_pass() -> None:
    model = tiny_model().eval()
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    explanations = gradcam.compare(model, TINY, layers=["0", model[3]], methods=ONE_PASS, target=[[1, 2]] * 3)
    assert len(runs) == 1 + len(TINY)  # the first call also runs each image alone
    assert list(explanations) == [(layer, name) for layer in ("0", "3") for name in ONE_PASS]
    for (layer, name), item in explanations.items():
        alone = gradcam.explain(model, TINY, layer, method=name, target=[[1, 2]] * 3)
        torch.testing.assert_close(item.maps, alone.maps)
        torch.testing.assert_close(item.heatmaps, alone.heatmaps)
        assert (item.layer, item.method, item.evidence) == (layer, name, "positive")
        assert torch.equal(item.scores, alone.scores)


def test_gradients_of_all_methods_come_from_one_backward_pass() -> None:
    model = tiny_model().eval()
    passes = []
    model[8].register_full_backward_hook(lambda *_: passes.append(1))
    methods = [name for name in ONE_PASS if name not in ("finercam", "shapleycam")]
    for _ in range(2):
        gradcam.compare(model, TINY, layers=["0"], methods=methods)
        assert len(passes) == 1 + 1  # the second pass checks whether images depend on one another
        passes.clear()


def test_class_agnostic_methods_need_no_gradient() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[3].weight.zero_()
    with pytest.raises(LayerError, match="exactly zero"):
        gradcam.explain(model, TINY, "0")
    explanation = gradcam.explain(model, TINY, "0", method="eigencam", target=[[0, 1]] * 3)
    assert explanation.maps.any()
    assert torch.equal(explanation.maps[:, 0], explanation.maps[:, 1])


@pytest.mark.parametrize("name", ONE_PASS)
def test_volumes_keep_their_rank(name: str) -> None:
    torch.manual_seed(5)
    images = torch.randn(2, 3, 9, 10, 11, dtype=torch.float64)
    model = NonlinearModel(volumes=True).double()
    explanation = gradcam.explain(model, images, "features", method=name, target=[[1, 2], [0, 3]])
    assert explanation.maps.shape == (2, 2, 4, 4, 5)
    assert explanation.heatmaps.shape == (2, 2, 9, 10, 11)
    assert explanation.maps.any()


@pytest.mark.parametrize("name", ONE_PASS)
def test_a_map_does_not_depend_on_its_neighbours(name: str, resnet: nn.Module, images: Tensor) -> None:
    both = gradcam.explain(resnet, images, "layer3", method=name, target=[5, 7])
    for image, target in ((0, 5), (1, 7)):
        alone = gradcam.explain(resnet, images[image : image + 1], "layer3", method=name, target=target)
        torch.testing.assert_close(both.maps[image : image + 1], alone.maps, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ONE_PASS) - CLASS_AGNOSTIC))
def test_each_class_has_its_own_map(name: str, resnet: nn.Module, images: Tensor) -> None:
    both = gradcam.explain(resnet, images, "layer3", method=name, target=[[5, 7], [9, 8]])
    for k, target in enumerate(([5, 9], [7, 8])):
        alone = gradcam.explain(resnet, images, "layer3", method=name, target=target)
        torch.testing.assert_close(both.maps[:, k : k + 1], alone.maps, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(both.maps[:, 0], both.maps[:, 1], rtol=1e-2)


# Identities between methods


def test_gradcam_is_cam_before_pooling_and_a_linear_layer(resnet: nn.Module, images: Tensor) -> None:
    with gradcam.TargetLayer(resnet.layer4) as layer:  # type: ignore[arg-type]
        resnet(images)
    weights = resnet.fc.weight[[5, 7]]  # type: ignore[index, union-attr]
    cam = torch.einsum("kc,nchw->nkhw", weights, layer.activations)  # Zhou et al., CVPR 2016, equation 2
    maps = gradcam.explain(resnet, images, "layer4", target=[[5, 7]] * 2).maps
    torch.testing.assert_close(maps * layer.activations[0, 0].numel(), cam.relu().float())


def test_hirescam_is_gradcam_where_gradients_are_constant_in_each_channel(resnet: nn.Module, images: Tensor) -> None:
    explanations = gradcam.compare(resnet, images, layers=["layer4", "layer3"], methods=["gradcam", "hirescam"])
    torch.testing.assert_close(explanations["layer4", "hirescam"].maps, explanations["layer4", "gradcam"].maps)
    assert not torch.allclose(explanations["layer3", "hirescam"].maps, explanations["layer3", "gradcam"].maps)


def test_layercam_is_positive_hirescam_and_its_complement(resnet: nn.Module, images: Tensor) -> None:
    methods = ["layercam", "elementwise-gradcam", "hirescam"]
    explanations = gradcam.compare(resnet, images, layers=["layer3"], methods=methods, target=5)
    against = gradcam.explain(resnet, images, "layer3", method="layercam", target=lambda output: -output[:, 5])
    # The activations are non-negative, because layer3 ends with a ReLU.
    difference = explanations["layer3", "layercam"].maps - against.maps
    torch.testing.assert_close(difference.relu(), explanations["layer3", "hirescam"].maps, rtol=1e-4, atol=1e-7)
    elementwise = explanations["layer3", "elementwise-gradcam"]
    torch.testing.assert_close(explanations["layer3", "layercam"].maps, elementwise.maps)


# Second derivatives


def slow_shapley(model: NonlinearModel, image: Tensor, k: int) -> Tensor:
    features = model.features(image[None]).detach()

    def score(values: Tensor) -> Tensor:
        pooled = torch.tanh(values.view_as(features).flatten(2).square()).mean(2)
        return model.head(pooled).sinh()[0, k]

    flat = features.flatten()
    hessian = torch.autograd.functional.hessian(score, flat)
    gradient = torch.autograd.functional.jacobian(score, flat)
    weights = (gradient - hessian @ flat / 2).view_as(features).mean((2, 3), keepdim=True)
    return (weights * features).sum(1)[0]


def test_shapleycam_equals_the_hessian() -> None:
    model, images = NonlinearModel().double(), TINY.double()
    explanation = gradcam.explain(
        model, images, "features", method="shapleycam", target=[[0, 4]] * 3, evidence="signed"
    )
    plain = gradcam.explain(model, images, "features", target=[[0, 4]] * 3, evidence="signed")
    assert not torch.allclose(explanation.maps, plain.maps, rtol=0.1)
    for image in range(3):
        for column, k in enumerate((0, 4)):
            expected = slow_shapley(model, images[image], k).float()
            torch.testing.assert_close(explanation.maps[image, column], expected)


def test_shapleycam_is_gradcam_before_what_is_linear(resnet: nn.Module, images: Tensor) -> None:
    for score, is_equal in (("logit", True), ("contrast", True), ("probability", False)):
        options: Any = {"methods": ["gradcam", "shapleycam"], "target": ClassTarget(5, score=score)}
        plain, shapley = gradcam.compare(resnet, images, layers=["layer4"], **options).values()
        tolerance = 1e-5 * plain.maps.max().item()
        assert torch.allclose(shapley.maps, plain.maps, rtol=1e-5, atol=tolerance) is is_equal


def test_shapleycam_at_several_layers_is_what_it_is_at_each() -> None:
    front = nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 5, 3), nn.Sigmoid()
    model = nn.Sequential(*front, nn.Flatten(), nn.LazyLinear(4)).double()
    model(TINY.double())
    explanations = gradcam.compare(model, TINY.double(), layers=["0", "2"], methods=["shapleycam"], target=1)
    for layer in ("0", "2"):
        alone = gradcam.explain(model, TINY.double(), layer, method="shapleycam", target=1)
        torch.testing.assert_close(explanations[layer, "shapleycam"].maps, alone.maps)


def test_shapleycam_in_float16_is_scaled() -> None:
    model = NonlinearModel()
    with torch.no_grad():
        model.head.weight.mul_(1e-4)
    expected = gradcam.explain(model, TINY, "features", method="shapleycam", target=1, evidence="signed").maps
    maps = gradcam.explain(model.half(), TINY.half(), "features", method="shapleycam", target=1, evidence="signed").maps
    assert torch.corrcoef(torch.stack([maps.flatten(), expected.flatten()]))[0, 1] > 0.999
    assert maps.norm() == pytest.approx(expected.norm().item(), rel=0.02)


class Attention(nn.Module):
    """A transformer block: patches, fused attention and a head."""

    def __init__(self, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.patches, self.head, self.attend = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3), attend

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT[:, None].contiguous()
        return self.head(self.attend(tokens, tokens, tokens)[:, 0].mean(1))


def test_fused_attention_is_left_out_for_second_derivatives() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    torch.manual_seed(0)
    model = Attention()
    reference = Attention(plain)
    reference.load_state_dict(model.state_dict())
    tokens = torch.randn(1, 1, 9, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.attend(tokens, tokens, tokens).sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):  # fused attention has no second derivative
        gradient.sum().backward()
    names = ("flash", "mem_efficient", "cudnn", "math")
    kinds = [getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in names]
    before = [kind() for kind in kinds]
    explanation = gradcam.explain(model, TINY, "patches", method="shapleycam", target=1, evidence="signed")
    assert [kind() for kind in kinds] == before
    expected = gradcam.explain(reference, TINY, "patches", method="shapleycam", target=1, evidence="signed")
    torch.testing.assert_close(explanation.maps, expected.maps, rtol=1e-4, atol=1e-6)


def test_kinds_of_attention_that_were_off_stay_off() -> None:
    kinds = torch.backends.cuda
    kinds.enable_flash_sdp(False)
    try:
        gradcam.explain(Attention(), TINY, "patches", method="shapleycam", target=1)
        assert (kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled()) == (False, True)
    finally:
        kinds.enable_flash_sdp(True)


def test_the_last_of_several_threads_switches_fused_attention_on_again() -> None:
    inside, may_go_on = threading.Event(), threading.Event()

    class Waiting(Attention):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            may_go_on.wait(20)
            return super().forward(x)

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(gradcam.explain, Waiting(), TINY, "patches", method="shapleycam", target=1)
        inside.wait(20)
        # A second explanation starts and ends meanwhile.
        gradcam.explain(Attention(), TINY, "patches", method="shapleycam", target=1)
        may_go_on.set()
        assert slow.result().maps.shape == (3, 1, 3, 4)  # fused attention would raise an error
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


class Once(torch.autograd.Function):
    """tanh whose gradient cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Opaque(Once):
    """tanh whose gradient goes through NumPy, so that it cannot be differentiated again."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.from_numpy(gradient.detach().numpy() * (1 - y.detach().numpy() ** 2))


@pytest.mark.parametrize("function", [Once, Opaque])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_missing_second_derivative_is_an_error(function: type[Once], frozen: bool) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        return module.head(function.apply(module.conv(x)).mean((2, 3)))

    model = FunctionModule(forward, conv=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 2)).requires_grad_(not frozen)
    with pytest.raises(ModelError, match="whose gradient cannot be differentiated again: choose a method"):
        gradcam.explain(model, TINY, "conv", method="shapleycam", target=1)
    assert gradcam.explain(model, TINY, "conv", target=1, evidence="signed").maps.any()


def test_shapleycam_at_a_dead_layer_is_an_error() -> None:
    model = NonlinearModel()
    with torch.no_grad():
        model.head.weight.zero_()
    with pytest.raises(LayerError, match="gradient at layer 'features' is exactly zero"):
        gradcam.explain(model, TINY, "features", method="shapleycam", target=1)


def test_fused_attention_that_cannot_be_left_out_is_an_error() -> None:
    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    model = Attention(fused).eval()
    before = traces(model)
    with pytest.raises(ModelError, match="without a second derivative, such as fused attention: choose a method"):
        gradcam.explain(model, TINY, "patches", method="shapleycam", target=1)
    assert_same(before, traces(model))
    assert gradcam.explain(model, TINY, "patches", target=1).maps.any()


# Scores that compare classes


def test_finercam_is_gradcam_of_the_class_against_those_that_score_like_it() -> None:
    model = tiny_model().eval()
    with torch.no_grad():
        logits = model(TINY)
    target = logits.topk(2).indices.tolist()
    explanation = gradcam.explain(model, TINY, "3", method="finercam", target=target)

    def score(output: Tensor) -> Tensor:
        rows = []
        for image, classes in enumerate(target):
            rows.append([])
            for index in classes:
                rivals = sorted(
                    (abs(logits[image, c] - logits[image, index]).item(), c) for c in range(5) if c != index
                )
                nearest = [output[image, c] for _, c in rivals[:3]]
                rows[-1].append(output[image, index] - 0.6 * sum(nearest) / 3)
        return torch.stack([torch.stack(row) for row in rows])

    expected = gradcam.explain(model, TINY, "3", target=score)
    torch.testing.assert_close(explanation.maps, expected.maps)
    torch.testing.assert_close(explanation.scores, expected.scores)
    assert explanation.classes.tolist() == target


def test_finercam_compares_classes() -> None:
    with pytest.raises(TargetError, match="finercam compares classes, but the target is a function"):
        gradcam.explain(tiny_model(), TINY, "3", method="finercam", target=lambda output: output[:, 0])


AGAINST: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
    *((against, lambda x: x[:, 3]) for against in (3, [3], (3,), torch.tensor([3]), torch.tensor(3), np.int64(3))),
    *((against, lambda x: (x[:, 3] + x[:, 0]) / 2) for against in ([3, 0], [3, 0, 3], torch.tensor([0, 3]))),
    *((against, lambda x: (x.sum(1) - x[:, 1]) / 4) for against in (None, (), [], np.array([], int))),
    (torch.tensor([], dtype=torch.long), lambda x: (x.sum(1) - x[:, 1]) / 4),
]


@pytest.mark.parametrize(("against", "rivals"), AGAINST)
def test_a_contrast_with_named_classes_or_all_others(against: Any, rivals: Callable[[Tensor], Tensor]) -> None:
    model = tiny_model().eval()
    explanation = gradcam.explain(model, TINY, "3", target=ClassTarget(1, score="contrast", against=against))
    expected = gradcam.explain(model, TINY, "3", target=lambda output: output[:, 1] - rivals(output))
    torch.testing.assert_close(explanation.maps, expected.maps)
    torch.testing.assert_close(explanation.scores, expected.scores)


def test_several_chunks_of_classes_and_kinds_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().eval()
    options: dict[str, Any] = {
        "layers": ["0"],
        "methods": ["gradcam", "finercam", "layercam"],
        "target": [[4, 0, 2]] * 3,
    }
    expected = gradcam.compare(model, TINY, **options)
    # Two classes at a time, each with three rivals.
    monkeypatch.setattr(gradients, "MAX_GRADIENT_BYTES", 2 * 3 * 4 * 12 * 16 * 4)
    explanations = gradcam.compare(model, TINY, **options)
    for key, item in expected.items():
        torch.testing.assert_close(explanations[key].maps, item.maps)


def test_a_layer_may_be_blind_to_one_kind_of_score_alone() -> None:
    model = tiny_model().eval()
    with torch.no_grad():
        # All classes score alike, so a finer score is 1 - 0.6 = 0.4 of the logit.
        model[8].weight.copy_(model[8].weight[:1].expand(5, -1) * 1.0)
    explanations = gradcam.compare(model, TINY, layers=["0"], methods=["gradcam", "finercam"], target=1)
    torch.testing.assert_close(explanations["0", "finercam"].maps, 0.4 * explanations["0", "gradcam"].maps)
    with torch.no_grad():
        model[8].weight[0].zero_()
        model[8].bias.copy_(torch.tensor([0.0, 9, 9, 9, 50]))
    with pytest.warns(GradcamWarning, match="'0' is exactly zero: its heatmaps are blank"):
        explanations = gradcam.compare(model, TINY, layers=["0"], methods=["gradcam", "finercam"], target=0)
    assert [bool(item.maps.any()) for item in explanations.values()] == [False, True]
    with pytest.raises(LayerError, match="exactly zero"):
        gradcam.explain(model, TINY, "0", target=0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: ClassTarget(1, score="contrast", against=1), "Class 1 cannot be contrasted with itself"),
        (
            lambda: ClassTarget([[0, 1]] * 3, score="contrast", against=[4, 1]),
            "Class 1 cannot be contrasted with itself",
        ),
        (lambda: ClassTarget(1, score="contrast", against=5), "Class 5 does not exist: this model has 5 classes"),
        (
            lambda: ClassTarget(1, score="contrast", against="cat"),
            "against= is 'cat', expected a class index, or a list of class indices",
        ),
        (lambda: ClassTarget(1, score="contrast", against=1.5), "against= is 1.5, expected a class"),
        (lambda: ClassTarget(1, score="contrast", against=True), "against= is True, expected a class"),
        (
            lambda: ClassTarget(1, score="contrast", against=[[3], [4], [0]]),
            "expected a class index, or a list of class indices",
        ),
        (lambda: ClassTarget(1, against=2), "against= is 2, but the score is 'logit': use score='contrast'"),
        (lambda: ClassTarget(top=6), "The top 6 classes were requested, but this model has 5"),
        (lambda: [list(range(6))] * 3, "Class 5 does not exist: this model has 5 classes, 0 to 4"),
    ],
)
def test_a_contrast_with_wrong_classes_is_an_error(target: Callable[[], Any], message: str) -> None:
    model = tiny_model()
    before = traces(model)
    with pytest.raises(TargetError, match=message):
        gradcam.explain(model, TINY, "3", target=target())
    assert_same(before, traces(model))


# Evidence for and against


@pytest.mark.parametrize("name", SIGNED)
def test_evidence_against_a_class_is_evidence_for_the_opposite(name: str, resnet: nn.Module, images: Tensor) -> None:
    def explain(evidence: str, target: Any = 5) -> gradcam.Explanation:
        return gradcam.explain(resnet, images, "layer3", method=name, target=target, evidence=evidence)

    positive, negative, signed = map(explain, ("positive", "negative", "signed"))
    assert torch.equal(signed.maps, positive.maps - negative.maps)
    assert negative.maps.any()
    assert min(positive.maps.min(), negative.maps.min()) == 0
    if name != "finercam":
        opposite = explain("positive", lambda output: -output[:, 5])
        torch.testing.assert_close(negative.maps, opposite.maps)
        torch.testing.assert_close(negative.heatmaps, opposite.heatmaps)


def test_signed_heatmaps_are_the_difference_of_both_kinds_over_the_largest() -> None:
    model = tiny_model().eval()
    positive, negative, signed = (
        gradcam.explain(model, TINY, "0", target=1, evidence=evidence)
        for evidence in ("positive", "negative", "signed")
    )
    assert torch.equal(signed.heatmaps.abs().amax((2, 3)), torch.ones(3, 1))
    largest = [item.maps.amax((2, 3), keepdim=True) for item in (positive, negative)]
    unit = torch.maximum(*largest)  # the layer's grid has the size of the input, so nothing is interpolated
    expected = (positive.maps - negative.maps) / unit
    torch.testing.assert_close(signed.heatmaps, expected, rtol=1e-4, atol=1e-5)


def test_resizing_adds_no_negative_rim_to_positive_evidence() -> None:
    model = FunctionModule(lambda module, x: module.pool(x)[:, :, 1, 1], pool=nn.AvgPool2d(8))
    images = torch.zeros(1, 1, 32, 32)
    images[..., 8:16, 8:16] = 1
    explanation = gradcam.explain(model, images, "pool", method="hirescam", evidence="signed")
    assert explanation.heatmaps.min() == 0


@pytest.mark.parametrize("name", sorted(set(ONE_PASS) - set(SIGNED)))
@pytest.mark.parametrize("evidence", ["negative", "signed"])
def test_unsupported_evidence_is_an_error(name: str, evidence: str) -> None:
    with pytest.raises(GradcamError, match=f"{name} shows positive evidence only: .* 'gradcam', 'xgradcam'"):
        gradcam.explain(tiny_model(), TINY, "3", method=name, evidence=evidence)


def test_an_unknown_option_is_named(classifier: gradcam.Classifier) -> None:
    images, layer = torch.zeros(1, 3, 64, 64), {"layers": ["layer4"], "methods": ["gradcam"]}
    for call in (
        partial(gradcam.explain, classifier.model, images), partial(gradcam.compare, classifier.model, images, **layer),
        partial(classifier.explain, "a.jpg"), partial(gradcam.explain_files, "a.jpg", classifier),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'smoothness'"):
            call(smoothness="eigen")


@pytest.mark.parametrize("evidence", ["both", None, 1])
def test_unknown_evidence(evidence: Any) -> None:
    with pytest.raises(GradcamError, match="expected one of 'positive', 'negative', 'signed'"):
        gradcam.explain(tiny_model(), TINY, "3", evidence=evidence)


def test_a_regression_has_both() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    with torch.no_grad():
        model[4].weight.fill_(-1)
    assert not gradcam.explain(model, TINY, "1").maps.any()
    assert gradcam.explain(model, TINY, "1", evidence="negative").maps.any()
    assert gradcam.explain(model, TINY, "1", evidence="signed").heatmaps.amin((1, 2, 3)).tolist() == [-1, -1, -1]


# Nothing is left on the model


@pytest.mark.parametrize("name", ONE_PASS)
def test_no_method_leaves_a_trace(name: str) -> None:
    model = tiny_model()  # in training mode, with gradients of its own
    model(TINY).sum().backward()
    before = traces(model)
    gradcam.explain(model, TINY, "3", method=name, target=[[0, 1]] * 3)
    assert_same(before, traces(model))
    with pytest.raises(GradcamError):
        gradcam.explain(model, TINY, "7", method=name)  # after the pooling, so there is no map
    assert_same(before, traces(model))


def test_second_derivatives_leave_no_memory() -> None:
    def count_tensors() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    model = NonlinearModel()
    gradcam.explain(model, TINY, "features", method="shapleycam", target=1)
    gc.collect()
    before = count_tensors()
    for _ in range(3):
        gradcam.explain(model, TINY, "features", method="shapleycam", target=1)
    assert count_tensors() <= before  # reference counting alone frees them


def test_all_methods_on_a_photograph(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    explanations = classifier.compare(photo("koala.webp"), layers=["layer4"], methods=ONE_PASS)
    for (_, name), item in explanations.items():
        heatmap = item.heatmaps[0, 0]
        assert heatmap.max() == 1, name
        rows, columns = torch.meshgrid(torch.arange(224.0), torch.arange(224.0), indexing="ij")
        centre = [(heatmap * axis).sum() / heatmap.sum() for axis in (rows, columns)]
        assert all(50 < value < 174 for value in centre), name  # the animal is in the middle of the image
