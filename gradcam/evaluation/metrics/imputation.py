"""Unknown pixels as weighted means of their neighbours: found on grids that are each half as fine as the one before.

With B the binomial filter (1 2 1) x (1 2 1) / 16, weights of 1/6 for direct and 1/12 for diagonal neighbours are
(4 B - 1) / 3: a pixel is that mean of its neighbours where x = B x, and beside the border, with nothing beyond it, where
x = B x / B 1. So the equations are of B alone, which is a few additions of the shifted picture.
Conjugate gradients solve them, preconditioned by a V-cycle over the grids. A coarse cell is unknown if all of its four
pixels are: what stands right beside known ones is left to the finer grid, whose smoothing is fast there.
Nothing simpler does: a direct solver would be SciPy's, which is no dependency and works on the processor alone, and
without the grids conjugate gradients take steps by the width of the unknown areas, where these take 4 to 7 in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradcam.errors import ImageError
from gradcam.evaluation.subject import describe, draw
from gradcam.options import check_number

TOLERANCE = 5e-4  # the last step: one that changes no pixel by more than this share of the picture's range
MOST_STEPS = 200  # 4 to 7 are usual
# Two sweeps that together leave the least of what the coarser grid cannot have: Chebyshev's, for 1 - B from 1/2 to 1.
SWEEPS = (1.0790085735592718, 1.744520838205434)
NOISE = 0.01
# Images at once. On a processor, few: their grids stay in its cache, and larger batches take longer for each.
AT_ONCE, AT_ONCE_ON_DEVICE = 4, 64


def impute(images: Tensor, known: Tensor, *, noise: float = NOISE, generator: torch.Generator | None = None) -> Tensor:
    """Fill in unknown pixels by noisy linear imputation; known pixels stay unchanged.

    Each unknown pixel becomes the mean of its eight neighbours, known or not, with weights of 1/6 for direct and 1/12 for
    diagonal neighbours. At the border, the weights of the existing neighbours are normalised. All equations are solved
    together, with an error of at most 1/1000 of the known values' range. For images from -1 to 1, that error is at most a
    fifth of the default noise, and usually a hundredth. Then normally distributed noise is added to each unknown pixel.
    The input values of unknown pixels are ignored. In an image without known pixels, all pixels become zero plus noise.

    Parameters
    ----------
    images : Tensor (N,C,H,W)
        The images, floating.
    known : Tensor (N,H,W)
        bool, True for known pixels.
    noise : float, default 0.01
        Standard deviation of the noise, in the images' units.
    generator : torch.Generator, default None
        The generator of the noise; None uses seed 0. All images get the same noise (C,H,W), so an image's result does not
        depend on the other images.

    Returns
    -------
    Tensor (N,C,H,W)
        The filled images, of the same type and device. They are computed in float32, or in float64 for float64 images.

    Raises
    ------
    ImageError
        If the images are not a floating tensor (N,C,H,W), or `known` is not a bool tensor (N,H,W).
    GradcamError
        If the noise is negative.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import impute
    >>> images, known = torch.zeros(1, 1, 3, 5), torch.ones(1, 3, 5, dtype=torch.bool)
    >>> images[..., 3:] = 1  # black on the left, white on the right
    >>> known[..., 2] = False  # and an unknown column between them
    >>> [round(value, 1) for value in impute(images, known, noise=0)[0, 0, 1].tolist()]
    [0.0, 0.0, 0.5, 1.0, 1.0]

    References
    ----------
    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods" (ROAD), ICML 2022, section
    5.1, equation 6.
    """
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        raise ImageError(f"The images are {describe(images)}, expected a floating-point tensor (N,C,H,W).")
    size = (len(images), *images.shape[2:])
    if not isinstance(known, Tensor) or known.dtype != torch.bool or known.shape != size:
        expected = f"expected torch.bool {size}: which pixels of each image are known."
        raise ImageError(f"known is {describe(known)}, {expected}")
    check_number(noise, "noise", "a standard deviation: a number, 0 or more.")
    precise = images.detach() if images.dtype == torch.float64 else images.detach().float()
    known = known.to(images.device)
    hopeless = ~known.flatten(1).any(1)
    unknown = ~known & ~hopeless[:, None, None]
    at_once = AT_ONCE if images.device.type == "cpu" else AT_ONCE_ON_DEVICE
    parts = zip(precise.split(at_once), unknown.split(at_once))
    found = torch.cat([fill(*part) for part in parts]).masked_fill_(hopeless[:, None, None, None], 0)
    if noise:
        source = draw(0, "imputation") if generator is None else generator
        drawn = torch.randn(images.shape[1:], generator=source, dtype=torch.float32, device=source.device)
        found.add_(drawn.to(found), alpha=noise)
    return torch.where(known[:, None], images.detach(), found.to(images.dtype))


class _Grid:
    """`unknown`: (N,1,h,w), 1 where a value is to be found and 0 elsewhere; `inside`: (1,1,h,w), B 1."""

    def __init__(self, unknown: Tensor) -> None:
        self.unknown = unknown
        self.inside = _add_neighbours(torch.ones_like(unknown[:1])) / 16
        self.shares = unknown / self.inside
        self.weights = self.shares / 16

    def coarser(self) -> _Grid:
        pixels = _add_fours(torch.ones_like(self.unknown[:1]))  # fewer than four in the last cell of an odd side
        return _Grid((_add_fours(self.unknown) == pixels).to(self.unknown))

    def defect(self, values: Tensor) -> Tensor:
        """How far the mean is above the value, where it is unknown; zero elsewhere."""
        return _add_neighbours(values).mul_(self.weights).addcmul_(self.unknown, values, value=-1)

    def smooth(self, values: Tensor, rest: Tensor | None = None) -> None:
        """Moves values towards their means plus `rest`, in place."""
        for sweep in SWEEPS:
            found = self.defect(values)
            values.add_(found if rest is None else found.add_(rest), alpha=sweep)


def fill(images: Tensor, unknown: Tensor) -> Tensor:
    """Images (N,C,H,W), float32 or float64, whose unknown pixels (N,H,W), not all, are their neighbours' means."""
    grids = [_Grid(unknown[:, None].to(images.dtype))]
    while grids[-1].unknown.any():  # to the first one that has nothing unknown
        grids.append(grids[-1].coarser())
    values = _start(images, grids)
    if len(grids) == 1:
        return values
    finest = grids[0]
    least = TOLERANCE * (values.amax((1, 2, 3), keepdim=True) - values.amin((1, 2, 3), keepdim=True))
    rest = finest.defect(values)
    direction, before = torch.zeros_like(rest), torch.zeros((), dtype=images.dtype, device=images.device)
    moving = torch.ones_like(least, dtype=torch.bool)
    for _ in range(MOST_STEPS):
        towards = _cycle(grids[:-1], rest)
        gain = _dot(towards, rest, finest)
        direction = torch.addcmul(towards, direction, _divide(gain, before))
        change = finest.defect(direction)
        length = torch.where(moving, _divide(gain, -_dot(direction, change, finest)), 0)
        values.addcmul_(direction, length)
        rest.addcmul_(change, length)
        before = gain
        # Each image stops by itself, as if it were alone.
        moving &= (direction.abs().amax((2, 3), keepdim=True) * length).amax(1, keepdim=True) > least
        if not moving.any():
            break
    return values


