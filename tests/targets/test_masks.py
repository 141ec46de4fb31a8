from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import gradcam
from gradcam.errors import ImageError, TargetError
from gradcam.hooks.containers import to_batch
from gradcam.targets import Mask
from tests.helpers import assert_same, traces

HEIGHT, WIDTH = 12, 16
RED, GREEN, BLUE = (1, 2, 3)  # classes; 0 is the background
NAMES = {0: "background", 1: "red fox", 2: "tree", 3: "sky"}


class Colours(nn.Module):
    """A segmenter with a class per colour, and class 0 for the background."""

    def __init__(self, coarse: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AvgPool2d(coarse))
        self.head = nn.Conv2d(3, 4, 1)
        with torch.no_grad():
            self.features[0].weight.copy_(torch.eye(3)[..., None, None])
            self.features[0].bias.zero_()
            self.head.weight.copy_(torch.cat([torch.full((1, 3), -0.5), 2 * torch.eye(3)])[..., None, None])
            self.head.bias.copy_(torch.tensor([1.0, 0, 0, 0]))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures))


class ToyForSemanticSegmentation(Colours):
    """A toy segmenter with a Hugging Face configuration, which has labels."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="toy", num_labels=4, id2label=NAMES)

    def forward(self, pictures: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(pictures))


ToyForSemanticSegmentation.__module__ = "transformers.models.toy.modeling_toy"


def paint(*boxes: tuple[int, int, int, int, int]) -> Tensor:
    """Paint boxes (left, top, right, bottom) in the colours of their classes on black."""
    picture = torch.zeros(1, 3, HEIGHT, WIDTH)
    for left, top, right, bottom, colour in boxes:
        picture[0, :, top:bottom, left:right] = 0
        picture[0, colour - 1, top:bottom, left:right] = 1
    return picture


# Two red regions, which touch at a corner, and a green one.
PICTURE = paint((1, 2, 5, 6, RED), (9, 1, 12, 4, RED), (12, 4, 15, 7, RED), (3, 8, 8, 12, GREEN))


def explain(target: Mask, pictures: Tensor = PICTURE, model: nn.Module | None = None, **options) -> gradcam.Explanation:
    return gradcam.explain(model or Colours(), pictures, "features", target=target, **options)


def pixels(*boxes: tuple[int, int, int, int]) -> Tensor:
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        mask[top:bottom, left:right] = True
    return mask


def only(explanation: gradcam.Explanation):
    assert len(explanation.instances) == 1
    assert len(explanation.instances[0]) == 1
    return explanation.instances[0][0]


def test_all_pixels_of_a_class_are_its_mask_and_the_map_is_of_them():
    explanation = explain(Mask(RED))
    actual = only(explanation)
    assert torch.equal(actual.mask, pixels((1, 2, 5, 6), (9, 1, 12, 4), (12, 4, 15, 7)))
    assert (actual.kind, actual.name, actual.index, actual.box) == ("mask", "class 1", RED, (1.0, 1.0, 15.0, 7.0))
    assert actual.score == pytest.approx(np.exp(2) / (np.exp(2) + np.exp(0.5) + 2), rel=1e-6)
    assert explanation.classes.tolist() == [[RED]]
    assert explanation.scores.tolist() == [[2.0]]
    # The weight of red is 2, spread over the mask; the weights of the other channels are zero.
    weight = 2 * actual.mask / (16 + 9 + 9)
    assert torch.allclose(explanation.maps[0, 0], weight * PICTURE[0, 0], rtol=1e-6, atol=0)
    pooled = explain(Mask(RED), method="gradcam").maps[0, 0]
    assert torch.allclose(pooled, 2 / (HEIGHT * WIDTH) * PICTURE[0, 0], rtol=1e-6, atol=0)


def test_the_sum_is_as_many_times_the_mean_as_there_are_pixels():
    (mean,), (total,) = (explain(Mask(RED, reduction=item)).scores[0].tolist() for item in ("mean", "sum"))
    assert (mean, total) == (2.0, 2.0 * (16 + 9 + 9))


def test_a_point_names_the_region_that_is_connected_to_it_also_by_corners():
    assert torch.equal(only(explain(Mask(mask=(2, 3)))).mask, pixels((1, 2, 5, 6)))
    actual = only(explain(Mask(RED, (13.9, 4.0))))
    assert torch.equal(actual.mask, pixels((9, 1, 12, 4), (12, 4, 15, 7)))
    assert (actual.index, actual.point, actual.box) == (RED, (13.9, 4.0), (9.0, 1.0, 15.0, 7.0))


def test_a_point_without_a_class_takes_the_one_predicted_there_the_background_too():
    assert only(explain(Mask(mask=(7, 11)))).index == GREEN
    assert only(explain(Mask(mask=(0, 0)))).index == 0


def test_a_box_holds_the_pixels_whose_middle_is_inside():
    assert torch.equal(only(explain(Mask(GREEN, (2.5, 3.4, 8.49, 7.5)))).mask, pixels((2, 3, 8, 7)))
    assert only(explain(Mask(GREEN, (-5, -5, 99, 99)))).box == (0.0, 0.0, float(WIDTH), float(HEIGHT))


@pytest.mark.parametrize("form", [torch.Tensor.numpy, torch.Tensor.bool, lambda item: item.to(torch.uint8) * 7])
def test_an_array_says_where_by_what_is_not_zero(form):
    mask = pixels((2, 3, 8, 7))
    assert torch.equal(only(explain(Mask(GREEN, form(mask)))).mask, mask)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "I;16"])
def test_a_picture_says_where_by_what_is_not_black(tmp_path: Path, mode: str):
    mask = pixels((2, 3, 8, 7)).numpy()
    image = Image.fromarray(mask.astype(np.uint16 if mode == "I;16" else np.uint8) * (255 if mode == "1" else 1))
    if mode == "P":
        image.putpalette([0, 0, 0, 200, 30, 30])
    elif mode == "RGB":
        image = Image.merge("RGB", [Image.new("L", image.size), Image.new("L", image.size), image])
    elif mode == "1":
        image = image.convert("1")
    assert image.mode == mode
    image.save(tmp_path / "mask.png")
    for path in (tmp_path / "mask.png", str(tmp_path / "mask.png")):
        assert torch.equal(only(explain(Mask(GREEN, path))).mask, torch.from_numpy(mask))


@pytest.mark.parametrize("hidden", [(0, 0, 0), (255, 255, 255)])
def test_transparent_pixels_are_outside(tmp_path: Path, hidden: tuple[int, int, int]):
    mask = pixels((2, 3, 8, 7)).numpy()
    colours = np.where(mask[..., None], (255, 0, 0), hidden).astype(np.uint8)
    Image.fromarray(np.dstack([colours, 255 * mask.astype(np.uint8)])).save(tmp_path / "mask.png")
    assert torch.equal(only(explain(Mask(GREEN, tmp_path / "mask.png"))).mask, torch.from_numpy(mask))


def test_without_a_class_it_is_the_most_frequent_one_in_the_mask():
    # Without labels, no class is known to be the background.
    assert only(explain(Mask())).index == 0
    assert only(explain(Mask(mask=(8, 0, 16, 8)))).index == 0
    assert only(explain(Mask(mask=(2, 3, 5, 10)))).index == RED


def test_a_background_is_taken_only_where_there_is_nothing_else():
    model = ToyForSemanticSegmentation()
    assert only(explain(Mask(), model=model)).name == "red fox"
    assert only(explain(Mask(mask=(8, 0, 16, 8)), model=model)).name == "red fox"
    assert only(explain(Mask(), paint(), model=model)).name == "background"


def test_a_class_may_be_named_by_its_label():
    actual = only(explain(Mask("Tree"), model=ToyForSemanticSegmentation()))
    assert (actual.index, actual.name) == (GREEN, "tree")
    assert torch.equal(actual.mask, pixels((3, 8, 8, 12)))


def test_several_classes_have_a_map_each_from_one_pass():
    explanation = explain(Mask([GREEN, RED]))
    assert explanation.classes.tolist() == [[GREEN, RED]]
    assert [instance.index for instance in explanation.instances[0]] == [GREEN, RED]
    for k, index in enumerate((GREEN, RED)):
        alone = explain(Mask(index))
        assert torch.allclose(explanation.maps[:, k], alone.maps[:, 0], rtol=1e-6, atol=0)
        assert torch.equal(explanation.instances[0][k].mask, alone.instances[0][0].mask)


def test_each_picture_of_a_batch_has_its_own_class_mask_and_score():
    second_picture = paint((0, 0, 4, 4, BLUE))
    pair = torch.cat([PICTURE, second_picture])
    model = ToyForSemanticSegmentation()
    explanation = explain(Mask(), pair, model=model)
    assert explanation.classes.tolist() == [[RED], [BLUE]]
    assert torch.equal(explanation.instances[1][0].mask, pixels((0, 0, 4, 4)))
    for i in range(2):
        alone = explain(Mask(), pair[i : i + 1], model=model)
        assert torch.allclose(explanation.maps[i], alone.maps[0], rtol=1e-6, atol=0)


def test_there_may_be_one_array_for_each_picture():
    masks = torch.stack([pixels((0, 0, 4, 4)), pixels((8, 8, 10, 11))])
    explanation = explain(Mask(RED, masks), torch.cat([PICTURE, PICTURE]))
    assert [instance[0].box for instance in explanation.instances] == [(0.0, 0.0, 4.0, 4.0), (8.0, 8.0, 10.0, 11.0)]
    assert explanation.scores.flatten().tolist() == [pytest.approx(2 * 6 / 16), 0.0]


def enlarge(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Enlarge (h,w) by bilinear interpolation with half-pixel centres and repeated borders, pixel by pixel."""
    result = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            y = min(max((row + 0.5) * values.shape[0] / height - 0.5, 0), values.shape[0] - 1)
            x = min(max((column + 0.5) * values.shape[1] / width - 0.5, 0), values.shape[1] - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, values.shape[0] - 1), min(left + 1, values.shape[1] - 1)
            upper = values[top, left] * (1 - (x - left)) + values[top, right] * (x - left)
            lower = values[bottom, left] * (1 - (x - left)) + values[bottom, right] * (x - left)
            result[row, column] = upper * (1 - (y - top)) + lower * (y - top)
    return result


