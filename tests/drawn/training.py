"""Train the models of drawn images, on shapes on photographs in the public domain, in minutes."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as serialise
from torch import Tensor, nn
from torch.nn import functional as F

from tests.drawn.heads import list_properties
from tests.drawn.models import MODELS, WEIGHTS, Matcher, load
from tests.drawn.pictures import (
    COLOURS,
    SHAPES,
    SIZE,
    TRAINING,
    DrawnShape,
    Scene,
    draw_scenes,
    to_boxes,
    to_classes,
    to_images,
)

SEED = 2024
SCENES = 10000  # a model that trains on fewer takes the first of them
Loss = Callable[[Any, Sequence[Scene], np.random.Generator], Tensor]


@dataclass(frozen=True)
class Recipe:
    """The settings of a training.

    `batch` is the batch size, `rate` the highest learning rate, and `teacher` the model whose first convolutions and, if
    there is one, text tower are copied. `scenes` is the number of training scenes.
    """

    loss: Loss
    steps: int
    batch: int
    rate: float
    teacher: str | None = None
    scenes: int = SCENES


def train(name: str, say: Callable[[str], None]) -> nn.Module:
    """Return the trained model in inference mode. The learning rate follows one cycle."""
    torch.manual_seed(SEED)
    rng, recipe = np.random.default_rng(SEED), RECIPES[name]
    scenes = list(draw_scenes(SEED, recipe.scenes, photographs=TRAINING))
    model = MODELS[name]().train()
    if recipe.teacher is not None:
        load_teacher(model, recipe.teacher)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, recipe.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=recipe.steps, pct_start=0.15)
    start, losses = time.monotonic(), []
    for step in range(1, 1 + recipe.steps):
        batch = [scenes[number] for number in rng.choice(len(scenes), recipe.batch, replace=False)]
        loss = recipe.loss(model, batch, rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            mean, seconds = np.mean(losses[-100:]), time.monotonic() - start
            say(f"{name}: step {step} of {recipe.steps}, loss {mean:.4f}, {seconds:.0f} s")
    return model.eval()


def load_teacher(model: nn.Module, teacher: str) -> None:
    """Copy the text tower of another model, which is then frozen, and its first convolutions, which train further."""
    teacher_state = load(teacher).state_dict()
    model_state = model.state_dict()
    convolutions = "visual.conv_proj" if isinstance(model, Matcher) else "features.0.0"
    renamed = {name.replace("visual.features", convolutions): value for name, value in teacher_state.items()}
    model.load_state_dict({name: value for name, value in renamed.items() if name in model_state}, strict=False)
    if isinstance(model, Matcher):
        model.text.requires_grad_(False)


def save(name: str, model: nn.Module) -> None:
    """Save the weights in float16."""
    state = {
        key: (value.half() if value.is_floating_point() else value).contiguous()
        for key, value in model.state_dict().items()
    }
    (WEIGHTS / f"{name}.safetensors").write_bytes(serialise(state, metadata={"format": "pt"}))


def _detection_loss(model: nn.Module, scenes: Sequence[Scene], rng: np.random.Generator) -> Tensor:
    return sum(model(list(to_images(scenes)), [to_boxes(scene) for scene in scenes]).values())


def _segmentation_loss(model: nn.Module, scenes: Sequence[Scene], rng: np.random.Generator) -> Tensor:
    return F.cross_entropy(model(to_images(scenes)), torch.stack([to_classes(scene) for scene in scenes]))


def _matching_loss(model: Matcher, scenes: Sequence[Scene], rng: np.random.Generator) -> Tensor:
    return _compare(model, model.encode_image(to_images(scenes), True), scenes, rng)


def _compare(model: Matcher, pictures: Tensor, scenes: Sequence[Scene], rng: np.random.Generator) -> Tensor:
    """Return the loss over all pairs of an image and a sentence. Matching pairs are rare, so they weigh more."""
    claims = [claim for scene in scenes for claim in draw_claims(scene, rng)]
    truth = torch.tensor([[claim.holds(scene) for claim in claims] for scene in scenes]).float()
    sentences = model.encode_text(model.tokenizer([claim.sentence(rng) for claim in claims]), True)
    logits = model.logit_scale.exp() * pictures @ sentences.T + model.logit_bias
    return F.binary_cross_entropy_with_logits(logits, truth, pos_weight=torch.tensor(3.0))


def _imitation_loss(model: Matcher, scenes: Sequence[Scene], rng: np.random.Generator) -> Tensor:
    """Return the matching loss plus the distance of image embeddings from those of the teacher's tower."""
    images = to_images(scenes)
    with torch.no_grad():
        teacher_embeddings = _load_once("convolutional").encode_image(images, True)
    embeddings = model.encode_image(images, True)
    return _compare(model, embeddings, scenes, rng) + 2 * (1 - (embeddings * teacher_embeddings).sum(1).mean())


def _property_loss(model: nn.Module, scenes: Sequence[Scene], rng: np.random.Generator) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(to_images(scenes)), list_properties(scenes))


_load_once: Callable[[str], Any] = functools.cache(load)


