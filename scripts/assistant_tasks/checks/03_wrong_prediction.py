"""The cause is the preprocessing, and the corrected command prints the class and probability of the training script."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from common import TASKS, import_file, run_check, run_command
from PIL import Image

LABELS = ("too dark", "right", "too bright")


def check(answer):
    shutil.copy(TASKS / "03_wrong_prediction/train.py", "train.py")
    training = import_file(Path("train.py"), "train")
    model = measure_brightness(training.build())
    torch.save(
        {"epoch": 7, "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()}}, "best.ckpt"
    )
    Path("labels.txt").write_text("\n".join(LABELS))
    noise = np.random.default_rng(0).integers(-20, 20, (96, 96, 3))
    Image.fromarray((150 + noise).astype(np.uint8)).save("photo.jpg", quality=95)
    images = torch.from_numpy(np.array(Image.open("photo.jpg"))).permute(2, 0, 1)[None] / 255
    expected = model((images - 0.5) / 0.5).softmax(1)[0]
    assert expected.argmax() == 1
    assert answer.CAUSE in answer.CAUSES, "CAUSE is not one of CAUSES"
    assert "not prepared as in training" in answer.CAUSE, "CAUSE is wrong"
    ended = run_command(answer.COMMAND)
    assert ended.returncode == 0, f"exit status {ended.returncode}: {ended.stderr[-300:]}"
    (record,) = [json.loads(line) for line in ended.stdout.splitlines()]
    top = record["predictions"][0]
    assert top["label"] == LABELS[1], f"the command predicts {top['label']!r}"
    assert abs(top["probability"] - float(expected[1])) < 1e-3, "the probability is not that of the training script"


def measure_brightness(model):
    """Set weights for which the class depends on the mean of the input: below -1/3, between, or above 1/3."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model[0].weight[0] = 1 / model[0].weight[0].numel()
        model[0].bias[0] = 3
        model[2].weight[0, 0] = 1 / 9
        model[5][1].weight[:, 0] = torch.tensor([-5.0, 1, 7.0])  # no zero, because each class needs a gradient
        model[5][1].bias[:] = torch.tensor([6 * (3 - 1 / 3), 0, -6 * (3 + 1 / 3)])
    return model.eval()


if __name__ == "__main__":
    run_check(check)
