"""What it costs to judge maps: insertion and deletion beside their bare forward passes, ROAD beside grad-cam's."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from benchmark.measuring import Settings, keep_freed_memory, report_progress, synchronise, take_turns, time_call
from benchmark.pictures import make_pictures
from benchmark.tables import Table, correlate, format_spread

if TYPE_CHECKING:
    from gradcam.evaluation import Subject

LAYER = "layer4"  # of the embedded network
STEPS = 50
PERCENTILES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
AT_ONCE = {"cpu": 4, "cuda": 32}  # images in a batch of bare passes: on a processor larger ones take longer for each
PEER = "pytorch-grad-cam"
ROAD_PICTURES = 2  # the peer takes a quarter of a minute for each


@dataclass(frozen=True)
class Judged:
    """Pictures, the model that explains them, and their Grad-CAM heatmaps (N,H,W)."""

    model: nn.Module
    subject: Subject
    heatmaps: Tensor

    def first(self, count: int) -> Judged:
        from gradcam.evaluation import Subject

        subject = Subject(self.model, self.subject.images[:count], self.subject.classes[:count])
        return Judged(self.model, subject, self.heatmaps[:count])


def compare_evaluation(settings: Settings) -> Iterator[Table]:
    """Photographs, the embedded network, one method's maps."""
    keep_freed_memory()
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    for device in settings.devices:
        for batch, rounds in settings.rounds.items():
            judged = judge(batch, device)
            measured = [measure_curves(judged, device, rounds)]
            if PEER not in settings.missing:
                measured.append(measure_road(judged.first(ROAD_PICTURES), device, rounds))
            rows.extend(row for row, _ in measured)
            raw.extend(numbers for _, numbers in measured)
    rounds = ", ".join(map(str, settings.rounds.values()))
    at_once = ", ".join(f"{AT_ONCE[device]} ({device})" for device in settings.devices)
    notes = [
        f"Multiples of the baseline in the same round: medians (with quartiles) over {rounds} rounds. Batch size of "
        f"the forward passes: {at_once}.",
        f"ROAD: combined, percentiles {PERCENTILES[0]} to {PERCENTILES[-1]}, the same maps and images, 224 px. "
        "Correlation: of the probabilities from which the metric is computed; each library adds different noise.",
    ]
    yield Table(
        "evaluation", "Cost of evaluation", ["metrics", "device", "baseline", "gradcam", "agreement"], rows, notes, raw
    )


def judge(batch: int, device: str) -> Judged:
    import gradcam
    from gradcam.evaluation import Subject

    classifier = gradcam.load_classifier(device=device)
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(Path(folder) / "pictures", batch)
        files = sorted((Path(folder) / "pictures").iterdir())
        images = classifier.batch([gradcam.read_image(file) for file in files])
    subject = Subject(classifier.model, images)
    explained = gradcam.explain(classifier.model, images, LAYER, target=subject.classes[:, None], evidence="signed")
    return Judged(classifier.model, subject, explained.heatmaps[:, 0])


def measure_curves(judged: Judged, device: str, rounds: int) -> tuple[list[str], dict[str, object]]:
    """Insertion and deletion, beside as many variants as they look at, through the model and nothing else."""
    from gradcam.evaluation import deletion, insertion

    pictures = len(judged.heatmaps)
    variants, at_once = 2 * STEPS * pictures, AT_ONCE[device]
    report_progress("evaluation", device, f"insertion and deletion of {pictures} images")

    def bare() -> None:
        rows = judged.subject.images.repeat(-(-at_once // pictures), 1, 1, 1)[:at_once]
        with torch.no_grad():
            for start in range(0, variants, at_once):
                judged.model(rows[: variants - start])

    def ours() -> None:
        insertion(judged.subject, judged.heatmaps, steps=STEPS)
        deletion(judged.subject, judged.heatmaps, steps=STEPS)

    seconds = time_in_turns({"beside": bare, "gradcam": ours}, device, rounds)
    cells = [
        f"insertion and deletion, {pictures} images",
        device,
        f"{variants} forward passes, {float(np.median(seconds['beside'])):.1f} s",
        format_spread(np.divide(seconds["gradcam"], seconds["beside"])),
        "-",
    ]
    return cells, {"metric": "insertion, deletion", "device": device, "pictures": pictures, "seconds": seconds}


def measure_road(judged: Judged, device: str, rounds: int) -> tuple[list[str], dict[str, object]]:
    from gradcam.evaluation import road

    pictures = len(judged.heatmaps)
    report_progress("evaluation", device, f"ROAD of {pictures} images")
    shares = [1 - percentile / 100 for percentile in PERCENTILES]
    ours = partial(road, judged.subject, judged.heatmaps, shares=shares)
    seconds = time_in_turns({"beside": partial(run_peer, judged), "gradcam": ours}, device, rounds)
    found = ours()
    most, least = run_peer(judged)
    agreement = correlate(torch.cat([found.most, found.least]).cpu(), torch.cat([most, least]))
    combined = (least - most).mean(1) / 2
    apart = float((found.combined.cpu() - combined).abs().max())
    cells = [
        f"ROAD, {pictures} images",
        device,
        f"{PEER}, {float(np.median(seconds['beside'])):.1f} s",
        format_spread(np.divide(seconds["gradcam"], seconds["beside"])),
        f"correlation {agreement:.4f}, combined within {apart:.3f}",
    ]
    return cells, {"metric": "road", "device": device, "pictures": pictures, "seconds": seconds}


def run_peer(judged: Judged) -> tuple[Tensor, Tensor]:
    """What its ROADCombined averages, as it computes it: probabilities (N,S), most and least relevant first."""
    from pytorch_grad_cam.metrics.road import ROADLeastRelevantFirst, ROADMostRelevantFirst
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget

    subject, maps = judged.subject, judged.heatmaps.cpu().numpy()
    targets = [ClassifierOutputSoftmaxTarget(index) for index in subject.classes.tolist()]

    def remove(first: Callable[[int], Callable[..., np.ndarray]]) -> Tensor:
        changes = [first(it)(subject.images, maps, targets, judged.model) for it in PERCENTILES]
        return torch.from_numpy(np.stack(changes, 1)) + subject.probabilities.cpu()[:, None]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about how it is called
        return remove(ROADMostRelevantFirst), remove(ROADLeastRelevantFirst)


def time_in_turns(calls: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    def timed(call: Callable[[], object]) -> float:
        def run() -> None:
            call()
            synchronise(device)

        synchronise(device)
        return time_call(run)

    return take_turns({name: partial(timed, call) for name, call in calls.items()}, rounds)
