"""Test attributions in input space against slow loops, captum and hand-computed values, and for side effects."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam import attributions
from gradcam.attributions import (
    ATTRIBUTIONS,
    Attribution,
    find_attribution,
    guided_backpropagation,
    guided_gradcam,
    input_gradients,
    integrated_gradients,
    smoothgrad,
)
from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.targets import ClassTarget
from tests.helpers import TINY, assert_same, tiny_model, traces

QUICK_OPTIONS: dict[str, dict[str, Any]] = {"smoothgrad": {"samples": 3}, "integrated-gradients": {"steps": 4}}
every_method = pytest.mark.parametrize("name", list(ATTRIBUTIONS))


def run(name: str, model: nn.Module, images: Any, **options: Any) -> Attribution:
    """Run a method with few samples or steps; Guided Grad-CAM at the first layer."""
    method = ATTRIBUTIONS[name]
    layers = ["0"] if method.has_layer else []
    return method.function(model, images, *layers, **QUICK_OPTIONS.get(name, {}), **options)


def gradient(model: nn.Module, images: Tensor, classes: list[int]) -> Tensor:
    """Return the gradient of each class, computed for each image separately."""
    rows = []
    for image in images:
        leaf = image[None].clone().requires_grad_()
        output = model(leaf)[0]
        rows.append(torch.stack([torch.autograd.grad(output[k], leaf, retain_graph=True)[0][0] for k in classes]))
    return torch.stack(rows)


class Linear(nn.Module):
    """A model whose scores are linear in the image, with known weights."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, *size, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nj,kj->nk", x.flatten(1), self.weights.flatten(1)) + 7


class TestInputGradients:
    def test_a_linear_model_has_its_weights_for_gradients(self) -> None:
        model = Linear(3, 4, 5)
        attribution = input_gradients(model, torch.randn(2, 3, 4, 5), target=[[0, 1], [1, 0]])
        torch.testing.assert_close(attribution.values[0], model.weights.detach())
        torch.testing.assert_close(attribution.values[1], model.weights.detach().flip(0))

    def test_finite_differences(self) -> None:
        model, images = tiny_model().double().eval(), TINY.double()
        attribution = input_gradients(model, images, target=[[2, 4]] * 3)
        scores = model(images).detach()
        torch.testing.assert_close(attribution.scores, scores[:, [2, 4]].float())
        for n, c, y, x in ((0, 0, 0, 0), (1, 2, 5, 7), (2, 1, 11, 15), (0, 1, 6, 3)):
            step = torch.zeros_like(images)
            step[n, c, y, x] = 1e-6
            change = (model(images + step) - model(images - step)).detach()[n, [2, 4]] / 2e-6
            torch.testing.assert_close(attribution.values[n, :, c, y, x], change.float(), rtol=1e-4, atol=1e-8)

    def test_probability(self) -> None:
        model, images = tiny_model().double().eval(), TINY.double()
        attribution = input_gradients(model, images, target=ClassTarget(2, score="probability"))
        expected = gradient(lambda x: model(x).softmax(1), images, [2])  # type: ignore[arg-type]
        torch.testing.assert_close(attribution.values, expected.float())


