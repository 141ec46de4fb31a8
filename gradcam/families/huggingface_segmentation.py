"""Hugging Face's models for segmentation: a class for each pixel, or masks with a class for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradcam.errors import ModelError, TargetError
from gradcam.families.base import Seen, Segmenter
from gradcam.families.segmentation import PlainSegmenter
from gradcam.families.tokens import load_tokenizer, tokenize
from gradcam.hooks.nested import Batch


def find_labels(config: Any) -> list[str] | None:
    """The names of a configuration's classes; None where nobody named them, and they are called LABEL_0."""
    known, count = config.id2label or {}, config.num_labels
    labels = [str(known.get(index, index)) for index in range(count)]
    return None if labels == [f"LABEL_{index}" for index in range(count)] else labels


class Configured(Segmenter):
    """A model with a configuration of transformers."""

    @property
    def config(self) -> Any:
        """The model's."""
        return self.model.config

    @property
    def own_labels(self) -> Sequence[str] | None:
        return find_labels(self.config)


class SemanticSegmenter(Configured, PlainSegmenter):
    """`...ForSemanticSegmentation`, whose output has the classes' logits."""

    @property
    def own_layer(self) -> str | None:
        find = LAST_STAGES.get(self.config.model_type)
        return None if find is None else find(self.model)


class DepthEstimator(SemanticSegmenter):
    """`...ForDepthEstimation`, which has no classes: its target is a function of the output."""

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        raise TargetError(
            f"{type(self.model).__name__} returns a depth per pixel, and no classes: pass a function of its output, "
            "--target FILE.py:FUNCTION (target= in Python), such as the mean of predicted_depth in a region."
        )


def last_in(model: nn.Module, name: str) -> str:
    """The last module of the list of that name."""
    return f"{name}.{len(model.get_submodule(name)) - 1}"  # type: ignore[arg-type]  # it is a list of modules


def last_feature_map(model: nn.Module, backbone: str) -> str:
    """The last stage among the feature maps of a backbone."""
    channels: Any = model.get_submodule(backbone).channels
    return f"{backbone}:feature_maps:{len(channels) - 1}"


def find_stage(model: Any) -> str:
    """SegFormer's last stage, which transformers 4 gave by an encoder."""
    encoder = "segformer.encoder"
    return last_in(model, "segformer.stages") if hasattr(model.segformer, "stages") else f"{encoder}:last_hidden_state"


def find_block(model: Any, deepest: int) -> str:
    """The deepest of a transformer's blocks, counted from 0, that the head reads."""
    count = model.config.num_hidden_layers
    lists = {name: it for name, it in model.named_modules() if isinstance(it, nn.ModuleList) and len(it) == count}
    return f"{next(name for name in lists if 'embeddings' not in name)}.{deepest}"  # where a hybrid's convolutions are


# By a configuration's model type: where the last stage of the backbone is.
LAST_STAGES: dict[str, Callable[[Any], str]] = {
    "segformer": find_stage,
    "upernet": lambda model: last_feature_map(model, "backbone"),
    "dpt": lambda model: find_block(model, max(model.config.backbone_out_indices)),
    # Counted from 1, the first of which are the embeddings.
    "beit": lambda model: find_block(model, max(model.config.out_indices) - 2),
    "data2vec-vision": lambda model: find_block(model, max(model.config.out_indices) - 2),
    "mobilenet_v2": lambda model: last_in(model, "mobilenet_v2.layer"),
    "mobilevit": lambda model: last_in(model, "mobilevit.encoder.layer"),
    "mobilevitv2": lambda model: last_in(model, "mobilevitv2.encoder.layer"),
    "clipseg": lambda model: last_in(model, "decoder.layers"),  # which runs CLIP without gradients
}


class QuerySegmenter(Configured):
    """MaskFormer and OneFormer: masks, and for each the probabilities of classes, and of none of them. A class's score
    at a pixel is the sum over masks of its probability there: of being of this class times lying on this mask."""

    @property
    def own_layer(self) -> str | None:
        return last_feature_map(self.model, "model.pixel_level_module.encoder")

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        return ["the task is semantic"] if self.config.model_type == "oneformer" else None

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """OneFormer's task."""
        if self.usual_prompts is None:
            return super().to_prompts(prompts)
        tokenizer = load_tokenizer(str(self.config.name_or_path), ModelError)
        return {"task_inputs": tokenize(tokenizer, prompts, self.config.task_seq_len, fill=True)["input_ids"]}

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        output = seen.last()
        classes, masks = output.class_queries_logits.softmax(-1)[..., :-1], output.masks_queries_logits
        if (size := self.find_mask_size(batch)) is not None:
            masks = functional.interpolate(masks, size=size, mode="bilinear", align_corners=False)
        return torch.einsum("nqc,nqhw->nchw", classes, masks.sigmoid())

    def find_mask_size(self, batch: Batch) -> Sequence[int] | None:
        return None

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """The classes' shares of all scores at a pixel."""
        return logits / logits.sum(1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)


class Mask2FormerSegmenter(QuerySegmenter):
    """Mask2Former, whose own postprocessing enlarges masks to 384 x 384 pixels, whatever the picture's size."""

    def find_mask_size(self, batch: Batch) -> Sequence[int]:
        return 384, 384


class EomtSegmenter(QuerySegmenter):
    """EoMT: a plain transformer whose last blocks see queries beside the patches; masks get the picture's size."""

    @property
    def own_layer(self) -> str:
        plain = self.config.num_hidden_layers - self.config.num_blocks  # blocks without queries
        return f"layers.{plain - 1}" if plain else "embeddings"

    def find_mask_size(self, batch: Batch) -> Sequence[int]:
        return batch.size
