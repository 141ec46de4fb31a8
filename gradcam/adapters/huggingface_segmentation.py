"""Adapters for segmenters of transformers, which return scores per pixel, or masks with class probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradcam.adapters.base import ModelRun, SegmenterAdapter
from gradcam.adapters.segmentation import GenericSegmenter
from gradcam.adapters.tokenizers import load_tokenizer, tokenize
from gradcam.errors import ModelError, TargetError
from gradcam.hooks.containers import Batch


def find_labels(config: Any) -> list[str] | None:
    """Return the class names in a configuration; None for the default names LABEL_0, LABEL_1, and so on."""
    names, count = config.id2label or {}, config.num_labels
    labels = [str(names.get(index, index)) for index in range(count)]
    return None if labels == [f"LABEL_{index}" for index in range(count)] else labels


class TransformersSegmenter(SegmenterAdapter):
    """A segmentation model with a transformers configuration."""

    @property
    def own_labels(self) -> Sequence[str] | None:
        return find_labels(self.model.config)


class SemanticSegmenter(TransformersSegmenter, GenericSegmenter):
    """A model `...ForSemanticSegmentation`, which returns class logits."""

    @property
    def own_layer(self) -> str | None:
        find_layer = FIND_LAST_STAGE.get(self.model.config.model_type)
        return None if find_layer is None else find_layer(self.model)


class DepthEstimator(SemanticSegmenter):
    """A model `...ForDepthEstimation`. There are no classes, so the target must be a function of the output."""

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        advice = "pass a function of the output as the target, --target FILE.py:FUNCTION (target= in Python)"
        problem = f"{type(self.model).__name__} returns a depth per pixel, and no classes"
        raise TargetError(f"{problem}: {advice}. Example: the mean of predicted_depth in a region.")


def name_last_module(model: Any, name: str) -> str:
    """Return the name of the last module in a module list."""
    return f"{name}.{len(model.get_submodule(name)) - 1}"


def name_last_feature_map(model: Any, backbone: str) -> str:
    """Return the name of the last feature map of a backbone."""
    return f"{backbone}:feature_maps:{len(model.get_submodule(backbone).channels) - 1}"


def find_stage(model: Any) -> str:
    """Return the name of SegFormer's last stage. In transformers 4, the name selects an output of the encoder."""
    has_stages = hasattr(model.segformer, "stages")
    return name_last_module(model, "segformer.stages") if has_stages else "segformer.encoder:last_hidden_state"


def find_block(model: Any, index: int) -> str:
    """Return the name of the transformer block at an index."""
    lists = [(name, len(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    names = [name for name, length in lists if length == model.config.num_hidden_layers]
    # In hybrid models, the embeddings contain a second module list, of convolutions.
    return f"{next(name for name in names if 'embeddings' not in name)}.{index}"


# Maps the configuration's model type to a function that returns the name of the backbone's last stage.
FIND_LAST_STAGE: dict[str, Callable[[Any], str]] = {
    "segformer": find_stage,
    "upernet": lambda model: name_last_feature_map(model, "backbone"),
    "dpt": lambda model: find_block(model, max(model.config.backbone_out_indices)),
    # In `out_indices`, 1 stands for the embeddings, so block i (counted from 0) has index i + 2.
    "beit": lambda model: find_block(model, max(model.config.out_indices) - 2),
    "data2vec-vision": lambda model: find_block(model, max(model.config.out_indices) - 2),
    "mobilenet_v2": lambda model: name_last_module(model, "mobilenet_v2.layer"),
    "mobilevit": lambda model: name_last_module(model, "mobilevit.encoder.layer"),
    "mobilevitv2": lambda model: name_last_module(model, "mobilevitv2.encoder.layer"),
    "clipseg": lambda model: name_last_module(model, "decoder.layers"),  # CLIP itself runs without gradients.
}


class QuerySegmenter(TransformersSegmenter):
    """MaskFormer and OneFormer, which predict masks with class probabilities, including "no object".

    The score of a class at a pixel is a sum over all masks. Each term is the mask's class probability times the mask's
    value (a probability) at the pixel.
    """

    @property
    def own_layer(self) -> str | None:
        return name_last_feature_map(self.model, "model.pixel_level_module.encoder")

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        return ["the task is semantic"] if self.model.config.model_type == "oneformer" else None

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the tokens of OneFormer's task prompt."""
        if self.usual_prompts is None:
            return super().to_prompts(prompts)
        tokenizer = load_tokenizer(str(self.model.config.name_or_path), ModelError)
        return {"task_inputs": tokenize(tokenizer, prompts, self.model.config.task_seq_len, fill=True)["input_ids"]}

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        output = run.last_output()
        classes, masks = output.class_queries_logits.softmax(-1)[..., :-1], output.masks_queries_logits
        if (size := self.find_mask_size(batch)) is not None:
            masks = functional.interpolate(masks, size=size, mode="bilinear", align_corners=False)
        return torch.einsum("nqc,nqhw->nchw", classes, masks.sigmoid())

    def find_mask_size(self, batch: Batch) -> Sequence[int] | None:
        return None

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Convert class scores to probabilities: divide each score by the sum of all scores at the pixel."""
        return logits / logits.sum(1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)


class Mask2FormerSegmenter(QuerySegmenter):
    """Mask2Former, whose postprocessing always resizes masks to 384 x 384 pixels."""

    def find_mask_size(self, batch: Batch) -> Sequence[int]:
        return 384, 384


class EomtSegmenter(QuerySegmenter):
    """EoMT: a transformer whose last blocks process queries and patches together. Masks are resized to the input."""

    @property
    def own_layer(self) -> str:
        image_blocks = self.model.config.num_hidden_layers - self.model.config.num_blocks  # blocks without queries
        return f"layers.{image_blocks - 1}" if image_blocks else "embeddings"

    def find_mask_size(self, batch: Batch) -> Sequence[int]:
        return batch.size
