"""Ray says much of itself: here it is told not to. GRADCAM_TRACEBACK=1 lets it speak."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # it warns of what it will do otherwise
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what other processes of Ray's have to say
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # of what is not Python, which writes to standard error itself
}
SILENT = logging.CRITICAL + 1


def is_loud() -> bool:
    """Whether somebody looks for what went wrong inside."""
    return bool(os.environ.get("GRADCAM_TRACEBACK"))


def set_environment() -> None:
    """To be called before Ray is imported. What the user has set stays."""
    for name, value in () if is_loud() else ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ray's loggers write to files of its own alone, and nothing it warns of is shown."""
    if is_loud():
        yield
        return
    handlers = [
        handler
        for name in ("ray", "ray.data")
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    before = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(SILENT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"ray\b")
            warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
            yield
    finally:
        for handler, level in zip(handlers, before):
            handler.setLevel(level)


@contextlib.contextmanager
def no_standard_error() -> Iterator[None]:
    """What writes to the descriptor of standard error is not heard; for moments in which nobody else has anything to say."""
    if is_loud():
        yield
        return
    before = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)
