"""Load Hugging Face models, by name or from a folder, with their image processors and labels."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from gradcam.adapters import find_family_classes
from gradcam.adapters.base import DetectorAdapter
from gradcam.errors import ImageError, ModelError, join_names
from gradcam.hooks.containers import Window
from gradcam.images.read import Region
from gradcam.images.write import check_pixels
from gradcam.models.checkpoints.fit import load_weights
from gradcam.models.checkpoints.read import read_checkpoint
from gradcam.models.geometry import Piece, calibrate, measure
from gradcam.models.preprocess import ASSUMED, Preprocessing, assume_preprocessing
from gradcam.models.providers import base
from gradcam.models.providers.base import Blueprint, Parts

# Two sizes (height, width), because a processor's steps (resize and crop) may depend on the aspect ratio.
TEST_SIZES = ((300, 400), (400, 200))
# Minimum correlation between the outputs of a processor and of equivalent steps. For other crops, the correlation is
# about 0.6.
MIN_CORRELATION = 0.98
PROCESSOR = "preprocessor_config.json"
KNOWN_ERRORS = {  # Maps parts of transformers' messages to the reasons to report.
    "weights_only": "its weights are a pickle that would run code when it is loaded. Use a model with safetensors weights",
    "trust_remote_code": "it needs code from its repository, which gradcam never runs. Load the model in your own function, "
    "and give --model FILE.py:FUNCTION",
    "Unrecognized configuration class": "transformers has no image classifier of the model's type. In Python, "
    "gradcam.explain(model, images, target=...) takes any model",
}
# The activation that transformers assumes for each `problem_type` of a configuration.
ACTIVATIONS = {"multi_label_classification": "sigmoid", "single_label_classification": "softmax", "regression": "none"}
REGRESSION = "The model is a regression: its value is reported instead of a probability."


def load(name: str, weights: Path | None, task: str | None = None, prompts: Sequence[str] = ()) -> Parts:
    """Load a hub model (OWNER/NAME) or a folder of `save_pretrained`, with its own weights or a checkpoint.

    Code that comes with a model is never run. If the head would keep random weights, `ModelError` is raised. If
    `task` is None, the model is loaded for the task in its configuration. `prompts` are for detectors that take text
    prompts.
    """
    with _open_source(name) as (transformers, source, is_local, config):
        kind = None if task == "classification" else _find_task_class(transformers, config)
        if _takes_prompt(kind):  # The preprocessing follows with the processor, which writes the prompt.
            parts = Parts(nn.Identity(), ASSUMED)
        else:
            parts = find_preprocess(transformers, source, is_local, config)
        if kind is not None:
            return _load_task_model(source, is_local, parts, kind, config, weights=weights, prompts=prompts)
        labels = [str(config.id2label.get(index, index)) for index in range(config.num_labels)]
        notes = list(parts.notes)
        classes: int | None = len(labels)
        if weights is None:
            model, missing = _load_weights(transformers.AutoModelForImageClassification, source, is_local)
            if missing:
                problem = f"{len(missing)} weights are missing, such as {join_names(missing[:3])}"
                advice = "Use a model trained for classification, or give a checkpoint with --weights."
                raise ModelError(f"hf:{source} is not a trained classifier: {problem}. {advice}")
        else:
            build = partial(_build, transformers, config)
            model, classes, loading_notes = base.build_for(read_checkpoint(weights), build, len(labels))
            notes += loading_notes
    if config.problem_type == "regression":
        notes.append(REGRESSION)
    class_names = labels if classes == len(labels) and labels != ["LABEL_0"] else None
    activation = ACTIVATIONS.get(config.problem_type or "single_label_classification")
    return replace(parts, model=model, labels=class_names, classes=classes, activation=activation, notes=notes)


def _find_task_class(transformers: Any, config: Any) -> Any:
    """Return the transformers class of a model for another task than classification; None for a classifier."""
    kinds = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    return next((kind for kind in kinds if kind is not None and any(find_family_classes(kind))), None)


def _takes_prompt(kind: Any) -> bool:
    """Return whether this is the class of a vision-language model."""
    return kind is not None and next(find_family_classes(kind)).takes_pieces


def _load_weights(kind: Any, source: str, is_local: bool) -> tuple[Any, list[str]]:
    """Return the model with its own weights, and the names of missing weights."""
    model, info = _load_pretrained(kind, source, local_files_only=is_local, output_loading_info=True)
    return model, sorted(info["missing_keys"])


def _load_task_model(
    source: str, is_local: bool, parts: Parts, kind: Any, config: Any, *, weights: Path | None, prompts: Sequence[str]
) -> Parts:
    notes = parts.notes
    if weights is None:
        model, missing = _load_weights(kind, source, is_local)
        if missing:
            problem = f"lacks {len(missing)} weights of a {kind.__name__}, such as {join_names(missing[:3])}"
            raise ModelError(f"hf:{source} {problem}: give a complete checkpoint with --weights.")
    else:
        model = kind(config)
        notes = [*notes, *load_weights(model, read_checkpoint(weights))]
    reader = next(find_family_classes(kind))
    labels = None
    if reader.task in ("detection", "segmentation", "pose") and config.id2label:
        labels = [str(config.id2label.get(index, f"class {index}")) for index in range(max(config.id2label) + 1)]
    family, inputs = reader(model), {}
    if prompts and issubclass(reader, DetectorAdapter) and family.usual_prompts is not None:
        labels = list(prompts)
    if family.task == "captioning":
        return replace(parts, model=model, notes=notes, task=reader.task)
    if family.usual_prompts is not None and (words := prompts or family.usual_prompts):
        inputs = family.to_prompts(words)
    return replace(parts, model=model, labels=labels, notes=notes, task=reader.task, inputs=inputs)


def plan(name: str) -> Blueprint:
    """Return the blueprint of the model from its configuration; raise `ModelError` if there is none."""
    with _open_source(name) as (transformers, source, _, config):
        size = None
        with contextlib.suppress(OSError, ValueError):  # if the model has no preprocessing
            settings, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(source)
            size = _to_size(settings.get("crop_size" if settings.get("do_center_crop") else "size"))
        size = size or _to_size(getattr(config, "image_size", None)) or base.DEFAULT_SIZE
    kind = _find_task_class(transformers, config)
    if _takes_prompt(kind):
        advice = "In Python, model.named_modules() lists all names for --layer. gradcam run prints the default layer"
        raise ModelError(f"{kind.__name__} takes an image with a prompt, so its layers cannot be listed. {advice}.")
    build = partial(_build, transformers, config, config.num_labels) if kind is None else partial(kind, config)
    return Blueprint(build, size, getattr(config, "num_channels", 3))


def _to_size(sides: Any) -> tuple[int, int] | None:
    if isinstance(sides, dict):
        sides = (sides["height"], sides["width"]) if "height" in sides else sides.get("shortest_edge")
    if isinstance(sides, int):
        return sides, sides
    return (sides[0], sides[1]) if isinstance(sides, Sequence) and len(sides) == 2 else None


def _find_source(transformers: Any, name: str) -> tuple[str, bool]:
    """Return the name or folder to load, and whether all files are local; raise `ModelError` if unavailable."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: has no config.json, expected a folder written by save_pretrained().")
        return str(folder), True
    if not name or name.startswith((".", "/", "~", "\\")) or name.count("/") > 1:
        hint = "there is no such folder, and models on the hub are named OWNER/NAME"
        raise ModelError(f"hf:{name} does not exist: {hint}.")
    try:
        transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        reason = base.reason_unreachable(base.hub_address())
        if reason is None:
            return name, False
        problem = f"'{name}' is not a folder, is not in Hugging Face's cache, and cannot be downloaded ({reason})"
        command = f"`hf download {name} --local-dir FOLDER`"
        advice = f"Run {command} on another computer, copy the folder here, and give hf:FOLDER."
        raise ModelError(f"{problem}. {advice} {base.NO_DOWNLOAD_HINT}") from None
    return name, True


