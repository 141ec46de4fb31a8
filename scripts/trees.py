"""States of this repository to compare with one another: the working tree, a revision, or a folder with a checkout."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def find_tree(name: str | None) -> Iterator[Path]:
    """The folder in which the package `gradcam` of a folder, of a revision, or without a name of the working tree lies.

    A revision has a worktree of git's for as long as this lasts. Raises `click.UsageError` where it is neither.
    """
    if name is None or (Path(name) / "gradcam" / "__init__.py").is_file():
        yield ROOT if name is None else Path(name).resolve()
        return
    known = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if known.returncode:
        raise click.UsageError(f"{name}: neither a revision nor a folder with the package gradcam in it")
    with tempfile.TemporaryDirectory(prefix="tree-") as folder:
        tree = Path(folder).resolve() / "tree"
        added = _git("worktree", "add", "--quiet", "--detach", str(tree), known.stdout.strip())
        if added.returncode:
            raise click.ClickException(added.stderr.strip())
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
