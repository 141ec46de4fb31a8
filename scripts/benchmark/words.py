"""Measure the time and memory of explaining the words of a vision-language model.

The language model takes nearly all of the time, as in the usual models.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmark.cases import MEGABYTE, SEED
from benchmark.contenders import Call
from benchmark.measuring import (
    MMAP_THRESHOLD,
    STATUS,
    Settings,
    call_in_fresh_process,
    keep_freed_memory,
    read_memory,
    report_progress,
    set_allocator,
    take_turns,
)
from benchmark.tables import Table, format_spread
from benchmark.word_quality import tabulate_quality

SIDE, PROMPT = 24, 20  # Patches along each side of the image, and tokens of the prompt's text.
WORDS = 40
VOCABULARY = 8000
IMAGE = 150
TOWER = "model.visual.merger.ln_q"  # The tower's last module.
COUNTS = (1, 10, 40)
FEW_ROUNDS = 3  # A round of forty calls takes half a minute.

FORWARD = "forward pass over prompt and answer"
BACKWARD = "forward pass, plus a backward pass"
SEPARATE = f"{WORDS} calls"
LENS = f"lens, {WORDS} words"


def compare_words(settings: Settings) -> Iterator[Table]:
    """Measure cost and quality on the CPU. The model of the cost has random weights."""
    yield tabulate_memory(settings)  # First, because the section keeps freed memory later.
    keep_freed_memory()
    yield tabulate_cost(settings)
    yield from tabulate_quality()


def build_model() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(SEED)
    rope = {"rope_type": "default", "type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4}
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 8, "rope_parameters": rope, "rope_scaling": rope,
        "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 512, "num_heads": 4, "patch_size": 14}
    tokens = {"image_token_id": IMAGE, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2VLForConditionalGeneration(config).eval().requires_grad_(requires_grad=False)


def make_inputs(side: int = SIDE, answer: int = 0) -> dict[str, Tensor]:
    """Return the processor's output for an image, and an answer of this number of tokens."""
    ids = torch.tensor([[1, 152, *[IMAGE] * (side // 2) ** 2, 153, *[7] * PROMPT, *list_answer(answer)]])
    pixels = torch.randn(side**2, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(SEED))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def list_answer(count: int) -> list[int]:
    return list(range(10, 10 + count))


def run_forward(model: Any, words: int) -> Any:
    with torch.no_grad():
        return model(**make_inputs(answer=words), use_cache=False, logits_to_keep=words + 1)


def record_forward(model: Any, words: int, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Run a forward pass that records gradients after the tower; return the first word's logit and the tower's output."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        leaves.append(output.detach().requires_grad_())
        return leaves[0]

    handle = model.get_submodule(TOWER).register_forward_hook(cut)
    try:
        with torch.no_grad():
            output = model(**make_inputs(side, words), use_cache=False, logits_to_keep=words + 1)
    finally:
        handle.remove()
    return output.logits[0, -words - 1, list_answer(1)[0]], leaves[0]


def explain_words(model: nn.Module, words: int, position: int | None = None, **options: Any) -> Any:
    import gradcam

    target = gradcam.targets.Token(list_answer(words), position)
    return gradcam.explain(model, make_inputs(options.pop("side", SIDE)), target=target, **options)


def time_processor(call: Callable[[], object]) -> Call:
    """Return a function that measures the CPU seconds of a call. Other processes on the machine affect these less."""

    def measure() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return measure


def tabulate_cost(settings: Settings) -> Table:
    model = build_model()

    def time_passes() -> float:
        forward = time_processor(lambda: run_forward(model, 1))()
        score, leaf = record_forward(model, 1)
        return forward + time_processor(lambda: torch.autograd.grad(score, leaf))()

    def explain_separately() -> None:
        for position in range(WORDS):
            explain_words(model, WORDS, position)

    one, several = settings.rounds[1], min(FEW_ROUNDS, settings.rounds[1])
    tower: dict[str, Any] = {"layer": TOWER, "method": "hirescam"}
    explain_one = time_processor(lambda: explain_words(model, 1))
    explain_at_tower = time_processor(lambda: explain_words(model, 1, **tower))
    comparisons: list[tuple[str, Call, str, Call, float, int]] = [
        ("one word, at the tower", explain_at_tower, BACKWARD, time_passes, 1.1, one),
        ("one word", explain_one, BACKWARD, time_passes, 1.1, one),
        (f"{WORDS} words in one call", time_processor(lambda: explain_words(model, WORDS)), SEPARATE,
         time_processor(explain_separately), 0.6, several),
        (LENS, time_processor(lambda: explain_words(model, WORDS, method="lens")), FORWARD,
         time_processor(lambda: run_forward(model, WORDS)), 1.15, one),
    ]  # fmt: skip
    rows, raw = [], []
    for name, call, baseline, bare, limit, rounds in comparisons:
        report_progress("words", name)
        call(), bare()
        seconds = take_turns({name: call, baseline: bare}, rounds)
        ratios = np.divide(seconds[name], seconds[baseline])
        medians = [f"{1000 * float(np.median(seconds[key])):.0f} ms" for key in (name, baseline)]
        rows.append([name, medians[0], baseline, medians[1], format_spread(ratios), f"{limit}"])
        raw.append({"what": name, "baseline": baseline, "seconds": seconds, "limit": limit})
    notes = [
        f"CPU seconds in alternating rounds. The prompt has {(SIDE // 2) ** 2} image tokens and {PROMPT} others. The answer "
        f"has {WORDS} tokens, or 1 for one word. The layer and method are the defaults, unless they are named.",
    ]
    header = ["explanation", "time", "baseline", "time of the baseline", "ratio", "limit"]
    return Table("words cost", "Cost of explaining words (cpu)", header, rows, notes, raw)


def tabulate_memory(settings: Settings) -> Table:
    title = "Peak memory of explaining words (cpu)"
    if not STATUS.exists():
        return Table("words memory", title, notes=["Skipped: it needs Linux's /proc."])
    rows, raw = [], []
    for words in COUNTS:
        peaks = {}
        for kind in ("recorded", "words", "lens"):
            report_progress("words", "memory", kind, f"{words} words")
            peaks[kind] = call_in_fresh_process(measure_peak, kind, words, settings.threads)
        ratios = [
            f"{peaks[kind] / MEGABYTE:.0f} MB ({peaks[kind] / peaks['recorded']:.2f})" for kind in ("words", "lens")
        ]
        rows.append([str(words), f"{peaks['recorded'] / MEGABYTE:.0f} MB", *ratios])
        raw.append({"words": words, "bytes": peaks})
    notes = [
        "Peak resident memory during the call, minus that just before it, each in a separate process. In brackets: as a "
        "multiple of the forward pass that records gradients after the tower. The limit is 1.25.",
    ]
    header = ["words", "forward pass that records gradients", "default method", "lens"]
    return Table("words memory", title, header, rows, notes, raw)


def measure_peak(kind: str, words: int, threads: int) -> int:
    """Return the peak memory of one call, in bytes above the memory in use before. Call this in a new process."""
    torch.set_num_threads(threads)
    set_allocator({MMAP_THRESHOLD: 2**16})  # Return all freed tensors to the system immediately.
    model = build_model()
    calls: dict[str, Callable[[int, int], Any]] = {
        "recorded": lambda count, side: record_forward(model, count, side),
        "words": lambda count, side: explain_words(model, count, side=side),
        "lens": lambda count, side: explain_words(model, count, method="lens", side=side),
    }
    calls[kind](2, 8)  # A small call loads libraries and fills memory pools.
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak, because building the model needs memory too.
    base = read_memory("VmRSS")
    result = calls[kind](words, SIDE)
    peak = read_memory("VmHWM") - base
    del result
    return peak
