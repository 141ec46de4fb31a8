"""Compare the Ray engine with the local engine on a folder of images: time, balance of two machines, and memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.cases import MEGABYTE
from benchmark.measuring import Settings, call_in_fresh_process, read_memory, report_progress, take_turns
from benchmark.pictures import QUALITY, link_image_files, make_image_files
from benchmark.tables import Table, format_spread

PICTURES = 400
COUNTS = (400, 2000)
SIZE = (512, 384)  # The width and height of the timed images.
SMALL_SIZE = (320, 240)
FILES = 64  # The number of distinct files. All other files are links.
LOCAL, RAY, CLUSTER = "local", "ray", "cluster"


def compare_engines(settings: Settings) -> Iterator[Table]:
    """Measure the time of both engines, the images explained by each of two machines, and the peak memory."""
    try:
        import ray
    except ImportError:
        yield Table("engines", "Engines (cpu)", notes=["Skipped: Ray is not installed."])
        return
    ((batch, rounds),) = settings.rounds.items()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_image_files(folder / "files", FILES, SIZE)
        link_image_files(folder / "files", folder / "pictures", PICTURES)
        yield tabulate_time(folder / "pictures", batch, rounds, ray.__version__)
        yield tabulate_shares(folder / "pictures", batch)
        make_image_files(folder / "small", FILES, SMALL_SIZE)
        for count in COUNTS:
            link_image_files(folder / "small", folder / str(count), count)
        yield tabulate_memory(folder, batch)


def tabulate_time(source: Path, batch: int, rounds: int, version: str) -> Table:
    """Time both engines in turn. Each run has a separate process."""
    runs_by_engine: dict[str, list[dict[str, Any]]] = {LOCAL: [], RAY: []}

    def run(engine: str) -> float:
        report_progress("engines", engine)
        runs_by_engine[engine].append(call_in_fresh_process(measure, engine, source, batch))
        return runs_by_engine[engine][-1]["work"]

    seconds = take_turns({engine: partial(run, engine) for engine in runs_by_engine}, rounds)
    rows = []
    for engine, runs in runs_by_engine.items():
        ratio = "" if engine == LOCAL else format_spread(np.divide(seconds[engine], seconds[LOCAL]))
        start = format_spread([run_figures["start"] for run_figures in runs])
        rows.append([engine, start, format_spread(seconds[engine]), ratio])
    notes = [
        f"{PICTURES} JPEG files of {SIZE[0]} x {SIZE[1]}, the embedded model, overlays as JPEG, batch size {batch}; "
        f"Ray {version}, started on this machine for each run.",
        f"Seconds: medians (with quartiles) over {rounds} rounds. Each round runs both engines in separate processes. "
        "Start: the time until the model is loaded and the first image can be explained; with Ray, the driver and the "
        "actor each load it. Work: from then until the last image is done.",
    ]
    header = ["engine", "start", "work", "work / local engine"]
    return Table("engines", "Engines (cpu)", header, rows, notes, [{"runs": runs_by_engine}])


def tabulate_shares(source: Path, batch: int) -> Table:
    """Run two simulated machines with one core each, and count the images that each machine explained."""
    report_progress("engines", "two machines")
    figures = call_in_fresh_process(measure, CLUSTER, source, batch)
    shares = list(figures["shares"].values())
    rows = [[str(share), f"{100 * share / sum(shares):.0f} %"] for share in shares]
    notes = [f"Two simulated machines with one core each, by Ray's cluster utility. {figures['work']:.1f} s of work."]
    return Table("engines shares", "Two machines (cpu)", ["images per machine", "share"], rows, notes, [figures])


def tabulate_memory(folder: Path, batch: int) -> Table:
    """Tabulate the peak memory of the driver, and of Ray's object store."""
    peaks = {}
    for count in COUNTS:
        report_progress("engines", "memory", f"{count} images")
        peaks[count] = call_in_fresh_process(measure, RAY, folder / str(count), batch)
    rows = []
    for title, name, unit, size in (
        ("driver process", "driver", "MB", MEGABYTE),
        ("object store", "objects", "kB", 1000),
    ):
        values = [figures[name] / size for figures in peaks.values()]
        rows.append([title, *(f"{value:.0f} {unit}" for value in values)])
    notes = [
        "Peak resident memory of the driver process, and the largest content of the object store after any batch. "
        f"Images of {SMALL_SIZE[0]} x {SMALL_SIZE[1]}."
    ]
    header = ["", *(f"{count:,} images" for count in COUNTS)]
    return Table("engines memory", "Memory with Ray (cpu)", header, rows, notes, [{"peaks": peaks}])


