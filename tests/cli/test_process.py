"""Test the settings that the command changes in its own process only."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torchvision

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
MEASURE = """
import json, os, resource, sys
BLOCK = 24 * 2**20  # above what the C library keeps by itself, until it has learnt otherwise

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):  # two blocks at a time: a page for each 4096 bytes, if their memory was given back
        blocks = [bytearray(BLOCK), bytearray(BLOCK)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

%s
print(json.dumps([count_faults(), os.environ.get("GOMP_SPINCOUNT")]))
"""
COMMAND = """
from gradcam.cli import main
sys.argv = ["gradcam", "methods"]
kept, sys.stdout = sys.stdout, open(os.devnull, "w")
try:
    main()
except SystemExit as end:
    assert end.code == 0
sys.stdout = kept
"""
MAX_FAULTS_OF_CACHED_MEMORY = 30_000  # Without the cache, each of the 245,760 requested pages would cause a fault.


def measure_process(statements: str, more: Mapping[str, str] | None = None) -> tuple[int, str | None]:
    """Return the page faults of a process after these statements, and its GOMP_SPINCOUNT."""
    prefixes = ("MALLOC_", "GLIBC_TUNABLES", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    command = [sys.executable, "-c", MEASURE % statements]
    result = subprocess.run(command, env={**environment, **(more or {})}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    faults, spins = json.loads(result.stdout)
    return faults, spins


@GLIBC
def test_the_command_keeps_freed_memory_and_spins_for_a_moment() -> None:
    faults, spins = measure_process(COMMAND)
    assert faults < MAX_FAULTS_OF_CACHED_MEMORY
    assert spins == "5000"


def test_threads_spin_less_where_others_decode() -> None:
    words = 'sys.argv = ["gradcam", "batch", "--help"]'
    assert measure_process(COMMAND.replace('sys.argv = ["gradcam", "methods"]', words))[1] == "2000"


@GLIBC
def test_a_program_that_imports_the_package_is_left_alone() -> None:
    faults, spins = measure_process("import gradcam, gradcam.cli")
    assert faults > MAX_FAULTS_OF_CACHED_MEMORY
    assert spins is None


@GLIBC
@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_the_environment_says_of_memory_stands(variable: str) -> None:
    message = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    assert measure_process(COMMAND, {variable: message[variable]})[0] > MAX_FAULTS_OF_CACHED_MEMORY


@pytest.mark.parametrize(
    ("variables", "spins"), [({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7"), ({}, "5000")]
)
def test_what_the_environment_says_of_waiting_stands(variables: Mapping[str, str], spins: str | None) -> None:
    assert measure_process(COMMAND, variables)[1] == spins


@pytest.mark.parametrize(("variables", "threads"), [({}, "2"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_threads_are_as_many_as_a_quota_allows(variables: Mapping[str, str], threads: str) -> None:
    code = (
        "import os; os.sched_getaffinity = lambda _: range(8)\n"
        "from gradcam.cli import _process; _process.count_cores = lambda: 2\n"
        "_process.configure_process(); print(os.environ.get('OMP_NUM_THREADS'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{threads}\n"


END = """
import sys
from gradcam.__main__ import start

class Held:
    def __del__(self) -> None:
        print("taken apart")

held = Held()
sys.argv = ["gradcam", *sys.argv[1:]]
%s
start()
"""


# Registers an exit handler while the command runs, as libraries do. It runs in a module of its own, so that its names
# outlive the main module.
LATE_EXIT_HANDLER = """
import atexit
from click import Group
make_context = Group.make_context
def make_later(*given, **more):
    atexit.register(print, "left for the end")
    return make_context(*given, **more)
Group.make_context = make_later
"""


def run_to_end(*words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", END % first, *words]
    return subprocess.run(code, capture_output=True, text=True, env={**os.environ, "GRADCAM_TRACEBACK": ""})


# Registers an exit handler before the package is imported, and starts a thread that outlives the command.
EARLY_EXIT_HANDLER = """
import atexit, threading, time
atexit.register(print, "left from before")
threading.Thread(target=lambda: time.sleep(0.5) or print("a thread")).start()
"""


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["--none-such"], 2)])
def test_it_ends_once_all_is_done_and_takes_nothing_apart(words: Sequence[str], status: int) -> None:
    result = run_to_end(*words, first=f"exec({EARLY_EXIT_HANDLER!r}, {{}})\nexec({LATE_EXIT_HANDLER!r}, {{}})")
    assert result.returncode == status
    assert ("gradcam" in result.stdout) == (status == 0)
    counts = [result.stdout.count(text) for text in ("a thread", "left for the end", "left from before")]
    assert counts == [1, 1, 1]
    assert "taken apart" not in result.stdout


@pytest.mark.slow
def test_where_code_of_a_users_own_ran_python_ends_as_it_does(tmp_path: Path) -> None:
    log, script = tmp_path / "log.txt", tmp_path / "mine.py"
    script.write_text(f"log = open({str(log)!r}, 'w')\nlog.write('left open')\ndef make(): return 1\n")
    result = run_to_end("run", str(script), "--model", f"{script}:make")
    assert result.returncode == 2, result.stderr
    assert log.read_text() == "left open"


@pytest.mark.parametrize("watch", ["settrace", "setprofile"])
def test_who_watches_has_yet_to_tell(watch: str) -> None:
    result = run_to_end("--version", first=f"exec('import sys; sys.{watch}(lambda *_: None)', {{}})")
    assert result.returncode == 0
    assert "taken apart" in result.stdout


COMPILER = """
import torch, torchvision
assert "torch._dynamo" not in sys.modules
box = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
assert torchvision.ops.roi_align(torch.ones(1, 3, 8, 8), [box], 2).eq(1).all()
%s
assert type(sys.modules["torch._dynamo.utils"]).__name__ == "module"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(torch.nn.Linear(3, 3), backend='eager')(torch.ones(2, 3))",
        "import torch._dynamo.utils as found; assert found.counters is torch._dynamo.utils.counters",
        "from torchvision.ops.roi_align import is_compile_supported as ask; assert isinstance(ask('cpu'), bool)",
    ],
)
def test_torchs_compiler_is_imported_when_it_is_used(use: str) -> None:
    load = "from gradcam.cli._process import configure_process; import sys; configure_process()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", load + COMPILER % use], check=True)


