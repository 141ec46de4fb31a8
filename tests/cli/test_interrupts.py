"""Test signals where Python drops the handler's exception: in `__del__`, in weak reference callbacks and in C code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import POSIX

MODEL = '''
import ctypes, os, signal, time, weakref
import torchvision

class Node:
    pass

def wait(*_):
    """Hold the process while an object is released, and have the signal come meanwhile."""
    os.kill(os.getpid(), {number})
    time.sleep(0.05)

class Released:
    def __del__(self):
        wait()

class Asked:
    answer = property(wait)

class Interrupted(torchvision.models.ResNet):
    def forward(self, images):
        output = super().forward(images)
        if {how!r} == "__del__":
            Released()
        elif {how!r} == "C":
            ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Asked()), b"answer")
        else:
            node = Node()
            kept = weakref.ref(node, wait)
            del node
        for _ in range(100):
            time.sleep(0.1)
        return output

def build():
    return Interrupted(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1]).eval()
'''


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("place", ["__del__", "weak reference", "C"])
def test_a_signal_that_python_drops_ends_the_command(tmp_path: Path, number: int, place: str) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(number=number, how=place))
    photo = Path(__file__).parents[2] / "assets" / "coffee.jpg"
    command = [sys.executable, "-m", "gradcam", "run", str(photo), "--model", "model.py:build", "-o", "out.png"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 128 + number
    assert "Traceback" not in ended.stderr
    assert "ignored" not in ended.stderr
