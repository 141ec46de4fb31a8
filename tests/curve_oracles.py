"""Compute metrics that hide pixels as in their papers: pixel by pixel, in NumPy's float64."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.signal import convolve2d

Picture = np.ndarray  # (C,H,W)
Score = Callable[[Picture], float]


def blurred(picture: Picture, radius: int) -> Picture:
    """Blur an image like RISE's code (radius 5 there): zero padding, and an impulse becomes the kernel."""
    point = np.zeros((2 * radius + 1, 2 * radius + 1))
    point[radius, radius] = 1
    kernel = gaussian_filter(point, radius)
    return np.stack([convolve2d(channel, kernel, mode="same") for channel in picture])


def order(heatmap: np.ndarray) -> list[tuple[int, int]]:
    """Return the pixels of a map with distinct values, the highest first."""
    values = {(y, x): float(heatmap[y, x]) for y in range(heatmap.shape[0]) for x in range(heatmap.shape[1])}
    assert len(set(values.values())) == len(values)
    return sorted(values, key=lambda place: -values[place])


def replaced(before: Picture, after: Picture, pixels: Sequence[tuple[int, int]]) -> Picture:
    result = before.copy()
    for y, x in pixels:
        result[:, y, x] = after[:, y, x]
    return result


def curve(before: Picture, after: Picture, heatmap: np.ndarray, steps: int, score: Score) -> tuple[list[float], float]:
    """Return the scores while pixels of `before` are replaced by those of `after`, and the area under the curve."""
    ordered = order(heatmap)
    counts = [math.floor(step * len(ordered) / steps + 0.5) for step in range(steps + 1)]
    scores = [score(replaced(before, after, ordered[:count])) for count in counts]
    area = 0.0
    for start, end in zip(range(steps), range(1, steps + 1)):
        width = (counts[end] - counts[start]) / len(ordered)
        area += width * (scores[start] + scores[end]) / 2
    return scores, area


def rise_area(before: Picture, after: Picture, heatmap: np.ndarray, score: Score) -> float:
    """Return the area as RISE's code computes it: one image width of pixels per step, and equal step widths."""
    picture, ordered, step = before.copy(), order(heatmap), heatmap.shape[1]
    scores = [score(picture)]
    for start in range(0, len(ordered), step):
        for y, x in ordered[start : start + step]:
            picture[:, y, x] = after[:, y, x]
        scores.append(score(picture))
    return (sum(scores) - scores[0] / 2 - scores[-1] / 2) / (len(scores) - 1)


def unit(heatmap: np.ndarray) -> np.ndarray:
    positive = np.maximum(heatmap, 0.0)
    return positive / positive.max() if positive.max() > 0 else positive


def change(picture: Picture, heatmap: np.ndarray, score: Score) -> tuple[float, float, float]:
    y, o = score(picture), score(picture * unit(heatmap))
    return max(0.0, y - o) / y, float(o > y), max(0.0, o - y) / (1 - y)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.flatten(), b.flatten()
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    together = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b))
    return together / math.sqrt(sum((p - mean_a) ** 2 for p in a) * sum((q - mean_b) ** 2 for q in b))
