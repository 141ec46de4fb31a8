"""How the models of drawn pictures are trained: on shapes on photographs in the public domain, in minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.drawn.models import MODELS, WEIGHTS, Matcher
from tests.drawn.pictures import COLOURS, SHAPES, SIZE, TRAINING, Scene, Thing, draw_scenes, to_boxes, to_classes, to_images

SEED = 2024
SCENES = 8000
BATCH = 32
STEPS = {"detector": 1500, "segmenter": 1200, "convolutional": 3000, "transformer": 4000}
RATE = 3e-3
RATES = {"transformer": 1.5e-3}
Loss = Callable[[nn.Module, Sequence[Scene], np.random.Generator], Tensor]


def train(name: str, say: Callable[[str], None], *, steps: int | None = None) -> nn.Module:
    """The trained model, in inference mode. Its learning rate goes up and down once."""
    torch.manual_seed(SEED)
    chance = np.random.default_rng(SEED)
    scenes = list(draw_scenes(SEED, SCENES, photographs=TRAINING))
    model, steps, rate = MODELS[name]().train(), steps or STEPS[name], RATES.get(name, RATE)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    start, losses = time.monotonic(), []
    for step, batch in enumerate(_batches(scenes, steps, chance)):
        loss = LOSSES[name](model, batch, chance)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            say(f"{name}: step {step + 1} of {steps}, loss {np.mean(losses[-100:]):.4f}, {time.monotonic() - start:.0f} s")
    return model.eval()


def save(name: str, model: nn.Module) -> None:
    """The weights in float16."""
    state = {key: (value.half() if value.is_floating_point() else value).contiguous() for key, value in model.state_dict().items()}
    save_file(state, WEIGHTS / f"{name}.safetensors", metadata={"format": "pt"})


def _batches(scenes: Sequence[Scene], steps: int, chance: np.random.Generator) -> Iterator[list[Scene]]:
    for _ in range(steps):
        yield [scenes[number] for number in chance.choice(len(scenes), BATCH, replace=False)]


def _detection_loss(model: nn.Module, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    return sum(model(list(to_images(scenes)), [to_boxes(scene) for scene in scenes]).values())


def _segmentation_loss(model: nn.Module, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    return F.cross_entropy(model(to_images(scenes)), torch.stack([to_classes(scene) for scene in scenes]))


def _matching_loss(model: Matcher, scenes: Sequence[Scene], chance: np.random.Generator) -> Tensor:
    """Each sentence with each picture, right or wrong: what is right is known, of all pairs. Rare right ones count more."""
    claims = [claim for scene in scenes for claim in draw_claims(scene, chance)]
    truth = torch.tensor([[claim.holds(scene) for claim in claims] for scene in scenes]).float()
    pictures, sentences = model(to_images(scenes), model.tokenizer([claim.sentence(chance) for claim in claims]))
    logits = model.logit_scale.exp() * pictures @ sentences.T + model.logit_bias
    return F.binary_cross_entropy_with_logits(logits, truth, pos_weight=torch.tensor(3.0))


class Claim:
    """What a sentence says: shapes with some of their properties, and perhaps how two of them lie."""

    def __init__(self, parts: Sequence[dict[str, object]], relation: str | None = None) -> None:
        self.parts, self.relation = parts, relation

    def holds(self, scene: Scene) -> bool:
        """Whether it is true of the scene."""
        found = [[thing for thing in scene.things if fits(thing, part)] for part in self.parts]
        if self.relation is None or len(found) < 2:
            return all(found)
        return any(RELATIONS[self.relation](one, other) for one in found[0] for other in found[1] if one is not other)

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
    "in the middle": lambda thing: max(abs(each - SIZE / 2) for each in thing.centre) < 0.2 * SIZE,
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
    pairs = sorted({(one.shape, other.colour) for one in scene.things for other in scene.things})
    mixed = [Claim([{"shape": pairs[k][0], "colour": pairs[k][1]}]) for k in chance.permutation(len(pairs))[:6]]
    return [*(draw_claim(scene, chance) for _ in range(2)), *mixed]


def draw_claim(scene: Scene, chance: np.random.Generator) -> Claim:
    one, *others = (scene.things[number] for number in chance.permutation(len(scene.things)))
    if not others or chance.random() < 0.8:
        return Claim([draw_part(one, chance)])
    parts = [{"shape": each.shape, "colour": each.colour} for each in (one, others[0])]
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


LOSSES: dict[str, Loss] = {
    "detector": _detection_loss,
    "segmenter": _segmentation_loss,
    "convolutional": _matching_loss,
    "transformer": _matching_loss,
}
