"""Compare insertion and deletion with bare forward passes, and ROAD with pytorch-grad-cam's ROAD."""

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
from benchmark.pictures import make_image_files
from benchmark.tables import Table, correlate, format_spread

if TYPE_CHECKING:
    from gradcam.evaluation import Subject

LAYER = "layer4"  # The target layer of the embedded model.
STEPS = 50
PERCENTILES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
BATCH_SIZES = {"cpu": 4, "cuda": 32}  # For bare passes. On a CPU, larger batches are slower per image.
PEER = "pytorch-grad-cam"
ROAD_PICTURES = 2  # ROAD of pytorch-grad-cam takes 15 seconds per image.


@dataclass(frozen=True)
class EvaluationInput:
    """A model, images, and the model's Grad-CAM heatmaps (N,H,W) of these images."""

    model: nn.Module
    subject: Subject
    heatmaps: Tensor

    def first(self, count: int) -> EvaluationInput:
        from gradcam.evaluation import Subject

        subject = Subject(self.model, self.subject.images[:count], self.subject.classes[:count])
        return EvaluationInput(self.model, subject, self.heatmaps[:count])


def compare_evaluation(settings: Settings) -> Iterator[Table]:
    """Time the evaluation of Grad-CAM maps of the embedded model, on photographs."""
    keep_freed_memory()
    rows: list[list[str]] = []
    raw: list[dict[str, object]] = []
    for device in settings.devices:
        for batch, rounds in settings.rounds.items():
            inputs = prepare_input(batch, device)
            results = [measure_curves(inputs, device, rounds)]
            if PEER not in settings.missing:
                results.append(measure_road(inputs.first(ROAD_PICTURES), device, rounds))
            rows.extend(row for row, _ in results)
            raw.extend(numbers for _, numbers in results)
    rounds = ", ".join(map(str, settings.rounds.values()))
    batch_sizes = ", ".join(f"{BATCH_SIZES[device]} ({device})" for device in settings.devices)
    notes = [
        f"Multiples of the baseline in the same round: medians (with quartiles) over {rounds} rounds. Batch size of "
        f"the forward passes: {batch_sizes}.",
        f"ROAD: combined, percentiles {PERCENTILES[0]} to {PERCENTILES[-1]}, the same maps and images, 224 px. "
        "Correlation: of the probabilities from which the metric is computed; each library adds different noise.",
    ]
    yield Table(
        "evaluation", "Cost of evaluation", ["metrics", "device", "baseline", "gradcam", "agreement"], rows, notes, raw
    )


def prepare_input(batch: int, device: str) -> EvaluationInput:
    import gradcam
    from gradcam.evaluation import Subject

    classifier = gradcam.load_classifier(device=device)
    with tempfile.TemporaryDirectory() as folder:
        make_image_files(Path(folder) / "pictures", batch)
        files = sorted((Path(folder) / "pictures").iterdir())
        images = classifier.batch([gradcam.read_image(file) for file in files])
    subject = Subject(classifier.model, images)
    explained = gradcam.explain(classifier.model, images, LAYER, target=subject.classes[:, None], evidence="signed")
    return EvaluationInput(classifier.model, subject, explained.heatmaps[:, 0])


def measure_curves(inputs: EvaluationInput, device: str, rounds: int) -> tuple[list[str], dict[str, object]]:
    """Time insertion and deletion, and the bare forward passes for the same number of images."""
    from gradcam.evaluation import deletion, insertion

    pictures = len(inputs.heatmaps)
    variants, batch_size = 2 * STEPS * pictures, BATCH_SIZES[device]
    report_progress("evaluation", device, f"insertion and deletion of {pictures} images")

    def run_bare() -> None:
        rows = inputs.subject.images.repeat(-(-batch_size // pictures), 1, 1, 1)[:batch_size]
        with torch.no_grad():
            for start in range(0, variants, batch_size):
                inputs.model(rows[: variants - start])

    def run_metrics() -> None:
        insertion(inputs.subject, inputs.heatmaps, steps=STEPS)
        deletion(inputs.subject, inputs.heatmaps, steps=STEPS)

    seconds = time_in_turns({"beside": run_bare, "gradcam": run_metrics}, device, rounds)
    cells = [
        f"insertion and deletion, {pictures} images",
        device,
        f"{variants} forward passes, {float(np.median(seconds['beside'])):.1f} s",
        format_spread(np.divide(seconds["gradcam"], seconds["beside"])),
        "-",
    ]
    return cells, {"metric": "insertion, deletion", "device": device, "pictures": pictures, "seconds": seconds}


def measure_road(inputs: EvaluationInput, device: str, rounds: int) -> tuple[list[str], dict[str, object]]:
    from gradcam.evaluation import road

    pictures = len(inputs.heatmaps)
    report_progress("evaluation", device, f"ROAD of {pictures} images")
    shares = [1 - percentile / 100 for percentile in PERCENTILES]
    run_road = partial(road, inputs.subject, inputs.heatmaps, shares=shares)
    seconds = time_in_turns({"beside": partial(run_peer, inputs), "gradcam": run_road}, device, rounds)
    road_scores = run_road()
    morf, lerf = run_peer(inputs)
    agreement = correlate(torch.cat([road_scores.most, road_scores.least]).cpu(), torch.cat([morf, lerf]))
    combined = (lerf - morf).mean(1) / 2
    difference = float((road_scores.combined.cpu() - combined).abs().max())
    cells = [
        f"ROAD, {pictures} images",
        device,
        f"{PEER}, {float(np.median(seconds['beside'])):.1f} s",
        format_spread(np.divide(seconds["gradcam"], seconds["beside"])),
        f"correlation {agreement:.4f}, combined within {difference:.3f}",
    ]
    return cells, {"metric": "road", "device": device, "pictures": pictures, "seconds": seconds}


def run_peer(inputs: EvaluationInput) -> tuple[Tensor, Tensor]:
    """Return the probabilities (N,S) that pytorch-grad-cam's ROADCombined averages, for both orders of removal."""
    from pytorch_grad_cam.metrics.road import ROADLeastRelevantFirst, ROADMostRelevantFirst
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget

    subject, maps = inputs.subject, inputs.heatmaps.cpu().numpy()
    targets = [ClassifierOutputSoftmaxTarget(index) for index in subject.classes.tolist()]

    def remove(metric: Callable[[int], Callable[..., np.ndarray]]) -> Tensor:
        changes = [metric(percentile)(subject.images, maps, targets, inputs.model) for percentile in PERCENTILES]
        return torch.from_numpy(np.stack(changes, 1)) + subject.probabilities.cpu()[:, None]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pytorch-grad-cam causes warnings of NumPy.
        return remove(ROADMostRelevantFirst), remove(ROADLeastRelevantFirst)


def time_in_turns(calls: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    def time_synchronised(call: Callable[[], object]) -> float:
        def run() -> None:
            call()
            synchronise(device)

        synchronise(device)
        return time_call(run)

    return take_turns({name: partial(time_synchronised, call) for name, call in calls.items()}, rounds)
