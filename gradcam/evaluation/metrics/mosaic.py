"""The grid pointing game: test whether a heatmap marks the image of its class in a mosaic of four images."""

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
from gradcam.errors import ImageError, InputError, format_fields, shorten
from gradcam.evaluation.metrics.localisation import measure_order, measure_share
from gradcam.evaluation.subject import Subject, check_heatmaps, make_generator, scale_to_unit, to_batch
from gradcam.hooks.memory import is_out_of_memory
from gradcam.hooks.preserve import preserve_state
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_device, find_input_dtype
from gradcam.models.labels import name_class
from gradcam.options import accept_old_parameters, check_count, check_number

CELLS = 4  # cells of a mosaic: top left, top right, bottom left, bottom right
DEFAULT_MOSAICS = 64
MIN_PROBABILITY = 0.5  # Images are left out if the probability of their top class is smaller.
MAX_ATTEMPTS = 50  # largest number of attempts to find four images that are not yet a mosaic
MAX_IMAGES_IN_MESSAGE = 12


@dataclass(frozen=True, eq=False)
class GridPointing:
    """The scores of M mosaics: how well each heatmap marks the cell of its class. Higher is better.

    Attributes
    ----------
    order : Tensor (M,4)
        How often the heatmap is higher at a pixel of the class's cell than at a pixel of the other three cells: the
        area under the ROC curve, float32 in [0,1]. Chance is 1/2.
    mass : Tensor (M,4)
        The share of each heatmap's mass in its class's cell, float32 in [0,1]. Chance is 1/4.
    hits : Tensor (M,4)
        The share of each heatmap's maxima in its class's cell, float32 in [0,1]. Chance is 1/4.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import grid_pointing_game
    >>> result = grid_pointing_game(torch.ones(1, 4, 8, 8))  # constant heatmaps score chance
    >>> result.order, result.mass, result.hits.shape
    (tensor([[0.5000, 0.5000, 0.5000, 0.5000]]), tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), torch.Size([1, 4]))
    """

    order: Tensor
    mass: Tensor
    hits: Tensor

    __repr__ = format_fields


