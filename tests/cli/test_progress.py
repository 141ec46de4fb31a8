"""Test the progress bar: its text on a terminal, and that it is erased at the end."""

from __future__ import annotations

import io
import sys
import time
import warnings

import pytest

from gradcam.cli._settings import OutputMode
from gradcam.cli._terminal import configure_warnings, print_above_bar, show_pass_progress, show_progress_bar
from gradcam.errors import GradcamWarning

LOUD, QUIET = OutputMode(as_json=False, quiet=False), OutputMode(as_json=False, quiet=True)


class Terminal(io.StringIO):
    """Stream that acts as a terminal of 80 columns and renders the text written to it."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Return the lines on the screen, without trailing blanks."""
        lines = []
        for sent in self.getvalue().split("\n"):
            line = ""
            for part in sent.split("\r"):
                line = part + line[len(part) :]
            lines.append(line.rstrip())
        return lines


def attach_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error with a terminal. A fixture cannot: pytest replaces standard error after it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a one-element list that holds the current value of `time.monotonic`."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_the_bar_has_the_share_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = attach_terminal(monkeypatch)
    with show_progress_bar(LOUD, "images", 200, 100) as bar:
        assert terminal.lines == [f" 50 % |{'█' * 30}{' ' * 30}| 100 of 200"]
        clock[0] += 5
        bar.failed = 3
        bar.update(110)
        assert terminal.lines == [" 55 % |██████████▌        | 110 of 200   2.00 images/s   0:00:45 left, 3 failed"]
        clock[0] += 4000
        bar.update(111)
        assert terminal.lines[0].endswith("| 111 of 200   0.00 images/s   9:00:04 left, 3 failed")
        assert len(terminal.lines[0]) == 79
    assert terminal.lines == [""]


def test_the_bar_is_drawn_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = attach_terminal(monkeypatch)
    with show_progress_bar(LOUD, "images", 1000) as bar:
        for result in range(1, 101):
            clock[0] += 0.01
            bar.update(result)
        drawn = terminal.getvalue().count("|") / 2
    assert 9 <= drawn <= 11


def test_a_new_total_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    with show_pass_progress(LOUD) as progress:
        progress(1, 31)
        assert "| 1 of 31" in terminal.lines[0]


def test_lines_are_printed_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    monkeypatch.setattr(warnings, "filters", [])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    configure_warnings()
    with show_progress_bar(LOUD, "images", 3) as bar:
        print_above_bar("a.jpg: is empty")
        bar.update(1)
        warnings.warn("The map is\x1b[2J blank.", GradcamWarning, stacklevel=1)
        print("printed by a model")
        *lines, last = terminal.lines
        assert lines[:2] == ["a.jpg: is empty", r"Note: The map is\x1b[2J blank."]
        assert last.endswith("| 1 of 3") or "printed by a model" in terminal.getvalue()
    assert terminal.lines[-1] == ""
    print_above_bar("the end")
    assert terminal.lines[-2:] == ["the end", ""]


def test_no_bar_is_drawn_where_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    with show_progress_bar(QUIET, "images", 2) as bar:
        bar.update(1)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with show_progress_bar(LOUD, "images", 2) as bar:
        bar.update(1)
    assert terminal.getvalue() == ""


def test_a_terminal_that_is_gone_stops_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)

    def fail(_: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", fail)
    with show_progress_bar(LOUD, "images", 2) as bar:
        bar.update(1)


def test_the_bar_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach_terminal(monkeypatch)
    with show_progress_bar(LOUD, "images", 2) as bar:
        bar.update(1)
    # After 80 columns, a terminal would move the cursor to the next line.
    assert max(map(len, terminal.getvalue().split("\r"))) == 79
