"""Check how often, and in which batches, the tail or the whole model runs again, and what models that mix rows get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.cam.methods.rerun import Chunk, Variants, plan_chunks
from gradcam.errors import GradcamError, LayerError
from gradcam.hooks.memory import Meter
from gradcam.targets import ClassTarget
from tests import perturbation_oracles as slow
from tests.helpers import TINY, assert_same, tiny_model, traces


class Model(nn.Module):
    """A model with a convolution, a module `layer`, and any function as its tail."""

    def __init__(self, tail: Callable[[Tensor, Tensor], Tensor] = lambda before, after: after) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.layer = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.ReLU(inplace=True))
        self.head = nn.Linear(5, 4)
        self.tail = tail
        self.batches: list[tuple[int, int]] = []

    def forward(self, images: Tensor) -> Tensor:
        before = self.stem(images).tanh()
        after = self.layer(before)
        self.batches.append((len(images), len(after)))
        features = self.tail(before, after)
        # A linear head could not distinguish a ratio to the score from a difference.
        return self.head(features.mean((2, 3)).sinh())


def whole_batches(model: Model) -> list[tuple[int, int]]:
    """Return the passes of more than one image.

    The passes of one image check, the first time, whether the images of a batch depend on one another.
    """
    return [rows for rows in model.batches if rows != (1, 1)]


def only_of_three(before: Tensor, after: Tensor) -> Tensor:
    if len(after) != 3:
        raise ValueError("made for three")
    return after


def fold(before: Tensor, after: Tensor) -> Tensor:
    """Fold three frames into a clip, and add to each half of the frame before it, as in a temporal shift."""
    clips = after.unflatten(0, (len(before) // 3, -1))
    return (clips + 0.5 * clips.roll(1, dims=1)).flatten(0, 1)


TAILS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "plain": (lambda before, after: after, "tail"),
    "in place": (lambda before, after: after.mul_(2).relu_(), "tail"),
    "skip connection": (lambda before, after: before + after, "all"),
    "folded batch": (fold, "all"),
    "only its own batch size": (only_of_three, "one by one"),
    "mean over the batch": (lambda before, after: after - after.mean(0), "one by one"),
    "maximum over the batch": (lambda before, after: after / after.amax(), "one by one"),
    "neighbours": (lambda before, after: after + after.roll(1, dims=0), "one by one"),
    "sorted": (lambda before, after: after + after.sort(dim=0).values, "one by one"),
}
IMAGES = torch.randn(3, 3, 12, 16, generator=torch.Generator().manual_seed(1))


def select_classes(classes: list[list[int]]) -> Callable[[Tensor], Tensor]:
    return lambda output: output.gather(1, torch.tensor(classes))


@pytest.mark.parametrize("name", TAILS)
def test_every_tail_equals_the_loop_in_the_fewest_passes(name: str) -> None:
    tail, way = TAILS[name]
    model, classes = Model(tail).double(), [[0, 2], [1, 3], [3, 0]]
    images = IMAGES.double()
    weights, activations = slow.ablationcam(model, images, "layer", select_classes(classes))
    expected = slow.sum_of_channels(weights, activations)
    assert expected.flatten(2).amax(2).min() > 0
    model.batches.clear()
    explanation = gradcam.explain(model, images, "layer", method="ablationcam", target=classes)
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-5, atol=1e-6 * expected.max().item())
    together = 3 * (5 + 4)
    if way == "tail":
        assert whole_batches(model) == [(3, 3), (3, together)]
    elif way == "all":
        assert model.batches[-1] == (together, together)
        assert len(whole_batches(model)) <= 4
    else:
        assert model.batches[-5:] == [(3, 3)] * 5


def test_one_image_broadcasts_over_a_skip_connection() -> None:
    model = Model(lambda before, after: before + after).double()
    image = IMAGES[:1].double()
    weights, activations = slow.ablationcam(model, image, "layer", select_classes([[2]]))
    model.batches.clear()
    explanation = gradcam.explain(model, image, "layer", method="ablationcam", target=2, evidence="signed")
    assert model.batches == [(1, 1), (1, 9)]
    expected = (weights[0, 0, :, None, None] * activations[0]).sum(0)
    torch.testing.assert_close(explanation.maps[0, 0].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["ablationcam", "reciprocam", "scorecam", "rise"])
def test_a_model_that_mixes_rows_runs_one_variant_at_a_time(method: str) -> None:
    method_or_name = gradcam.METHODS["rise"].using(masks=7) if method == "rise" else method
    model = Model(lambda before, after: after - after.mean(0))
    gradcam.explain(model, IMAGES, "layer", method=method_or_name, target=1)
    assert model.batches[-4:] == [(3, 3)] * 4


def test_a_function_target_sees_each_variant_as_a_plain_output() -> None:
    shapes = []
    factors = torch.tensor([1.0, -2.0, 3.0])

    def target(output: dict[str, Tensor]) -> Tensor:
        shapes.append(tuple(output["scores"].shape))
        return output["scores"][:, :2] * factors[:, None] - output["scores"][:, 2:].amax(1, keepdim=True)

    class Wrapped(Model):
        def forward(self, images: Tensor) -> Any:
            return {"scores": super().forward(images), "labels": ["one", "two"]}

    model = Wrapped().double()
    explanation = gradcam.explain(model, IMAGES.double(), "layer", method="ablationcam", target=target)
    assert set(shapes) == {(3, 4)}
    assert whole_batches(model) == [(3, 3), (3, 27)]
    plain = Model().double()
    score = lambda output: target({"scores": output})  # noqa: E731
    weights, activations = slow.ablationcam(plain, IMAGES.double(), "layer", score)
    expected = slow.sum_of_channels(weights, activations)
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_output_with_more_than_rows_of_images_is_computed_one_variant_at_a_time() -> None:
    class WithLoss(Model):
        def forward(self, images: Tensor) -> Any:
            output = super().forward(images)
            return output, output.mean()

    model = WithLoss()
    target = lambda output: output[0][:, 1] - output[1]  # noqa: E731
    gradcam.explain(model, IMAGES, "layer", method="ablationcam", target=target)
    assert model.batches[-5:] == [(3, 3)] * 5
    model.batches.clear()
    # A class reads the logits only, not the second output.
    gradcam.explain(model, IMAGES, "layer", method="ablationcam", target=1)
    assert whole_batches(model) == [(3, 3), (3, 27)]


@pytest.mark.filterwarnings("ignore")  # PyTorch's quantisation emits deprecation warnings
def test_a_dynamically_quantised_head_scales_rows_by_the_largest_of_all() -> None:
    model = torch.ao.quantization.quantize_dynamic(Model(), {nn.Linear})
    model.batches = []
    gradcam.explain(model, IMAGES, "layer", method="ablationcam", target=1)
    assert model.batches[-5:] == [(3, 3)] * 5


def test_inputs_beside_the_images_are_repeated_with_them() -> None:
    class Two(Model):
        def forward(self, scale: Tensor, *, images: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            assert table.shape == (4, 2)
            return super().forward(images * scale[:, None, None, None])

    model, scale = Two(lambda before, after: before + after).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    inputs = {"scale": scale, "images": IMAGES.double(), "table": torch.ones(4, 2)}
    explanation = gradcam.explain(model, inputs, "layer", method="ablationcam", target=1)
    assert model.batches[-1] == (27, 27)
    plain = Model(lambda before, after: before + after).double()
    scaled = IMAGES.double() * scale[:, None, None, None]
    weights, activations = slow.ablationcam(plain, scaled, "layer", select_classes([[1]] * 3))
    expected = slow.sum_of_channels(weights, activations)
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_layer_in_place_whose_input_the_model_goes_on_using() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.relu, self.head = nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), nn.Linear(5, 4)

        def forward(self, images: Tensor) -> Tensor:
            x = self.stem(images)
            self.relu(x)
            return self.head(x.mean((2, 3)).sinh())

    class Named(InPlace):
        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.relu(self.stem(images)).mean((2, 3)).sinh())

    explanation = gradcam.explain(InPlace(), IMAGES, "relu", method="ablationcam", target=1)
    expected = gradcam.explain(Named(), IMAGES, "relu", method="ablationcam", target=1)
    assert expected.maps.amax() > 0
    torch.testing.assert_close(explanation.maps, expected.maps)


def test_a_model_that_changes_its_input_in_place() -> None:
    class Shifted(Model):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.sub_(0.5))

    model, images = Shifted(), IMAGES.clone()
    explanation = gradcam.explain(model, images, "layer", method="ablationcam", target=1)
    assert torch.equal(images, IMAGES)
    expected = gradcam.explain(Model(), IMAGES - 0.5, "layer", method="ablationcam", target=1)
    torch.testing.assert_close(explanation.maps, expected.maps)


@pytest.mark.parametrize("flatten", [lambda x: x.flatten(1), lambda x: x.view(len(x), -1)])
def test_masked_images_are_channels_last_where_the_model_takes_them(flatten: Callable[[Tensor], Tensor]) -> None:
    batches: list[tuple[int, bool]] = []

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.head = nn.Linear(4 * 10 * 14, 5)

        def forward(self, x: Tensor) -> Tensor:
            batches.append((len(x), x.is_contiguous(memory_format=torch.channels_last)))
            return self.head(flatten(self.conv(x)))

    model = Flat().double()
    explanation = gradcam.explain(model, TINY[:1].double(), "conv", method="scorecam", target=2)
    takes_them = "flatten" in flatten.__code__.co_names
    assert [last for rows, last in batches if rows > 1] == ([True] if takes_them else [True, False])
    expected = slow.sum_of_channels(*slow.scorecam_weights(model, TINY[:1].double(), "conv", [[2]]))
    torch.testing.assert_close(explanation.maps, expected.relu().float(), rtol=1e-4, atol=1e-6)


class TestMemory:
    def test_the_meter_counts_what_is_alive_at_once(self) -> None:
        x, meter = torch.ones(250), Meter()
        with torch.no_grad(), meter:
            before = x * 2
            meter.mark("first")
            a = x + 1  # 1000 bytes
            b = a * 2  # 2000 bytes
            del a
            b = b.view(10, 25).relu_()  # 0 bytes
            c = b + 1  # 2000 bytes
            meter.mark("second")
            d = c[:5] * 3  # 500 bytes
        assert meter.peak("first") == 2500
        assert meter.peak("second") == 500
        assert meter.peak("never") == 0
        assert len(before) + len(d) > 0

    @pytest.mark.parametrize("count", [1, 2, 5, 6, 17, 100])
    @pytest.mark.parametrize("most", [5, 6, 7, 50, 1000])
    def test_chunks_cover_all_variants_once_with_guards_in_the_first(self, count: int, most: int) -> None:
        chunks = plan_chunks(count, most)
        assert [number for chunk in chunks for number in chunk.numbers] == list(range(count))
        assert len({chunk.rows for chunk in chunks}) == 1
        assert chunks[0].rows <= most
        assert [chunk.is_guarded for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        for chunk in chunks:
            assert chunk.positions.stop <= chunk.rows - (2 if chunk.is_guarded else 0)

    def test_rows_of_a_chunk(self) -> None:
        def change(copies: Tensor, numbers: range) -> None:
            copies.add_(torch.tensor(numbers).repeat_interleave(2)[:, None])

        base = torch.tensor([[1.0], [2.0]])
        rows = Variants(base, 9, change).make(Chunk(range(3, 5), 6, is_guarded=True))
        assert rows.flatten().tolist() == [1, 2, -101, -201, 4, 5, 5, 6, 101, 201, 1, 2]

    @pytest.mark.parametrize(("method", "budget"), [("ablationcam", 60_000), ("scorecam", 300_000)])
    def test_chunks_fit_the_budget_and_the_result_does_not_depend_on_it(self, method: str, budget: int) -> None:
        model = tiny_model().eval()
        explanation = gradcam.explain(model, TINY, "4", method=method, target=1)
        rows: list[int] = []
        model[7].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
        meter = Meter()
        with meter:
            meter.mark("all")
            chunked = gradcam.explain(model, TINY, "4", method=method, target=1, memory_budget=budget)
        assert max(rows) >= 5 * 3
        assert meter.peak("all") <= 1.5 * budget
        torch.testing.assert_close(chunked.maps, explanation.maps, rtol=1e-4, atol=1e-6)
        rows.clear()
        smaller = gradcam.explain(model, TINY, "4", method=method, target=1, memory_budget=budget // 3)
        assert max(rows) == 3  # too few rows to include the unchanged variant and the probe
        torch.testing.assert_close(smaller.maps, explanation.maps, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("method", ["ablationcam", "reciprocam", "scorecam", "rise"])
    def test_a_budget_that_not_even_one_variant_fits(self, method: str) -> None:
        model = tiny_model()
        before = traces(model)
        message = r"memory_budget is 10 bytes, but one perturbed copy of the 3 image\(s\) takes \d+"
        with pytest.raises(GradcamError, match=message):
            gradcam.explain(model, TINY, "4", method=method, memory_budget=10)
        assert_same(before, traces(model))

    @pytest.mark.parametrize("budget", [0, -1, 1.5, "1 GB", True])
    def test_a_budget_that_is_none(self, budget: object) -> None:
        with pytest.raises(GradcamError, match="memory_budget is .*, expected a number of bytes"):
            gradcam.explain(tiny_model(), TINY, "4", memory_budget=budget)  # type: ignore[arg-type]

    def test_a_default_budget_never_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        explanation = gradcam.explain(tiny_model(), TINY, "4", method="ablationcam", target=1)
        monkeypatch.setattr("gradcam.hooks.memory.DEFAULT_BUDGET", 10)
        small = gradcam.explain(tiny_model(), TINY, "4", method="ablationcam", target=1)
        torch.testing.assert_close(small.maps, explanation.maps)


METHODS = ["ablationcam", "reciprocam", "scorecam", "fasterscorecam", "sscam", "iscam", "rise", "smoothgradcam-pp"]


def with_few_samples(name: str) -> gradcam.methods.Method:
    options = {
        "sscam": {"samples": 3}, "iscam": {"steps": 3}, "rise": {"masks": 40}, "smoothgradcam-pp": {"samples": 3},
    }  # fmt: skip
    return gradcam.METHODS[name].using(**options.get(name, {}))


class TestNoTrace:
    @pytest.mark.parametrize("name", METHODS)
    def test_after_all_went_well(self, name: str) -> None:
        model = tiny_model()
        model[3].weight.grad = torch.ones_like(model[3].weight)
        before, images = traces(model), TINY.clone()
        gradcam.explain(model, images, "4", method=with_few_samples(name), target=1)
        assert_same(before, traces(model))
        assert torch.equal(images, TINY)

    @pytest.mark.parametrize("name", METHODS)
    def test_interrupted_between_chunks(self, name: str) -> None:
        model, calls = tiny_model(), []
        before = traces(model)
        budget = 40_000 if name in ("ablationcam", "reciprocam") else 300_000

        def interrupt(count: int, total: int) -> None:
            calls.append((count, total))
            raise KeyboardInterrupt

        options = {"method": with_few_samples(name), "progress": interrupt, "memory_budget": budget}
        with pytest.raises(KeyboardInterrupt):
            gradcam.explain(model, TINY, "4", target=1, **options)
        ((count, total),) = calls
        assert 0 < count < total
        assert_same(before, traces(model))

    def test_where_the_model_fails_when_it_runs_again(self) -> None:
        def fail_later(before: Tensor, after: Tensor) -> Tensor:
            if not (after == before.clone().fill_(0)).any() or len(model.batches) < 3:
                return after
            raise ZeroDivisionError("in the tail")

        model = Model(fail_later)
        before = traces(model)
        with pytest.raises(ZeroDivisionError):
            gradcam.explain(model, IMAGES, "layer", method="ablationcam", target=1)
        model.batches.clear()
        assert_same(before, traces(model))


def test_progress_counts_up_to_the_total_for_each_layer_and_method() -> None:
    calls: list[tuple[int, int]] = []
    options = {"target": 1, "progress": lambda *both: calls.append(both)}
    gradcam.compare(tiny_model(), TINY, layers=["2", "4"], methods=["ablationcam", "reciprocam", "gradcam"], **options)
    assert [call for call in calls if call[0] == call[1]] == [(4, 4), (6, 6), (193, 193), (49, 49)]


def test_progress_that_is_not_callable_is_an_error() -> None:
    with pytest.raises(GradcamError, match="progress is 3, expected a function"):
        gradcam.explain(tiny_model(), TINY, "4", method="ablationcam", progress=3)  # type: ignore[arg-type]


def test_reruns_are_computed_in_the_autocast_of_the_caller() -> None:
    kinds = []
    model = tiny_model().eval()
    model[8].register_forward_hook(lambda module, args, output: kinds.append(output.dtype))
    for passes in (2 + len(TINY), 2):  # the first call also runs each image alone
        kinds.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            explanation = gradcam.explain(model, TINY, "4", method="ablationcam", target=1)
        assert kinds == [torch.bfloat16] * passes
        assert explanation.maps.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_keeps_to_the_tail(dtype: torch.dtype) -> None:
    model = Model()
    expected = gradcam.explain(model, IMAGES, "layer", method="reciprocam", target=1).heatmaps
    model = Model().to(dtype)
    explanation = gradcam.explain(model, IMAGES.to(dtype), "layer", method="reciprocam", target=1)
    assert whole_batches(model) == [(3, 3), (3, 3 * (6 * 8 + 5))]
    assert (explanation.heatmaps - expected).abs().mean() < 0.1


def test_in_inference_mode_with_recording_off_in_the_model() -> None:
    class Off(Model):
        @torch.no_grad()
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    expected = gradcam.explain(Model(), IMAGES, "layer", method="ablationcam", target=1)
    with torch.inference_mode():
        explanation = gradcam.explain(Off(), IMAGES.clone(), "layer", method="ablationcam", target=1)
    torch.testing.assert_close(explanation.maps, expected.maps)


@pytest.mark.parametrize("method", ["ablationcam", "reciprocam"])
def test_a_layer_that_does_not_reach_the_score(method: str) -> None:
    model = Model(lambda before, after: before)
    with pytest.raises(LayerError, match="The score does not change if the grid of layer 'layer' is changed"):
        gradcam.explain(model, IMAGES, "layer", method=method, target=1)


@pytest.mark.parametrize("method", ["ablationcam", "reciprocam", "scorecam"])
def test_a_vector_layer_has_no_grid(method: str) -> None:
    with pytest.raises(LayerError, match="no spatial grid"):
        gradcam.explain(tiny_model(), TINY, "8", method=method)


def test_classes_and_scores_of_all_kinds_are_those_of_the_plain_pass() -> None:
    model = tiny_model().eval()
    contrast = ClassTarget([[1], [2], [3]], score="contrast", against=[0])
    for target in (None, ClassTarget(top=2, score="probability"), contrast):
        plain = gradcam.explain(model, TINY, "4", target=target)
        explanation = gradcam.explain(model, TINY, "4", method="ablationcam", target=target)
        assert torch.equal(explanation.classes, plain.classes)
        torch.testing.assert_close(explanation.scores, plain.scores)
        torch.testing.assert_close(explanation.output, plain.output)


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_cpu_and_cuda_agree(method: str) -> None:
    on_cpu = gradcam.explain(Model(), IMAGES, "layer", method=with_few_samples(method), target=1)
    on_cuda = gradcam.explain(Model().cuda(), IMAGES.cuda(), "layer", method=with_few_samples(method), target=1)
    torch.testing.assert_close(on_cuda.maps.cpu(), on_cpu.maps, rtol=1e-2, atol=1e-3 * on_cpu.maps.max().item())
