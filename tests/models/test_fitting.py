"""Test checkpoints loaded into models: renamed parameters, class counts, reported differences, no partial loading."""

from __future__ import annotations

import copy
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradcam.errors import ModelError
from gradcam.models.checkpoints.fit import count_classes, find_head, load_weights
from gradcam.models.checkpoints.read import Checkpoint, read_checkpoint

Rename = Callable[[str], str]


class Small(nn.Module):
    """A model that maps images (N,3,8,8) to logits."""

    def __init__(self, classes: int = 5, width: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        self.fc = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).mean((2, 3)))


class Wrapped(nn.Module):
    """A model that contains another model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.densenet121 = net

    def forward(self, images: Tensor) -> Tensor:
        return self.densenet121(images)


def trained(classes: int = 5, width: int = 4, seed: int = 3) -> Small:
    """Return a model whose weights and statistics all differ from those of a new model."""
    torch.manual_seed(seed)
    model = Small(classes, width).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    return model


def checkpoint_of(state: nn.Module | Mapping[str, Tensor], rename: Rename = lambda name: name) -> Checkpoint:
    state = state.state_dict() if isinstance(state, nn.Module) else state
    return Checkpoint(Path("run.pth"), {rename(name): tensor.clone() for name, tensor in state.items()})


def answer(model: nn.Module, size: int = 8) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1)))


def refuse(model: nn.Module, checkpoint: Checkpoint) -> str:
    """Return the message that refuses the checkpoint, and check that the model is unchanged."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError) as caught:
        load_weights(model, checkpoint)
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor, before[name]), name
    assert str(caught.value).startswith("run.pth: ")
    return str(caught.value).removeprefix("run.pth: ")


def loaded(weights: Checkpoint | nn.Module | Mapping[str, Tensor], model: nn.Module | None = None) -> list[str]:
    """Load the weights into a new model, check that it predicts as the trained one, and return the notes."""
    model = model or Small()
    notes = list(load_weights(model, weights if isinstance(weights, Checkpoint) else checkpoint_of(weights)))
    assert torch.equal(answer(model), answer(trained()))
    return notes


def prefixed(prefix: str, added: int = 0) -> dict[str, Tensor]:
    return {prefix + name: tensor + added for name, tensor in trained().state_dict().items()}


@pytest.mark.parametrize("save", ["pth", "safetensors"])
def test_a_loaded_model_answers_as_the_one_that_was_saved(tmp_path: Path, save: str) -> None:
    path, state = tmp_path / f"run.{save}", trained().state_dict()
    torch.save({"state_dict": state, "epoch": 1}, path) if save == "pth" else safetensors.torch.save_file(state, path)
    assert loaded(read_checkpoint(path)) == []


PREFIXES = (
    "module.", "model.", "net.", "backbone.", "_forward_module.", "module.model.", "model.module.", "ema_model.",
)  # fmt: skip


@pytest.mark.parametrize("prefix", [*PREFIXES, "densenet121.", "module.some.thing."])
def test_a_common_prefix_is_removed_and_a_note_says_so(prefix: str) -> None:
    checkpoint = checkpoint_of(prefixed(prefix))
    assert count_classes(checkpoint, Small(1000)) == 5
    assert loaded(checkpoint) == [f"Prefix '{prefix}' removed from 9 tensor names."]


@pytest.mark.parametrize(("outer", "inner"), [("_orig_mod.", ""), ("", "_orig_mod."), ("_orig_mod.", "_orig_mod.")])
def test_the_prefixes_of_compiled_models_are_removed(outer: str, inner: str) -> None:
    notes = loaded(checkpoint_of(trained(), lambda name: outer + name.replace("features.", f"features.{inner}")))
    assert [re.sub(r"\d", "N", note) for note in notes] == ["'_orig_mod.' removed from N tensor names."]


@pytest.mark.parametrize("wrap", ["module._orig_mod.", "_orig_mod.module.", "model._orig_mod."])
def test_marks_and_prefixes_together(wrap: str) -> None:
    bare = wrap.replace("_orig_mod.", "")
    assert loaded(prefixed(wrap)) == [
        "'_orig_mod.' removed from 9 tensor names.",
        f"Prefix '{bare}' removed from 9 tensor names.",
    ]


def test_the_wrappers_of_torch_itself() -> None:
    for wrapped in (nn.DataParallel(trained()), torch.compile(trained()), torch.compile(nn.DataParallel(trained()))):
        assert loaded(wrapped)


IGNORED = "tensor(s) that the model does not need were ignored, such as"


