"""The command passes a clear photograph, and ends with status 1 for noise."""

import json
import shutil
from pathlib import Path

import numpy as np
from common import ASSETS, read_rgb, run_check, run_command
from PIL import Image


def check(answer):
    shutil.copy(ASSETS / "coffee.jpg", "photo.jpg")
    expect(answer.COMMAND, 0, {"passed"})
    noise = np.random.default_rng(0).integers(0, 255, (240, 240, 3), dtype=np.uint8)
    Image.fromarray(noise).save("photo.jpg")
    expect(answer.COMMAND, 1, {"undecided", "failed"})


def expect(line, status, outcomes):
    Path("gate.png").unlink(missing_ok=True)
    ended = run_command(line)
    assert ended.returncode == status, f"the exit status is {ended.returncode}, not {status}"
    (record,) = [json.loads(text) for text in ended.stdout.splitlines()]
    assert record["outcome"] in outcomes, f"the outcome is {record['outcome']}"
    assert min(read_rgb("gate.png").shape[:2]) > 100, "gate.png is no panel"


if __name__ == "__main__":
    run_check(check)