def _load_pretrained(source: Any, name: str, **options: Any) -> Any:
    """Load an object with one of transformers' classes; convert any error to `ModelError`."""
    try:
        return source.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # Models and safetensors raise errors of many types.
        unknown_reason = " ".join(str(error).split())[:300] or type(error).__name__
        reason = next((sentence for part, sentence in KNOWN_ERRORS.items() if part in str(error)), unknown_reason)
        raise ModelError(f"hf:{name} cannot be loaded: {reason}") from error


def _build(transformers: Any, config: Any, classes: int) -> nn.Module:
    config.num_labels = classes
    try:
        return transformers.AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    except ValueError as error:
        hint = "in Python, gradcam.explain(model, images, target=...) takes any model"
        raise ModelError(f"transformers has no image classifier of type {config.model_type}: {hint}.") from error


def find_preprocess(transformers: Any, name: str, is_local: bool, config: Any) -> Parts:
    """Return the preprocessing as parts without a model; raise `ModelError` if the processor cannot be loaded.

    If a folder has no processor, the parts have the usual ImageNet preprocessing.
    """
    try:
        processor = _load_pretrained(transformers.AutoImageProcessor, name, local_files_only=is_local)
        preprocess, notes = make_preprocess(processor)
    except ModelError:
        if not Path(name).is_dir() or (Path(name) / PROCESSOR).exists():
            raise
        note = f"{name} has no {PROCESSOR}: save the model's image processor there, with save_pretrained()."
        assumed = assume_preprocessing(getattr(config, "image_size", None))
        return Parts(nn.Identity(), assumed, is_assumed=True, notes=[note])
    return Parts(nn.Identity(), preprocess, notes=notes)


