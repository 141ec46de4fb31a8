"""Count how often `gradcam check` passes maps of words, and how often words follow from the text, on drawn scenes."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

if TYPE_CHECKING:
    from gradcam.evaluation.heatmap_sources import ExplainFunction
    from gradcam.models.task_models import Captioner

SEED, COUNT = 20490, 40
CALIBRATION_SEED, CALIBRATION_COUNT = 31337, 120  # other scenes, for `MIN_PROBABILITY_RATIO`
RATIOS = (1.05, 1.2, 1.5, 2.0, 3.0)
KINDS = ("object", "colour", "relation", "filler")
OUTCOMES = ("passed", "undecided", "failed")
QUANTILE = 1.96  # of the normal distribution, at 95 %


@dataclass(frozen=True)
class Subject:
    """A drawn scene, its captioner, and the tokens of the answer."""

    scene: Any
    captioner: Captioner
    tokens: list[int]

    def explain(self, **options: Any) -> Any:
        from gradcam.targets import Token

        return self.captioner.explain(self.scene.image, target=Token(self.tokens, **options))


def draw_subjects(seed: int, count: int) -> Iterator[Subject]:
    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    from tests.drawn.captioner import load_folder
    from tests.drawn.captions import draw_caption_scenes

    model, processor = load_folder()
    for scene in draw_caption_scenes(seed, count):
        tokens = processor.tokenizer.convert_tokens_to_ids([word.text for word in scene.words])
        yield Subject(scene, make_captioner(model, processor, scene.prompt), tokens)


def make_captioner(model: nn.Module, processor: Any, prompt: str) -> Captioner:
    """Return the model for one prompt. Its processor cuts each image into patches."""
    from gradcam.adapters import find_main_family
    from gradcam.models.preprocess import WholeImage
    from gradcam.models.task_models import Captioner
    from tests.drawn.captioner import encode
    from tests.drawn.captions import CaptionScene

    class PromptedCaptioner(Captioner):
        def to_batch(self, prepared: Any) -> Any:
            scenes = [CaptionScene(item.reading.picture, prompt, ()) for item in prepared]
            return family.to_pieces(encode(processor, scenes))

    family: Any = find_main_family(model)
    fields: Any = {"family": family}
    return PromptedCaptioner("captioner", model, WholeImage(), 0, None, None, "auto", **fields)


def compare_word_checks(settings: Settings) -> Iterator[Table]:
    """Check maps of words, on the CPU only, because no time is measured."""
    yield compare_checks()
    yield compare_text_words()
    yield compare_contexts()


def compare_checks() -> Table:
    """Check the map of one object word of each scene, and maps that do not explain the word."""
    outcomes: dict[str, list[str]] = {}
    for number, subject in enumerate(draw_subjects(SEED, COUNT)):
        report_progress("word checks", f"scene {number + 1} of {COUNT}")
        for name, outcome in check_maps(subject, random.Random(number)):
            outcomes.setdefault(name, []).append(outcome)
    rows = [
        [name, *(str(Counter(results)[outcome]) for outcome in OUTCOMES), format_interval(results, "passed")]
        for name, results in outcomes.items()
    ]
    notes = [
        f"{COUNT} scenes, seed {SEED}. One object word of each scene. Scenes of one shape have no word of another object."
    ]
    raw = [{"map": name, **Counter(results)} for name, results in outcomes.items()]
    return Table("wordchecks", "Maps of words that pass", ["map", *OUTCOMES, "passed, 95 % interval"], rows, notes, raw)


def check_maps(subject: Subject, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield the names of the maps of an object word, and the outcomes of their checks."""
    from gradcam.evaluation import Explainer, check
    from gradcam.models.instance_scores import find_instance_classifier
    from gradcam.targets import Token

    words, captioner = subject.scene.words, subject.captioner
    position = rng.choice([i for i, word in enumerate(words) if word.kind == "object"])
    is_elsewhere = [word.kind in ("object", "colour") and word.mask is not words[position].mask for word in words]
    judge = partial(check, captioner, subject.scene.image, target=Token(subject.tokens, position))
    prepared = captioner.prepare(subject.scene.image)
    scores, _ = find_instance_classifier(captioner, prepared, Token(subject.tokens, position))
    explain = Explainer((scores.method,), scores.layer, activation=scores.activation).only(scores.method)
    yield "the word's map", judge().outcome
    # `check` numbers the tested word 0, and the other words from 1.
    order = [position, *(i for i in range(len(words)) if i != position)]
    masks = [words[i].mask for i in order]
    image = judge_image(subject)
    yield "the word's region", judge(method=mark_region(explain, masks, image)).outcome
    yield "another image's map", judge(method=explain_mirrored_image(explain)).outcome
    if any(is_elsewhere):
        other = order.index(rng.choice([i for i, is_other in enumerate(is_elsewhere) if is_other]))
        yield "another word's map", judge(method=swap_words(explain, other)).outcome


