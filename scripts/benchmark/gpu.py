"""Measure on a GPU: the fixed cost of a call, a folder of images, the peak memory, and each stage alone.

The tables are in the order of their importance, and each is printed as soon as it is measured. After `LIMIT_S` seconds,
no further measurement starts.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmark.cases import CLASSES, MEGABYTE, NETWORKS, SMALL_NETWORKS, Case, build_model, make_case
from benchmark.contenders import BARE, HOOK, attach
from benchmark.floor import make_request
from benchmark.folder import run_once
from benchmark.loops import LAYER, NETWORK, load_ours, run_pipeline
from benchmark.measuring import Settings, keep_freed_memory, report_progress, synchronise, take_turns, time_rounds
from benchmark.pictures import HEIGHT, QUALITY, WIDTH, link_image_files, make_image_files
from benchmark.tables import Table, format_spread
from benchmark.throughput import time_processes

PICTURES, FILES = 1000, 64  # The number of images, and the number of distinct files.
BATCH, FOLDER_ROUNDS = 32, 3
LIMIT_S = 540  # Seconds, counted from the start of the section.
PROCESSES = (
    ("bf16", "cpu", 4),
    ("bf16", "cpu", 8),
    ("bf16", "device", 4),
    ("fp32", "cpu", 4),
    ("fp32", "cpu", 8),
    ("fp32", "device", 4),
)
# With a few threads, Python's global interpreter lock passes less often between the model's thread and other threads.
WORKERS = (2, 4)
COLUMNS = (BARE, HOOK, "gradcam", "torchcam", "captum")
FIXED = ("ResNet-18", "ResNet-50", "MobileNetV2")
# A network whose stages before the layer also run as CUDA graphs: its name, the title of its row, and the stages.
GRAPHED = ("ResNet-50", "ResNet-50 with CUDA graphs before the layer", ("layer1", "layer2", "layer3"))
NOT_MEASURED = "not measured"
NO_GPU = (
    "There is no CUDA device, or --device excludes it: nothing was measured. `--pictures N` tests this section on the CPU, "
    "with N images."
)
TRIAL = "A test on the CPU in place of a GPU: these are not GPU figures."


def compare_gpu(settings: Settings) -> Iterator[Table]:
    """Run all measurements on a GPU. If there is no GPU, yield a note, or test the section on the CPU."""
    device = "cuda" if "cuda" in settings.devices else "cpu"
    if device == "cpu" and settings.pictures is None:
        yield Table("gpu cuda", "On a GPU", notes=[NO_GPU])
        return
    keep_freed_memory()
    notes = [TRIAL] if device == "cpu" else [f"On one {torch.cuda.get_device_name()}."]
    end = time.monotonic() + LIMIT_S

    def has_time() -> bool:
        return time.monotonic() < end

    yield tabulate_fixed(device, settings, notes)
    yield tabulate_calls(device, settings, notes)
    if has_time():
        yield from measure_folder(device, settings.pictures or PICTURES, settings, notes, has_time)


def measure_folder(
    device: str, pictures: int, settings: Settings, notes: list[str], has_time: Callable[[], bool]
) -> Iterator[Table]:
    """Measure images per second by precision and decoding device, peak memory, and upper bounds of the speed."""
    precisions = ["fp32", "bf16"] if device == "cuda" else ["fp32"]
    rounds = FOLDER_ROUNDS if device == "cuda" else 1
    batch = min(BATCH, pictures)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_image_files(folder / "some", min(FILES, pictures))
        link_image_files(folder / "some", folder / "pictures", pictures)
        models = {precision: load_ours(precision, device) for precision in precisions}
        runs: dict[str, Callable[[], float]] = {}
        peaks: dict[str, int | None] = {}
        for precision, model in models.items():
            peaks[f"{precision}, forward pass alone"] = find_peak(device, partial(infer, model, batch))
            for pixels in ("device", "cpu"):
                name = name_run(precision, pixels)
                report_progress("gpu", name, "once")
                run = partial(run_pipeline, model, batch=batch, pixels=pixels)
                peaks[name] = find_peak(device, partial(run_once, run, folder / "some", folder))
                runs[name] = partial(run_once, run, folder / "pictures", folder)
        yield tabulate_peaks(peaks, batch, notes)
        if not has_time():
            return
        for workers in WORKERS if device == "cuda" else ():
            run = partial(run_pipeline, models["bf16"], batch=batch, pixels="device", workers=workers)
            runs[f"{name_run('bf16', 'device')}, {workers} threads"] = partial(
                run_once, run, folder / "pictures", folder
            )
        report_progress("gpu", f"{rounds} rounds of {len(runs)}")
        seconds = take_turns(runs, rounds)
        files = sorted((folder / "pictures").iterdir())
        if has_time():
            stages = {name: measure_stages(model, files, folder, batch, rounds) for name, model in models.items()}
            yield tabulate_floor(stages, notes)
        for precision, pixels, count in PROCESSES if device == "cuda" else ():
            name = f"{name_run(precision, pixels)}, {count} processes"
            report_progress("gpu", name)
            if has_time():
                seconds[name] = time_processes(
                    folder, device, count, rounds, images=pictures, precision=precision, pixels=pixels
                )
    yield tabulate_folder(seconds, pictures, batch, rounds, notes)


def name_run(precision: str, pixels: str) -> str:
    return f"{precision}, pixels on the {'GPU' if pixels == 'device' else 'CPU'}"


def infer(classifier: Any, batch: int) -> None:
    case = make_case(classifier.model, LAYER, batch, 1, str(classifier.device))
    dtype = next(classifier.model.parameters()).dtype
    with torch.no_grad():
        classifier.model(case.images.to(dtype))


def find_peak(device: str, work: Callable[[], object]) -> int | None:
    """Return the peak memory of `work` on the device, in bytes above the memory in use before. Return None on a CPU."""
    if device != "cuda":
        work()
        return None
    work()  # In the first run, libraries allocate workspaces.
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronise(device)
    return torch.cuda.max_memory_allocated() - base


def measure_stages(
    classifier: Any, files: Sequence[Path], folder: Path, batch: int, rounds: int
) -> dict[str, list[float]]:
    """Run each stage alone, in one thread, batch by batch. Return images per second, with one value per round."""
    from gradcam.batch.device import DevicePixels, find_device_codec
    from gradcam.batch.image_results import explain_batch
    from gradcam.batch.read_items import read_item
    from gradcam.batch.result_names import OutputOptions
    from gradcam.images.files import write_atomically
    from gradcam.images.jpeg import to_tensor
    from gradcam.sources.collect import list_inputs

    items = list_inputs([str(file) for file in files[: 8 * batch]]).items
    codec = find_device_codec("device", classifier)
    saving = OutputOptions(format="jpg", quality=QUALITY)
    pixels = DevicePixels(classifier, codec, log_event=lambda event, **details: None, saving=saving)
    rates: dict[str, list[float]] = {}
    request = make_request(classifier)
    for number in range(rounds + 1):  # Round 0 is a warm-up.
        seconds: dict[str, float] = {}

        def run(stage: str, work: Callable[[], Any], seconds: dict[str, float] = seconds) -> Any:
            synchronise(classifier.device.type)
            start = time.perf_counter()
            result = work()
            synchronise(classifier.device.type)
            seconds[stage] = seconds.get(stage, 0) + time.perf_counter() - start
            return result

        for first in range(0, len(items), batch):
            batch_items = items[first : first + batch]
            reads = run(
                "read",
                lambda batch_items=batch_items: [read_item(classifier, item, waits=True) for item in batch_items],
            )
            data = [to_tensor(read.pending.data) for read in reads]
            run("decode", lambda data=data: codec.decode(data, False))
            ready = run("decode and resize", lambda reads=reads: pixels.prepare(reads))
            pictures = [read.picture for read in ready]
            explanations = run("model and maps", lambda pictures=pictures: explain_batch(classifier, request, pictures))
            finished = run("draw and encode", lambda explanations=explanations: pixels.finish(explanations))
            overlays = [finding.results[0].draw() for finding in finished]
            run(
                "write",
                lambda overlays=overlays: [write_atomically(folder / "overlay.jpg", image) for image in overlays],
            )
        for stage, value in seconds.items() if number else ():
            rates.setdefault(stage, []).append(len(items) / value)
    return rates


def tabulate_folder(seconds: dict[str, list[float]], pictures: int, batch: int, rounds: int, notes: list[str]) -> Table:
    rows = [[name, format_spread(np.divide(pictures, values), 0)] for name, values in seconds.items()]
    job = (
        f"{pictures} JPEG files of {WIDTH} x {HEIGHT}, from input files to overlays, in one process unless a row says "
        f"otherwise; {NETWORK} with random weights at {LAYER}, for the top class of each image; batch size {batch}; "
        f"overlays as JPEG of quality {QUALITY}."
    )
    spread = f"Medians (with quartiles) over {rounds} rounds."
    header = ["gradcam", "images per second"]
    return Table("gpu folder cuda", "A folder on one GPU", header, rows, [*notes, job, spread], [{"seconds": seconds}])


def tabulate_floor(stages: dict[str, dict[str, list[float]]], notes: list[str]) -> Table:
    names = list(next(iter(stages.values())))
    rows = [[precision, *(format_spread(rates[name], 0) for name in names)] for precision, rates in stages.items()]
    note = (
        "Images per second of each stage alone, in one thread. A run that overlaps all stages cannot be faster than the "
        "slowest stage, except reading and writing, which use one thread per core."
    )
    return Table("gpu floor cuda", "Stages of a folder on a GPU", ["gradcam", *names], rows, [*notes, note], [stages])


def tabulate_peaks(peaks: dict[str, int | None], batch: int, notes: list[str]) -> Table:
    rows = [[name, NOT_MEASURED if peak is None else f"{peak / MEGABYTE:.0f} MB"] for name, peak in peaks.items()]
    flight = 5 * batch * 3 * WIDTH * HEIGHT / MEGABYTE
    note = (
        f"Peak device memory above the memory in use before. Up to five batches of {batch} images are in flight: "
        f"{flight:.0f} MB of pixels."
    )
    return Table("gpu memory cuda", "Peak memory of a GPU", ["gradcam", "peak"], rows, [*notes, note], [peaks])


def tabulate_fixed(device: str, settings: Settings, notes: list[str]) -> Table:
    """Time one call of `explain` as a multiple of the bare pass, with networks whose fixed cost is visible."""
    rows, raw, problems = list[list[str]](), list[dict[str, Any]](), list[str]()

    def add_row(network: str, title: str, batch: int, stages: Sequence[str] = ()) -> None:
        report_progress("gpu", title, f"batch {batch}")
        model = build_model(network, device)
        case = make_case(model, (NETWORKS | SMALL_NETWORKS)[network].layer, batch, 1, device)
        use_graphs(model, stages, case.images)
        contenders = [name for name in COLUMNS if name not in settings.missing]
        seconds = time_rounds(contenders, case, settings.rounds[batch])
        cells = [f"{1000 * float(np.median(seconds[BARE])):.2f} ms"]
        cells += [
            format_spread(np.divide(seconds[name], seconds[BARE])) if name in seconds else NOT_MEASURED
            for name in COLUMNS[1:]
        ]
        rows.append([f"{title}, {case.layer}", str(batch), *cells])
        raw.append({"network": title, "batch": batch, "seconds": seconds})

    for network, batch in product(FIXED, settings.rounds):
        add_row(network, network, batch)
    try:
        for batch in settings.rounds if device == "cuda" else ():
            add_row(*GRAPHED[:2], batch, GRAPHED[2])
    except RuntimeError as error:  # PyTorch cannot capture every operation.
        problems.append(f"{GRAPHED[1]}: {error}")
    counts = ", ".join(f"{rounds} at batch {batch}" for batch, rounds in settings.rounds.items())
    note = (
        f"One of {CLASSES} classes of each image, fp32, as multiples of the forward pass alone in the same round: medians "
        f"(with quartiles) over the rounds, {counts}."
    )
    title = "Fixed cost of a call on a GPU"
    header = ["network, layer", "batch", *COLUMNS]
    return Table("gpu fixed cuda", title, header, rows, [*notes, note, *problems], raw)


def use_graphs(model: nn.Module, stages: Sequence[str], images: Tensor) -> None:
    """Run these stages of the model as CUDA graphs, which start all kernels of a stage at once."""
    inputs: dict[str, Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for name in stages:
            hook = partial(lambda name, module, args: inputs.update({name: args[0]}), name)
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        with torch.no_grad():
            model(images)
    if stages:
        samples = tuple((inputs[name].clone().requires_grad_(),) for name in stages)
        torch.cuda.make_graphed_callables(tuple(map(model.get_submodule, stages)), samples)


def tabulate_calls(device: str, settings: Settings, notes: list[str]) -> Table:
    """Count what a call of `explain` starts and awaits, and what the other contenders do."""
    network, rows = "ResNet-50", []
    model, layer = build_model(network, device), NETWORKS[network].layer
    for batch in settings.rounds:
        case = make_case(model, layer, batch, 1, device)
        for name in COLUMNS:
            if name not in settings.missing:
                report_progress("gpu", f"calls, {name}, batch {batch}")
                rows.append([name, str(batch), *map(str, count_events(name, case))])
    note = (
        f"{network}, `{layer}`, one of {CLASSES} classes of each image, fp32, counted by PyTorch's profiler in the third "
        "call. Operations that other operations call are not counted."
    )
    header = ["", "batch", "operations", "kernel launches", "waits"]
    return Table("gpu calls cuda", "What a call does on a GPU", header, rows, [*notes, note])


def count_events(contender: str, case: Case) -> tuple[int, int, int]:
    """Return the number of PyTorch operations, of kernel launches, and of waits for the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if case.images.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with attach(contender, case) as call:
        call(), call()
        with torch.profiler.profile(activities=activities) as profile:
            call()
    kinds = Counter[str]()
    for event in profile.events():
        parent = event.cpu_parent
        kinds["operation"] += event.name.startswith("aten::") and not (parent and parent.name.startswith("aten::"))
        kinds["launch"] += "LaunchKernel" in event.name
        kinds["wait"] += "Synchronize" in event.name
    case.model.zero_grad(set_to_none=True)
    return kinds["operation"], kinds["launch"], kinds["wait"]