@contextlib.contextmanager
def _open_source(name: str) -> Iterator[tuple[Any, str, bool, Any]]:
    """Yield transformers (with logging off), a model's source, whether the source is local, and the configuration."""
    transformers = base.import_extra("transformers", "hf")
    name, is_local = _find_source(transformers, name)
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers, name, is_local, _load_pretrained(transformers.AutoConfig, name, local_files_only=is_local)
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, eq=False)
class ProcessorPreprocess:
    """Preprocessing by an image processor of transformers.

    `plain` contains equivalent steps: resize, crop and normalisation. If the steps depend on the image size, or are
    unknown, `plain` is None. In this case, the visible region of the image is measured for each image size.
    """

    processor: Any = field(repr=False)
    plain: Preprocessing | None = None
    _pieces: dict[tuple[int, int], Piece] = field(default_factory=dict, repr=False)

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """Return the processor's output for an RGB image, uint8 (H,W,3), as float32 (C,h,w).

        Processors take 8-bit images. Therefore, images with more bits are preprocessed by equivalent steps of this
        package. Raises `ImageError` if no equivalent steps are known.
        """
        height, width = image.shape[:2]
        if image.dtype == np.uint8 and image.ndim == 3:
            self.window(height, width)  # This call raises an error if the window is unknown.
            return run_processor(self.processor, check_pixels(image))[0]
        steps = self.plain or self.find_steps(height, width)
        if steps is None:
            problem = f"The image is {image.dtype} {image.shape}, but {type(self.processor).__name__} takes 8-bit RGB"
            raise ImageError(f"{problem}: convert the image, or give a reader that converts it.")
        return steps(image).flip(0) if getattr(self.processor, "do_flip_channel_order", False) else steps(image)

    def find_steps(self, height: int, width: int) -> Preprocessing | None:
        """Return steps that are equivalent to the processor for images of this size; None if no steps are found."""
        # The test image consists of random blocks, so that different crops have a low correlation.
        blocks = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 12), dtype=np.uint8)).convert("RGB")
        image = np.asarray(blocks.resize((width, height), Image.Resampling.NEAREST))
        # Ignore all errors. Processors may raise errors of any type. `to_steps` raises an error if timm's transforms pad.
        with contextlib.suppress(Exception):
            steps = to_steps(self.processor, self._locate(height, width))
            if _correlates(run_processor(self.processor, image), steps(image)):
                return steps
        return None

    def describe(self) -> dict[str, Any]:
        """Return the processor's settings as JSON."""
        return dict(json.loads(self.processor.to_json_string()))

    def region(self, height: int, width: int) -> Region:
        """Return the region of an image that the network sees: (top, left, height, width), in whole pixels."""
        return self._locate(height, width).region if self.plain is None else self.plain.region(height, width)

    def window(self, height: int, width: int) -> Window | None:
        """Return the region's position in the tensor; None if the region fills the tensor."""
        return self._locate(height, width).window if self.plain is None else None

    def _locate(self, height: int, width: int) -> Piece:
        """Measure which part of an image of this size is in the tensor; raise `ImageError` if this is impossible."""
        if (height, width) not in self._pieces:
            try:
                pieces = measure(partial(run_processor, self.processor), height, width, *self._calibration)
                if len(pieces) > 1:
                    raise ImageError(f"it splits the image into {len(pieces)} crops, but only one would be used")
            except Exception as error:  # Processors raise errors of any type.
                problem = f"{type(self.processor).__name__} cannot preprocess an image of {width} x {height}"
                advice = "Change the processor's settings, or crop the image."
                raise ImageError(f"{problem}: {' '.join(str(error).split())}. {advice}") from error
            self._pieces[height, width] = pieces[0]
        return self._pieces[height, width]

    @cached_property
    def _calibration(self) -> tuple[float, float]:
        return calibrate(partial(run_processor, self.processor))


