"""Check outputs that a model reads other than as a return value: an attribute, a hook of its own, or an alias."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam import TargetLayer
from gradcam.errors import LayerError, ModelError
from gradcam.hooks import containers
from tests import oracles
from tests.helpers import FunctionModule

IMAGES = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CALLS = 3


class Stage(nn.Module):
    """A stage that halves the size and doubles the channels. The options say how others read its output."""

    def __init__(self, channels: int, *, attribute: bool = False, view: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU(inplace=True)
        self.attribute, self.view, self.in_place = attribute, view, in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x.mT if self.view else x
        x = x if self.in_place else self.act(x)
        if self.attribute:
            self.kept = x
        return x


class UNet(nn.Module):
    """A U-Net whose skip connections use hooks, attributes, or hooks that the first pass registers."""

    def __init__(self, skips: str = "hook", **options: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(Stage(3 * 2**i, attribute=skips == "attribute", **options) for i in range(2))
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(24, 6, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)])
        self.head, self.skips = nn.Conv2d(6, 4, 1), skips
        self.kept: dict[int, Tensor] = {}
        self.is_registered = False
        if skips == "hook":
            self.register()

    def register(self) -> None:
        self.is_registered = True
        for i, stage in enumerate(self.down):
            stage.register_forward_hook(lambda module, args, output, i=i: self.kept.update({i: output}))

    def skip(self, i: int) -> Tensor:
        return self.down[i].kept if self.skips == "attribute" else self.kept[i]

    def forward(self, x: Tensor) -> Tensor:
        if self.skips == "late hook" and not self.is_registered:
            self.register()
        for stage in self.down:
            x = stage(x)
            x = F.relu_(x) if stage.in_place else x
        x = self.middle(x)
        for i, up in zip((1, 0), self.up):
            x = F.interpolate(up(torch.cat([x, self.skip(i)], 1)), scale_factor=2).tanh()
        return self.head(x)


def hooked_features() -> nn.Module:
    """Return a head on two levels of timm's feature extraction by hooks."""
    options = {"features_only": True, "out_indices": (2, 3), "feature_cls": "hook"}
    encoder = timm.create_model("resnet10t", pretrained=False, **options)
    head = nn.Linear(sum(encoder.feature_info.channels()), 5)
    return FunctionModule(
        lambda module, x: module.head(torch.cat([level.mean((2, 3)) for level in module.encoder(x)], 1)),
        encoder=encoder, head=head,
    )  # fmt: skip


def dpt() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    grids = {"image_size": 32, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3]}
    neck = {"neck_hidden_sizes": [4, 4, 8, 8], "fusion_hidden_size": 8}
    config = transformers.DPTConfig(**sizes, **grids, **neck, is_hybrid=False)
    return transformers.DPTForDepthEstimation(config)


def beit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    grids = {"image_size": 32, "patch_size": 8, "out_indices": [1, 2, 3, 4], "num_labels": 5, "auxiliary_channels": 8}
    config = transformers.BeitConfig(**sizes, **grids, use_relative_position_bias=True)
    return transformers.BeitForSemanticSegmentation(config)


def upernet() -> nn.Module:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = transformers.ConvNextConfig(hidden_sizes=[4, 4, 8, 8], depths=[1, 1, 1, 1], out_features=stages)
    sizes = {"hidden_size": 8, "num_labels": 5, "auxiliary_in_channels": 8, "auxiliary_channels": 4}
    config = transformers.UperNetConfig(backbone_config=backbone, pool_scales=[1, 2], **sizes)
    return transformers.UperNetForSemanticSegmentation(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the minimum number of modules to compare
    "skips by hooks": (UNet, 9),
    "skips by attributes": (lambda: UNet("attribute"), 9),
    "skips by late hooks": (lambda: UNet("late hook"), 9),
    "views by hooks": (lambda: UNet(view=True), 9),
    "views by attributes": (lambda: UNet("attribute", view=True), 9),
    "changed in place behind": (lambda: UNet(in_place=True), 7),
    "timm's hooks": (hooked_features, 30),
    "DPT": (dpt, 100),
    "BEiT": (beit, 80),
    "UperNet": (upernet, 80),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name][0]().double().eval()


