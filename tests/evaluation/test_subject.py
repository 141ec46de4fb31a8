"""Test subjects: classes, batches, the state of the model, and checks of heatmaps of any library."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError
from gradcam.evaluation import Subject
from gradcam.evaluation.subject import check_heatmaps, scale_to_unit
from tests.helpers import TINY, assert_same, tiny_model, traces


class First(nn.Module):
    """A model that returns each image's first values as logits, and records the batch sizes."""

    def __init__(self, classes: int = 2, max_rows: int | None = None, message: str = "CUDA out of memory") -> None:
        super().__init__()
        self.classes, self.max_rows, self.message = classes, max_rows, message
        self.rows: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.rows.append(len(images))
        if self.max_rows is not None and len(images) > self.max_rows:
            raise RuntimeError(self.message)
        return images.flatten(1)[:, : self.classes]


def rows_of(*logits: tuple[float, ...]) -> Tensor:
    """Return images (N,1,1,C) whose values are the logits."""
    return torch.tensor(logits, dtype=torch.float32)[:, None, None]


PAIRS = rows_of((0.0, math.log(3.0)), (math.log(4.0), 0.0), (0.0, 0.0))  # probabilities 1/4 3/4, 4/5 1/5, 1/2 1/2


# Classes and probabilities


def test_the_most_probable_class_where_none_is_said() -> None:
    subject = Subject(First(), PAIRS)
    assert subject.classes.tolist() == [1, 0, 0]
    torch.testing.assert_close(subject.probabilities, torch.tensor([0.75, 0.8, 0.5]))
    torch.testing.assert_close(subject.all_probabilities, torch.tensor([[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]]))
    assert subject.size == (3, 1, 2)


@pytest.mark.parametrize("classes", [[1, 1, 0], (1, 1, 0), np.array([1, 1, 0]), torch.tensor([[1], [1], [0]]), 1])
def test_a_class_of_each_image_in_any_form_or_one_for_all(classes: Any) -> None:
    subject = Subject(First(), PAIRS, classes)
    assert subject.classes.dtype == torch.int64
    torch.testing.assert_close(subject.probabilities, torch.tensor([0.75, 0.2, 0.5]))


def test_activations() -> None:
    images = rows_of((0.0, math.log(3.0)), (-math.log(4.0), 0.25))
    subject = Subject(First(), images, 1, activation="sigmoid")
    torch.testing.assert_close(subject.all_probabilities, torch.tensor([[0.5, 0.75], [0.2, 1 / (1 + math.exp(-0.25))]]))
    plain = Subject(First(), rows_of((0.75, 0.25), (0.0, 1.0)), 1, activation="none")
    assert plain.probabilities.tolist() == [0.25, 1]
    # A single logit gives two probabilities: against the class, and for it.
    single = Subject(First(classes=1), images, activation="sigmoid")
    torch.testing.assert_close(single.all_probabilities, torch.tensor([[0.5, 0.5], [0.8, 0.2]]))
    assert Subject(First(classes=1), images, 0).probabilities.tolist() == pytest.approx([0.5, 0.8])
    assert Subject(First(classes=1), images, 1).probabilities.tolist() == pytest.approx([0.5, 0.2])


