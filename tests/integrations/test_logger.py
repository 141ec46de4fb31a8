"""Test the heatmaps of a plain training loop: what is drawn, where it goes, and that the training does not change."""

import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradcam
from gradcam.integrations import HeatmapLogger
from tests.integrations.training import assert_identical, build_net, make_data, read_events, seed_all, snapshot

IMAGES = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Log:
    """A sink that keeps all it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.overlays: list[list[np.ndarray]] = []
        self.captions: list[list[str]] = []

    def __call__(self, overlays: Any, captions: Any, step: int) -> None:
        self.steps.append(step)
        self.overlays.append(list(overlays))
        self.captions.append(list(captions))


def train(heatmaps: HeatmapLogger | None, *, autocast: bool, compiled: bool = False) -> tuple[Any, ...]:
    """Train with frozen first layers and gradients of two batches, and return the losses and all that is left."""
    seed_all()
    model, losses = build_net(noisy=not compiled), []
    model[0].requires_grad_(False)
    model[1].eval()
    runs = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.Adam((x for x in model.parameters() if x.requires_grad), lr=0.01)
    loader = torch.utils.data.DataLoader(make_data(), 4, shuffle=True)
    if heatmaps:
        heatmaps.start(runs)
    step = 0
    for epoch in (1, 2):
        for images, classes in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(runs(images), classes)
                if heatmaps:
                    heatmaps.after_step(runs, step)  # within autocast, whose cache of weights has to stay usable
                loss = loss + 0.1 * runs(images).square().mean()
            loss.backward()
            losses.append(loss.detach())
            step += 1
            if heatmaps:
                heatmaps.after_step(runs, step)  # between two batches whose gradients are added
            if step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        if heatmaps:
            heatmaps.after_epoch(runs, epoch, step)
    return losses, snapshot(model), optimizer.state_dict()


@pytest.mark.parametrize(
    ("autocast", "compiled", "method", "options"),
    [
        (False, False, None, {}),
        (True, False, None, {}),
        (False, False, "ablationcam", {"evidence": "signed"}),
        (False, False, "rise", {}),  # takes random masks
        pytest.param(False, True, None, {}, marks=pytest.mark.filterwarnings("default")),
    ],
)
def test_the_training_is_the_same_to_the_last_bit(
    autocast: bool, compiled: bool, method: str | None, options: Any
) -> None:
    log = Log()
    layer = None if method == "rise" else "4"
    heatmaps = HeatmapLogger(IMAGES, layer, method=method, every_n_steps=3, every_n_epochs=1, sink=log, **options)
    plain = train(None, autocast=autocast, compiled=compiled)
    assert_identical(train(heatmaps, autocast=autocast, compiled=compiled), plain)
    assert log.steps == [0, 3, 6, 6, 9, 12, 12]


def test_overlays_show_the_model_of_that_step() -> None:
    seed_all()
    model, log = build_net(), Log()
    heatmaps = HeatmapLogger(IMAGES, "4", target=[1, 2, 3], every_n_steps=2, sink=log)
    heatmaps.start(model)
    with torch.no_grad():
        model[8].weight.neg_()
    heatmaps.after_step(model, 1)
    heatmaps.after_step(model, 2)
    assert log.steps == [0, 2]
    assert not np.array_equal(log.overlays[0], log.overlays[1])
    explanation = gradcam.explain(model, IMAGES, "4", target=[1, 2, 3])
    for i in range(3):
        expected = gradcam.overlay(IMAGES[i], explanation.heatmaps[i, 0])
        assert np.array_equal(log.overlays[1][i], expected)
        assert log.captions[1][i] == f"class {i + 1}, score {float(explanation.scores[i, 0]):.2f}"


def test_a_step_counter_that_jumps_or_repeats_draws_once() -> None:
    model, log = build_net(), Log()
    heatmaps = HeatmapLogger(IMAGES, "4", every_n_steps=10, sink=log)
    heatmaps.start(model, 7)  # a resumed training
    for step in (8, 9, 9, 12, 12, 19, 45, 46):
        heatmaps.after_step(model, step)
    assert log.steps == [12, 45]
    for epoch in (1, 2, 3):
        heatmaps.after_epoch(model, epoch, 46 + epoch)
    assert log.steps == [12, 45]  # with every_n_steps, epochs draw nothing


def test_the_layer_that_is_chosen_first_is_used_until_the_end() -> None:
    model, log = build_net(), Log()
    heatmaps = HeatmapLogger(IMAGES, sink=log)
    heatmaps.start(model)
    assert heatmaps.layer == "5"
    heatmaps.layer = "2"
    heatmaps.draw(model, 1)
    expected = gradcam.explain(model, IMAGES, "2").heatmaps[0, 0]
    assert np.array_equal(log.overlays[1][0], gradcam.overlay(IMAGES[0], expected))


def test_a_folder_gets_one_file_for_each_step() -> None:
    model = build_net()
    heatmaps = HeatmapLogger(IMAGES, "4", name="val/first", labels="abcd", sink=Path("out/images"))
    heatmaps.start(model)
    heatmaps.draw(model, 1200)
    heatmaps.draw(model, 1200)  # a resumed training replaces the file
    files = sorted(path.name for path in Path("out/images").iterdir())
    assert files == ["val_first-000000.png", "val_first-001200.png"]
    height, width, _ = gradcam.read_image(Path("out/images", files[0])).shape
    assert width > 3 * 224
    assert height > 224


@pytest.mark.parametrize(("sink", "package"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_missing_package_of_a_sink_is_named(monkeypatch: pytest.MonkeyPatch, sink: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Importing the package then fails.
    with pytest.raises(gradcam.GradcamError, match=f"needs the package {package}: pip install {package}"):
        HeatmapLogger(IMAGES, "4", sink=sink).start(build_net())


def test_tensorboard_reads_the_images() -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    model, log = build_net(), Log()
    with SummaryWriter("runs/mine") as writer:
        heatmaps = HeatmapLogger(IMAGES, "4", sink=[writer, "tensorboard", log])
        heatmaps.start(model, folder="runs/ours")
        heatmaps.draw(model, 5)
    for folder in ("runs/mine", "runs/ours"):
        events = read_events(folder)
        assert sorted(events) == ["gradcam/0", "gradcam/1", "gradcam/2"]
        for i in range(3):
            (first, image), (second, later) = events[f"gradcam/{i}"]
            assert (first, second) == (0, 5)
            assert np.array_equal(image, log.overlays[0][i])
            assert np.array_equal(later, log.overlays[1][i])


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a small package in place of W&B, with the signatures of version 0.31."""

    class Image:
        def __init__(self, data_or_path: Any, mode: Any = None, caption: str | None = None) -> None:
            self.data, self.caption = data_or_path, caption

    class Run:
        __module__ = "wandb.sdk.wandb_run"

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert step is None
            self.rows.append(data)

    def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if module.run is None:
            raise RuntimeError("You must call wandb.init() before wandb.log()")
        module.run.log(data, step, commit)

    module: Any = types.ModuleType("wandb")
    module.Image, module.run, module.log = Image, Run(), log
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.parametrize("form", ["name", "module", "run", "logger"])
def test_wandb_gets_all_images_in_one_row(wandb: Any, form: str) -> None:
    logger = types.SimpleNamespace(experiment=wandb.run)
    sink = {"name": "wandb", "module": wandb, "run": wandb.run, "logger": logger}[form]
    model, log = build_net(), Log()
    heatmaps = HeatmapLogger(IMAGES, "4", sink=[sink, log])
    heatmaps.start(model)
    heatmaps.draw(model, 7)
    first, second = wandb.run.rows
    assert (first["gradcam/step"], second["gradcam/step"]) == (0, 7)
    assert len(second["gradcam"]) == 3
    assert np.array_equal(second["gradcam"][2].data, log.overlays[1][2])
    assert second["gradcam"][2].caption == f"step 7: {log.captions[1][2]}"


