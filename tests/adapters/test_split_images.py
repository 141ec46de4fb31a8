"""Test images that reach a model in parts: frames, splits, rows of patches, and tiles with black margins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import ImageError
from gradcam.targets import Mask, Text, Token

T: Any = pytest.importorskip("transformers")

from tests.adapters.vlm import FAMILIES, SQUARE, TALL, WIDE, Size, make_image, process  # noqa: E402
from tests.adapters.vlm_folders import make_parts  # noqa: E402

FRAMES = 5


class FoldedFrames(nn.Module):
    """A video model that folds the frames (N,C,T,H,W) into the batch of an image encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.Tanh(), nn.Conv2d(6, 6, 1))
        self.head = nn.Linear(6, 4)

    def forward(self, clips: Tensor) -> Tensor:
        features = self.encoder(clips.transpose(1, 2).flatten(0, 1)).mean((2, 3))
        return self.head(features.unflatten(0, (len(clips), -1)).tanh().mean(1))


@pytest.mark.parametrize("clips", [1, 2])
def test_frames_in_the_batch_have_maps_at_their_places(clips: int) -> None:
    torch.manual_seed(0)
    model = FoldedFrames().double().eval()
    images = torch.randn(clips, 3, FRAMES, 24, 32, dtype=torch.float64)
    options: Any = {"method": "hirescam", "evidence": "signed"}
    options["reshape"] = lambda tensor: tensor.unflatten(0, (-1, FRAMES)).transpose(1, 2)
    explanation = gradcam.explain(model, images, "encoder.2", target=1, **options)
    for clip in range(clips):
        rows = model.encoder(images[clip].transpose(0, 1)).detach().requires_grad_()
        score = model.head(rows.mean((2, 3)).tanh().mean(0))[1]
        (gradient,) = torch.autograd.grad(score, rows)
        expected = (gradient * rows).sum(1).detach()
        torch.testing.assert_close(explanation.maps[clip, 0].double(), expected, rtol=1e-5, atol=1e-9)
    with pytest.raises(gradcam.GradcamError, match="its first axis is not the batch"):
        gradcam.explain(model, images, "encoder.2", target=1)


def test_the_splits_of_eomt_have_maps_like_single_images() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_blocks": 1, "num_queries": 6}
    config = T.EomtConfig(**sizes, image_size=64, patch_size=8, num_upscale_blocks=1, num_labels=3)
    model = T.EomtForUniversalSegmentation(config).eval()
    processor = T.EomtImageProcessor(size={"shortest_edge": 64, "longest_edge": None}, do_split_image=True)
    image = make_image((64, 160))
    painted = image.copy()
    painted[10:20, 140:150] = 255, 0, 0
    inputs = [processor(images=[values], return_tensors="pt") for values in (image, painted)]
    starts = [(int(start), int(end)) for _, start, end in inputs[0]["patch_offsets"]]
    target = Mask(1, mask=(0, 0, 64, 64))
    before, after = (gradcam.explain(model, item["pixel_values"], target=target, evidence="signed") for item in inputs)
    assert len(starts) == len(before.maps) > 1
    for k, (start, end) in enumerate(starts):
        alone = gradcam.explain(model, inputs[1]["pixel_values"][k : k + 1], target=target, evidence="signed")
        torch.testing.assert_close(after.maps[k : k + 1], alone.maps, rtol=1e-4, atol=1e-7)
        assert torch.allclose(before.maps[k], after.maps[k], rtol=1e-4, atol=1e-7) != (start < 150 and end > 140)


def record_change() -> Callable[[Tensor], Tensor]:
    """Return a method whose maps are the change of the activations since its first call."""
    before: list[Tensor] = []

    def measure(activations: Tensor) -> Tensor:
        before.append(activations)
        return (activations - before[0]).norm(dim=1)

    return gradcam.method("change", summary="change of the activations")(measure)


