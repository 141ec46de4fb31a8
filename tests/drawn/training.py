"""How the models of drawn pictures are trained: on shapes on photographs in the public domain, in minutes."""

from __future__ import annotations

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

from tests.drawn.models import MODELS, WEIGHTS, Matcher, load
from tests.drawn.pictures import (
    COLOURS,
    SHAPES,
    SIZE,
    TRAINING,
    Scene,
    Thing,
    draw_scenes,
    to_boxes,
    to_classes,
    to_images,
)

SEED = 2024
SCENES = 10000  # the same for all models
Loss = Callable[[Any, Sequence[Scene], np.random.Generator], Tensor]


@dataclass(frozen=True)
class Recipe:
    """`batch`: pictures in a step. `rate`: the highest learning rate. `teacher`: the model whose tower of sentences is taken
    as it is."""

    loss: Loss
    steps: int
    batch: int
    rate: float
    teacher: str | None = None


def train(name: str, say: Callable[[str], None]) -> nn.Module:
    """The trained model, in inference mode. Its learning rate goes up and down once."""
    torch.manual_seed(SEED)
    chance, recipe = np.random.default_rng(SEED), RECIPES[name]
    scenes = list(draw_scenes(SEED, SCENES, photographs=TRAINING))
    model = MODELS[name]().train()
    if recipe.teacher is not None:
        load_known(model, recipe.teacher)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, recipe.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=recipe.steps, pct_start=0.15)
    start, losses = time.monotonic(), []
    for step in range(1, 1 + recipe.steps):
        batch = [scenes[number] for number in chance.choice(len(scenes), recipe.batch, replace=False)]
        loss = recipe.loss(model, batch, chance)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learnt, 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0:
            mean, seconds = np.mean(losses[-100:]), time.monotonic() - start
            say(f"{name}: step {step} of {recipe.steps}, loss {mean:.4f}, {seconds:.0f} s")
    return model.eval()


def load_known(model: Matcher, teacher: str) -> None:
    """What another model learnt of sentences, which is not trained any more, and its first convolutions, which are."""
    known = load(teacher).state_dict()
    own = model.state_dict()
    renamed = {name.replace("visual.features", "visual.conv_proj"): value for name, value in known.items()}
    model.load_state_dict({name: value for name, value in renamed.items() if name in own}, strict=False)
    model.text.requires_grad_(False)


def save(name: str, model: nn.Module) -> None:
    """The weights in float16."""
    state = {
        key: (value.half() if value.is_floating_point() else value).contiguous()
        for key, value in model.state_dict().items()
    }
    (WEIGHTS / f"{name}.safetensors").write_bytes(serialise(state, metadata={"format": "pt"}))


