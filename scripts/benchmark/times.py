"""Measure the time of Grad-CAM as a multiple of the bare forward pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torchvision

import gradcam
from benchmark.cases import NETWORKS, SEED, TRANSFORMERS, Case, build_model, make_case
from benchmark.contenders import BARE, CONTENDERS, HOOK, attach
from benchmark.measuring import Settings, keep_freed_memory, report_progress, time_rounds
from benchmark.tables import Table, describe_contenders, format_ratios


def compare_times(settings: Settings) -> Iterator[Table]:
    """Compare the contenders for one class per image."""
    cases = [(name, network.layer) for name, network in NETWORKS.items()]
    for device in settings.devices:
        yield tabulate_times(cases, 1, device, settings, key="time", title="Grad-CAM, one class of each image")


def compare_classes(settings: Settings) -> Iterator[Table]:
    """Compare the contenders for twenty classes per image. gradcam needs one call, other libraries need a loop."""
    note = (
        "gradcam explains all classes in one call. The other libraries need a loop: pytorch-grad-cam and captum repeat the "
        "forward pass for each class, torchcam repeats only the backward pass."
    )
    cases = [(name, layer) for name, network in NETWORKS.items() for layer in (network.layer, network.last) if layer]
    for device in settings.devices:
        yield tabulate_times(
            cases, 20, device, settings, note, key="classes", title="Grad-CAM, 20 classes of each image"
        )


def compare_transformers(settings: Settings) -> Iterator[Table]:
    """Compare the contenders for one class per image, with transformers whose layers are not channels-first."""
    note = "torchcam and captum support only layers with channels first."
    contenders = (BARE, "gradcam", "pytorch-grad-cam")
    cases = [(name, network.layer) for name, network in TRANSFORMERS.items()]
    for device in settings.devices:
        yield tabulate_times(
            cases,
            1,
            device,
            settings,
            note,
            key="transformers",
            title="Grad-CAM on transformers, one class",
            contenders=contenders,
        )


FIXED = ("resnet18", "mobilenet_v2", "efficientnet_b0")
FIXED_SIDE = 64  # In pixels. In larger images, the forward pass hides the difference.


def compare_fixed(settings: Settings) -> Iterator[Table]:
    """Measure the CPU time that a call needs beyond a bare forward pass, with batch size 1 and one thread."""
    names = (HOOK, "by hand", "gradcam", "gradcam, default layer", "torchcam", "captum")
    names = tuple(name for name in names if name.partition(",")[0] not in settings.missing)
    rows, raw = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in FIXED:
            case = make_fixed_case(name)
            bare = partial(call_once, BARE, case)
            calls = {contender: partial(call_once, contender, case) for contender in names}
            for call in (bare, *calls.values()):
                call(), call()
            overhead: dict[str, list[float]] = {contender: [] for contender in names}
            for number in range(settings.rounds[1]):
                report_progress(f"fixed, {name}, {number + 1} of {settings.rounds[1]}")
                for contender, call in calls.items():
                    overhead[contender].append(call() - bare())
            medians = {contender: median(seconds) for contender, seconds in overhead.items()}
            ratios = {contender: seconds / medians[HOOK] for contender, seconds in medians.items()}
            rows.append(
                [name, *(f"{1e3 * medians[contender]:.2f} ms ({ratios[contender]:.2f})" for contender in names)]
            )
            raw.append({"network": name, "over the bare pass": overhead})
    finally:
        torch.set_num_threads(threads)
    notes = [
        f"Median of {settings.rounds[1]} pairs with the forward pass alone, one image of {FIXED_SIDE} x {FIXED_SIDE}, one "
        "thread. CPU time of a call minus that of the forward pass, and as a multiple of the forward hook's. The first call "
        "with a default layer takes two more forward passes.",
    ]
    yield Table("fixed cpu", "Fixed cost of a call (cpu)", ["network", *names], rows, notes, raw)


def make_fixed_case(name: str) -> Case:
    """Return a case with a small image, a torchvision network, and the network's last layer with a grid."""
    model = torchvision.models.get_model(name, weights=None).eval()
    images = torch.rand(1, 3, FIXED_SIDE, FIXED_SIDE, generator=torch.Generator().manual_seed(SEED))
    layer = "layer4" if name == "resnet18" else "features"
    return Case(model, layer, images, [[1]])


def call_once(contender: str, case: Case) -> float:
    """Return the CPU seconds of one call."""
    name, _, is_default = contender.partition(", ")
    if is_default:
        start = time.process_time()
        gradcam.explain(case.model, case.images, target=case.classes)
        return time.process_time() - start
    with attach(name, case) as call:
        start = time.process_time()
        call()
        return time.process_time() - start


def tabulate_times(
    cases: Sequence[tuple[str, str]],
    classes: int,
    device: str,
    settings: Settings,
    *remarks: str,
    key: str,
    title: str,
    contenders: Sequence[str] = tuple(CONTENDERS),
) -> Table:
    """Time the contenders that support the cases. Each case is a pair (network, layer)."""
    keep_freed_memory()
    settings = replace(settings, missing=settings.missing | (set(CONTENDERS) - set(contenders)))
    rows, raw = [], []
    for network, layer in cases:
        model = build_model(network, device)
        for batch, rounds in settings.rounds.items():
            report_progress(title, device, network, layer, f"batch {batch}")
            to_grid = (NETWORKS | TRANSFORMERS)[network].to_grid
            case = make_case(model, layer, batch, classes, device, to_grid=to_grid)
            seconds = time_rounds(settings.present, case, rounds)
            rows.append([f"{network}, {layer}", str(batch), *format_ratios(seconds, contenders)])
            conditions = {"device": device, "network": network, "layer": layer, "batch": batch, "classes": classes}
            raw.append({**conditions, "seconds": seconds})
    counts = ", ".join(f"{rounds} at batch {batch}" for batch, rounds in settings.rounds.items())
    method = (
        f"Multiples of the forward pass alone in the same round: medians (with quartiles) over the rounds, {counts}."
    )
    allocation = ["The C library keeps freed memory, so that no library pays for allocating it again."]
    notes = [method, *(allocation if device == "cpu" else []), *remarks, *describe_contenders(settings)]
    return Table(f"{key} {device}", f"{title} ({device})", ["network, layer", "batch", *contenders], rows, notes, raw)