def grid_pointing_game(heatmaps: Any) -> GridPointing:
    """Measure whether the heatmaps of a mosaic's four classes mark the images of these classes.

    Let A be the heatmap of class k with negative values set to zero, and G_k the pixels of the cell of class k. "mass"
    is the sum of A over G_k divided by the sum of A (L_k in the paper). "hits" is 1 if the maximum is in G_k, otherwise
    0. If there are several equal maxima, "hits" is the share of these maxima in G_k. For a constant heatmap, "mass" and
    "hits" are both 1/4, which is chance. For a blank heatmap, both are 0.

    "order" is the probability that a random pixel of G_k has a larger value than a random pixel of the other three cells;
    equal values count half. Constant and blank heatmaps have an order of 1/2, which is chance. Sharpening a heatmap, such
    as raising it to the eighth power, increases its mass but not its order. Resizing lowers the mass slightly: if a
    14 x 14 heatmap is 1 in G_k and 0 elsewhere, resizing as in `explain` gives a mass of 0.967 and an order of 1.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (M,4,H,W)
        The heatmaps of M mosaics, or an `Explanation` of four classes. Heatmap k explains the class of the image in cell
        k, counted row by row from the top left. The cells meet at H // 2 and W // 2, as in `make_mosaics`.

    Returns
    -------
    GridPointing
        `order`, `mass` and `hits`, (M,4) each.

    Raises
    ------
    ImageError
        If the heatmaps are not (M,4,H,W), are too small to have four cells, or contain NaN or infinite values.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import grid_pointing_game, make_mosaics
    >>> classifier = gradcam.load_classifier()
    >>> images = {"cat": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> (mosaic,) = make_mosaics(classifier, images, min_probability=0.2)
    >>> explanation = gradcam.explain(classifier.model, mosaic.image[None], "layer4", target=[list(mosaic.classes)])
    >>> grid_pointing_game(explanation).hits  # each maximum is on the right image
    tensor([[1., 1., 1., 1.]])

    References
    ----------
    Böhle et al., "Convolutional Dynamic Alignment Networks", CVPR 2021, section 4.2, for mass. Hanley and McNeil, "The
    Meaning and Use of the Area under a ROC Curve", Radiology 1982, for order.
    """
    values = heatmaps.heatmaps if isinstance(heatmaps, Explanation) else heatmaps
    if not isinstance(values, (Tensor, np.ndarray)):
        raise ImageError(f"The heatmaps are {shorten(heatmaps)}, expected a tensor or an array (M,4,H,W).")
    if values.ndim != 4 or values.shape[1] != CELLS or min(values.shape[2:]) < 2:
        expected = "(M,4,H,W): four heatmaps per mosaic, one for each cell, in the size of the mosaic"
        raise ImageError(f"The heatmaps have the shape {tuple(values.shape)}, expected {expected}.")
    mosaics, _, *size = values.shape
    checked = check_heatmaps(values.reshape(-1, *size), (mosaics * CELLS, *size))
    cells = torch.zeros(CELLS, *size, dtype=torch.bool, device=checked.device)
    rows, columns = ((slice(length // 2), slice(length // 2, None)) for length in size)
    for k, (row, column) in enumerate(product(rows, columns)):
        cells[k, row, column] = True
    masks, unit = cells.repeat(mosaics, 1, 1), scale_to_unit(checked)
    scores = measure_order(checked, masks), measure_share(unit, masks), measure_share((unit == 1).float(), masks)
    return GridPointing(*(score.unflatten(0, (-1, CELLS)) for score in scores))


@dataclass(frozen=True, eq=False)
class Tile:
    """An image for mosaics, and the image's top class. `image` (C,H,W) is preprocessed, and on the CPU."""

    name: str
    image: Tensor
    index: int
    probability: float


@dataclass(frozen=True, eq=False)
class Mosaic:
    """Four preprocessed images (C,H,W) in a 2 x 2 grid.

    Attributes
    ----------
    names : tuple of str
        The names of the four images, row by row from the top left.
    image : Tensor (C,2H,2W)
        The mosaic, preprocessed, on the CPU. If the model does not accept larger inputs, the mosaic is (C,H,W).
    classes : tuple of int
        The classes of the four images, in the order of the names.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import make_mosaics
    >>> classifier = gradcam.load_classifier()
    >>> images = {"cat": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> (mosaic,) = make_mosaics(classifier, images, min_probability=0.2)
    >>> sorted(mosaic.names), mosaic.image.shape
    (['cat', 'cup', 'man', 'rocket'], torch.Size([3, 448, 448]))
    >>> sorted(classifier.label(index) for index in mosaic.classes)
    ['Egyptian cat', 'espresso', 'missile', 'tripod']
    """

    names: tuple[str, str, str, str]
    image: Tensor
    classes: tuple[int, int, int, int]

    __repr__ = format_fields


@accept_old_parameters
def make_mosaics(
    classifier: Classifier,
    images: Mapping[str, Any],
    *,
    limit: int = DEFAULT_MOSAICS,
    min_probability: float = MIN_PROBABILITY,
    seed: int = 0,
) -> list[Mosaic]:
    """Make mosaics of confidently classified images, for the grid pointing game.

    Each mosaic has four images of four classes, in random cells. No mosaic occurs twice, and each image is used about
    equally often. A cell has the model's input size, and a mosaic has twice the height and width. If the model does not
    accept larger inputs, the mosaic has the model's input size. Each image is then resized to half its height and
    width, which may lower the probabilities.

    Parameters
    ----------
    classifier : Classifier
        The model, with its preprocessing.
    images : mapping of str to image
        The images by name, in any form that `classifier.prepare` takes. Floating tensors (C,H,W) count as preprocessed.
    limit : int, default 64
        The largest number of mosaics.
    min_probability : float, default 0.5
        The smallest probability of the top class, which counts as the image's class. Images with a lower probability
        are not used.
    seed : int, default 0
        Random seed for choosing the images of each mosaic and their cells.

    Returns
    -------
    list of Mosaic
        The mosaics.

    Raises
    ------
    InputError
        If the images with a probability of at least `min_probability` belong to fewer than four classes.
    ImageError
        If the images are not a mapping, cannot be read, or have different sizes after preprocessing.
    GradcamError
        If the limit is below 1, or `min_probability` is outside [0,1].

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import make_mosaics
    >>> images = {"cat": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> mosaics = make_mosaics(gradcam.load_classifier(), images, min_probability=0.2)
    >>> len(mosaics), mosaics[0].image.shape
    (1, torch.Size([3, 448, 448]))

    References
    ----------
    Böhle et al., "Convolutional Dynamic Alignment Networks", CVPR 2021, section 4.2.
    """
    return arrange_tiles(classifier.model, to_tiles(classifier, images, least=min_probability), limit=limit, seed=seed)


def to_tiles(classifier: Classifier, images: Mapping[str, Any], *, least: float = MIN_PROBABILITY) -> list[Tile]:
    """Return the images with a top class of high probability. Raise the errors of `make_mosaics`."""
    check_number(least, "min_probability", "a probability from 0 to 1, such as 0.5.", most=1)
    if not isinstance(images, Mapping):
        raise ImageError(f"The images are {shorten(images)}, expected a mapping from names to images.")
    tiles = []
    for name, source in images.items():  # Each image runs alone, because results can depend slightly on the batch.
        is_prepared = isinstance(source, Tensor) and source.is_floating_point()
        image = source if is_prepared else classifier.prepare(source).image
        subject = Subject(classifier.model, to_batch(classifier, [image]), activation=classifier.activation)
        tiles.append(Tile(name, image.detach().cpu(), int(subject.classes), float(subject.probabilities)))
    confident = [tile for tile in tiles if tile.probability >= least]
    if (count := len({tile.index for tile in confident})) < CELLS:
        top_tiles = sorted(tiles, key=lambda tile: -tile.probability)[:MAX_IMAGES_IN_MESSAGE]
        names = [name_class(tile.index, classifier.label(tile.index) or None) for tile in top_tiles]
        lines = [f"{tile.name} {tile.probability:.2f} ({name})" for tile, name in zip(top_tiles, names)]
        more = [f"and {len(tiles) - MAX_IMAGES_IN_MESSAGE} less probable ones"] if len(tiles) > len(lines) else []
        raise InputError(
            f"A mosaic needs images of four classes. Only images whose predicted class has a probability of {least:g} "
            f"or more are used: they have {count} class{'' if count == 1 else 'es'}. "
            f"Images: {', '.join(lines + more) or 'none'}. "
            "Give images of more classes, or lower the required probability (min_probability)."
        )
    shapes = [" x ".join(map(str, shape)) for shape in sorted({tuple(tile.image.shape) for tile in confident})]
    if len(shapes) > 1:
        raise ImageError(
            f"After preprocessing, the images are {' and '.join(shapes[:2])}, but a mosaic needs images of one size: choose "
            "a preprocessing that resizes all images to one size."
        )
    return confident


def arrange_tiles(
    model: nn.Module, tiles: Sequence[Tile], *, limit: int = DEFAULT_MOSAICS, seed: int = 0
) -> list[Mosaic]:
    """Return mosaics of tiles, as in `make_mosaics`. The tiles must have four or more classes, and the same size."""
    check_count(limit, "limit", "the largest number of mosaics, 1 or more.")
    quartets = _choose_quartets(tiles, limit, seed)
    is_large = True
    try:
        with preserve_state(model), torch.no_grad():
            image = _join([tile.image for tile in quartets[0]])[None]
            model(image.to(find_input_device(model), find_input_dtype(model)))
    except Exception as error:  # A model may refuse an image size with any error.
        if is_out_of_memory(error):
            raise
        is_large = False
    return [_to_mosaic(quartet, is_large=is_large) for quartet in quartets]


def _choose_quartets(tiles: Sequence[Tile], limit: int, seed: int) -> list[list[Tile]]:
    """Choose different sets of four tiles with four classes, in random order. Prefer the least used tiles."""
    generator = make_generator(seed, "mosaics")
    uses = torch.zeros(len(tiles), dtype=torch.float32, device="cpu")
    quartets: dict[frozenset[int], list[Tile]] = {}
    for _ in range(limit):
        for attempt in range(MAX_ATTEMPTS):
            # Noise breaks ties between equally used tiles. Each attempt adds more noise, which makes a new set more
            # likely.
            noise = torch.rand(len(tiles), generator=generator, dtype=torch.float32, device="cpu")
            number_of_class: dict[int, int] = {}
            for number in (uses + noise * (1 + attempt / 10)).argsort().tolist():
                number_of_class.setdefault(tiles[number].index, number)
            quartet = list(number_of_class.values())[:CELLS]
            if frozenset(quartet) not in quartets:
                shuffled = torch.randperm(CELLS, generator=generator, dtype=torch.int64, device="cpu").tolist()
                quartets[frozenset(quartet)] = [tiles[quartet[i]] for i in shuffled]
                uses[quartet] += 1
                break
        else:
            break
    return list(quartets.values())


def _join(images: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.cat(list(row), dim=2) for row in (images[:2], images[2:])], dim=1)


def _to_mosaic(tiles: Sequence[Tile], *, is_large: bool) -> Mosaic:
    images = [tile.image for tile in tiles]
    if not is_large:
        # If a length is odd, the second row or column of cells gets the extra pixel, as in `grid_pointing_game`.
        rows, columns = ((length // 2, length - length // 2) for length in images[0].shape[1:])
        halve = partial(nn.functional.interpolate, mode="bilinear", antialias=True, align_corners=False)
        images = [halve(image[None].float(), size=size)[0] for image, size in zip(images, product(rows, columns))]
    a, b, c, d = tiles
    return Mosaic((a.name, b.name, c.name, d.name), _join(images), (a.index, b.index, c.index, d.index))
