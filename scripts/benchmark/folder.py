"""Time the steps from image files to overlays, with our pipeline and with loops that use other libraries."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.environment import describe_bfloat16
from benchmark.floor import measure_stages
from benchmark.loops import ATTACH, LAYER, NETWORK, Loop, Run, load_ours
from benchmark.measuring import Settings, keep_freed_memory, report_progress, take_turns, time_call
from benchmark.pictures import HEIGHT, QUALITY, WIDTH, make_image_files
from benchmark.scale import measure_listing, tabulate_memory
from benchmark.tables import Table, format_spread

OURS = "gradcam"
PEERS = ("pytorch-grad-cam", "torchcam")
PICTURES = 64
TIMED_FOLDER, WARM_UP_FOLDER = "pictures", "few"  # The folders of the timed images and of one warm-up batch.


def compare_folder(settings: Settings, pictures: int = PICTURES) -> Iterator[Table]:
    """Measure images per second, our pipeline's lower bound and peak memory, and the overhead per file."""
    keep_freed_memory()
    has_bfloat16 = describe_bfloat16() != "no bf16 instructions"
    precisions = ["fp32", "bf16"] if has_bfloat16 else ["fp32"]
    skipped = [] if has_bfloat16 else ["bfloat16 is not measured: this CPU has no instructions for it."]
    ((batch, rounds),) = settings.rounds.items()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_image_files(folder / TIMED_FOLDER, pictures)
        loops, failures = choose_loops(precisions, batch, settings, folder)
        raw = time_all(loops, precisions, batch, rounds, folder)
        notes = [*describe_job(pictures, rounds), *skipped, *failures]
        yield tabulate_speed(loops, precisions, raw, notes, pictures)
        yield tabulate_floor(precisions, raw, pictures)
    yield tabulate_memory()
    yield measure_listing(rounds)


def choose_loops(
    precisions: Sequence[str], batch: int, settings: Settings, folder: Path
) -> tuple[list[Loop], list[str]]:
    """Run each loop once. Return the loops that work, and a note for each loop that fails."""
    make_image_files(folder / WARM_UP_FOLDER, batch)
    loops, notes = [], []
    for package in (OURS, *PEERS):
        if package in settings.missing and package != OURS:
            notes.append(f"{package} is not measured.")
            continue
        for precision in precisions:
            for size in [batch] if package == OURS else sorted({1, batch}):
                loop = Loop(package, precision, size, ATTACH[package])
                report_progress("folder", loop.name, "once")
                try:
                    with loop.attach(precision, size) as run:
                        run_once(run, folder / WARM_UP_FOLDER, folder)
                except Exception as error:  # The failure is a result, whatever its type.
                    if package == OURS:
                        raise
                    notes.append(f"{loop.name}: raises {type(error).__name__}.")
                else:
                    loops.append(loop)
    return loops, notes


def run_once(run: Run, source: Path, folder: Path) -> float:
    """Return the seconds of one run into a new folder. The deletion of the folder is not timed."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        seconds = time_call(lambda: run(source, Path(output)))
        written = len(list(Path(output).glob("*.jpg")))
        expected = len(list(source.iterdir()))
    if written != expected:
        raise RuntimeError(f"{written} overlays were written of {expected} images")
    return seconds


def time_all(loops: Sequence[Loop], precisions: Sequence[str], batch: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each loop by name, and the seconds of our stages by precision, with one value per round."""
    stages: dict[str, list[dict[str, float]]] = {precision: [] for precision in precisions}
    with contextlib.ExitStack() as stack:
        timed: dict[str, Callable[[Path], float]] = {}
        for loop in loops:
            run = stack.enter_context(loop.attach(loop.precision, loop.batch))
            timed[loop.name] = partial(run_once, run, folder=folder)
        for precision, stage_rounds in stages.items():
            timed[f"stages, {precision}"] = partial(time_stages, load_ours(precision), batch, folder, stage_rounds)
        for call in timed.values():
            call(folder / WARM_UP_FOLDER)
        for stage_rounds in stages.values():
            stage_rounds.clear()
        report_progress("folder", f"{rounds} rounds of {len(timed)}")
        seconds = take_turns({name: partial(call, folder / TIMED_FOLDER) for name, call in timed.items()}, rounds)
    return {"seconds": seconds, "stages": stages}