@pytest.mark.parametrize("row", [(9.61, 0.5), (0.5, -0.25)])
def test_values_that_are_no_probabilities_are_an_error(row: tuple[float, ...]) -> None:
    value = next(value for value in row if not 0 <= value <= 1)
    with pytest.raises(ModelError, match=f"contains {value}, but evaluation needs probabilities.*gradcam run"):
        Subject(First(), rows_of((0.25, 0.75), row), activation="none")
    rounded = Subject(First(), rows_of((1.00001, -0.00001)), activation="none")
    assert rounded.probabilities.tolist() == [pytest.approx(1.00001)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_probabilities_are_float32_whatever_the_images_are(dtype: torch.dtype) -> None:
    subject = Subject(First(), PAIRS.to(dtype), 1)
    assert subject.probabilities.dtype == subject.score([PAIRS.to(dtype)]).dtype == torch.float32
    expected = PAIRS.to(dtype)[:, 0, 0].double().softmax(1)[:, 1]  # the images' values are rounded to their dtype
    torch.testing.assert_close(subject.probabilities, expected.float())


def test_probabilities_of_a_photograph_are_the_classifiers(
    classifier: gradcam.Classifier, photo: Callable[[str], Path]
) -> None:
    images = classifier.batch([gradcam.read_image(photo("koala.webp"))])
    subject = Subject(classifier.model, images)
    assert classifier.label(int(subject.classes)) == "koala"
    with torch.no_grad():
        expected = classifier.model(images).double().softmax(1)[0, subject.classes]
    torch.testing.assert_close(subject.probabilities, expected.float())


# Variants, in batches


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 7, 100, None])
def test_scores_do_not_depend_on_how_rows_are_packed(batch_size: int | None) -> None:
    model = First()
    subject = Subject(model, PAIRS, [1, 0, 1], batch_size=batch_size)
    model.rows.clear()
    variants = [PAIRS, PAIRS.flip(3), PAIRS * 0, PAIRS * 2]
    scores = subject.score(iter(variants))
    expected = [[3 / 4, 4 / 5, 1 / 2], [1 / 4, 1 / 5, 1 / 2], [1 / 2] * 3, [9 / 10, 16 / 17, 1 / 2]]
    torch.testing.assert_close(scores, torch.tensor(expected))
    full_size = min(batch_size or 12, 12)
    # All batches but the last are full.
    assert model.rows == [full_size] * (12 // full_size) + [12 % full_size] * (12 % full_size > 0)


def test_variants_are_taken_as_they_are_needed() -> None:
    model = First()
    subject = Subject(model, PAIRS, 0, batch_size=3)
    batches_so_far: list[int] = []

    def variants() -> Any:
        for _ in range(4):
            batches_so_far.append(len(model.rows))
            yield PAIRS

    subject.score(variants())
    assert batches_so_far == [1, 2, 3, 4]


def test_no_variants() -> None:
    assert Subject(First(), PAIRS).score([]).shape == (0, 3)


def test_large_pictures_go_through_a_processor_in_small_batches() -> None:
    for side, expected in ((224, [4, 4, 1]), (600, [1] * 9), (100, [9])):
        model = First()
        Subject(model, torch.zeros(9, 1, side, side))
        assert model.rows == expected


@pytest.mark.parametrize("message", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_batches_are_halved_until_they_fit_into_memory(message: str) -> None:
    model = First(max_rows=2, message=message)
    subject = Subject(model, PAIRS.repeat(4, 1, 1, 1), 1, batch_size=12)
    expected = torch.tensor([0.75, 0.2, 0.5] * 4)
    torch.testing.assert_close(subject.probabilities, expected)
    model.rows.clear()
    torch.testing.assert_close(subject.score([subject.images])[0], expected)
    assert max(model.rows) == 1  # after 12, 6 and 3 failed, the batch size stays 1


def test_one_image_that_does_not_fit_into_memory_says_so() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        Subject(First(max_rows=0), PAIRS)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    model = First(max_rows=2, message="mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Subject(model, PAIRS)
    assert model.rows == [3]


def test_baselines_are_made_and_computed_once() -> None:
    model = First()
    subject = Subject(model, PAIRS, 1)
    model.rows.clear()
    assert subject.baseline("mean") is subject.baseline("mean")
    assert model.rows == []
    for _ in range(2):
        torch.testing.assert_close(subject.baseline_probabilities("mean"), torch.tensor([0.5] * 3))
    assert model.rows == [3]


# State of the model


def test_the_model_runs_in_evaluation_mode_and_is_restored() -> None:
    model = tiny_model().train()
    model[1].eval()
    before, images = traces(model), TINY.clone().requires_grad_()
    subject = Subject(model, images, 0)
    subject.score([TINY, TINY * 2])
    subject.baseline_probabilities("blur")
    assert_same(before, traces(model))
    assert torch.equal(images, TINY)
    expected = tiny_model().eval()(TINY).softmax(1)[:, 0].detach()
    torch.testing.assert_close(subject.probabilities, expected)
    assert not subject.probabilities.requires_grad


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Dropout(), First(max_rows=0, message="broken")).train()
    before = traces(model)
    with pytest.raises(RuntimeError, match="broken"):
        Subject(model, PAIRS)
    assert_same(before, traces(model))


@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_a_model_that_works_in_place_changes_no_image_and_no_variant(batch_size: int | None) -> None:
    images, variant = TINY.clone(), TINY.clone()
    subject = Subject(nn.Sequential(nn.ReLU(inplace=True), First()), images, 0, batch_size=batch_size)
    scores = [subject.score([variant]) for _ in range(2)]
    assert torch.equal(images, TINY)
    assert torch.equal(variant, TINY)
    assert torch.equal(scores[0], scores[1])


def test_images_of_inference_mode() -> None:
    with torch.inference_mode():
        images = TINY.clone()
        subject = Subject(nn.Sequential(nn.ReLU(inplace=True), First()), images, 0)
        scores = subject.score([images])
    assert torch.equal(scores[0], subject.probabilities)
    assert torch.equal(images, TINY)


def test_a_model_in_a_wrapper() -> None:
    subject = Subject(nn.DataParallel(First()), PAIRS)
    assert isinstance(subject.model, First)


def test_several_threads_judge_with_one_model() -> None:
    model, scores = tiny_model().train(), {}
    before = traces(model)

    def judge(number: int) -> None:
        scores[number] = Subject(model, TINY, 0).score([TINY * number] * 20)

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(before, traces(model))
    for number in range(4):
        expected = tiny_model().eval()(TINY * number).softmax(1)[:, 0].detach()
        torch.testing.assert_close(scores[number], expected.expand(20, -1))


# Invalid inputs


@pytest.mark.parametrize("images", [TINY[0], TINY.int(), TINY[:0], TINY.numpy(), None, [TINY], TINY[None]])
def test_images_that_cannot_be_judged(images: Any) -> None:
    with pytest.raises(ImageError, match=r"The images are .*, expected preprocessed images, a floating-point tensor"):
        Subject(tiny_model(), images)


def test_classes_that_do_not_fit() -> None:
    with pytest.raises(TargetError, match="Class 2 does not exist: this model has 2 classes"):
        Subject(First(), PAIRS, 2)
    with pytest.raises(TargetError, match=r"does not fit 3 image\(s\)"):
        Subject(First(), PAIRS, [0, 1])
    with pytest.raises(TargetError, match="There are 2 classes per image, expected one"):
        Subject(First(), PAIRS, [[0, 1]] * 3)
    with pytest.raises(TargetError, match="does not contain class indices"):
        Subject(First(), PAIRS, "koala")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_no_number(value: float) -> None:
    broken = PAIRS.clone()
    broken[1, 0, 0, 0] = value
    with pytest.raises(ModelError, match="output contains NaN or infinite values"):
        Subject(First(), broken)
    with pytest.raises(ModelError, match="output contains NaN or infinite values"):
        Subject(First(), PAIRS).score([PAIRS, broken])


def test_objects_that_are_not_models_or_not_classifiers() -> None:
    with pytest.raises(ModelError, match=r"expected a torch.nn.Module"):
        Subject(lambda images: images, TINY)
    with pytest.raises(TargetError, match=r"The output is .*, expected class scores \(3, classes\)"):
        Subject(nn.Conv2d(3, 4, 1), TINY)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "all"])
