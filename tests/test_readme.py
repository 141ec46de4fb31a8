"""What the README says: its Python runs, its commands run, its table of migration holds."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import gradcam
from gradcam.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPE = re.compile(r"<!-- recipe (\w+) -->\n```python\n(.*?)```", re.S)
YOUR_MODEL = re.compile(r"<!-- your model -->\n```bash\n(.*?)```", re.S)
BATCH = re.compile(r"<!-- batch -->\n```bash\n(.*?)```", re.S)
INSPECT = re.compile(r"<!-- inspect -->\n```bash\n(.*?)```", re.S)
TRUST = re.compile(r"<!-- trust -->\n```bash\n(.*?)```", re.S)
BEYOND = re.compile(r"<!-- beyond -->\n```bash\n(.*?)```", re.S)
ARRAY = re.compile(r"<!-- array -->\n```(\w+)\n(.*?)```", re.S)
REST = ARRAY.sub(
    "", BEYOND.sub("", TRUST.sub("", INSPECT.sub("", BATCH.sub("", YOUR_MODEL.sub("", RECIPE.sub("", README))))))
)
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", REST, re.S)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    shutil.copytree(ROOT / "assets", tmp_path / "assets")
    shutil.copy(ROOT / "assets/coffee.jpg", tmp_path / "photo.jpg")
    shutil.copy(ROOT / "assets/camera.png", tmp_path / "other.png")
    with contextlib.chdir(tmp_path) if hasattr(contextlib, "chdir") else _in_folder(tmp_path):
        yield tmp_path


@contextlib.contextmanager
def _in_folder(path: Path) -> Any:
    before = Path.cwd()
    os.chdir(path)
    yield
    os.chdir(before)


def run_python(code: str, names: dict[str, Any]) -> None:
    """As in a session; an error says in which line of the README it is."""
    above = README[: README.index(code)].count("\n")
    exec(compile("\n" * above + code, "README.md", "exec"), names)


def test_the_python_runs_from_top_to_bottom_in_one_session(models: Path) -> None:
    """The recipes too: what a block calls `model` or `images` is there for all after it."""
    cli.main(["batch", "photo.jpg", "-o", "explained", "--quiet"], standalone_mode=False)
    names: dict[str, Any] = {}
    assert len(PYTHON) == 20
    for code in PYTHON:
        run_python(code, names)
    assert torch.allclose(
        names["maps"], gradcam.explain(names["model"], names["images"], "layer4", target=281).maps[:, 0]
    )
    explanation = gradcam.load_classifier().explain(["photo.jpg", "other.png"], target="espresso")
    assert np.array_equal(gradcam.read_image("overlay.png"), explanation.overlay(0))
    assert names["served"].label() == "espresso"
    assert round(explanation.probability(0), 2) == 0.95
    assert np.array_equal(gradcam.read_image("fine.png"), names["attribution"].picture())
    assert [record.image for record in names["records"]] == ["photo.jpg"]
    assert names["result"].name == "other.png"
    assert names["recorder"].steps == [0, 2]
    assert [it.shape[1] for it in names["features"].values()] == [256, 512]
    assert names["mycam"].name == "mycam"
    assert names["x"].grad.item() == 18
    assert torch.equal(names["subject"].classes, names["model"](names["images"]).argmax(1))


def test_each_block_of_python_runs_after_the_one_that_says_so(models: Path) -> None:
    cli.main(["batch", "photo.jpg", "-o", "explained", "--quiet"], standalone_mode=False)
    (first,) = [number for number, code in enumerate(PYTHON) if "any PyTorch classifier, frozen or not" in code]
    names: dict[str, Any] = {}
    run_python(PYTHON[first], names)
    for code in PYTHON[first + 1 :]:
        run_python(code, dict(names))


def test_the_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
    own = [shlex.split(line)[1:] for line in commands if line.startswith("gradcam ")]
    assert len(own) >= 5
    for arguments in own:
        assert cli.main(arguments, standalone_mode=False) == 0
    assert (folder / "panda.jpg").exists()
    assert len(list((folder / "explained").iterdir())) == 6
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands and recipes for one's own models name, with random weights."""
    import timm
    from safetensors.torch import save_file
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    folder = tmp_path_factory.mktemp("made")
    (folder / "hub/checkpoints").mkdir(parents=True)
    file = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(torchvision.models.resnet18().state_dict(), folder / "hub/checkpoints" / file)
    save_file(timm.create_model("resnet18").state_dict(), folder / "timm.safetensors")
    names = {0: "nothing", 1: "coffee", 2: "tea"}
    config = ViTConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, id2label=names)
    ViTForImageClassification(config).save_pretrained(folder / "my-vit")
    ViTImageProcessor().save_pretrained(folder / "my-vit")
    chest = torchvision.models.densenet121(num_classes=14).state_dict()
    torch.save({"state_dict": {f"module.{name}": it for name, it in chest.items()}, "epoch": 3}, folder / "chest.ckpt")
    (folder / "findings.txt").write_text("\n".join(f"finding {number}" for number in range(14)))
    (folder / "train.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))\n"
    )
    network: dict[str, Any] = {}
    exec((folder / "train.py").read_text(), network)
    torch.save(network["build"]().state_dict(), folder / "last.pth")
    deep = np.random.default_rng(0).integers(100, 4000, (80, 100), dtype=np.uint16)
    Image.fromarray(deep).save(folder / "scan.png")
    return folder