def score_of(output: Any) -> Tensor:
    """Return a score that depends on every element of the output with a different weight."""
    output = getattr(output, "logits", getattr(output, "predicted_depth", output))
    return (output * torch.linspace(0, 1, output[0].numel(), dtype=output.dtype).reshape(output.shape[1:])).sum()


def gradients_by_plain_autograd(name: str) -> dict[str, Tensor]:
    """Return the gradient at each module that runs once.

    An output that is the module's input is cloned, so that only its later uses count.
    """
    model = build(name).requires_grad_(True)
    results: dict[str, list[Tensor]] = {}
    for layer, module in model.named_modules():

        def look(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any, layer: str = layer) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            is_in_place = getattr(module, "inplace", False)
            if not is_in_place and any(output is tensors for tensors in (*args, *kwargs.values())):
                output = output + 0
            output.retain_grad()
            results.setdefault(layer, []).append(output)
            return output

        if layer:
            module.register_forward_hook(look, with_kwargs=True, prepend=True)
        if getattr(module, "inplace", False):
            module.inplace = False
    score_of(model(IMAGES)).backward()
    once = {layer: tensors[0].grad for layer, tensors in results.items() if len(tensors) == 1}
    return {layer: gradient for layer, gradient in once.items() if gradient is not None and gradient.any()}


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "changed in place behind"])
def test_every_module_has_the_gradient_of_plain_autograd_in_every_call(name: str) -> None:
    expected = gradients_by_plain_autograd(name)
    assert len(expected) >= NETWORKS[name][1]
    model = build(name)
    plain = score_of(build(name)(IMAGES))
    for layer, gradient in expected.items():
        for call in range(CALLS):
            with TargetLayer(model.get_submodule(layer)) as recorded:
                score = score_of(model(IMAGES))
                recorded.backward(score)
            case = f"{layer}, call {call}"
            torch.testing.assert_close(score, plain, rtol=0, atol=1e-12, msg=case)
            torch.testing.assert_close(recorded.gradients, gradient, rtol=1e-6, atol=1e-12, msg=case)


@contextmanager
def shifted_output(module: nn.Module, step: Tensor) -> Iterator[None]:
    """Add `step` in place to the module's output, before any other hook runs."""

    def move(module: nn.Module, args: Any, output: Tensor) -> None:
        output.add_(step)

    hook = module.register_forward_hook(move, prepend=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("DPT", "BEiT", "UperNet")])
def test_the_gradient_is_the_slope_along_any_direction(name: str) -> None:
    """Compare with finite differences, for every way in which outputs are read, and after in-place changes."""
    model = build(name)
    for layer in ("down.0", "down.1", "down.0.conv", "middle") if name != "timm's hooks" else ("encoder.body.layer2",):
        module = model.get_submodule(layer)
        with TargetLayer(module) as recorded:
            gradient = recorded.backward(score_of(model(IMAGES)))
        step = 1e-6 * torch.randn(gradient.shape, dtype=gradient.dtype)
        with torch.no_grad():
            with shifted_output(module, step):
                above = score_of(model(IMAGES))
            with shifted_output(module, -step):
                below = score_of(model(IMAGES))
        torch.testing.assert_close((gradient * step).sum(), (above - below) / 2, rtol=1e-5, atol=1e-13, msg=layer)


def test_several_layers_in_one_pass_see_the_same_as_each_alone() -> None:
    for name in ("skips by hooks", "views by attributes", "changed in place behind"):
        model = build(name)
        layers = ["down.0", "down.0.conv", "down.1", "middle"]
        together = gradcam.compare(model, IMAGES, layers=layers, methods=["hirescam"], target=class_score)
        for layer in layers:
            alone = gradcam.explain(model, IMAGES, layer, method="hirescam", target=class_score)
            torch.testing.assert_close(together[layer, "hirescam"].maps, alone.maps, rtol=1e-5, atol=1e-7)
            assert alone.maps.any()


def class_score(output: Tensor) -> Tensor:
    return output[:, 1].square().mean((1, 2))


