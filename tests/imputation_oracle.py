"""Compute noisy linear imputation without the noise: one equation per pixel, solved together in float64."""

import torch
from torch import Tensor

WEIGHTS = {(dy, dx): 1 / 6 if dy * dx == 0 else 1 / 12 for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0)}


def impute_exactly(image: Tensor, is_known: Tensor) -> Tensor:
    """Fill the unknown pixels of an image (C,H,W) with the weighted mean of their neighbours; `is_known` is (H,W)."""
    height, width = is_known.shape
    unknown = [(y, x) for y in range(height) for x in range(width) if not is_known[y, x]]
    numbers = {place: number for number, place in enumerate(unknown)}
    matrix = torch.zeros(len(unknown), len(unknown), dtype=torch.float64)
    right = torch.zeros(len(unknown), image.shape[0], dtype=torch.float64)
    values = image.double()
    for (y, x), number in numbers.items():
        around = {(y + dy, x + dx): weight for (dy, dx), weight in WEIGHTS.items()}
        around = {place: item for place, item in around.items() if 0 <= place[0] < height and 0 <= place[1] < width}
        matrix[number, number] = 1
        for place, weight in around.items():
            share = weight / sum(around.values())
            if place in numbers:
                matrix[number, numbers[place]] -= share
            else:
                right[number] += share * values[:, place[0], place[1]]
    actual = values.clone()
    actual[:, ~is_known] = torch.linalg.solve(matrix, right).T
    return actual
