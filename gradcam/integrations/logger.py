"""Draw the heatmaps of a fixed set of images while a model is trained, and leave the training unchanged."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from gradcam.cam.explain import Plan, explain
from gradcam.cam.methods.table import find_method
from gradcam.errors import GradcamError, ImageError, LayerError, ModelError, describe_unexpected, warn
from gradcam.hooks.containers import map_tensors, take_rows, to_batch
from gradcam.images.draw import MAX_ASPECT_RATIO, overlay
from gradcam.images.read import Pixels, read_image
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.images.write import write_image
from gradcam.layers.find import find_layer, unwrap
from gradcam.options import ExplainOptions, argument_error, check_count

# A function of overlays, their captions, and the training step.
Writer = Callable[[Sequence[Pixels], Sequence[str], int], object]


class HeatmapLogger:
    """Log the heatmaps of a fixed set of images while a model is trained.

    Training is not affected: weights, losses and random states are the same, bit for bit, as without the logger. If the
    heatmaps cannot be computed or written during the training, one warning gives the reason, and the logger turns
    itself off. Errors before the training starts are raised.

    Parameters
    ----------
    images : Tensor (N,C,H,W), tuple or dict
        The model's input, in any form that `gradcam.explain` accepts.
    layer : str or nn.Module, default None
        The target layer. None chooses a layer for the first heatmaps, and uses this layer until the end.
    target : Any, default None
        What to explain, as in `gradcam.explain`. None explains each image's top class at that time. To see how the
        evidence for the true class changes, pass the labels of the images, N ints.
    method : str or Method, default None
        The method, as in `gradcam.explain`.
    every_n_steps : int, default None
        Log after every N optimizer steps.
    every_n_epochs : int, default None
        Log after every N epochs. If both intervals are None, log after every epoch.
    sink : Any, default None
        The destination of the overlays: a folder, "tensorboard", "wandb", "mlflow", a `SummaryWriter`, a W&B run, a
        logger of Lightning, a function of overlays, captions and step, or a list of these. None means the loggers of
        the trainer, or the folder "heatmaps" if the trainer has no loggers.
    originals : sequence of images, default None
        The images to draw on, in any form that `gradcam.read_image` takes. Each original must show the same area as the
        model's input. None draws on the model's input.
    mean, std : float or sequence of float, default None
        The normalisation of the input, which is undone before drawing. If both are None, values outside [0,1] are
        stretched to [0,1] for each image.
    labels : sequence or dict of str, default None
        The names of the classes, for captions.
    max_images : int, default 8
        The number of images to explain and draw. Further images are ignored.
    name : str, default "gradcam"
        The name of the images in the sink.
    **options : Any
        `evidence`, `augmentation`, `smoothing` and `reshape`, as in `gradcam.explain`.

    Raises
    ------
    GradcamError
        If an argument is invalid. The subclass `ImageError` is raised if the images cannot be drawn on.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(num_classes=10)
    >>> images = torch.rand(2, 3, 64, 64)
    >>> heatmaps = gradcam.integrations.HeatmapLogger(images, "layer4", target=[3, 5], every_n_steps=10, sink="heatmaps")
    >>> heatmaps.start(model)  # checks the arguments, and draws the untrained model
    >>> for step in range(1, 21):
    ...     ...  # a training step
    ...     heatmaps.after_step(model, step)
    Ellipsis
    ...
    >>> from pathlib import Path
    >>> sorted(path.name for path in Path("heatmaps").iterdir())
    ['gradcam-000000.png', 'gradcam-000010.png', 'gradcam-000020.png']
    """

    def __init__(
        self,
        images: Any,
        layer: str | nn.Module | None = None,
        *,
        target: Any = None,
        method: Any = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        sink: Any = None,
        originals: Sequence[Any] | None = None,
        mean: Any = None,
        std: Any = None,
        labels: Sequence[str] | Mapping[int, str] | None = None,
        max_images: int = 8,
        name: str = "gradcam",
        **options: Unpack[ExplainOptions],
    ) -> None:
        counts = {"every_n_steps": every_n_steps, "every_n_epochs": every_n_epochs, "max_images": max_images}
        for argument, value in counts.items():
            _ = value is None or check_count(value, argument)
        Plan.of([] if method is None else [find_method(method)], target, options, type(self).__name__)
        batch, rows = to_batch(images), slice(max_images)
        images = images[rows] if isinstance(images, list) else take_rows(images, rows, batch.images)
        self.images = map_tensors(images, lambda tensor: tensor.detach().clone())
        self.target = target[rows] if hasattr(target, "__len__") and len(target) == batch.images else target
        sizes = batch.sizes[rows]
        pictures = [_to_picture(image, size, mean, std) for image, size in zip(batch.pictures, sizes)]
        self.pictures = pictures if originals is None else _read_originals(originals, sizes)
        self.layer, self.method, self.options, self.sink, self.name = layer, method, options, sink, name
        self.labels: Any = labels or range(2**63 - 1)  # Without labels, the name of a class is its number.
        self.every_n_steps, self.every_n_epochs = every_n_steps, every_n_epochs or (None if every_n_steps else 1)
        self.signed, self._last_step, self._writers = options.get("evidence") == "signed", 0, list[Writer]()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writers": []}  # Open files stay in the process that opened them.

    def start(self, model: nn.Module, step: int = 0, *, sinks: Sequence[Any] = (), folder: Any = "heatmaps") -> None:
        """Check the arguments against the model, open the sinks, and log the heatmaps of an untrained model.

        Parameters
        ----------
        model : nn.Module
            The model to be trained.
        step : int, default 0
            The number of training steps that are already done. If this number is not 0, nothing is logged.
        sinks : sequence, default ()
            The sinks to use if `sink` is None. If `sinks` is empty too, the overlays are written to `folder`.
        folder : str or path, default "heatmaps"
            The folder for PNG files, or for TensorBoard's files.

        Raises
        ------
        GradcamError
            If the model has no such layer, or if the target, the images or the sink cannot be used. Other errors of the
            model or the sink are passed on. If the model or the layer cannot be explained, there is only a warning.
        """
        if isinstance(self.layer, str):
            find_layer(unwrap(model), self.layer)
        chosen = (sinks or folder) if self.sink is None else self.sink
        chosen = chosen if isinstance(chosen, (list, tuple)) else [chosen]
        self._last_step, self._writers = step, [self._open(sink, folder) for sink in chosen]
        if step == 0:
            self.draw(model, step)

    def draw(self, model: nn.Module, step: int) -> None:
        """Draw and log the heatmaps now, if the logger was started. An error turns the logger off, with a warning.

        Parameters
        ----------
        model : nn.Module
            The model in training.
        step : int
            The number of steps done, by which the sinks sort the images. Errors at step 0 are raised.
        """
        try:
            if self._writers:
                self._write(model, step)
        except Exception as error:
            if step == 0 and not isinstance(error, (LayerError, ModelError)):
                raise
            self._writers = []
            reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
            warn(f"No heatmaps are logged from step {step} on, and the training continues. Reason: {reason}")

    def after_step(self, model: nn.Module, step: int) -> None:
        """Log the heatmaps after every N-th step.

        Parameters
        ----------
        model : nn.Module
            The model in training.
        step : int
            The number of steps done. Between two calls, the number may rise by more than 1.
        """
        if self.every_n_steps and step // self.every_n_steps > self._last_step // self.every_n_steps:
            self.draw(model, step)
        self._last_step = step

    def after_epoch(self, model: nn.Module, epoch: int, step: int) -> None:
        """Log the heatmaps after every N-th epoch.

        Parameters
        ----------
        model : nn.Module
            The model in training.
        epoch : int
            The number of epochs done.
        step : int
            The number of steps done, by which the sinks sort the images.
        """
        if self.every_n_epochs and epoch % self.every_n_epochs == 0:
            self.draw(model, step)

    def _write(self, model: nn.Module, step: int) -> None:
        is_wrapped = any("fsdp" in type(module).__module__ for module in model.modules())
        if is_wrapped or any(hasattr(x, "ds_id") or type(x).__name__ == "DTensor" for x in model.parameters()):
            raise ModelError("One process cannot explain a model with sharded parameters (FSDP or DeepSpeed ZeRO-3).")
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        first = next(filter(torch.is_floating_point, model.parameters()), empty)
        images = map_tensors(self.images, lambda x: x.to(first.device, first.dtype if x.is_floating_point() else None))
        explanation = explain(model, images, self.layer, method=self.method, target=self.target, **self.options)
        if self.layer is None and explanation.layout is not None and " + " not in explanation.layer:
            self.layer = explanation.layer  # Maps at different layers could not be compared.
        overlays, captions, classes = [], [], explanation.classes
        for i, picture in enumerate(self.pictures):
            for k, heatmap in enumerate(explanation.heatmaps[i].cpu()):
                overlays.append(overlay(picture, heatmap, region=(0, 0, *picture.shape[:2]), signed=self.signed))
                label = "" if classes is None else f"class {self.labels[int(classes[i, k])]}, "
                captions.append(f"{label}score {float(explanation.scores[i, k]):.2f}")
        for write in self._writers:
            write(overlays, captions, step)

    def _open(self, sink: Any, folder: Any) -> Writer:
        if isinstance(sink, str) and sink == "tensorboard":
            writer = _import("torch.utils.tensorboard").SummaryWriter(str(folder))
            return partial(_write_events, writer, self.name)
        if isinstance(sink, (str, Path)) and sink not in ("wandb", "mlflow"):
            Path(sink).mkdir(parents=True, exist_ok=True)
            return partial(_write_panel, Path(sink, self.name.replace("/", "_")), self.signed)
        write = find_writer(_import(sink) if isinstance(sink, str) else sink, self.name) or sink
        if not callable(write):
            raise argument_error(sink, "sink", "a folder, 'tensorboard', 'wandb', 'mlflow', a writer, or a function.")
        return write


def find_writer(sink: Any, name: str) -> Writer | None:
    """Return the function that writes to an object of TensorBoard, W&B or MLflow; None for any other object.

    Loggers of Lightning have such an object as `experiment`, and the `TensorBoardCallback` of transformers has it as
    `tb_writer`.
    """
    client = getattr(sink, "experiment", None) or getattr(sink, "tb_writer", None) or sink
    if hasattr(client, "add_image"):
        return partial(_write_each, partial(client.add_image, dataformats="HWC"), name)
    library = getattr(client, "__name__", type(client).__module__).partition(".")[0]
    if library == "wandb":
        return partial(_write_to_wandb, client, name)
    if library == "mlflow":
        run = () if client is sink else (sink.run_id,)
        return partial(_write_each, lambda key, image, step: client.log_image(*run, image, key=key, step=step), name)
    return None


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.rpartition(".")[2]
        raise GradcamError(f"The sink {package!r} needs the package {package}: pip install {package}.") from error


def _write_each(write: Callable[..., Any], name: str, overlays: Sequence[Pixels], captions: object, step: int) -> None:
    for number, pixels in enumerate(overlays):
        write(f"{name}/{number}", pixels, step)


def _write_events(writer: Any, name: str, *drawn: Any) -> None:
    _write_each(partial(writer.add_image, dataformats="HWC"), name, *drawn)
    writer.flush()  # Otherwise, a training that is killed would lose the images of the last two minutes.


def _write_panel(path: Path, signed: bool, overlays: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
    write_image(f"{path}-{step:06}.png", draw_panel(captions, [PanelRow(f"step {step}", overlays)], signed=signed))


def _write_to_wandb(run: Any, name: str, overlays: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
    # W&B drops values whose `step` is smaller than its own counter, so the training step is logged as a value.
    image = importlib.import_module("wandb").Image
    images = [image(overlay, caption=f"step {step}: {caption}") for overlay, caption in zip(overlays, captions)]
    run.log({name: images, f"{name}/step": step})


def _to_picture(image: Tensor, size: Sequence[int], mean: Any, std: Any) -> Pixels:
    """Return an input (C,H,W) as an RGB image of this size: without its normalisation, or stretched to [0,1]."""
    image = image[..., : size[-2], : size[-1]].detach().float().cpu()
    if mean is not None or std is not None:
        try:
            shift, scale = (torch.as_tensor(x, dtype=torch.float32, device="cpu").view(-1, 1, 1) for x in (mean, std))
            image = image * scale + shift
        except (RuntimeError, TypeError, ValueError):
            raise argument_error((mean, std), "(mean, std)", "a number each, or a number for each channel.") from None
    elif image.min() < 0 or image.max() > 1:
        image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
    return read_image(image[: 3 if len(image) > 2 else 1].clamp(0, 1))


def _read_originals(originals: Sequence[Any], sizes: Sequence[tuple[int, ...]]) -> list[Pixels]:
    """Read the images to draw on. Raises `ImageError` if an image shows another area than the model's input."""
    pictures = [read_image(original) for original, _ in zip(originals, sizes)]
    shapes = [picture.shape[:2] for picture in pictures]
    ratios = [shape[1] * size[0] / (shape[0] * size[1]) for shape, size in zip(shapes, sizes)]
    if len(ratios) < len(sizes) or not all(1 / MAX_ASPECT_RATIO <= ratio <= MAX_ASPECT_RATIO for ratio in ratios):
        expected = f"expected one for each input, with the input's aspect ratio: {sizes}"
        raise ImageError(f"The sizes of the originals are {shapes}, {expected}.")
    return pictures
