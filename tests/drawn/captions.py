"""Draw scenes with questions and answers in words. For each word of an answer, the region that it is about is known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import NamedTuple

import cv2
import numpy as np

from tests.drawn import pictures
from tests.drawn.pictures import COLOURS, MIN_CONTRAST, TESTING, cover_shape, draw_background, paint_shape

# Height and width in pixels. All are multiples of 16, a cell of the captioner's language model.
SIZES = ((128, 128), (112, 144), (144, 112), (96, 160), (160, 96))
MIN_DIAMETER, MAX_DIAMETER = 28, 48  # diameter of a shape before its rotation, in pixels
GAP = 4  # smallest distance of two shapes' boxes, in pixels
MIN_SLOPE = 1.5  # smallest ratio of two shapes' distances along the longer and the shorter axis
# Fewer than in `pictures.py`: the captioner would need longer to tell stars from crosses, and "orange" another article.
# Shapes are named in the order of their colours.
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLOUR_ORDER = ("red", "yellow", "green", "blue", "purple", "white", "black")
RELATIONS = ("left of", "right of", "above", "below")
QUESTIONS = ("describe", "what", "whether")


@dataclass(frozen=True, eq=False)
class Word:
    """A word of an answer.

    `kind` is "object", "colour", "relation", "filler", or "answer" for yes and no. `mask` (H,W) bool is the object that
    the word is about, or both objects of a relation. It is None for fillers and for "no".
    """

    text: str
    kind: str
    mask: np.ndarray | None


class CaptionScene(NamedTuple):
    """An image (H,W,3) uint8 RGB, a prompt, and the answer's words. The answer is a function of the image and prompt."""

    image: np.ndarray
    prompt: str
    words: tuple[Word, ...]

    @property
    def answer(self) -> str:
        return " ".join(word.text for word in self.words)


@dataclass(frozen=True, eq=False)
class NamedShape:
    """A shape in an image. `mask` (H,W): bool. `centre`: the middle of the mask's box, across and down, in pixels."""

    shape: str
    colour: str
    mask: np.ndarray
    centre: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


def draw_caption_scene(
    seed: int | Sequence[int],
    question: str = "describe",
    *,
    count: int | None = None,
    size: tuple[int, int] | None = None,
    photographs: Sequence[str] = TESTING,
) -> CaptionScene:
    """Draw one to three shapes on a photograph, a gradient or noise.

    Each shape of an image has another colour. A description names the shapes in the order of `COLOUR_ORDER`, and after
    each the position relative to the next: "there is a red ring left of a blue square above a white star". Two shapes
    are next to or above each other, never diagonal.

    Parameters
    ----------
    seed
        A seed gives the same scene again. The image does not depend on the question, if `count` and `size` are passed.
    question
        "describe"; "what", which asks for the shape at one side of another one and needs at least two shapes;
        "whether", which asks for a shape of some colour. In half of the cases that one is there. In most others there
        is its colour or its shape, or both in different places.
    count
        The number of shapes. By default it is sampled.
    size
        Height and width in pixels. By default one of `SIZES`.
    photographs
        The photographs of the backgrounds. The default ones were not used for training.
    """
    rng = np.random.default_rng(seed)
    size = SIZES[int(rng.integers(len(SIZES)))] if size is None else size
    count = int(rng.integers(2 if question == "what" else 1, 4)) if count is None else count
    image, shapes = draw_image(rng, size, count, photographs)
    return ask(rng, image, shapes, question)


def draw_image(
    rng: np.random.Generator, size: tuple[int, int], count: int, photographs: Sequence[str]
) -> tuple[np.ndarray, list[NamedShape]]:
    """Return an image (H,W,3) uint8 and its shapes in the order of their colours. Repeat until all shapes have room."""
    while True:
        image = _draw_background(rng, size, photographs)
        shapes: list[NamedShape] = []
        for colour in sorted(rng.permutation(len(COLOUR_ORDER))[:count]):
            placed = _place_shape(rng, COLOUR_ORDER[colour], image, shapes)
            if placed is None:
                break
            cover, shape = placed
            image = paint_shape(rng, image, cover, list(COLOURS).index(shape.colour))
            shapes.append(shape)
        else:
            noise = rng.uniform(0, 6) * rng.standard_normal(image.shape, np.float32)
            return (image + noise).clip(0, 255).astype(np.uint8), shapes


def ask(rng: np.random.Generator, image: np.ndarray, shapes: Sequence[NamedShape], question: str) -> CaptionScene:
    """Return the scene with a question of one of the `QUESTIONS`, and its answer."""
    prompt, words = ASKING[question](rng, shapes)
    return CaptionScene(image, prompt, tuple(words))


def relate(first: NamedShape, second: NamedShape) -> str:
    """Return the first shape's position relative to the second one: one of `RELATIONS`."""
    across, down = (a - b for a, b in zip(first.centre, second.centre))
    if abs(across) > abs(down):
        return "left of" if across < 0 else "right of"
    return "above" if down < 0 else "below"


