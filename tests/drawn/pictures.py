"""Shapes drawn on parts of photographs: what is where is known to the pixel, and a seed gives the same pictures again."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

ASSETS = Path(__file__).parents[2] / "assets"
SIZE = 96  # of a picture, width and height
SMALLEST, LARGEST = 14, 38  # of a shape across, before it is turned
LEAST_CONTRAST = 90  # of a shape to what it covers, as a distance in RGB
LARGE = 26  # from there on it is called large
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {  # RGB
    "red": (210, 30, 35), "green": (35, 160, 50), "blue": (35, 70, 215), "yellow": (240, 220, 40), "orange": (245, 135, 20),
    "purple": (140, 45, 170), "white": (245, 245, 245), "black": (18, 18, 18),
}  # fmt: skip
# Models are trained on photographs in the public domain alone, and tested on others.
TRAINING = ("astronaut.jpg", "camera.png", "chelsea.jpg", "coffee.jpg", "rocket.jpg")
TESTING = (
    "china.jpg",
    "crocodile.webp",
    "flower.jpg",
    "koala.webp",
    "lemur.webp",
    "macaw.webp",
    "panda.webp",
    "polar_bear.webp",
)
FINER = 4  # shapes are drawn on a grid so many times finer


@dataclass(frozen=True)
class Wish:
    """A shape to draw; what is left out is drawn by lot."""

    shape: int | None = None
    colour: int | None = None
    opacity: float = 1.0


@dataclass(frozen=True, eq=False)
class Thing:
    """A shape in a picture. `mask` (SIZE,SIZE): bool. `box`: the mask's left, top, right and bottom, in pixels."""

    shape: int
    colour: int
    mask: np.ndarray
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        return f"{list(COLOURS)[self.colour]} {SHAPES[self.shape]}"

    @property
    def centre(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2

    @property
    def is_large(self) -> bool:
        left, top, right, bottom = self.box
        return max(right - left, bottom - top) >= LARGE


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture (SIZE,SIZE,3) uint8 RGB and the shapes in it, none of which touches another."""

    picture: np.ndarray
    things: tuple[Thing, ...]


def draw_scenes(
    seed: int, count: int, *, photographs: Sequence[str] = TESTING, things: Sequence[Wish] | None = None
) -> Iterator[Scene]:
    """So many scenes of this seed, each by itself the same whatever comes before it. `things`: by default one to four."""
    for number in range(count):
        yield draw_scene(np.random.default_rng([seed, number]), photographs=photographs, things=things)


def draw_scene(
    chance: np.random.Generator, *, photographs: Sequence[str] = TESTING, things: Sequence[Wish] | None = None
) -> Scene:
    wishes = _wish(chance) if things is None else things
    picture = draw_background(chance, photographs)
    tensor = np.zeros((SIZE, SIZE), bool)
    drawn: list[Thing] = []
    for wish in wishes:
        wish = replace(
            wish,
            shape=int(chance.integers(len(SHAPES))) if wish.shape is None else wish.shape,
            colour=int(chance.integers(len(COLOURS))) if wish.colour is None else wish.colour,
        )
        actual = _place(chance, wish.shape or 0, wish.colour or 0, picture, tensor)
        if actual is None:
            continue
        cover, box = actual
        picture = _paint(chance, picture, cover * wish.opacity, wish.colour or 0)
        left, top, right, bottom = box
        tensor[max(top - 3, 0) : bottom + 3, max(left - 3, 0) : right + 3] = True
        drawn.append(Thing(wish.shape or 0, wish.colour or 0, cover > 0.5, box))
    noise = chance.uniform(0, 6) * chance.standard_normal(picture.shape, np.float32)
    return Scene((picture + noise).clip(0, 255).astype(np.uint8), tuple(drawn))


def _wish(chance: np.random.Generator) -> list[Wish]:
    """One to four shapes. In half of all scenes they share two shapes and two colours, so that neither says which it is."""
    shapes, colours = (
        chance.permutation(len(known))[: 2 if chance.random() < 0.5 else None] for known in (SHAPES, COLOURS)
    )
    return [Wish(int(chance.choice(shapes)), int(chance.choice(colours))) for _ in range(chance.integers(1, 5))]


def to_images(scenes: Sequence[Scene]) -> Tensor:
    """The pictures as models take them: (N,3,SIZE,SIZE), RGB in [0,1]."""
    return torch.from_numpy(np.stack([scene.picture for scene in scenes])).permute(0, 3, 1, 2).float() / 255


def to_classes(scene: Scene) -> Tensor:
    """The class of each pixel (SIZE,SIZE), int64: 0 for the background, then the shapes in their order."""
    classes = torch.zeros(SIZE, SIZE, dtype=torch.int64)
    for thing in scene.things:
        classes[torch.from_numpy(thing.mask)] = 1 + thing.shape
    return classes


def to_boxes(scene: Scene) -> dict[str, Tensor]:
    """What torchvision's detectors are trained with."""
    return {
        "boxes": torch.tensor([thing.box for thing in scene.things]).reshape(-1, 4).float(),
        "labels": torch.tensor([1 + thing.shape for thing in scene.things], dtype=torch.int64),
    }


@functools.cache
def _read(name: str) -> np.ndarray:
    picture = cv2.cvtColor(cv2.imread(str(ASSETS / name)), cv2.COLOR_BGR2RGB)
    scale = 400 / min(picture.shape[:2])
    return cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)


