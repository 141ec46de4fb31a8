"""Measure the peak memory of a call, above the memory in use before the call."""

from __future__ import annotations

from collections.abc import Iterator

from benchmark.cases import MEGABYTE, NETWORKS
from benchmark.contenders import CONTENDERS
from benchmark.measuring import STATUS, Settings, call_in_fresh_process, measure_peak, report_progress
from benchmark.tables import Table, describe_contenders


def compare_memory(settings: Settings) -> Iterator[Table]:
    """Measure the peak memory of a call that explains one class of each image."""
    for device in settings.devices:
        title = f"Peak memory above the memory in use before, one class of each image ({device})"
        if device == "cpu" and not STATUS.exists():
            yield Table(f"memory {device}", title, notes=["Skipped: it needs Linux's /proc."])
        else:
            yield tabulate_memory(title, "ResNet-50", device, settings)


def tabulate_memory(title: str, network: str, device: str, settings: Settings) -> Table:
    rows, raw = [], []
    for batch in settings.rounds:
        peaks: dict[str, int] = {}
        for name in settings.present:
            report_progress("memory", device, network, f"batch {batch}", name)
            peaks[name] = call_in_fresh_process(measure_peak, name, network, batch, device, settings.threads)
        cells = [f"{peaks[name] / MEGABYTE:.0f} MB" if name in peaks else "not measured" for name in CONTENDERS]
        rows.append([f"{network}, {NETWORKS[network].layer}", str(batch), *cells])
        raw.append({"device": device, "network": network, "batch": batch, "bytes": peaks})
    memory_kind = "resident memory" if device == "cpu" else "memory allocated on the device"
    notes = [f"Peak {memory_kind} during the call, minus that just before it. Each library runs in a separate process."]
    notes += ["The C library returns large freed blocks to the system at once."] if device == "cpu" else []
    notes += describe_contenders(settings)
    return Table(f"memory {device}", title, ["network, layer", "batch", *CONTENDERS], rows, notes, raw)