def test_an_averaged_model_of_torch() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(trained())
    assert loaded(averaged) == ["Prefix 'module.' removed from 9 tensor names.", f"1 {IGNORED} 'n_averaged'."]


def test_tensors_without_the_prefix_are_ignored_and_a_note_says_so() -> None:
    state = prefixed("model.") | {"criterion.weight": torch.ones(5), "teacher.fc.weight": torch.ones(5, 4)}
    assert loaded(state) == ["Prefix 'model.' removed from 9 tensor names.", f"2 {IGNORED} 'criterion.weight'."]


def test_names_outside_the_prefix_may_be_the_models() -> None:
    checkpoint = checkpoint_of(trained(), lambda name: name if name.startswith("fc") else f"backbone.{name}")
    assert loaded(checkpoint) == ["Prefix 'backbone.' removed from 7 tensor names."]


def test_tensors_without_the_prefix_are_reported_if_tensors_are_missing() -> None:
    state = prefixed("model.")
    state["head.weight"] = state.pop("model.fc.weight")
    message = refuse(Small(), checkpoint_of(state))
    assert "missing: 1 ('fc.weight')" in message
    assert "unexpected: 1 ('head.weight')" in message


@pytest.mark.parametrize(("ignored", "used"), [("model.", "ema_model.module."), ("a_teacher.", "model.")])
def test_averaged_models_and_usual_prefixes_are_preferred(ignored: str, used: str) -> None:
    assert loaded(prefixed(ignored, 1) | prefixed(used))[0] == f"Prefix '{used}' removed from 9 tensor names."


def test_two_models_that_fit_equally_well_are_refused() -> None:
    message = refuse(Small(), checkpoint_of(prefixed("student.") | prefixed("teacher.")))
    assert message == "contains several models that fit equally well, 'student.', 'teacher.': save only one of them."


def test_a_prefix_of_the_model_is_added_to_names() -> None:
    assert count_classes(checkpoint_of(trained()), Wrapped(Small(1000))) == 5
    assert loaded(trained(), Wrapped(Small())) == ["Prefix 'densenet121.' added to 9 tensor names."]


def test_a_prefix_that_the_model_has_itself_stays() -> None:
    assert loaded(nn.Sequential(OrderedDict(module=trained())), nn.Sequential(OrderedDict(module=Small()))) == []


def test_names_that_are_the_models_already_come_before_those_under_a_prefix() -> None:
    state = prefixed("") | prefixed("model.", 1)
    assert "unexpected: 8 ('model.features.0.weight', " in refuse(Small(), checkpoint_of(state))


def test_a_larger_model_is_not_taken_for_a_smaller_one() -> None:
    state = trained().state_dict() | {"features.3.weight": torch.ones(4, 4, 3, 3)}
    assert "unexpected: 1 ('features.3.weight')" in refuse(Small(), checkpoint_of(state))


def test_a_few_similar_names_are_no_prefix() -> None:
    """In another architecture, `layer.fc.weight` ends like the model's `fc.weight`; messages list its full names."""
    state = {f"layer{i}.conv.weight": torch.ones(1) for i in range(9)} | {"layer9.fc.weight": torch.ones(5, 4)}
    message = refuse(Small(), checkpoint_of(state))
    assert "unexpected: 10 ('layer0.conv.weight', 'layer1.conv.weight', 'layer2.conv.weight', ...)" in message
    assert "missing: 8 (" in message
    assert message.endswith("The weights belong to a different architecture than this model.")