class TestSmoothgrad:
    def test_a_slow_loop(self) -> None:
        """Section 3: the mean over n copies with noise N(0, sigma^2); sigma is a fraction of each image's range."""
        model, images = tiny_model().double().eval(), TINY.double() * torch.tensor([1.0, 5.0, 0.2])[:, None, None, None]
        attribution = smoothgrad(model, images, target=[[1, 3]] * 3, samples=7, noise=0.3, seed=11)
        generator = torch.Generator().manual_seed(11)
        total = torch.zeros(3, 2, 3, 12, 16, dtype=torch.float64)
        for _ in range(7):
            noise = torch.randn(3, 12, 16, generator=generator, dtype=torch.float64)
            for n, image in enumerate(images):
                noisy = image + 0.3 * (image.max() - image.min()) * noise
                total[n] += gradient(model, noisy[None], [1, 3])[0]
        torch.testing.assert_close(attribution.values, (total / 7).float(), rtol=1e-5, atol=1e-8)
        reseeded = smoothgrad(model, images, target=[[1, 3]] * 3, samples=7, noise=0.3, seed=12)
        assert not torch.allclose(attribution.values, reseeded.values)

    def test_without_noise_it_is_the_gradient(self) -> None:
        model = tiny_model().eval()
        plain, smooth = input_gradients(model, TINY), smoothgrad(model, TINY, noise=0, samples=5)
        torch.testing.assert_close(smooth.values, plain.values)
        assert_same(smooth.classes, plain.classes)

    def test_the_top_class_is_that_of_the_image_without_noise(self) -> None:
        model = tiny_model().eval()
        clean = model(TINY).argmax(1)
        top_classes: list[Tensor] = []
        handle = model.register_forward_hook(lambda module, args, output: top_classes.append(output.detach().argmax(1)))
        attribution = smoothgrad(model, TINY, noise=2.0, samples=9)
        handle.remove()
        assert any(not torch.equal(tops, clean) for tops in top_classes)  # The noise does change the top class.
        assert_same(attribution.classes, clean[:, None])
        torch.testing.assert_close(
            attribution.values, smoothgrad(model, TINY, noise=2.0, samples=9, target=clean).values
        )
        torch.testing.assert_close(attribution.scores[:, 0], model(TINY).detach().amax(1))