def time_stages(classifier: Any, batch: int, folder: Path, stages: list[dict[str, float]], source: Path) -> float:
    """Return the total CPU seconds of all stages, and append a dict of seconds by stage to `stages`."""
    from gradcam.options import count_cores

    files = sorted(source.iterdir())
    with tempfile.TemporaryDirectory(dir=folder) as output:
        stages.append(measure_stages(classifier, files, Path(output), batch, count_cores()))
    return sum(stages[-1].values())


def tabulate_speed(
    loops: Sequence[Loop], precisions: Sequence[str], raw: dict[str, Any], notes: list[str], pictures: int
) -> Table:
    """Tabulate images per second for each loop, and the speed-up of gradcam at each precision."""
    seconds = raw["seconds"]
    ours = {loop.precision: loop for loop in loops if loop.package == OURS}
    rows = []
    for loop in loops:
        ratios = [
            "" if loop.package == OURS else format_spread(np.divide(seconds[loop.name], seconds[our_loop.name]))
            for our_loop in ours.values()
        ]
        rate = format_spread([pictures / value for value in seconds[loop.name]])
        rows.append([loop.package, loop.precision, str(loop.batch), rate, *ratios])
    header = ["library", "precision", "batch", "images per second"]
    header += [f"speed-up of gradcam, {name}" for name in precisions]
    return Table("folder", "A folder of images (cpu)", header, rows, notes, [raw])


def describe_job(pictures: int, rounds: int) -> list[str]:
    return [
        f"{pictures} JPEG files of {WIDTH} x {HEIGHT}; {NETWORK} with random weights at {LAYER}, for the top class of each "
        f"image; the overlay at the image's full size as JPEG of quality {QUALITY}. The time includes everything except "
        "imports, loading the model and a first batch.",
        f"Medians (with quartiles) over {rounds} rounds. Each round runs all loops. The C library keeps freed memory, so "
        "that no loop pays for allocating it again.",
        "All loops resize the whole image to the model's input, so that every heatmap covers its whole image. The other "
        "libraries read with Pillow, preprocess with torchvision, and draw and write with the library's own function, as "
        "their documentation shows, one by one or in batches. Compare with the faster of the two.",
    ]


def tabulate_floor(precisions: Sequence[str], raw: dict[str, Any], pictures: int) -> Table:
    """Tabulate the time of each stage alone, and compare the pipeline's time with the lower bound."""
    from gradcam.options import count_cores

    cores, rows, header = count_cores(), [], []
    for precision in precisions:
        stages = raw["stages"][precision]
        (measured,) = [values for name, values in raw["seconds"].items() if name.startswith(f"{OURS}, {precision}, ")]
        floors = [sum(stage_seconds.values()) / cores for stage_seconds in stages]
        cells = [
            f"{1000 * float(np.median([stage_seconds[name] for stage_seconds in stages])) / pictures:.1f} ms"
            for name in stages[0]
        ]
        rates = [f"{1000 * float(np.median(values)) / pictures:.1f} ms" for values in (floors, measured)]
        rows.append([precision, *cells, *rates, format_spread(np.divide(measured, floors))])
        header = ["gradcam", *stages[0], f"lower bound: sum / {cores} cores", "measured", "measured / lower bound"]
    notes = [
        "Per image. Stages: CPU time in all threads, with each stage run alone over all images.",
        "Medians, and the ratio in each round (with quartiles).",
    ]
    return Table("folder floor", "Lower bound of the time of a folder (cpu)", header, rows, notes)
