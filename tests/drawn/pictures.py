"""Draw shapes on parts of photographs. Their masks are known to the pixel, and a seed gives the same images again."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

ASSETS = Path(__file__).parents[2] / "assets"
SIZE = 96  # width and height of an image, in pixels
MIN_DIAMETER, MAX_DIAMETER = 14, 38  # diameter of a shape before its rotation, in pixels
MIN_CONTRAST = 90  # smallest distance in RGB of a shape's colour from the pixels that it covers
MIN_LARGE_SIZE = 26  # width or height in pixels from which a shape is called large
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {  # RGB
    "red": (210, 30, 35), "green": (35, 160, 50), "blue": (35, 70, 215), "yellow": (240, 220, 40), "orange": (245, 135, 20),
    "purple": (140, 45, 170), "white": (245, 245, 245), "black": (18, 18, 18),
}  # fmt: skip
# Models train only on photographs in the public domain, and are tested on other photographs.
TRAINING = ("astronaut.jpg", "camera.png", "chelsea.jpg", "coffee.jpg", "rocket.jpg")
TESTING = (
    "china.jpg", "crocodile.webp", "flower.jpg", "koala.webp", "lemur.webp", "macaw.webp", "panda.webp",
    "polar_bear.webp",
)  # fmt: skip
SUPERSAMPLING = 4  # shapes are drawn on a grid that is finer by this factor


@dataclass(frozen=True)
class ShapeSpec:
    """A shape to draw. None is sampled at random."""

    shape: int | None = None
    colour: int | None = None
    opacity: float = 1.0


@dataclass(frozen=True, eq=False)
class DrawnShape:
    """A shape in an image. `mask` (SIZE,SIZE): bool. `box`: the mask's left, top, right and bottom, in pixels."""

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
        return max(right - left, bottom - top) >= MIN_LARGE_SIZE


@dataclass(frozen=True, eq=False)
class Scene:
    """An image (SIZE,SIZE,3) uint8 RGB and the shapes in it, none of which touches another."""

    picture: np.ndarray
    things: tuple[DrawnShape, ...]


def draw_scenes(
    seed: int, count: int, *, photographs: Sequence[str] = TESTING, things: Sequence[ShapeSpec] | None = None
) -> Iterator[Scene]:
    """Yield `count` scenes of this seed.

    Each depends only on the seed and its number. `things`: by default one to four.
    """
    for number in range(count):
        yield draw_scene(np.random.default_rng([seed, number]), photographs=photographs, things=things)


def draw_scene(
    rng: np.random.Generator, *, photographs: Sequence[str] = TESTING, things: Sequence[ShapeSpec] | None = None
) -> Scene:
    wishes = _wish(rng) if things is None else things
    picture = draw_background(rng, photographs)
    occupied = np.zeros((SIZE, SIZE), bool)
    drawn: list[DrawnShape] = []
    for wish in wishes:
        wish = replace(
            wish,
            shape=int(rng.integers(len(SHAPES))) if wish.shape is None else wish.shape,
            colour=int(rng.integers(len(COLOURS))) if wish.colour is None else wish.colour,
        )
        placed = _place(rng, wish.shape or 0, wish.colour or 0, picture, occupied)
        if placed is None:
            continue
        cover, box = placed
        picture = paint_shape(rng, picture, cover * wish.opacity, wish.colour or 0)
        left, top, right, bottom = box
        occupied[max(top - 3, 0) : bottom + 3, max(left - 3, 0) : right + 3] = True
        drawn.append(DrawnShape(wish.shape or 0, wish.colour or 0, cover > 0.5, box))
    noise = rng.uniform(0, 6) * rng.standard_normal(picture.shape, np.float32)
    return Scene((picture + noise).clip(0, 255).astype(np.uint8), tuple(drawn))


def _wish(rng: np.random.Generator) -> list[ShapeSpec]:
    """Sample one to four shapes.

    In half of all scenes they share two shapes and two colours, so that neither alone identifies one.
    """
    shapes, colours = (rng.permutation(len(names))[: 2 if rng.random() < 0.5 else None] for names in (SHAPES, COLOURS))
    return [ShapeSpec(int(rng.choice(shapes)), int(rng.choice(colours))) for _ in range(rng.integers(1, 5))]


def to_images(scenes: Sequence[Scene]) -> Tensor:
    """Return the images as models take them: (N,3,SIZE,SIZE), RGB in [0,1]."""
    return torch.from_numpy(np.stack([scene.picture for scene in scenes])).permute(0, 3, 1, 2).float() / 255


def to_classes(scene: Scene) -> Tensor:
    """Return the class of each pixel (SIZE,SIZE), int64: 0 for the background, then the shapes in their order."""
    classes = torch.zeros(SIZE, SIZE, dtype=torch.int64)
    for thing in scene.things:
        classes[torch.from_numpy(thing.mask)] = 1 + thing.shape
    return classes


def to_boxes(scene: Scene) -> dict[str, Tensor]:
    """Return the training targets of torchvision's detectors."""
    return {
        "boxes": torch.tensor([thing.box for thing in scene.things]).reshape(-1, 4).float(),
        "labels": torch.tensor([1 + thing.shape for thing in scene.things], dtype=torch.int64),
    }


@functools.cache
def _read(name: str) -> np.ndarray:
    picture = cv2.cvtColor(cv2.imread(str(ASSETS / name)), cv2.COLOR_BGR2RGB)
    scale = 400 / min(picture.shape[:2])
    return cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)


