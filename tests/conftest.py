from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradcam

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