def test_wandb_without_a_run_is_an_error_before_the_training(wandb: Any) -> None:
    wandb.run = None
    with pytest.raises(RuntimeError, match="wandb.init"):
        HeatmapLogger(IMAGES, "4", sink="wandb").start(build_net())


@pytest.mark.parametrize("form", ["name", "module", "logger"])
def test_mlflow_gets_each_image_with_its_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class MlflowClient:
        __module__ = "mlflow.tracking.client"

        def log_image(
            self, run_id: str, image: Any, artifact_file: Any = None, key: Any = None, step: Any = None
        ) -> None:
            assert run_id == "run 1"
            calls.append((key, step, image))

    def log_image(image: Any, artifact_file: Any = None, key: Any = None, step: Any = None) -> None:
        calls.append((key, step, image))

    module: Any = types.ModuleType("mlflow")
    module.log_image = log_image
    monkeypatch.setitem(sys.modules, "mlflow", module)
    logger = types.SimpleNamespace(experiment=MlflowClient(), run_id="run 1")
    model, log = build_net(), Log()
    heatmaps = HeatmapLogger(IMAGES, "4", sink=[{"name": "mlflow", "module": module, "logger": logger}[form], log])
    heatmaps.start(model)
    assert [(key, step) for key, step, _ in calls] == [(f"gradcam/{i}", 0) for i in range(3)]
    assert all(np.array_equal(image, overlay) for (_, _, image), overlay in zip(calls, log.overlays[0]))


