"""Train with Lightning, with and without the callback."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradcam
from tests.integrations.training import assert_identical, build_net, make_data, read_events, seed_all, snapshot

lightning = pytest.importorskip("lightning")
HeatmapCallback: Any = importlib.import_module("gradcam.integrations.lightning").HeatmapCallback
pytestmark = pytest.mark.filterwarnings("default", "error::gradcam.GradcamWarning")
IMAGES = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(5))


def make_module(package: Any) -> Any:
    """Return a module of `lightning` or of `pytorch_lightning`, which do not accept each other's."""

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.losses = build_net(), []

        def forward(self, images: Any) -> Any:
            return self.network(images)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.detach())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Module()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_trainer(callbacks: list[Any], package: Any = lightning, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "log_every_n_steps": 1} | quiet | options
    return package.Trainer(callbacks=callbacks, **settings)


def fit(
    callbacks: list[Any], *, compiled: bool = False, workers: int = 0, package: Any = lightning, **options: Any
) -> Any:
    """Train, and return the trainer and all that is left."""
    seed_all()
    data, module = make_data(), make_module(package)
    options.setdefault("num_sanity_val_steps", 0)
    trainer = make_trainer(callbacks, package, **options)
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=workers)
    fitted = torch.compile(module, backend="eager") if compiled else module
    trainer.fit(fitted, loader, torch.utils.data.DataLoader(data, 8))
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return trainer, (module.losses, snapshot(module.network), optimizers)


def list_files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 3, 6, 9, 12]),
        ({"precision": "bf16-mixed"}, [0, 3, 6, 9, 12]),
        ({"precision": "bf16-true"}, [0, 3, 6, 9, 12]),
        ({"accumulate_grad_batches": 2, "num_sanity_val_steps": 2}, [0, 3, 6]),
        pytest.param({"workers": 2}, [0, 3, 6, 9, 12], marks=pytest.mark.slow),
        pytest.param({"compiled": True}, [0, 3, 6, 9, 12], marks=pytest.mark.slow),
    ],
)
def test_the_training_is_the_same_to_the_last_bit(options: dict[str, Any], steps: list[int]) -> None:
    _, plain = fit([], **options)
    callback = HeatmapCallback(IMAGES, every_n_steps=3, sink="drawn")
    _, observed = fit([callback], **options)
    assert_identical(observed, plain)
    assert list_files("drawn") == [f"gradcam-{step:06}.png" for step in steps]
    assert callback.layer == "network.5"


def test_the_other_package_of_lightning_is_supported() -> None:
    package = pytest.importorskip("pytorch_lightning")
    fit([HeatmapCallback(IMAGES, every_n_epochs=2, sink="drawn")], package=package)
    assert list_files("drawn") == ["gradcam-000000.png", "gradcam-000012.png"]


def test_by_default_the_trainers_loggers_get_the_images_after_each_epoch() -> None:
    loggers = lightning.pytorch.loggers
    both = [loggers.TensorBoardLogger(".", name="events"), loggers.CSVLogger(".", name="csv")]
    trainer, _ = fit([HeatmapCallback(IMAGES, "network.4", target=[1, 2])], logger=both)
    events = read_events(both[0].log_dir)
    assert [step for step, _ in events["gradcam/1"]] == [0, 6, 12]
    explanation = gradcam.explain(trainer.lightning_module, IMAGES, "network.4", target=[1, 2])
    for i in range(2):
        expected = gradcam.overlay(IMAGES[i], explanation.heatmaps[i, 0])
        assert np.array_equal(events[f"gradcam/{i}"][-1][1], expected)


@pytest.mark.parametrize("with_logger", [False, True])
def test_without_a_logger_for_images_a_folder_gets_them(with_logger: bool) -> None:
    logger = lightning.pytorch.loggers.CSVLogger(".", name="csv") if with_logger else False
    fit([HeatmapCallback(IMAGES, "network.4")], logger=logger, default_root_dir="root", max_epochs=1)
    assert list_files("csv/version_0/heatmaps" if with_logger else "root/heatmaps") == [
        "gradcam-000000.png", "gradcam-000006.png",
    ]  # fmt: skip