def draw_background(chance: np.random.Generator, photographs: Sequence[str]) -> np.ndarray:
    """A part of one of the photographs, perhaps mirrored or turned, its colours changed: (SIZE,SIZE,3) float32."""
    photograph = _read(photographs[int(chance.integers(len(photographs)))])
    side = int(chance.integers(SIZE, 361))
    top, left = (int(chance.integers(0, length - side + 1)) for length in photograph.shape[:2])
    part = photograph[top : top + side, left : left + side]
    part = np.rot90(part, int(chance.integers(4)))
    if chance.random() < 0.5:
        part = part[:, ::-1]
    part = cv2.resize(np.ascontiguousarray(part), (SIZE, SIZE), interpolation=cv2.INTER_AREA).astype(np.float32)
    if chance.random() < 0.5:
        part = part[..., chance.permutation(3)]
    if chance.random() < 0.15:
        part = 255 - part
    grey = part.mean(2, keepdims=True)
    part = grey + (part - grey) * chance.uniform(0.2, 1.3)
    part = 255 * (part.clip(0, 255) / 255) ** chance.uniform(0.6, 1.6)
    return (part * chance.uniform(0.6, 1.1)).astype(np.float32)


def _place(
    chance: np.random.Generator, shape: int, colour: int, picture: np.ndarray, taken: np.ndarray
) -> tuple[np.ndarray, tuple[int, int, int, int]] | None:
    """Where it covers the picture (SIZE,SIZE) in [0,1], and its box, clear of what is taken and of what has its colour
    already; None where no room is found."""
    paint = np.array(list(COLOURS.values())[colour], np.float32)
    for _ in range(40):
        radius = chance.uniform(SMALLEST, LARGEST) / 2
        across, down = chance.uniform(radius + 2, SIZE - radius - 2, 2)
        if taken[int(down), int(across)]:
            continue
        cover = _cover(shape, across, down, radius, chance.uniform(-0.35, 0.35))
        rows, columns = np.flatnonzero((cover > 0.5).any(1)), np.flatnonzero((cover > 0.5).any(0))
        left, right, top, bottom = int(columns[0]), int(columns[-1]) + 1, int(rows[0]), int(rows[-1]) + 1
        is_clear = not taken[top:bottom, left:right].any()
        if is_clear and np.linalg.norm(picture[cover > 0.5] - paint, axis=1).mean() > LEAST_CONTRAST:
            return cover, (left, top, right, bottom)
    return None


def _cover(shape: int, across: float, down: float, radius: float, angle: float) -> np.ndarray:
    """How much of each pixel (SIZE,SIZE) a shape covers."""
    reach = int(1.3 * radius) + 2
    left, top = int(across) - reach, int(down) - reach
    fine = np.zeros((FINER * 2 * reach, FINER * 2 * reach), np.uint8)
    for value, outline in zip((255, 0), _outlines(SHAPES[shape])):
        turned = outline @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        points = FINER * (radius * turned + (across - left, down - top)) - 0.5
        cv2.fillPoly(fine, [np.round(16 * points).astype(np.int32)], value, shift=4)
    part = cv2.resize(fine, (2 * reach, 2 * reach), interpolation=cv2.INTER_AREA)
    padded = np.zeros((SIZE + 4 * reach, SIZE + 4 * reach), np.float32)
    padded[top + 2 * reach : top + 4 * reach, left + 2 * reach : left + 4 * reach] = part / np.float32(255)
    return padded[2 * reach : 2 * reach + SIZE, 2 * reach : 2 * reach + SIZE]


@functools.cache
def _outlines(shape: str) -> tuple[np.ndarray, ...]:
    """A shape of radius 1 around 0: its outline (P,2), and that of a hole in it."""

    def around(count: int, radii: Sequence[float] = (1,), start: float = -np.pi / 2) -> np.ndarray:
        angles = start + 2 * np.pi * np.arange(count) / count
        return np.stack([np.cos(angles), np.sin(angles)], 1) * np.resize(radii, count)[:, None]

    arm = 0.33
    corners = [(arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm), (arm, 1)]
    outlines = {
        "circle": (around(64),),
        "square": (0.9 * np.sqrt(2) * around(4, start=np.pi / 4),),
        "triangle": (1.1 * around(3) + (0, 0.2),),
        "star": (1.1 * around(10, (1, 0.42)),),
        "cross": (np.array([*corners, *((-x, -y) for x, y in corners)]),),
        "ring": (around(64), 0.55 * around(64)),
    }
    return outlines[shape]


def _paint(chance: np.random.Generator, picture: np.ndarray, cover: np.ndarray, colour: int) -> np.ndarray:
    """The picture with a colour, a little off its name's and darker to one side, where it is covered."""
    pixel = np.array([[list(COLOURS.values())[colour]]], np.float32) / 255
    hue, saturation, value = cv2.cvtColor(pixel, cv2.COLOR_RGB2HSV)[0, 0]
    shifted = (hue + chance.uniform(-6, 6)) % 360, saturation * chance.uniform(0.85, 1), value * chance.uniform(0.85, 1)
    base = 255 * cv2.cvtColor(np.array([[shifted]], np.float32), cv2.COLOR_HSV2RGB)
    place, direction = np.linspace(-0.15, 0.15, SIZE, dtype=np.float32), chance.uniform(0, 2 * np.pi)
    light = 1 + np.float32(np.cos(direction)) * place + np.float32(np.sin(direction)) * place[:, None]
    rows, columns = (slice(where[0], where[-1] + 1) for where in (cover.any(axis).nonzero()[0] for axis in (1, 0)))
    painted, part = picture.copy(), picture[rows, columns]
    painted[rows, columns] += cover[rows, columns, None] * (base * light[rows, columns, None] - part)
    return painted
