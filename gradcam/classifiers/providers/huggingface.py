"""Hugging Face's image classifiers, by name or from a folder, each with its own image processor and its own labels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from gradcam.classifiers.adjustment import ASSUMED
from gradcam.classifiers.checkpoints import read_checkpoint
from gradcam.classifiers.providers.blueprint import USUAL_SIZE, Blueprint
from gradcam.classifiers.providers.extras import import_extra
from gradcam.classifiers.providers.image_processors import make_preprocess
from gradcam.classifiers.providers.network import WITHOUT, hub_address, reason_unreachable
from gradcam.classifiers.providers.parts import Parts
from gradcam.classifiers.providers.weights import build_for
from gradcam.errors import ModelError, join_names

PROCESSOR = "preprocessor_config.json"
# How transformers itself tells probabilities from logits.
SAID = {  # by transformers, of what is no mistake of its own, and what we say
    "weights_only": "its weights are a pickle that would run code on being read; it was not run. Take safetensors",
    "trust_remote_code": "it comes with code of its own, which is never run here. Load it in a function of yours, "
    "--model FILE.py:FUNCTION",
    "Unrecognized configuration class": "it is no image classifier that transformers knows. In Python "
    "gradcam.explain(model, images, target=...) takes any model",
}
ACTIVATIONS = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "none",
    None: "softmax",
}
REGRESSION = "It is a regression: its value is shown in a probability's place; class 1 is for it, class 0 against it."


def load(name: str, weights: Path | None) -> Parts:
    """`google/vit-base-patch16-224`, or a folder of `save_pretrained`, with a checkpoint in place of its weights or not.

    Code that comes with a model is never run. Raises `ModelError` for a missing transformers, for what is no image
    classifier, for weights that leave the head random, and where nothing is here nor to be fetched.
    """
    transformers = import_extra("transformers", "hf")
    name, is_local = _find_source(transformers, name)
    with _quiet(transformers):
        config = _take(transformers.AutoConfig, name, local_files_only=is_local)
        labels = [str(config.id2label.get(index, index)) for index in range(config.num_labels)]
        parts = _find_preprocess(transformers, name, is_local, config)
        notes: Sequence[str] = ()
        classes: int | None
        if weights is None:
            model, classes = _load_own(transformers, name, is_local), len(labels)
        else:
            build = partial(_build, transformers, config)
            model, classes, notes = build_for(read_checkpoint(weights), build, len(labels))
    return replace(
        parts,
        model=model,
        labels=labels if classes == len(labels) else None,
        classes=classes,
        activation=ACTIVATIONS.get(config.problem_type),
        notes=[*parts.notes, *notes, *([REGRESSION] if config.problem_type == "regression" else [])],
    )


def plan(name: str) -> Blueprint:
    """The model without its weights: its configuration is enough. Raises `ModelError` where there is none."""
    transformers = import_extra("transformers", "hf")
    name, is_local = _find_source(transformers, name)
    with _quiet(transformers):
        config = _take(transformers.AutoConfig, name, local_files_only=is_local)
        size = _find_size(transformers, name) or _to_size(getattr(config, "image_size", None)) or USUAL_SIZE
    build = partial(_build, transformers, config, config.num_labels)
    return Blueprint(build, size, getattr(config, "num_channels", 3))


def _find_size(transformers: Any, name: str) -> tuple[int, int] | None:
    """What its preprocessing makes of a picture; None where there is none with the model."""
    try:
        settings, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(name)
    except (OSError, ValueError):
        return None
    return _to_size(settings.get("crop_size" if settings.get("do_center_crop") else "size"))


def _to_size(sides: Any) -> tuple[int, int] | None:
    """A size in any of the forms of configurations."""
    if isinstance(sides, dict):
        sides = (sides["height"], sides["width"]) if "height" in sides else sides.get("shortest_edge")
    if isinstance(sides, int):
        return sides, sides
    return (sides[0], sides[1]) if isinstance(sides, Sequence) and len(sides) == 2 else None


def _find_source(transformers: Any, name: str) -> tuple[str, bool]:
    """The name for transformers, and whether all is here already. Raises `ModelError` where it is not, nor to be fetched."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: has no config.json, expected a folder that save_pretrained() made.")
        return str(folder), True
    if not name or name.startswith((".", "/", "~", "\\")) or name.count("/") > 1:
        raise ModelError(
            f"hf:{name} names nothing: there is no such folder, and a model of the hub is called OWNER/NAME."
        )
    try:
        transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        reason = reason_unreachable(hub_address())
        if reason is None:
            return name, False
        raise ModelError(
            f"'{name}' is no folder here and not in Hugging Face's cache, and cannot be fetched ({reason}). On another "
            f"computer, `hf download {name} --local-dir FOLDER` fetches a folder: copy it here, and name it hf:FOLDER. "
            f"{WITHOUT}"
        ) from None
    return name, True


def _take(source: Any, name: str, **options: Any) -> Any:
    """What one of transformers' classes makes of a name. Raises `ModelError` for whatever it raises."""
    try:
        return source.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # OSError, ValueError, RuntimeError, safetensors' own, and those of each model
        own = [sentence for part, sentence in SAID.items() if part in str(error)]
        reason = own[0] if own else " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"hf:{name} cannot be loaded: {reason}") from error


def _load_own(transformers: Any, name: str, is_local: bool) -> nn.Module:
    source = transformers.AutoModelForImageClassification
    model, info = _take(source, name, local_files_only=is_local, output_loading_info=True)
    if info["missing_keys"]:
        names = join_names(sorted(info["missing_keys"])[:3])
        raise ModelError(
            f"hf:{name} holds no trained classifier: {len(info['missing_keys'])} weights are missing, such as {names}. "
            "Take one that was trained to classify, or give its checkpoint with --weights."
        )
    return model


def _build(transformers: Any, config: Any, classes: int) -> nn.Module:
    config.num_labels = classes
    try:
        return transformers.AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ModelError(
            f"A {config.model_type} is no image classifier that transformers knows: in Python "
            "gradcam.explain(model, images, target=...) takes any model."
        ) from error


def _find_preprocess(transformers: Any, name: str, is_local: bool, config: Any) -> Parts:
    """Parts without a model. Raises `ModelError` for a processor that cannot be loaded; without one, it is guessed."""
    try:
        preprocess, notes = make_preprocess(_take(transformers.AutoImageProcessor, name, local_files_only=is_local))
    except ModelError:
        if not Path(name).is_dir() or (Path(name) / PROCESSOR).exists():
            raise
        side = getattr(config, "image_size", None)
        assumed = replace(ASSUMED, size=(side, side), resize=round(side / 0.875)) if isinstance(side, int) else ASSUMED
        note = f"{name} has no {PROCESSOR}: save its image processor beside it, with save_pretrained()."
        return Parts(nn.Identity(), assumed, is_assumed=True, notes=[note])
    return Parts(nn.Identity(), preprocess, plain=preprocess.plain, notes=notes)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No bars and no warnings: what matters of them is an error or a note of ours."""
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
