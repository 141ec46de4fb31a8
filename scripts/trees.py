"""The trees to compare: the working tree, a revision, or a folder with a checkout."""

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
    """Yield the folder with the package `gradcam`: of a folder, of a revision, or, without a name, of the working tree.

    A revision is checked out as a git worktree within the context. Raises `click.UsageError` if the name is neither.
    """
    if name is None or (Path(name) / "gradcam" / "__init__.py").is_file():
        yield ROOT if name is None else Path(name).resolve()
        return
    revision = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if revision.returncode:
        raise click.UsageError(f"{name}: neither a revision nor a folder with the package gradcam in it")
    with tempfile.TemporaryDirectory(prefix="tree-") as folder:
        tree = Path(folder).resolve() / "tree"
        worktree = _git("worktree", "add", "--quiet", "--detach", str(tree), revision.stdout.strip())
        if worktree.returncode:
            raise click.ClickException(worktree.stderr.strip())
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
