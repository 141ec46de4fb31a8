"""Noisy linear imputation: unknown pixels become weighted means of their neighbours, by a multigrid solver.

The weights are 1/6 for direct neighbours and 1/12 for diagonal neighbours. Let B be the binomial filter
(1 2 1) x (1 2 1) / 16. The weighted mean is then (4 B x - x) / 3, and a pixel equals this mean if x = B x. At the border,
some neighbours are missing. There, the condition is x = B x / B 1, where 1 is an image of ones. The solver therefore
needs only B, which is a few additions of shifted images.

The solver is conjugate gradients, preconditioned by a multigrid V-cycle. Each grid has half the height and width of the
previous grid. A coarse cell is unknown if all of its four pixels are unknown. An unknown pixel that is in no unknown
cell is next to a known pixel. Such pixels are solved on the finer grid only. Smoothing converges fast for such pixels.

Simpler solvers do not suffice. A direct sparse solver would need SciPy. SciPy is not a dependency, and runs on the CPU
only. Without coarser grids, the number of conjugate gradient steps would grow with the width of the unknown areas. With
coarser grids, 4 to 7 steps are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradcam.errors import ImageError
from gradcam.evaluation.subject import describe_tensor, make_generator
from gradcam.options import check_number

TOLERANCE = 5e-4  # The solver stops when no pixel changes by more than this share of the image's range.
MAX_STEPS = 200  # Most images need 4 to 7 steps.
# The coarser grid cannot represent error components whose eigenvalues of 1 - B are in [1/2, 1]. Smoothing has to remove
# such components. These two Chebyshev step sizes are optimal for this interval.
SMOOTHING_STEPS = (1.0790085735592718, 1.744520838205434)
NOISE = 0.01
# Batches are small on a CPU, because the grids of larger batches do not fit in the CPU's cache.
BATCH_SIZE_ON_CPU, BATCH_SIZE_ON_GPU = 4, 64


def impute(images: Tensor, known: Tensor, *, noise: float = NOISE, generator: torch.Generator | None = None) -> Tensor:
    """Fill in unknown pixels by noisy linear imputation; known pixels stay unchanged.

    Each unknown pixel becomes the weighted mean of its eight neighbours, which may be known or unknown. The weights are
    1/6 for direct and 1/12 for diagonal neighbours. At the border, the weights of the existing neighbours are
    normalised. All equations are solved together. The error is at most 1/1000 of the range of known values. For images
    from -1 to 1, the error is at most a fifth of the default noise, and usually a hundredth of the noise. Finally,
    normally distributed noise is added to each unknown pixel. The input values of unknown pixels are ignored. If an
    image has no known pixels, all pixels become zero plus noise.

    Parameters
    ----------
    images : Tensor (N,C,H,W)
        The images, a floating-point tensor.
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
        The filled images, of the same type and device. The computation is in float32, or in float64 for float64 images.

    Raises
    ------
    ImageError
        If the images are not a floating-point tensor (N,C,H,W), or `known` is not a bool tensor (N,H,W).
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
        raise ImageError(f"The images are {describe_tensor(images)}, expected a floating-point tensor (N,C,H,W).")
    size = (len(images), *images.shape[2:])
    if not isinstance(known, Tensor) or known.dtype != torch.bool or known.shape != size:
        expected = f"torch.bool {size}: which pixels of each image are known"
        raise ImageError(f"known is {describe_tensor(known)}, expected {expected}.")
    check_number(noise, "noise", "a standard deviation: a number, 0 or more.")
    values = images.detach() if images.dtype == torch.float64 else images.detach().float()
    known = known.to(images.device)
    is_all_unknown = ~known.flatten(1).any(1)
    unknown = ~known & ~is_all_unknown[:, None, None]
    batch_size = BATCH_SIZE_ON_CPU if images.device.type == "cpu" else BATCH_SIZE_ON_GPU
    batches = zip(values.split(batch_size), unknown.split(batch_size))
    filled = torch.cat([fill(*batch) for batch in batches]).masked_fill_(is_all_unknown[:, None, None, None], 0)
    if noise:
        rng = make_generator(0, "imputation") if generator is None else generator
        sample = torch.randn(images.shape[1:], generator=rng, dtype=torch.float32, device=rng.device)
        filled.add_(sample.to(filled), alpha=noise)
    return torch.where(known[:, None], images.detach(), filled.to(images.dtype))


class _Grid:
    """One grid of the solver. `unknown` (N,1,h,w) is 1 at unknown pixels, else 0; `filter_sums` is B applied to 1."""

    def __init__(self, unknown: Tensor) -> None:
        self.unknown = unknown
        self.filter_sums = _add_neighbours(torch.ones_like(unknown[:1])) / 16
        self.inverse_sums = unknown / self.filter_sums
        self.weights = self.inverse_sums / 16

    def coarser(self) -> _Grid:
        pixels = _add_fours(torch.ones_like(self.unknown[:1]))  # If a length is odd, the last cells are smaller.
        return _Grid((_add_fours(self.unknown) == pixels).to(self.unknown))

    def residual(self, values: Tensor) -> Tensor:
        """Return, at unknown pixels, the mean of the neighbours minus the value; at known pixels, zero."""
        return _add_neighbours(values).mul_(self.weights).addcmul_(self.unknown, values, value=-1)

    def smooth(self, values: Tensor, offset: Tensor | None = None) -> None:
        """Move values in place towards the mean of their neighbours plus `offset`."""
        for step in SMOOTHING_STEPS:
            residual = self.residual(values)
            values.add_(residual if offset is None else residual.add_(offset), alpha=step)


