"""Train the captioner in half an hour on two cores, from one shape in a small image to three in a large one.

First the image encoder learns the shape and colour of each patch, then the whole model learns sentences. From sentences
alone, the encoder does not learn to tell shapes in this time.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tests.drawn.captioner import PATCH, encode, make_model, make_processor, measure_accuracy
from tests.drawn.captions import (
    COLOUR_ORDER,
    QUESTIONS,
    SHAPES,
    SIZES,
    CaptionScene,
    NamedShape,
    ask,
    draw_caption_scene,
    draw_image,
)
from tests.drawn.pictures import TRAINING

SEED = 2026
THREADS = 2
ATTENTION = "sdpa_in_float32"
SHARE_WITH_SHAPE = (0.1, 0.4)  # patches with less of a shape are background; those in between are left out
PATCH_LOSS_WEIGHT = 0.5  # next to the loss of sentences
# Words that are learned last. The others have a weight of 1.
WORD_WEIGHTS = {"yes": 4.0, "no": 4.0, "left": 2.0, "right": 2.0, "above": 2.0, "below": 2.0}
SHAPE_WEIGHT = 3.0  # of a patch with a shape, next to one of the background


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    `batch` counts images. `counts` are the numbers of shapes to sample from. `rate` is the highest learning rate of
    Muon, and that of AdamW is `ADAM_SHARE` of it. The rate falls to `last_share` of itself.
    """

    name: str
    sizes: Sequence[tuple[int, int]]
    counts: Sequence[int]
    steps: int
    batch: int
    rate: float
    last_share: float = 0.5
    has_sentences: bool = True


ADAM_SHARE = 0.1
STAGES = (
    Stage("patches", ((64, 64),), (1,), steps=600, batch=64, rate=0.03, has_sentences=False),
    Stage("short", ((64, 64), (64, 128), (128, 64), (96, 96)), (1, 1, 2), steps=200, batch=48, rate=0.02),
    Stage("long", SIZES, (1, 2, 2, 3, 3), steps=1100, batch=24, rate=0.02, last_share=0.02),
)


def _attend_in_float32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call PyTorch's fused attention in float32, whose backward pass is slower in bfloat16 on processors."""
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)


AttentionInterface.register(ATTENTION, _attend_in_float32)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class PatchHeads(nn.Module):
    """Linear classifiers of a patch's shape and colour. Class 0 is the background. Used in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.shape, self.colour = nn.Linear(width, 1 + len(SHAPES)), nn.Linear(width, 1 + len(COLOUR_ORDER))

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the loss for features (P,C) and classes (P,2) of patches. Classes of -100 are left out."""
        features = self.norm(features)
        losses = []
        for head, labels in zip((self.shape, self.colour), classes.unbind(1)):
            weights = torch.full((head.out_features,), SHAPE_WEIGHT)
            weights[0] = 1
            losses.append(F.cross_entropy(head(features), labels, weights))
        return sum(losses)


@dataclass(frozen=True)
class Learner:
    """A model in training, the heads for its patches, its processor, and the random numbers for its images."""

    model: Any
    heads: PatchHeads
    processor: Any
    rng: np.random.Generator


def train_captioner(say: Callable[[str], None]) -> tuple[Any, Any]:
    """Return the trained model in inference mode, and its processor."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    model = make_model().train()
    model.set_attn_implementation(ATTENTION)
    heads = PatchHeads(model.config.vision_config.embed_dim)
    learner = Learner(model, heads, make_processor(), np.random.default_rng(SEED))
    for stage in STAGES:
        run_stage(learner, stage, say)
    model.set_attn_implementation("sdpa")
    return model.eval(), learner.processor


def run_stage(learner: Learner, stage: Stage, say: Callable[[str], None]) -> None:
    model, heads = learner.model, learner.heads
    parameters = [*(model if stage.has_sentences else model.model.visual).parameters(), *heads.parameters()]
    optimizers = make_optimizers(model, parameters, stage.rate)
    schedules = [LambdaLR(optimizer, functools.partial(_follow_cosine, stage)) for optimizer in optimizers]
    start, losses = time.monotonic(), []
    for step in range(1, 1 + stage.steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_loss(learner, stage)
        model.zero_grad()
        heads.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for item in (*optimizers, *schedules):
            item.step()
        losses.append(loss.item())
        if step % 50 == 0:
            seconds = time.monotonic() - start
            note = _report(learner) if stage.has_sentences and step % 100 == 0 else ""
            say(f"{stage.name}: step {step} of {stage.steps}, loss {np.mean(losses[-50:]):.4f}, {seconds:.0f} s {note}")


def make_optimizers(model: Any, parameters: Sequence[nn.Parameter], rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, with which shapes are learned in fewer steps, and AdamW for the rest."""
    blocks = [*model.model.visual.blocks, model.model.visual.merger, *model.model.language_model.layers]
    matrices = {id(item) for block in blocks for item in block.parameters() if item.ndim == 2}
    hidden = [parameter for parameter in parameters if id(parameter) in matrices]
    others = [parameter for parameter in parameters if id(parameter) not in matrices]
    adam = torch.optim.AdamW(others, ADAM_SHARE * rate, betas=(0.9, 0.98), weight_decay=0.02)
    return [torch.optim.Muon(hidden, rate, weight_decay=0.02), adam]