def draw_background(rng: np.random.Generator, photographs: Sequence[str], size: int = SIZE) -> np.ndarray:
    """Return a square part of a random photograph: (size,size,3) float32.

    It may be mirrored and rotated, and its colours are changed.
    """
    photograph = _read(photographs[int(rng.integers(len(photographs)))])
    side = int(rng.integers(size, 361))
    y0, x0 = (int(rng.integers(0, length - side + 1)) for length in photograph.shape[:2])
    part = photograph[y0 : y0 + side, x0 : x0 + side]
    part = np.rot90(part, int(rng.integers(4)))
    if rng.random() < 0.5:
        part = part[:, ::-1]
    part = cv2.resize(np.ascontiguousarray(part), (size, size), interpolation=cv2.INTER_AREA).astype(np.float32)
    if rng.random() < 0.5:
        part = part[..., rng.permutation(3)]
    if rng.random() < 0.15:
        part = 255 - part
    grey = part.mean(2, keepdims=True)
    part = grey + (part - grey) * rng.uniform(0.2, 1.3)
    part = 255 * (part.clip(0, 255) / 255) ** rng.uniform(0.6, 1.6)
    return (part * rng.uniform(0.6, 1.1)).astype(np.float32)


def _place(
    rng: np.random.Generator, shape: int, colour: int, picture: np.ndarray, occupied: np.ndarray
) -> tuple[np.ndarray, tuple[int, int, int, int]] | None:
    """Return a shape's coverage (SIZE,SIZE) in [0,1] and its box at a random free position, or None.

    The position is clear of occupied pixels and contrasts with the background.
    """
    paint = np.array(list(COLOURS.values())[colour], np.float32)
    for _ in range(40):
        radius = rng.uniform(MIN_DIAMETER, MAX_DIAMETER) / 2
        across, down = rng.uniform(radius + 2, SIZE - radius - 2, 2)
        if occupied[int(down), int(across)]:
            continue
        cover = cover_shape(shape, across, down, radius, rng.uniform(-0.35, 0.35))
        rows, columns = np.flatnonzero((cover > 0.5).any(1)), np.flatnonzero((cover > 0.5).any(0))
        x0, x1, y0, y1 = int(columns[0]), int(columns[-1]) + 1, int(rows[0]), int(rows[-1]) + 1
        is_clear = not occupied[y0:y1, x0:x1].any()
        if is_clear and np.linalg.norm(picture[cover > 0.5] - paint, axis=1).mean() > MIN_CONTRAST:
            return cover, (x0, y0, x1, y1)
    return None


def cover_shape(
    shape: int, across: float, down: float, radius: float, angle: float, *, size: tuple[int, int] = (SIZE, SIZE)
) -> np.ndarray:
    """Return how much of each pixel a shape covers, in [0,1]. `size`: the image's height and width."""
    reach = int(1.3 * radius) + 2
    x0, y0 = int(across) - reach, int(down) - reach
    fine = np.zeros((SUPERSAMPLING * 2 * reach, SUPERSAMPLING * 2 * reach), np.uint8)
    for value, outline in zip((255, 0), _outlines(SHAPES[shape])):
        turned = outline @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        points = SUPERSAMPLING * (radius * turned + (across - x0, down - y0)) - 0.5
        cv2.fillPoly(fine, [np.round(16 * points).astype(np.int32)], value, shift=4)
    part = cv2.resize(fine, (2 * reach, 2 * reach), interpolation=cv2.INTER_AREA)
    height, width = size
    padded = np.zeros((height + 4 * reach, width + 4 * reach), np.float32)
    padded[y0 + 2 * reach : y0 + 4 * reach, x0 + 2 * reach : x0 + 4 * reach] = part / np.float32(255)
    return padded[2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]


@functools.cache
def _outlines(shape: str) -> tuple[np.ndarray, ...]:
    """Return a shape of radius 1 around 0: its outline (P,2), and the outline of its hole."""

    def around(count: int, radii: Sequence[float] = (1,), start: float = -np.pi / 2) -> np.ndarray:
        angles = start + 2 * np.pi * np.arange(count) / count
        return np.stack([np.cos(angles), np.sin(angles)], 1) * np.resize(radii, count)[:, None]

    arm = 0.33
    corners = [(arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm), (arm, 1)]
    outlines = {
        "circle": (around(64),), "square": (0.9 * np.sqrt(2) * around(4, start=np.pi / 4),),
        "triangle": (1.1 * around(3) + (0, 0.2),), "star": (1.1 * around(10, (1, 0.42)),),
        "cross": (np.array([*corners, *((-x, -y) for x, y in corners)]),), "ring": (around(64), 0.55 * around(64)),
    }  # fmt: skip
    return outlines[shape]


def paint_shape(rng: np.random.Generator, picture: np.ndarray, cover: np.ndarray, colour: int) -> np.ndarray:
    """Return the image with the covered pixels painted: a random shade of the colour, darker towards one side."""
    pixel = np.array([[list(COLOURS.values())[colour]]], np.float32) / 255
    hue, saturation, value = cv2.cvtColor(pixel, cv2.COLOR_RGB2HSV)[0, 0]
    shifted = (hue + rng.uniform(-6, 6)) % 360, saturation * rng.uniform(0.85, 1), value * rng.uniform(0.85, 1)
    base = 255 * cv2.cvtColor(np.array([[shifted]], np.float32), cv2.COLOR_HSV2RGB)
    down, across = (np.linspace(-0.15, 0.15, length, dtype=np.float32) for length in cover.shape)
    direction = rng.uniform(0, 2 * np.pi)
    light = 1 + np.float32(np.cos(direction)) * across + np.float32(np.sin(direction)) * down[:, None]
    rows, columns = (
        slice(indices[0], indices[-1] + 1) for indices in (cover.any(axis).nonzero()[0] for axis in (1, 0))
    )
    painted, part = picture.copy(), picture[rows, columns]
    painted[rows, columns] += cover[rows, columns, None] * (base * light[rows, columns, None] - part)
    return painted