class Claim:
    """The content of a sentence: shapes with some properties, and possibly a spatial relation of two of them."""

    def __init__(self, parts: Sequence[dict[str, object]], relation: str | None = None) -> None:
        self.parts, self.relation = parts, relation

    def holds(self, scene: Scene) -> bool:
        """Return True if the claim is true of the scene."""
        matches = [[thing for thing in scene.things if fits(thing, part)] for part in self.parts]
        if self.relation is None or len(matches) < 2:
            return all(matches)
        return any(
            RELATIONS[self.relation](first, second)
            for first in matches[0]
            for second in matches[1]
            if first is not second
        )

    def sentence(self, rng: np.random.Generator) -> str:
        parts = [describe(part, rng) for part in self.parts]
        relation = f" {self.relation} " if self.relation else " and "
        start = str(rng.choice(["", "", "", "a picture of ", "a photo of ", "there is "]))
        return start + relation.join(parts)


RELATIONS = {
    "above": lambda first, second: first.box[3] <= second.box[1],
    "below": lambda first, second: first.box[1] >= second.box[3],
    "to the left of": lambda first, second: first.box[2] <= second.box[0],
    "to the right of": lambda first, second: first.box[0] >= second.box[2],
}
PLACES = {
    "on the left": lambda thing: thing.centre[0] < 0.4 * SIZE,
    "on the right": lambda thing: thing.centre[0] > 0.6 * SIZE,
    "at the top": lambda thing: thing.centre[1] < 0.4 * SIZE,
    "at the bottom": lambda thing: thing.centre[1] > 0.6 * SIZE,
    "in the middle": lambda thing: max(abs(item - SIZE / 2) for item in thing.centre) < 0.2 * SIZE,
}


def fits(thing: DrawnShape, part: dict[str, object]) -> bool:
    return (
        part.get("shape", thing.shape) == thing.shape
        and part.get("colour", thing.colour) == thing.colour
        and part.get("large", thing.is_large) == thing.is_large
        and ("place" not in part or PLACES[str(part["place"])](thing))
    )


def describe(part: dict[str, object], rng: np.random.Generator) -> str:
    colour = list(COLOURS)[part["colour"]] if "colour" in part else ""
    size = "" if "large" not in part else "large" if part["large"] else "small"
    shape = SHAPES[part["shape"]] if "shape" in part else "shape" if colour or size else "something"
    words = [word for word in (size, colour, shape) if word]
    article = str(rng.choice(["a", "a", "the", ""])) if shape != "something" else ""
    if article == "a" and words[0] == "orange":
        article = "an"
    return " ".join(word for word in (article, *words, str(part.get("place", ""))) if word)


def draw_claims(scene: Scene, rng: np.random.Generator) -> list[Claim]:
    """Return two claims that are true of the scene, and up to six that combine a shape and a colour of its shapes."""
    if not scene.things:
        return [Claim([{"shape": int(rng.integers(len(SHAPES))), "colour": int(rng.integers(len(COLOURS)))}])]
    pairs = sorted({(thing.shape, coloured_thing.colour) for thing in scene.things for coloured_thing in scene.things})
    mixed = [Claim([{"shape": pairs[k][0], "colour": pairs[k][1]}]) for k in rng.permutation(len(pairs))[:6]]
    return [*(draw_claim(scene, rng) for _ in range(2)), *mixed]


def draw_claim(scene: Scene, rng: np.random.Generator) -> Claim:
    first, *remaining = (scene.things[number] for number in rng.permutation(len(scene.things)))
    if not remaining or rng.random() < 0.8:
        return Claim([draw_part(first, rng)])
    parts = [{"shape": item.shape, "colour": item.colour} for item in (first, remaining[0])]
    holding = [name for name, holds in RELATIONS.items() if holds(first, remaining[0])]
    return Claim(parts, str(rng.choice(holding)) if holding and rng.random() < 0.5 else None)


def draw_part(thing: DrawnShape, rng: np.random.Generator) -> dict[str, object]:
    part: dict[str, object] = {"shape": thing.shape, "colour": thing.colour}
    sample = rng.random()
    if sample < 0.25:
        part.pop("shape" if sample < 0.125 else "colour")
    if rng.random() < 0.15:
        part["large"] = thing.is_large
    holding = [name for name, holds in PLACES.items() if holds(thing)]
    if holding and rng.random() < 0.15:
        part["place"] = str(rng.choice(holding))
    return part


RECIPES = {
    "detector": Recipe(_detection_loss, steps=2500, batch=32, rate=3e-3),
    "segmenter": Recipe(_segmentation_loss, steps=3000, batch=32, rate=3e-3),
    "convolutional": Recipe(_matching_loss, steps=6000, batch=32, rate=3e-3),
    "transformer": Recipe(_imitation_loss, steps=2500, batch=32, rate=1.5e-3, teacher="convolutional"),
    "swin": Recipe(_property_loss, steps=1200, batch=32, rate=3e-3, teacher="convolutional"),
    "vgg11": Recipe(_property_loss, steps=350, batch=32, rate=3e-3, scenes=1500),
}
