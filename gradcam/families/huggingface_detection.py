"""Detectors of transformers. All give logits and boxes of queries; they differ in how scores come out of the logits."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import ImageError, ModelError, TargetError
from gradcam.families.base import MODEL, Call, Candidates, Detections, Detector, Seen
from gradcam.families.tokens import load_tokenizer, tokenize
from gradcam.hooks.nested import Batch

SEPARATORS = (101, 102, 1012, 1029)  # [CLS], [SEP], "." and "?" of BERT: where Grounding DINO itself cuts its text
BACKBONES = (
    "model.backbone.conv_encoder",
    "model.conv_encoder",
    "model.backbone",
)  # the end of a name; the first that there is


# By model, what a person set, for all that reads it.
_thresholds: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Kind:
    """How models of one kind are read.

    `pattern`: of their class's name, before "For". `scores`: what is made of the logits: "softmax", whose
    last class is that there is nothing; "sigmoid"; or "phrases", the largest sigmoid among the tokens of each phrase of
    the text. `choice`: "queries" have one label each; "pairs" are of a query and a class, of which the `most` best are
    taken, None for as many as there are queries. `threshold`: that of the kind's own processor. `has_text`: whether the
    classes are what a text among the inputs says. `is_within_mask`: whether boxes are shares of the picture without the
    padding that a mask tells. `blocks`: of a transformer without a backbone, where its blocks for the picture are, and the
    first norm of each.
    """

    pattern: str
    scores: str = "sigmoid"
    choice: str = "pairs"
    most: int | None = None
    threshold: float = 0.5
    has_text: bool = False
    is_within_mask: bool = True
    blocks: tuple[str, str] | None = None


KINDS = (
    Kind("Detr|TableTransformer", "softmax", "queries"),
    Kind("Yolos", "softmax", "queries", blocks=("vit.encoder.layer", "layernorm_before")),
    Kind("ConditionalDetr|DeformableDetr|DabDetr|LwDetr", most=100),
    Kind("RfDetr"),
    Kind("RTDetr|RTDetrV2|DFine|Deimv2", is_within_mask=False),  # their anchors lie on all of the input
    Kind("OwlViT", "sigmoid", "queries", None, 0.1, True, False, ("owlvit.vision_model.encoder.layers", "layer_norm1")),
    Kind("Owlv2", "sigmoid", "queries", None, 0.1, True, False, ("owlv2.vision_model.encoder.layers", "layer_norm1")),
    Kind("(MM)?GroundingDino", "phrases", "queries", None, 0.25, True),
)


class HuggingFaceDetector(Detector):
    """A detector of transformers. Labels of one that looks for what a text says are the numbers of its queries (OWL-ViT)
    or of its phrases (Grounding DINO). `threshold`: the score above which a box counts.

    References
    ----------
    Carion et al., "End-to-End Object Detection with Transformers", ECCV 2020, section 3, for queries and their boxes.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        names = [each.__name__ for each in type(model).__mro__]
        self.kind = next(
            it for it in KINDS for name in names if re.fullmatch(f"({it.pattern})For(Object|Segm|Instance).*", name)
        )
        self.threshold = _thresholds.get(model, self.kind.threshold)

    @property
    def own_layer(self) -> str:
        """The backbone, whose stages count as far as they are read. Of a transformer what its last attention sees: behind
        it a box has a token of its own. In front of the norm gradient and activation would be at right angles."""
        modules = dict(self.model.named_modules())
        if self.kind.blocks is None:
            return next(name for place in BACKBONES for name in modules if f".{name}".endswith(f".{place}"))
        place, norm = self.kind.blocks
        return f"{place}.{sum(1 for _ in modules[place].children()) - 1}.{norm}"

    @property
    def own_labels(self) -> Sequence[str] | None:
        config: Any = self.model.config
        return None if self.kind.has_text else [str(config.id2label.get(i, i)) for i in range(config.num_labels)]

    def set_threshold(self, threshold: float) -> None:
        self.threshold = _thresholds[self.model] = threshold

    def reshape(self, batch: Batch) -> Callable[[Tensor], Tensor] | None:
        """How the tokens of a layer lie on the pictures, where counting cannot tell: YOLOS has those of its boxes behind
        those of the patches."""
        config: Any = self.model.config
        behind = getattr(config, "num_detection_tokens", 0)
        if not behind:
            return None
        sides = (config.patch_size,) * 2 if isinstance(config.patch_size, int) else config.patch_size
        grid = tuple(length // side for length, side in zip(batch.size, sides))
        return lambda tokens: tokens[:, 1:-behind].unflatten(1, grid).movedim(-1, 1) if tokens.ndim == 3 else tokens

    def to_inputs(self, images: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": images}

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        return [] if self.kind.has_text else None

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Raises `ModelError` also for what is no phrase, and without a tokenizer beside the model; `TargetError` for a
        text that is too long."""
        if not self.kind.has_text:
            return super().to_prompts(prompts)
        config: Any = self.model.config
        given = [prompt.strip().removesuffix(".") for prompt in prompts]
        if not all(given) or (self.kind.scores == "phrases" and any(mark in it for it in given for mark in ".?")):
            raise ModelError(f"The prompts are {list(prompts)}: each must be a word or phrase without a full stop.")
        tokenizer = load_tokenizer(str(config.name_or_path), ModelError)
        if self.kind.scores == "phrases":  # in one text, in small letters, as it was trained
            tokens = tokenize(tokenizer, [". ".join(given).lower() + "."], config.max_text_len, fill=False)
        else:
            tokens = tokenize(tokenizer, given, config.text_config.max_position_embeddings, fill=True)
        return dict(tokens)

    def read(self, seen: Seen, batch: Batch) -> list[Detections]:
        return [self._choose(boxes, rated) for boxes, rated in self._rate(seen, batch)]

    def weigh(self, seen: Seen, batch: Batch, label: int | None) -> list[Candidates]:
        """What a picture's text has no phrase for has a score of zero there. Raises `TargetError` where none has."""
        rated = list(self._rate(seen, batch))
        classes = max(scores.shape[1] for _, scores in rated)
        if label is not None and not 0 <= label < classes:
            what = "phrases or queries in the text" if self.kind.has_text else "classes"
            raise TargetError(f"The label is {label}, but there are {classes} {what}, counted from 0.")
        found = []
        for boxes, each in rated:
            scores, labels = each.max(1)
            if label is not None:
                scores = each[:, label] if label < each.shape[1] else torch.zeros_like(scores)
                labels = torch.full_like(labels, label)
            found.append(Candidates(boxes, scores, labels))
        return found

    def _choose(self, boxes: Tensor, rated: Tensor) -> Detections:
        if self.kind.choice == "pairs":
            most = min(self.kind.most or len(rated), rated.numel())
            scores, places = rated.flatten().topk(most)
            rows, labels = places // rated.shape[1], places % rated.shape[1]
        else:
            best, label_of_row = rated.max(1)
            scores, rows = best.sort(descending=True, stable=True)
            labels = label_of_row[rows]
        is_sure = scores > self.threshold
        return Detections(boxes[rows[is_sure]], scores[is_sure], labels[is_sure])

    def _rate(self, seen: Seen, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """For each picture the boxes (Q,4) in its pixels, and the scores (Q,C) of all queries for all classes."""
        output, call = seen.last(), seen.calls[MODEL][-1]
        if not (hasattr(output, "logits") and hasattr(output, "pred_boxes")):
            raise ModelError(
                f"{type(self.model).__name__} returned {type(output).__name__}, expected an output with `logits` and "
                "`pred_boxes`: call it with return_dict=True."
            )
        centres, sides = output.pred_boxes.split(2, -1)
        corners = torch.cat([centres - sides / 2, centres + sides / 2], -1)
        sizes = self._find_sizes(call, batch, len(corners))
        boxes = corners * corners.new_tensor([[width, height, width, height] for height, width in sizes])[:, None]
        logits: Tensor = output.logits
        if self.kind.scores == "softmax":
            yield from zip(boxes, logits.softmax(-1)[..., :-1])
        elif self.kind.scores == "sigmoid":
            yield from zip(boxes, logits.sigmoid())
        else:
            yield from zip(boxes, map(_rate_phrases, logits.sigmoid(), self._find_phrases(call)))

    def _find_sizes(self, call: Call, batch: Batch, images: int) -> list[tuple[float, float]]:
        """Of what area boxes are shares, height and width in pixels of the pictures. The model may be given them resized."""
        mask: Tensor | None = self._find_argument(call, "pixel_mask")
        if mask is None or not self.kind.is_within_mask:
            return [(float(batch.size[0]), float(batch.size[1]))] * images
        height, width = (given / seen for given, seen in zip(batch.size, mask.shape[-2:]))
        windows = map(_find_window, mask.bool())
        return [(rows * height, columns * width) for rows, columns in windows]

    def _find_phrases(self, call: Call) -> list[list[list[int]]]:
        ids: Tensor = self._find_argument(call, "input_ids")
        mask: Tensor | None = self._find_argument(call, "attention_mask")
        known = ids if mask is None else ids.where(mask.bool(), SEPARATORS[0])
        return [_split_phrases(tokens) for tokens in known.tolist()]

    def _find_argument(self, call: Call, name: str) -> Any:
        """What the model was given by this name, or in its place."""
        return {**dict(zip(inspect.signature(self.model.forward).parameters, call.args)), **call.kwargs}.get(name)


def _find_window(mask: Tensor) -> tuple[int, int]:
    """Height and width of the picture that a mask (H,W) tells. Raises `ImageError` for any other form."""
    height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
    if not height or not mask[:height, :width].all() or int(mask.sum()) != height * width:
        raise ImageError(
            "pixel_mask is not a rectangle in the upper left corner: expected 1 on the image, and 0 on the padding to its "
            "right and below it."
        )
    return height, width


def _split_phrases(tokens: Sequence[int]) -> list[list[int]]:
    """Where the tokens of each phrase stand."""
    phrases: list[list[int]] = [[]]
    for place, token in enumerate(tokens):
        if token not in SEPARATORS:
            phrases[-1].append(place)
        elif phrases[-1]:
            phrases.append([])
    return [phrase for phrase in phrases if phrase]


def _rate_phrases(scores: Tensor, phrases: Sequence[Sequence[int]]) -> Tensor:
    """Of scores (Q,T) of tokens those (Q,P) of phrases. Raises `TargetError` where there is none."""
    if not phrases:
        raise TargetError("The text contains no phrase: name the objects to look for, each followed by a full stop.")
    return torch.stack([scores[:, places].max(1).values for places in phrases], 1)