def _draw_background(rng: np.random.Generator, size: tuple[int, int], photographs: Sequence[str]) -> np.ndarray:
    """Return part of a photograph, a gradient of two colours, or smooth noise: (H,W,3) float32."""
    height, width = size
    sample = rng.random()
    if sample < 0.6:
        side = max(size)
        top, left = (int(rng.integers(side - length + 1)) for length in size)
        return draw_background(rng, photographs, side)[top : top + height, left : left + width].copy()
    colours = rng.uniform(0, 255, (2, 1, 1, 3)).astype(np.float32)
    if sample < 0.8:
        angle = rng.uniform(0, 2 * np.pi)
        down, across = np.mgrid[:height, :width] / (height + width)
        share = 0.5 + np.cos(angle) * (across - across.mean()) + np.sin(angle) * (down - down.mean())
    else:
        cells = rng.random((int(rng.integers(3, 24)), int(rng.integers(3, 24))))
        share = cv2.resize(cells, (width, height), interpolation=cv2.INTER_CUBIC).clip(0, 1)
    share = share.astype(np.float32)[..., None]
    grain = rng.uniform(0, 12) * rng.standard_normal((height, width, 1), np.float32)
    return colours[0] * share + colours[1] * (1 - share) + grain


def _place_shape(
    rng: np.random.Generator, colour: str, image: np.ndarray, shapes: Sequence[NamedShape]
) -> tuple[np.ndarray, NamedShape] | None:
    """Return a random shape and how much of each pixel it covers, or None.

    It contrasts with the background, and lies clearly at one side of each other shape.
    """
    height, width = image.shape[:2]
    for _ in range(30):
        name, radius = SHAPES[int(rng.integers(len(SHAPES)))], rng.uniform(MIN_DIAMETER, MAX_DIAMETER) / 2
        kind = pictures.SHAPES.index(name)
        across, down = (rng.uniform(radius + 4, length - radius - 4) for length in (width, height))
        cover = cover_shape(kind, across, down, radius, rng.uniform(-0.35, 0.35), size=(height, width))
        mask = cover > 0.5
        shape = NamedShape(name, colour, mask, find_centre(mask))
        contrast = np.linalg.norm(image[mask] - np.float32(COLOURS[colour]), axis=1).mean()
        if contrast > MIN_CONTRAST and all(_is_at_one_side(shape, item) for item in shapes):
            return cover, shape
    return None


def find_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Return the left, top, right and bottom of a mask, in pixels."""
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def find_centre(mask: np.ndarray) -> tuple[float, float]:
    left, top, right, bottom = find_box(mask)
    return (left + right) / 2, (top + bottom) / 2


def _is_at_one_side(first: NamedShape, second: NamedShape) -> bool:
    """Return whether two shapes are clearly next to or above each other."""
    distances = np.abs(np.subtract(first.centre, second.centre))
    axis = int(distances.argmax())
    boxes = sorted((find_box(shape.mask) for shape in (first, second)), key=lambda box: box[axis])
    return bool(distances.max() > MIN_SLOPE * distances.min() and boxes[0][2 + axis] + GAP <= boxes[1][axis])


def _describe(rng: np.random.Generator, shapes: Sequence[NamedShape]) -> tuple[str, list[Word]]:
    words = [*_fillers("there is"), *_name(shapes[0])]
    for first, second in pairwise(shapes):
        side, *rest = relate(first, second).split()
        words += [Word(side, "relation", first.mask | second.mask), *_fillers(" ".join(rest)), *_name(second)]
    return "Describe the image.", words


def _ask_what(rng: np.random.Generator, shapes: Sequence[NamedShape]) -> tuple[str, list[Word]]:
    """Ask for the only shape at some side of another one."""
    pairs = [
        (first, second, relate(first, second))
        for first, second in permutations(shapes, 2)
        if sum(relate(shape, second) == relate(first, second) for shape in shapes if shape is not second) == 1
    ]
    first, second, relation = pairs[int(rng.integers(len(pairs)))]
    return f"What is {relation} the {second.name}?", _name(first)


def _ask_whether(rng: np.random.Generator, shapes: Sequence[NamedShape]) -> tuple[str, list[Word]]:
    present = [(shape.colour, shape.shape) for shape in shapes]
    if rng.random() < 0.5:
        shape = shapes[int(rng.integers(len(shapes)))]
        return f"Is there a {shape.name}?", [Word("yes", "answer", shape.mask)]
    absent = [(colour, shape) for colour in COLOUR_ORDER for shape in SHAPES if (colour, shape) not in present]
    colours, names = (set(values) for values in zip(*present))
    halves = [pair for pair in absent if pair[0] in colours or pair[1] in names]
    mixed = [pair for pair in halves if pair[0] in colours and pair[1] in names]
    pool = (absent, halves, mixed or halves)[int(rng.integers(3))]
    colour, name = pool[int(rng.integers(len(pool)))]
    return f"Is there a {colour} {name}?", [Word("no", "answer", None)]


ASKING = {"describe": _describe, "what": _ask_what, "whether": _ask_whether}


def _name(shape: NamedShape) -> list[Word]:
    return [*_fillers("a"), Word(shape.colour, "colour", shape.mask), Word(shape.shape, "object", shape.mask)]


def _fillers(text: str) -> list[Word]:
    return [Word(word, "filler", None) for word in text.split()]


def draw_caption_scenes(seed: int, count: int, question: str = "describe") -> Iterator[CaptionScene]:
    """Yield `count` scenes of this seed. Each depends only on the seed, its number and the question."""
    for number in range(count):
        yield draw_caption_scene([seed, number], question)
