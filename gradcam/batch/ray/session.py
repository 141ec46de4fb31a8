"""Start Ray on this machine or join a cluster, and plan actors for its resources."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gradcam.errors import ClusterError, shorten, to_pip_command
from gradcam.options import MAX_PIXELS, count_cores

CONNECT_TIMEOUT_SECONDS = 10
# Ray uses gRPC, which runs over HTTP/2. On a new HTTP/2 connection, each side first sends a frame of this type.
HTTP2_SETTINGS_FRAME = 4
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, HTTP2_SETTINGS_FRAME, 0, 0, 0, 0, 0])
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Without this, Ray warns about a future change.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # This hides the log lines of Ray's other processes.
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # Ray's C++ code writes to standard error directly.
}
SILENT_LEVEL = logging.CRITICAL + 1
# The maximum number of cores of a CPU actor. With more cores, threads would wait for each other at each layer.
MAX_CORES_PER_ACTOR = 4
# The size of Ray's object store, which holds the messages between processes.
OBJECT_STORE_BYTES = 2**29
# Ray divides a GPU into at most this many parts.
GPU_FRACTIONS = 10_000


# If nothing answers at an address, `ray.init` retries silently for minutes. If a server other than Ray answers,
# `ray.init` ends the process. grpcio could check the address, but ray[data] does not install grpcio.
def check_address(address: str) -> None:
    """Raise `ClusterError` if the address is invalid, or if Ray does not answer there."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        advice = "On a machine of the cluster, give HOST:PORT of the head, such as 10.0.0.1:6379."
        alternative = "Alternatively, submit the whole command with `ray job submit`."
        raise ClusterError(f"{address}: Ray Client addresses are not supported. {advice} {alternative}")
    match = re.fullmatch(r"\[?([^\s/]+?)\]?:(\d{1,5})", address)
    if match is None:
        expected = "HOST:PORT, such as 10.0.0.1:6379, or auto"
        raise ClusterError(f"The Ray address is {shorten(address)}, expected {expected}.")
    try:
        with socket.create_connection((match[1], int(match[2])), timeout=CONNECT_TIMEOUT_SECONDS) as connection:
            connection.sendall(HTTP2_GREETING)
            try:
                first_frame = connection.recv(9)
            except ConnectionError:  # A server that is not HTTP/2 may reset the connection.
                first_frame = b""
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        problem = f"{address}: the Ray head does not answer ({reason})"
        raise ClusterError(f"{problem}. Start the head with `ray start --head`.") from error
    if len(first_frame) < 9 or first_frame[3] != HTTP2_SETTINGS_FRAME:
        advice = "Give the port of the head, usually 6379."
        raise ClusterError(f"{address}: the server at this address is not Ray. {advice}")


def shows_tracebacks() -> bool:
    """Return True if the user wants full tracebacks and all messages of Ray."""
    return bool(os.environ.get("GRADCAM_TRACEBACK"))


@contextlib.contextmanager
def quiet_ray() -> Iterator[None]:
    """Hide Ray's log messages and warnings on the terminal. Ray's log files stay complete."""
    handlers = logging.getLogger("ray").handlers + logging.getLogger("ray.data").handlers
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        for handler in handlers:
            if isinstance(handler, logging.StreamHandler):
                stack.callback(handler.setLevel, handler.level)
                handler.setLevel(SILENT_LEVEL)
        warnings.filterwarnings("ignore", module=r"ray\b")
        warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
        yield


@contextlib.contextmanager
def stderr_discarded() -> Iterator[None]:
    """Discard everything that is written to the file descriptor of standard error."""
    saved_stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