class Weightless(TorchFunctionMode):
    """Creates new tensors on the meta device, so that even large models are cheap to build."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), "device": "meta"} if func is torch.empty else kwargs or {}
        return func(*args, **kwargs)


def build(name: str, classes: int = 1000) -> nn.Module:
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with Weightless(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.meshgrid")
        return torchvision.models.get_model(name, num_classes=classes, **options)


HEADS = {
    "alexnet": "classifier.6", "vgg16": "classifier.6", "densenet121": "classifier", "mobilenet_v2": "classifier.1",
    "mobilenet_v3_small": "classifier.3", "squeezenet1_0": "classifier.1", "vit_b_16": "heads.head", "swin_t": "head",
    "convnext_tiny": "classifier.2", "inception_v3": "fc", "googlenet": "fc", "efficientnet_b0": "classifier.1",
    "regnet_y_400mf": "fc", "maxvit_t": "classifier.5", "mnasnet0_5": "classifier.1", "shufflenet_v2_x0_5": "fc",
    "resnet18": "fc", "resnext50_32x4d": "fc", "wide_resnet50_2": "fc",
}  # fmt: skip


@pytest.mark.parametrize(("name", "head"), HEADS.items())
def test_the_last_layer_of_each_family(name: str, head: str) -> None:
    assert find_head(build(name)) == head


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_the_classes_of_a_checkpoint_are_counted(name: str) -> None:
    few = Checkpoint(Path("run.pth"), {f"module.{key}": tensor for key, tensor in build(name, 14).state_dict().items()})
    assert count_classes(few, build(name)) == 14


def test_timms_heads_are_counted() -> None:
    import timm

    for name in ("vit_tiny_patch16_224", "convnext_atto", "resnetv2_50", "efficientnet_b0"):
        with Weightless():
            few, many = (timm.create_model(name, num_classes=classes) for classes in (14, 1000))
        assert count_classes(Checkpoint(Path("run.pth"), dict(few.state_dict())), many) == 14


def test_classes_are_not_guessed() -> None:
    spatial = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(3, 5, 3))
    normed = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for model in (spatial, normed, nn.Sequential(nn.ReLU())):
        assert find_head(model) is None
        assert count_classes(checkpoint_of(model), model) is None
    # The checkpoint has as many features as classes.
    assert count_classes(checkpoint_of(trained(width=6)), Small()) is None
    assert count_classes(checkpoint_of({"a": torch.ones(3)}), Small()) is None
    assert count_classes(checkpoint_of(trained(14)), Small()) == 14


def old_densenet_name(name: str) -> str:
    """Return torchvision's name for a DenseNet parameter before PyTorch 0.4, as in the published CheXNet."""
    name = re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", name)
    return "module.densenet121." + name.replace("classifier.", "classifier.0.")


def test_a_chexnet_loads_into_a_densenet_of_torchvision() -> None:
    torch.manual_seed(0)
    source = torchvision.models.DenseNet(4, (2, 1), 8, num_classes=14)
    state = {key: value for key, value in source.state_dict().items() if not key.endswith("num_batches_tracked")}
    checkpoint = checkpoint_of(state, old_densenet_name)
    assert "module.densenet121.features.denseblock1.denselayer2.norm.1.weight" in checkpoint.tensors
    assert count_classes(checkpoint, torchvision.models.DenseNet(4, (2, 1), 8)) == 14
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = torchvision.models.DenseNet(4, (2, 1), 8, num_classes=14)
        assert list(load_weights(model, checkpoint)) == [
            "30 tensors renamed: the file uses the names of an older torchvision version.",
            f"Prefix 'module.densenet121.' removed from {len(state)} tensor names.",
            "The tensors of 'classifier.0' were loaded into the last layer, 'classifier'. The file does not say whether "
            "training applied a sigmoid after this layer.",
        ]
        assert torch.equal(answer(model, 64), answer(source, 64))


def test_a_vision_transformer_of_an_older_torchvision_loads() -> None:
    def build() -> nn.Module:
        return torchvision.models.VisionTransformer(16, 8, 2, 2, 8, 12, num_classes=3)

    torch.manual_seed(0)
    source, model = build(), build()
    nn.init.normal_(source.heads.head.weight)  # type: ignore[union-attr, arg-type]
    old_names = {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."}
    checkpoint = checkpoint_of(source, lambda name: re.sub(r"mlp\.[03]\.", lambda part: old_names[part[0]], name))
    (note,) = load_weights(model, checkpoint)
    assert note == "8 tensors renamed: the file uses the names of an older torchvision version."
    assert torch.equal(answer(model, 16), answer(source, 16))


def test_names_in_the_old_spelling_stay_if_the_model_has_them() -> None:
    def make_model() -> nn.Module:
        return nn.ModuleDict({"block": nn.ModuleDict({"mlp": nn.ModuleDict({"linear_1": nn.Linear(3, 4)})})})

    source, model = make_model(), make_model()
    load_weights(model, checkpoint_of(source, lambda name: f"module.{name}"))
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("inner", ["fc.1", "fc.head.0"])
def test_a_head_within_a_sequential_is_followed(inner: str) -> None:
    checkpoint = checkpoint_of(trained(), lambda name: name.replace("fc.", f"{inner}."))
    assert count_classes(checkpoint, Small(1000)) == 5
    assert len(loaded(checkpoint)) == 1


@pytest.mark.parametrize("inner", ["classifier", "fc.0"])
def test_an_uncertain_head_is_not_used(inner: str) -> None:
    """A linear layer with an unrelated name, or with layers after it, may not be the head."""
    state = {name.replace("fc.", f"{inner}."): tensor for name, tensor in trained().state_dict().items()}
    if inner == "fc.0":
        state |= {"fc.2.weight": torch.ones(5, 5), "fc.2.bias": torch.ones(5)}
    assert count_classes(checkpoint_of(state), Small(1000)) is None
    message = refuse(Small(), checkpoint_of(state))
    assert "missing: 2 ('fc.weight', 'fc.bias')" in message
    assert "The last layer, 'fc', is missing or different in the file. Write a function" in message


def test_a_layer_beside_the_head_is_not_taken_for_it() -> None:
    """In a Sequential, the layers before the last one are no head."""
    source, model = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)) for _ in range(2))
    head = {"classifier": model}
    renamed = checkpoint_of(nn.ModuleDict({"classifier": source}), lambda name: name.replace(".2.", ".1."))
    message = refuse(nn.ModuleDict(head), renamed)
    assert "missing: 2 ('classifier.2.weight', 'classifier.2.bias')" in message


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (("fc.weight", "fc.bias"), "The last layer, 'fc', is missing or different in the file."),
        (("fc.bias", "features.0.bias"), "The file belongs to another size or version of this architecture."),
    ],
)
def test_the_cause_depends_on_which_tensors_are_missing(names: tuple[str, ...], cause: str) -> None:
    state = {name: tensor for name, tensor in trained().state_dict().items() if name not in names}
    assert cause in refuse(Small(), checkpoint_of(state))


