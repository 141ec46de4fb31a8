"""Measure the images per second of a folder, by device, by threads, and by processes that share a GPU."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.floor import measure_stages
from benchmark.folder import run_once
from benchmark.loops import LAYER, NETWORK, load_ours, run_pipeline
from benchmark.measuring import Settings, keep_freed_memory, report_progress, take_turns
from benchmark.pictures import HEIGHT, WIDTH, link_image_files, make_image_files
from benchmark.tables import Table, format_spread
from gradcam.options import count_cores

PICTURES = {"cpu": 96, "cuda": 512}
BATCH = {"cpu": 8, "cuda": 32}  # The default batch sizes of `gradcam batch`.
PROCESSES = (2, 4, 8)  # The numbers of processes that share a GPU.
MILLION = 1_000_000
KEYS_PER_REQUEST, RECORDS_PER_PART = 1000, 1000  # For listing S3, and for a manifest in a store.
FILES = 64  # The number of distinct files. All other files are links.
MAX_ROUND_SECONDS = 300


def compare_throughput(settings: Settings) -> Iterator[Table]:
    """Measure images per second on each device, by the number of threads, and estimate the cost of a million images."""
    keep_freed_memory()
    (rounds,) = settings.rounds.values()
    for device in settings.devices:
        yield from measure_device(device, rounds)


def measure_device(device: str, rounds: int) -> Iterator[Table]:
    cores = count_cores()
    threads = sorted({min(2**power, cores) for power in range(cores.bit_length() + 1)})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_image_files(folder / "some", FILES)
        link_image_files(folder / "some", folder / "pictures", PICTURES[device])
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
            report_progress("throughput", device, f"{count} processes")
            name = f"{count} processes of {max(1, cores // count)} threads"
            seconds[name] = time_processes(folder, device, count, rounds, images=PICTURES[device])
        sizes = measure_sizes(classifier, device, folder)
    yield tabulate(device, seconds, stages)
    yield tabulate_million(sizes)


def measure_once(classifier: Any, device: str, files: list[Path], folder: Path, cores: int) -> dict[str, float]:
    """Return each stage's CPU time per image, in milliseconds."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        stage_seconds = measure_stages(classifier, files, Path(output), BATCH[device], cores)
    return {name: 1000 * value / len(files) for name, value in stage_seconds.items()}


def measure_sizes(classifier: Any, device: str, folder: Path) -> dict[str, float]:
    """Return the mean sizes of an input file, an overlay and a record, in bytes."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        output = Path(temporary)
        run_pipeline(classifier, folder / "some", output, BATCH[device])
        total_bytes = {
            "images to read": sum(path.stat().st_size for path in (folder / "some").iterdir()),
            "overlays to write": sum(path.stat().st_size for path in output.glob("*.jpg")),
            "records in the manifest": (output / "manifest.jsonl").stat().st_size,
        }
    return {name: size / FILES for name, size in total_bytes.items()}


def time_processes(
    folder: Path, device: str, count: int, rounds: int, *, images: int, precision: str = "fp32", pixels: str = "cpu"
) -> list[float]:
    """Divide the images between `count` processes, each with a separate model, and return the seconds per round."""
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(count + 1)
    # Each process has a separate folder of images, as with --shard.
    job = WorkerJob(folder, device, images // count, max(1, count_cores() // count), precision, pixels)
    workers = [context.Process(target=explain_share, args=(job, [gate] * rounds), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    seconds = []
    for _ in range(rounds):
        gate.wait(MAX_ROUND_SECONDS)
        start_time = time.perf_counter()
        gate.wait(MAX_ROUND_SECONDS)
        seconds.append(time.perf_counter() - start_time)
    for worker in workers:
        worker.join()
    return seconds


@dataclass(frozen=True)
class WorkerJob:
    """The work of one of several processes that share a GPU."""

    folder: Path
    device: str
    images: int
    threads: int
    precision: str
    pixels: str


def explain_share(job: WorkerJob, gates: list[Any]) -> None:
    """Explain this process's images once per round. Wait for the other processes before and after each round."""
    keep_freed_memory()
    classifier = load_ours(job.precision, job.device)
    loop = partial(run_pipeline, classifier, batch=BATCH[job.device], workers=job.threads, pixels=job.pixels)
    with tempfile.TemporaryDirectory(dir=job.folder) as temporary:
        worker_folder = Path(temporary)
        link_image_files(job.folder / "some", worker_folder / "pictures", job.images)
        run_once(loop, job.folder / "some", worker_folder)
        for gate in gates:
            gate.wait(MAX_ROUND_SECONDS)
            run_once(loop, worker_folder / "pictures", worker_folder)
            gate.wait(MAX_ROUND_SECONDS)


def tabulate(device: str, seconds: dict[str, list[float]], stages: dict[str, float]) -> Table:
    digits = 0 if device == "cuda" else 1
    rows = [[name, format_spread(np.divide(PICTURES[device], values), digits)] for name, values in seconds.items()]
    shares = ", ".join(f"{name} {value:.1f} ms" for name, value in stages.items() if name != "model")
    notes = [
        f"From input files to overlays: {PICTURES[device]} JPEG files of {WIDTH} x {HEIGHT}, {NETWORK} at "
        f"{LAYER} in fp32, batch size {BATCH[device]}, overlays as JPEG; medians (with quartiles).",
        "The threads read, decode, draw, encode and write. The model runs "
        + ("on the GPU." if device == "cuda" else "in its own threads, on the same cores."),
        f"CPU time per image: {shares}.",
    ]
    header = ["gradcam", "images per second"]
    return Table(f"throughput {device}", f"Images per second ({device})", header, rows, notes, [{"seconds": seconds}])


def tabulate_million(sizes: dict[str, float]) -> Table:
    """Estimate the sizes of a million images and of their results in object storage, and the number of requests."""
    rows = [[item, f"{size / 1000:.1f} kB", f"{size * MILLION / 1e9:.1f} GB"] for item, size in sizes.items()]
    requests = 2 * MILLION + MILLION // KEYS_PER_REQUEST + MILLION // RECORDS_PER_PART
    rows.append(["requests to object storage", "1 to read, 1 to write", f"{requests:,}"])
    notes = [
        f"JPEG files of {WIDTH} x {HEIGHT}. The requests include listing, {KEYS_PER_REQUEST} keys each, and the manifest, "
        f"{RECORDS_PER_PART} records each."
    ]
    return Table("million", "A million images in object storage", ["", "per image", "per million images"], rows, notes)