class PromptPreprocess(ProcessorPreprocess):
    """Preprocessing of a vision-language model. The model's processor gets the image as it is, together with the prompt."""

    def __call__(self, image: NDArray[Any]) -> Tensor:
        """Return zeros (3,H,W) of the image's size, which use no memory: only the processor's output is needed."""
        return torch.zeros(3, 1, 1, dtype=torch.uint8, device="cpu").expand(3, *image.shape[:2])

    def window(self, height: int, width: int) -> None:
        """Return None, because the tensor has the image's size."""

    def find_share(self, height: int, width: int) -> Window:
        """Return the position of the region in its piece, as shares of the piece's sides. The rest is padding."""
        piece = None if self.plain is not None else self._locate(height, width)
        top, left, rows, columns = (0, 0, 1, 1) if piece is None else np.divide(piece.window, 2 * piece.size).tolist()
        return top, left, rows, columns

    def _locate(self, height: int, width: int) -> Piece:
        """Measure the position of an image. If the image is cut into several pieces, the pieces show the whole image."""
        try:
            count = len(run_processor(self.processor, np.zeros((height, width, 3), np.uint8)))
        except Exception:  # Some processors return rows of patches.
            count = 0
        size, whole = (height, width), (0, 0, height, width)
        return super()._locate(height, width) if count == 1 else Piece(whole, whole, (1, 1), size, size)


def load_processor(folder: str, processor: Any = None) -> Any:
    """Return the processor, or else load it from the model's folder; raise `ModelError` if there is none."""
    try:
        auto = base.import_extra("transformers", "hf").AutoProcessor
        processor = processor or auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if callable(processor) and hasattr(processor, "image_processor") and hasattr(processor, "tokenizer"):
            return processor
        reason = f"{type(processor).__name__} has no image processor or no tokenizer"
    except Exception as error:  # For missing or broken files, transformers raises errors of many types.
        reason = " ".join(str(error).split())[:200] if folder else "the model was not loaded from a folder"
    advice = "save a processor in the model's folder with processor.save_pretrained(folder), or pass one in Python with"
    use = "gradcam.load_model(model, processor=processor)"
    raise ModelError(f"The model has no processor of images and text ({reason}): {advice} {use}.")


