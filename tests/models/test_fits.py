"""Test which part of an image the network sees: its centre, all of it, or tiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

import gradcam
from gradcam.errors import GradcamError, ImageError, ModelError
from gradcam.targets import ClassTarget
from tests.cli.test_cli import Command, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

Photo = Callable[[str], Path]
CAT_AND_CUP = "cat_and_espresso.jpg"


class Patches(nn.Module):
    """A model of independent patches of 32 pixels, so that the maps of tiles are parts of one map."""

    def __init__(self, side: int = 64) -> None:
        super().__init__()
        self.side = side
        self.body = nn.Sequential(nn.Conv2d(3, 8, 32, 32), nn.ReLU())
        self.head = nn.Linear(8, 5)
        self.batches: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return self.head(self.body(images).mean((2, 3)))


@pytest.fixture
def patches() -> gradcam.Classifier:
    torch.manual_seed(3)
    model = Patches().eval()
    return gradcam.load_classifier(model, size=64, crop=1, mean=(0.5,) * 3, std=(0.5,) * 3, layer="body")


def _prepare(picture: np.ndarray[Any, Any], size: tuple[int, int], interpolation: str = "BICUBIC") -> Tensor:
    """Resize the whole image with Pillow, and scale it to [-1,1]."""
    resized = Image.fromarray(picture).resize(size[::-1], Image.Resampling[interpolation])
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None].float() / 127.5 - 1


def test_the_whole_image_keeps_its_aspect_ratio(classifier: gradcam.Classifier, photo: Photo) -> None:
    path = photo(CAT_AND_CUP)  # 800 x 640
    picture = gradcam.read_image(path)
    explanation = classifier.explain(path, fit="whole")
    cropped = classifier.explain(path)
    # The shorter side becomes 256 pixels, as in the model's default preprocessing before the centre crop.
    model_input = _prepare(picture, (256, 320))
    expected = gradcam.explain(classifier.model, model_input, classifier.layer, target=int(cropped.classes[0, 0]))
    torch.testing.assert_close(explanation.maps, expected.maps, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(explanation.scores, expected.scores, rtol=1e-4, atol=1e-5)
    assert explanation.regions == [(0, 0, 640, 800)]
    assert explanation.overlay().shape == picture.shape
    # By default, predictions come from the model's default crop.
    torch.testing.assert_close(explanation.probabilities(), cropped.probabilities())
    explanation_seen = replace(classifier, predictions="seen").explain(path, fit="whole")
    torch.testing.assert_close(explanation_seen.probabilities(), torch.softmax(classifier.model(model_input), 1))


def test_the_image_outside_the_centre_crop_is_explained(classifier: gradcam.Classifier, photo: Photo) -> None:
    """The cat is the left half of the image; the default centre crop removes a third of it."""
    cat = classifier.find_class("Egyptian cat")
    heatmap = classifier.explain(photo(CAT_AND_CUP), target=cat, fit="whole").heatmaps[0, 0]
    left_sum, right_sum = heatmap[:, :160].sum(), heatmap[:, 160:].sum()
    assert left_sum / (left_sum + right_sum) > 0.85
    outside = heatmap[:, :48].mean()  # the 120 pixels at the left edge, which the centre crop removes
    assert outside > 3 * right_sum / heatmap[:, 160:].numel()


@pytest.mark.parametrize("fit", ["tiles", "tiles:64", "tiles:160"])
def test_maps_of_tiles_join_to_the_map_of_the_whole_image(patches: gradcam.Classifier, photo: Photo, fit: str) -> None:
    picture = gradcam.read_image(photo("coffee.jpg"))[:320, :448]
    explanation = patches.explain(picture, target=2, fit=fit)
    side = int(fit.partition(":")[2] or 64)
    size = tuple(64 + round((length * 64 / side - 64) / 32) * 32 for length in picture.shape[:2])
    full = gradcam.explain(patches.model, _prepare(picture, size, "BILINEAR"), "body", target=2)
    assert explanation.maps.shape == full.maps.shape
    # The tolerance covers rounding to 8 bits.
    torch.testing.assert_close(explanation.heatmaps, full.heatmaps, rtol=0, atol=5e-3)
    assert max(patches.model.batches) <= 8  # Only a few tiles are computed at a time.
    assert explanation.regions == [(0, 0, 320, 448)]


def test_maps_of_tiles_are_resized_by_the_interpolation(patches: gradcam.Classifier, photo: Photo) -> None:
    picture = gradcam.read_image(photo("coffee.jpg"))[:320, :448]
    explanation = patches.explain(picture, target=2, fit="tiles:160", interpolation="nearest")
    expected = F.interpolate(explanation.maps, explanation.heatmaps.shape[2:], mode="nearest-exact")
    torch.testing.assert_close(explanation.heatmaps, expected / expected.max())


def test_borders_of_tiles_are_smooth(classifier: gradcam.Classifier, photo: Photo) -> None:
    """Check that the map is no rougher at the borders of tiles than elsewhere."""
    cam = classifier.explain(photo(CAT_AND_CUP), target="Egyptian cat", fit="tiles:320").maps[0, 0]
    steps = cam.diff(dim=1).abs().mean(0)  # from each column of cells to the next
    tile_cells = cam.shape[1] * 320 // 800  # cells in one tile
    starts = [round(k * (cam.shape[1] - tile_cells) / 3) for k in (1, 2)]
    at_borders = torch.cat([steps[start - 1 : start] for start in starts]).mean()
    assert at_borders < 1.5 * steps.mean()


def test_tiles_report_progress_and_predict_by_their_mean_logits(patches: gradcam.Classifier) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    progress: list[tuple[int, int]] = []
    tiled = replace(patches, predictions="seen", fit="tiles")
    explanation = tiled.explain(picture, progress=lambda completed, total: progress.append((completed, total)))
    tiles = [picture[y0 : y0 + 64, x0 : x0 + 64] for y0 in (0, 32, 64) for x0 in (0, 32, 64, 96, 128)]
    logits = patches.model(patches.batch(tiles)).mean(0)
    torch.testing.assert_close(explanation.output[0], logits, rtol=1e-4, atol=1e-5)
    assert explanation.classes.tolist() == [[int(logits.argmax())]]
    torch.testing.assert_close(explanation.scores[0, 0], logits.max(), rtol=1e-4, atol=1e-5)
    assert progress == [(8, 15), (15, 15)]


def test_an_image_smaller_than_a_tile_is_one_tile(patches: gradcam.Classifier) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    explanation = patches.explain(picture, target=1, fit="tiles")
    cropped = patches.explain(picture, target=1)
    torch.testing.assert_close(explanation.heatmaps, cropped.heatmaps, rtol=1e-4, atol=1e-5)


def make_transformer(kind: str) -> nn.Module:
    if kind == "torchvision":
        model = VisionTransformer(64, 16, 2, 2, 24, 48, num_classes=7)
        nn.init.normal_(model.heads.head.weight)  # The head is initialised with zeros.
        return model
    if kind == "transformers":
        library = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        return library.ViTForImageClassification(library.ViTConfig(image_size=64, patch_size=16, num_labels=7, **sizes))
    names = {"timm": ("vit_tiny_patch16_224", 2), "swin": ("swin_tiny_patch4_window7_224", (1, 1, 1, 1))}
    name, depth = names[kind]
    options = {"img_size": 64, "num_classes": 7, "depth" if kind == "timm" else "depths": depth}
    return pytest.importorskip("timm").create_model(name, **options)


@pytest.mark.parametrize("kind", ["torchvision", "timm", "swin", "transformers"])
def test_positions_of_a_transformer_are_interpolated(kind: str) -> None:
    torch.manual_seed(0)
    model = make_transformer(kind).eval()
    classifier = gradcam.load_classifier(model, size=64, crop=1, fit="whole")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # The top left quarter is bright, so the map has to answer there with any weights.
    picture = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
    explanation = classifier.explain(picture, target=3)
    assert explanation.heatmaps.shape == (1, 1, 64, 128)
    grid = explanation.maps.shape[2:]
    assert grid[1] == 2 * grid[0]
    # At the model's own input size nothing is interpolated.
    square = classifier.explain(picture[:, :64], target=3)
    plain = gradcam.explain(model, classifier.batch([picture[:, :64]]), explanation.layer, target=3)
    torch.testing.assert_close(square.maps, plain.maps)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_in_training_mode_is_restored_and_its_positions_are_current() -> None:
    torch.manual_seed(0)
    model = make_transformer("timm")
    model.train()
    picture = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
    classifier = gradcam.load_classifier(model, size=64, crop=1, fit="whole", layer="blocks.0.norm1")
    before = classifier.explain(picture, target=3).maps
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    positions: Any = model.pos_embed
    positions.data = torch.randn_like(positions) * 3  # Averaged weights are assigned in this way.
    after = classifier.explain(picture, target=3).maps
    assert not torch.allclose(before, after)
    model.double()
    torch.testing.assert_close(classifier.explain(picture, target=3).maps, after, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fit", ["whole", "tiles"])
@pytest.mark.parametrize("score", ["logit", "contrast"])
def test_each_image_may_have_its_own_class(patches: gradcam.Classifier, fit: str, score: str) -> None:
    pictures = list(np.random.default_rng(0).integers(0, 256, (2, 128, 192, 3), dtype=np.uint8))
    together = patches.explain(pictures, target=ClassTarget([[1], [2]], score=score), fit=fit)
    for i, index in enumerate((1, 2)):
        alone = patches.explain(pictures[i], target=ClassTarget([[index]], score=score), fit=fit)
        torch.testing.assert_close(together.maps[i], alone.maps[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.scores[i], alone.scores[0], rtol=1e-4, atol=1e-5)


def test_interpolated_positions_agree_with_torchvision() -> None:
    torch.manual_seed(0)
    small = VisionTransformer(64, 16, 2, 2, 24, 48, num_classes=7).eval()
    nn.init.normal_(small.heads.head.weight)
    large = VisionTransformer(128, 16, 2, 2, 24, 48, num_classes=7).eval()
    large.load_state_dict(interpolate_embeddings(128, 16, small.state_dict()))
    # With a crop of 0.5 the preprocessing resizes the shorter side to 128 pixels, so the whole image has 128 pixels.
    classifier = gradcam.load_classifier(small, size=64, crop=0.5, layer="encoder.layers.encoder_layer_0")
    picture = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    explanation = replace(classifier, predictions="seen").explain(picture, fit="whole", target=3)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = ((torch.from_numpy(picture) / 255 - mean) / std).permute(2, 0, 1)[None].float()
    # The tolerance is large because torchvision interpolates with aligned corners.
    torch.testing.assert_close(explanation.output, large(images), rtol=0.2, atol=0.2)


def test_a_model_with_a_fixed_input_size_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5)).eval()
    with pytest.raises(ModelError, match="takes only 64 x 64 pixels.*'tiles'"):
        gradcam.load_classifier(model, size=64, crop=1, fit="whole")
    with pytest.raises(ModelError, match="takes only 64 x 64 pixels"):
        gradcam.load_classifier(model, size=64, crop=1).explain(np.zeros((100, 80, 3), np.uint8), fit="whole")
    tiles = gradcam.load_classifier(model, size=64, crop=1, fit="tiles", layer="1")
    with pytest.raises(ImageError, match="Tiles of 1 pixels would split .* use the fit 'tiles:"):
        tiles.explain(np.zeros((400, 400, 3), np.uint8), target=0, fit="tiles:1")
    assert tiles.explain(np.zeros((200, 300, 3), np.uint8), target=0).maps.shape == (1, 1, 24, 36)


def test_an_invalid_fit_is_refused(classifier: gradcam.Classifier, photo: Photo) -> None:
    for fit in ("all", "crop:3", "tiles:0", "tiles:x", 3, ""):
        with pytest.raises(GradcamError, match="fit is .*expected 'crop'"):
            gradcam.load_classifier(fit=fit)  # type: ignore[arg-type]
    with pytest.raises(GradcamError, match="predictions is 'mine', expected own or seen"):
        gradcam.load_classifier(predictions="mine")
    with pytest.raises(ImageError, match="3000 x 40. .* would be 19200 x 256 pixels.*'tiles'"):
        classifier.explain(np.zeros((40, 3000, 3), np.uint8), fit="whole")
    with pytest.raises(ImageError, match="256 x 384 and 352 x 256 after preprocessing.*one by one"):
        classifier.explain([photo("coffee.jpg"), photo("koala.webp")], fit="whole")
    with pytest.raises(ImageError, match="in tiles. A batch needs images of one size"):
        classifier.explain([photo("coffee.jpg"), photo("koala.webp")], fit="tiles:400")
    with pytest.raises(GradcamError, match="input-gradients does not support the fit 'tiles'"):
        replace(classifier, fit="tiles").attribute(photo("coffee.jpg"), "input-gradients")


def test_an_attribution_is_of_the_whole_picture(classifier: gradcam.Classifier, photo: Photo) -> None:
    attribution = replace(classifier, fit="whole").attribute(photo(CAT_AND_CUP), "input-gradients")
    assert attribution.values.shape[-2:] == (256, 320)
    assert attribution.regions == [(0, 0, 640, 800)]
    torch.testing.assert_close(attribution.output, classifier.explain(photo(CAT_AND_CUP)).output)
    transformer = gradcam.load_classifier(make_transformer("timm").eval(), size=64, crop=1, fit="whole")
    norm = transformer.model.blocks[1].norm1  # type: ignore[union-attr,index]
    # The error comes after the layer was found: the transformer has no ReLU.
    with pytest.raises(GradcamError, match="ReLU"):
        transformer.attribute(np.zeros((64, 128, 3), np.uint8), "guided-gradcam", layer=norm)


def test_the_outline_is_thin_and_inside_the_visible_region(classifier: gradcam.Classifier, photo: Photo) -> None:
    explanation = classifier.explain(photo(CAT_AND_CUP))
    y0, x0, height, width = explanation.regions[0]
    plain, drawn = explanation.overlay(outline=False), explanation.overlay()
    changed = (plain != drawn).any(2)
    inner = changed[y0 + 4 : y0 + height - 4, x0 + 4 : x0 + width - 4]
    assert not inner.any()
    outside = np.ones(changed.shape, bool)
    outside[y0 : y0 + height, x0 : x0 + width] = False
    assert not changed[outside].any()
    border = np.concatenate([changed[y0, x0 : x0 + width], changed[y0 : y0 + height, x0]])
    assert border.mean() > 0.95
    blank = np.zeros((7, 7), np.float32)
    picture = explanation.images[0]
    unmarked = gradcam.overlay(picture, blank, region=explanation.regions[0], outline=True, base="color")
    assert np.array_equal(unmarked, picture)
    full = classifier.explain(photo(CAT_AND_CUP), fit="whole")
    assert np.array_equal(full.overlay(), full.overlay(outline=False))


def test_the_command_line_explains_whole_images_of_several_sizes(
    gradcam_command: Command, tmp_path: Path, photo: Photo
) -> None:
    names = ("coffee.jpg", "koala.webp", CAT_AND_CUP)
    out = tmp_path / "out"
    arguments = ("batch", *(photo(name) for name in names), "-o", out, "--save", "map")
    assert gradcam_command(*arguments, "--fit", "whole").status == 0
    records = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [record["fit"] for record in records] == ["whole"] * 3
    assert [record["region"] for record in records] == [[0, 0, *record["size"]] for record in records]
    shapes = [np.load(out / record["explained"][0]["map"]).shape for record in records]
    assert shapes == [(8, 12), (11, 8), (8, 10)]
    cropped = gradcam_command("run", photo("coffee.jpg"), "-o", tmp_path / "own", "--json")
    # These predictions come from another pass without gradients, so they differ in the last digits.
    for prediction, expected in zip(json.loads(cropped.out)["predictions"], records[0]["predictions"], strict=True):
        assert prediction == expected | {"probability": pytest.approx(expected["probability"], rel=1e-4)}
    assert "fit" not in json.loads(cropped.out)
    again = gradcam_command(*arguments, "--resume")
    assert again.status != 0
    assert "fit" in again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fit", "all"), "expected 'crop', 'whole', 'tiles'"),
        (("--predictions", "seen"), "add one of them"),
        (("--fit", "tiles", "--method", "input-gradients"), "--fit tiles does not work with --method input-gradients"),
    ],
)
def test_the_command_line_refuses_incompatible_options(
    gradcam_command: Command, photo: Photo, arguments: tuple[str, ...], message: str
) -> None:
    result = gradcam_command("run", photo("coffee.jpg"), *arguments)
    assert result.status == 2
    assert message in " ".join(result.err.split())