def test_coarse_logits_are_enlarged_before_the_mask_is_laid_on_them():
    model = Colours(coarse=4).double()
    pictures = torch.rand(1, 3, HEIGHT, WIDTH, dtype=torch.float64)
    logits = model(pictures)[0].detach().numpy()
    large = np.stack([enlarge(logit, HEIGHT, WIDTH) for logit in logits])
    index = GREEN
    mask = large.argmax(0) == index
    assert 0 < mask.sum() < mask.size
    explanation = gradcam.explain(model, pictures, "features.0", target=Mask(index))
    assert np.array_equal(only(explanation).mask.numpy(), mask)
    assert explanation.scores.item() == pytest.approx(large[index][mask].mean(), rel=1e-6)
    chances = np.exp(large) / np.exp(large).sum(0)
    assert only(explanation).score == pytest.approx(chances[index][mask].mean(), rel=1e-6)


def test_what_lies_around_a_padded_picture_is_in_no_mask():
    pair = torch.cat([PICTURE, PICTURE])
    windows = ((0, 0, 7, WIDTH), (1, 2, 10, 9))
    batch = replace(to_batch(pair), windows=windows)
    # Explanations refer to pixels of the original images.
    first, second = (row[0] for row in explain(Mask(RED), batch).instances)
    assert torch.equal(first.mask, pixels((1, 2, 5, 6), (9, 1, 12, 4), (12, 4, 15, 7))[:7])
    assert torch.equal(second.mask, pixels((1, 2, 5, 6), (9, 1, 11, 4))[1:11, 2:11])
    assert second.box == (0.0, 0.0, 9.0, 5.0)
    # Coloured padding does not count as background, whose logit is 1 where there is no colour.
    assert explain(Mask(0), batch).scores.tolist() == [[1.0], [1.0]]
    # The second image has three rows of green, and the first image has none.
    assert read_message(Mask(GREEN), batch).startswith("image 0: No pixel")
    assert explain(Mask(GREEN, (3, 6, 8, 12)), batch).scores.flatten().tolist() == [0.0, pytest.approx(2 * 3 / 5)]
    assert "9 pixels wide and 10 high and begins at (2, 1)" in read_message(Mask(mask=(11, 3)), batch)
    assert "is empty" in read_message(Mask(RED, (0, 8, 4, 12)), batch)


