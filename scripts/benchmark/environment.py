"""Describe the machine and the versions of the libraries."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
import torchvision

from benchmark.cases import SEED, SIZE
from benchmark.contenders import CONTENDERS


def find_missing() -> dict[str, str]:
    """Return a dict from each contender that cannot be imported to the error."""
    errors = {name: import_error(contender.module) for name, contender in CONTENDERS.items()}
    return {name: error for name, error in errors.items() if error}


def import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


def describe_environment(devices: Sequence[str], missing: dict[str, str]) -> dict[str, str]:
    import gradcam

    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{name_processor()} ({describe_bfloat16()}), {torch.get_num_threads()} threads",
        "GPU": torch.cuda.get_device_name() if "cuda" in devices else "none measured",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "gradcam": gradcam.__version__,
    }
    for name, contender in CONTENDERS.items():
        if contender.distribution:
            version = importlib.metadata.version
            facts[name] = f"missing ({missing[name]})" if name in missing else version(contender.distribution)
    if "cuda" in devices:
        facts["TF32 in convolutions"] = "on" if torch.backends.cudnn.allow_tf32 else "off"
    return {**facts, "input": f"{SIZE} px, float32, random; random weights, seed {SEED}"}


def name_processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_bfloat16() -> str:
    """Return the names of the CPU's bfloat16 instructions. Only Linux reports these names."""
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        instructions = flags & {"avx512_bf16", "amx_bf16", "bf16"}
        return ", ".join(sorted(instructions)) or "no bf16 instructions"
    return "bf16 instructions unknown"
