"""Check that models work after other libraries have quantised, checkpointed, exported, sharded or wrapped them."""

import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradcam
from gradcam import TargetLayer
from tests.helpers import TINY, FunctionModule, assert_same, tiny_model, tiny_vit, traces

EXPECTED = gradcam.explain(tiny_model().eval(), TINY, "3", target=1).maps


def test_accelerate_offload() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model().eval(), execution_device=torch.device("cpu"))
    before = [type(module.forward) for module in model.modules()]
    torch.testing.assert_close(gradcam.explain(model, TINY, "3", target=1).maps, EXPECTED)
    assert [type(module.forward) for module in model.modules()] == before


@pytest.mark.parametrize("layer", ["0", "3", "4"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_dynamic_quantisation_of_the_head(layer: str) -> None:
    expected = gradcam.explain(tiny_model().eval(), TINY, layer, target=[[0, 1, 2]] * 3)
    model = torch.ao.quantization.quantize_dynamic(tiny_model().eval(), {nn.Linear})
    explanation = gradcam.explain(model, TINY, layer, target=[[0, 1, 2]] * 3)
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(explanation.output, model(TINY))  # the output is that of the quantised model
    assert not torch.equal(explanation.output, expected.output)
    torch.testing.assert_close(explanation.maps, expected.maps, rtol=0.05, atol=0.02 * expected.maps.max().item())
    assert explanation.maps.any()


# Timm's checkpointing then bypasses the call of each `Sequential`.
@pytest.mark.parametrize("layer", ["layer3.1", "layer4.1", "layer2.1"])
def test_timms_checkpointing(layer: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = gradcam.explain(model, images, layer, target=1).maps
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(gradcam.explain(model, images, layer, target=1).maps, expected)
    torch.testing.assert_close(gradcam.explain(model.train(), images, layer, target=1).maps, expected)


# Newer versions of transformers emit this warning.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("method", ["gradcam", "gradient-rollout", "legrad", "ablationcam"])
def test_hugging_faces_checkpointing(method: str) -> None:
    model, images = _hugging_face_vit(), torch.randn(2, 3, 32, 32)
    expected = gradcam.explain(model, images, method=method, target=1).maps
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradcam.explain(model.train(), images, method=method, target=1).maps, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_through_which_a_gradient_at_the_image_flows(use_reentrant: bool) -> None:
    model = tiny_model().eval()
    expected = gradcam.attributions.input_gradients(model, TINY, target=1).values
    flow = gradcam.inspection.gradients(model, TINY, target=1)
    model[3].forward = partial(checkpoint, model[3].forward, use_reentrant=use_reentrant)
    if use_reentrant:
        with pytest.raises(gradcam.errors.ModelError, match="use_reentrant=False, or switch checkpointing off"):
            gradcam.attributions.input_gradients(model, TINY, target=1)
        with pytest.raises(gradcam.errors.ModelError, match="use_reentrant=False, or switch checkpointing off"):
            gradcam.explain(model, TINY, "0", target=1)
    else:
        torch.testing.assert_close(gradcam.attributions.input_gradients(model, TINY, target=1).values, expected)
        assert [row["norm"] for row in gradcam.inspection.gradients(model, TINY, target=1).rows()] == pytest.approx(
            [row["norm"] for row in flow.rows()]
        )


def _hugging_face_vit() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(tiny_vit(num_labels=5)).eval()
    nn.init.normal_(model.classifier.weight)
    return model


def test_a_hugging_face_model() -> None:
    model = _hugging_face_vit()
    images = torch.randn(2, 3, 32, 32)
    automatic = gradcam.explain(model, images)
    assert automatic.layer.endswith("layernorm_before")
    assert type(automatic.output).__name__ == "ImageClassifierOutput"
    assert not automatic.output.logits.requires_grad
    keywords = gradcam.explain(model, {"pixel_values": images}, automatic.layer)
    torch.testing.assert_close(keywords.maps, automatic.maps)


def test_a_list_of_images_is_for_a_detector() -> None:
    torch.manual_seed(0)
    options = {"weights": None, "weights_backbone": None, "num_classes": 3, "box_score_thresh": 0.0}
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(**options, min_size=64).eval()
    images = list(torch.rand(2, 3, 64, 96))

    def highest_score(output: Any) -> torch.Tensor:
        return torch.stack([detections["scores"][0] for detections in output])

    both = gradcam.explain(model, images, "backbone.body.13", target=highest_score)
    assert both.maps.flatten(1).any(1).all()
    for batch, rows in ((torch.stack(images), slice(2)), (images[:1], slice(1))):
        again = gradcam.explain(model, batch, "backbone.body.13", target=highest_score)
        torch.testing.assert_close(again.scores, both.scores[rows])
        torch.testing.assert_close(again.maps, both.maps[rows], rtol=1e-3, atol=1e-3 * both.maps.max().item())
    with pytest.raises(gradcam.errors.ImageError, match=r"list of 2 tensors \(3, 64, 96\).*: pass torch\.stack"):
        gradcam.explain(torchvision.models.resnet18(weights=None), images, "layer4", target=1)


def test_a_layer_whose_output_is_a_model_output() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "num_labels": 5}
    config = transformers.ResNetConfig(layer_type="basic", **sizes)
    model = transformers.ResNetForImageClassification(config).eval()
    images = torch.randn(2, 3, 32, 32)
    classes = [list(range(5))] * 2
    explanation = gradcam.explain(model, images, "resnet.encoder", target=classes)  # its output is a BaseModelOutput
    expected = gradcam.explain(model, images, "resnet.encoder.stages.1", target=classes)
    torch.testing.assert_close(explanation.maps, expected.maps)
    assert explanation.maps.any()


@pytest.fixture
def one_process_group() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_and_fsdp2() -> None:
    wrapped = nn.parallel.DistributedDataParallel(tiny_model())
    before = traces(wrapped)
    torch.testing.assert_close(gradcam.explain(wrapped, TINY, "3", target=1).maps, EXPECTED)
    assert_same(before, traces(wrapped))
    if not hasattr(torch.distributed, "fsdp") or not hasattr(torch.distributed.fsdp, "fully_shard"):
        return  # FSDP2 is new in PyTorch 2.6
    fully_shard = torch.distributed.fsdp.fully_shard
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded = tiny_model().eval()
    for unit in (sharded[3], sharded[8], sharded):
        fully_shard(unit, mesh=mesh)
    for _ in range(2):
        torch.testing.assert_close(gradcam.explain(sharded, TINY, "3", target=1).maps, EXPECTED)


def test_a_module_that_shares_storage_between_its_parts() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        """Run a residual block whose output a later operation changes in place, as in torchvision's ResNets."""
        y = module.conv(x)
        y += module.skip(x)
        return y.relu_().mean((2, 3))

    model = FunctionModule(forward, conv=nn.Conv2d(3, 3, 3, padding=1), skip=nn.Identity()).double()
    images = TINY.double()
    with TargetLayer(model.skip) as layer:
        gradient = layer.backward(model(images)[:, 1].sum())
    cells = images.shape[2] * images.shape[3]
    expected = torch.zeros_like(images)
    expected[:, 1] = (model.conv(images) + images)[:, 1].detach().gt(0) / cells
    torch.testing.assert_close(gradient, expected)
