import ctypes
import gc
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcam
from tests import s3 as s3_protocol
from tests import selection
from tests.browser import CHROMIUM, FLAGS, Visit, sync_playwright

torch.set_num_threads(1)  # With several test processes, the threads would compete for the cores.

for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    # Under nohup, SIGINT is ignored, and commands started here would inherit that.
    if signal.getsignal(number) == signal.SIG_IGN:
        # A handler that does nothing keeps this process running, and child processes get the default.
        signal.signal(number, lambda *_: None)

LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
ASSETS = Path(__file__).parent.parent / "assets"


missing_packages = selection.MissingPackages()
sys.meta_path.append(missing_packages)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = selection.read_passed()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
    skips = {
        "cuda": (torch.cuda.is_available(), pytest.mark.skip(reason="there is no CUDA device here")),
        "mps": (torch.backends.mps.is_available(), pytest.mark.skip(reason="there is no Apple GPU here")),
    }
    for item in items:
        for name, (is_available, skip) in skips.items():
            if item.get_closest_marker(name) is not None and not is_available:
                item.add_marker(skip)


def pytest_runtest_setup() -> None:
    missing_packages.package = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    missing_packages.excuse(item, report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    selection.note_passed(report)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return None if selection.find_missing(report) is None else ("deselected", "", "")


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    skipped = stats.get("skipped", [])  # this includes files that import a missing package
    stats["skipped"] = [report for report in skipped if selection.find_missing(report) is None]
    reports = [*skipped, *stats.get("deselected", [])]
    missing = {package for report in reports if (package := selection.find_missing(report)) is not None}
    if missing:
        terminalreporter.write_line(
            f'Left out: tests that need {", ".join(sorted(missing))}. Install them with: pip install -e ".[test-all]"'
        )
    if config.option.markexpr == "not slow":
        terminalreporter.write_line('Left out: slow tests. Run all tests with: pytest -m ""')


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _release_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Release the memory of a module's models, which cached functions and the C library would keep."""
    yield
    for function in vars(request.module).values():
        if hasattr(function, "cache_clear") and function.__module__ == request.module.__name__:
            function.cache_clear()
    gc.collect()
    if sys.platform == "linux" and hasattr(LIBRARY, "malloc_trim"):
        LIBRARY.malloc_trim(0)


@pytest.fixture(scope="session")
def photo() -> Callable[[str], Path]:
    return lambda name: ASSETS / name


@pytest.fixture(scope="session")
def classifier() -> gradcam.Classifier:
    return gradcam.load_classifier(device="cpu")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """Return the address of an S3 server."""
    with s3_protocol.serve() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty S3 bucket; the environment has the address and credentials."""
    with s3_protocol.bucket(s3_address, monkeypatch) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Return a function that opens pages. At the end, check that no page had an error or used the network."""
    visits: list[Visit] = []

    def start(**options: Any) -> Visit:
        visits.append(Visit(browser, **options))
        return visits[-1]

    yield start
    for entry in visits:
        entry.context.close()
    assert [wrong for item in visits for wrong in item.wrongs] == []
    requests = [url for item in visits for url in item.requests]
    assert [url for url in requests if not url.startswith(("file:///", "data:", "about:blank"))] == []
