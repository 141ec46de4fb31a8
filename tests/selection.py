"""Select tests: skip those whose packages are not installed, and those that passed in an earlier part of CI."""

import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
# The packages of `.[test-all]` that `.[test]` lacks, and some of their dependencies. Those of the last line are
# optional.
PACKAGES = frozenset((
    "accelerate", "aiohttp", "boto3", "captum", "fastapi", "h11", "httpx", "ipykernel", "jsonschema", "lightning",
    "matplotlib", "moto", "nbclient", "nbformat", "numpydoc", "open_clip", "pandas", "playwright", "pyarrow", "pydicom",
    "pytorch_grad_cam", "ray", "s3fs", "segmentation_models_pytorch", "sklearn", "starlette", "tensorboard", "timm",
    "tokenizers", "torchcam", "transformers", "uvicorn", "webdataset",
    "effdet", "einops", "gcsfs", "monai", "pycocotools", "pytorch_lightning", "quantus", "ultralytics", "vit_pytorch",
))  # fmt: skip
MISSING = re.compile(r"needs (\w+)|could not import '(\w+)")
PASSED = "GRADCAM_PASSED_TESTS"  # an environment variable: the file that lists tests that need not run again


class MissingPackages:
    """A module finder, asked last: an import of a missing package in this repository's code skips the test.

    A check such as `find_spec` gets its answer. `package` is the package that the running test imported. A command
    reports the skip as an error, so the test fails.
    """

    package: str | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Skip the test, or return None so that Python raises its own error."""
        package = name.partition(".")[0]
        if package in PACKAGES and _is_ours():
            self.package = package
            pytest.skip(f"needs {package}", allow_module_level=True)
        return None

    def excuse(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Report a test as skipped if it failed after the import of a missing package."""
        if report.failed and self.package is not None:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: needs {self.package}")


def _is_ours() -> bool:
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        # Matches a file path, and the name of a frozen module.
        if re.search(r"importlib.util", frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return frame is not None and Path(frame.f_code.co_filename).is_relative_to(ROOT)


def find_missing(report: object) -> str | None:
    """Return the missing package that a test was skipped for, or None for any other report."""
    is_report = isinstance(report, (pytest.TestReport, pytest.CollectReport))
    if not is_report or not report.skipped or not isinstance(report.longrepr, tuple):
        return None
    match = MISSING.search(report.longrepr[2])
    package = match and (match[1] or match[2])
    return package if package in PACKAGES else None


def read_passed() -> frozenset[str]:
    """Return the tests that passed in an earlier part of CI."""
    file = os.environ.get(PASSED)
    return frozenset(Path(file).read_text().splitlines()) if file and Path(file).exists() else frozenset()


def note_passed(report: pytest.TestReport) -> None:
    """Add a passed test to the list.

    Workers of xdist leave that to the main process: in a worker, a test may still have replaced `open`.
    """
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if report.passed and report.when == "call" and os.environ.get(PASSED) and not is_worker:
        with open(os.environ[PASSED], "a") as file:
            file.write(f"{report.nodeid}\n")
