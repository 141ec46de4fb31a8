"""Adapters for the detectors of transformers. All return boxes and logits per query, but scores differ."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_convert

from gradcam.adapters.base import MODEL, Candidates, Detections, DetectorAdapter, ModelRun, ModuleCall, to_candidates
from gradcam.adapters.tokenizers import load_tokenizer, tokenize
from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.hooks.containers import Batch

SEPARATORS = (101, 102, 1012, 1029)  # BERT's [CLS], [SEP], "." and "?" separate Grounding DINO's phrases.
# The backbone is the module whose name ends in one of these names. Earlier names have priority.
BACKBONE_NAMES = ("model.backbone.conv_encoder", "model.conv_encoder", "model.backbone")

OWL_BLOCKS = "vision_model.encoder.layers", "layer_norm1"


@dataclass(frozen=True)
class DecodingRule:
    """The rule for decoding the outputs of one kind of detector.

    `pattern` matches the start of the class name, before "For".

    `scores` is the function from logits to scores. "softmax" has a last class for "no object". "sigmoid" has no such
    class. "phrases" takes the largest sigmoid among the tokens of each phrase.

    `choice` selects the detections. "queries" gives one detection per query, with the query's best label. "pairs" gives
    the `max_pairs` best pairs of a query and a class; None means as many pairs as queries. `threshold` is the default
    of the processor.

    `has_text` is True if a text input defines the classes. If `is_within_mask` is True, boxes are relative to the
    unpadded image, which a mask marks. If the detector has no backbone, `blocks` contains two names: the end of the
    block list's name, and the name of the first norm in each block.
    """

    pattern: str
    scores: str = "sigmoid"
    choice: str = "pairs"
    max_pairs: int | None = None
    threshold: float = 0.5
    has_text: bool = False
    is_within_mask: bool = True
    blocks: tuple[str, str] | None = None


DECODING_RULES = (
    DecodingRule("Detr|TableTransformer", "softmax", "queries"),
    DecodingRule("Yolos", "softmax", "queries", blocks=("vit.encoder.layer", "layernorm_before")),
    DecodingRule("ConditionalDetr|DeformableDetr|DabDetr|LwDetr", max_pairs=100),
    DecodingRule("RfDetr"),
    DecodingRule("RTDetr|RTDetrV2|DFine|Deimv2", is_within_mask=False),  # boxes relative to the padded image
    DecodingRule("OwlViT|Owlv2", "sigmoid", "queries", None, 0.1, True, False, OWL_BLOCKS),
    DecodingRule("(MM)?GroundingDino", "phrases", "queries", None, 0.25, True),
)


class HuggingFaceDetector(DetectorAdapter):
    """A detector of transformers.

    If the detector takes text, a label is the index of a text query (OWL-ViT) or of a phrase (Grounding DINO). All
    detections have scores above `threshold`.

    References
    ----------
    Carion et al., "End-to-End Object Detection with Transformers", ECCV 2020, section 3, for queries and their boxes.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        names = [base.__name__ for base in type(model).__mro__]
        rules = [(f"({rule.pattern})For(Object|Segm|Instance).*", rule) for rule in DECODING_RULES]
        self.rule = next(rule for pattern, rule in rules for name in names if re.fullmatch(pattern, name))
        self.default_threshold = self.rule.threshold

    @property
    def own_layer(self) -> str:
        """Return the name of the backbone, or of the first norm in the last block if there is no backbone.

        Without a backbone, the norm's output, which is the input of the last attention, is the best layer. After the
        attention, each box depends only on its own token. Before the norm, gradient times activation would sum to zero,
        because the norm is scale-invariant.
        """
        modules: dict[str, Any] = dict(self.model.named_modules())
        if self.rule.blocks is None:
            return next(name for path in BACKBONE_NAMES for name in modules if f".{name}".endswith(f".{path}"))
        path, norm = self.rule.blocks
        blocks = next(name for name in modules if name.endswith(path))
        return f"{blocks}.{len(modules[blocks]) - 1}.{norm}"

    @property
    def own_labels(self) -> Sequence[str] | None:
        config = self.model.config
        return None if self.rule.has_text else [str(config.id2label.get(i, i)) for i in range(config.num_labels)]

    def reshape(self, batch: Batch) -> Callable[[Tensor], Tensor] | None:
        """Return a function that places YOLOS's patch tokens on a grid; return None for all other detectors."""
        config = self.model.config
        box_tokens = getattr(config, "num_detection_tokens", 0)
        if not box_tokens:
            return None
        patch_size = (config.patch_size,) * 2 if isinstance(config.patch_size, int) else config.patch_size
        grid = tuple(length // patch for length, patch in zip(batch.size, patch_size))
        return lambda tokens: tokens[:, 1:-box_tokens].unflatten(1, grid).movedim(-1, 1) if tokens.ndim == 3 else tokens

    def to_inputs(self, images: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": images}

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        return [] if self.rule.has_text else None

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the model's inputs for these text prompts.

        Raises `ModelError` if a prompt is empty or has a full stop, if the model takes no text, or if there is no
        tokenizer. Raises `TargetError` if the text is too long.
        """
        if not self.rule.has_text:
            return super().to_prompts(prompts)
        config, forbidden = self.model.config, ".?" if self.rule.scores == "phrases" else ""
        phrases = [prompt.strip().removesuffix(".") for prompt in prompts]
        if not all(phrases) or any(mark in phrase for phrase in phrases for mark in forbidden):
            raise ModelError(f"The prompts are {list(prompts)}: each must be a word or phrase without a full stop.")
        tokenizer = load_tokenizer(str(config.name_or_path), ModelError)
        if self.rule.scores == "phrases":  # Join the prompts to one lower-case text, as in training.
            tokens = tokenize(tokenizer, [". ".join(phrases).lower() + "."], config.max_text_len, fill=False)
        else:
            tokens = tokenize(tokenizer, phrases, config.text_config.max_position_embeddings, fill=True)
        return dict(tokens)

    def read(self, run: ModelRun, batch: Batch) -> list[Detections]:
        return [self._select_detections(*scored_boxes) for scored_boxes in self._list_scored_boxes(run, batch)]

    def list_candidates(self, run: ModelRun, batch: Batch, label: int | None) -> list[Candidates]:
        """Return each image's candidates.

        If the detector takes text, an image's text may have too few phrases or queries for the index `label`. The
        image's candidates then have score 0. Raises `TargetError` if the index is too large for all images.
        """
        scored_boxes = list(self._list_scored_boxes(run, batch))
        classes = max(scores.shape[1] for _, scores in scored_boxes)
        if label is not None and not 0 <= label < classes:
            noun = "phrases or queries in the text" if self.rule.has_text else "classes"
            raise TargetError(f"There is no label {label}: there are {classes} {noun}, counted from 0.")
        padded = [(boxes, F.pad(scores, (0, classes - scores.shape[1]))) for boxes, scores in scored_boxes]
        return [to_candidates(boxes, scores, label) for boxes, scores in padded]

    def _select_detections(self, boxes: Tensor, class_scores: Tensor) -> Detections:
        if self.rule.choice == "pairs":
            count = min(self.rule.max_pairs or len(class_scores), class_scores.numel())
            scores, indices = class_scores.flatten().topk(count)
            rows, labels = indices // class_scores.shape[1], indices % class_scores.shape[1]
        else:
            best_scores, label_of_row = class_scores.max(1)
            scores, rows = best_scores.sort(descending=True, stable=True)
            labels = label_of_row[rows]
        is_detected = scores > self.threshold
        return Detections(boxes[rows[is_detected]], scores[is_detected], labels[is_detected])

    def _list_scored_boxes(self, run: ModelRun, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each image's boxes (Q,4) in pixels, and the scores (Q,C) of all queries and classes."""
        output, call = run.last_output(), run.calls[MODEL][-1]
        if not (hasattr(output, "logits") and hasattr(output, "pred_boxes")):
            expected = "an output with `logits` and `pred_boxes`: call the model with return_dict=True."
            raise ModelError(f"{type(self.model).__name__} returned {type(output).__name__}, expected {expected}")
        corners = box_convert(output.pred_boxes, "cxcywh", "xyxy")
        sizes = self._find_box_scales(call, batch, len(corners))
        boxes = corners * corners.new_tensor([[width, height, width, height] for height, width in sizes])[:, None]
        logits: Tensor = output.logits
        if self.rule.scores == "softmax":
            yield from zip(boxes, logits.softmax(-1)[..., :-1])
        elif self.rule.scores == "sigmoid":
            yield from zip(boxes, logits.sigmoid())
        else:
            yield from zip(boxes, map(_score_phrases, logits.sigmoid(), self._find_phrases(call)))

    def _find_box_scales(self, call: ModuleCall, batch: Batch, images: int) -> list[tuple[float, float]]:
        """Return the height and width, in input pixels, by which each image's relative boxes are multiplied.

        If a mask marks the unpadded image, the result is the size of the unpadded image. Otherwise, the result is the
        size of the input. The mask's resolution may differ from the input's.
        """
        mask: Tensor | None = self._find_argument(call, "pixel_mask")
        if mask is None or not self.rule.is_within_mask:
            return [(float(batch.size[0]), float(batch.size[1]))] * images
        height, width = (length / mask_length for length, mask_length in zip(batch.size, mask.shape[-2:]))
        return [(rows * height, columns * width) for rows, columns in map(_find_window, mask.bool())]

    def _find_phrases(self, call: ModuleCall) -> list[list[list[int]]]:
        ids: Tensor = self._find_argument(call, "input_ids")
        mask: Tensor | None = self._find_argument(call, "attention_mask")
        unpadded = ids if mask is None else ids.where(mask.bool(), SEPARATORS[0])
        return [_split_phrases(tokens) for tokens in unpadded.tolist()]

    def _find_argument(self, call: ModuleCall, name: str) -> Any:
        """Return an argument of the model's call, passed by name or position, or None for an argument not passed."""
        return {**dict(zip(inspect.signature(self.model.forward).parameters, call.args)), **call.kwargs}.get(name)


def _find_window(mask: Tensor) -> tuple[int, int]:
    """Return the height and width of the unpadded image that a mask (H,W) marks.

    Raises `ImageError` if the marked pixels are not a rectangle in the upper left corner.
    """
    height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
    if not height or not mask[:height, :width].all() or int(mask.sum()) != height * width:
        expected = "1 on the image, and 0 on the padding to its right and below it."
        raise ImageError(f"pixel_mask is not a rectangle in the upper left corner: expected {expected}")
    return height, width


def _split_phrases(tokens: Sequence[int]) -> list[list[int]]:
    """Return the positions of each phrase's tokens."""
    phrases: list[list[int]] = [[]]
    for position, token in enumerate(tokens):
        if token not in SEPARATORS:
            phrases[-1].append(position)
        elif phrases[-1]:
            phrases.append([])
    return [phrase for phrase in phrases if phrase]


def _score_phrases(scores: Tensor, phrases: Sequence[Sequence[int]]) -> Tensor:
    """Convert the scores (Q,T) of tokens to scores (Q,P) of phrases. Raise `TargetError` if there are no phrases."""
    if not phrases:
        raise TargetError("The text contains no phrase: name the objects to look for, each followed by a full stop.")
    return torch.stack([scores[:, positions].max(1).values for positions in phrases], 1)