class TestIntegratedGradients:
    def test_a_product_by_hand(self) -> None:
        """f = a b c: on the line from 0 the gradient at a is t^2 b c with the mean b c / 3, so each input gets a b c / 3."""

        class Product(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.flatten(1).prod(1)

        images = torch.tensor([[2.0, 3.0, 5.0], [1.0, -1.0, 4.0]]).reshape(2, 3, 1, 1)
        attribution = integrated_gradients(Product(), images, steps=2)  # two Gauss points are exact for cubics
        torch.testing.assert_close(attribution.values[:, 0, :, 0, 0], torch.tensor([[10.0] * 3, [-4 / 3] * 3]))
        midpoint = integrated_gradients(Product(), images, steps=1)  # one step is the midpoint rule: a/2 b/2 c
        assert attribution.gaps is not None
        assert midpoint.gaps is not None
        torch.testing.assert_close(midpoint.values[0, 0, :, 0, 0], torch.tensor([7.5] * 3))
        torch.testing.assert_close(midpoint.gaps, torch.tensor([[22.5 - 30], [-3 + 4.0]]))
        torch.testing.assert_close(attribution.gaps, torch.zeros(2, 1), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("baseline_form", ["none", "value", "channels", "picture", "batch"])
    def test_captum(self, baseline_form: str) -> None:
        from captum.attr import IntegratedGradients

        model, images = tiny_model().double().eval(), TINY.double()
        shapes = {"value": (), "channels": (3, 1, 1), "picture": (3, 12, 16), "batch": (3, 3, 12, 16)}
        baseline = None if baseline_form == "none" else torch.randn(shapes[baseline_form], dtype=torch.float64)
        attribution = integrated_gradients(model, images, target=[[1, 4]] * 3, baseline=baseline, steps=13)
        theirs = torch.zeros_like(images) if baseline is None else baseline.expand_as(images)
        for k, index in enumerate((1, 4)):
            expected, gap = IntegratedGradients(model).attribute(
                images, theirs, target=index, n_steps=13, method="gausslegendre", return_convergence_delta=True
            )
            torch.testing.assert_close(attribution.values[:, k], expected.float(), rtol=1e-5, atol=1e-8)
            assert attribution.gaps is not None
            torch.testing.assert_close(attribution.gaps[:, k], gap.float(), rtol=1e-4, atol=1e-7)
            difference = (model(images) - model(theirs)).detach()[:, index]
            torch.testing.assert_close(attribution.gaps[:, k], (expected.flatten(1).sum(1) - difference).float())
        assert attribution.gaps.abs().max() > 1e-5  # The gaps are large enough to compare.

    def test_a_linear_model_is_complete_in_one_step(self) -> None:
        model, images = Linear(3, 4, 5), torch.randn(2, 3, 4, 5)
        attribution = integrated_gradients(model, images, target=[[0, 1]] * 2, baseline=torch.tensor(0.5), steps=1)
        torch.testing.assert_close(attribution.values, ((images - 0.5)[:, None] * model.weights).detach())
        assert attribution.gaps is not None
        torch.testing.assert_close(attribution.gaps, torch.zeros(2, 2), rtol=0, atol=2e-5)

    def test_the_top_class_is_that_of_the_image_at_every_step(self) -> None:
        model = tiny_model().eval()
        far = TINY + 20 * torch.randn(3, 12, 16)
        top = model(TINY).argmax(1)
        assert not torch.equal(model(far).argmax(1), top)
        attribution = integrated_gradients(model, TINY, baseline=far, steps=4)
        expected = integrated_gradients(model, TINY, baseline=far, steps=4, target=top)
        torch.testing.assert_close(attribution.values, expected.values)
        assert_same(attribution.gaps, expected.gaps)

    @pytest.mark.parametrize(
        ("baseline", "message"),
        [
            (torch.zeros(2, 12, 16), r"is \(2, 12, 16\), which does not broadcast .* \(3, 3, 12, 16\).*\(C,1,1\)"),
            (torch.zeros(1, 3, 3, 12, 16), "does not broadcast"),
            (0.0, "baseline is float, expected a tensor"),
            (torch.tensor(float("nan")), "baseline contains NaN or infinite"),
        ],
    )
    def test_baselines_of_wrong_shapes(self, baseline: Any, message: str) -> None:
        with pytest.raises(ImageError, match=message):
            integrated_gradients(tiny_model(), TINY, baseline=baseline)


class TestChunks:
    class Paired(nn.Module):
        """A model whose second tensor has a row for each image and is changed in place; the third has a single row."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()
            self.sizes: list[int] = []

        def forward(self, pictures: Tensor, gain: Tensor, scale: Tensor) -> dict[str, Any]:
            self.sizes.append(len(pictures))
            logits = self.inner(pictures) * gain.clone()[:, None] * scale
            gain.mul_(0)
            return {"logits": logits, "scale": scale}

    @pytest.mark.parametrize("name", ["smoothgrad", "integrated-gradients"])
    @pytest.mark.parametrize(
        "target", [None, [[1, 2]] * 3, lambda output: output["logits"][torch.arange(3), [4, 0, 2]]]
    )
    def test_copies_in_one_pass_or_one_by_one(self, name: str, target: Any) -> None:
        model = self.Paired().eval()
        images = {"gain": torch.tensor([1.0, 2.0, 3.0]), "pictures": TINY, "scale": torch.tensor([2.0])}
        count = {"smoothgrad": "samples", "integrated-gradients": "steps"}[name]
        method = ATTRIBUTIONS[name].function
        by_one, in_threes, at_once = (
            method(model, images, target=target, **{count: 5}, chunk=chunk) for chunk in (1, 3, 9)
        )
        torch.testing.assert_close(in_threes.values, by_one.values)
        torch.testing.assert_close(at_once.values, by_one.values)
        torch.testing.assert_close(in_threes.scores, by_one.scores)
        assert by_one.values[2].any()
        assert torch.equal(images["gain"], torch.tensor([1.0, 2.0, 3.0]))
        before = 1 if name == "smoothgrad" else 2  # the images themselves, and the baseline
        clean = [3] * before
        assert model.sizes == [*clean, *[3] * 5, *clean, 9, 6, *clean, 15]

    @pytest.mark.parametrize("name", ["smoothgrad", "integrated-gradients"])
    def test_progress_is_reported(self, name: str) -> None:
        count = {"smoothgrad": "samples", "integrated-gradients": "steps"}[name]
        messages: list[tuple[int, int]] = []
        method, tell = ATTRIBUTIONS[name].function, lambda *numbers: messages.append(numbers)
        method(tiny_model(), TINY, target=1, **{count: 5}, chunk=2, progress=tell)
        assert messages == [(2, 5), (4, 5), (5, 5)]
        with pytest.raises(gradcam.GradcamError, match="progress is 5, expected a function"):
            method(tiny_model(), TINY, progress=5)

    def test_a_model_that_folds_its_rows(self) -> None:
        class Folding(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.flatten(1)[:3]

        smoothgrad(Folding(), TINY, samples=3)
        with pytest.raises(ModelError, match="one row for each of the 9 images in a forward pass: pass chunk=1"):
            smoothgrad(Folding(), TINY, samples=3, chunk=3)


@every_method
class TestEveryMethod:
    def test_fields_of_the_result(self, name: str) -> None:
        model = tiny_model().eval()
        result = run(name, model, TINY, target=[[1, 2]] * 3)
        assert result.method == name
        assert result.values.shape == (3, 2, 3, 12, 16)
        assert result.values.dtype == torch.float32
        assert result.values.min() < 0 < result.values.max()
        assert_same(result.classes, torch.tensor([[1, 2]] * 3))
        torch.testing.assert_close(result.scores, model(TINY).detach()[:, [1, 2]])
        torch.testing.assert_close(result.output, model(TINY).detach())
        tensors = (result.values, result.scores, result.output)
        assert not any(tensor.requires_grad or tensor.is_inference() for tensor in tensors)
        assert (result.gaps is None) == (name != "integrated-gradients")
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.method = "another"  # type: ignore[misc]
        assert "\n" not in repr(result)
        assert repr(result).startswith(f"Attribution(3 image(s), 2 score(s) each, {name}")
        assert repr(result).endswith("cpu)")
        assert "3 channel(s) of 12 x 16" in repr(result)

    def test_several_classes_equal_single_classes(self, name: str) -> None:
        model = tiny_model().eval()
        result = run(name, model, TINY, target=[[4, 0, 2], [1, 1, 3], [0, 4, 4]])
        for k, classes in enumerate(([4, 1, 0], [0, 1, 4], [2, 3, 4])):
            torch.testing.assert_close(result.values[:, k], run(name, model, TINY, target=classes).values[:, 0])

    def test_forms_of_the_target(self, name: str) -> None:
        model = tiny_model().eval()
        top = model(TINY).argmax(1)
        result = run(name, model, TINY)
        torch.testing.assert_close(result.values, run(name, model, TINY, target=top.tolist()).values)
        torch.testing.assert_close(result.values, run(name, model, TINY, target=top[:, None]).values)
        by_function = run(name, model, TINY, target=lambda output: output[torch.arange(3), top])
        torch.testing.assert_close(result.values, by_function.values)
        assert by_function.classes is None
        for wrong, message in ((99, "Class 99 does not"), ([1, 2], "does not fit 3"), (True, "not contain class")):
            with pytest.raises(TargetError, match=message):
                run(name, model, TINY, target=wrong)

    def test_neighbours_do_not_count(self, name: str) -> None:
        model = tiny_model().eval()
        loud = torch.cat([TINY[1:2], TINY[:1] * 50, TINY[2:] - 8])
        alone = run(name, model, TINY[1:2], target=3).values[0]
        assert (run(name, model, TINY, target=3).values[1] - alone).abs().max() < 1e-5
        assert (run(name, model, loud, target=3).values[0] - alone).abs().max() < 1e-5

    def test_no_side_effects(self, name: str) -> None:
        model = nn.Sequential(*tiny_model(), nn.Dropout(), RandomScores()).train()
        model[4].eval()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        model[3].weight.grad = torch.ones_like(model[3].weight)
        images = TINY.clone().requires_grad_()
        images.grad = torch.full_like(images, 3.0)
        before = traces(model)
        run(name, model, images, target=[[0, 1]] * 3)
        assert_same(before, traces(model))
        assert torch.equal(images, TINY)
        assert images.grad.unique().tolist() == [3.0]
        assert images.is_leaf
        assert images.grad_fn is None
        assert images._backward_hooks is None

    def test_a_model_that_changes_its_input(self, name: str) -> None:
        model = nn.Sequential(*tiny_model())
        model.register_forward_pre_hook(lambda module, args: (args[0].mul_(2).sub_(1),))
        images = TINY.clone()
        result = run(name, model, images, target=1)
        assert torch.equal(images, TINY)
        model._forward_pre_hooks.clear()
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2 - 1,))
        torch.testing.assert_close(result.values, run(name, model, TINY, target=1).values)

    def test_counters_are_put_back(self, name: str) -> None:
        class Counting(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                self.runs += 1
                return super().forward(x)

        model = Counting(*tiny_model())
        model.register_buffer("runs", torch.zeros(()))
        run(name, model, TINY)
        assert model.runs.item() == 0

    @pytest.mark.parametrize("at", [1, 2, 4])
    def test_no_side_effects_after_an_error_half_way(self, name: str, at: int) -> None:
        model = nn.Sequential(*tiny_model()).train()
        before = traces(model)
        calls = []

        def target(output: Tensor) -> Tensor:
            calls.append(0)
            if len(calls) == min(at, {"smoothgrad": 4, "integrated-gradients": 6, "guided-gradcam": 2}.get(name, 1)):
                raise ZeroDivisionError
            return output[:, 1]

        with pytest.raises(ZeroDivisionError):
            run(name, model, TINY, target=target)
        assert_same(before, traces(model))

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_grad_modes(self, name: str, mode: Callable[[], Any]) -> None:
        model = tiny_model().eval()
        expected = run(name, model, TINY, target=1).values
        with mode():
            images = TINY.clone()
            result = run(name, model, (images,), target=1)
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        torch.testing.assert_close(result.values, expected)
        assert not result.values.requires_grad

    def test_frozen_wrapped_and_in_place(self, name: str) -> None:
        expected = run(name, tiny_model(), TINY, target=1).values
        frozen = tiny_model().requires_grad_(False)
        torch.testing.assert_close(run(name, frozen, TINY, target=1).values, expected)
        torch.testing.assert_close(run(name, nn.DataParallel(frozen), TINY, target=1).values, expected)

    @pytest.mark.slow  # Importing PyTorch's compiler takes seconds.
    def test_a_compiled_model(self, name: str) -> None:
        expected = run(name, tiny_model(), TINY, target=1).values
        model = tiny_model()
        model.compile(backend="eager")
        torch.testing.assert_close(run(name, model, TINY, target=1).values, expected)
        torch.testing.assert_close(run(name, torch.compile(tiny_model()), TINY, target=1).values, expected)

    def test_volumes(self, name: str) -> None:
        model = nn.Sequential(nn.Conv3d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(3, 4))
        images = torch.randn(2, 2, 5, 6, 7)
        result = run(name, model, images, target=[[0, 3]] * 2)
        assert result.values.shape == (2, 2, 2, 5, 6, 7)
        assert "2 channel(s) of 5 x 6 x 7" in repr(result)
        alone = run(name, model, images[1:], target=3)
        torch.testing.assert_close(result.values[1:, 1:], alone.values)
        assert alone.values.any()

    def test_bfloat16_and_autocast(self, name: str) -> None:
        model = tiny_model().eval()
        expected = run(name, model, TINY, target=1).values.flatten()
        with torch.autocast("cpu", torch.bfloat16):
            cast = run(name, model, TINY, target=1)
            assert torch.is_autocast_enabled("cpu")
        half = run(name, copy.deepcopy(model).bfloat16(), TINY.bfloat16(), target=1)
        for results in (cast, half):
            assert results.values.dtype == results.scores.dtype == torch.float32
            assert torch.corrcoef(torch.stack([results.values.flatten(), expected]))[0, 1] > 0.98

    def test_bad_images(self, name: str) -> None:
        for images, message in (
            (torch.randn(2, 5), r"The images are \(2, 5\) torch.float32, expected a floating-point tensor"),
            (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "uint8, expected a floating"),
            (torch.zeros(0, 3, 8, 8), "an empty tensor cannot be explained"),
        ):
            with pytest.raises(ImageError, match=message):
                run(name, tiny_model(), images)
        with pytest.raises(ModelError, match="NaN at some positions"):
            run(name, tiny_model().eval(), TINY * float("nan"), target=0)
        with pytest.raises(ModelError, match=r"expected a torch.nn.Module"):
            run(name, len, TINY)  # type: ignore[arg-type]

    def test_a_gradient_that_is_nan(self, name: str) -> None:
        class Root(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return (super().forward(x) * 0).sqrt().mean((2, 3))  # an infinite slope, times zero, is NaN

        model = Root(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
        with pytest.raises(ModelError, match="are NaN at some positions"):
            run(name, model, TINY, target=1)

    @pytest.mark.parametrize(
        ("broken", "message"),
        [
            (lambda x: (x.argmax(1) % 5).float()[:, None].expand(-1, 5), "does not depend on the images.*argmax"),
            (lambda x: x.detach(), "does not depend on the images.*a detached value"),
        ],
    )
    def test_models_without_a_gradient(self, name: str, broken: Callable[[Tensor], Tensor], message: str) -> None:
        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(*tiny_model())

            def forward(self, x: Tensor) -> Tensor:
                return broken(self.inner(x))

        with pytest.raises(ModelError, match=message) as caught:
            run(name, Broken(), TINY, target=0)
        assert "\n" not in str(caught.value)

    @pytest.mark.cuda
    def test_cpu_and_cuda_agree(self, name: str) -> None:
        model = tiny_model().eval()
        expected = run(name, model, TINY, target=[[1, 2]] * 3)
        result = run(name, model.cuda(), TINY.cuda(), target=[[1, 2]] * 3)
        assert result.values.is_cuda
        torch.testing.assert_close(result.values.cpu(), expected.values, rtol=1e-3, atol=1e-5)


class RandomScores(nn.Module):
    """A model that uses PyTorch's random generator in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(())


class TestErrors:
    def test_rounding(self) -> None:
        class Rounding(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.round().flatten(1)

        for method in (input_gradients, smoothgrad, integrated_gradients):
            with pytest.raises(ModelError, match="gradient at the images is exactly zero.*rounding"):
                method(Rounding(), TINY, target=5)

    @pytest.mark.parametrize("samples", [0, -1, 2.5, True, "5", None])
    def test_counts(self, samples: Any) -> None:
        message = "expected a whole number, 1 or more"
        for method, count in ((smoothgrad, "samples"), (integrated_gradients, "steps")):
            for name in (count, "chunk"):
                with pytest.raises(gradcam.GradcamError, match=f"{name} is .*{message}"):
                    method(tiny_model(), TINY, **{name: samples})

    @pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf"), True, "0.1", None])
    def test_noise(self, noise: Any) -> None:
        with pytest.raises(gradcam.GradcamError, match="noise is .*, expected a fraction of the image's range"):
            smoothgrad(tiny_model(), TINY, noise=noise)

    @pytest.mark.parametrize("seed", [-1, 2**63, 0.5, True, None])
    def test_seed(self, seed: Any) -> None:
        with pytest.raises(gradcam.GradcamError, match="seed is .*, expected a whole number from 0"):
            smoothgrad(tiny_model(), TINY, seed=seed)
        smoothgrad(tiny_model(), TINY, seed=2**63 - 1, samples=1)

    def test_an_operation_without_a_derivative(self) -> None:
        class Whole(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.histc(x.flatten(), 4)[None].expand(len(x), 4) * 1.0

        with pytest.raises(gradcam.GradcamError):
            input_gradients(Whole(), TINY, target=0)


def test_values_below_the_float16_range_are_kept() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1e-3, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factor).flatten(1) * self.factor * self.factor

    images = torch.full((1, 3, 2, 2), 100.0, dtype=torch.float16)
    cube = torch.tensor(1e-3, dtype=torch.float16).float() ** 3  # smaller than the smallest float16 number
    for results in (input_gradients(Small(), images, target=5), smoothgrad(Small(), images, target=5, samples=2)):
        assert results.values.flatten()[5].item() == pytest.approx(cube.item(), rel=2e-3)


class Rotated(torch.autograd.Function):
    """A function with a matrix product in its backward pass, which autocast would compute in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient @ torch.full((16, 16), 1 / 3)


def test_autocast_is_for_the_forward_pass() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Rotated.apply(x).flatten(1)

    with torch.autocast("cpu", torch.bfloat16):
        attribution = input_gradients(Model(), TINY, target=0)
    assert attribution.values[0, 0, 0, 0, 0].item() == torch.tensor(1 / 3).item()


def test_passes_are_shared() -> None:
    model = tiny_model().eval()
    runs: list[bool] = []
    model.register_forward_hook(lambda module, args, output: runs.append(output.requires_grad))

    def count(method: Callable[..., Any], **options: Any) -> list[bool]:
        runs.clear()
        method(model, TINY, target=[[0, 1, 2, 3]] * 3, **options)
        return list(runs)

    assert count(input_gradients) == [True]
    assert count(guided_backpropagation) == [True]
    single_image_passes = [False] * 3  # Only the first call also runs each image alone.
    assert count(guided_gradcam, layer="3") == [True, True, *single_image_passes]
    assert count(guided_gradcam, layer="3") == [True, True]
    assert count(smoothgrad, samples=2) == [False, True, True]
    assert count(integrated_gradients, steps=2) == [False, False, True, True]


def test_one_recorded_pass_at_a_time_is_in_memory() -> None:
    model = tiny_model().eval()
    entered: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def look(module: nn.Module, args: tuple[Tensor]) -> None:
        alive.append(sum(item() is not None for item in entered))
        if torch.is_grad_enabled():
            entered.append(weakref.ref(args[0]))

    model.register_forward_pre_hook(look)
    smoothgrad(model, TINY, samples=4)
    assert alive == [0] * 5


class TestTable:
    def test_it_needs_no_torch(self) -> None:
        code = (
            "import sys; from gradcam.attributions import ATTRIBUTIONS, find_attribution; "
            "print(*ATTRIBUTIONS, sorted({'torch', 'numpy', 'cv2'} & set(sys.modules)))"
        )
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert printed == "input-gradients guided-backprop guided-gradcam smoothgrad integrated-gradients []\n"

    def test_entries(self) -> None:
        for name, method in ATTRIBUTIONS.items():
            assert find_attribution(name) is method
            assert method.function is getattr(attributions, method.function_name)
            assert ", 20" in method.paper or " 20" in method.paper

    def test_unknown_names(self) -> None:
        with pytest.raises(gradcam.GradcamError, match=r"no attribution method 'smoothgrd'. Nearest: 'smoothgrad'"):
            find_attribution("smoothgrd")
        with pytest.raises(gradcam.GradcamError, match="no attribution method 7. Nearest: 'input-gradients'"):
            find_attribution(7)  # type: ignore[arg-type]


class TestDrawing:
    def test_by_hand(self) -> None:
        # The 99th percentile of the five other values is below 2.
        values = torch.tensor([[[2.0, -2.0]], [[1.0, 0.0]], [[-0.5, 2.0]]])
        image = attributions.draw_attribution(values)
        assert image.dtype == np.uint8
        assert image.tolist() == [[[255, 192, 96], [1, 128, 255]]]

    def test_zero_is_grey(self) -> None:
        assert np.unique(attributions.draw_attribution(torch.zeros(3, 4, 5))).tolist() == [128]
        assert attributions.draw_attribution(np.zeros((1, 4, 5), np.float32)).shape == (4, 5, 3)

    def test_one_pixel_does_not_fade_all_others(self) -> None:
        values = torch.randn(3, 20, 20).clamp(-1, 1)
        expected = attributions.draw_attribution(values)
        values[0, 3, 4] = 1e6
        picture = attributions.draw_attribution(values)
        assert picture[3, 4, 0] == 255
        picture[3, 4] = expected[3, 4]
        assert np.abs(picture.astype(int) - expected).max() <= 1

    def test_a_wide_blank_does_not_make_it_loud(self) -> None:
        values = torch.randn(3, 10, 10)
        wide = torch.zeros(3, 100, 100)
        wide[:, :10, :10] = values
        drawn = attributions.draw_attribution(wide)
        assert np.array_equal(drawn[:10, :10], attributions.draw_attribution(values))

    def test_other_numbers_of_channels_are_summed(self) -> None:
        values = torch.randn(4, 6, 7)
        attribution = attributions.draw_attribution(values.sum(0, keepdim=True))
        assert np.array_equal(attributions.draw_attribution(values), attribution)
        assert (attribution == attribution[..., :1]).all()

    def test_halves_are_doubled_too(self) -> None:
        values = torch.randn(3, 6, 7).bfloat16().requires_grad_()
        expected = attributions.draw_attribution(values.detach().float())
        assert np.array_equal(attributions.draw_attribution(values), expected)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (torch.zeros(1, 3, 4, 5), r"\(1, 3, 4, 5\), expected floats \(C,H,W\).*values\[0, 0\]"),
            (torch.zeros(3, 4, 5, dtype=torch.int64), "int64"), (torch.zeros(3, 0, 5), r"\(3, 0, 5\)"),
            (torch.full((3, 4, 5), float("nan")), "NaN or infinite"), ("picture", "expected an array or a tensor"),
        ],
    )  # fmt: skip
    def test_wrong_shapes(self, values: Any, message: str) -> None:
        with pytest.raises(ImageError, match=message):
            attributions.draw_attribution(values)


class TestClassifier:
    def test_pictures(self, classifier: gradcam.Classifier, photo: Any) -> None:
        paths = [photo("cat_and_espresso.jpg"), photo("koala.webp")]
        attribution = classifier.attribute(paths, target=[["espresso", "Egyptian cat"], ["koala", 7]])
        images = classifier.batch([gradcam.read_image(path) for path in paths])
        assert attribution.classes is not None
        expected = guided_gradcam(classifier.model, images, "layer4", target=attribution.classes)
        assert torch.equal(attribution.values, expected.values)
        assert [classifier.labels[index] for index in attribution.classes[:, 0]] == ["espresso", "koala"]
        assert repr(attribution).startswith("ImageAttribution(2 image(s), 2 score(s) each, guided-gradcam at layer4")
        drawing = attribution.draw(0, 1)
        y0, x0, height, width = classifier.region(640, 800)
        assert drawing.shape == (640, 800, 3)
        outside = np.ones((640, 800), bool)
        outside[y0 : y0 + height, x0 : x0 + width] = False
        assert np.unique(drawing[outside]).tolist() == [128]
        espresso_values = drawing[y0 : y0 + height, x0 : x0 + width].astype(int) - 128
        cat, espresso = np.abs(espresso_values[:, : width // 2]).mean(), np.abs(espresso_values[:, width // 2 :]).mean()
        assert cat > 2 * espresso  # the cat is on the left
        cat_values = attribution.draw(0, 0)[y0 : y0 + height, x0 : x0 + width].astype(int) - 128
        assert np.abs(cat_values[:, width // 2 :]).mean() > 2 * np.abs(cat_values[:, : width // 2]).mean()
        assert attribution._repr_png_().startswith(b"\x89PNG")
        for i, k in ((2, 0), (0, 2), (-3, 0)):
            with pytest.raises(ImageError, match="There is no attribution"):
                attribution.draw(i, k)

    def test_a_picture_of_the_networks_size_is_drawn_as_it_is(self, classifier: gradcam.Classifier) -> None:
        image = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
        attribution = classifier.attribute(image, "input-gradients")
        assert attribution.layer is None
        assert attribution.regions == [(16, 16, 224, 224)]
        drawn = attributions.draw_attribution(attribution.values[0, 0])
        assert np.array_equal(attribution.draw()[16:240, 16:240], drawn)
        assert attribution._repr_png_().startswith(b"\x89PNG")

    def test_layers_and_names(self, classifier: gradcam.Classifier, photo: Any) -> None:
        path = photo("koala.webp")
        assert classifier.attribute(path, layer="head.0").layer == "head.0"
        with pytest.raises(gradcam.errors.LayerError, match="guided-backprop takes no layer"):
            classifier.attribute(path, "guided-backprop", layer="layer4")
        with pytest.raises(gradcam.GradcamError, match="There is no attribution method 'gradcam'"):
            classifier.attribute(path, "gradcam")