def _detection_loss(model: nn.Module, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    return sum(model(list(to_images(scenes)), [to_boxes(scene) for scene in scenes]).values())


def _segmentation_loss(model: nn.Module, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    return F.cross_entropy(model(to_images(scenes)), torch.stack([to_classes(scene) for scene in scenes]))


def _matching_loss(model: Matcher, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    return _compare(model, model.encode_image(to_images(scenes), True), scenes, chance)


def _compare(model: Matcher, pictures: Tensor, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    """Each sentence with each picture, right or wrong: what is right is known, of all pairs. Rare right ones count more."""
    claims = [claim for scene in scenes for claim in draw_claims(scene, chance)]
    truth = torch.tensor([[claim.holds(scene) for claim in claims] for scene in scenes]).float()
    sentences = model.encode_text(model.tokenizer([claim.sentence(chance) for claim in claims]), True)
    logits = model.logit_scale.exp() * pictures @ sentences.T + model.logit_bias
    return F.binary_cross_entropy_with_logits(logits, truth, pos_weight=torch.tensor(3.0))


def _imitation_loss(model: Matcher, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    """The same, and how far embeddings of pictures are from those of the tower that knows them already."""
    images = to_images(scenes)
    with torch.no_grad():
        known = _load_once("convolutional").encode_image(images, True)
    pictures = model.encode_image(images, True)
    return _compare(model, pictures, scenes, chance) + 2 * (1 - (pictures * known).sum(1).mean())


_load_once: Callable[[str], Any] = functools.cache(load)


class Claim:
    """What a sentence says: shapes with some of their properties, and perhaps how two of them lie."""

    def __init__(self, parts: Sequence[dict[str, object]], relation: str | None = None) -> None:
        self.parts, self.relation = parts, relation

    def holds(self, scene: Scene) -> bool:
        """Whether it is true of the scene."""
        actual = [[thing for thing in scene.things if fits(thing, part)] for part in self.parts]
        if self.relation is None or len(actual) < 2:
            return all(actual)
        return any(RELATIONS[self.relation](one, other) for one in actual[0] for other in actual[1] if one is not other)

    def sentence(self, chance: np.random.Generator) -> str:
        parts = [describe(part, chance) for part in self.parts]
        relation = f" {self.relation} " if self.relation else " and "
        start = str(chance.choice(["", "", "", "a picture of ", "a photo of ", "there is "]))
        return start + relation.join(parts)


RELATIONS = {
    "above": lambda one, other: one.box[3] <= other.box[1],
    "below": lambda one, other: one.box[1] >= other.box[3],
    "to the left of": lambda one, other: one.box[2] <= other.box[0],
    "to the right of": lambda one, other: one.box[0] >= other.box[2],
}
PLACES = {
    "on the left": lambda thing: thing.centre[0] < 0.4 * SIZE,
    "on the right": lambda thing: thing.centre[0] > 0.6 * SIZE,
    "at the top": lambda thing: thing.centre[1] < 0.4 * SIZE,
    "at the bottom": lambda thing: thing.centre[1] > 0.6 * SIZE,
    "in the middle": lambda thing: max(abs(item - SIZE / 2) for item in thing.centre) < 0.2 * SIZE,
}


def fits(thing: Thing, part: dict[str, object]) -> bool:
    return (
        part.get("shape", thing.shape) == thing.shape
        and part.get("colour", thing.colour) == thing.colour
        and part.get("large", thing.is_large) == thing.is_large
        and ("place" not in part or PLACES[str(part["place"])](thing))
    )


def describe(part: dict[str, object], chance: np.random.Generator) -> str:
    colour = list(COLOURS)[part["colour"]] if "colour" in part else ""
    size = "" if "large" not in part else "large" if part["large"] else "small"
    shape = SHAPES[part["shape"]] if "shape" in part else "shape" if colour or size else "something"
    words = [word for word in (size, colour, shape) if word]
    article = str(chance.choice(["a", "a", "the", ""])) if shape != "something" else ""
    if article == "a" and words[0] == "orange":
        article = "an"
    return " ".join(word for word in (article, *words, str(part.get("place", ""))) if word)


def draw_claims(scene: Scene, chance: np.random.Generator) -> list[Claim]:
    """Two that are true of the scene, and up to six that give one of its shapes a colour that is there."""
    if not scene.things:
        return [Claim([{"shape": int(chance.integers(len(SHAPES))), "colour": int(chance.integers(len(COLOURS)))}])]
    pairs = sorted({(thing.shape, other.colour) for thing in scene.things for other in scene.things})
    mixed = [Claim([{"shape": pairs[k][0], "colour": pairs[k][1]}]) for k in chance.permutation(len(pairs))[:6]]
    return [*(draw_claim(scene, chance) for _ in range(2)), *mixed]


def draw_claim(scene: Scene, chance: np.random.Generator) -> Claim:
    one, *others = (scene.things[number] for number in chance.permutation(len(scene.things)))
    if not others or chance.random() < 0.8:
        return Claim([draw_part(one, chance)])
    parts = [{"shape": item.shape, "colour": item.colour} for item in (one, others[0])]
    holding = [name for name, holds in RELATIONS.items() if holds(one, others[0])]
    return Claim(parts, str(chance.choice(holding)) if holding and chance.random() < 0.5 else None)


def draw_part(thing: Thing, chance: np.random.Generator) -> dict[str, object]:
    part: dict[str, object] = {"shape": thing.shape, "colour": thing.colour}
    lot = chance.random()
    if lot < 0.25:
        part.pop("shape" if lot < 0.125 else "colour")
    if chance.random() < 0.15:
        part["large"] = thing.is_large
    holding = [name for name, holds in PLACES.items() if holds(thing)]
    if holding and chance.random() < 0.15:
        part["place"] = str(chance.choice(holding))
    return part


RECIPES = {
    "detector": Recipe(_detection_loss, steps=2500, batch=32, rate=3e-3),
    "segmenter": Recipe(_segmentation_loss, steps=3000, batch=32, rate=3e-3),
    "convolutional": Recipe(_matching_loss, steps=6000, batch=32, rate=3e-3),
    "transformer": Recipe(_imitation_loss, steps=2500, batch=32, rate=1.5e-3, teacher="convolutional"),
}
