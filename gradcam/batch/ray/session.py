"""Ray, started for one run on this machine, or joined where it runs already; and what there is to work with."""

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

SECONDS = 10  # to wait for an answer
SETTINGS = 4  # the kind of the first frame that each side of HTTP/2, which is below gRPC, sends
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # it warns of what it will do otherwise
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what other processes of Ray's have to say
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # of what is not Python, which writes to standard error itself
}
SILENT = logging.CRITICAL + 1
CORES = 4  # of an actor on processors at most: with more, they would wait for one another at each layer
# Bytes for what is on its way between the processes of one machine: results that go into shards are the most of it.
OBJECTS = 2**29
GRAINS = 10_000  # parts of a GPU that Ray can tell apart


# `ray.init` asks an address for minutes, in silence, or ends the process where something else answers. grpcio has a check
# of its own, and does not come with ray[data].
def check_address(address: str) -> None:
    """Raises `ClusterError` for an address that is none, or that nobody answers at."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address}: Ray Client addresses are not supported. On a machine of the cluster, give HOST:PORT of the head, "
            "such as 10.0.0.1:6379. Or submit the whole command with `ray job submit`."
        )
    found = re.fullmatch(r"\[?([^\s/]+?)\]?:(\d{1,5})", address)
    if found is None:
        raise ClusterError(
            f"The Ray address is {shorten(address)}, expected HOST:PORT, such as 10.0.0.1:6379, or auto."
        )
    try:
        with socket.create_connection((found[1], int(found[2])), timeout=SECONDS) as connection:
            connection.sendall(GREETING)
            try:
                answer = connection.recv(9)
            except ConnectionError:  # it did not like that
                answer = b""
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        raise ClusterError(f"{address}: no answer ({reason}). Start the head with `ray start --head`.") from error
    if len(answer) < 9 or answer[3] != SETTINGS:
        raise ClusterError(
            f"{address}: the server at this address is not Ray. Give the port of the head, usually 6379."
        )


def is_loud() -> bool:
    """Whether somebody looks for what went wrong inside."""
    return bool(os.environ.get("GRADCAM_TRACEBACK"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ray's loggers write to files of its own alone, and nothing it warns of is shown."""
    if is_loud():
        yield
        return
    found = logging.getLogger("ray").handlers + logging.getLogger("ray.data").handlers
    handlers = [handler for handler in found if isinstance(handler, logging.StreamHandler)]
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
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@dataclass(frozen=True)
class ActorLayout:
    """How many actors there are, and what each of them has; `device`: "cpu" or "cuda". `cores`: less than 1 where there
    are fewer of them than actors on a machine's GPUs. `per_gpu`: actors that share one."""

    actors: int
    cores: float
    device: str
    per_gpu: int = 1

    @property
    def gpus(self) -> float:
        """Of each actor. Rounded down to what Ray can tell apart: seven of a little more than a seventh would not fit."""
        return (GRAINS // self.per_gpu) / GRAINS if self.device == "cuda" else 0

    @property
    def threads(self) -> int:
        return max(1, math.floor(self.cores))


def import_ray() -> ModuleType:
    """Ray, told to be quiet. Raises `ClusterError` with the line that installs it."""
    for name, value in () if is_loud() else ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # what the user has set stays
    try:
        import ray
        import ray.data
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "ray"
        what = "is not installed" if is_missing else f"cannot be imported ({' '.join(str(error).split())})"
        raise ClusterError(f"Ray {what}: {to_pip_command('ray')}") from error
    return ray


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[ModuleType]:
    """Ray at that address, or at RAY_ADDRESS, or started here until the end. Where the caller has joined it already,
    that is used, and left as it is. Raises `ClusterError` where there is none, or nothing that answers."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        check_address(address)
    with contextlib.ExitStack() as stack:
        _init(ray, address, stack)
        yield ray


def _init(ray: Any, address: str, stack: contextlib.ExitStack) -> None:
    """Start or join it; `stack` undoes that."""
    options: dict[str, Any] = {"address": address}
    if MAX_PIXELS in os.environ:  # it is for the actors, on whichever machine
        options["runtime_env"] = {"env_vars": {MAX_PIXELS: os.environ[MAX_PIXELS]}}
    if address == "local":
        folder = tempfile.mkdtemp(prefix="gradcam-ray-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if os.environ.keys().isdisjoint({"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}):
            # Otherwise Ray leaves a token in the user's home, and `ray start` wants it of whoever joins from then on.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            stack.callback(os.environ.pop, "RAY_AUTH_TOKEN", None)
        options |= {"num_cpus": count_cores(), "object_store_memory": OBJECTS}
        options |= {"include_dashboard": False, "_temp_dir": folder}
    stack.callback(ray.shutdown)
    level, before = logging.INFO if is_loud() else logging.CRITICAL, signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings(), no_standard_error():  # it says that it was told how much to say
            warnings.simplefilter("ignore")
            ray.init(log_to_driver=is_loud(), logging_level=level, **options)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError, and those of processes that end at once
        reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
        what = (
            "Ray cannot be started on this machine"
            if address == "local"
            else f"{address}: the Ray cluster cannot be joined"
        )
        advice = ""
        if address != "local" and "RAY_AUTH_MODE" not in os.environ:  # Ray says nothing of tokens, and sends none then
            advice = " If the cluster needs a token (`ray start` reports that), set RAY_AUTH_MODE=token."
        raise ClusterError(f"{what} ({reason}).{advice}") from error
    finally:  # Ray takes SIGTERM for itself
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    stack.enter_context(quiet())


def find_layout(ray: Any, device: str, per_gpu: int = 1) -> ActorLayout:
    """One actor for each GPU, or as many as are to share one, or one for each few cores. `device`: "auto", "cpu" or
    "cuda". Raises `ClusterError` where there is no GPU to be had, or no core."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device == "cuda" and not gpus:
        raise ClusterError("There is no GPU in this Ray cluster: leave out --device, or give --device cpu.")
    if per_gpu > 1 and not gpus:
        raise ClusterError("There is no GPU in this Ray cluster: leave out --actors-per-gpu.")
    if gpus and device != "cpu":
        cores = min(node.get("CPU", 0) / (node["GPU"] * per_gpu) for node in nodes if node.get("GPU", 0) >= 1)
        # Whole ones, where there is one; otherwise a part that all can have.
        whole = math.floor(cores) if cores >= 1 else math.floor(cores * GRAINS) / GRAINS
        return ActorLayout(gpus * per_gpu, whole, "cuda", per_gpu)
    sizes = [math.floor(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not sizes:
        raise ClusterError("This Ray cluster has no CPU cores: start its machines with `ray start --num-cpus N`.")
    cores = min(CORES, *sizes)
    return ActorLayout(sum(size // cores for size in sizes), cores, "cpu")
