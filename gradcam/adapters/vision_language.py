"""Adapters for vision-language models: language models that read image patches at placeholder tokens of the prompt.

Each adapter describes the pieces into which its processor cuts an image, and where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.adapters.captioning import PICTURES, GenerativeCaptioner
from gradcam.adapters.tokenizers import SAVE
from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.hooks.containers import Batch
from gradcam.layers.pieces import WHOLE, NumberedView, Numbers, Pieces, Size, View

LENS_DEPTH = 0.9  # Share of the text model's blocks that run before the logit lens reads the image tokens.
DUMMY_SIZE = 256  # Side of a blank image, in pixels. Processors insert placeholder tokens only with an image.
MAX_TILE_GAP = 2  # Tokens of two tiles of an image are at most this far apart, if markers name the tiles.
COMPARED_SIDE = 32  # Tiles are compared with the thumbnail at this size.


class VisionLanguageModel(GenerativeCaptioner):
    """LLaVA and similar models. The processor passes each image as one piece (M,C,H,W).

    `text_modules` are the names of modules that process text tokens.
    """

    tower = "model.vision_tower"
    text_modules: ClassVar[tuple[str, ...]] = ("model.language_model", "lm_head")
    usual_prompts = ("Describe the picture in a sentence.",)

    @property
    def own_layer(self) -> str | None:
        states = getattr(self.model.config, "vision_feature_layer", None)
        return super().own_layer if states is None else find_block(self.model, self.tower, states)

    @property
    def lens_layer(self) -> str:
        """Return the default layer of the logit lens, in the explained model."""
        layers = self.list_text_layers()
        return layers[math.ceil(LENS_DEPTH * (len(layers) - 1)) - 1]

    def list_text_layers(self) -> list[str]:
        """List the text model's blocks and its final norm, in the explained model.

        Raises `ModelError` if the text model has no such blocks: it has an encoder, or reads latent queries.
        """
        text = f"{self.prefix}.{self.text_modules[0]}".lstrip(".")
        modules = dict(self.model.get_submodule(self.text_modules[0]).named_children())
        if not {"layers", "norm"} <= modules.keys():
            problem = (
                f"lens reads image tokens in a decoder-only language model, and {type(self.model).__name__} has none"
            )
            raise ModelError(f"{problem}: choose another method, such as hirescam.")
        return [*(f"{text}.layers.{number}" for number, _ in enumerate(modules["layers"])), f"{text}.norm"]

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Build a chat prompt with an image. Raise `ModelError` for several prompts, or if there is no processor."""
        from transformers import AutoProcessor

        folder = str(getattr(self.model, "name_or_path", ""))
        if len(prompts) > 1:
            raise ModelError(f"{type(self.model).__name__} takes one prompt, but {len(prompts)} were given.")
        try:
            processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompts[0]}]}]
            if getattr(processor, "chat_template", None):
                text = processor.apply_chat_template(messages, add_generation_prompt=True)
            else:
                text = f"USER: {processor.image_token}\n{prompts[0]} ASSISTANT:"
            inputs = processor(images=Image.new("RGB", (DUMMY_SIZE, DUMMY_SIZE)), text=text, return_tensors="pt")
        except Exception as error:  # For missing or broken files, transformers raises errors of many types.
            reason = " ".join(str(error).split())[:200]
            problem = f"The model has no processor that builds a prompt with an image ({reason})"
            raise ModelError(f"{problem}: {SAVE.replace('tokenizer', 'processor')}.") from error
        return {name: inputs[name] for name in (self.ids_name, "attention_mask")}

    def complete_arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = super().complete_arguments(batch)
        if "input_ids" not in arguments:
            problem = f"{type(self.model).__name__} needs a prompt with a placeholder for the image"
            expected = f"a dict with {PICTURES}, input_ids and attention_mask."
            raise TargetError(f"{problem}: pass the output of its processor for the prompt and the image, {expected}")
        return arguments

    def to_pieces(self, inputs: dict[str, Any]) -> Batch:
        """Return the output of the model's processor as a batch, with the description of its pieces.

        Raises `ImageError` if the inputs do not fit the model or one another.
        """
        name, pixels = type(self.model).__name__, inputs[PICTURES]
        if not isinstance(pixels, Tensor) or not pixels.is_floating_point() or pixels.numel() == 0:
            raise ImageError(
                f"{PICTURES} is {type(pixels).__name__}, expected the floating-point tensor of {name}'s processor."
            )
        device = next(self.model.parameters()).device
        if pixels.device != device and not hasattr(self.model, "hf_device_map"):
            raise ImageError(
                f"The inputs are on {pixels.device}, but {name} is on {device}: move them with inputs.to('{device}')."
            )
        ids = inputs.get("input_ids")
        mask = None if ids is None else ids == self._image_token
        try:
            pieces = self.read_pieces(inputs, mask)
        except (KeyError, IndexError, ValueError, AttributeError, RuntimeError, TypeError, ZeroDivisionError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:120]
            problem = f"{PICTURES} {tuple(pixels.shape)} and the other inputs are not the output of {name}'s processor"
            raise ImageError(f"{problem} ({reason}): pass the whole output of the model's own processor.") from error
        prefix = f"{self.prefix}." if self.prefix else ""
        pieces = replace(pieces, text_modules=tuple(prefix + module for module in self.text_modules))
        pieces.check_placeholders("input_ids")
        return Batch((), inputs, pixels, len(pieces.views), pieces.sizes[0], pixels.device, pieces=pieces)

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        """Return the pieces of the inputs. `mask` (S,L) marks the image tokens of the text.

        May raise any usual error if the inputs are not the output of the model's processor; the caller reports it.
        """
        pixels = inputs[PICTURES]
        if pixels.ndim != 4:
            raise ValueError("expected one image per piece, (N,C,H,W)")
        sizes: list[Size] = [(int(pixels.shape[2]), int(pixels.shape[3]))] * len(pixels)
        if self.model.config.vision_config.model_type == "pixtral" and "image_sizes" in inputs:
            sizes = [(int(height), int(width)) for height, width in inputs["image_sizes"]]
        views = [(View(((number,),)),) for number in range(len(pixels))]
        return self._make_pieces(sizes, views, sizes, mask)

    @property
    def merge(self) -> int:
        """Return the side of the square of patches that form one token of the text."""
        config = self.model.config
        if (count := getattr(config, "mm_tokens_per_image", None)) is not None:
            return int(config.vision_config.image_size // self._patch / math.sqrt(count))
        return int(getattr(config, "spatial_merge_size", None) or getattr(config, "downsample_factor", None) or 1)

    @property
    def _patch(self) -> int:
        patch = self.model.config.vision_config.patch_size
        return int(patch if isinstance(patch, int) else patch[0])

    @property
    def _image_token(self) -> int:
        config = self.model.config
        return int(getattr(config, "image_token_id", None) or config.image_token_index)

    def _make_pieces(
        self,
        piece_sizes: Sequence[Size],
        views: Sequence[Sequence[View]],
        sizes: Sequence[Size],
        mask: Tensor | None,
        kind: type[Pieces] = Pieces,
        **fields: Any,
    ) -> Pieces:
        """Return the pieces, with the sizes in pixels of each piece and of each image's heatmap."""
        grids = [(height // self._patch, width // self._patch) for height, width in piece_sizes]
        fields |= {"merge": self.merge, "placeholders": mask}
        pieces = kind(grids, views, [0] * len(views), sizes, **fields)
        samples, sample, room = [], 0, -1
        counts = [] if mask is None else mask.sum(1).tolist()
        for image in range(len(views)):
            if not counts:
                samples.append(image)
                continue
            room = counts[0] if room < 0 else room
            while room <= 0 and sample < len(counts) - 1:  # The sample's placeholders are used up.
                sample += 1
                room = counts[sample]
            samples.append(sample)
            room -= pieces.count_image_tokens(image)
        return replace(pieces, samples=samples)


class TiledModel(VisionLanguageModel):
    """InternVL and Aya Vision: tiles of one size (P,C,H,W), and a thumbnail after the tiles if there are several.

    The processor does not pass the numbers of rows and columns. The thumbnail shows which arrangement is right.
    """

    @property
    def own_layer(self) -> str | None:
        # By default, InternVL's language model reads the image tower's output after the final norm.
        is_last = self.model.config.vision_feature_layer == -1 and self.model.config.model_type == "internvl"
        return f"{self.tower}:last_hidden_state" if is_last else super().own_layer

    @property
    def merge(self) -> int:
        ratio = getattr(self.model.config, "downsample_ratio", None)
        return super().merge if ratio is None else round(1 / ratio)

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pixels = inputs[PICTURES]
        side_y, side_x = map(int, pixels.shape[2:])
        tokens = (side_y // self._patch // self.merge) * (side_x // self._patch // self.merge)
        views, sizes = [], []
        start = 0
        for count in [1] * len(pixels) if mask is None else _count_tiles(mask, tokens):
            thumbnail = start + count - 1
            rows, columns = (1, 1) if count == 1 else arrange_tiles(pixels[start:thumbnail], pixels[thumbnail])
            image_views = [View(((thumbnail,),))]
            if count > 1:
                image_views.append(_view_of_tiles(start, rows, columns))
            views.append(tuple(image_views))
            sizes.append((rows * side_y, columns * side_x))
            start += count
        if start != len(pixels):
            raise ValueError(f"the text has tokens for {start} tile(s)")
        return self._make_pieces([(side_y, side_x)] * len(pixels), views, sizes, mask)


class Idefics(VisionLanguageModel):
    """SmolVLM and Idefics 3: tiles (S,P,C,H,W), and a thumbnail after the tiles. Markers in the text separate the tiles."""

    tower = "model.vision_model"
    text_modules = ("model.text_model", "lm_head")

    @property
    def own_layer(self) -> str | None:
        return f"{self.tower}:last_hidden_state"

    @property
    def merge(self) -> int:
        return int(self.model.config.scale_factor)

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pixels, ids = inputs[PICTURES], inputs["input_ids"]
        if mask is None or pixels.ndim != 5 or len(pixels) != len(ids):
            raise ValueError("expected tiles (N,P,C,H,W), and as many texts")
        side_y, side_x = map(int, pixels.shape[3:])
        is_real = (pixels != 0).flatten(2).any(2)  # The model drops blank tiles, which only fill up the batch.
        areas = inputs.get("pixel_attention_mask")
        areas = torch.ones_like(pixels[:, :, 0], dtype=torch.bool) if areas is None else areas.bool()
        windows = [_find_window(area) for area in areas[is_real]]
        tokens = (side_y // self._patch // self.merge) * (side_x // self._patch // self.merge)
        views, sizes, start = [], [], 0
        for row, row_mask, count in zip(ids.tolist(), mask.tolist(), is_real.sum(1).tolist()):
            starts = _list_runs(row_mask, tokens)
            if len(starts) != count:
                raise ValueError(f"the text has tokens for {len(starts)} tile(s), and the image has {count}")
            markers = [row[position - 1] for position in starts]
            first = 0
            for last in (k for k, marker in enumerate(markers) if marker == markers[-1]):  # the thumbnails
                image_views, size = [View(((start + last,),), windows[start + last])], (side_y, side_x)
                if last > first:
                    gaps = [starts[k + 1] - starts[k] for k in range(first, last - 1)]
                    rows = 1 + sum(gap > min(gaps) for gap in gaps) if len(set(gaps)) > 1 else _guess_rows(gaps, tokens)
                    columns = (last - first) // rows
                    image_views.append(_view_of_tiles(start + first, rows, columns))
                    size = (rows * side_y, columns * side_x)
                _, _, height, width = image_views[-1].window
                views.append(tuple(image_views))
                sizes.append((max(1, round(size[0] * height)), max(1, round(size[1] * width))))
                first = last + 1
            start += count
        return self._make_pieces([(side_y, side_x)] * start, views, sizes, mask)


class LlavaNext(VisionLanguageModel):
    """LLaVA-NeXT and LLaVA-OneVision: the whole image at a fixed size, then tiles of the enlarged and padded image."""

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        from transformers.image_processing_utils import select_best_resolution

        pixels, config = inputs[PICTURES], self.model.config
        side = int(config.vision_config.image_size)
        counts = inputs.get("batch_num_images")
        images = [(int(height), int(width)) for height, width in inputs["image_sizes"]]
        is_cut = [True] * len(images) if counts is None else [n == 1 for n in counts.tolist() for _ in range(n)]
        rows_per_image = len(images) if pixels.ndim == 5 else None
        if rows_per_image is not None and len(pixels) != rows_per_image:
            raise ValueError(f"there are {len(pixels)} images, but {rows_per_image} image sizes")
        views, start = [], 0
        for (height, width), cut in zip(images, is_cut):
            image_views = [View(((start,),))]
            start += 1
            if cut:
                best_height, best_width = select_best_resolution((height, width), config.image_grid_pinpoints)
                scale = min(best_height / height, best_width / width)
                fitted = min(math.ceil(height * scale), best_height), min(math.ceil(width * scale), best_width)
                top, left = (best_height - fitted[0]) // 2, (best_width - fitted[1]) // 2
                window = (top / best_height, left / best_width, fitted[0] / best_height, fitted[1] / best_width)
                rows, columns = best_height // side, best_width // side
                image_views.append(replace(_view_of_tiles(start, rows, columns), window=window))
                start += rows * columns
            views.append(tuple(image_views))
        available = int(pixels.shape[1]) if pixels.ndim == 5 else len(pixels)
        if max(1 + sum(map(len, row[-1].pieces)) if len(row) > 1 else 1 for row in views) > available:
            raise ValueError("there are fewer tiles than image_sizes needs")
        aspect = getattr(config, "vision_aspect_ratio", None)
        max_tiles = int(aspect.rpartition("_")[2]) if aspect else None
        return self._make_pieces([(side, side)] * start, views, images, mask, AnyresPieces, max_tiles=max_tiles)


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
        views: list[NumberedView] = [(np.arange(start).reshape(base), WHOLE)]
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


class QwenVl(VisionLanguageModel):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: rows of patches (T,D) of all images, and the patch grid of each image."""

    tower = "model.visual"

    @property
    def own_layer(self) -> str | None:
        # The merger begins with a norm. Before a norm, gradient times activation would sum to zero at each token.
        merger = self.model.get_submodule(f"{self.tower}.merger")
        return next(f"{self.tower}.merger.{name}" for name in ("ln_q", "norm") if hasattr(merger, name))

    @property
    def merge(self) -> int:
        return int(self.model.config.vision_config.spatial_merge_size)

    def to_pieces(self, inputs: dict[str, Any]) -> Batch:
        if inputs.get("pixel_values_videos") is not None:
            raise ImageError("The inputs have a video: expected images. Pass the frames as images.")
        return super().to_pieces(inputs)

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pixels, grids = inputs[PICTURES], [tuple(map(int, row)) for row in inputs["image_grid_thw"]]
        if pixels.ndim != 2 or len(pixels) != sum(map(math.prod, grids)):
            raise ValueError(f"image_grid_thw stands for {sum(map(math.prod, grids))} patches")
        if any(frames != 1 for frames, _, _ in grids):
            raise ValueError("an image has several frames")
        sizes = [(height * self._patch, width * self._patch) for _, height, width in grids]
        config = self.model.config.vision_config
        window = getattr(config, "window_size", None)
        window = None if window is None else window // self.merge // self._patch
        views = [(View(((number,),)),) for number in range(len(grids))]
        fields: Any = {"has_blocks": True, "window": window}
        return self._make_pieces(sizes, views, sizes, mask, WindowedPieces, **fields)


@dataclass(frozen=True, eq=False)
class WindowedPieces(Pieces):
    """The pieces of Qwen-VL. The blocks of Qwen2.5-VL see the tokens sorted by windows of `window` x `window` tokens."""

    window: int | None = None

    def order(self, layer: str, grid: Size, factor: int) -> Numbers:
        ranks = super().order(layer, grid, factor)
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


class MistralVl(VisionLanguageModel):
    """Mistral 3: images of various sizes (M,C,H,W), padded to the largest size, and a projector that begins with a norm."""

    own_layer = "model.multi_modal_projector.norm"


class Florence(VisionLanguageModel):
    """Florence-2: a language model with an encoder, which reads the mean of the image's patches, and then the patches."""

    text_modules = ("model.language_model", "lm_head")
    starts = ("decoder_start_token_id", "bos_token_id")
    ids_name = "decoder_input_ids"

    @property
    def own_layer(self) -> str | None:
        return f"{self.tower}:last_hidden_state"

    @property
    def _patch(self) -> int:
        return math.prod(self.model.config.vision_config.patch_stride)

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        pieces = super().read_pieces(inputs, mask)
        return FlorencePieces(**vars(pieces))


class FlorencePieces(Pieces):
    """The pieces of Florence-2: one more token for each image, before its patches."""

    def count_image_tokens(self, image: int) -> int:
        return super().count_image_tokens(image) + 1

    def number_image_tokens(self, image: int) -> list[NumberedView]:
        return [(numbers + 1, window) for numbers, window in super().number_image_tokens(image)]


class Kosmos(VisionLanguageModel):
    """Kosmos-2: latent queries attend to the image's patches, and a language model reads the queries."""

    tower = "vision_model"
    text_modules = ("text_model", "image_to_text_projection.x_attn")
    # The patches are normalised to length 1 before this layer. Before, gradient times activation would sum to zero.
    own_layer = "image_to_text_projection.dense"

    def read_pieces(self, inputs: Mapping[str, Any], mask: Tensor | None) -> Pieces:
        return super().read_pieces(inputs, None)

    @property
    def _image_token(self) -> int:
        return -1


def arrange_tiles(tiles: Tensor, thumbnail: Tensor) -> Size:
    """Return the rows and columns in which tiles (P,C,H,W) look most like the thumbnail (C,H,W) of the whole image."""
    count, goal = len(tiles), F.adaptive_avg_pool2d(thumbnail.detach().float(), COMPARED_SIDE)
    errors = {}
    for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
        grid = tiles.detach().float().unflatten(0, (rows, count // rows))
        whole = grid.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        errors[rows, count // rows] = float((F.adaptive_avg_pool2d(whole, COMPARED_SIDE) - goal).square().mean())
    return min(errors, key=errors.__getitem__)


def _view_of_tiles(start: int, rows: int, columns: int) -> View:
    return View(tuple(tuple(range(start + row * columns, start + (row + 1) * columns)) for row in range(rows)))


def _count_tiles(mask: Tensor, tokens: int) -> list[int]:
    """Return the number of tiles of each image, from the image tokens (S,L). A tile has `tokens` tokens."""
    counts = []
    for row in mask.tolist():
        positions = [position for position, is_token in enumerate(row) if is_token]
        starts = [0, *(k for k in range(1, len(positions)) if positions[k] - positions[k - 1] > MAX_TILE_GAP)]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(positions)])] if positions else []
        if any(length % tokens for length in lengths):
            raise ValueError(f"{sum(lengths)} image tokens are not a multiple of the {tokens} tokens of a tile")
        counts += [length // tokens for length in lengths]
    return counts


def _list_runs(mask: Sequence[bool], tokens: int) -> list[int]:
    """Return the position of each tile's first token. Raise `ValueError` if a tile has not `tokens` tokens."""
    starts = [i for i, is_token in enumerate(mask) if is_token and (i == 0 or not mask[i - 1])]
    if any(not all(mask[start : start + tokens]) or len(mask) < start + tokens for start in starts):
        raise ValueError(f"a tile does not have {tokens} image tokens")
    return starts


def _guess_rows(gaps: Sequence[int], tokens: int) -> int:
    """Return the number of rows of tiles with equal gaps: all tiles are in one row, or each row has one tile."""
    # Between tiles of a row, there are two markers. Between rows, there is a line break too.
    return 1 if not gaps or gaps[0] <= tokens + 2 else len(gaps) + 1


def _find_window(area: Tensor) -> tuple[float, float, float, float]:
    """Return the part of a tile that the image covers, from the tile's attention mask (H,W)."""
    height, width = int(area.any(1).sum()), int(area.any(0).sum())
    return 0, 0, height / area.shape[0], width / area.shape[1]


def find_block(model: nn.Module, tower: str, states: int | Sequence[int]) -> str | None:
    """Return the name of the tower's block that outputs the last of these hidden states, or None.

    Hidden state 0 is the input of the first block, so no block outputs hidden state 0.
    """
    block_lists = (item for item in model.get_submodule(tower).named_modules() if isinstance(item[1], nn.ModuleList))
    for name, blocks in block_lists:
        indices = [states] if isinstance(states, int) else states
        number = max(state - 1 if state >= 0 else len(blocks) + state for state in indices)
        return f"{tower}.{name}.{number}" if number >= 0 else None
    return None
