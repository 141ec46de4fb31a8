"""Time Grad-CAM with models that gradcam loads, at each precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmark.cases import NETWORKS, PICTURE, ROOT, SUFFIXES, Case, build_model, make_case
from benchmark.contenders import BARE
from benchmark.measuring import Settings, keep_freed_memory, report_progress, take_turns, time_once
from benchmark.tables import Table, correlate, format_spread

PREPARED = ("fp32", "bf16")


def compare_precisions(settings: Settings) -> Iterator[Table]:
    """Compare Grad-CAM of loaded models, at each precision, with the forward pass of the original float32 model."""
    keep_freed_memory()
    for device in settings.devices:
        yield tabulate_precisions(["ResNet-50", "EfficientNet-Lite0"], device, settings)


def tabulate_precisions(networks: Sequence[str], device: str, settings: Settings) -> Table:
    title, rows, raw = f"Grad-CAM of loaded models, by precision ({device})", [], []
    for network in networks:
        models, layer = prepare_models(network, device), NETWORKS[network].layer
        correlations = {
            name: find_lowest_correlation(models["built"], models[name], layer, device) for name in PREPARED
        }
        for batch, rounds in settings.rounds.items():
            report_progress("precision", device, network, f"batch {batch}")
            seconds = time_precisions(models, make_case(models["built"], layer, batch, 1, device), rounds)
            cells = [f"{1000 * float(np.median(seconds[BARE])):.0f} ms"]
            cells += [format_spread(np.divide(seconds[name], seconds[BARE])) for name in models]
            cells += [f"{correlation:.4f}" for correlation in correlations.values()]
            rows.append([f"{network}, {layer}", str(batch), *cells])
            conditions = {"device": device, "network": network, "layer": layer, "batch": batch}
            raw.append({**conditions, "seconds": seconds, "correlations": correlations})
    header = ["network, layer", "batch", f"{BARE}, fp32", "as built, fp32", *(f"loaded, {name}" for name in PREPARED)]
    header += [f"correlation, {name}" for name in PREPARED]
    counts = ", ".join(f"{rounds} at batch {batch}" for batch, rounds in settings.rounds.items())
    notes = [
        f"Multiples of the forward pass alone in the same round: medians (with quartiles) over the rounds, {counts}.",
        "As built: contiguous memory format. Loaded: as `load_classifier` prepares its models.",
        "Correlation: the lowest over the photographs in assets/, between the maps and those of the model as built.",
        "ResNet-50 has random weights, EfficientNet-Lite0 trained ones.",
    ]
    return Table(f"precision {device}", title, header, rows, notes, raw)


def prepare_models(network: str, device: str) -> dict[str, nn.Module]:
    from gradcam.models.device import find_precision, prepare_model
    from gradcam.models.providers.embedded import load

    is_embedded = network == "EfficientNet-Lite0"
    built = load(network, None).model.eval().to(device) if is_embedded else build_model(network, device)
    prepared = {
        name: prepare_model(copy.deepcopy(built), torch.device(device), find_precision(name)) for name in PREPARED
    }
    return {"built": built, **prepared}


def time_precisions(models: dict[str, nn.Module], case: Case, rounds: int) -> dict[str, list[float]]:
    timed = {BARE: partial(time_once, BARE, case)}
    for name, model in models.items():
        images = case.images.to(next(model.parameters()).dtype)
        timed[name] = partial(time_once, "gradcam", replace(case, model=model, images=images))
    for call in timed.values():
        call()
    return take_turns(timed, rounds)


def find_lowest_correlation(built: nn.Module, prepared: nn.Module, layer: str, device: str) -> float:
    """Return the lowest correlation of two models' maps of a photograph. The first model's top class is explained."""
    import gradcam

    paths = sorted(path for path in (ROOT / PICTURE).parent.iterdir() if path.suffix in SUFFIXES)
    images = gradcam.load_classifier(device=device).batch([gradcam.read_image(path) for path in paths])
    full = gradcam.explain(built, images, layer)
    images = images.to(next(prepared.parameters()).dtype)
    half = gradcam.explain(prepared, images, layer, target=full.classes)
    return min(correlate(half_map, full_map) for half_map, full_map in zip(half.maps, full.maps))
