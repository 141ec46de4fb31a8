"""Every command and every block of Python in docs/ runs as printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, read_blocks, run_page

PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = [page for page in PAGES if any(block.language in ("python", "bash") for block in read_blocks(page))]


def is_slow(page: Path) -> bool:
    return any(block.mark == "slow" for block in read_blocks(page))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=[pytest.mark.slow] if is_slow(page) else [])
        for page in RUN
    ],
)
def test_what_the_page_prints_runs(page: Path, desk: Path) -> None:
    run_page(page)