@pytest.mark.parametrize("size", [(64, 64), (32, 96), (96, 32)])
def test_naflex_siglip_takes_images_of_any_size(size: Size) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = small | {"vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    vision = small | {"patch_size": 8, "num_patches": 64}
    model = T.Siglip2Model(T.Siglip2Config(vision_config=vision, text_config=text)).eval()
    for name, parameter in model.named_parameters():
        if "out_proj" in name:
            parameter.data *= 1e-3  # Attention then hardly mixes the patches.
    image = torch.from_numpy(make_image(size)).permute(2, 0, 1)[None] / 255
    painted = image.clone()
    row, column = round(0.3 * size[0]), round(0.7 * size[1])
    painted[..., row - 3 : row + 3, column - 3 : column + 3] = 1
    options: Any = {"target": Text(torch.ones(32)), "method": record_change()}
    layer = "vision_model.encoder.layers.0"
    gradcam.explain(model, image, layer, **options)
    heatmap = gradcam.explain(model, painted, layer, **options).heatmaps[0, 0]
    peak = divmod(int(heatmap.argmax()), size[1])
    assert heatmap.shape == size
    assert abs(peak[0] // 8 - row // 8) <= 1
    assert abs(peak[1] // 8 - column // 8) <= 1


def test_naflex_siglip_takes_its_processors_output() -> None:
    """Compare with the images that the rows of patches were cut from."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = small | {"vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    config = T.Siglip2Config(vision_config=small | {"patch_size": 8, "num_patches": 64}, text_config=text)
    model = T.Siglip2Model(config).eval()
    processor = T.Siglip2ImageProcessor(patch_size=8, max_num_patches=40)  # 5 of the 40 rows are padding.
    target = Text(torch.linspace(-1, 1, 32))
    inputs = processor(images=[make_image((40, 56), seed) for seed in range(2)], return_tensors="pt")
    assert inputs["spatial_shapes"].tolist() == [[5, 7]] * 2
    rows = inputs["pixel_values"][:, :35].reshape(2, 5, 7, 8, 8, 3)
    images = torch.stack([torch.cat([torch.cat([*row], 1) for row in cells]) for cells in rows]).permute(0, 3, 1, 2)
    explanation = gradcam.explain(model, inputs, target=target)
    expected = gradcam.explain(model, images, target=target)
    assert explanation.maps.shape == (2, 1, 5, 7)
    assert explanation.maps.abs().max() > 0
    torch.testing.assert_close(explanation.maps, expected.maps)
    scores = model.get_image_features(**inputs)
    vectors = getattr(scores, "pooler_output", scores).detach()
    cosines = torch.nn.functional.cosine_similarity(vectors, torch.linspace(-1, 1, 32)[None], dim=1)
    torch.testing.assert_close(explanation.scores[:, 0], cosines, rtol=1e-4, atol=1e-5)
    mixed = processor(images=[make_image((40, 56)), make_image((56, 40))], return_tensors="pt")
    with pytest.raises(ImageError, match="5 x 7, 7 x 5 patches: explain images of different shapes one by one"):
        gradcam.explain(model, mixed, target=target)


def test_a_video_is_refused_and_its_frames_are_explained_as_images() -> None:
    """Use frames as several images of one prompt, as the message says."""
    family = FAMILIES["qwen2_vl"]
    model, processor = make_parts("qwen2_vl")
    frames = [make_image(WIDE, seed) for seed in range(3)]
    clip = np.stack(frames).transpose(0, 3, 1, 2)
    text = "what <|vision_start|><|video_pad|><|vision_end|> is on the table"
    video = processor(videos=[torch.from_numpy(clip)], text=[text], return_tensors="pt", do_sample_frames=False)
    with pytest.raises(ImageError, match="have a video, but .* pass the frames as images"):
        gradcam.explain(model, dict(video), target=Token([5]))
    explanation = gradcam.explain(model, process(family, [frames]), target=Token([5, 6]), evidence="signed")
    assert explanation.maps.shape[:2] == (3, 2)
    captioner = gradcam.load_model(model, processor=processor)
    answer = captioner.explain(tuple(frames), target=Token([5, 6], prompt="what is on the table"))
    assert [answer.overlay(i).shape for i in range(3)] == [frame.shape for frame in frames]
    assert answer.maps.flatten(2).any(2).all()


def test_crops_of_pan_and_scan_have_maps_of_their_own() -> None:
    """Compare Gemma 3's crops with the same images in one prompt: each crop counts as one image."""
    model, processor = make_parts("gemma3")
    options: dict[str, Any] = {"return_tensors": "pt", "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    options |= {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    image = make_image(WIDE)
    inputs = dict(processor(images=[[image]], text=["what <boi> is on the table"], **options))
    assert len(inputs["pixel_values"]) == 4  # the whole image, and three crops
    explanation = gradcam.explain(model, inputs, target=Token([5]), evidence="signed")
    painted = image.copy()
    painted[10:30, 45:65] = 255, 0, 0  # in the second crop
    later = dict(processor(images=[[painted]], text=["what <boi> is on the table"], **options))
    changes = (inputs["pixel_values"] - later["pixel_values"]).abs().flatten(1).amax(1)
    assert explanation.maps.shape == (4, 1, 4, 4)
    assert (changes > 0).tolist() == [True, False, True, False]


class TestLlama4:
    """Test tiles that are padded with black, and images with black margins."""

    def test_black_margins_are_part_of_the_image(self) -> None:
        family = FAMILIES["llama4"]
        model = family.make_model()
        image = make_image((60, 100))
        image[40:], image[:, 80:] = 0, 0
        explanation = gradcam.explain(model, process(family, [[image]]), target=Token([5]))
        assert all(abs(a - b) <= 2 for a, b in zip(explanation.heatmaps.shape[2:], (50, 84)))

    def test_a_black_image(self) -> None:
        family = FAMILIES["llama4"]
        black = np.zeros((*WIDE, 3), np.uint8)
        assert gradcam.explain(family.make_model(), process(family, [[black]]), target=Token([5])).maps.ndim == 4

    @pytest.mark.parametrize("size", [(25, 20), (20, 28), SQUARE, WIDE, TALL])
    def test_the_heatmap_covers_the_image(self, size: Size) -> None:
        """Images up to 28 x 28 pixels are one tile, whose padding only the measured processor shows."""
        model, processor = make_parts("llama4")
        image = make_image(size)
        explanation = gradcam.load_model(model, processor=processor).explain(image, target=Token([5]))
        height, width = explanation.heatmaps.shape[2:]
        assert explanation.regions == [(0, 0, *size)]
        assert math.isclose(height / width, size[0] / size[1], rel_tol=0.06)