def test_a_different_number_of_classes_is_reported() -> None:
    message = refuse(Small(1000), checkpoint_of(trained(14)))
    assert message.splitlines() == [
        "does not fit Small: 7 of the model's 9 tensors match.",
        "missing: 0, unexpected: 0, wrong shape: 2 ('fc.weight' has (14, 4), expected (1000, 4); 'fc.bias' has (14,), "
        "expected (1000,)). The numbers of classes differ: 14 in the file, 1000 in the model.",
    ]


def test_a_different_size_of_the_architecture_is_reported() -> None:
    state = trained().state_dict()
    state["features.0.weight"] = torch.ones(6, 3, 3, 3)
    state["features.5.weight"] = torch.ones(6)
    message = refuse(Small(), checkpoint_of(state))
    assert "unexpected: 1 ('features.5.weight')" in message
    assert "wrong shape: 1 ('features.0.weight' has (6, 3, 3, 3), expected (4, 3, 3, 3))" in message
    assert "The file belongs to another size or version of this architecture. Write a function" in message


@pytest.mark.parametrize("name", ["features.1.running_mean", "features.1.weight", "fc.bias"])
def test_tensors_that_affect_the_output_are_required(name: str) -> None:
    state = trained().state_dict()
    del state[name]
    assert f"missing: 1 ('{name}')" in refuse(Small(), checkpoint_of(state))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counters_of_batch_norms_may_be_missing(device: str) -> None:
    state = trained().state_dict()
    del state["features.1.num_batches_tracked"]
    with torch.device(device):
        model = Small()
    assert loaded(state, model) == []
    assert model.features[1].num_batches_tracked.item() == 0


def test_tensors_for_training_only_are_ignored() -> None:
    state = trained().state_dict() | {
        "AuxLogits.fc.weight": torch.ones(5, 4), "aux1.fc2.weight": torch.ones(2), "fc.total_ops": torch.ones(1),
        "total_params": torch.ones(1), "features.attn_mask": torch.ones(3),
    }  # fmt: skip
    assert loaded(state) == [f"5 {IGNORED} 'AuxLogits.fc.weight'."]


def test_auxiliary_heads_that_the_model_has_count() -> None:
    class Auxiliary(Small):
        def __init__(self) -> None:
            super().__init__()
            self.aux1 = nn.Linear(2, 2)

    source = Auxiliary()
    assert "missing: 2 ('aux1.weight', 'aux1.bias')" in refuse(Auxiliary(), checkpoint_of(trained()))
    state = source.state_dict() | {"aux1.fc.weight": torch.ones(2)}
    assert "unexpected: 1 ('aux1.fc.weight')" in refuse(Auxiliary(), checkpoint_of(state))


