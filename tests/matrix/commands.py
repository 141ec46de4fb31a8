"""Run every command on every model, and verify what it writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.matrix.models import NAMES, PROVIDERS, Model, make_model

WIDTH, HEIGHT = 96, 64
SQUARE = (52, 30, 76, 54)  # left, top, right, bottom, off the centre of each axis, and within a central crop
SEEN_SHARE = 1.1  # how much more the heatmap has to change at the square than elsewhere
ONE_LINE = 400  # characters of a refusal
TARGETS: dict[str, tuple[str, ...]] = {
    "classification": ("--class", "0"),
    "detection": ("--box", "0"),
    "segmentation": ("--class", "0", "--mask", ",".join(map(str, SQUARE))),
    "text": ("--text", "a red square"),
    "likeness": ("--like", "{folder}/other.png"),
    "caption": ("--caption", "--word", "0"),
    "keypoints": ("--keypoint", "0"),
}
PLACED = {"detection": ("--missed", ",".join(map(str, SQUARE)), "--class", "1")}  # a target whose place is fixed


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Cell:
    """A provider, a task and a command: `refusal` is the line that refuses it, None for a verified result."""

    provider: str
    task: str
    command: str
    refusal: str | None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.provider, self.task, self.command


class WrongCell(AssertionError):
    """Neither a verified result nor a refusal in one line."""


def invoke(*arguments: str | Path) -> Outcome:
    """Run `gradcam` in this process."""
    from gradcam.cli import main

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    sys.argv = ["gradcam", *map(str, arguments)]
    status: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            main()
    except SystemExit as error:
        status = error.code or 0
    finally:
        sys.argv = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(int(status), out.getvalue(), err.getvalue())


def paint_images(folder: Path) -> None:
    """Paint noise with and without a red square, and other images in a folder of their own."""
    noise = np.random.default_rng(0).integers(70, 110, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    left, top, right, bottom = SQUARE
    painted = noise.copy()
    painted[top:bottom, left:right] = (230, 20, 20)
    painted[top + 6 : bottom - 6, left + 6 : right - 6] = (250, 120, 20)
    other = np.roll(painted, (-12, -30), (0, 1))
    (folder / "images").mkdir()
    for name, pixels in {"plain": noise, "painted": painted, "other": other}.items():
        Image.fromarray(pixels).save(folder / f"{name}.png")
        Image.fromarray(pixels).save(folder / "images" / f"{name}.png")


def require(condition: object, reason: str, outcome: Outcome | None = None) -> None:
    if not condition:
        printed = (
            "" if outcome is None else f": status {outcome.status}, {outcome.err.strip()[-600:] or outcome.out[-300:]}"
        )
        raise WrongCell(reason + printed)


@dataclass
class Job:
    """One model and task, with a folder for what its commands write."""

    model: Model
    task: str
    images: Path  # the folder of `paint_images`
    output: Path

    def call(self, command: str, *arguments: str | Path, target: Sequence[str] | None = None) -> Outcome:
        """Run a command with the options of the model and the target."""
        chosen = TARGETS[self.task] if target is None else target
        parts = [part.format(folder=self.images) for part in chosen]
        task = ["--task", NAMES.get(self.task, self.task)]
        return invoke(
            command, *arguments, "--model", self.model.name, *self.model.options, *task, *parts, "--device", "cpu"
        )

    def read_maps(self, folder: Path) -> dict[str, np.ndarray]:
        return {name: np.load(path) for name, path in index_files(folder, "*.npy").items()}


def index_files(folder: Path, pattern: str) -> dict[str, Path]:
    """Return files by the image that they are named for."""
    return {path.stem.partition("-")[0]: path for path in sorted(folder.glob(pattern))}


def check_run(job: Job) -> Outcome:
    """The heatmap changes most where the square is painted, in the pixels of the image."""
    output = job.output / "run"
    images = [job.images / "plain.png", job.images / "painted.png"]
    options = ("-o", output, "--save", "overlay,map", "--alpha", "1")
    outcome = job.call("run", *images, *options, target=PLACED.get(job.task))
    if outcome.status:
        return outcome
    overlays = {name: path for name, path in index_files(output, "*.png").items() if name != "other"}
    require(sorted(overlays) == ["painted", "plain"], f"overlays of {sorted(overlays)}", outcome)
    before, after = (np.array(Image.open(overlays[name]).convert("RGB")).astype(int) for name in ("plain", "painted"))
    require(before.shape == (HEIGHT, WIDTH, 3), f"an overlay of {before.shape}")
    changed = abs(after - before).sum(2)
    left, top, right, bottom = SQUARE
    inside = np.zeros((HEIGHT, WIDTH), bool)
    inside[top:bottom, left:right] = True
    ratio = changed[inside].mean() / max(changed[~inside].mean(), 1e-9)
    require(ratio >= SEEN_SHARE, f"the heatmap changed {ratio:.2f} times as much at the square as elsewhere")
    return outcome


def check_json(job: Job) -> Outcome:
    """A record for each image, and nothing else on standard output."""
    outcome = job.call("run", job.images / "painted.png", "-o", job.output / "json", "--json")
    if outcome.status == 0:
        (record,) = [json.loads(line) for line in outcome.out.splitlines()]
        require(record["status"] == "ok" and record["explained"], f"a record of {record}")
        require(
            (job.output / "json" / Path(record["explained"][0]["overlay"]).name).exists(), "no overlay of that name"
        )
    return outcome


def check_compare(job: Job) -> Outcome:
    output = job.output / "sheet.png"
    outcome = job.call("compare", job.images / "painted.png", "-o", output)
    if outcome.status == 0:
        require(min(Image.open(output).size) >= HEIGHT, "a sheet smaller than the image")
    return outcome


def check_page(job: Job) -> Outcome:
    output = job.output / "page.html"
    outcome = job.call("page", job.images / "painted.png", "-o", output)
    if outcome.status == 0:
        require("painted.png" in output.read_text(encoding="utf-8"), "a page without the image's name")
    return outcome


def check_batch(job: Job) -> Outcome:
    """The maps of a folder are those of single images."""
    output = job.output / "batch"
    outcome = job.call("batch", job.images / "images", "-o", output, "--save", "overlay,map", "--quiet")
    if outcome.status == 0:
        records = [json.loads(line) for line in (output / "manifest.jsonl").read_text().splitlines()]
        require([record["status"] for record in records] == ["ok"] * 3, f"records of {records}")
        single, together = job.read_maps(job.output / "run"), job.read_maps(output)
        require(sorted(together) == ["other", "painted", "plain"], f"maps of {sorted(together)}")
        for name, expected in single.items() if job.task not in PLACED else ():
            if name == "other":  # what the others are compared with
                continue
            scale = max(abs(expected).max(), 1e-9)
            require(
                abs(together[name] - expected).max() <= 1e-2 * scale, f"another map of {name} than a single image has"
            )
    return outcome


def check_resume(job: Job) -> Outcome:
    """A run that lost its last record makes the same again."""
    output = job.output / "batch"
    manifest = output / "manifest.jsonl"
    if not manifest.exists():
        return job.call("batch", job.images / "images", "-o", output, "--resume", "--quiet")
    lines, before = manifest.read_text().splitlines(keepends=True), job.read_maps(output)
    manifest.write_text("".join(lines[:1]))
    outcome = job.call("batch", job.images / "images", "-o", output, "--save", "overlay,map", "--resume", "--quiet")
    if outcome.status == 0:
        after = job.read_maps(output)
        require(len(manifest.read_text().splitlines()) == len(lines), "records are missing after resuming")
        require(
            all(np.allclose(after[name], values, rtol=1e-4, atol=1e-7) for name, values in before.items()),
            "other maps after resuming",
        )
    return outcome


def check_report(job: Job) -> Outcome:
    output = job.output / "batch"
    if not (output / "manifest.jsonl").exists():
        return job.call("batch", job.images / "images", "-o", output, "--report", "--quiet")
    outcome, (record, *_) = (
        invoke("report", output),
        map(json.loads, (output / "manifest.jsonl").read_text().splitlines()),
    )
    if record["error"]:  # a gallery of nothing but errors
        return Outcome(1, "", f"Error: {record['error']}")
    if outcome.status == 0:
        pages = "".join(path.read_text(encoding="utf-8") for path in output.glob("*.html"))
        require(
            all(name in pages for name in ("plain.png", "painted.png", "other.png")),
            "an image is missing in the gallery",
        )
    return outcome


def check_check(job: Job) -> Outcome:
    outcome = job.call("check", job.images / "painted.png", "-o", job.output / "check", "--json")
    if outcome.status == 0:
        (line,) = outcome.out.splitlines()
        require(re.search(r'"outcome": ?"(passed|undecided|failed)"', line), f"no outcome in {line[:300]}")
    return outcome


def check_evaluate(job: Job) -> Outcome:
    methods = ["gradcam", "hirescam"]
    options = ["--metric", "complexity", "--limit", "2", "--no-controls", "-o", str(job.output / "study.json")]
    outcome = job.call("evaluate", job.images / "images", "--method", ",".join(methods), *options)
    if outcome.status == 0:
        require(all(method in outcome.out for method in methods), f"no row for each method in {outcome.out[-300:]}")
    return outcome


def check_diff(job: Job) -> Outcome:
    """A model agrees with itself."""
    names = (job.model.name, job.model.name)
    options = [option for option in job.model.options if option not in ("--threshold", "0")]  # of detectors alone
    outcome = invoke("diff", *names, job.images / "painted.png", "--json", *options, "--device", "cpu")
    if outcome.status == 0:
        correlations = re.findall(r'"correlation": ?([-\d.e]+)', outcome.out)
        require(correlations and abs(float(correlations[0]) - 1) < 1e-6, f"correlations of {correlations}")
    return outcome


def check_ui(job: Job) -> Outcome:
    """The local page's server answers with a map, or says why not."""
    from starlette.testclient import TestClient

    from gradcam.cli import _settings
    from gradcam.cli.ui import _load
    from gradcam.errors import GradcamError
    from gradcam.ui.answers import Explainer
    from gradcam.ui.guard import TOKEN_HEADER
    from gradcam.ui.models import ModelCache
    from gradcam.ui.pictures import ImageStrip
    from gradcam.ui.server import PageSettings, Server

    options = dict(zip(job.model.options[::2], job.model.options[1::2]))
    choice = _settings.ModelChoice(job.model.name, device="cpu", task="auto")
    if "--weights" in options:
        choice = _settings.replace(choice, weights=Path(options["--weights"]))
    if "--size" in options:
        choice = _settings.replace(choice, size=int(options["--size"]))
    try:
        models = ModelCache(lambda request: _load(choice, None, request))
        server = Server(
            Explainer(models, ImageStrip([("painted.png", job.images / "painted.png")])), PageSettings("usual")
        )
        web = TestClient(server.to_application({"testserver"}), headers={TOKEN_HEADER: server.token})
        answer = web.post("/ask", content=json.dumps({"tab": "one", "picture": 0})).json()
        server.jobs.close()
    except GradcamError as error:
        return Outcome(1, "", f"Error: {error}")
    if "error" in answer:
        return Outcome(1, "", f"Error: {answer['error']}")
    require("page" in answer, f"an answer of {sorted(answer)}")
    return Outcome(0, json.dumps(answer)[:300], "")


