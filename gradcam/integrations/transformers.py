"""A callback of Hugging Face's Trainer that logs heatmaps while a model is trained."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gradcam.integrations.logger import HeatmapLogger


class HeatmapCallback(HeatmapLogger, TrainerCallback):
    """A callback of `transformers.Trainer` that logs the heatmaps of a fixed set of images while a model is trained.

    Training is not affected: weights, losses and random states are the same, bit for bit, as without the callback. The
    untrained model is logged as well, as step 0. If the heatmaps cannot be computed or written during the training, one
    warning says why, and the callback turns itself off. Before the training starts, errors are raised.

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
        `TensorBoardCallback`, a function of overlays, captions and step, or a list of these. None means TensorBoard,
        W&B and MLflow if they are in `report_to`. If none of these is in `report_to`, overlays are written to the
        folder "heatmaps" in `output_dir`.
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
    >>> import gradcam, torch
    >>> inputs = {"pixel_values": torch.rand(2, 3, 64, 64)}
    >>> callback = gradcam.integrations.transformers.HeatmapCallback(inputs, target=[0, 1], every_n_steps=100)
    >>> # transformers.Trainer(model, arguments, train_dataset=training, callbacks=[callback]).train()
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            sinks = [sink for sink in ("tensorboard", "wandb", "mlflow") if sink in args.report_to]
            self.start(kwargs["model"], state.global_step, sinks=sinks, folder=Path(args.output_dir, "heatmaps"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_step(kwargs["model"], state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_epoch(kwargs["model"], int(state.epoch), state.global_step)  # fractional if an epoch ends early
