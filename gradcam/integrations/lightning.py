"""A Lightning callback that logs heatmaps while a model is trained, for `lightning` and `pytorch_lightning`."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gradcam.integrations.logger import HeatmapLogger, find_writer

# A trainer accepts only callbacks of its own package.
_packages = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)] or ["lightning"]
_bases: Any = [import_module(name).Callback for name in _packages]


class HeatmapCallback(HeatmapLogger, *_bases):  # type: ignore[misc] # The classes depend on the installed packages.
    """A Lightning callback that logs the heatmaps of a fixed set of images while a model is trained.

    Training is not affected: weights, losses and random states are the same, bit for bit, as without the callback. The
    untrained model is logged as well, as step 0. Sanity checks and `trainer.validate` log nothing. If the heatmaps cannot
    be computed or written during the training, one warning says why, and the callback turns itself off. Before the
    training starts, errors are raised.

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
        logger of Lightning, a function of overlays, captions and step, or a list of these. None uses the trainer's
        loggers that can store images. Without such loggers, overlays are written to the folder "heatmaps" in the
        trainer's log folder.
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
    >>> import gradcam, lightning, torch
    >>> images = torch.rand(2, 3, 64, 64)
    >>> callback = gradcam.integrations.lightning.HeatmapCallback(images, "network.layer4", every_n_steps=100)
    >>> trainer = lightning.Trainer(callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu")
    """

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}({self.name!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the layer, so that a resumed training uses the same layer."""
        return {"layer": self.layer} if isinstance(self.layer, str) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the layer, if none was named.

        Parameters
        ----------
        state_dict : dict
            The result of `state_dict`.
        """
        self.layer = self.layer or state_dict.get("layer")

    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        if trainer.is_global_zero:
            sinks = [logger for logger in trainer.loggers if find_writer(logger, self.name)]
            folder = Path(getattr(trainer.logger, "log_dir", None) or trainer.default_root_dir, "heatmaps")
            self.start(trainer.model, trainer.global_step, sinks=sinks, folder=folder)

    def on_train_batch_end(self, trainer: Any, pl_module: object, *batch: object) -> None:
        self.after_step(trainer.model, trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: object) -> None:
        self.after_epoch(trainer.model, trainer.current_epoch + 1, trainer.global_step)
