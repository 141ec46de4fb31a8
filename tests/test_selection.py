"""Test that tests which need a missing package are skipped, wherever it is imported."""

import importlib.util
import sys
from pathlib import Path

import pytest

from gradcam.models.providers.base import import_extra
from tests import selection


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> selection.MissingPackages:
    monkeypatch.setattr(selection, "PACKAGES", frozenset({"no_such_package"}))
    finder = selection.MissingPackages()
    finders = [path_finder for path_finder in sys.meta_path if not isinstance(path_finder, selection.MissingPackages)]
    monkeypatch.setattr(sys, "meta_path", [*finders, finder])
    return finder


def test_an_import_in_a_test_skips_it(finder: selection.MissingPackages) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package"):
        import no_such_package.part  # noqa: F401
    assert finder.package == "no_such_package"


def test_an_import_in_the_package_skips_the_test(finder: selection.MissingPackages) -> None:
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package"):
        import_extra("no_such_package", "hf")


def test_a_question_has_an_answer(finder: selection.MissingPackages) -> None:
    assert importlib.util.find_spec("no_such_package") is None
    with pytest.raises(ModuleNotFoundError):
        import another_package  # noqa: F401


def report(outcome: str, reason: object) -> pytest.TestReport:
    return pytest.TestReport("a.py::b", ("a.py", 1, "b"), {}, outcome, reason, "call")  # type: ignore[arg-type]


def test_reports_of_missing_packages_are_told_from_others(finder: selection.MissingPackages) -> None:
    for reason in ("Skipped: needs no_such_package", "Skipped: could not import 'no_such_package': No module"):
        assert selection.find_missing(report("skipped", ("a.py", 1, reason))) == "no_such_package"
    assert selection.find_missing(report("skipped", ("a.py", 1, "Skipped: needs a GPU"))) is None
    assert selection.find_missing(report("failed", "needs no_such_package")) is None


def test_what_passed_is_noted_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.PASSED, str(tmp_path / "passed"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert selection.read_passed() == frozenset()
    for outcome in ("passed", "failed", "skipped"):
        selection.note_passed(report(outcome, None))
        assert selection.read_passed() == {"a.py::b"}
