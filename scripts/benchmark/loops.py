"""Explain a folder of images with our pipeline, and with the loops that users of other libraries write.

Each image is read, resized to the network's input size, and explained at `layer4` for its top class. The overlay has
the full size of the image, and is written as JPEG. Each loop draws with the function of its library.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

from benchmark.cases import SIZE, build_model
from benchmark.floor import make_request
from benchmark.pictures import QUALITY

NETWORK, LAYER = "ResNet-50", "layer4"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRANSFORM = transforms.Compose(
    [transforms.Resize((SIZE, SIZE)), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
)

Run = Callable[[Path, Path], None]  # The parameters are the folders of images and overlays.
Batch = list[Image.Image]


@dataclass(frozen=True)
class Loop:
    """One implementation of the job. `package` is a name in `CONTENDERS`. `attach(precision, batch)` yields a `Run`."""

    package: str
    precision: str
    batch: int
    attach: Callable[[str, int], contextlib.AbstractContextManager[Run]]

    @property
    def name(self) -> str:
        return f"{self.package}, {self.precision}, batch {self.batch}"


def load_ours(precision: str, device: str = "cpu") -> Any:
    """Load our classifier with the same network and weights as the other libraries."""
    import gradcam

    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights.pth")
        torch.save(build_model(NETWORK, "cpu").state_dict(), weights)
        return gradcam.load_classifier(
            "resnet50", weights=weights, size=(SIZE, SIZE), layer=LAYER, device=device, precision=precision
        )


@contextlib.contextmanager
def attach_ours(precision: str, batch: int) -> Iterator[Run]:
    classifier = load_ours(precision)
    yield lambda source, output: run_pipeline(classifier, source, output, batch)


def run_pipeline(
    classifier: Any, source: Path, output: Path, batch: int, workers: int | None = None, *, pixels: str = "cpu"
) -> None:
    """Write overlays and a manifest, as `gradcam batch` does, but without a progress display."""
    from gradcam.batch.engine import BatchWork, explain_locally
    from gradcam.batch.result_names import OutputOptions, plan_stems
    from gradcam.batch.save import Saver
    from gradcam.options import count_cores
    from gradcam.sources.collect import list_inputs
    from gradcam.storage.manifest import ManifestWriter
    from gradcam.storage.output import DiskWriter

    items = list_inputs([source], exclude=output).items
    request, saving = make_request(classifier), OutputOptions(format="jpg", quality=QUALITY)
    temporary = output / ".temporary"
    temporary.mkdir()
    saver = Saver(DiskWriter(output, temporary), plan_stems(items), saving, classifier, request)
    work = BatchWork(classifier, request, items, batch, workers or count_cores(), pixels=pixels)
    reports = explain_locally(work, saver, is_needed=lambda item: True, log_event=lambda event, **details: None)
    with contextlib.closing(ManifestWriter(output / "manifest.jsonl")) as manifest:
        for report in reports:
            manifest.append(report.record)


@contextlib.contextmanager
def attach_pytorch_grad_cam(precision: str, batch: int) -> Iterator[Run]:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.image import show_cam_on_image

    model = build_model(NETWORK, "cpu").to(DTYPES[precision])
    with GradCAM(model=model, target_layers=[model.get_submodule(LAYER)]) as cam:

        def run(source: Path, output: Path) -> None:
            for paths, pictures, images in load_batches(source, batch, DTYPES[precision]):
                for path, picture, heatmap in zip(paths, pictures, cam(input_tensor=images, targets=None)):
                    rgb = np.float32(picture) / 255
                    overlay = show_cam_on_image(rgb, cv2.resize(heatmap, picture.size), use_rgb=True)
                    bgr = cv2.cvtColor(overlay, cv2.COLOR_RGB2BGR)
                    cv2.imwrite(str(output / path.name), bgr, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])

        yield run


@contextlib.contextmanager
def attach_torchcam(precision: str, batch: int) -> Iterator[Run]:
    from torchcam.methods import GradCAM
    from torchcam.utils import overlay_mask

    model: nn.Module = build_model(NETWORK, "cpu").to(DTYPES[precision])
    with GradCAM(model, LAYER) as cam:

        def run(source: Path, output: Path) -> None:
            for paths, pictures, images in load_batches(source, batch, DTYPES[precision]):
                scores = model(images)
                (maps,) = cam(scores.argmax(dim=1).tolist(), scores)
                for path, picture, heatmap in zip(paths, pictures, maps):
                    mask = to_pil_image(heatmap.float(), mode="F")
                    overlay_mask(picture, mask, alpha=0.5).save(output / path.name, quality=QUALITY)

        yield run


def load_batches(source: Path, size: int, dtype: torch.dtype) -> Iterator[tuple[Sequence[Path], Batch, Tensor]]:
    """Yield the files, the images and the network input of each batch."""
    files = sorted(source.iterdir())
    for start in range(0, len(files), size):
        paths = files[start : start + size]
        pictures = [Image.open(path).convert("RGB") for path in paths]
        yield paths, pictures, torch.stack([TRANSFORM(picture) for picture in pictures]).to(dtype)


ATTACH = {"gradcam": attach_ours, "pytorch-grad-cam": attach_pytorch_grad_cam, "torchcam": attach_torchcam}
