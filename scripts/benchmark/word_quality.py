"""Evaluate maps of words on the generated scenes of tests/drawn: the region of each word is known."""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmark.cases import ROOT
from benchmark.measuring import report_progress
from benchmark.tables import Table

SEED, COUNT = 4949, 60
KINDS = ("object", "colour", "relation", "among objects")
DEFAULT = ("elementwise-gradcam", "model.visual.merger")
LAYERS = {
    "model.visual.blocks.1": "tower, second of four blocks",
    "model.visual.blocks.2": "tower, third block",
    "model.visual.blocks.3": "tower, last block",
    "model.visual.merger.ln_q": "tower, after the norm",
    "model.visual.merger": "projector",
    "model.language_model.layers.0": "text, first of four blocks",
    "model.language_model.layers.1": "text, second block",
    "model.language_model.layers.2": "text, third block",
    "model.language_model.layers.3": "text, last block",
}
METHODS = ("elementwise-gradcam", "layercam", "hirescam", "gradcam")
SQUARE, STEP = 32, 16  # Side and distance of the grey squares, in pixels.
GREY = 128


@dataclass(frozen=True)
class Case:
    """A scene, its input for the model, and the tokens of its answer: one for each word."""

    model: Any
    processor: Any
    scene: Any
    inputs: dict[str, Tensor]
    tokens: list[int]

    @property
    def grid(self) -> tuple[int, int]:
        """Return the grid of image tokens in the text model."""
        _, height, width = self.inputs["image_grid_thw"][0].tolist()
        return height // 2, width // 2

    def resize(self, maps: Tensor) -> Tensor:
        """Return maps (K,h,w) at the size of the image."""
        return F.interpolate(maps[None].float(), self.scene.image.shape[:2], mode="bilinear")[0]


Explain = Callable[[Case], Tensor]  # Returns a heatmap (K,H,W) for each word.


def tabulate_quality() -> Iterator[Table]:
    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    from tests.drawn.captioner import load_folder

    model, processor = load_folder()
    model.set_attn_implementation("sdpa")
    methods = list_methods()
    results: dict[tuple[str, str], dict[str, list[float]]] = {name: defaultdict(list) for name in methods}
    for number in range(COUNT):
        report_progress("words", f"scene {number + 1} of {COUNT}")
        case = make_case(model, processor, number)
        bare = measure_seconds(lambda case=case: run_words(case))[0]
        for name, explain in methods.items():
            seconds, heatmaps = measure_seconds(lambda case=case, explain=explain: explain(case))
            for kind, rocs in evaluate(case.scene.words, heatmaps.numpy()).items():
                results[name][kind].append(float(np.mean(rocs)))
            results[name]["cost"].append(seconds / bare)
    rows = []
    for (method, place), values in results.items():
        cells = [describe(values[kind]) for kind in KINDS]
        label = f"**{method}**" if (method, place) == (DEFAULT[0], LAYERS[DEFAULT[1]]) else method
        rows.append([label, place, *cells, f"{np.median(values['cost']):.1f}"])
    notes = [
        f"Mean area under the ROC curve of the heatmap's pixels, with a 95 % interval, over {COUNT} scenes that were not "
        "used in training. A word's region is its shape; for relations, both shapes. *Among objects*: only pixels of "
        "shapes; those of the named shape against those of others. 0.5 is chance level. The default is in bold.",
        "Cost: CPU time for all words of the answer, as a multiple of one forward pass over prompt and answer. The model is "
        "small, so the fixed cost of a call counts.",
    ]
    header = ["method", "layer", *KINDS, "cost"]
    raw = [{"method": method, "place": place, **values} for (method, place), values in results.items()]
    yield Table("words quality", "Maps of words with known ground truth", header, rows, notes, raw)


def make_case(model: Any, processor: Any, number: int) -> Case:
    from tests.drawn.captioner import encode
    from tests.drawn.captions import draw_caption_scene

    scene = draw_caption_scene([SEED, number])
    inputs = dict(encode(processor, [scene], resize=False))
    return Case(model, processor, scene, inputs, processor.tokenizer(scene.answer)["input_ids"])


def measure_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def list_methods() -> dict[tuple[str, str], Explain]:
    """Return the functions to compare, by method and place."""
    text_layers = [layer for layer in LAYERS if "language" in layer]
    pairs = [(method, layer) for method in METHODS for layer in list(LAYERS)[:-1]]
    pairs += [("lens", layer) for layer in text_layers]
    methods: dict[tuple[str, str], Explain] = {
        (method, LAYERS[layer]): make_explain(method, layer) for method, layer in pairs
    }
    others = {"attention rollout": follow_attention, "attention": read_attention, "occlusion": occlude}
    return methods | {(name, "-"): function for name, function in others.items()}