@pytest.fixture
def models(folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those files in the current folder."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(made / "hub"))
    for file in made.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_the_commands_for_models_of_ones_own_run(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = YOUR_MODEL.search(README)
    assert commands is not None
    lines = commands.group(1).splitlines()
    assert len(lines) == 8
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        assert cli.main(arguments, standalone_mode=False) == 0, line
    overlays = {path.name for path in models.glob("*-*.png")}
    assert {
        "photo-gradcam-resnet18.png",
        "photo-gradcam-timm_resnet18-timm.png",
        "photo-rollout-hf_my_vit.png",
        "photo-legrad-hf_my_vit.png",
        "scan-gradcam-train.py_build-last.png",
    } <= overlays
    assert len([name for name in overlays if "finding" in name]) == 3
    assert "Shown from 100 to 3999 of 65535." in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_that_ask_how_far_a_map_can_be_trusted_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = TRUST.search(README)
    assert commands is not None
    lines = commands.group(1).splitlines()
    assert len(lines) == 4
    for line in lines:
        assert cli.main(shlex.split(line, comments=True)[1:], standalone_mode=False) == 0, line
    said = capsys.readouterr().out
    assert "The verdict: passed." in said
    assert "gradcam run photo.jpg --method " in said
    assert gradcam.read_image("coffee-gradcam-check.png").ndim == 3
    names = {path.name for path in Path("results").iterdir()}
    assert {"results.csv", "results.json", "results.tex", "curves.png", "examples.png"} <= names


def test_the_commands_for_looking_inside_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "photos").mkdir()
    for name in ("coffee.jpg", "rocket.jpg"):
        shutil.copy(folder / "assets" / name, folder / "photos")
    commands = INSPECT.search(README)
    assert commands is not None
    lines = commands.group(1).splitlines()
    assert len(lines) == 5
    for line in lines:
        assert cli.main(shlex.split(line, comments=True)[1:], standalone_mode=False) == 0, line
    with np.load(folder / "features.npz") as file:
        assert file["names"].tolist() == ["coffee.jpg", "rocket.jpg"]
        assert file["head.1"].shape == (2, 1280, 1, 1)
    assert gradcam.read_image("photo-activations.png").ndim == 3
    assert gradcam.read_image("photo-gradients.png").ndim == 3
    assert "espresso" in capsys.readouterr().out


def test_the_commands_for_many_pictures_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "photos").mkdir()
    (folder / "more").mkdir()
    for name in ("coffee.jpg", "rocket.jpg"):
        shutil.copy(folder / "assets" / name, folder / "photos")
    shutil.copy(folder / "assets/camera.png", folder / "more")
    (folder / "chosen.csv").write_text("path,class\nphotos/coffee.jpg,cup\nmore/camera.png,\n")
    lines = [line for block in BATCH.findall(README) for line in block.splitlines()]
    assert len(lines) == 9
    written = []
    for line in lines:
        before, _, command = line.rpartition("| ")
        if before:
            found = subprocess.run(before, shell=True, capture_output=True, check=True).stdout
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(found)))
        arguments = shlex.split(command, comments=True)[1:]
        if arguments[0] == "batch" and "--resume" not in arguments:
            shutil.rmtree("explained", ignore_errors=True)
        assert cli.main(arguments, standalone_mode=False) == 0, line
        pictures = [path for path in Path("explained").rglob("*gradcam*") if path.is_file()]
        written.append(
            len([path for path in pictures if "report" not in path.parts and path.suffix in (".jpg", ".webp")])
        )
    assert written[:-1] == [2, 2, 2, 3, 2, 2, 4, 2]
    assert written[-1] in (0, 1, 2)  # whose share they are