@pytest.mark.parametrize("name", ["skips by hooks", "skips by attributes", "views by hooks", "changed in place behind"])
@pytest.mark.parametrize("images", [1, 2])
def test_ablation_takes_a_channel_away_wherever_it_is_read(name: str, images: int) -> None:
    model, pictures = build(name), IMAGES[:images]
    module = model.down[0]
    with torch.no_grad():
        layer_outputs: list[Tensor] = []
        hook = module.register_forward_hook(lambda *inputs: layer_outputs.append(inputs[2].clone()), prepend=True)
        plain = class_score(model(pictures))
        hook.remove()
        expected = torch.zeros(images, *layer_outputs[0].shape[2:], dtype=torch.float64)
        for channel in range(layer_outputs[0].shape[1]):

            def take_away(module: nn.Module, args: Any, output: Tensor, channel: int = channel) -> None:
                output[:, channel] = 0

            hook = module.register_forward_hook(take_away, prepend=True)
            lost = (plain - class_score(model(pictures))) / plain.abs()
            hook.remove()
            expected += lost[:, None, None] * layer_outputs[0][:, channel]
    explanation = gradcam.explain(
        model, pictures, "down.0", method="ablationcam", target=class_score, evidence="signed"
    )
    assert expected.abs().max() > 0
    torch.testing.assert_close(explanation.maps[:, 0].double(), expected, rtol=1e-4, atol=1e-6)
    if name == "skips by attributes":
        assert module.kept.shape[0] == images


class Flattens(nn.Module):
    """A module that returns a view and stores the tensor itself, or another view of it."""

    def __init__(self, *, keeps_view: bool) -> None:
        super().__init__()
        self.conv, self.keeps_view = nn.Conv2d(3, 4, 4, stride=4), keeps_view

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.kept = x.flatten(1) if self.keeps_view else x
        return x.flatten(2).mT


def reads_both(*, keeps_view: bool, reads: bool = True, changes: bool = False) -> nn.Module:
    def forward(module: Any, x: Tensor) -> Tensor:
        tokens = module.patches(x)
        if changes:
            module.patches.kept.mul_(2)
        more = module.patches.kept.flatten(1).mean(1, keepdim=True) if reads else 0
        return module.head(tokens.mean(1)) + more

    return FunctionModule(forward, patches=Flattens(keeps_view=keeps_view), head=nn.Linear(4, 5)).double().eval()


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("keeps_view", [False, True])
def test_memory_that_is_read_or_changed_as_another_view_is_an_error(keeps_view: bool, changes: bool) -> None:
    model = reads_both(keeps_view=keeps_view, reads=not changes, changes=changes)
    for _ in range(CALLS):
        with pytest.raises((LayerError, ModelError), match="another view of its memory|reads or overwrites"):
            gradcam.explain(model, IMAGES, "patches", target=1)
        assert not model.patches.kept.requires_grad
    assert gradcam.explain(model, IMAGES, "patches.conv", target=1).maps.any()


@pytest.mark.parametrize("keeps_view", [False, True])
def test_stored_outputs_that_nothing_reads_do_not_matter(keeps_view: bool) -> None:
    model = reads_both(keeps_view=keeps_view, reads=False)
    with TargetLayer(model.patches) as recorded:
        gradient = recorded.backward(model(IMAGES)[:, 1].sum())
    torch.testing.assert_close(gradient, (model.head.weight[1] / 64).expand_as(gradient).detach())
    assert not model.patches.kept.requires_grad