def make_explain(method: str, layer: str) -> Explain:
    import gradcam

    def explain(case: Case) -> Tensor:
        target = gradcam.targets.Token(case.tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gradcam.GradcamWarning)  # Some maps are blank before a norm.
            return gradcam.explain(case.model, case.inputs, layer, method=method, target=target).heatmaps[0]

    return explain


def run_words(case: Case, **options: Any) -> Any:
    """Run the model on the prompt and the answer."""
    from tests.drawn.captioner import encode

    inputs = encode(case.processor, [case.scene], answers=True, resize=False)
    with torch.no_grad():
        return case.model(**inputs, use_cache=False, **options)


def list_attentions(case: Case) -> tuple[list[Tensor], slice, Tensor]:
    """Return each block's attention (T,T), the rows before the words, and the mask (T,) of the image tokens."""
    case.model.set_attn_implementation("eager")
    try:
        attentions = [attention[0].mean(0) for attention in run_words(case, output_attentions=True).attentions]
    finally:
        case.model.set_attn_implementation("sdpa")
    prompt = case.inputs["input_ids"][0]
    is_image = torch.zeros(len(attentions[0]), dtype=torch.bool)
    is_image[: len(prompt)] = prompt == case.model.config.image_token_id
    return attentions, slice(len(prompt) - 1, len(prompt) - 1 + len(case.tokens)), is_image


def read_attention(case: Case) -> Tensor:
    """Return the last block's attention to the image tokens, from the token before each word."""
    attentions, rows, is_image = list_attentions(case)
    return case.resize(attentions[-1][rows][:, is_image].unflatten(1, case.grid))


def follow_attention(case: Case) -> Tensor:
    """Return the attention rollout of all text blocks, from the token before each word to the image tokens."""
    attentions, rows, is_image = list_attentions(case)
    identity = torch.eye(len(is_image))
    rollout = identity
    for attention in attentions:
        rollout = (attention + identity) / 2 @ rollout
    return case.resize(rollout[rows][:, is_image].unflatten(1, case.grid))


def occlude(case: Case) -> Tensor:
    """Return by how much each word's logit falls if a grey square covers the pixel: the mean over squares."""
    from tests.drawn.captioner import encode

    height, width = case.scene.image.shape[:2]
    corners = [(y, x) for y in range(STEP - SQUARE, height, STEP) for x in range(STEP - SQUARE, width, STEP)]
    masks = np.zeros((len(corners), height, width), bool)
    for mask, (top, left) in zip(masks, corners):
        mask[max(top, 0) : top + SQUARE, max(left, 0) : left + SQUARE] = True
    images = [case.scene.image, *(np.where(mask[..., None], GREY, case.scene.image).astype(np.uint8) for mask in masks)]
    scenes = [case.scene._replace(image=image) for image in images]
    inputs = encode(case.processor, scenes, answers=True, resize=False)
    start = case.inputs["input_ids"].shape[1] - 1
    with torch.no_grad():
        logits = case.model(**inputs, use_cache=False).logits[:, start : start + len(case.tokens)]
    values = logits[:, range(len(case.tokens)), case.tokens]
    covered = torch.from_numpy(masks).float()
    return torch.einsum("sk,shw->khw", values[:1] - values[1:], covered) / covered.sum(0)


def evaluate(words: Sequence[Any], heatmaps: NDArray[np.float32]) -> dict[str, list[float]]:
    """Return the areas under the ROC curve of an image's words, by kind."""
    rocs: dict[str, list[float]] = defaultdict(list)
    shapes = np.any([word.mask for word in words if word.kind == "object"], axis=0)
    for word, heatmap in zip(words, heatmaps, strict=True):
        if word.mask is None:
            continue
        rocs[word.kind].append(compute_roc(heatmap.ravel(), word.mask.ravel()))
        others = shapes & ~word.mask
        if word.kind == "object" and others.any():
            rocs["among objects"].append(compute_roc(heatmap[shapes], word.mask[shapes]))
    return rocs


def compute_roc(values: NDArray[np.float32], is_inside: NDArray[np.bool_]) -> float:
    """Return the probability that a pixel inside has a higher value than a pixel outside. Ties count half."""
    ordered, inside = np.sort(values), values[is_inside]
    ranks = (np.searchsorted(ordered, inside, "left") + np.searchsorted(ordered, inside, "right")) / 2
    return float((ranks.mean() - len(inside) / 2) / (len(values) - len(inside)))


def describe(values: Sequence[float]) -> str:
    """Return the mean and its 95 % interval as text."""
    margin = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{np.mean(values):.2f} ({np.mean(values) - margin:.2f} to {np.mean(values) + margin:.2f})"
