from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcam
from tests import s3 as s3_protocol
from tests.browser import CHROMIUM, FLAGS, Visit, sync_playwright

torch.set_num_threads(1)  # several test processes at once would otherwise wait for one another's threads

for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) == signal.SIG_IGN:  # as under nohup, and commands started here would inherit it
        signal.signal(number, lambda *_: None)  # this process goes on as before, and they have the default

ASSETS = Path(__file__).parent.parent / "assets"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="there is no CUDA device here")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def photo() -> Callable[[str], Path]:
    return lambda name: ASSETS / name


@pytest.fixture(scope="session")
def classifier() -> gradcam.Classifier:
    return gradcam.load_classifier(device="cpu")


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The address of a server that speaks the S3 protocol."""
    with s3_protocol.serve() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket there, `s3://...`, which the environment has an address and credentials for."""
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
    """Opens pages; in the end nothing may have gone wrong on any, nor been asked of the network."""
    visits: list[Visit] = []

    def start(**options: Any) -> Visit:
        visits.append(Visit(browser, **options))
        return visits[-1]

    yield start
    for each in visits:
        each.context.close()
    assert [wrong for each in visits for wrong in each.wrongs] == []
    requests = [url for each in visits for url in each.requests]
    assert [url for url in requests if not url.startswith(("file:///", "data:", "about:blank"))] == []
