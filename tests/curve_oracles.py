"""Metrics that hide pixels, written again from their papers: pixel by pixel, in NumPy's float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Picture = np.ndarray  # (C,H,W)
Score = Callable[[Picture], float]


def mirrored(place: int, length: int) -> int:
    if place < 0:
        return -place
    return 2 * (length - 1) - place if place >= length else place


def blurred(picture: Picture, radius: int) -> Picture:
    """Each pixel the mean of those around it, by a Gaussian as wide as its radius; borders are mirrored."""
    channels, height, width = picture.shape
    down, across = min(radius, height - 1), min(radius, width - 1)
    result = np.zeros(picture.shape)
    for channel in range(channels):
        for y in range(height):
            for x in range(width):
                total = weights = 0.0
                for dy in range(-down, down + 1):
                    for dx in range(-across, across + 1):
                        weight = math.exp(-(dy**2 + dx**2) / (2 * radius**2))
                        total += weight * picture[channel, mirrored(y + dy, height), mirrored(x + dx, width)]
                        weights += weight
                result[channel, y, x] = total / weights
    return result


def order(heatmap: np.ndarray) -> list[tuple[int, int]]:
    """The pixels of a map whose values are all different, the highest first."""
    values = {(y, x): float(heatmap[y, x]) for y in range(heatmap.shape[0]) for x in range(heatmap.shape[1])}
    assert len(set(values.values())) == len(values)
    return sorted(values, key=lambda place: -values[place])


def replaced(before: Picture, after: Picture, pixels: Sequence[tuple[int, int]]) -> Picture:
    result = before.copy()
    for y, x in pixels:
        result[:, y, x] = after[:, y, x]
    return result


def curve(before: Picture, after: Picture, heatmap: np.ndarray, steps: int, score: Score) -> tuple[list[float], float]:
    """The scores as pixels of `before` become those of `after`, and the area under them."""
    ordered = order(heatmap)
    counts = [math.floor(step * len(ordered) / steps + 0.5) for step in range(steps + 1)]
    scores = [score(replaced(before, after, ordered[:count])) for count in counts]
    area = 0.0
    for left, right in zip(range(steps), range(1, steps + 1)):
        width = (counts[right] - counts[left]) / len(ordered)
        area += width * (scores[left] + scores[right]) / 2
    return scores, area


def unit(heatmap: np.ndarray) -> np.ndarray:
    positive = np.maximum(heatmap, 0.0)
    return positive / positive.max() if positive.max() > 0 else positive


def change(picture: Picture, heatmap: np.ndarray, score: Score) -> tuple[float, float, float]:
    """Drop, increase and gain."""
    y, o = score(picture), score(picture * unit(heatmap))
    return max(0.0, y - o) / y, float(o > y), max(0.0, o - y) / (1 - y)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.flatten(), b.flatten()
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    together = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b))
    return together / math.sqrt(sum((p - mean_a) ** 2 for p in a) * sum((q - mean_b) ** 2 for q in b))
