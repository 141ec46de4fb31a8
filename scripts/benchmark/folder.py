"""A folder of pictures, from files to files: our pipeline, the peers' loops, and the floor under ours."""

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
from benchmark.pictures import HEIGHT, QUALITY, WIDTH, make_pictures
from benchmark.scale import measure_listing, tabulate_memory
from benchmark.tables import Table, format_spread

OURS = "gradcam"
PEERS = ("pytorch-grad-cam", "torchcam")
PICTURES = 64
ALL, FEW = "pictures", "few"  # the folders of what is timed, and of a batch to warm up with


def compare_folder(settings: Settings, pictures: int = PICTURES) -> Iterator[Table]:
    """Pictures per second, the floor under ours, its peak of memory, and what a file costs beside its picture."""
    keep_freed_memory()
    has_bfloat16 = describe_bfloat16() != "no bf16 instructions"
    precisions = ["fp32", "bf16"] if has_bfloat16 else ["fp32"]
    skipped = [] if has_bfloat16 else ["bfloat16 is not measured: this CPU has no instructions for it."]
    ((batch, rounds),) = settings.rounds.items()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_pictures(folder / ALL, pictures)
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
    """All that work, having worked once, and a note for each that does not."""
    make_pictures(folder / FEW, batch)
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
                        run_once(run, folder / FEW, folder)
                except Exception as error:  # of whatever kind: that is the result
                    if package == OURS:
                        raise
                    notes.append(f"{loop.name}: raises {type(error).__name__}.")
                else:
                    loops.append(loop)
    return loops, notes


def run_once(run: Run, source: Path, folder: Path) -> float:
    """Seconds of the whole job, into a new folder that is gone afterwards, off the clock."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        seconds = time_call(lambda: run(source, Path(output)))
        written = len(list(Path(output).glob("*.jpg")))
        expected = len(list(source.iterdir()))
    if written != expected:
        raise RuntimeError(f"{written} overlays were written of {expected} images")
    return seconds


def time_all(loops: Sequence[Loop], precisions: Sequence[str], batch: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of each loop, by its name, and those of our stages by precision: a value for each round."""
    stages: dict[str, list[dict[str, float]]] = {precision: [] for precision in precisions}
    with contextlib.ExitStack() as stack:
        timed: dict[str, Callable[[Path], float]] = {}
        for loop in loops:
            run = stack.enter_context(loop.attach(loop.precision, loop.batch))
            timed[loop.name] = partial(run_once, run, folder=folder)
        for precision, found in stages.items():
            timed[f"stages, {precision}"] = partial(time_stages, load_ours(precision), batch, folder, found)
        for call in timed.values():
            call(folder / FEW)
        for found in stages.values():
            found.clear()
        report_progress("folder", f"{rounds} rounds of {len(timed)}")
        seconds = take_turns({name: partial(call, folder / ALL) for name, call in timed.items()}, rounds)
    return {"seconds": seconds, "stages": stages}


def time_stages(classifier: Any, batch: int, folder: Path, found: list[dict[str, float]], source: Path) -> float:
    """Seconds of the processor in all stages; those of each are added to `found`."""
    from gradcam.options import count_cores

    files = sorted(source.iterdir())
    with tempfile.TemporaryDirectory(dir=folder) as output:
        found.append(measure_stages(classifier, files, Path(output), batch, count_cores()))
    return sum(found[-1].values())


def tabulate_speed(
    loops: Sequence[Loop], precisions: Sequence[str], raw: dict[str, Any], notes: list[str], pictures: int
) -> Table:
    """A line for each loop: pictures per second, and how many times as fast ours is, in each precision."""
    seconds = raw["seconds"]
    ours = {loop.precision: loop for loop in loops if loop.package == OURS}
    rows = []
    for loop in loops:
        ratios = [
            "" if loop.package == OURS else format_spread(np.divide(seconds[loop.name], seconds[own.name]))
            for own in ours.values()
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
    """Our stages alone, and our time over what they come to if no core ever waits."""
    from gradcam.options import count_cores

    cores, rows, header = count_cores(), [], []
    for precision in precisions:
        stages = raw["stages"][precision]
        (wall,) = [values for name, values in raw["seconds"].items() if name.startswith(f"{OURS}, {precision}, ")]
        floors = [sum(each.values()) / cores for each in stages]
        cells = [f"{1000 * float(np.median([each[name] for each in stages])) / pictures:.1f} ms" for name in stages[0]]
        rates = [f"{1000 * float(np.median(values)) / pictures:.1f} ms" for values in (floors, wall)]
        rows.append([precision, *cells, *rates, format_spread(np.divide(wall, floors))])
        header = ["gradcam", *stages[0], f"lower bound: sum / {cores} cores", "measured", "measured / lower bound"]
    notes = [
        "Per image. Stages: CPU time in all threads, with each stage run alone over all images.",
        "Medians, and the ratio in each round (with quartiles).",
    ]
    return Table("folder floor", "Lower bound of the time of a folder (cpu)", header, rows, notes)
