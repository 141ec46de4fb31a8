"""What to expect of a machine: pictures per second of a folder, by device, threads, and processes that share a GPU."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.floor import measure_stages
from benchmark.folder import run_once
from benchmark.loops import LAYER, NETWORK, load_ours, run_pipeline
from benchmark.measuring import Settings, keep_freed_memory, report_progress, take_turns
from benchmark.pictures import HEIGHT, WIDTH, make_pictures, repeat_pictures
from benchmark.tables import Table, format_spread

PICTURES = {"cpu": 96, "cuda": 512}
BATCH = {"cpu": 8, "cuda": 32}  # what `gradcam batch` takes by itself
PROCESSES = (2, 4, 8)  # that share a GPU
MILLION = 1_000_000
LISTED, IN_A_PIECE = 1000, 1000  # keys that one request to S3 lists, and records in a piece of a manifest there
FILES = 64  # that the others are links to
LONGEST = 300  # seconds that a round of processes may take


def compare_throughput(settings: Settings) -> Iterator[Table]:
    """For each device: pictures per second by the number of threads, and what a million pictures then take."""
    keep_freed_memory()
    (rounds,) = settings.rounds.values()
    for device in settings.devices:
        yield from measure_device(device, rounds)


def measure_device(device: str, rounds: int) -> Iterator[Table]:
    from gradcam.batch.cores import count_cores

    cores = count_cores()
    threads = sorted({min(2**power, cores) for power in range(cores.bit_length() + 1)})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_pictures(folder / "some", FILES)
        repeat_pictures(folder / "some", folder / "pictures", PICTURES[device])
        classifier, runs = load_ours("fp32", device), {}
        for count in threads:
            loop = partial(run_pipeline, classifier, batch=BATCH[device], workers=count)
            name = f"{count} thread" if count == 1 else f"{count} threads"
            runs[name] = partial(run_once, loop, folder / "pictures", folder)
            report_progress("throughput", device, name, "once")
            run_once(loop, folder / "some", folder)
        report_progress("throughput", device, f"{rounds} rounds of {len(runs)}")
        seconds = take_turns(runs, rounds)
        stages = measure_once(classifier, device, sorted((folder / "some").iterdir()), folder, cores)
        for count in PROCESSES if device == "cuda" else ():
            each = max(1, cores // count)
            report_progress("throughput", device, f"{count} processes")
            seconds[f"{count} processes of {each} threads"] = time_processes(folder, device, count, each, rounds)
        sizes = weigh(classifier, device, folder)
    yield tabulate(device, seconds, stages)
    yield tabulate_million(sizes)


def measure_once(classifier: Any, device: str, files: list[Path], folder: Path, cores: int) -> dict[str, float]:
    """Milliseconds of a core that each stage takes for a picture."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        found = measure_stages(classifier, files, Path(output), BATCH[device], cores)
    return {name: 1000 * value / len(files) for name, value in found.items()}


def weigh(classifier: Any, device: str, folder: Path) -> dict[str, float]:
    """Bytes that a picture takes, of its own, of its overlay, and of its record."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        output = Path(place)
        run_pipeline(classifier, folder / "some", output, BATCH[device])
        found = {
            "pictures to read": sum(path.stat().st_size for path in (folder / "some").iterdir()),
            "overlays to write": sum(path.stat().st_size for path in output.glob("*.jpg")),
            "records in the manifest": (output / "manifest.jsonl").stat().st_size,
        }
    return {name: size / FILES for name, size in found.items()}


def time_processes(folder: Path, device: str, count: int, threads: int, rounds: int) -> list[float]:
    """Seconds until so many processes have explained their shares, each with a model of its own that was there before."""
    start = multiprocessing.get_context("spawn")
    gate = start.Barrier(count + 1)
    # As with --shard, each has a folder of pictures that are its own.
    each = PICTURES[device] // count
    workers = [
        start.Process(target=explain_share, args=(folder, device, each, threads, [gate] * rounds), daemon=True)
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    seconds = []
    for _ in range(rounds):
        gate.wait(LONGEST)
        began = time.perf_counter()
        gate.wait(LONGEST)
        seconds.append(time.perf_counter() - began)
    for worker in workers:
        worker.join()
    return seconds


def explain_share(folder: Path, device: str, pictures: int, threads: int, gates: list[Any]) -> None:
    """What each of the processes does, between each gate's opening and its next."""
    keep_freed_memory()
    classifier = load_ours("fp32", device)
    loop = partial(run_pipeline, classifier, batch=BATCH[device], workers=threads)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        own = Path(place)
        repeat_pictures(folder / "some", own / "pictures", pictures)
        run_once(loop, folder / "some", own)
        for gate in gates:
            gate.wait(LONGEST)
            run_once(loop, own / "pictures", own)
            gate.wait(LONGEST)


def tabulate(device: str, seconds: dict[str, list[float]], stages: dict[str, float]) -> Table:
    digits = 0 if device == "cuda" else 1
    rows = [[name, format_spread(np.divide(PICTURES[device], values), digits)] for name, values in seconds.items()]
    shares = ", ".join(f"{name} {value:.1f} ms" for name, value in stages.items() if name != "model")
    notes = [
        f"From files to files: {PICTURES[device]} JPEG files of {WIDTH} x {HEIGHT}, {NETWORK} at "
        f"{LAYER} in fp32, batches of {BATCH[device]}, overlays as JPEG; medians (with quartiles).",
        "Threads read, decode, draw, encode and write; the model has its own"
        + (", and the GPU." if device == "cuda" else ", and shares the cores with them."),
        f"A picture's share of a core: {shares}.",
    ]
    header = ["gradcam", "pictures per second"]
    return Table(
        f"throughput {device}", f"A folder of pictures ({device})", header, rows, notes, [{"seconds": seconds}]
    )


def tabulate_million(sizes: dict[str, float]) -> Table:
    """What a million of these pictures take in a store."""
    rows = [[what, f"{size / 1000:.1f} kB", f"{size * MILLION / 1e9:.1f} GB"] for what, size in sizes.items()]
    requests = 2 * MILLION + MILLION // LISTED + MILLION // IN_A_PIECE
    rows.append(["requests to a store", "1 to read, 1 to write", f"{requests:,}"])
    notes = [
        f"Of files of {WIDTH} x {HEIGHT}. Requests: with those of the listing, {LISTED} keys each, and of the manifest, "
        f"{IN_A_PIECE} records a piece."
    ]
    return Table("million", "A million pictures in a store", ["", "a picture", "a million"], rows, notes)
