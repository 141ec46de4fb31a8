"""Grad-CAM, in multiples of the bare forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmark.cases import NETWORKS, TRANSFORMERS, build_model, make_case
from benchmark.contenders import BARE, CONTENDERS
from benchmark.measuring import Settings, keep_freed_memory, report_progress, time_rounds
from benchmark.tables import Table, describe_contenders, format_ratios


def compare_times(settings: Settings) -> Iterator[Table]:
    """One class of each image."""
    cases = [(name, network.layer) for name, network in NETWORKS.items()]
    for device in settings.devices:
        yield tabulate_times(cases, 1, device, settings, key="time", title="Grad-CAM, one class of each image")


def compare_classes(settings: Settings) -> Iterator[Table]:
    """Twenty classes of each image: one call of ours, a loop of the peers'."""
    note = (
        "gradcam explains all classes in one call. Peers' users loop: pytorch-grad-cam and captum repeat the forward "
        "pass for each class, torchcam repeats the backward pass alone."
    )
    cases = [(name, layer) for name, network in NETWORKS.items() for layer in (network.layer, network.last) if layer]
    for device in settings.devices:
        yield tabulate_times(
            cases, 20, device, settings, note, key="classes", title="Grad-CAM, 20 classes of each image"
        )


def compare_transformers(settings: Settings) -> Iterator[Table]:
    """One class of each image, on networks whose layers do not give channels first."""
    note = "Only who is told, or finds out, how tokens lie on the picture: the others know channels first alone."
    among = (BARE, "gradcam", "pytorch-grad-cam")
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
            among=among,
        )


def tabulate_times(
    cases: Sequence[tuple[str, str]],
    classes: int,
    device: str,
    settings: Settings,
    *remarks: str,
    key: str,
    title: str,
    among: Sequence[str] = tuple(CONTENDERS),
) -> Table:
    """`cases`: networks, each with a layer of it; `among`: the contenders that can be measured on them."""
    keep_freed_memory()
    settings = replace(settings, missing=settings.missing | (set(CONTENDERS) - set(among)))
    rows, raw = [], []
    for network, layer in cases:
        model = build_model(network, device)
        for batch, rounds in settings.rounds.items():
            report_progress(title, device, network, layer, f"batch {batch}")
            to_grid = (NETWORKS | TRANSFORMERS)[network].to_grid
            case = make_case(model, layer, batch, classes, device, to_grid=to_grid)
            seconds = time_rounds(settings.present, case, rounds)
            rows.append([f"{network}, {layer}", str(batch), *format_ratios(seconds, among)])
            what = {"device": device, "network": network, "layer": layer, "batch": batch, "classes": classes}
            raw.append({**what, "seconds": seconds})
    counts = ", ".join(f"{rounds} at batch {batch}" for batch, rounds in settings.rounds.items())
    method = (
        f"Multiples of the bare forward pass in the same round: medians (with quartiles) over the rounds, {counts}."
    )
    allocation = ["The C library is told to keep freed memory, so that none pays for taking it again."]
    notes = [method, *(allocation if device == "cpu" else []), *remarks, *describe_contenders(settings)]
    return Table(f"{key} {device}", f"{title} ({device})", ["network, layer", "batch", *among], rows, notes, raw)