def test_batch_sizes_that_cannot_be(batch_size: Any) -> None:
    with pytest.raises(GradcamError, match=r"Subject: batch_size is .*, expected an int, 1 or more"):
        Subject(First(), PAIRS, batch_size=batch_size)


def test_variants_of_another_shape() -> None:
    with pytest.raises(
        ImageError, match=r"A variant of the images is torch.float32 \(2, 1, 1, 2\), expected .* \(3, 1, 1, 2\)"
    ):
        Subject(First(), PAIRS).score([PAIRS, PAIRS[:2]])


# Heatmaps


def test_heatmaps_of_any_library_become_tensors() -> None:
    values = [[[1.0, -2.0]], [[3.0, 0.5]]]
    for heatmaps in (np.array(values), np.array(values)[:, None], torch.tensor(values).half(), values):
        checked = check_heatmaps(heatmaps, (2, 1, 2))
        assert checked.dtype == torch.float32
        assert checked.tolist() == values
    assert check_heatmaps(np.array(values)[:, :, ::-1], (2, 1, 2)).tolist() == [[[-2, 1]], [[0.5, 3]]]
    assert check_heatmaps(np.array([[[1, 2]]], np.uint8)).tolist() == [[[1, 2]]]
    assert not check_heatmaps(torch.ones(1, 1, 2, requires_grad=True)).requires_grad


def test_an_explanation_is_its_heatmaps() -> None:
    explanation = gradcam.explain(tiny_model(), TINY, "0")
    assert torch.equal(check_heatmaps(explanation, (3, 12, 16)), explanation.heatmaps[:, 0])
    several = gradcam.explain(tiny_model(), TINY, "0", target=[[0, 1]] * 3)
    with pytest.raises(ImageError, match=r"shape \(3, 2, 12, 16\), expected \(N,H,W\), one per image"):
        check_heatmaps(several, (3, 12, 16))


@pytest.mark.parametrize("heatmaps", [torch.ones(2, 3), torch.ones(2, 3, 4, 5), torch.ones(1, 2, 2) * 1j, 3.0])
def test_heatmaps_of_another_form(heatmaps: Any) -> None:
    with pytest.raises(ImageError, match=r"expected \(N,H,W\)"):
        check_heatmaps(heatmaps)


@pytest.mark.parametrize("heatmaps", ["map", None, [[1.0], [2.0, 3.0]], np.array(["a"])])
def test_what_is_no_heatmap(heatmaps: Any) -> None:
    with pytest.raises(ImageError, match=r"The heatmaps are .*, expected a tensor or an array \(N,H,W\)"):
        check_heatmaps(heatmaps)


def test_heatmaps_of_another_size_say_how_to_resize_them() -> None:
    with pytest.raises(ImageError, match=r"shape \(2, 7, 7\), expected \(2, 8, 8\).*interpolate"):
        check_heatmaps(torch.ones(2, 7, 7), (2, 8, 8))
    with pytest.raises(ImageError, match="one per image"):
        check_heatmaps(torch.ones(1, 8, 8), (2, 8, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_heatmaps_that_are_no_numbers(value: float) -> None:
    with pytest.raises(ImageError, match="NaN or infinite"):
        check_heatmaps(torch.tensor([[[1.0, value]]]))


def test_maps_between_zero_and_one() -> None:
    maps = torch.tensor([[[-1.0, 2.0, 4.0]], [[0.0, 0.0, 0.0]], [[-1.0, -2.0, -3.0]], [[0.3, 0.3, 0.3]]])
    assert scale_to_unit(maps).tolist() == [[[0, 0.5, 1]], [[0, 0, 0]], [[0, 0, 0]], [[1, 1, 1]]]
    assert scale_to_unit(torch.tensor([[[1e-42, 0.0]]])).max() == 1  # a tiny maximum is scaled to 1 as well