class TestPictures:
    """The images to draw on: without the normalisation, stretched, or the originals."""

    PIXELS = (torch.arange(3 * 24 * 24).reshape(3, 24, 24) % 256).to(torch.uint8)

    def show(self, images: torch.Tensor, **options: Any) -> np.ndarray:
        return HeatmapLogger(images, **options).pictures[0]

    def test_a_normalisation_is_undone(self) -> None:
        mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
        images = ((self.PIXELS / 255 - mean[:, None, None]) / std[:, None, None])[None]
        expected = self.PIXELS.permute(1, 2, 0).numpy()
        assert np.array_equal(self.show(images, mean=mean, std=std.tolist()), expected)
        assert np.array_equal(self.show((self.PIXELS / 255 - 0.5)[None] * 2, mean=0.5, std=0.5), expected)

    def test_other_values_are_stretched(self) -> None:
        shown = self.show(self.PIXELS[None] / 51 - 3)
        assert np.array_equal(shown, self.PIXELS.permute(1, 2, 0).numpy())
        assert (self.show(torch.full((1, 3, 24, 24), 7.0)) == 0).all()

    def test_values_from_0_to_1_stay(self) -> None:
        pixels = self.PIXELS // 2
        assert np.array_equal(self.show(pixels[None] / 255), pixels.permute(1, 2, 0).numpy())

    @pytest.mark.parametrize(("channels", "used"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 1, 2]), (5, [0, 1, 2])])
    def test_any_number_of_channels(self, channels: int, used: list[int]) -> None:
        pixels = self.PIXELS[[0, 1, 2, 0, 1][:channels]]
        assert np.array_equal(self.show(pixels[None] / 255), pixels[used].permute(1, 2, 0).numpy())

    def test_the_originals_may_be_larger(self) -> None:
        original, log = np.full((96, 96, 3), 80, np.uint8), Log()
        heatmaps = HeatmapLogger(IMAGES[:1], "4", originals=[original], sink=log)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            heatmaps.start(build_net())
        assert log.overlays[0][0].shape == (96, 96, 3)


def test_only_the_first_images_are_drawn() -> None:
    model, log = build_net(), Log()
    many = torch.rand(20, 3, 24, 24)
    heatmaps = HeatmapLogger(many, "4", target=torch.arange(20) % 4, sink=log)
    heatmaps.start(model)
    assert [caption.split(",")[0] for caption in log.captions[0]] == [f"class {i % 4}" for i in range(8)]
    heatmaps = HeatmapLogger((many,), "4", target=[[0, 1]] * 20, max_images=2, labels={0: "cat", 1: "dog"}, sink=log)
    heatmaps.start(model)
    names = [caption.split(",")[0] for caption in log.captions[1]]
    assert names == ["class cat", "class dog"] * 2
    assert [tuple(images.shape) for images in heatmaps.images] == [(2, 3, 24, 24)]


def test_the_images_are_fixed() -> None:
    images, log = IMAGES.clone(), Log()
    heatmaps = HeatmapLogger(images, "4", sink=log)
    images.zero_()
    heatmaps.start(build_net())
    assert torch.equal(heatmaps.images, IMAGES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps is 0"),
        ({"every_n_epochs": 1.5}, "every_n_epochs is 1.5"),
        ({"max_images": -1}, "max_images is -1"),
        ({"method": "gradcom"}, "gradcam"),
        ({"evidence": "both"}, "evidence is 'both'"),
        ({"mean": [0.5, 0.5], "std": [0.2, 0.2]}, "mean, std"),
        ({"mean": 0.5}, "mean, std"),
        ({"originals": [np.zeros((24, 48, 3), np.uint8)] * 3}, "expected one for each input"),
        ({"originals": [np.zeros((24, 24, 3), np.uint8)]}, "expected one for each input"),
        ({"images": torch.rand(3, 24, 24)}, "expected a floating-point tensor"),
        ({"images": torch.rand(1, 3, 8, 24, 24)}, "The image is"),
    ],
)
def test_a_wrong_argument_is_an_error_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gradcam.GradcamError, match=message):
        HeatmapLogger(**({"images": IMAGES} | options))