IGNORES_TASK = ("diff", "ui")  # they read the task off the model
COMMANDS: dict[str, Callable[[Job], Outcome]] = {
    "run": check_run,
    "--json": check_json,
    "compare": check_compare,
    "page": check_page,
    "batch": check_batch,
    "batch --resume": check_resume,
    "report": check_report,
    "check": check_check,
    "evaluate": check_evaluate,
    "diff": check_diff,
    "ui": check_ui,
}


def read_refusal(outcome: Outcome) -> str:
    """Return the line that refuses the cell. Raises `WrongCell` for a traceback or a riddle."""
    lines = [
        line
        for line in outcome.err.splitlines()
        if line.strip() and not line.startswith(("Note: ", "Warning: ", "Usage: "))
    ]
    errors = [line for line in lines if "Error: " in line] or [line for line in lines if "png: " in line] or lines[-1:]
    is_expected = "Traceback" not in outcome.err and "GRADCAM_TRACEBACK" not in outcome.err  # offered for other errors
    require(errors and is_expected, "no refusal in a line", outcome)
    line = re.sub(r"^.*?Error: ", "", errors[-1])
    require(20 < len(line) <= ONE_LINE, f"a refusal of {len(line)} characters", outcome)
    return line


def check_cells(
    provider: str, task: str, root: Path, commands: Sequence[str] = tuple(COMMANDS)
) -> Iterator[Cell | WrongCell]:
    """Yield the cell of each command, or what is wrong with it."""
    images, output = root / "images", root / "output" / f"{provider}-{task}"
    if not images.exists():
        images.mkdir()
        paint_images(images)
    output.mkdir(parents=True)
    job = Job(make_model(provider, task, root), task, images, output)
    before = os.getcwd()
    os.chdir(output)
    try:
        for command in commands:
            if command in IGNORES_TASK and task not in PROVIDERS[provider][1]:
                continue
            try:
                outcome = COMMANDS[command](job)
                refusal = read_refusal(outcome) if outcome.status else None
                yield Cell(provider, task, command, refusal and hide_paths(refusal, root))
            except WrongCell as wrong:
                wrong.args = (f"{provider}, {task}, {command}: {wrong}",)
                yield wrong
            except Exception as error:  # a traceback is what users would see
                yield WrongCell(f"{provider}, {task}, {command}: {type(error).__name__}: {error}")
    finally:
        os.chdir(before)


def hide_paths(line: str, root: Path) -> str:
    return re.sub(r"/\S*own_models\.py", "FILE.py", line.replace(f"{root}/", ""))