class Windowed(Small):
    """A model with a computed buffer, as window attention has."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("relative_position_index", torch.arange(size))


@pytest.mark.parametrize("size", [None, 7])
def test_worked_out_buffers_may_be_missing_or_of_another_size(size: int | None) -> None:
    state = trained().state_dict()
    if size:
        state["relative_position_index"] = torch.zeros(size, dtype=torch.int64)
    model = Windowed()
    assert loaded(state, model) == [f"1 {IGNORED} 'relative_position_index'."]
    assert model.relative_position_index.tolist() == [0, 1, 2]


def test_a_worked_out_buffer_without_values_must_be_there() -> None:
    with torch.device("meta"):
        model = Windowed()
    assert "missing: 1 ('relative_position_index')" in refuse(model, checkpoint_of(trained()))
    source = Windowed()
    load_weights(model, checkpoint_of(source))
    assert model.relative_position_index.tolist() == [0, 1, 2]


def test_a_model_with_parameters_alone_on_the_meta_device_keeps_its_own_buffers() -> None:
    with Weightless():
        model = Windowed()
    assert model.fc.weight.is_meta
    assert loaded(trained(), model)
    assert model.relative_position_index.tolist() == [0, 1, 2]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_loaded_in_the_models_precision(device: str, dtype: torch.dtype) -> None:
    source = trained().to(dtype)
    with torch.device(device):
        model = Small()
    load_weights(model, checkpoint_of(source))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}
    assert torch.equal(answer(model), answer(source.float()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("save", ["pth", "safetensors"])
def test_a_loaded_model_shares_nothing_with_the_file_or_the_checkpoint(tmp_path: Path, device: str, save: str) -> None:
    path, state = tmp_path / f"run.{save}", trained().state_dict()
    torch.save(state, path) if save == "pth" else safetensors.torch.save_file(state, path)
    with torch.device(device):
        model = Small()
    checkpoint = read_checkpoint(path)
    load_weights(model, checkpoint)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert len(addresses) == len(state)
    assert addresses.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in checkpoint.tensors.values())
    with path.open("r+b") as file:  # A training that continues overwrites the file.
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(answer(model), answer(trained()))


def test_parameters_with_storage_keep_their_device() -> None:
    """Parameters stay on their device, and shared parameters stay shared."""
    model = Small()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load_weights(model, checkpoint_of(trained()))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_parameters_stay_frozen(frozen: bool, device: str) -> None:
    with torch.device(device):
        model = Small().requires_grad_(not frozen)
    load_weights(model, checkpoint_of(trained()))
    assert {parameter.requires_grad for parameter in model.parameters()} == {not frozen}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["features.0.weight", "features.1.running_var"])
def test_weights_that_are_no_numbers_are_refused(name: str, value: float) -> None:
    state = trained().state_dict()
    state[name].view(-1)[-1] = value
    assert refuse(Small(), checkpoint_of(state)).startswith(f"1 tensors contain NaN or infinity, the first is '{name}'")


def test_large_weights_whose_sum_overflows_are_numbers() -> None:
    state = trained().state_dict()
    state["fc.weight"] = torch.full((5, 4), 3e38)
    load_weights(Small(), checkpoint_of(state))


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_weights_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    state = trained().state_dict()
    state["fc.weight"] = state["fc.weight"].to(dtype)
    assert refuse(Small(), checkpoint_of(state)) == f"'fc.weight' is {dtype}, expected torch.float32."


def test_the_extra_state_of_modules_is_unchanged() -> None:
    class Stateful(Small):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError

    source, model = Stateful(), Stateful()
    source.load_state_dict(trained().state_dict(), strict=False)
    state = {name: value for name, value in source.state_dict().items() if isinstance(value, Tensor)}
    assert loaded(state, model) == []


def test_a_lazy_model_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(5))
    for function in (load_weights, lambda model, checkpoint: count_classes(checkpoint, model)):
        with pytest.raises(ModelError, match=r"^The model's '0.weight' is uninitialised"):
            function(model, checkpoint_of(trained()))


def test_a_scaled_mnasnet_of_today_loads_without_its_version() -> None:
    torch.manual_seed(0)
    source, model = (torchvision.models.mnasnet0_5(num_classes=3) for _ in range(2))
    load_weights(model, checkpoint_of(source))
    assert torch.equal(answer(model, 32), answer(source, 32))


def test_inception_and_googlenet_load_without_their_auxiliary_heads() -> None:
    for name, prefix in (("inception_v3", "AuxLogits."), ("googlenet", "aux1.")):
        full = build(name, 3).state_dict()
        state = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in full.items()}
        assert any(key.startswith(prefix) for key in state)
        with Weightless():
            model = torchvision.models.get_model(name, num_classes=3, init_weights=False, aux_logits=False)
        notes = load_weights(model, Checkpoint(Path("run.pth"), state))
        assert len(notes) == 1
        assert not any(tensor.is_meta for tensor in model.state_dict().values())