def test_an_unknown_option_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="every_n_step"):
        HeatmapLogger(IMAGES, every_n_step=5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layer": "layer9"}, gradcam.GradcamError, "layer9"),
        ({"layer": "4", "target": 4}, gradcam.GradcamError, "4"),
        ({"layer": "4", "target": [0, 1]}, gradcam.GradcamError, "does not fit 3 image"),
        ({"layer": "4", "sink": 3}, gradcam.GradcamError, "sink is 3, expected a folder"),
        ({"layer": "4", "sink": "wandb"}, gradcam.GradcamError, "needs the package wandb"),
        ({"layer": "4", "images": torch.rand(1, 5, 24, 24)}, RuntimeError, "channels"),
    ],
)
def test_what_does_not_fit_the_model_is_an_error_before_the_training(
    options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    model = build_net()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        HeatmapLogger(**({"images": IMAGES, "sink": Log()} | options)).start(model)
    assert_identical(snapshot(model), before)


def test_a_layer_without_a_grid_turns_the_heatmaps_off() -> None:
    model, log = build_net(), Log()
    heatmaps = HeatmapLogger(IMAGES, "8", every_n_steps=1, sink=log)
    with pytest.warns(gradcam.GradcamWarning, match="No heatmaps are logged from step 0 on.*grid"):
        heatmaps.start(model)
    for step in (1, 2, 3):
        heatmaps.after_step(model, step)  # another warning would be an error
    assert log.steps == []


def test_an_error_during_the_training_is_reported_once() -> None:
    model, steps = build_net(), []

    def fill_the_disk(overlays: Any, captions: Any, step: int) -> None:
        steps.append(step)
        if step > 1:
            raise OSError(28, "No space left on device")

    heatmaps = HeatmapLogger(IMAGES, "4", every_n_steps=1, sink=fill_the_disk)
    heatmaps.start(model)
    heatmaps.after_step(model, 1)
    before = snapshot(model)
    with pytest.warns(gradcam.GradcamWarning, match="from step 2 on.*No space left"):
        heatmaps.after_step(model, 2)
    heatmaps.after_step(model, 3)
    assert steps == [0, 1, 2]
    assert_identical(snapshot(model), before)
    heatmaps.start(model)  # the next training starts anew
    assert steps == [0, 1, 2, 0]


def test_a_user_who_stops_the_training_stops_it() -> None:
    def stop(overlays: Any, captions: Any, step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HeatmapLogger(IMAGES, "4", sink=stop).start(build_net())


def test_sharded_parameters_are_not_run_by_one_process() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

        def forward(self, images: Any) -> Any:
            raise AssertionError("would wait for the other processes")

    sharded = build_net()
    sharded[0].weight.ds_id = 0  # DeepSpeed ZeRO-3
    for model in (FullyShardedDataParallel(build_net()), sharded):
        with pytest.warns(gradcam.GradcamWarning, match="sharded"):
            HeatmapLogger(IMAGES, sink=Log()).start(model)


def test_a_started_logger_can_be_pickled() -> None:
    pytest.importorskip("tensorboard")
    model = build_net()
    heatmaps = HeatmapLogger(IMAGES, "4", every_n_steps=2, labels=["a", "b", "c", "d"], sink="tensorboard")
    heatmaps.start(model, folder="one")
    copy = pickle.loads(pickle.dumps(heatmaps))
    copy.start(model, folder="two")
    first, second = read_events("one"), read_events("two")
    assert np.array_equal(first["gradcam/0"][0][1], second["gradcam/0"][0][1])


def test_images_are_taken_to_the_models_dtype() -> None:
    log = Log()
    HeatmapLogger({"input": IMAGES.double()}, "4", sink=log).start(build_net().bfloat16())
    assert log.steps == [0]
