"""Test vision-language models: where the pieces of their images lie, and their maps against autograd by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import gradcam
from gradcam.errors import ImageError, TargetError
from gradcam.targets import Token

T: Any = pytest.importorskip("transformers")

from tests.adapters.vlm import (  # noqa: E402
    FAMILIES,
    SQUARE,
    TALL,
    WIDE,
    Family,
    Numbers,
    Size,
    find_token,
    make_image,
    process,
)

STRIP = (20, 112)
PROMPTS: dict[str, list[list[Size]]] = {
    "square": [[SQUARE]],
    "wide": [[WIDE]],
    "tall": [[TALL]],
    "strip": [[STRIP]],
    "two images": [[WIDE, TALL]],
    "two prompts": [[SQUARE], [WIDE]],
    "three images in two prompts": [[TALL, SQUARE], [STRIP]],
}
WORDS = [5, 9]
Window = tuple[float, float, float, float]
View = tuple[Numbers, Numbers | None, Window]  # cells of the image encoder, cells among the image tokens, window
WHOLE: Window = (0, 0, 1, 1)
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):  # Gemma 3's masks need PyTorch 2.6.
    del FAMILIES["gemma3"]
VISION_LANGUAGE = [name for name in FAMILIES if name not in ("blip", "blip2", "instructblip", "git")]


@functools.cache
def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name].make_model()


ATTENTION_OUTPUTS = ("o_proj", "out_proj", "attn.proj", "projection_layer", "projection", "attention.output.dense")


@functools.cache
def make_local_model(name: str) -> nn.Module:
    """Return the model with attention that hardly mixes the tokens, so that a change stays where it is."""
    model = copy.deepcopy(make_model(name))
    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear) and layer.endswith(ATTENTION_OUTPUTS):
            module.weight.data *= 0.001
    return model


@functools.cache
def make_exact_model(name: str) -> nn.Module:
    """Return the model in float64, with weights that are large enough that no map is blank."""
    model = copy.deepcopy(make_model(name)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            std = 0.8 / math.sqrt(parameter[0].numel())
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        elif parameter.ndim == 1:  # Biases, and factors of norms.
            parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05
    return model


def list_prompts(name: str) -> list[str]:
    several = FAMILIES[name].max_images > 1
    return [label for label, prompts in PROMPTS.items() if several or max(map(len, prompts)) == 1]


# Families with the description of another family, which is tested with all prompts.
RELATIVES = {"aya": "internvl", "idefics3": "smolvlm", "instructblip": "blip2", "mistral3": "pixtral"}


def list_cases(names: Sequence[str], *backends: str) -> list[Any]:
    """List the cases of families, prompts and backends. Cases whose parts are all in other cases are slow."""
    cases = []
    for name in names:
        prompts = list_prompts(name)
        largest = "three images in two prompts" if FAMILIES[name].max_images > 1 else "two prompts"
        for label, backend in itertools.product(prompts, backends or [""]):
            is_quick = label in ("wide", largest) or (label in ("square", "tall", "strip") and backend != "pil")
            is_quick &= name not in RELATIVES or label in ("wide", largest)
            values = (name, label, backend) if backends else (name, label)
            cases.append(pytest.param(*values, marks=() if is_quick else pytest.mark.slow))
    return cases


def resolve(model: nn.Module, layer: str) -> str:
    """Return the name of a layer of CLIP and SigLIP, which have one more module in Transformers 4."""
    names = dict(model.named_modules())
    towers = ("vision_tower", "image_encoder")
    longer = functools.reduce(lambda name, tower: name.replace(f"{tower}.", f"{tower}.vision_model."), towers, layer)
    return layer if layer in names else longer


def grid(start: int, height: int, width: int) -> Numbers:
    return start + np.arange(height * width).reshape(height, width)


def tile(numbers: Sequence[Numbers], rows: int, columns: int) -> Numbers:
    return np.block([[numbers[row * columns + column] for column in range(columns)] for row in range(rows)])


# The oracles list, for each image of the prompts, its views: the numbers of the cells among all tokens of the default
# layer, the numbers of the cells among all image tokens of the text, and the part of the view that the image covers.


def describe_fixed(
    encoder: int, encoder_prefix: int, text: int | None, text_prefix: int = 0
) -> Callable[[list[Size], dict[str, Any]], list[list[View]]]:
    """Describe images of one size: squares of `encoder` and of `text` cells, after some other tokens."""

    def describe(sizes: list[Size], inputs: dict[str, Any]) -> list[list[View]]:
        views = []
        for image in range(len(sizes)):
            cells = grid(image * (encoder**2 + encoder_prefix) + encoder_prefix, encoder, encoder)
            tokens = None if text is None else grid(image * (text**2 + text_prefix) + text_prefix, text, text)
            views.append([(cells, tokens, WHOLE)])
        return views

    return describe


def describe_pixtral(sizes: list[Size], inputs: dict[str, Any], merge: int = 1) -> list[list[View]]:
    views, start = [], 0
    for size in sizes:
        height, width = (math.ceil(side * 56 / max(size) / (7 * merge)) * merge for side in size)
        tokens = grid(start // merge**2, height // merge, width // merge)
        views.append([(grid(start, height, width), tokens, WHOLE)])
        start += height * width
    return views


TILES = {SQUARE: (2, 2), WIDE: (1, 3), TALL: (3, 1), STRIP: (1, 6)}
LLAMA4_TILES = {SQUARE: (2, 2), WIDE: (2, 3), TALL: (3, 2), STRIP: (1, 4)}
LLAMA4_WINDOWS = {  # The image is resized, at most to the tiles and not beyond its own size, and lies at the top left.
    SQUARE: (0, 0, 1, 1),
    WIDE: (0, 0, 30 / 56, 1),
    TALL: (0, 0, 1, 30 / 56),
    STRIP: (0, 0, 20 / 28, 1),
}
IDEFICS_TILES = {SQUARE: (3, 3), WIDE: (2, 3), TALL: (3, 2), STRIP: (1, 3)}
ANYRES_TILES = TILES | {STRIP: (1, 3)}
ANYRES_WINDOWS = {
    SQUARE: WHOLE,
    WIDE: (0, 2 / 84, 1, 79 / 84),  # 112 x 40 pixels become 79 x 28, in the middle of 84 x 28 pixels.
    TALL: (2 / 84, 0, 79 / 84, 1),
    STRIP: (6 / 28, 0, 15 / 28, 1),  # 112 x 20 pixels become 84 x 15.
}
# The tokens of the tiles, without padding. In OneVision's, 32 tokens are the limit, and larger grids are resized.
NEXT_TOKENS = {SQUARE: (8, 8), WIDE: (4, 12), TALL: (12, 4), STRIP: (2, 12)}
ONEVISION_TOKENS = {SQUARE: (5, 5), WIDE: (3, 9), TALL: (9, 3), STRIP: (2, 12)}


def describe_tiles(
    tiles: dict[Size, Size], side: int, text_side: int, windows: dict[Size, Window] | None = None
) -> Callable[[list[Size], dict[str, Any]], list[list[View]]]:
    """Describe tiles of `side` x `side` cells, which are `text_side` x `text_side` tokens, and the thumbnail after them."""

    def describe(sizes: list[Size], inputs: dict[str, Any]) -> list[list[View]]:
        views, piece = [], 0
        for size in sizes:
            rows, columns = tiles[size]
            numbers = range(piece, piece + rows * columns + 1)
            cells = [grid(number * side**2, side, side) for number in numbers]
            tokens = [grid(number * text_side**2, text_side, text_side) for number in numbers]
            thumbnail = (cells[-1], tokens[-1], WHOLE)
            window = WHOLE if windows is None else windows[size]
            views.append([thumbnail, (tile(cells, rows, columns), tile(tokens, rows, columns), window)])
            piece += rows * columns + 1
        return views

    return describe


def describe_anyres(
    sizes: list[Size], inputs: dict[str, Any], class_tokens: int, text: dict[Size, Size]
) -> list[list[View]]:
    """Describe a base image, and then tiles, whose tokens in the text end with a newline in each row."""
    views: list[list[View]] = []
    piece = token = 0
    numbers_of_images = inputs.get("batch_num_images", torch.ones(len(sizes), dtype=torch.int64)).tolist()
    for size, images in zip(sizes, [count for count in numbers_of_images for _ in range(count)]):
        cells = grid(piece * (16 + class_tokens) + class_tokens, 4, 4)
        tokens = grid(token, 4, 4)
        piece, token = piece + 1, token + 16
        if images > 1:  # OneVision does not cut several images of a prompt, but pads them to squares.
            height, width = size[0] / max(size), size[1] / max(size)
            views.append([(cells, tokens, ((1 - height) / 2, (1 - width) / 2, height, width))])
            token += 1
            continue
        rows, columns = ANYRES_TILES[size]
        starts = [(piece + k) * (16 + class_tokens) + class_tokens for k in range(rows * columns)]
        tile_cells = tile([grid(start, 4, 4) for start in starts], rows, columns)
        height, width = text[size]
        tile_tokens = grid(token, height, width + 1)[:, :width]
        views.append([(cells, tokens, WHOLE), (tile_cells, tile_tokens, ANYRES_WINDOWS[size])])
        piece, token = piece + rows * columns, token + height * (width + 1)
    return views


def describe_qwen(sizes: list[Size], inputs: dict[str, Any], window: int | None = None) -> list[list[View]]:
    """Describe patches whose order is by blocks of 2 x 2 patches, and the order of the blocks by windows."""
    views: list[list[View]] = []
    start = 0
    for _, height, width in inputs["image_grid_thw"].tolist():
        rows, columns = height // 2, width // 2
        blocks = [(row, column) for row in range(rows) for column in range(columns)]
        if window is not None:
            blocks.sort(key=lambda block: (block[0] // window, block[1] // window))  # The sort is stable.
        cells = np.empty((height, width), np.int64)
        for rank, (row, column) in enumerate(blocks):
            for patch in range(4):
                cells[2 * row + patch // 2, 2 * column + patch % 2] = start + 4 * rank + patch
        views.append([(cells, grid(start // 4, rows, columns), WHOLE)])
        start += height * width
    return views


DESCRIPTIONS: dict[str, Callable[[list[Size], dict[str, Any]], list[list[View]]]] = {
    "llava": describe_fixed(4, 1, 4),
    "pixtral": describe_pixtral,
    "llava_next": functools.partial(describe_anyres, class_tokens=1, text=NEXT_TOKENS),
    "onevision": functools.partial(describe_anyres, class_tokens=0, text=ONEVISION_TOKENS),
    "qwen2_vl": describe_qwen,
    "qwen2_5_vl": functools.partial(describe_qwen, window=2),
    "qwen3_vl": describe_qwen,
    "internvl": describe_tiles(TILES, 2, 2),
    "aya": describe_tiles(TILES, 2, 2),
    "llama4": describe_tiles(LLAMA4_TILES, 2, 2, LLAMA4_WINDOWS),
    "smolvlm": describe_tiles(IDEFICS_TILES, 4, 2),
    "idefics3": describe_tiles(IDEFICS_TILES, 4, 2),
    "paligemma": describe_fixed(4, 0, 4),
    "gemma3": describe_fixed(4, 0, 4),
    "florence2": describe_fixed(4, 1, 4, 1),
    "kosmos2": describe_fixed(4, 1, None),
    "mistral3": functools.partial(describe_pixtral, merge=2),
}
IMAGE_TOKENS = {
    "pixtral": "[IMG]", "mistral3": "[IMG]", "qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>", "internvl": "<context>", "aya": "<|IMG_PATCH|>", "gemma3": "<soft>",
    "llama4": "<|patch|>",
}  # fmt: skip
DEFAULT_LAYERS = {
    "llava": "model.vision_tower.encoder.layers.1",
    "pixtral": "model.multi_modal_projector.linear_1",
    "llava_next": "model.vision_tower.encoder.layers.1",
    "onevision": "model.multi_modal_projector.linear_1",
    "qwen2_vl": "model.visual.merger.ln_q",
    "qwen2_5_vl": "model.visual.merger.ln_q",
    "qwen3_vl": "model.visual.merger.norm",
    "internvl": "model.multi_modal_projector.layer_norm",
    "aya": "model.multi_modal_projector.layernorm",
    "llama4": "vision_model",
    "smolvlm": "model.vision_model",
    "idefics3": "model.vision_model",
    "paligemma": "model.vision_tower",
    "gemma3": "model.multi_modal_projector.mm_soft_emb_norm",
    "florence2": "model.multi_modal_projector.image_proj_norm",
    "kosmos2": "image_to_text_projection.dense",
    "mistral3": "model.multi_modal_projector.norm",
}


def make_images(prompts: Sequence[Sequence[Size]]) -> list[list[NDArray[np.uint8]]]:
    return [[make_image(size, seed=len(row) * i + k) for k, size in enumerate(row)] for i, row in enumerate(prompts)]


def find_visible(family: Family, size: Size) -> tuple[float, float, float, float]:
    """Return the top, left, height and width of the part of an image that the processor sees, in pixels."""
    if not family.is_cropped:
        return 0, 0, *size
    side = min(size)
    return (size[0] - side) / 2, (size[1] - side) / 2, side, side


def paint(image: NDArray[np.uint8], family: Family, place: tuple[float, float]) -> NDArray[np.uint8]:
    """Return the image with a square whose centre is at `place`, as shares of the visible part's height and width."""
    top, left, height, width = find_visible(family, image.shape[:2])
    half = max(2, min(image.shape[:2]) // 16)
    row, column = round(top + place[0] * height), round(left + place[1] * width)
    painted = image.copy()
    painted[max(0, row - half) : row + half, max(0, column - half) : column + half] = 255, 0, 0
    return painted


class Change:
    """Measure how much the cells of layers change from a first run to a later run, in one view of the images."""

    def __init__(self, model: nn.Module, layers: Sequence[str], views: int) -> None:
        self.model, self.layers, self.views = model, layers, views
        self.before: list[Tensor] = []

    def compare(self, inputs: dict[str, Any], view: int) -> list[gradcam.Explanation]:
        self.sites, self.view = 0, view
        method = gradcam.method("change", summary="change of the activations")(self.measure)
        options: Any = {"layers": list(self.layers), "methods": [method], "target": Token(WORDS, 0)}
        return list(gradcam.compare(self.model, inputs, **options).values())

    def measure(self, activations: Tensor) -> Tensor:
        self.sites += 1
        if len(self.before) < self.sites:
            self.before.append(activations)
        change = (activations - self.before[self.sites - 1]).norm(dim=1)
        return change if (self.sites - 1) % self.views == self.view else torch.zeros_like(change)


def find_peak(heatmap: Tensor) -> tuple[float, float]:
    row, column = divmod(int(heatmap.argmax()), heatmap.shape[1])
    return (row + 0.5) / heatmap.shape[0], (column + 0.5) / heatmap.shape[1]


def replace_image(
    images: list[list[NDArray[np.uint8]]], number: int, image: NDArray[np.uint8]
) -> list[list[NDArray[np.uint8]]]:
    numbers = iter(range(1000))
    return [[image if next(numbers) == number else old for old in row] for row in images]


@pytest.mark.parametrize(("name", "label", "backend"), list_cases(list(FAMILIES), "torchvision", "pil"))
def test_a_painted_square_lands_within_one_cell(name: str, label: str, backend: str) -> None:
    family, prompts, model = FAMILIES[name], PROMPTS[label], make_local_model(name)
    plain, sizes = make_images(prompts), [size for row in prompts for size in row]
    images = [image for row in plain for image in row]
    inputs = process(family, plain, backend)
    layers = [resolve(model, layer) for layer in (*family.layers, *family.text_layers)]
    descriptions = DESCRIPTIONS[name](sizes, inputs) if name in DESCRIPTIONS else [[(grid(0, 8, 8), None, WHOLE)]] * 9
    views = max(map(len, descriptions))
    change = Change(model, layers, views)
    change.compare(inputs, 0)
    for image, place in itertools.product(range(len(sizes)), ((0.3, 0.72), (0.8, 0.25))):
        painted = replace_image(plain, image, paint(images[image], family, place))
        later = process(family, painted, backend)
        for view, (cells, _, window) in enumerate(descriptions[image]):
            largest = [max(row[view][0].shape[axis] for row in descriptions if len(row) > view) for axis in (0, 1)]
            for k, explanation in enumerate(change.compare(later, view)):
                heatmap = explanation.heatmaps[image][0]
                padded = change.before[k * views + view].shape[2:]
                counts = [padded[axis] * cells.shape[axis] / largest[axis] * window[2 + axis] for axis in (0, 1)]
                axes = zip(find_peak(heatmap), place, counts)
                offsets = [abs(int(peak * count) - int(goal * count)) for peak, goal, count in axes]
                assert heatmap.max() > 0
                assert max(offsets) <= 1, (layers[k], image, view, place, offsets, counts)


def interpolate(values: NDArray[np.float64], part: tuple[float, ...], size: Sequence[int]) -> NDArray[np.float64]:
    """Resize a part (top, left, height, width) of a map, by the bicubic interpolation of Keys (1981) with a = -0.75."""
    for axis in (0, 1):
        cells, matrix = values.shape[axis], np.zeros((size[axis], values.shape[axis]))
        for i in range(size[axis]):
            place = part[axis] + (i + 0.5) * part[2 + axis] / size[axis] - 0.5
            for tap in range(math.floor(place) - 1, math.floor(place) + 3):
                x, a = abs(place - tap), -0.75
                inner, outer = (a + 2) * x**3 - (a + 3) * x**2 + 1, a * (x**3 - 5 * x**2 + 8 * x - 4)
                matrix[i, min(max(tap, 0), cells - 1)] += inner if x <= 1 else outer if x < 2 else 0
        values = matrix @ values if axis == 0 else values @ matrix.T
    return values.clip(min=0)


def interpolate_signs(values: NDArray[np.float64], *where: Any) -> NDArray[np.float64]:
    """Resize the positive and the negative values, each by itself."""
    return interpolate(values.clip(min=0), *where) - interpolate((-values).clip(min=0), *where)


def append_words(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Append the tokens of an answer to the inputs."""
    inputs = {key: value for key, value in inputs.items() if key != "labels"}
    words = torch.tensor([WORDS])
    if name == "florence2":
        words = torch.tensor([[2, *WORDS]])
        return inputs | {"decoder_input_ids": words.expand(len(inputs["input_ids"]), -1)}
    for key, value in inputs.items():
        if key in ("input_ids", "attention_mask") or key.endswith(("token_type_ids", "position_mask")):
            new = {"input_ids": words, "attention_mask": torch.ones_like(words)}.get(key, torch.zeros_like(words))
            inputs[key] = torch.cat([value, new.expand(len(value), -1).to(value.dtype)], 1)
    return inputs


def run_by_hand(
    model: nn.Module, inputs: dict[str, Any], layer: str, score: Callable[[Any], Tensor]
) -> list[NDArray[np.float64]]:
    """Return gradient times activation of each score (K), summed over the channels, for all tokens of a layer."""
    tensors: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> Any:
        tensors.append(output if isinstance(output, Tensor) else output[0])
        # Qwen3-VL of Transformers 4 changes the output of a block in place.
        return output.clone() if isinstance(output, Tensor) else output

    handle = model.get_submodule(layer).register_forward_hook(record)
    scores = score(model(**inputs))
    handle.remove()
    tensor = tensors[0]
    gradients = [torch.autograd.grad(scores[:, k].sum(), tensor, retain_graph=True)[0] for k in range(scores.shape[1])]
    return [(tensor * gradient).sum(-1).flatten().detach().numpy() for gradient in gradients]


def lay_out(tokens: NDArray[np.float64], rows: list[list[tuple[Numbers, Window]]]) -> NDArray[np.float64]:
    """Return the map of each image, from the values of all tokens and the numbers of the cells of each view."""
    levels = []
    for view in range(max(map(len, rows))):
        parts = []
        for row in rows:
            numbers, window = row[view] if view < len(row) else (np.zeros((0, 0), int), WHOLE)
            height, width = numbers.shape
            part = (window[0] * height, window[1] * width, window[2] * height, window[3] * width)
            parts.append((tokens[numbers], part))
        sizes = [[math.ceil(max(part[2 + axis] for _, part in parts) - 1e-6) for axis in (0, 1)]] * len(parts)
        maps = [
            np.zeros(size) if not cells.size
            else cells if part == (0, 0, *size) and cells.shape == tuple(size) and len({p for _, p in parts}) == 1
            else interpolate_signs(cells, part, size)
            for (cells, part), size in zip(parts, sizes)
        ]  # fmt: skip
        levels.append(np.stack(maps))
    finest = max((level.shape[1:] for level in levels), key=math.prod)
    return sum(
        level
        if level.shape[1:] == finest
        else np.stack([interpolate_signs(m, (0, 0, *m.shape), finest) for m in level])
        for level in levels
    )


def list_text_views(
    inputs: dict[str, Any], image_token: int, views: list[list[View]]
) -> list[list[tuple[Numbers, Window]]]:
    """Return the views with the numbers of the cells among all tokens of the text.

    The text of LLaVA-NeXT and OneVision has no tokens for the padding of tiles, and all tokens of a single piece.
    """
    places = np.flatnonzero(inputs["input_ids"].flatten() == image_token)
    is_cut = "image_sizes" in inputs
    return [[(places[tokens], WHOLE if is_cut and len(row) > 1 else w) for _, tokens, w in row] for row in views]


@pytest.fixture
def _float64() -> Iterator[None]:
    """Make float64 the default, because Kosmos-2's masks have the default type."""
    for name in VISION_LANGUAGE:  # Make the models before.
        make_exact_model(name)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(("name", "label"), list_cases(VISION_LANGUAGE))
def test_maps_equal_autograd_by_hand(name: str, label: str) -> None:
    family, prompts, model = FAMILIES[name], PROMPTS[label], make_exact_model(name)
    inputs = process(family, make_images(prompts))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    views = DESCRIPTIONS[name]([size for row in prompts for size in row], inputs)
    answered = append_words(name, inputs)
    before = 0 if name == "florence2" else inputs["input_ids"].shape[1] - 1  # The position of the first word's logits.

    def score_words(output: Any) -> Tensor:
        return torch.stack([output.logits[:, before + k, word] for k, word in enumerate(WORDS)], 1)

    def score_last(output: Any) -> Tensor:
        scores: Tensor = output.logits[:, -1, [11, 12]]
        return scores

    cases: list[Any] = [(Token(WORDS), score_words, inputs), (score_last, score_last, answered)]
    for layer in (resolve(model, DEFAULT_LAYERS[name]), *family.text_layers[:1]):
        rows: list[list[tuple[Numbers, Window]]] = [[(cells, window) for cells, _, window in row] for row in views]
        if layer in family.text_layers:
            rows = list_text_views(answered, find_token(IMAGE_TOKENS.get(name, "<image>")), views)
        for target, score, package_inputs in cases:
            layer_argument = layer if layer in family.text_layers else None
            options: Any = {"target": target, "method": "hirescam", "evidence": "signed"}
            explanation = gradcam.explain(model, package_inputs, layer_argument, **options)
            expected = np.stack([lay_out(tokens, rows) for tokens in run_by_hand(model, answered, layer, score)], 1)
            assert explanation.layer.partition(":")[0] == layer
            largest = np.abs(expected).max()
            assert largest > 0
            np.testing.assert_allclose(explanation.maps.numpy(), expected, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_a_prompts_map_does_not_depend_on_another_prompt(name: str) -> None:
    family, model = FAMILIES[name], make_model(name)
    images = [[make_image(SQUARE, 3)], [make_image(SQUARE, 4)]]
    inputs, others = process(family, images), process(family, [images[0], [make_image(SQUARE, 5)]])
    alone, batch, changed = (
        gradcam.explain(model, prompts, target=Token(WORDS), evidence="signed")
        for prompts in (process(family, images[:1]), inputs, others)
    )
    assert alone.maps.flatten(2).any(2).all()
    for explanation in (batch, changed):
        torch.testing.assert_close(explanation.maps[:1], alone.maps, rtol=0, atol=1e-5 * float(alone.maps.abs().max()))
    assert not torch.allclose(batch.maps[1], changed.maps[1], rtol=1e-3)


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_the_default_layer_is_after_the_norms_that_would_cancel_its_maps(name: str) -> None:
    """Before a norm, the values of a token of the text would sum to zero, and only differences within it would be left."""
    family, model = FAMILIES[name], make_exact_model(name)
    inputs = process(family, make_images([[SQUARE]]))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    options: Any = {"target": Token(WORDS), "method": "hirescam", "evidence": "signed"}
    with contextlib.ExitStack() as stack:
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, torch.float32)
        maps = gradcam.explain(model, inputs, **options).maps
    before = 0 if name == "florence2" else inputs["input_ids"].shape[1] - 1
    answered = append_words(name, inputs)
    products: list[Tensor] = []

    def measure(module: nn.Module, args: Any, output: Any) -> Any:
        tensor = output if isinstance(output, Tensor) else output[0]
        tensor.register_hook(lambda gradient: products.append((gradient * tensor).detach().flatten(0, -2)))
        return tensor.clone() if isinstance(output, Tensor) else output

    with contextlib.ExitStack() as stack:
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, torch.float32)
        stack.callback(model.get_submodule(resolve(model, DEFAULT_LAYERS[name])).register_forward_hook(measure).remove)
        logits = model(**answered).logits[0, before, WORDS[0]]
        logits.backward()
        model.zero_grad()
    ratios = products[0].sum(1).abs() / products[0].abs().sum(1)
    assert (ratios[ratios.isfinite()] > 1e-3).float().mean() > 0.9
    side = 2 if maps.shape[-1] % 2 == 0 else 3
    blocks = maps.unfold(2, side, side).unfold(3, side, side).flatten(4)
    assert (blocks.sum(-1).abs() > 1e-3 * blocks.abs().sum(-1)).float().mean() > 0.8


PROMPT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "image_embeds_position_mask")


