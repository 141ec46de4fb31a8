"""How to build a model by its name, and what it takes, before any weight is read."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gradcam.classifiers import DEFAULT
from gradcam.errors import ModelError, join_names, nearest, shorten

USUAL_SIZE = (224, 224)


@dataclass(frozen=True)
class Blueprint:
    """A model to be built: `build` makes it with random weights, for pictures of `size` with so many channels.

    `layer`: what is explained where nothing else is said, None for the last layer that has a grid.
    """

    name: str
    build: Callable[[], Any]
    size: tuple[int, int] = USUAL_SIZE
    channels: int = 3
    layer: str | None = None


def find_blueprint(name: str) -> Blueprint:
    """The blueprint of the model of that name; nothing is downloaded but, for `hf:NAME`, its configuration.

    Names: the embedded model's, torchvision's `NAME` and `NAME:WEIGHTS`, `timm:NAME`, `hf:NAME_OR_FOLDER`, and one's own
    `file.py:function` or `package.module:function`. Raises `ModelError` for an unknown one, and offers the nearest.
    """
    if name == DEFAULT:
        from gradcam.classifiers.embedded.network import EfficientNetLite0

        return Blueprint(name, partial(EfficientNetLite0, 1000), layer="layer4")
    for prefix, find in {"timm:": _find_timm, "hf:": _find_hugging_face}.items():
        if name.startswith(prefix):
            return find(name, name.removeprefix(prefix))
    known = _torchvision_models()
    model, _, weights = name.partition(":")
    if model in known:
        return _find_torchvision(name, model, weights)
    if ":" in name:
        return Blueprint(name, _find_function(*name.rsplit(":", 1)))
    offers = nearest(name, [DEFAULT, *known])
    hint = (
        f"Nearest: {join_names(offers)}." if offers else f"Others are 'timm:{name}', 'hf:FOLDER', 'file.py:function'."
    )
    raise ModelError(f"There is no model {shorten(name)}. {hint}")


def _torchvision_models() -> list[str]:
    from torchvision import models

    return models.list_models(module=models)


def _find_torchvision(name: str, model: str, weights: str) -> Blueprint:
    """As the model is with these weights, the best ones where none are named, for pictures as they were trained with."""
    from torchvision import models

    known = models.get_model_weights(model).__members__
    by_lower_case = {key.lower(): key for key in known}
    wanted = weights.rpartition(".")[2].lower()  # people also type ResNet50_Weights.IMAGENET1K_V1
    if wanted and wanted not in by_lower_case:
        raise ModelError(f"{model} has no weights {shorten(weights)}: choose one of {join_names(known)}.")
    chosen = known[by_lower_case[wanted or "default"]]
    options: dict[str, Any] = {}
    if model.startswith("vit_"):
        options["image_size"] = chosen.meta["min_size"][0]  # which the number of its tokens hangs on
    if model in ("googlenet", "inception_v3"):
        # Drawing weights at random would take many seconds; of the auxiliary heads nothing is used.
        options |= {"init_weights": False, "aux_logits": False}
    side = chosen.transforms.keywords["crop_size"]
    return Blueprint(name, partial(models.get_model, model, **options), (side, side))


def _find_timm(name: str, model: str) -> Blueprint:
    timm = _import_extra("timm", name)
    plain = model.partition(".")[0]  # behind the dot there is the name of its weights
    known = timm.list_models()
    if plain not in known:
        offers = [f"timm:{offer}" for offer in nearest(plain, known)]
        raise ModelError(
            f"timm has no model {shorten(model)}. {f'Nearest: {join_names(offers)}.' if offers else ''}".strip()
        )
    settings = timm.get_pretrained_cfg(model, allow_unregistered=True)
    channels, *size = (3, *USUAL_SIZE) if settings is None else settings.input_size
    return Blueprint(name, partial(timm.create_model, model, pretrained=False), tuple(size), channels)


def _find_hugging_face(name: str, place: str) -> Blueprint:
    transformers = _import_extra("transformers", name)
    try:
        config = transformers.AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{name}: there is no configuration to be had ({reason})") from error
    build = partial(transformers.AutoModelForImageClassification.from_config, config)
    size = _hugging_face_size(transformers, place) or _to_size(getattr(config, "image_size", None)) or USUAL_SIZE
    return Blueprint(name, build, size, getattr(config, "num_channels", 3))


def _hugging_face_size(transformers: ModuleType, place: str) -> tuple[int, int] | None:
    """What its preprocessing makes of a picture; None where there is none with the model."""
    try:
        settings, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(place)
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


def _import_extra(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ModelError(f"{name} needs {package}, which is not installed ({error}): pip install {package}") from error


def _find_function(place: str, function: str) -> Callable[[], Any]:
    """The function that builds one's own model. Raises `ModelError` where there is none."""
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the code of that module raises
        raise ModelError(
            f"{place}: cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        offers = nearest(function, (key for key, value in vars(module).items() if callable(value)))
        hint = f" Nearest: {join_names(offers)}." if offers else ""
        raise ModelError(f"{place}: there is no function {shorten(function)} in it.{hint}")
    return found


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(blueprint: Blueprint) -> nn.Module:
    """The model, with random weights. Raises `ModelError` where that fails, or gives something else."""
    try:
        model = blueprint.build()
    except Exception as error:  # whatever the code of somebody's model raises
        reason = " ".join(str(error).split())
        raise ModelError(f"{blueprint.name}: cannot be built ({type(error).__name__}: {reason})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{blueprint.name}: gave {shorten(model)}, expected a torch.nn.Module.")
    return model