@pytest.mark.slow
def test_torchvision_models_need_no_compiler(tmp_path: Path, photo: Callable[[str], Path]) -> None:
    weights, names = tmp_path / "mine.pth", ["run", str(photo("coffee.jpg")), "-o", str(tmp_path / "map.png"), "-q"]
    state = torchvision.models.resnet18(num_classes=4).state_dict()
    torch.save(state, weights)
    words = [*names, "--model", "resnet18", "--weights", str(weights), "--device", "cpu"]
    code = f"""
import sys
from gradcam.cli import main
sys.argv = ["gradcam", *{words!r}]
try:
    main()
except SystemExit as end:
    assert end.code == 0
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "map.png").exists()


@pytest.mark.parametrize("command", ["run", "batch", "check", "layers", "page"])
def test_torch_is_imported_without_garbage_collection(
    command: str, photo: Callable[[str], Path], tmp_path: Path
) -> None:
    words = [command, str(photo("coffee.jpg")), "-o", str(tmp_path / ("map.html" if command == "page" else "out"))]
    words = [command] if command == "layers" else words
    code = f"""
import gc, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("collects" if gc.isenabled() else "waits", flush=True)
            sys.exit()

from gradcam.cli import main
sys.meta_path.insert(0, Finder())
sys.argv = ["gradcam", *{words!r}]
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["waits"]


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_the_commands_end_and_pythons_prints_nothing(number: int) -> None:
    code = """
import os, signal, sys
from gradcam.cli._terminal import handle_signals
with handle_signals():
    pass
os.kill(os.getpid(), int(sys.argv[1]))
print("it goes on")
"""
    result = subprocess.run([sys.executable, "-c", code, str(int(number))], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (128 + number, "", "")


ODD = """
import torch

class Odd(BaseException):
    pass

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Conv2d(3, 4, 3), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            raise Odd("in forward")
        return self.layer(x).mean((2, 3))

def make():
    raise Odd("in make")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), [("make", "Odd: in make"), ("Net", "Odd: in forward")])
def test_whatever_code_of_a_users_own_raises_is_told_in_a_line(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    photo = Path(__file__).parents[2] / "assets" / "cat_and_espresso.jpg"
    result = run_to_end("run", str(photo), "--model", f"{tmp_path / 'odd.py'}:{name}", "-o", str(tmp_path))
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert reason in result.stderr