def drop_image_token(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    marked = inputs.get(
        "image_embeds_position_mask", inputs["input_ids"] == find_token(IMAGE_TOKENS.get(name, "<image>"))
    )
    place = int(marked[0].nonzero()[0])
    return {
        key: torch.cat([value[:, :place], value[:, place + 1 :]], 1) if key in PROMPT_INPUTS else value
        for key, value in inputs.items()
    }


@pytest.mark.parametrize("name", VISION_LANGUAGE)
@pytest.mark.parametrize("target", [Token(WORDS), lambda output: output.logits[:, -1, 7]])
def test_inputs_that_do_not_fit_are_refused_in_one_line(name: str, target: Any) -> None:
    model, inputs = make_model(name), process(FAMILIES[name], make_images([[WIDE]]))
    another = "llava" if name.startswith("qwen") else "qwen2_vl"
    patches = process(FAMILIES[another], make_images([[WIDE]]))
    token = find_token(IMAGE_TOKENS.get(name, "<image>"))
    text = inputs["input_ids"].masked_fill(inputs["input_ids"] == token, 5)
    wrong: list[tuple[dict[str, Any], str]] = [
        (drop_image_token(name, inputs), "image tokens|image_embeds_position_mask"),
        (patches, "processor"),
        (
            {key: value.to("meta") for key, value in inputs.items()},
            r"on meta, but \w+ is on cpu: .* inputs.to\('cpu'\)",
        ),
        ({key: value for key, value in inputs.items() if key != "pixel_values"}, "pixel_values is missing"),
        ({"pixel_values": inputs["pixel_values"]}, "processor"),
        (inputs | {"pixel_values_videos": inputs["pixel_values"]}, "video"),
        (inputs | {"pixel_values": inputs["pixel_values"].long()}, "pixel_values is Tensor, expected a floating-point"),
    ]
    if name != "kosmos2":
        wrong.append((inputs | {"input_ids": text}, "no placeholder for the image"))
    for case, message in wrong:
        with pytest.raises((ImageError, TargetError), match=message) as caught:
            gradcam.explain(model, case, target=target)
        assert "\n" not in str(caught.value)
        assert "processor" in str(caught.value) or "inputs.to" in str(caught.value) or "frames" in str(caught.value)


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_inputs_for_generation_give_the_same_map(name: str) -> None:
    """The cache, a missing mask of a prompt without padding, and half precision as processors may return it."""
    model, inputs = make_model(name), process(FAMILIES[name], make_images([[WIDE]]))
    plain = gradcam.explain(model, inputs, target=Token(WORDS), evidence="signed").maps
    without_mask = {key: value for key, value in inputs.items() if key != "attention_mask"}
    half = {key: value.half() if value.is_floating_point() else value for key, value in inputs.items()}
    for case, tolerance in ((inputs | {"use_cache": True}, 1e-5), (without_mask, 1e-5), (half, 0.02)):
        maps = gradcam.explain(model, case, target=Token(WORDS), evidence="signed").maps
        torch.testing.assert_close(maps, plain, rtol=0, atol=tolerance * float(plain.abs().max()))


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "smolvlm"])
@pytest.mark.parametrize("kind", ["cpu_offload", "dispatch_model"])
def test_offloaded_models_give_the_same_map(name: str, kind: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    inputs = process(FAMILIES[name], make_images([[WIDE]]))
    plain = gradcam.explain(make_model(name), inputs, target=Token(WORDS))
    model = copy.deepcopy(make_model(name))
    if kind == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        names = [name for name, _ in model.named_children()]
        device_map = {name: "disk" if name == names[0] else "cpu" for name in names}
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path))
    offloaded = gradcam.explain(model, inputs, target=Token(WORDS))
    assert offloaded.layer == plain.layer
    torch.testing.assert_close(offloaded.maps, plain.maps)