def _follow_cosine(stage: Stage, step: int) -> float:
    """Return the share of the highest learning rate: it rises for 50 steps, and falls along a cosine."""
    fallen = (1 - math.cos(math.pi * step / stage.steps)) / 2
    return min(1.0, (1 + step) / 50) * (1 - fallen * (1 - stage.last_share))


def compute_loss(learner: Learner, stage: Stage) -> Tensor:
    """Return the loss of a batch of new images."""
    model, processor, rng = learner.model, learner.processor, learner.rng
    size = stage.sizes[int(rng.integers(len(stage.sizes)))]
    counts = [int(rng.choice(stage.counts)) if max(size) > 64 else 1 for _ in range(stage.batch)]
    drawings = [draw_image(rng, size, count, TRAINING) for count in counts]
    features = encode_images(model, processor, [image for image, _ in drawings])
    loss = learner.heads(features.last_hidden_state, classify_patches([shapes for _, shapes in drawings]))
    if not stage.has_sentences:
        return loss
    # Two questions share the features of an image, because most of the time goes into them.
    scenes = [
        ask(rng, *drawing, question)
        for drawing in drawings
        for question in ("describe", str(rng.choice(QUESTIONS[1:])) if len(drawing[1]) > 1 else "whether")
    ]
    return compute_sentence_loss(model, processor, scenes, features.pooler_output) + PATCH_LOSS_WEIGHT * loss


def _report(learner: Learner) -> str:
    learner.model.eval()
    scenes = [draw_caption_scene([SEED, number], QUESTIONS[number % 3], photographs=TRAINING) for number in range(60)]
    accuracy = measure_accuracy(learner.model, learner.processor, scenes)
    learner.model.train()
    return " ".join(f"{kind} {share:.2f}" for kind, share in accuracy.items())


def encode_images(model: Any, processor: Any, images: Sequence[np.ndarray]) -> Any:
    """Return the image encoder's output: features of patches, and those of cells for the language model."""
    inputs = processor.image_processor(list(images), do_resize=False, return_tensors="pt")
    return model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])


def classify_patches(drawings: Sequence[Sequence[NamedShape]]) -> Tensor:
    """Return the shape and colour (P,2) of all patches, in the order in which Qwen2-VL takes them: cell by cell."""
    rows = []
    for shapes in drawings:
        height, width = (length // PATCH for length in shapes[0].mask.shape)
        classes = np.zeros((height, width, 2), np.int64)
        for shape in shapes:
            share = shape.mask.reshape(height, PATCH, width, PATCH).mean((1, 3))
            classes[share > SHARE_WITH_SHAPE[0]] = -100
            label = 1 + SHAPES.index(shape.shape), 1 + COLOUR_ORDER.index(shape.colour)
            classes[share > SHARE_WITH_SHAPE[1]] = label
        rows.append(classes.reshape(height // 2, 2, width // 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2))
    return torch.from_numpy(np.concatenate(rows))


def compute_sentence_loss(model: Any, processor: Any, scenes: Sequence[CaptionScene], features: Tensor) -> Tensor:
    """Return the cross-entropy of the answers. `features`: of all cells of the images, each of which has two scenes."""
    inputs = encode(processor, scenes, answers=True, resize=False)
    ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
    embeddings = model.get_input_embeddings()(ids)
    repeated = features.unflatten(0, (len(scenes) // 2, -1)).repeat_interleave(2, 0).flatten(0, 1).float()
    is_image = (ids == model.config.image_token_id)[..., None].expand_as(embeddings)
    embeddings = embeddings.masked_scatter(is_image, repeated)
    positions, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=attention_mask,
    )
    longest = 1 + max(len(scene.words) for scene in scenes)
    logits = model(
        inputs_embeds=embeddings,
        attention_mask=attention_mask,
        position_ids=positions,
        logits_to_keep=longest + 1,
        use_cache=False,
    ).logits[:, :-1]
    labels = ids[:, -longest:].clone()
    for row, scene in zip(labels, scenes):
        row[: longest - len(scene.words) - 1] = -100
    weights = torch.ones(logits.shape[-1])
    for word, weight in WORD_WEIGHTS.items():
        weights[processor.tokenizer.convert_tokens_to_ids(word)] = weight
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weights)
