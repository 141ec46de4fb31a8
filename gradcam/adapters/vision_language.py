"""Adapters for vision-language models: language models that read image patches at placeholder tokens of the prompt.

Each adapter describes the pieces into which its processor cuts an image, and where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.adapters.captioning import PIXELS, PROMPT, GenerativeCaptioner
from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.hooks.containers import Batch, Window
from gradcam.layers.pieces import WHOLE, NumberedView, Numbers, Pieces, Size, View

# The side of the square of patches that form one token of the text, or its reciprocal.
MERGE_SETTINGS = ("spatial_merge_size", "downsample_factor", "downsample_ratio", "pixel_shuffle_ratio", "scale_factor")
COMPARED_SIDE = 32  # Tiles are compared with the thumbnail at this size.


class VisionLanguageModel(GenerativeCaptioner):
    """LLaVA and similar models. The processor passes each image as one piece (M,C,H,W).

    `projector` is the name of the module between image encoder and text model, and `text_modules` are the names of
    modules that process text tokens. `pieces_type` describes the processor's pieces. If `has_placeholders`, patches of the
    image take the place of tokens in the text.
    """

    takes_pieces = True
    plain_prompt = "USER: {images}\n{prompt} ASSISTANT:"
    usual_prompts: Sequence[str] = (PROMPT,)
    tower = "model.vision_tower"
    projector: ClassVar[str] = "model.multi_modal_projector"
    text_modules: ClassVar[tuple[str, ...]] = ("model.language_model", "lm_head")
    pieces_type: ClassVar[type[Pieces]] = Pieces
    has_placeholders: ClassVar[bool] = True

    @property
    def own_layer(self) -> str | None:
        # A norm is scale-invariant. Before a norm, gradient times activation would sum to zero over each of its tokens.
        for name, _ in self.model.get_submodule(self.projector).named_children():
            if "norm" in name or name.startswith("ln"):
                return f"{self.projector}.{name}"
        states = getattr(self.model.config, "vision_feature_layer", None)
        # Some versions of transformers take the last state before the tower's final norm, others after the norm.
        if states == -1:
            return f"{self.projector}.linear_1"
        return super().own_layer if states is None else find_state_block(self.model, self.tower, states)

    @property
    def word_layer(self) -> str | None:
        """Return the projector's name in the explained model; None if the text model does not read its output alone."""
        return f"{self.prefix}.{self.projector}".lstrip(".") if self._list_blocks() else None

    def list_text_layers(self) -> list[str]:
        """List the text model's blocks and its final norm, in the explained model.

        Raises `ModelError` if the text model has no such blocks: it has an encoder, or reads latent queries.
        """
        names = [f"{self.prefix}.{self.text_modules[0]}.{name}".lstrip(".") for name in (*self._list_blocks(), "norm")]
        if len(names) == 1:
            problem = f"{type(self.model).__name__} has no decoder-only language model"
            raise ModelError(f"{problem}, which the method 'lens' needs: choose another method, such as hirescam.")
        return names

    def _list_blocks(self) -> list[str]:
        """List the blocks of a decoder-only text model, by their names in it. Other text models have none."""
        modules = dict(self.model.get_submodule(self.text_modules[0]).named_children())
        return [f"layers.{i}" for i, _ in enumerate(modules.get("layers", ()))] if "norm" in modules else []

    def complete_arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = super().complete_arguments(batch)
        # PaliGemma's processor adds labels, which would not fit the prompt and an answer.
        arguments.pop("labels", None)
        if "input_ids" not in arguments:
            problem = f"{type(self.model).__name__} needs a prompt with a placeholder for the image"
            raise TargetError(f"{problem}: pass its processor's output, with {PIXELS} and input_ids.")
        return arguments

    def to_pieces(self, inputs: dict[str, Any]) -> Batch:
        """Return the output of the model's processor as a batch, with the description of its pieces.

        Raises `ImageError` if the inputs do not fit the model or one another.
        """
        name, pixels = type(self.model).__name__, inputs.get(PIXELS)
        if inputs.get("pixel_values_videos") is not None:
            raise ImageError(
                f"The inputs have a video, but {name} is explained only on images: pass the frames as images."
            )
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point() or pixels.numel() == 0:
            kind = type(pixels).__name__ if PIXELS in inputs else "missing"
            problem = (
                f"{PIXELS} is {kind}, expected a floating-point tensor: pass the whole output of {name}'s own processor"
            )
            raise ImageError(f"{problem}, for a prompt and its images.")
        device = next(self.model.parameters()).device
        if pixels.device != device and not hasattr(self.model, "_hf_hook"):  # Accelerate's hooks move the inputs.
            problem = f"The inputs are on {pixels.device}, but {name} is on {device}"
            raise ImageError(f"{problem}: move them with inputs.to('{device}').")
        inputs[PIXELS] = pixels = pixels.to(self.model.dtype)  # Some models do not convert half precision.
        ids = inputs.get("input_ids")
        mask = ids == self._image_token if ids is not None and self.has_placeholders else None
        if mask is not None and not bool(mask.any(1).all()):
            problem = "A prompt of input_ids has no placeholder for the image"
            raise ImageError(f"{problem}: pass the processor's output for prompts with an image.")
        try:
            pieces = self.read_pieces(inputs, mask)
        except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:120]
            problem = f"{PIXELS} {tuple(pixels.shape)} and the other inputs are not the output of {name}'s processor"
            raise ImageError(f"{problem} ({reason}): pass the whole output of the model's own processor.") from error
        text_modules = tuple(f"{self.prefix}.{module}".lstrip(".") for module in self.text_modules)
        pieces = replace(pieces, text_modules=text_modules)
        pieces.check_placeholders("input_ids")
        return Batch((), inputs, pixels, len(pieces.views), pieces.sizes[0], pixels.device, pieces=pieces)

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        """Return the pieces of the inputs. `mask` (S,L) marks the image tokens of the text.

        May raise any usual error if the inputs are not the output of the model's processor; the caller reports it.
        """
        pixels = inputs[PIXELS]
        if pixels.ndim != 4:
            raise ValueError("expected images or tiles (N,C,H,W)")
        sizes: list[Size] = [(int(pixels.shape[2]), int(pixels.shape[3]))] * len(pixels)
        if self.model.config.vision_config.model_type == "pixtral" and "image_sizes" in inputs:
            sizes = [(int(height), int(width)) for height, width in inputs["image_sizes"]]
        return self._make_pieces(sizes, [(View(((number,),)),) for number in range(len(pixels))], mask)

    @property
    def merge(self) -> int:
        """Return the side of the square of patches that form one token of the text."""
        config = self.model.config
        if (count := getattr(config, "mm_tokens_per_image", None)) is not None:
            return int(config.vision_config.image_size // self._patch / math.sqrt(count))
        settings = [getattr(part, name, None) for name in MERGE_SETTINGS for part in (config, config.vision_config)]
        side = next((setting for setting in settings if setting), 1)
        return round(1 / side if side < 1 else side)

    @property
    def _patch(self) -> int:
        patch = self.model.config.vision_config.patch_size
        return int(patch if isinstance(patch, int) else patch[0])

    @property
    def _image_token(self) -> int:
        return int(getattr(self.model.config, "image_token_id", None) or self.model.config.image_token_index)

    def _make_pieces(
        self, piece_sizes: Sequence[Size], views: Sequence[Sequence[View]], mask: Tensor | None, **fields: Any
    ) -> Pieces:
        """Return the pieces, with the sizes in pixels of each piece. By default, heatmaps have the size of the last view."""
        grids = [(height // self._patch, width // self._patch) for height, width in piece_sizes]
        fields.setdefault("sizes", [_measure(row[-1], piece_sizes) for row in views])
        samples = list(range(len(views)))
        pieces = self.pieces_type(grids, views, samples, merge=self.merge, placeholders=mask, **fields)
        if mask is not None:  # An image belongs to the sample that contains the image's first token.
            starts = np.cumsum([0, *map(pieces.count_image_tokens, samples)])[:-1]
            ends = mask.sum(1).cumsum(0).cpu().numpy()
            samples = np.searchsorted(ends, starts, side="right").clip(max=len(ends) - 1).tolist()
        return replace(pieces, samples=samples)


class PaliGemma(VisionLanguageModel):
    """PaliGemma: a prompt is a command, such as "detect cup"."""

    plain_prompt = "{images}{prompt}"
    usual_prompts = ("caption en",)


class TiledModel(VisionLanguageModel):
    """InternVL and Aya Vision: tiles of one size (P,C,H,W), and a thumbnail after the tiles if there are several.

    The processor does not pass the numbers of rows and columns. The thumbnail shows which arrangement is right. Pixels of
    the value `padding` fill the tiles if the image is smaller.
    """

    padding: ClassVar[float] = math.inf

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pixels = inputs[PIXELS]
        if pixels.ndim != 4:
            raise ValueError("expected tiles (P,C,H,W)")
        side_y, side_x = map(int, pixels.shape[2:])
        tokens = (side_y // self._patch // self.merge) * (side_x // self._patch // self.merge)
        views, start = [], 0
        for count in [1] * len(pixels) if mask is None else _count_tiles(inputs["input_ids"], mask, tokens):
            thumbnail = start + count - 1
            image_views = [View(((thumbnail,),))]
            if count > 1:
                grid, window = match_thumbnail(pixels[start:thumbnail], pixels[thumbnail], self.padding)
                image_views.append(replace(_view_of_tiles(start, *grid), window=window))
            views.append(tuple(image_views))
            start += count
        if start != len(pixels):
            raise ValueError(f"the text has tokens for {start} tile(s)")
        return self._make_pieces([(side_y, side_x)] * len(pixels), views, mask)


class ClassLastPieces(Pieces):
    """The pieces of Llama 4, whose class token follows the patches."""

    is_class_last = True


class Llama4(TiledModel):
    """Llama 4: the processor pads the tiles with black, at the bottom and on the right."""

    tower = "vision_model"
    projector = "multi_modal_projector"
    text_modules = ("language_model.model", "language_model.lm_head")
    pieces_type = ClassLastPieces
    padding = -1.0  # black, as the model's processor normalises it


class Idefics(VisionLanguageModel):
    """SmolVLM and Idefics 3: tiles (S,P,C,H,W), and a thumbnail after the tiles. Markers in the text separate the tiles."""

    tower = "model.vision_model"
    projector = "model.connector"
    text_modules = ("model.text_model", "lm_head")

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pixels, ids = inputs[PIXELS], inputs["input_ids"]
        if mask is None or pixels.ndim != 5 or len(pixels) != len(ids):
            raise ValueError("expected tiles (N,P,C,H,W), and N texts")
        side_y, side_x = map(int, pixels.shape[3:])
        is_real = (pixels != 0).flatten(2).any(2)  # The model drops blank tiles, which only fill up the batch.
        areas = inputs.get("pixel_attention_mask")
        areas = torch.ones_like(pixels[:, :, 0], dtype=torch.bool) if areas is None else areas.bool()
        windows = [_find_window(area) for area in areas[is_real]]
        tokens = (side_y // self._patch // self.merge) * (side_x // self._patch // self.merge)
        views, start = [], 0
        for row, row_mask, count in zip(ids.tolist(), mask.tolist(), is_real.sum(1).tolist()):
            images = _list_runs(row, row_mask)
            if any(length != tokens for runs in images for _, length in runs) or sum(map(len, images)) != count:
                raise ValueError(
                    f"the text has {sum(row_mask)} image tokens, expected {tokens} for each of {count} tile(s)"
                )
            for runs in images:
                thumbnail = start + len(runs) - 1
                image_views = [View(((thumbnail,),), windows[thumbnail])]
                if len(runs) > 1:
                    gaps = [after - before for (before, _), (after, _) in pairwise(runs[:-1])]
                    rows = 1 + sum(gap > min(gaps) for gap in gaps) if len(set(gaps)) > 1 else _guess_rows(gaps, tokens)
                    columns = (len(runs) - 1) // rows
                    image_views.append(_view_of_tiles(start, rows, columns))
                views.append(tuple(image_views))
                start += len(runs)
        return self._make_pieces([(side_y, side_x)] * start, views, mask)


@dataclass(frozen=True, eq=False)
class AnyresPieces(Pieces):
    """The pieces of LLaVA-NeXT. In the text, padding is removed from the tiles, and each row of tokens ends with a newline.

    `max_tiles` limits the tokens of the tiles: the grid of LLaVA-OneVision's tokens is reduced above this many tiles.
    """

    max_tiles: int | None = None

    def count_image_tokens(self, image: int) -> int:
        base = math.prod(self.grids[self.views[image][0].pieces[0][0]])
        if len(self.views[image]) == 1:
            return base + 1
        height, width = self._find_tile_grid(image)
        return base + height * (width + 1)

    def number_image_tokens(self, image: int) -> list[NumberedView]:
        base: Size = self.grids[self.views[image][0].pieces[0][0]]
        start = math.prod(base)
        views: list[NumberedView] = [(np.arange(start).reshape(base), self.views[image][0].window)]
        if len(self.views[image]) > 1:
            height, width = self._find_tile_grid(image)
            views.append((start + np.arange(height * (width + 1)).reshape(height, width + 1)[:, :width], WHOLE))
        return views

    def _find_tile_grid(self, image: int) -> Size:
        """Return the grid of tokens that the tiles form in the text, without padding."""
        view, (tile_height, tile_width) = self.views[image][1], self.grids[self.views[image][0].pieces[0][0]]
        height, width = len(view.pieces) * tile_height, len(view.pieces[0]) * tile_width
        image_height, image_width = self.sizes[image]
        if image_width / image_height > width / height:
            padding = (height - int(round(image_height * (width / image_width), 7))) // 2
            height -= 2 * padding
        else:
            padding = (width - int(round(image_width * (height / image_height), 7))) // 2
            width -= 2 * padding
        if self.max_tiles is not None:
            ratio = math.sqrt(height * width / (self.max_tiles * tile_height**2))
            if ratio > 1.1:
                height, width = int(height // ratio), int(width // ratio)
        return height, width


class LlavaNext(VisionLanguageModel):
    """LLaVA-NeXT and LLaVA-OneVision: the whole image at a fixed size, then tiles of the enlarged and padded image."""

    pieces_type = AnyresPieces

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        from transformers.image_processing_utils import select_best_resolution

        pixels, config = inputs[PIXELS], self.model.config
        side, counts = int(config.vision_config.image_size), inputs.get("batch_num_images")
        images = [(int(height), int(width)) for height, width in inputs["image_sizes"]]
        is_cut = [True] * len(images) if counts is None else [n == 1 for n in counts.tolist() for _ in range(n)]
        if pixels.shape[-2:] != (side, side) or (pixels.ndim == 5 and len(pixels) != len(images)):
            raise ValueError(f"expected tiles of {side} x {side} pixels for the {len(images)} image(s) in image_sizes")
        views: list[list[View]] = []
        start, pieces_per_image = 0, []
        for size, cut in zip(images, is_cut, strict=True):
            if cut:
                canvas = select_best_resolution(size, config.image_grid_pinpoints)
                tiles = _view_of_tiles(start + 1, canvas[0] // side, canvas[1] // side)
                views.append([View(((start,),)), replace(tiles, window=_fit_window(size, canvas))])
            else:  # If a prompt has several images, LLaVA-OneVision's processor pads each image to a square.
                views.append([View(((start,),), _fit_window(size, (max(size), max(size))))])
            pieces_per_image.append(sum(len(row) for view in views[-1] for row in view.pieces))
            start += pieces_per_image[-1]
        if max(pieces_per_image) > pixels.shape[1] if pixels.ndim == 5 else start != len(pixels):
            raise ValueError(f"image_sizes needs {max(pieces_per_image)} tiles")
        aspect = getattr(config, "vision_aspect_ratio", None)
        max_tiles = int(aspect.rpartition("_")[2]) if aspect else None
        return self._make_pieces([(side, side)] * start, views, mask, sizes=images, max_tiles=max_tiles)


@dataclass(frozen=True, eq=False)
class WindowedPieces(Pieces):
    """The pieces of Qwen-VL. The blocks of Qwen2.5-VL see the tokens sorted by windows of `window` x `window` tokens."""

    window: int | None = None

    def rank_cells(self, layer: str, grid: Size, factor: int) -> Numbers:
        ranks = super().rank_cells(layer, grid, factor)
        if self.window is None or not any(part in layer.split(".") for part in ("blocks", "merger")):
            return ranks
        height, width = (side * factor // self.merge for side in grid)
        rows, columns = (axis.ravel() for axis in np.indices((height, width)))
        side = self.window
        places = np.lexsort((columns % side, rows % side, columns // side, rows // side))
        positions = np.empty_like(places)
        positions[places] = np.arange(places.size)
        if factor > 1:
            return positions[ranks]
        area = self.merge**2
        return positions[ranks // area] * area + ranks % area


class QwenVl(VisionLanguageModel):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: rows of patches (T,D) of all images, and the patch grid of each image."""

    tower = "model.visual"
    projector = "model.visual.merger"
    pieces_type = WindowedPieces

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pixels, grids = inputs[PIXELS], [tuple(map(int, row)) for row in inputs["image_grid_thw"]]
        config = self.model.config.vision_config
        values = getattr(config, "in_channels", 3) * config.temporal_patch_size * self._patch**2
        if tuple(pixels.shape) != (sum(map(math.prod, grids)), values):
            raise ValueError(f"image_grid_thw describes {sum(map(math.prod, grids))} patches of {values} values")
        if any(frames != 1 for frames, _, _ in grids):
            raise ValueError("an image has several frames")
        sizes = [(height * self._patch, width * self._patch) for _, height, width in grids]
        window = getattr(config, "window_size", None)
        window = None if window is None else window // self.merge // self._patch
        views = [(View(((number,),)),) for number in range(len(grids))]
        return self._make_pieces(sizes, views, mask, has_blocks=True, window=window)


class FlorencePieces(Pieces):
    """The pieces of Florence-2: one more token for each image, before its patches."""

    def count_image_tokens(self, image: int) -> int:
        return super().count_image_tokens(image) + 1

    def number_image_tokens(self, image: int) -> list[NumberedView]:
        return [(numbers + 1, window) for numbers, window in super().number_image_tokens(image)]


class Florence(VisionLanguageModel):
    """Florence-2: a language model with an encoder, which reads the mean of the image's patches, and then the patches."""

    plain_prompt = "{prompt}"
    usual_prompts = ("<CAPTION>",)
    ids_name = "decoder_input_ids"
    pieces_type = FlorencePieces

    @property
    def _patch(self) -> int:
        return math.prod(self.model.config.vision_config.patch_stride)


class Kosmos(VisionLanguageModel):
    """Kosmos-2: latent queries attend to the image's patches, and a language model reads the queries."""

    plain_prompt = "{prompt}"
    usual_prompts = ("An image of",)
    tower = "vision_model"
    text_modules = ("text_model", "image_to_text_projection.x_attn")
    # The patches are normalised to length 1 before this layer. Before, gradient times activation would sum to zero.
    own_layer = "image_to_text_projection.dense"
    has_placeholders = False

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        positions, queries = inputs.get("image_embeds_position_mask"), self.model.config.latent_query_num
        if positions is not None and int(positions.sum()) != queries * len(inputs[PIXELS]):
            raise ValueError(f"image_embeds_position_mask does not mark {queries} tokens for each image")
        return super().read_pieces(inputs, mask)


def match_thumbnail(tiles: Tensor, thumbnail: Tensor, padding: float = math.inf) -> tuple[Size, Window]:
    """Return the rows and columns in which tiles (P,C,H,W) look most like the thumbnail (C,H,W) of the whole image.

    Also return the part of the tiles that the image covers. Pixels of the value `padding` lie around the image.
    """
    count, goal = len(tiles), F.adaptive_avg_pool2d(thumbnail.detach().float(), COMPARED_SIDE)
    errors = {}
    for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
        grid = tiles.detach().float().unflatten(0, (rows, count // rows))
        canvas = grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        # Black margins of the image itself are in the thumbnail too.
        (_, _, *shares), (_, _, *margins) = (_find_window((item != padding).any(0)) for item in (canvas, thumbnail))
        height, width = (min(1.0, a / b) if a and b else 1.0 for a, b in zip(shares, margins))
        image = canvas[:, : round(height * canvas.shape[1]), : round(width * canvas.shape[2])]
        error = float((F.adaptive_avg_pool2d(image, COMPARED_SIDE) - goal).square().mean())
        errors[(rows, count // rows), (0, 0, height, width)] = error
    return min(errors, key=errors.__getitem__)


def _fit_window(size: Size, canvas: Size) -> Window:
    """Return the part of a canvas that an image covers, if the image is resized to fit and placed in the centre."""
    scale = min(side / length for length, side in zip(size, canvas))
    height, width = (min(math.ceil(length * scale), side) for length, side in zip(size, canvas))
    top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
    return top / canvas[0], left / canvas[1], height / canvas[0], width / canvas[1]


def _measure(view: View, piece_sizes: Sequence[Size]) -> Size:
    """Return the size in pixels of the part of a view that the image covers."""
    (height, width), (_, _, rows, columns) = piece_sizes[view.pieces[0][0]], view.window
    return max(1, round(len(view.pieces) * height * rows)), max(1, round(len(view.pieces[0]) * width * columns))


def _view_of_tiles(start: int, rows: int, columns: int) -> View:
    return View(tuple(tuple(range(start + row * columns, start + (row + 1) * columns)) for row in range(rows)))


def _count_tiles(ids: Tensor, mask: Tensor, tokens: int) -> list[int]:
    """Return the number of tiles of each image, from the text's tokens (S,L). A tile has `tokens` image tokens."""
    images = [runs for row, row_mask in zip(ids.tolist(), mask.tolist()) for runs in _list_runs(row, row_mask)]
    lengths = [sum(length for _, length in runs) for runs in images]
    if any(length % tokens for length in lengths):
        raise ValueError(f"{sum(lengths)} image tokens are not a multiple of the {tokens} tokens of a tile")
    return [length // tokens for length in lengths]


def _list_runs(row: Sequence[int], mask: Sequence[bool]) -> list[list[tuple[int, int]]]:
    """Return the runs of image tokens of each image, as pairs of the first position and the length.

    The last run of an image, such as its thumbnail, has the same marker (the token before it) as the last run of all.
    """
    starts = [i for i, is_token in enumerate(mask) if is_token and (i == 0 or not mask[i - 1])]
    markers = [row[start - 1] for start in starts]
    images: list[list[tuple[int, int]]] = [[]]
    for start, marker in zip(starts, markers):
        images[-1].append((start, [*mask[start:], False].index(False)))
        if marker == markers[-1]:
            images.append([])
    return images[:-1]


def _guess_rows(gaps: Sequence[int], tokens: int) -> int:
    """Return the number of rows of tiles with equal gaps: all tiles are in one row, or each row has one tile."""
    # Between tiles of a row, there are two markers. Between rows, there is a line break too.
    return 1 if not gaps or gaps[0] <= tokens + 2 else len(gaps) + 1


def _find_window(area: Tensor) -> Window:
    """Return the part of a tile that the image covers, from the tile's attention mask (H,W)."""
    height, width = int(area.any(1).sum()), int(area.any(0).sum())
    return 0, 0, height / area.shape[0], width / area.shape[1]


def find_state_block(model: nn.Module, tower: str, states: int | Sequence[int]) -> str | None:
    """Return the name of the tower's block that outputs the last of these hidden states, or None.

    Hidden state 0 is the input of the first block, so no block outputs hidden state 0.
    """
    block_lists = (item for item in model.get_submodule(tower).named_modules() if isinstance(item[1], nn.ModuleList))
    for name, blocks in block_lists:
        indices = [states] if isinstance(states, int) else states
        number = max(state - 1 if state >= 0 else len(blocks) + state for state in indices)
        return f"{tower}.{name}.{number}" if number >= 0 else None
    return None