@pytest.mark.parametrize("name", VISION_LANGUAGE)
@pytest.mark.parametrize("is_training", [False, True])
def test_gradient_checkpointing_does_not_change_the_map(name: str, is_training: bool) -> None:
    inputs = process(FAMILIES[name], make_images([[WIDE]]))
    plain = gradcam.explain(make_model(name), inputs, target=Token(WORDS), evidence="signed")
    model = copy.deepcopy(make_model(name))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train(is_training)
    maps = gradcam.explain(model, inputs, target=Token(WORDS), evidence="signed").maps
    assert model.training == is_training
    torch.testing.assert_close(maps, plain.maps, rtol=0, atol=1e-5 * float(plain.maps.abs().max()))


# In Transformers 4, PaliGemma's logits depend on the kind of attention.
SEVERAL_ATTENTIONS = set(VISION_LANGUAGE) - {"kosmos2"} - ({"paligemma"} if T.__version__ < "5" else set())


@pytest.mark.parametrize("name", sorted(SEVERAL_ATTENTIONS))
def test_fused_and_eager_attention_give_the_same_map(name: str) -> None:
    inputs = process(FAMILIES[name], make_images([[WIDE]]))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    maps = []
    for attention in ("sdpa", "eager"):
        model: Any = copy.deepcopy(make_exact_model(name))
        model.set_attn_implementation(attention)
        maps.append(gradcam.explain(model, inputs, target=Token(WORDS), evidence="signed").maps)
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=1e-5 * float(maps[0].abs().max()))