def judge_image(subject: Subject) -> Tensor:
    """Return the scene's image (1,3,H,W), as `check` passes it to functions."""
    return torch.from_numpy(subject.scene.image).permute(2, 0, 1)[None].float()


def mark_region(explain: ExplainFunction, masks: Sequence[Any], image: Tensor) -> ExplainFunction:
    """Return a function that marks the true region of a word. It explains other images, and re-initialised models."""
    models: list[nn.Module] = []
    max_difference = 10  # of pixels from 0 to 255: more than the noise of `check`

    def mark(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        models.append(model)  # `check` begins with the trained model.
        mask, size = masks[int(classes[0])], images.shape[2:]
        resized = F.interpolate(image, size, mode="bilinear", antialias=True)
        is_changed = (images - resized).abs().mean() > max_difference
        if mask is None or model is not models[0] or is_changed:
            return explain(model, images, classes)
        return F.interpolate(torch.from_numpy(mask)[None, None].float(), size, mode="area")[0]

    return mark


def explain_mirrored_image(explain: ExplainFunction) -> ExplainFunction:
    """Return a function that explains the words in another image, the mirrored image."""
    return lambda model, images, classes: explain(model, images.flip(3), classes)


def swap_words(explain: ExplainFunction, other: int) -> ExplainFunction:
    """Return a function that explains word `other` instead of word 0, and word 0 instead of word `other`."""

    def explain_swapped(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return explain(model, images, classes.where((classes != 0) & (classes != other), other - classes))

    return explain_swapped


def compare_text_words() -> Table:
    """Count the words that follow from the text, for the threshold in use and for others."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for seed, count in ((CALIBRATION_SEED, CALIBRATION_COUNT), (SEED, COUNT)):
        for subject in draw_subjects(seed, count):
            instances = subject.explain(control="blank").instances[0]
            for word, instance in zip(subject.scene.words, instances):
                ratio = instance.score / max(instance.without_image, 1e-12)
                ratios.setdefault((seed, word.kind), []).append(ratio)
    rows = []
    for seed, title in ((CALIBRATION_SEED, "calibration"), (SEED, "held out")):
        for kind in KINDS:
            values = ratios[seed, kind]
            shares = [f"{100 * mean(value < ratio for value in values):.0f} %" for ratio in RATIOS]
            rows.append([title, kind, str(len(values)), *shares])
    notes = [f"{CALIBRATION_COUNT} scenes, seed {CALIBRATION_SEED}, and {COUNT} held-out scenes, seed {SEED}."]
    header = ["scenes", "words", "count", *(f"ratio below {ratio:g}" for ratio in RATIOS)]
    return Table("wordtext", "Words that follow from the text", header, rows, notes)


def compare_contexts() -> Table:
    """Compare the area under the ROC curve of words with and without the context of earlier words."""
    from gradcam.evaluation.metrics.localisation import measure_order

    areas: dict[tuple[str, str], list[float]] = {}
    for subject in draw_subjects(SEED, COUNT):
        for context in ("keep", "subtract"):
            for word, heatmap in zip(subject.scene.words, subject.explain(context=context).heatmaps[0]):
                if word.mask is not None:
                    area = measure_order(heatmap[None], torch.from_numpy(word.mask)[None])
                    areas.setdefault((context, word.kind), []).append(float(area))
    kinds = [kind for kind in KINDS if ("keep", kind) in areas]
    rows = [[context, *(f"{mean(areas[context, kind]):.2f}" for kind in kinds)] for context in ("keep", "subtract")]
    counts = [f"{kind} ({len(areas['keep', kind])})" for kind in kinds]
    return Table("wordcontext", "Area under the ROC curve by context", ["context", *counts], rows)


def format_interval(results: Sequence[str], outcome: str) -> str:
    """Return Wilson's interval of the share of an outcome, as text."""
    total = len(results)
    share, spread = results.count(outcome) / total, QUANTILE**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = QUANTILE / (1 + spread) * (share * (1 - share) / total + spread / (4 * total)) ** 0.5
    return f"{100 * max(0.0, middle - half):.0f} % to {100 * min(1.0, middle + half):.0f} %"