def measure(engine: str, source: Path, batch: int) -> dict[str, Any]:
    """Run one engine, and return its times in seconds, its peak memory in bytes, and the number of images by actor."""
    start_time = time.time()
    listener = EventListener()
    with contextlib.ExitStack() as stack:
        explain = stack.enter_context(ENGINES[engine](listener))
        ready, end = run(explain, listener, source, batch)
    return {
        "start": ready - start_time,
        "work": end - ready,
        "driver": read_memory("VmHWM"),
        "objects": listener.objects,
        "shares": dict(listener.shares),
    }


class EventListener:
    """A listener for events of a run.

    It records when actors are ready, how many images each actor explained, and the peak size of the object store.
    """

    def __init__(self) -> None:
        self.ready: list[float] = []
        self.shares: Counter[int] = Counter()
        self.objects = 0
        self.ray: Any = None

    def __call__(self, event: str, **details: Any) -> None:
        if event == "actor":
            self.ready.append(details["ready"])
        if event == "batch":
            self.shares[details.get("actor", os.getpid())] += details["pictures"]
            if self.ray is not None:
                name = "object_store_memory"
                free, capacity = self.ray.available_resources().get(name, 0), self.ray.cluster_resources()[name]
                self.objects = max(self.objects, int(capacity - free))


def run(
    explain: Callable[..., Iterator[Any]], listener: EventListener, source: Path, batch: int
) -> tuple[float, float]:
    """Explain all images. Return the time when explaining could begin, and the time when the last image was done."""
    from gradcam.batch.engine import BatchWork
    from gradcam.batch.image_results import ExplainRequest
    from gradcam.batch.result_names import OutputOptions
    from gradcam.batch.save import Saver
    from gradcam.options import count_cores
    from gradcam.sources.collect import list_inputs
    from gradcam.storage.output import DiskWriter

    classifier = load("cpu")
    request = ExplainRequest(layers=[classifier.layer])
    items = list_inputs([source]).items
    saving = OutputOptions(("overlay",), "jpg", QUALITY, 0.5, "turbo")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "unfinished").mkdir()
        disk = DiskWriter(Path(folder), Path(folder) / "unfinished")
        saver = Saver(disk, {item.name: item.name for item in items}, saving, classifier, request)
        work = BatchWork(classifier, request, items, batch, count_cores())
        start = time.time()
        explained_count = sum(
            outcome.record.error is None
            for outcome in explain(work, saver, is_needed=lambda item: True, log_event=listener)
        )
        end = time.time()
    if explained_count != len(items):
        raise RuntimeError(f"{explained_count} of {len(items)} images were explained")
    return min(listener.ready, default=start), end


def load(device: str) -> Any:
    """Load the embedded classifier. This function is at module level, so that Ray can send it to actors."""
    import gradcam

    return gradcam.load_classifier(device=device)


@contextlib.contextmanager
def use_local(listener: EventListener) -> Iterator[Callable[..., Iterator[Any]]]:
    from gradcam.batch.engine import explain_locally

    yield explain_locally


@contextlib.contextmanager
def use_ray(listener: EventListener, address: str | None = None) -> Iterator[Callable[..., Iterator[Any]]]:
    from gradcam.batch.ray.engine import RayEngine
    from gradcam.batch.ray.session import connect, find_layout

    with connect(address) as listener.ray:
        yield RayEngine(listener.ray, find_layout(listener.ray, "cpu"), load)


@contextlib.contextmanager
def use_cluster(listener: EventListener) -> Iterator[Callable[..., Iterator[Any]]]:
    from gradcam.batch.ray.session import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**27})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=2**27)
        with use_ray(listener, cluster.address) as engine:
            yield engine
    finally:
        cluster.shutdown()


ENGINES = {LOCAL: use_local, RAY: use_ray, CLUSTER: use_cluster}