@dataclass(frozen=True)
class ActorLayout:
    """The number of actors, and the resources of each actor.

    `cores` is the number of CPU cores per actor. If a machine has fewer cores than actors, `cores` is below 1. `device`
    is "cpu" or "cuda". `per_gpu` is the number of actors that share a GPU.
    """

    actors: int
    cores: float
    device: str
    per_gpu: int = 1

    @property
    def gpus(self) -> float:
        """Return the fraction of a GPU per actor, rounded down to a fraction that Ray supports."""
        return (GPU_FRACTIONS // self.per_gpu) / GPU_FRACTIONS if self.device == "cuda" else 0

    @property
    def threads(self) -> int:
        return max(1, math.floor(self.cores))


def import_ray() -> ModuleType:
    """Import Ray with its messages turned off. Raises `ClusterError` if Ray cannot be imported."""
    for name, value in () if shows_tracebacks() else ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # Keep the user's settings.
    try:
        import ray
        import ray.data
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "ray"
        problem = "is not installed" if is_missing else f"cannot be imported ({' '.join(str(error).split())})"
        raise ClusterError(f"Ray {problem}: {to_pip_command('ray')}") from error
    return ray


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[ModuleType]:
    """Join the Ray cluster at the address or at RAY_ADDRESS. Without an address, start Ray on this machine.

    When the context ends, the connection is closed, and a local Ray is stopped. If the caller has already joined Ray,
    the existing connection is used and stays open. Raises `ClusterError` if Ray is not installed or cannot be reached.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        check_address(address)
    with contextlib.ExitStack() as stack:
        _init_ray(ray, address, stack)
        yield ray


def _init_ray(ray: Any, address: str, stack: contextlib.ExitStack) -> None:
    """Start or join Ray, and register the clean-up on `stack`."""
    options: dict[str, Any] = {"address": address}
    if MAX_PIXELS in os.environ:  # Actors on other machines need the limit as well.
        options["runtime_env"] = {"env_vars": {MAX_PIXELS: os.environ[MAX_PIXELS]}}
    if address == "local":
        folder = tempfile.mkdtemp(prefix="gradcam-ray-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if os.environ.keys().isdisjoint({"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}):
            # Without this token, Ray would store a token in the user's home. Every later `ray start` would require the
            # stored token.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            stack.callback(os.environ.pop, "RAY_AUTH_TOKEN", None)
        options |= {"num_cpus": count_cores(), "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"include_dashboard": False, "_temp_dir": folder}
    stack.callback(ray.shutdown)
    verbose, sigterm_handler = shows_tracebacks(), signal.getsignal(signal.SIGTERM)
    level = logging.INFO if verbose else logging.CRITICAL
    try:
        with warnings.catch_warnings(), contextlib.nullcontext() if verbose else stderr_discarded():
            # Ray warns that its logging options are set.
            warnings.simplefilter("ignore")
            ray.init(log_to_driver=verbose, logging_level=level, **options)
    # Ray raises ConnectionError, RuntimeError, ValueError, and errors of processes that end immediately.
    except Exception as error:
        reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
        is_local, advice = address == "local", ""
        problem = "Ray cannot be started on this machine"
        problem = problem if is_local else f"{address}: the Ray cluster cannot be joined"
        # Ray's message does not mention tokens, and Ray sends no token unless RAY_AUTH_MODE is set.
        if not is_local and "RAY_AUTH_MODE" not in os.environ:
            advice = " If the cluster needs a token (`ray start` reports that), set RAY_AUTH_MODE=token."
        raise ClusterError(f"{problem} ({reason}).{advice}") from error
    finally:  # Ray installs its own SIGTERM handler, so restore the earlier handler.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm_handler)
    if not verbose:
        stack.enter_context(quiet_ray())


def find_layout(ray: Any, device: str, per_gpu: int = 1) -> ActorLayout:
    """Plan `per_gpu` actors on each GPU, or CPU actors with a few cores each.

    `device` is "auto", "cpu" or "cuda". Raises `ClusterError` if the cluster lacks the requested GPUs, or has no CPU
    cores.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device == "cuda" and not gpus:
        raise ClusterError("There is no GPU in this Ray cluster: leave out --device, or give --device cpu.")
    if per_gpu > 1 and not gpus:
        raise ClusterError("There is no GPU in this Ray cluster: leave out --actors-per-gpu.")
    if gpus and device != "cpu":
        cores = min(node.get("CPU", 0) / (node["GPU"] * per_gpu) for node in nodes if node.get("GPU", 0) >= 1)
        # Use a whole number of cores if possible. Otherwise round down to a fraction that Ray supports.
        rounded_cores = math.floor(cores) if cores >= 1 else math.floor(cores * GPU_FRACTIONS) / GPU_FRACTIONS
        return ActorLayout(gpus * per_gpu, rounded_cores, "cuda", per_gpu)
    sizes = [math.floor(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not sizes:
        raise ClusterError("This Ray cluster has no CPU cores: start its machines with `ray start --num-cpus N`.")
    cores = min(MAX_CORES_PER_ACTOR, *sizes)
    return ActorLayout(sum(size // cores for size in sizes), cores, "cpu")
