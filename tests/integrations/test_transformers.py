"""Train with the Trainer of transformers, with and without the callback."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradcam
from tests.integrations.training import assert_identical, make_data, read_events, seed_all, snapshot

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
HeatmapCallback: Any = importlib.import_module("gradcam.integrations.transformers").HeatmapCallback
pytestmark = pytest.mark.filterwarnings("default", "error::gradcam.GradcamWarning")
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
LAYER = "resnet.encoder.stages.1"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(callbacks: list[Any], *, resume: bool = False, **options: Any) -> tuple[Any, Any]:
    """Train, and return the trainer and all that is left."""
    seed_all()
    data = [{"pixel_values": image, "labels": label} for image, label in make_data(size=32)]
    settings = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 4, "layer_type": "basic"}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**settings))
    arguments = {
        "output_dir": "out", "num_train_epochs": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "report_to": "none",
    } | options  # fmt: skip
    arguments = transformers.TrainingArguments(**arguments)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer, (losses, snapshot(model), trainer.optimizer.state_dict())


def list_files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 3, 6, 9, 12]),
        ({"bf16": True}, [0, 3, 6, 9, 12]),
        ({"gradient_accumulation_steps": 2}, [0, 3, 6]),
        pytest.param({"dataloader_num_workers": 2}, [0, 3, 6, 9, 12], marks=pytest.mark.slow),
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager"}, [0, 3, 6, 9, 12], marks=pytest.mark.slow
        ),
    ],
)
def test_the_training_is_the_same_to_the_last_bit(options: dict[str, Any], steps: list[int]) -> None:
    _, plain = train([], **options)
    callback = HeatmapCallback({"pixel_values": IMAGES}, every_n_steps=3)
    _, observed = train([callback], **options)
    assert_identical(observed, plain)
    assert list_files("out/heatmaps") == [f"gradcam-{step:06}.png" for step in steps]
    assert callback.layer.startswith("resnet.encoder")


def test_tensorboard_gets_the_images_after_each_epoch() -> None:
    trainer, _ = train([HeatmapCallback(IMAGES, LAYER, target=[1, 2])], report_to="tensorboard")
    events = read_events("out/heatmaps")
    assert [step for step, _ in events["gradcam/0"]] == [0, 6, 12]
    explanation = gradcam.explain(trainer.model, IMAGES, LAYER, target=[1, 2])
    for i in range(2):
        expected = gradcam.overlay(IMAGES[i], explanation.heatmaps[i, 0])
        assert np.array_equal(events[f"gradcam/{i}"][-1][1], expected)


def test_the_images_go_into_the_file_of_the_trainers_own_callback() -> None:
    callback = transformers.integrations.TensorBoardCallback()
    train([callback, HeatmapCallback(IMAGES, LAYER, sink=callback)])
    assert [step for step, _ in read_events(next(Path("out/runs").iterdir()))["gradcam/0"]] == [0, 6, 12]


def test_every_second_epoch() -> None:
    train([HeatmapCallback(IMAGES, LAYER, every_n_epochs=2)], num_train_epochs=4)
    assert list_files("out/heatmaps") == [f"gradcam-{step:06}.png" for step in (0, 12, 24)]


def test_a_resumed_training_draws_no_step_twice() -> None:
    train([HeatmapCallback(IMAGES, LAYER, every_n_steps=4)], num_train_epochs=1, save_strategy="epoch")
    Path("out/heatmaps/gradcam-000000.png").unlink()
    train([HeatmapCallback(IMAGES, LAYER, every_n_steps=4)], resume=True)
    assert list_files("out/heatmaps") == [f"gradcam-{step:06}.png" for step in (4, 8, 12)]


def test_an_evaluation_alone_draws_nothing() -> None:
    trainer, _ = train([], max_steps=1)
    trainer.add_callback(HeatmapCallback(IMAGES, LAYER, sink="drawn"))
    trainer.evaluate(trainer.train_dataset)
    assert not Path("drawn").exists()


def test_an_unknown_layer_stops_the_training_before_its_first_step() -> None:
    with pytest.raises(gradcam.errors.LayerError, match="layer4"):
        train([HeatmapCallback(IMAGES, "layer4")])


def test_a_layer_without_a_grid_does_not_stop_the_training() -> None:
    _, plain = train([])
    with pytest.warns(gradcam.GradcamWarning, match="No heatmaps are logged from step 0 on"):
        _, observed = train([HeatmapCallback(IMAGES, "classifier.1", every_n_steps=1)])
    assert_identical(observed, plain)


def test_other_ranks_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.Trainer, "is_world_process_zero", lambda self: False)
    train([HeatmapCallback(IMAGES, LAYER, every_n_steps=1)], max_steps=2)
    assert not Path("out/heatmaps").exists()