class KeepsOutput(nn.Conv2d):
    """A convolution that also stores its output, and returns the transposed output, or the output itself."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__(3, 4, 4, stride=4)
        self.is_transposed = is_transposed

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = x.mT if self.is_transposed else x.flatten(1)
        self.reference = weakref.ref(self.kept)
        return self.kept if self.is_transposed else x


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_layer_that_keeps_a_view_of_what_it_gives(*, is_transposed: bool) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        return module.head(module.conv(x).mean((2, 3)) + module.conv.kept.flatten(1).amax(1, keepdim=True))

    model = FunctionModule(forward, conv=KeepsOutput(is_transposed=is_transposed), head=nn.Linear(4, 5)).double()
    error, message = (
        (LayerError, "another view of its memory") if is_transposed else (ModelError, "reads or overwrites")
    )
    for _ in range(CALLS):
        with pytest.raises(error, match=message):
            gradcam.explain(model.eval(), IMAGES, "conv", target=1)
        assert not (is_transposed and model.conv.kept.requires_grad)


def test_attributes_of_an_output_that_is_a_view_stay_on_it() -> None:
    class Tagged(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x).flatten(2).mT
            x.grid = (8, 8)
            return x

    def forward(module: Any, x: Tensor) -> Tensor:
        x = module.patches(x)
        return module.head(x.unflatten(1, x.grid).mean((1, 2)))

    model = FunctionModule(forward, patches=Tagged(3, 4, 4, stride=4), head=nn.Linear(4, 5)).double().eval()
    assert gradcam.explain(model, IMAGES, "patches", target=1, reshape="tokens").maps.shape == (2, 1, 8, 8)
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    model.patches.register_forward_hook(keep)
    with gradcam.inspection.record(model, ["patches"], keep="device") as recorder:
        model(IMAGES)[:, 1].sum().backward()
    torch.testing.assert_close(outputs[0].grad, recorder.gradients["patches"])


@pytest.mark.parametrize("name", ["skips by hooks", "views by attributes", "views by hooks"])
def test_recording_and_editing_in_training_cover_all_uses(name: str) -> None:
    expected = gradients_by_plain_autograd(name)
    model = build(name)
    layers = ["down.0", "down.1"]
    with gradcam.inspection.record(model, layers, keep="device") as recorder:
        score_of(model(IMAGES)).backward()
    for layer in layers:
        torch.testing.assert_close(recorder.gradients[layer], expected[layer], rtol=1e-6, atol=1e-12)
    with gradcam.inspection.edit_gradients(model, torch.zeros_like, layers="down.1"):
        model.zero_grad()
        score_of(model(IMAGES)).backward()
    assert not model.down[1].conv.weight.grad.any()  # no gradient bypasses the edit
    assert model.down[0].conv.weight.grad.any()


def test_the_default_layer_of_a_model_with_hooks_of_its_own_is_right_again_and_again() -> None:
    model, reference = build("skips by late hooks"), oracles.gradcam_map
    first = gradcam.explain(model, IMAGES[:1], "down.1", method="gradcam", target=class_score)
    again = [gradcam.explain(model, IMAGES[:1], "down.1", method="gradcam", target=class_score) for _ in range(2)]
    with TargetLayer(model.down[1]) as layer:
        layer.backward(class_score(model(IMAGES[:1])).sum())
    expected = reference(layer.activations[0].detach(), layer.gradients[0])
    for results in (first, *again):
        torch.testing.assert_close(results.maps[0, 0].double(), expected, rtol=1e-5, atol=1e-9)


class ReadsAnEarlierBlock(nn.Module):
    """A ViT with a head that also reads an earlier block, through a hook that stores its output."""

    def __init__(self, block: int) -> None:
        super().__init__()
        options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
        self.vit = timm.models.vision_transformer.VisionTransformer(**options)
        self.vit.blocks[block].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x) + self.kept[:, :1, :5].mean(1)


def test_legrad_notices_a_hook_on_an_earlier_block() -> None:
    model = ReadsAnEarlierBlock(0).double().eval()
    for _ in range(2):
        with pytest.raises(ModelError, match="depends on earlier blocks through paths around"):
            gradcam.explain(model, IMAGES, method="legrad", target=1)


def test_legrad_of_a_last_block_that_a_hook_reads() -> None:
    """Compare with the same network whose head gets the block's output directly, without a hook."""

    def forward(x: Tensor) -> Tensor:
        vit = model.vit
        tokens = vit.blocks(vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x)))))
        return vit.forward_head(vit.norm(tokens)) + tokens[:, :1, :5].mean(1)

    model = ReadsAnEarlierBlock(2).double().eval()
    explanation = gradcam.explain(model, IMAGES, method="legrad", target=1)
    model.forward = forward
    expected = gradcam.explain(model, IMAGES, method="legrad", target=1)
    assert explanation.maps.any()
    torch.testing.assert_close(explanation.maps, expected.maps)