class Single(nn.Module):
    """A segmenter with one logit per pixel, which says whether the pixel is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 2, 1)
        self.head = nn.Conv2d(2, 1, 1)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.features(pictures))}


def test_a_single_logit_is_for_class_1_and_against_class_0():
    model, pictures = Single().double(), torch.randn(1, 3, HEIGHT, WIDTH, dtype=torch.float64)
    logit = model(pictures)["out"][0, 0].detach()
    assert 0 < (logit > 0).sum() < logit.numel()
    explanation = explain(Mask([1, 0]), pictures, model)
    for actual, sign in zip(explanation.instances[0], (1, -1)):
        inside = logit * sign > 0
        assert torch.equal(actual.mask, inside)
        assert actual.score == pytest.approx((sign * logit)[inside].sigmoid().mean().item(), rel=1e-6)
    expected = [logit[logit > 0].mean().item(), -logit[logit < 0].mean().item()]
    assert explanation.scores[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert only(explain(Mask(), pictures, model)).index == 1


def test_reruns_keep_the_pixels_that_were_chosen():
    # If red is removed, no pixel is predicted as red, and there would be no mask.
    explanation = explain(Mask(RED), method="ablationcam")
    # Without red, the logit falls from 2 to 0; without green or blue, it does not change.
    assert torch.allclose(explanation.maps[0, 0], PICTURE[0, 0], rtol=1e-6, atol=0)


def test_the_model_is_left_as_it_was():
    model = Colours()
    before = traces(model)
    explain(Mask(RED), model=model)
    with pytest.raises(TargetError):
        explain(Mask(BLUE), model=model)
    assert_same(before, traces(model))


def test_the_output_is_the_models_own():
    assert torch.equal(explain(Mask(RED)).output, Colours()(PICTURE).detach())


def read_message(target: Mask, pictures: Tensor = PICTURE, model: nn.Module | None = None) -> str:
    with pytest.raises(TargetError) as caught:
        explain(target, pictures, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_class_without_a_pixel_is_told_with_those_that_are_there():
    share = (HEIGHT * WIDTH - 34 - 20) / (HEIGHT * WIDTH)
    message = read_message(Mask("sky"), model=ToyForSemanticSegmentation())
    assert "No pixel is predicted as sky (3)" in message
    assert f"background (0) {100 * share:.1f} %, red fox (1) {3400 / 192:.1f} %, tree (2) {2000 / 192:.1f} %" in message
    assert read_message(Mask(BLUE)).startswith("No pixel is predicted as class 3. Predicted: class 0 ")
    assert read_message(Mask(GREEN), torch.cat([PICTURE, paint((0, 0, 4, 4, RED))])).startswith("image 1: No pixel")


def test_a_point_where_another_class_is_predicted_is_told_with_that():
    message = read_message(Mask("tree", (2, 3)), model=ToyForSemanticSegmentation())
    assert "At the point (2, 3) the model predicts red fox (1), not tree (2)" in message


@pytest.mark.parametrize("point", [(WIDTH, 0), (-1, 3), (3, HEIGHT)])
def test_a_point_outside_of_the_picture(point):
    message = read_message(Mask(mask=point))
    assert f"{point} is outside the image, which is {WIDTH} pixels wide and {HEIGHT} high" in message


def test_classes_that_do_not_exist():
    assert "Class 4 does not exist: this model has 4 classes, 0 to 3" in read_message(Mask(4))
    assert "Class -1 does not exist" in read_message(Mask(-1))
    assert "'tree'" in read_message(Mask("treee"), model=ToyForSemanticSegmentation())
    assert "pass the index of" in read_message(Mask("tree"))


def test_an_empty_mask(tmp_path: Path):
    assert "is empty" in read_message(Mask(RED, np.zeros((HEIGHT, WIDTH), bool)))
    assert "is empty" in read_message(Mask(RED, (20, 3, 24, 6)))
    Image.new("L", (WIDTH, HEIGHT)).save(tmp_path / "black.png")
    assert "black.png" in read_message(Mask(RED, tmp_path / "black.png"))


def test_a_mask_of_another_size_is_told_with_both():
    message = read_message(Mask(RED, np.ones((WIDTH, HEIGHT), bool)))
    assert "12 pixels wide and 16 high" in message
    assert "16 wide and 12 high" in message


def test_another_number_of_masks_than_of_images():
    assert "There are 3 masks for 1 image(s)" in read_message(Mask(RED, np.ones((3, HEIGHT, WIDTH), bool)))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"reduction": "max"}, "reduction is 'max', expected one of 'mean', 'sum'"),
        ({"mask": np.ones((HEIGHT, WIDTH))}, "float64, expected bools or integers"),
        ({"mask": (1, 2, 3)}, "expected a point (x, y), a box"),
        ({"mask": (1, float("nan"))}, "expected a point (x, y), a box"),
        ({"mask": True}, "expected a point (x, y), a box"),
        ({"mask": (5, 3, 5, 9)}, "The box is (5, 3, 5, 9), expected left, top, right and bottom"),
        ({"class_": 1.5}, "The class is 1.5, expected its index or its label"),
        ({"class_": [1, None]}, "The class is [1, None]"),
        ({"class_": []}, "The class is []"),
    ],
)
def test_what_no_mask_can_be_is_told_before_there_is_a_model(options, part):
    with pytest.raises(TargetError) as caught:
        Mask(**options)
    assert part in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ImageError, match=r"nowhere\.png: does not exist"):
        explain(Mask(RED, tmp_path / "nowhere.png"))
    Image.new("L", (WIDTH, HEIGHT), 255).save(tmp_path / "mask.jpg")
    with pytest.raises(ImageError, match="JPEG"):
        explain(Mask(RED, tmp_path / "mask.jpg"))


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.features(pictures).mean((2, 3))


def test_a_model_that_is_no_segmenter():
    message = read_message(Mask(1), model=Classes())
    assert "Classes returned a tensor (1, 4)" in message
    assert "(1, classes, h, w)" in message


def test_volumes_have_no_masks():
    with pytest.raises(TargetError, match=r"\(1, 1, 4, 8, 8\), but a mask needs images"):
        gradcam.explain(nn.Conv3d(1, 2, 3), torch.rand(1, 1, 4, 8, 8), target=Mask(1))


def test_other_views_would_have_the_mask_elsewhere():
    with pytest.raises(TargetError, match="leave augmentation= out"):
        explain(Mask(RED), augmentation="flip")