def _start(images: Tensor, grids: Sequence[_Grid]) -> Tensor:
    """From coarse to fine: the means of the known pixels in each cell, elsewhere those of the coarser grid, smoothed."""
    means = [images.masked_fill(grids[0].unknown > 0, 0)]
    counts = 1 - grids[0].unknown
    for _ in grids[1:]:
        finer, counts = counts, _add_fours(counts)
        means.append(_add_fours(means[-1] * finer) / counts.clamp(min=1))
    values = means.pop()
    for number, grid in reversed([*enumerate(grids[:-1])]):
        values = torch.addcmul(means[number] * (1 - grid.unknown), _spread(values, grid.unknown), grid.unknown)
        if number:  # the first step begins with that of the finest
            grid.smooth(values)
    return values


def _cycle(grids: Sequence[_Grid], rest: Tensor) -> Tensor:
    """One V-cycle, from zero: about the values whose defect is minus `rest`, zero where nothing is unknown."""
    grid = grids[0]
    values = rest * SWEEPS[1]
    values.add_(grid.defect(values).add_(rest), alpha=SWEEPS[0])
    if len(grids) > 1:
        missing = grid.defect(values).add_(rest).mul_(grid.inside)
        # Four pixels' sum, not their mean: on a grid half as fine, the same slope makes four times the defect.
        found = _cycle(grids[1:], _add_fours(missing).mul_(grids[1].shares))
        values.addcmul_(_spread(found, grid.unknown), grid.unknown)
    grid.smooth(values, rest)
    return values


def _add_neighbours(values: Tensor) -> Tensor:
    rows = values * 2
    rows[..., 1:, :].add_(values[..., :-1, :])
    rows[..., :-1, :].add_(values[..., 1:, :])
    found = rows * 2
    found[..., 1:].add_(rows[..., :-1])
    found[..., :-1].add_(rows[..., 1:])
    return found


def _add_fours(values: Tensor) -> Tensor:
    height, width = values.shape[2:]
    if height % 2 or width % 2:
        values = nn.functional.pad(values, (0, width % 2, 0, height % 2))
    rows = values[..., ::2, :] + values[..., 1::2, :]
    return rows[..., ::2] + rows[..., 1::2]


def _spread(cells: Tensor, like: Tensor) -> Tensor:
    height, width = cells.shape[2:]
    rows = cells.new_empty(*cells.shape[:2], height, 2 * width)
    rows[..., ::2] = rows[..., 1::2] = cells
    found = cells.new_empty(*cells.shape[:2], 2 * height, 2 * width)
    found[..., ::2, :] = found[..., 1::2, :] = rows
    return found[..., : like.shape[2], : like.shape[3]]


def _dot(one: Tensor, other: Tensor, grid: _Grid) -> Tensor:
    """The inner product, by image and channel, in which the equations are symmetric."""
    return (one * grid.inside).mul_(other).sum((2, 3), keepdim=True)


def _divide(one: Tensor, other: Tensor) -> Tensor:
    """Zero where there is nothing to divide by: what is found exactly stays."""
    return torch.where(other > 0, one / other, 0)
