"""Evaluate maps of boxes, masks and sentences on the generated images of tests/drawn, whose ground truth is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

if TYPE_CHECKING:
    from torch import nn

SEED, COUNT = 31337, 100


@dataclass(frozen=True)
class GroundTruthTest:
    """A model, a kind of target, and the methods to compare. The first method is the default."""

    title: str
    model: str
    judge: Callable[..., Sequence[Any]]
    draw: Callable[[nn.Module], Sequence[Any]]
    methods: tuple[str, ...]
    layer: str | None = None
    has_others: bool = False


def list_tests() -> list[GroundTruthTest]:
    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    from tests.drawn import measures, pictures

    def draw(model: nn.Module) -> Sequence[Any]:
        return list(pictures.draw_scenes(SEED, COUNT))

    def draw_missed(model: nn.Module) -> Sequence[Any]:
        return list(measures.draw_missed(model, SEED, COUNT))

    def draw_three(model: nn.Module) -> Sequence[Any]:
        return [scene for alike in (False, True) for scene in measures.draw_three(SEED, COUNT // 2, alike=alike)]

    segmentation = ("hirescam", "gradcam", "layercam", "eigencam")
    convolutional = ("gradcam", "hirescam", "layercam", "eigencam")
    pyramid = ("hirescam", "layercam", "gradcam", "eigencam")
    attention = ("grad-eclip", "legrad", "gradient-rollout", "rollout", "gradcam", "eigencam")
    return [
        GroundTruthTest("boxes, RetinaNet", "detector", measures.judge_boxes, draw, pyramid),
        GroundTruthTest("missed boxes, RetinaNet", "detector", measures.judge_missed, draw_missed, pyramid),
        GroundTruthTest("masks, U-Net", "segmenter", measures.judge_masks, draw, segmentation, "bottleneck"),
        GroundTruthTest(
            "sentences, convolutional encoder",
            "convolutional",
            measures.judge_texts,
            draw_three,
            convolutional,
            has_others=True,
        ),
        GroundTruthTest(
            "sentences, transformer encoder",
            "transformer",
            measures.judge_texts,
            draw_three,
            attention,
            has_others=True,
        ),
    ]


def compare_drawn(settings: Settings) -> Iterator[Table]:
    """Evaluate the maps, on the CPU only, because no time is measured."""
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    for test in list_tests():
        for method, verdicts in measure(test):
            energy, inside, right = summarise(verdicts)
            title = test.title if method == test.methods[0] else ""
            right_share = f"{right:.2f}" if test.has_others else "-"
            rows.append([title, method, f"{energy:.2f}", f"{inside:.2f}", right_share, str(len(verdicts))])
            figures = {"energy": energy, "maximum": inside, "right": right, "maps": len(verdicts)}
            raw.append({"what": test.title, "method": method, **figures})
    notes = [
        f"{COUNT} images, seed {SEED}, with backgrounds from photographs that the models were not trained with.",
        "Energy inside: the mean share of the map inside the box of the explained shape. Maximum inside: the share of maps "
        "with their maximum in that box. Correct of three: the share of maps with more energy in the box of the named shape "
        "than in the box of either other shape. For each target, the first method is the default.",
    ]
    header = ["target", "method", "energy inside", "maximum inside", "correct of three", "maps"]
    yield Table("drawn", "Maps with known ground truth", header, rows, notes, raw)


def summarise(verdicts: Sequence[Any]) -> tuple[float, float, float]:
    """Return the mean energy in the box, the share of maxima in the box, and the share of maps with the right shape."""
    energy, inside, right = zip(*((verdict.energy, verdict.is_inside, verdict.is_right) for verdict in verdicts))
    return sum(energy) / len(energy), sum(inside) / len(inside), sum(right) / len(right)


def measure(test: GroundTruthTest) -> Iterator[tuple[str, Sequence[Any]]]:
    """Evaluate each method, and yield its name and the verdicts on its maps."""
    from tests import drawn

    model = drawn.load(test.model)
    scenes = test.draw(model)
    for method in test.methods:
        report_progress("drawn", test.title, method)
        options = {} if test.layer is None else {"layer": test.layer}
        verdicts = test.judge(model, scenes, method=method, **options)
        yield method, verdicts
