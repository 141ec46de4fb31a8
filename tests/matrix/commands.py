"""Run every command on every model, and verify what it writes."""

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
SQUARE = (52, 30, 76, 54)  # left, top, right, bottom; off the centre of each axis, and within a central crop
MIN_CHANGE_RATIO = 1.1  # The heatmap has to change this many times as much at the square as elsewhere.
MAX_REFUSAL_CHARACTERS = 400
TARGETS: dict[str, tuple[str, ...]] = {
    "classification": ("--class", "0"), "detection": ("--box", "0"),
    "segmentation": ("--class", "0", "--mask", ",".join(map(str, SQUARE))), "text": ("--text", "a red square"),
    "likeness": ("--like", "{folder}/other.png"), "caption": ("--caption", "--word", "0"),
    "keypoints": ("--keypoint", "0"),
}  # fmt: skip
PLACED = {"detection": ("--missed", ",".join(map(str, SQUARE)), "--class", "1")}  # targets with a fixed place


@dataclass(frozen=True)
class Outcome:
    """The printed output of a command, and its exit status."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Cell:
    """The result of one command for a provider and a task: `refusal` is the error line, None for a verified result."""

    provider: str
    task: str
    command: str
    refusal: str | None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.provider, self.task, self.command


class WrongCell(AssertionError):
    """A command that gave neither a verified result nor a refusal in one line."""


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
    """Save noise without and with a red square, and the square elsewhere, also in a subfolder."""
    noise = np.random.default_rng(0).integers(70, 110, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    x0, y0, x1, y1 = SQUARE
    painted = noise.copy()
    painted[y0:y1, x0:x1] = (230, 20, 20)
    painted[y0 + 6 : y1 - 6, x0 + 6 : x1 - 6] = (250, 120, 20)
    shifted = np.roll(painted, (-12, -30), (0, 1))
    (folder / "images").mkdir()
    for name, pixels in {"plain": noise, "painted": painted, "other": shifted}.items():
        Image.fromarray(pixels).save(folder / f"{name}.png")
        Image.fromarray(pixels).save(folder / "images" / f"{name}.png")


def require(condition: object, reason: str, outcome: Outcome | None = None) -> None:
    if not condition:
        if outcome is not None:
            reason += f": status {outcome.status}, {outcome.err.strip()[-600:] or outcome.out[-300:]}"
        raise WrongCell(reason)


@dataclass
class Job:
    """A model and a task, with a folder for the output of its commands."""

    model: Model
    task: str
    images: Path  # the folder that `paint_images` wrote
    output: Path

    def call(self, command: str, *arguments: str | Path, target: Sequence[str] | None = None) -> Outcome:
        """Run a command with the options of the model and the target."""
        target_options = TARGETS[self.task] if target is None else target
        parts = [part.format(folder=self.images) for part in target_options]
        task = ["--task", NAMES.get(self.task, self.task)]
        model = ["--model", self.model.name, *self.model.options]
        return invoke(command, *arguments, *model, *task, *parts, "--device", "cpu")

    def read_maps(self, folder: Path) -> dict[str, np.ndarray]:
        return {name: np.load(path) for name, path in index_files(folder, "*.npy").items()}


def index_files(folder: Path, pattern: str) -> dict[str, Path]:
    """Return files by the image that they are named for."""
    return {path.stem.partition("-")[0]: path for path in sorted(folder.glob(pattern))}


def check_run(job: Job) -> Outcome:
    """Check that the heatmap changes most where the square is painted, in image pixels."""
    output = job.output / "run"
    images = [job.images / "plain.png", job.images / "painted.png"]
    options = ("-o", output, "--save", "overlay,map", "--base", "color", "--alpha", "1")
    outcome = job.call("run", *images, *options, target=PLACED.get(job.task))
    if outcome.status:
        return outcome
    overlays = {name: path for name, path in index_files(output, "*.png").items() if name != "other"}
    require(sorted(overlays) == ["painted", "plain"], f"overlays of {sorted(overlays)}", outcome)
    before, after = (np.array(Image.open(overlays[name]).convert("RGB")).astype(int) for name in ("plain", "painted"))
    require(before.shape == (HEIGHT, WIDTH, 3), f"an overlay of {before.shape}")
    changed = abs(after - before).sum(2)
    x0, y0, x1, y1 = SQUARE
    inside = np.zeros((HEIGHT, WIDTH), bool)
    inside[y0:y1, x0:x1] = True
    ratio = changed[inside].mean() / max(changed[~inside].mean(), 1e-9)
    require(ratio >= MIN_CHANGE_RATIO, f"the heatmap changed {ratio:.2f} times as much at the square as elsewhere")
    return outcome


def check_json(job: Job) -> Outcome:
    """Check that standard output has a record for each image, and nothing else."""
    outcome = job.call("run", job.images / "painted.png", "-o", job.output / "json", "--json")
    if outcome.status == 0:
        (record,) = [json.loads(line) for line in outcome.out.splitlines()]
        require(record["status"] == "ok" and record["explained"], f"a record of {record}")
        overlay = Path(record["explained"][0]["overlay"]).name
        require((job.output / "json" / overlay).exists(), "no overlay of that name")
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
    """Check that the maps of a folder equal those of single images."""
    output = job.output / "batch"
    outcome = job.call("batch", job.images / "images", "-o", output, "--save", "overlay,map", "--quiet")
    if outcome.status == 0:
        records = [json.loads(line) for line in (output / "manifest.jsonl").read_text().splitlines()]
        require([record["status"] for record in records] == ["ok"] * 3, f"records of {records}")
        single, together = job.read_maps(job.output / "run"), job.read_maps(output)
        require(sorted(together) == ["other", "painted", "plain"], f"maps of {sorted(together)}")
        for name, expected in single.items() if job.task not in PLACED else ():
            if name == "other":  # the reference image of likeness targets
                continue
            scale = max(abs(expected).max(), 1e-9)
            difference = abs(together[name] - expected).max()
            require(difference <= 1e-2 * scale, f"another map of {name} than a single image has")
    return outcome


def check_resume(job: Job) -> Outcome:
    """Check that a run that lost its last record writes the same record again."""
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
    outcome = invoke("report", output)
    record = json.loads((output / "manifest.jsonl").read_text().splitlines()[0])
    if record["error"]:  # The gallery then consists of errors only.
        return Outcome(1, "", f"Error: {record['error']}")
    if outcome.status == 0:
        pages = "".join(path.read_text(encoding="utf-8") for path in output.glob("*.html"))
        names = ("plain.png", "painted.png", "other.png")
        require(all(name in pages for name in names), "an image is missing in the gallery")
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
    """Check that a model agrees with itself."""
    names = (job.model.name, job.model.name)
    # These options exist only for detectors.
    options = [option for option in job.model.options if option not in ("--threshold", "0")]
    outcome = invoke("diff", *names, job.images / "painted.png", "--json", *options, "--device", "cpu")
    if outcome.status == 0:
        correlations = re.findall(r'"correlation": ?([-\d.e]+)', outcome.out)
        require(correlations and abs(float(correlations[0]) - 1) < 1e-6, f"correlations of {correlations}")
    return outcome


def check_ui(job: Job) -> Outcome:
    """Check that the server of the local page answers with a map, or refuses in one line."""
    from starlette.testclient import TestClient

    from gradcam.cli import _settings
    from gradcam.cli.ui import _load
    from gradcam.errors import GradcamError
    from gradcam.ui.explainer import Explainer
    from gradcam.ui.guard import TOKEN_HEADER
    from gradcam.ui.model_cache import ModelCache
    from gradcam.ui.server import Server
    from gradcam.ui.strip import ImageStrip

    options = dict(zip(job.model.options[::2], job.model.options[1::2]))
    choice = _settings.ModelChoice(job.model.name, device="cpu", task="auto")
    if "--weights" in options:
        choice = _settings.replace(choice, weights=Path(options["--weights"]))
    if "--size" in options:
        choice = _settings.replace(choice, size=int(options["--size"]))
    try:
        models = ModelCache(lambda request: _load(choice, None, request))
        server = Server(Explainer(models, ImageStrip([("painted.png", job.images / "painted.png")])), "usual")
        web = TestClient(server.to_application({"testserver"}), headers={TOKEN_HEADER: server.token})
        answer = web.post("/ask", content=json.dumps({"tab": "one", "picture": 0})).json()
        server.jobs.close()
    except GradcamError as error:
        return Outcome(1, "", f"Error: {error}")
    if "error" in answer:
        return Outcome(1, "", f"Error: {answer['error']}")
    require("page" in answer, f"an answer of {sorted(answer)}")
    return Outcome(0, json.dumps(answer)[:300], "")


IGNORES_TASK = ("diff", "ui")  # These commands read the task from the model.
COMMANDS: dict[str, Callable[[Job], Outcome]] = {
    "run": check_run, "--json": check_json, "compare": check_compare, "page": check_page, "batch": check_batch,
    "batch --resume": check_resume, "report": check_report, "check": check_check, "evaluate": check_evaluate,
    "diff": check_diff, "ui": check_ui,
}  # fmt: skip


def read_refusal(outcome: Outcome) -> str:
    """Return the line that refuses the cell; raise `WrongCell` for a traceback or an unclear error."""
    lines = [
        line
        for line in outcome.err.splitlines()
        if line.strip() and not line.startswith(("Note: ", "Warning: ", "Usage: "))
    ]
    errors = [line for line in lines if "Error: " in line] or [line for line in lines if "png: " in line] or lines[-1:]
    # The hint at GRADCAM_TRACEBACK appears only for unexpected errors.
    is_expected = "Traceback" not in outcome.err and "GRADCAM_TRACEBACK" not in outcome.err
    require(errors and is_expected, "no refusal in a line", outcome)
    line = re.sub(r"^.*?Error: ", "", errors[-1])
    require(20 < len(line) <= MAX_REFUSAL_CHARACTERS, f"a refusal of {len(line)} characters", outcome)
    return line


def check_cells(
    provider: str, task: str, root: Path, commands: Sequence[str] = tuple(COMMANDS)
) -> Iterator[Cell | WrongCell]:
    """Yield the cell of each command, or the error."""
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
            except Exception as error:  # Users would see a traceback here.
                yield WrongCell(f"{provider}, {task}, {command}: {type(error).__name__}: {error}")
    finally:
        os.chdir(before)


def hide_paths(line: str, root: Path) -> str:
    return re.sub(r"/\S*own_models\.py", "FILE.py", line.replace(f"{root}/", ""))