@pytest.mark.slow
def test_the_commands_for_more_than_one_machine_run(folder: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # last digits are those of the actor's one core
    store, photos = fsspec.filesystem("s3"), folder / "photos"
    photos.mkdir()
    for number, name in enumerate(("coffee.jpg", "rocket.jpg")):
        shutil.copy(folder / "assets" / name, photos)
        store.put(str(photos / name), f"{s3}/photos/{name}")
        with tarfile.open(folder / f"photos-{number:06}.tar", "w") as tar:
            tar.add(photos / name, name)
    commands = BEYOND.search(README)
    assert commands is not None
    lines = commands.group(1).splitlines()
    assert len(lines) == 5
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for line in lines:
            typed = shlex.split(
                line.replace("s3://bucket", s3).replace("127.0.0.1:6379", cluster.address), comments=True
            )
            code = f"import sys; from gradcam.cli import main; sys.argv = {typed}; main()"
            # In processes of their own: one that leaves a Ray cannot join another well.
            ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert (ended.returncode, ended.stderr) == (0, ""), line
    finally:
        cluster.shutdown()
    expected = gradcam.read_manifest("explained")
    assert [record.image for record in expected] == ["coffee.jpg", "rocket.jpg"]
    assert gradcam.read_manifest(f"{s3}/explained") == gradcam.read_manifest(f"{s3}/with-ray") == expected
    assert store.cat(f"{s3}/explained/rocket-gradcam.jpg") == Path("explained/rocket-gradcam.jpg").read_bytes()
    assert store.exists(f"{s3}/explained/index.html")
    assert [record.tar for record in gradcam.read_manifest(f"{s3}/tars")] == ["results-000001.tar"] * 2


def test_the_job_arrays_take_shares(folder: Path) -> None:
    import yaml

    blocks = dict(ARRAY.findall(README))
    (slurm,) = [line for line in blocks["bash"].splitlines() if line.startswith("gradcam ")]
    job = yaml.safe_load(blocks["yaml"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completions"] == 8
    assert container["command"] == ["sh", "-c"]
    (kubernetes,) = container["args"]
    array = {**os.environ, "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "8", "JOB_COMPLETION_INDEX": "0"}
    for line, pictures in ((slurm, "photos/"), (kubernetes, "s3://bucket/photos/")):
        typed = subprocess.run(
            ["sh", "-c", f"echo {line}"], env=array, capture_output=True, text=True, check=True
        ).stdout
        assert "--shard 1/8 --resume" in typed
        shutil.rmtree("photos", ignore_errors=True)
        shutil.copytree(folder / "assets", "photos", ignore=shutil.ignore_patterns("[!c]*"))
        local = typed.replace(pictures, "photos/").replace("s3://bucket/", "")
        assert cli.main(shlex.split(local)[1:], standalone_mode=False) == 0
        shutil.rmtree("explained")


class TestRecipes:
    """Each recipe runs as printed, and shows what it says."""

    def run(self, name: str, code: str = "") -> dict[str, Any]:
        names: dict[str, Any] = {}
        recipes = dict(RECIPE.findall(README))
        assert len(recipes) == 5
        exec(compile(recipes[name] + code, f"README.md, {name}", "exec"), names)
        return names

    def test_timm(self, models: Path) -> None:
        names = self.run("timm")
        assert names["explanation"].layer == "blocks.11.norm1"
        assert names["classifier"].label(967) == "espresso"
        assert names["classifier"].layer == "layer4"

    def test_hugging_face(self, models: Path) -> None:
        names = self.run("hf")
        classifier = names["classifier"]
        assert list(classifier.labels) == ["nothing", "coffee", "tea"]
        by_hand = classifier.explain("photo.jpg", target=1)
        torch.testing.assert_close(names["explanation"].maps, by_hand.maps, rtol=1e-4, atol=1e-7)

    def test_16_bits(self, models: Path) -> None:
        names = self.run("deep")
        assert names["explanation"].classes.tolist() == [[1]]
        (note,) = names["explanation"].notes
        assert "65535" in note
        written = gradcam.read_image("scan-fracture.png")
        assert written.shape == (80, 100, 3)

    def test_tensorboard(self, models: Path) -> None:
        names = self.run("tensorboard")
        assert names["network"].training
        assert all(parameter.grad is None for parameter in names["network"].parameters())
        pictures = logged("runs")["gradcam"]
        assert [step for step, _ in pictures] == [0, 1]
        assert np.array_equal(pictures[1][1], names["overlay"])

    @pytest.mark.filterwarnings("ignore")  # Lightning's own advice
    def test_lightning(self, models: Path) -> None:
        pictures = [np.full((64, 64, 3), level, np.uint8) for level in (40, 200)]
        images = torch.randn(2, 3, 64, 64)
        names = self.run("lightning")
        callback = names["LogOverlays"](pictures, images, "network.layer4")
        lightning, module = names["lightning"], names["Classifier"]()
        data = torch.utils.data.DataLoader([(torch.randn(3, 64, 64), number % 2) for number in range(8)], batch_size=4)
        logger = lightning.pytorch.loggers.TensorBoardLogger(models)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=logger, callbacks=[callback], enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(module, data, data)
        found = logged(logger.log_dir)
        assert [step for step, _ in found["gradcam/0"]] == [step for step, _ in found["gradcam/1"]] == [0, 1]
        module.eval()  # validation comes last in an epoch: the weights are those of the last picture
        heatmaps = gradcam.explain(module, images, "network.layer4").heatmaps
        last = found["gradcam/1"][1][1].astype(int)
        assert abs(last - gradcam.overlay(pictures[1], heatmaps[1, 0])).max() <= 1


def logged(folder: str | Path) -> dict[str, list[tuple[int, Any]]]:
    """The pictures that TensorBoard would show, by tag: the step and the pixels of each."""
    import io

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(each.step, np.array(Image.open(io.BytesIO(each.encoded_image_string)))) for each in events.Images(tag)]
        for tag in events.Tags()["images"]
    }


def test_the_first_screen_shows_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(code for language, code in BLOCKS if language == "text")
    cli.main(["run", "assets/cat_and_espresso.jpg", "--layer", "layer4", "--device", "cpu"], standalone_mode=False)

    def without_time(text: str) -> str:
        return re.sub(r"\d+\.\d s", "T s", text).strip()

    assert without_time(capsys.readouterr().out) == without_time(shown)


def test_every_mark_of_the_bench_has_its_table() -> None:
    marks = re.findall(r"<!-- bench (.+?) -->\n(.*?)<!-- end -->", README, re.S)
    assert {key for key, _ in marks} == {
        "summary", "environment", "agreement", "time cpu", "classes cpu", "methods cpu", "precision cpu", "memory cpu",
        "perturbation cpu", "shell", "traits", "transformers cpu",
        "folder", "folder floor", "folder memory", "folder listing", "recording cpu", "features cpu",
        "evaluation", "quality", "time cuda", "classes cuda", "throughput cpu", "throughput cuda", "million", "engines",
        "engines shares", "engines memory",
    }  # fmt: skip
    for key, text in marks:
        assert "not measured" not in text
        assert text.count("\n|") > 2 or key == "environment"
        assert text.strip()


def test_every_map_that_is_not_theirs_has_its_reason() -> None:
    section = README.split("### The same name, another map")[1].split("\n## ")[0]
    table, reasons = section.split("<!-- end -->")
    said = reasons.lower().replace("++", "pp").replace("-", "")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 19
    for name, _, *cells in rows:
        least = min(float(cell.partition(" to ")[0]) for cell in cells if cell != "-")
        if least < 0.99:
            assert name.lower().replace("-", "") in said, name


class TestMigration:
    """Each row of the table for people who come from pytorch-grad-cam."""

    model = torchvision.models.resnet18(weights=None).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    def test_every_row_is_covered(self) -> None:
        table = README.split("## Coming from pytorch-grad-cam")[1].split("## ")[0]
        rows = [line for line in table.splitlines() if line.startswith("|")][2:]
        assert len(rows) == 16  # add a test below when you add a row

    def test_constructor_and_call(self) -> None:
        explanation = gradcam.explain(self.model, self.images, self.model.layer4[-1])
        assert explanation.layer == "layer4.1"
        assert explanation.heatmaps[0, 0].numpy().shape == (64, 64)

    def test_targets(self) -> None:
        def maps(target: Any) -> torch.Tensor:
            return gradcam.explain(self.model, self.images, "layer4", target=target).maps

        top = self.model(self.images).argmax(1).tolist()
        assert torch.equal(maps(None), maps(top))
        assert torch.equal(maps(281), maps([281, 281]))
        torch.testing.assert_close(maps([[281, 282], [281, 282]])[:, 1:], maps(282))
        difference = gradcam.explain(
            self.model, self.images, "layer4", target=lambda output: output[:, 281] - output[:, 282]
        )
        assert difference.scores[0, 0] == pytest.approx((difference.output[0, 281] - difference.output[0, 282]).item())
        with pytest.raises(gradcam.GradcamError):
            maps([281])  # there: a silent zero map for the second image

    def test_one_image_and_a_list_of_one(self) -> None:
        one = self.images[:1]
        assert torch.equal(
            gradcam.explain(self.model, one, "layer4", target=[281]).maps,
            gradcam.explain(self.model, one, "layer4", target=281).maps,
        )

    def test_several_layers_and_their_average(self) -> None:
        explained = gradcam.compare(self.model, self.images, layers=["layer3", "layer4"], methods=["gradcam"])
        average = torch.stack([explanation.heatmaps for explanation in explained.values()]).mean(0)
        single = gradcam.explain(self.model, self.images, "layer3").heatmaps
        torch.testing.assert_close(2 * average - explained["layer4", "gradcam"].heatmaps, single, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradcam.fuse(explained).maps, average)

    def test_their_classes_are_names_here(self) -> None:
        methods = ["gradcam-pp", "hirescam", "ablationcam"]
        found = gradcam.compare(self.model, self.images, layers=["layer4"], methods=methods, target=5)
        assert [method for _, method in found] == methods

    def test_smoothing(self) -> None:
        options = {"augmentation": "flip-scale", "smoothing": "eigen"}
        one, other = (
            gradcam.explain(self.model, it, "layer4", target=5, **options) for it in (self.images, self.images.flip(-1))
        )
        torch.testing.assert_close(one.heatmaps, other.heatmaps.flip(-1), rtol=1e-3, atol=1e-3)

    def test_guided_backpropagation_leaves_the_modules(self) -> None:
        before = list(self.model.modules())
        assert gradcam.attributions.guided_backpropagation(self.model, self.images).values.any()
        assert list(self.model.modules()) == before

    def test_their_reshape_transform_is_our_reshape(self) -> None:
        model = torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
        ).eval()
        torch.nn.init.normal_(model.heads.head.weight)

        def reshape_transform(
            tensor: torch.Tensor, height: int = 4, width: int = 4
        ) -> torch.Tensor:  # as printed there
            result = tensor[:, 1:, :].reshape(tensor.size(0), height, width, tensor.size(2))
            return result.transpose(2, 3).transpose(1, 2)

        layer, images = "encoder.layers.encoder_layer_1.ln_1", torch.randn(1, 3, 32, 32)
        found = gradcam.explain(model, images, layer, reshape=reshape_transform)
        assert torch.equal(found.maps, gradcam.explain(model, images, layer).maps)
        assert found.maps.any()

    def test_no_reshape_transform(self) -> None:
        swin = torchvision.models.swin_t(weights=None).eval()
        images = torch.randn(1, 3, 64, 64)
        last = gradcam.explain(swin, images, "features.7")  # channels last
        first = gradcam.explain(swin, images, "permute")  # the same, behind the norm, channels first
        assert last.maps.shape == first.maps.shape == (1, 1, 2, 2)

    def test_overlay(self) -> None:
        ramp = np.linspace(0, 1, 64, dtype=np.float32)[None].repeat(64, axis=0)
        grey = [gradcam.overlay(np.full((64, 64, 3), level, np.uint8), ramp) for level in (60, 120)]
        differences = grey[1].astype(int) - grey[0].astype(int)
        assert grey[0].dtype == np.uint8
        assert abs(differences[:, 0] - 60).max() <= 1  # no evidence: the picture itself
        assert abs(differences[:, -1] - 30).max() <= 1  # half of it shows through, however bright it is

    def test_normalisation_and_what_theirs_is(self) -> None:
        from importlib.util import find_spec

        many = gradcam.explain(self.model, self.images, "layer4", target=[list(range(20))] * 2)
        classes = many.maps.flatten(2).amax(2).argmax(1).tolist()  # with untrained weights many maps are blank
        explanation = gradcam.explain(self.model, self.images, "layer4", target=classes)
        assert explanation.heatmaps.amax((2, 3)).unique().tolist() == [1.0]
        if find_spec("pytorch_grad_cam") is None:
            pytest.skip("pip install grad-cam to compare with it")
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        # At the layer's own size, so that their corner-aligned resizing has no part in it.
        with GradCAM(model=self.model, target_layers=[self.model.layer4]) as cam:
            cam.get_target_width_height = lambda images: None
            theirs = cam(self.images, targets=[ClassifierOutputTarget(index) for index in classes])
        for m, expected in zip(explanation.maps[:, 0], theirs):
            np.testing.assert_allclose((m - m.min()) / (m.max() - m.min()), expected, atol=1e-4)

    def test_the_model_is_left_as_it_was_and_its_output_is_kept(self) -> None:
        model = torchvision.models.resnet18(weights=None).train()
        explanation = gradcam.explain(model, self.images, "layer4")
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.testing.assert_close(explanation.output, model.eval()(self.images))
