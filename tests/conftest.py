from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gradcam
from tests import s3 as s3_protocol

torch.set_num_threads(1)  # several test processes at once would otherwise wait for one another's threads

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