def keeps_output(keep: Callable[[Tensor], Any]) -> nn.Module:
    """Return a model with a branch after the tail; it also stores `keep(output of the tail)` as an attribute."""

    def forward(module: Any, x: Tensor) -> Tensor:
        y = module.tail(x).relu()
        module.kept = keep(y)
        return module.head(y.mean((2, 3)) + module.branch(y).mean((2, 3)))

    tail, branch = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, padding=1)
    return FunctionModule(forward, tail=tail, branch=branch, head=nn.Linear(8, 5)).double().eval()


@pytest.mark.parametrize(
    "keep",
    [lambda y: y, lambda y: y.flatten(2), lambda y: (y, {"a": [y]}), lambda y: {"a": (y.mT, 1)}],
    ids=["itself", "a view", "a tuple", "a dict"],
)
def test_outputs_that_a_model_stores_are_detached(keep: Callable[[Tensor], Any]) -> None:
    model = keeps_output(keep)
    rows = gradcam.list_layers(model, IMAGES)
    assert [row.name for row in rows if row.is_suggested] == ["tail"]
    assert not any(tensor.requires_grad for tensor in containers.list_tensors(model.kept))
    assert gradcam.explain(model, IMAGES, target=1).layer == "tail"


def test_outputs_held_by_hooks_or_attributes_are_detached_too() -> None:
    model, captured = build("skips by attributes"), {}
    model.down[1].register_forward_hook(lambda module, args, output: captured.update(output=output))
    gradcam.explain(model, IMAGES[:1], "down.1", target=class_score)
    assert not model.down[1].kept.requires_grad
    with torch.no_grad():
        plain = model.down[1].kept
        model(IMAGES[:1])
    captured["output"].numpy()
    torch.testing.assert_close(captured["output"], plain)
    copy.deepcopy(model)


class InABuffer(nn.Module):
    """A module that writes its output into a preallocated buffer or tensor, and returns that."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        register = self.register_buffer if is_buffer else partial(setattr, self)
        register("given", torch.zeros(2, 4, 15, 15))

    def forward(self, x: Tensor) -> Tensor:
        return self.given.copy_(self.conv(x))


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("method", ["gradcam", "ablationcam", "fasterscorecam"])
def test_what_belongs_to_the_model_stays_what_it_is(method: str, *, is_buffer: bool) -> None:
    model = nn.Sequential(
        InABuffer(is_buffer=is_buffer), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    model, images = model.eval(), IMAGES.float()
    buffer, address = model[0].given, model[0].given.data_ptr()
    expected = gradcam.explain(nn.Sequential(model[0].conv, *model[1:]), images, "0", method=method, target=1)
    for layer in ("0", None) if is_buffer else ("0",):
        explanation = gradcam.explain(model, images, layer, method=method, target=1)
        if layer == "0":
            torch.testing.assert_close(explanation.maps, expected.maps)
        assert model[0].given is buffer
        assert buffer.shape == (2, 4, 15, 15)
        assert not buffer.requires_grad
        assert not is_buffer or buffer.data_ptr() == address
    copy.deepcopy(model)


class Feats(list):
    def last(self) -> Tensor:
        return self[-1]


class Pair(tuple):
    def __new__(cls, first: Any, second: Any) -> Any:
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize("kind", ["list", "tuple"])
def test_containers_of_the_output_keep_their_identity(kind: str) -> None:
    class Holds(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return Feats([x]) if kind == "list" else Pair(x, 1)

    def forward(module: Any, x: Tensor) -> Tensor:
        y = module.body(x)
        return module.head((y.last() if kind == "list" else y[0]).relu().mean((2, 3)))

    model = FunctionModule(forward, body=Holds(3, 4, 3), head=nn.Linear(4, 5))
    assert gradcam.explain(model.double().eval(), IMAGES, "body", target=1, evidence="signed").maps.any()


def test_inference_mode_inside_the_model_is_said_to_be_in_the_way() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = module.body(x)
        return module.head(y.mean((2, 3)))

    model = FunctionModule(forward, body=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 5)).double().eval()
    for layer in ("body", None):
        with pytest.raises(ModelError, match="inference"):
            gradcam.explain(model, IMAGES, layer, target=1)
