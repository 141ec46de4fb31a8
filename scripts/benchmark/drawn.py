"""How faithful maps of boxes, masks and sentences are, where the truth is known: the models of drawn pictures in tests/."""

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
class Proof:
    """What is explained of one of the models, and the methods that are compared; the first is the one without a choice."""

    title: str
    model: str
    judge: Callable[..., Sequence[Any]]
    draw: Callable[[nn.Module], Sequence[Any]]
    methods: tuple[str, ...]
    layer: str | None = None
    has_others: bool = False


def list_proofs() -> list[Proof]:
    sys.path.insert(0, str(ROOT))  # where `tests` is a package
    from tests.drawn import measures

    def draw(model: nn.Module) -> Sequence[Any]:
        return list(measures.draw_scenes(SEED, COUNT))

    def draw_missed(model: nn.Module) -> Sequence[Any]:
        return list(measures.draw_missed(model, SEED, COUNT))

    def draw_three(model: nn.Module) -> Sequence[Any]:
        return [scene for alike in (False, True) for scene in measures.draw_three(SEED, COUNT // 2, alike=alike)]

    regions = ("hirescam", "gradcam", "layercam", "eigencam")
    usual = ("gradcam", "hirescam", "layercam", "eigencam")
    levels = ("hirescam", "layercam", "gradcam", "eigencam")
    attention = ("grad-eclip", "legrad", "gradient-rollout", "rollout", "gradcam", "eigencam")
    return [
        Proof("boxes, RetinaNet", "detector", measures.judge_boxes, draw, levels),
        Proof("missed boxes, RetinaNet", "detector", measures.judge_missed, draw_missed, levels),
        Proof("regions, U-Net", "segmenter", measures.judge_masks, draw, regions, "bottleneck"),
        Proof(
            "sentences, convolutional encoder",
            "convolutional",
            measures.judge_texts,
            draw_three,
            usual,
            has_others=True,
        ),
        Proof(
            "sentences, transformer encoder",
            "transformer",
            measures.judge_texts,
            draw_three,
            attention,
            has_others=True,
        ),
    ]


def compare_drawn(settings: Settings) -> Iterator[Table]:
    """On the processor: the numbers are not of time."""
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    for proof in list_proofs():
        for method, verdicts in measure(proof):
            energy, inside, right = summarise(verdicts)
            title = proof.title if method == proof.methods[0] else ""
            chosen = f"{right:.2f}" if proof.has_others else "-"
            rows.append([title, method, f"{energy:.2f}", f"{inside:.2f}", chosen, str(len(verdicts))])
            found = {"energy": energy, "maximum": inside, "right": right, "maps": len(verdicts)}
            raw.append({"what": proof.title, "method": method, **found})
    notes = [
        f"{COUNT} images, seed {SEED}, with backgrounds from photographs that the models were not trained with.",
        "Energy inside: the mean share of the map inside the box of the explained shape. Maximum inside: the share of maps "
        "with their maximum in that box. Correct of three: the share of maps with more energy in the box of the named shape "
        "than in the box of either other shape. The first method of each group is the default.",
    ]
    header = ["target", "method", "energy inside", "maximum inside", "correct of three", "maps"]
    yield Table("drawn", "Maps with known ground truth", header, rows, notes, raw)


def summarise(verdicts: Sequence[Any]) -> tuple[float, float, float]:
    """The mean energy inside, and the shares of maxima inside and of maps that are right."""
    energy, inside, right = zip(*((it.energy, it.is_inside, it.is_right) for it in verdicts))
    return sum(energy) / len(energy), sum(inside) / len(inside), sum(right) / len(right)


def measure(proof: Proof) -> Iterator[tuple[str, Sequence[Any]]]:
    """Each method with a verdict on each map."""
    from tests import drawn

    model = drawn.load(proof.model)
    scenes = proof.draw(model)
    for method in proof.methods:
        report_progress("drawn", proof.title, method)
        options = {} if proof.layer is None else {"layer": proof.layer}
        verdicts = proof.judge(model, scenes, method=method, **options)
        yield method, verdicts