def test_a_validation_alone_and_a_sanity_check_draw_nothing() -> None:
    callback = HeatmapCallback(IMAGES, "network.4", sink="drawn")
    trainer = make_trainer([callback])
    data = torch.utils.data.DataLoader(make_data(8), 4)
    trainer.validate(make_module(lightning), data, verbose=False)
    assert not Path("drawn").exists()
    _, _ = fit([callback], num_sanity_val_steps=2, max_epochs=1)
    assert list_files("drawn") == ["gradcam-000000.png", "gradcam-000006.png"]


def test_a_fast_development_run_writes_no_event_file() -> None:
    fit([HeatmapCallback(IMAGES, "network.4")], fast_dev_run=True, logger=True)
    assert not list(Path().rglob("*tfevents*"))


def test_a_resumed_training_goes_on_with_the_same_layer() -> None:
    first = HeatmapCallback(IMAGES, every_n_steps=4, sink="drawn")
    trainer, _ = fit([first], max_epochs=1)
    trainer.save_checkpoint("last.ckpt")
    assert first.layer == "network.5"
    checkpoint = torch.load("last.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["HeatmapCallback('gradcam')"] == {"layer": "network.5"}
    checkpoint["callbacks"]["HeatmapCallback('gradcam')"]["layer"] = "network.2"
    torch.save(checkpoint, "last.ckpt")
    Path("drawn/gradcam-000000.png").unlink()
    second = HeatmapCallback(IMAGES, every_n_steps=4, sink="drawn")
    resumed = make_trainer([second])
    resumed.fit(make_module(lightning), torch.utils.data.DataLoader(make_data(), 4), ckpt_path="last.ckpt")
    assert second.layer == "network.2"
    assert list_files("drawn") == [f"gradcam-{step:06}.png" for step in (4, 8, 12)]
    named = HeatmapCallback(IMAGES, "network.4")
    named.load_state_dict({"layer": "network.2"})
    assert named.layer == "network.4"


def test_two_callbacks_have_two_names() -> None:
    callbacks = [HeatmapCallback(IMAGES, "network.4", name=name, sink="drawn") for name in ("train", "validation")]
    fit(callbacks, max_epochs=1)
    assert len(list_files("drawn")) == 4


def test_an_unknown_layer_stops_the_training_before_its_first_step() -> None:
    with pytest.raises(gradcam.errors.LayerError, match="network.9"):
        fit([HeatmapCallback(IMAGES, "network.9", sink="drawn")])


def test_a_layer_without_a_grid_does_not_stop_the_training() -> None:
    _, plain = fit([])
    with pytest.warns(gradcam.GradcamWarning, match="No heatmaps are logged from step 0 on") as caught:
        _, observed = fit([HeatmapCallback(IMAGES, "network.8", every_n_steps=1, sink="drawn")])
    assert len([warning for warning in caught if issubclass(warning.category, gradcam.GradcamWarning)]) == 1
    assert_identical(observed, plain)
    assert list_files("drawn") == []


def test_other_ranks_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = HeatmapCallback(IMAGES, "network.4", every_n_steps=1, sink="drawn")
    trainer = make_trainer([callback])
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    trainer.fit(make_module(lightning), torch.utils.data.DataLoader(make_data(8), 4))
    assert not Path("drawn").exists()


def test_the_callback_can_be_pickled_after_a_training() -> None:
    callback = HeatmapCallback(IMAGES, every_n_steps=3)
    fit([callback], logger=lightning.pytorch.loggers.TensorBoardLogger("."), max_epochs=1)
    del callback.log, callback.log_dict  # Lightning's own, which refer to the trainer
    assert pickle.loads(pickle.dumps(callback)).layer == "network.5"