def make_prompt_preprocess(processor: Any) -> PromptPreprocess:
    """Return the preprocessing of a vision-language model with this processor."""
    plain = None
    with contextlib.suppress(ModelError):  # for processors that return rows of patches
        plain = make_preprocess(processor.image_processor)[0].plain
    return PromptPreprocess(processor.image_processor, plain)


def run_processor(processor: Any, image: NDArray[np.uint8]) -> Tensor:
    """Return the tensors (P,C,h,w) that a processor returns for an image; usually there is only one."""
    boxes = {"boxes": [[[0, 0, image.shape[1], image.shape[0]]]]} if takes_boxes(processor) else {}
    # Pass a PIL image. For an array, a processor would have to guess the channel axis.
    output = processor(Image.fromarray(image), return_tensors="pt", **boxes)
    if "spatial_shapes" in output:  # NaFlex returns rows of patches.
        from gradcam.adapters.embedding import join_patches

        output = join_patches(output)
    values = output["pixel_values"]
    if values.ndim < 4:
        raise ModelError(f"it returns rows of patches {tuple(values.shape)}, expected images (N,C,H,W).")
    return values.flatten(0, -4)


def takes_boxes(processor: Any) -> bool:
    """Return whether a processor requires boxes of people, as for top-down pose estimation."""
    boxes = inspect.signature(processor.preprocess).parameters.get("boxes")
    return boxes is not None and boxes.default is inspect.Parameter.empty


def make_preprocess(processor: Any) -> tuple[ProcessorPreprocess, Sequence[str]]:
    """Return a processor as preprocessing, and notes; raise `ModelError` if the processor fails."""
    name, measured = type(processor).__name__, ProcessorPreprocess(processor)
    notes = [f"{name} needs a person's box: using the whole image as the box."] if takes_boxes(processor) else []
    first, second = (measured.find_steps(*size) for size in TEST_SIZES)
    if first is None:
        try:
            run_processor(processor, np.zeros((*TEST_SIZES[0], 3), np.uint8))
        except Exception as error:  # for example, because of a contradictory configuration
            raise ModelError(f"The image processor {name} fails on an image: {' '.join(str(error).split())}") from error
    is_plain = first == second and not getattr(processor, "do_flip_channel_order", False)
    return replace(measured, plain=first) if is_plain else measured, notes


def _correlates(values: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors show the same part of an image. Their values may differ in scale."""
    if values.shape != (1, *expected.shape):
        return False
    pair = torch.stack([tensor.float().mean(0).flatten() for tensor in (values[0], expected)])
    return torch.corrcoef(pair)[0, 1].item() > MIN_CORRELATION


def to_steps(processor: Any, piece: Piece) -> Preprocessing:
    """Return the steps of a processor: resize and crop as measured in `piece`, and its mean and std."""
    if hasattr(processor, "data_config"):  # This processor wraps timm's transforms.
        from gradcam.models.providers.timm import to_preprocessing

        return to_preprocessing(processor.data_config)
    lengths = [scale * length for scale, length in zip(piece.scales, piece.image)]
    is_whole = piece.region == (0, 0, *piece.image)
    # Without a crop, resize to the output size. With a crop, resize the shorter side first.
    resize = piece.size if is_whole else round(min(lengths))
    interpolation = Image.Resampling(2 if processor.resample is None else processor.resample).name.lower()
    # `Preprocessing` normalises values in [0,1], but a processor may rescale values to another range first.
    scale = processor.rescale_factor * 255 if processor.do_rescale else 255.0
    offset = 1.0 if getattr(processor, "rescale_offset", False) else 0.0
    statistics = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
    means, stds = (np.broadcast_to(np.asarray(values, dtype=np.float64), 3) for values in statistics)
    mean, std = tuple(((means + offset) / scale).tolist()), tuple((stds / scale).tolist())
    return Preprocessing(piece.size, resize, mean, std, interpolation)
