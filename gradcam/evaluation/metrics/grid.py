"""Mosaics: four pictures of four classes side by side, so that it is known where each class is, without annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.explain import Explanation
from gradcam.errors import ImageError, InputError, shorten, show_fields
from gradcam.evaluation.metrics.localisation import measure_order
from gradcam.evaluation.subject import Subject, check_heatmaps, draw, to_unit
from gradcam.hooks.memory import is_out_of_memory
from gradcam.hooks.preserve import preserve_state
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_device, find_input_dtype
from gradcam.models.labels import name_class
from gradcam.options import check_count, check_number

CELLS = 4  # of a mosaic: top left, top right, bottom left, bottom right
MOSAICS = 64
LEAST = 0.5  # probability of a picture's class
ATTEMPTS = 50  # at four pictures that are not together yet
NAMED = 12  # pictures in a message


@dataclass(frozen=True, eq=False)
class GridPointing:
    """How far each map of M mosaics is on its class's own cell. Higher is better.

    Attributes
    ----------
    order : Tensor (M,4)
        How often a pixel of the class's cell has more than one of the other three, float32 in [0,1], on the heatmaps'
        device: the area under the ROC curve. 1/2 is chance.
    mass : Tensor (M,4)
        The share of each map's mass that is in its class's cell, float32 in [0,1]. 1/4 is chance.
    hits : Tensor (M,4)
        The share of each map's maxima that is in its class's cell, float32 in [0,1]. 1/4 is chance.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import grid_pointing_game
    >>> found = grid_pointing_game(torch.ones(1, 4, 8, 8))  # constant maps, which are at chance
    >>> found.order, found.mass, found.hits.shape
    (tensor([[0.5000, 0.5000, 0.5000, 0.5000]]), tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), torch.Size([1, 4]))
    """

    order: Tensor
    mass: Tensor
    hits: Tensor

    __repr__ = show_fields


def grid_pointing_game(heatmaps: Any) -> GridPointing:
    """Ask whether the maps of a mosaic's four classes are on their own pictures.

    For a map A with its negative values set to zero, and the pixels G_k of its cell, mass is the sum of A over G_k
    divided by the sum of A: the paper's L_k. hits is 1 where the maximum is in G_k, otherwise 0. Several maxima count
    by the share of them that is in the cell, so that a constant map is at chance, 1/4 in both. A blank map scores 0 in
    both.

    order is the probability that a pixel of G_k, drawn at random, has a larger value than one of the other three cells;
    equal ones count half, so that constant and blank maps are at chance, 1/2. Mass can be bought: a map's eighth power
    looks at the same places in the same order, and has more of its mass in one cell. Order cannot. A map that is 1 in
    its cell of a grid of 14 x 14 and 0 elsewhere, resized as `explain` does, has a mass of 0.967 and an order of 1.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (M,4,H,W)
        The maps of M mosaics, or an `Explanation` of four classes. Map k is of the class whose picture is in cell k,
        counted by rows from the top left. The cells meet at H // 2 and W // 2, as in `make_mosaics`.

    Returns
    -------
    GridPointing
        `order`, `mass` and `hits`, (M,4) each.

    Raises
    ------
    ImageError
        For heatmaps of another form, for cells without a pixel, and for NaN and infinite values.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import grid_pointing_game, make_mosaics
    >>> classifier = gradcam.load_classifier()
    >>> pictures = {"cat": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> (mosaic,) = make_mosaics(classifier, pictures, least=0.2)
    >>> explanation = gradcam.explain(classifier.model, mosaic.image[None], "layer4", target=[list(mosaic.classes)])
    >>> grid_pointing_game(explanation).hits  # each maximum is on its own picture
    tensor([[1., 1., 1., 1.]])

    References
    ----------
    Böhle et al., "Convolutional Dynamic Alignment Networks", CVPR 2021, section 4.2, for mass. Hanley and McNeil, "The
    Meaning and Use of the Area under a ROC Curve", Radiology 1982, for order.
    """
    values = heatmaps.heatmaps if isinstance(heatmaps, Explanation) else heatmaps
    if not isinstance(values, (Tensor, np.ndarray)):
        raise ImageError(f"The heatmaps are {shorten(heatmaps)}, expected a tensor or an array (M,4,H,W).")
    shape = tuple(values.shape)
    if len(shape) != 4 or shape[1] != CELLS or min(shape[2:]) < 2:
        raise ImageError(
            f"The heatmaps have the shape {shape}, expected (M,4,H,W): of each mosaic one for each of its four classes, in "
            "the order of its cells, at the mosaic's size."
        )
    checked = check_heatmaps(values.reshape(-1, *shape[2:]), (shape[0] * CELLS, *shape[2:]))
    cells = torch.zeros(CELLS, *shape[2:], dtype=torch.bool, device=checked.device)
    rows, columns = ((slice(length // 2), slice(length // 2, None)) for length in shape[2:])
    for k, (down, across) in enumerate(product(rows, columns)):
        cells[k, down, across] = True
    own, unit = cells.repeat(shape[0], 1, 1), to_unit(checked)
    found = measure_order(checked, own), _own_share(unit, own), _own_share((unit == 1).float(), own)
    return GridPointing(*(each.unflatten(0, (-1, CELLS)) for each in found))


def _own_share(maps: Tensor, own: Tensor) -> Tensor:
    """The share of each of the maps (N,H,W), which are not negative, in its own cell: (N,), 0 where all is zero."""
    total = maps.sum((1, 2))
    return (maps * own).sum((1, 2)) / torch.where(total > 0, total, 1.0)


@dataclass(frozen=True, eq=False)
class Tile:
    """A picture and its most probable class: the tensor (C,H,W) that the model takes, on the CPU."""

    name: str
    image: Tensor
    index: int
    probability: float

    __repr__ = show_fields


@dataclass(frozen=True, eq=False)
class Mosaic:
    """Four pictures in a square, each as the network would see it alone, H x W.

    Attributes
    ----------
    names : tuple of str
        The names of the four pictures, by rows from the top left.
    image : Tensor (C,2H,2W)
        The square, preprocessed, on the CPU; (C,H,W) for a network that takes nothing larger.
    classes : tuple of int
        The classes of the four pictures, in the order of the names.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import make_mosaics
    >>> classifier = gradcam.load_classifier()
    >>> pictures = {"cat": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> (mosaic,) = make_mosaics(classifier, pictures, least=0.2)
    >>> sorted(mosaic.names), mosaic.image.shape
    (['cat', 'cup', 'man', 'rocket'], torch.Size([3, 448, 448]))
    >>> sorted(classifier.label(index) for index in mosaic.classes)
    ['Egyptian cat', 'espresso', 'missile', 'tripod']
    """

    names: tuple[str, str, str, str]
    image: Tensor
    classes: tuple[int, int, int, int]

    __repr__ = show_fields


def make_mosaics(
    classifier: Classifier, pictures: Mapping[str, Any], *, limit: int = MOSAICS, least: float = LEAST, seed: int = 0
) -> list[Mosaic]:
    """Make mosaics of the pictures that the model is sure of, for the grid pointing game.

    Each mosaic has four pictures of four classes, in random places. No four are together twice, and each picture is
    taken about as often as the others. Cells have the network's own input size, so that a mosaic has twice its height
    and width. Where the model refuses that, which is tried, mosaics have the network's own size, and each picture is
    halved: the model may be less sure of these.

    Parameters
    ----------
    classifier : Classifier
        The model, with its preprocessing.
    pictures : mapping of str to picture
        The pictures by name, in any form that `classifier.prepare` takes. Floating tensors (C,H,W) are taken as
        preprocessed.
    limit : int, default 64
        The most mosaics that are made.
    least : float, default 0.5
        The probability that a picture's most probable class must have for the picture to be taken. That class is the
        picture's.
    seed : int, default 0
        Draws which pictures are together, and where.

    Returns
    -------
    list of Mosaic
        The mosaics.

    Raises
    ------
    InputError
        Where the model is sure of fewer than four classes.
    ImageError
        For pictures that are no mapping or that `gradcam.read_image` cannot read, and for sizes that differ once
        preprocessed.
    GradcamError
        For a limit below 1, and for `least` outside [0,1].

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import make_mosaics
    >>> pictures = {"cat": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> mosaics = make_mosaics(gradcam.load_classifier(), pictures, least=0.2)
    >>> len(mosaics), mosaics[0].image.shape
    (1, torch.Size([3, 448, 448]))

    References
    ----------
    Böhle et al., "Convolutional Dynamic Alignment Networks", CVPR 2021, section 4.2.
    """
    return arrange(classifier.model, find_tiles(classifier, pictures, least=least), limit=limit, seed=seed)


def find_tiles(classifier: Classifier, pictures: Mapping[str, Any], *, least: float = LEAST) -> list[Tile]:
    """The pictures that the model is sure of, in order. Raises `InputError` for too few classes, `ImageError` for sizes."""
    check_number(least, "least", "a probability from 0 to 1, such as 0.5.", most=1)
    if not isinstance(pictures, Mapping):
        raise ImageError(f"The pictures are {shorten(pictures)}, expected a mapping from names to pictures.")
    tiles = []
    for name, picture in pictures.items():  # each on its own: its numbers do not depend on its neighbours
        is_prepared = isinstance(picture, Tensor) and picture.is_floating_point()
        image = picture if is_prepared else classifier.prepare(picture).image
        batch = image[None].to(classifier.device, find_input_dtype(classifier.model))
        subject = Subject(classifier.model, batch, activation=classifier.activation)
        tiles.append(Tile(name, image.detach().cpu(), int(subject.classes), float(subject.probabilities)))
    sure = [tile for tile in tiles if tile.probability >= least]
    if (count := len({tile.index for tile in sure})) < CELLS:
        listed = sorted(tiles, key=lambda tile: -tile.probability)[:NAMED]
        names = [name_class(tile.index, classifier.label(tile.index) or None) for tile in listed]
        seen = [f"{tile.name} {tile.probability:.2f} ({name})" for tile, name in zip(listed, names)]
        more = f", and {len(tiles) - NAMED} less probable ones" if len(tiles) > NAMED else ""
        raise InputError(
            f"The model is sure of {count} class{'' if count == 1 else 'es'}, with a probability of {least:g} or more, and "
            f"a mosaic takes pictures of four. There are {', '.join(seen) or 'no pictures'}{more}. Give pictures of more "
            "classes, or lower that probability (least)."
        )
    shapes = [" x ".join(map(str, shape)) for shape in sorted({tuple(tile.image.shape) for tile in sure})]
    if len(shapes) > 1:
        raise ImageError(
            f"The pictures are {' and '.join(shapes[:2])} once preprocessed, which do not fit into one mosaic: choose a "
            "size that all of them are brought to."
        )
    return sure


def arrange(model: nn.Module, tiles: Sequence[Tile], *, limit: int = MOSAICS, seed: int = 0) -> list[Mosaic]:
    """Mosaics of tiles that are of four classes at least, and of one size; as `make_mosaics` says."""
    check_count(limit, "limit", "a number of mosaics at most, 1 or more.")
    chosen = [[tiles[i] for i in places] for places in _choose([tile.index for tile in tiles], limit, seed)]
    try:
        with preserve_state(model), torch.no_grad():
            image = _join([tile.image for tile in chosen[0]])[None]
            model(image.to(find_input_device(model), find_input_dtype(model)))
    except Exception as error:  # whatever it raises otherwise is its way to refuse an image of this size
        if is_out_of_memory(error):
            raise
        return [_to_mosaic(quartet, is_large=False) for quartet in chosen]
    return [_to_mosaic(quartet, is_large=True) for quartet in chosen]


def _choose(classes: Sequence[int], limit: int, seed: int) -> list[list[int]]:
    """Fours of places, no two alike, of four classes each, in an order by chance; those least used come first."""
    generator = draw(seed, "mosaics")
    uses = torch.zeros(len(classes), dtype=torch.float32, device="cpu")
    chosen: dict[frozenset[int], list[int]] = {}
    for _ in range(limit):
        for attempt in range(ATTEMPTS):
            # Chance decides between places of equal use; and between others, the longer nothing new is found.
            drawn = torch.rand(len(classes), generator=generator, dtype=torch.float32, device="cpu")
            first: dict[int, int] = {}  # place of each class
            for place in (uses + drawn * (1 + attempt / 10)).argsort().tolist():
                first.setdefault(classes[place], place)
            quartet = list(first.values())[:CELLS]
            if frozenset(quartet) not in chosen:
                shuffled = torch.randperm(CELLS, generator=generator, dtype=torch.int64, device="cpu").tolist()
                chosen[frozenset(quartet)] = [quartet[i] for i in shuffled]
                uses[quartet] += 1
                break
        else:
            break
    return list(chosen.values())


def _join(images: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.cat(list(row), dim=2) for row in (images[:2], images[2:])], dim=1)


def _to_mosaic(tiles: Sequence[Tile], *, is_large: bool) -> Mosaic:
    images = [tile.image for tile in tiles]
    if not is_large:
        # Of an odd length, the second part has the odd pixel, as in `grid_pointing_game`.
        rows, columns = ((length // 2, length - length // 2) for length in images[0].shape[1:])
        halve = partial(nn.functional.interpolate, mode="bilinear", antialias=True, align_corners=False)
        images = [halve(image[None].float(), size=size)[0] for image, size in zip(images, product(rows, columns))]
    one, two, three, four = tiles
    names = (one.name, two.name, three.name, four.name)
    return Mosaic(names, _join(images), (one.index, two.index, three.index, four.index))