def fill(images: Tensor, unknown: Tensor) -> Tensor:
    """Return images (N,C,H,W), float32 or float64, with the unknown pixels (N,H,W) filled in.

    Each image must have at least one known pixel.
    """
    grids = [_Grid(unknown[:, None].to(images.dtype))]
    while grids[-1].unknown.any():
        grids.append(grids[-1].coarser())
    values = _interpolate(images, grids)
    if len(grids) == 1:
        return values
    finest = grids[0]
    min_change = TOLERANCE * (values.amax((1, 2, 3), keepdim=True) - values.amin((1, 2, 3), keepdim=True))
    residual = finest.residual(values)
    direction, gain = torch.zeros_like(residual), torch.zeros((), dtype=images.dtype, device=images.device)
    is_active = torch.ones_like(min_change, dtype=torch.bool)
    for _ in range(MAX_STEPS):
        correction = _run_v_cycle(grids[:-1], residual)
        gain, last_gain = _dot(correction, residual, finest), gain
        direction = torch.addcmul(correction, direction, _divide(gain, last_gain))
        change = finest.residual(direction)
        step = torch.where(is_active, _divide(gain, -_dot(direction, change, finest)), 0)
        values.addcmul_(direction, step)
        residual.addcmul_(change, step)
        # Each image stops separately, so that the result does not depend on the other images of the batch.
        is_active &= (direction.abs().amax((2, 3), keepdim=True) * step).amax(1, keepdim=True) > min_change
        if not is_active.any():
            break
    return values


def _interpolate(images: Tensor, grids: Sequence[_Grid]) -> Tensor:
    """Return start values for the solver, interpolated grid by grid from the coarsest to the finest grid.

    On each grid, a cell gets the mean of its known pixels. A cell without known pixels gets the value of the coarser
    grid, and is then smoothed.
    """
    means = [images.masked_fill(grids[0].unknown > 0, 0)]
    counts = 1 - grids[0].unknown
    for _ in grids[1:]:
        finer_counts, counts = counts, _add_fours(counts)
        means.append(_add_fours(means[-1] * finer_counts) / counts.clamp(min=1))
    values = means.pop()
    for level, grid in reversed([*enumerate(grids[:-1])]):
        values = torch.addcmul(means[level] * (1 - grid.unknown), _enlarge(values, grid.unknown), grid.unknown)
        if level:  # Level 0, the finest grid, is smoothed later, by the first V-cycle.
            grid.smooth(values)
    return values


def _run_v_cycle(grids: Sequence[_Grid], residual: Tensor) -> Tensor:
    """Run one V-cycle; return a correction that approximately removes the residual, and is zero at known pixels."""
    grid = grids[0]
    values = residual * SMOOTHING_STEPS[1]
    values.add_(grid.residual(values).add_(residual), alpha=SMOOTHING_STEPS[0])
    if len(grids) > 1:
        remaining = grid.residual(values).add_(residual).mul_(grid.filter_sums)
        # The residual is a second difference. On a grid with twice the spacing, the same curvature therefore gives four
        # times the residual. For this reason, four pixels are added, not averaged.
        correction = _run_v_cycle(grids[1:], _add_fours(remaining).mul_(grids[1].inverse_sums))
        values.addcmul_(_enlarge(correction, grid.unknown), grid.unknown)
    grid.smooth(values, residual)
    return values


def _add_neighbours(values: Tensor) -> Tensor:
    rows = values * 2
    rows[..., 1:, :].add_(values[..., :-1, :])
    rows[..., :-1, :].add_(values[..., 1:, :])
    sums = rows * 2
    sums[..., 1:].add_(rows[..., :-1])
    sums[..., :-1].add_(rows[..., 1:])
    return sums


def _add_fours(values: Tensor) -> Tensor:
    height, width = values.shape[2:]
    if height % 2 or width % 2:
        values = nn.functional.pad(values, (0, width % 2, 0, height % 2))
    rows = values[..., ::2, :] + values[..., 1::2, :]
    return rows[..., ::2] + rows[..., 1::2]


def _enlarge(cells: Tensor, like: Tensor) -> Tensor:
    height, width = cells.shape[2:]
    rows = cells.new_empty(*cells.shape[:2], height, 2 * width)
    rows[..., ::2] = rows[..., 1::2] = cells
    pixels = cells.new_empty(*cells.shape[:2], 2 * height, 2 * width)
    pixels[..., ::2, :] = pixels[..., 1::2, :] = rows
    return pixels[..., : like.shape[2], : like.shape[3]]


def _dot(a: Tensor, b: Tensor, grid: _Grid) -> Tensor:
    """Return the inner product for each image and channel, weighted by `filter_sums` to make the solver symmetric."""
    return (a * grid.filter_sums).mul_(b).sum((2, 3), keepdim=True)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, or zero if b is not positive. With an exact solution, b is zero, and the step is zero as well."""
    return torch.where(b > 0, a / b, 0)
