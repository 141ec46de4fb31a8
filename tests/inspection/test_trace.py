"""Check the calls that verbose execution lists, and their numbers, against independent counts and numbers by hand."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models, ops

from gradcam.errors import GradcamError, ImageError, ModelError
from gradcam.hooks.pytorch import VERSION
from gradcam.inspection.tracing import Call, Trace, trace
from tests.helpers import TINY, FunctionModule, assert_same, tiny_model, traces


def trace_on_meta(name: str, side: int = 224) -> Trace:
    with torch.device("meta"):
        model = models.get_model(name, weights=None)
    return trace(model, torch.zeros(1, 3, side, side))


def find_call(trace_: Trace, name: str) -> Call:
    (call,) = (call for call in trace_.calls if call.name == name)
    return call


def test_each_call_of_a_tiny_network_worked_by_hand() -> None:
    report = trace(tiny_model(), TINY, rounds=0)
    pixels, few, float32 = 12 * 16, 6 * 8, 4
    expected = [
        # name, type, depth, input, output, parameters, multiply-adds, bytes
        ("", "Sequential", 0, (3, 3, 12, 16), (3, 5), 377, 3 * (4 * 27 * pixels + 6 * 36 * few + 30), None),
        ("0", "Conv2d", 1, (3, 3, 12, 16), (3, 4, 12, 16), 112, 3 * 4 * 27 * pixels, 3 * 4 * pixels * float32),
        ("1", "BatchNorm2d", 1, (3, 4, 12, 16), (3, 4, 12, 16), 8, 0, 3 * 4 * pixels * float32),
        ("2", "ReLU", 1, (3, 4, 12, 16), (3, 4, 12, 16), 0, 0, 0),  # in place
        ("3", "Conv2d", 1, (3, 4, 12, 16), (3, 6, 6, 8), 222, 3 * 6 * 36 * few, 3 * 6 * few * float32),
        ("4", "ReLU", 1, (3, 6, 6, 8), (3, 6, 6, 8), 0, 0, 0),
        ("5", "AdaptiveAvgPool2d", 1, (3, 6, 6, 8), (3, 6, 1, 1), 0, 0, 3 * 6 * float32),
        ("6", "Flatten", 1, (3, 6, 1, 1), (3, 6), 0, 0, 0),  # a view
        ("7", "Dropout", 1, (3, 6), (3, 6), 0, 0, 0),  # in evaluation mode, dropout returns its input
        ("8", "Linear", 1, (3, 6), (3, 5), 35, 3 * 30, 3 * 5 * float32),
    ]
    total = sum(row[-1] or 0 for row in expected)
    for call, row in zip(report.calls, expected):
        name, kind, depth, input_shape, output_shape, parameters, multiply_adds, size = row
        assert (call.name, call.type, call.depth) == (name, kind, depth)
        assert (call.inputs, call.outputs, call.dtypes) == ((input_shape,), (output_shape,), ("float32",))
        assert (call.parameters, call.multiply_adds) == (parameters, multiply_adds)
        assert call.activation_bytes == (total if size is None else size)
        assert (call.seconds, call.run, call.runs, call.other_names, call.tied) == (None, 1, 1, (), ())
    assert len(report.calls) == len(expected)
    assert (report.parameters, report.activation_bytes, report.device, report.notes) == (377, total, "cpu", ())
    assert repr(report) == (
        f"Trace(Sequential on cpu: 10 calls, 377 parameters, {report.multiply_adds:,} multiply-adds, "
        f"{total:,} bytes of activations)"
    )


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "vgg16", "mobilenet_v2", "vit_b_16", "swin_t", "convnext_tiny", "efficientnet_b0"]
)
def test_totals_are_those_that_torchvision_publishes(name: str) -> None:
    published = models.get_model_weights(name).DEFAULT.meta
    report = trace_on_meta(name)
    assert report.multiply_adds is not None
    assert round(report.multiply_adds / 1e9, 3) == published["_ops"]
    assert report.parameters == published["num_params"]
    assert (report.device, report.seconds) == ("meta", None)


def test_fused_attention_counts_as_much_as_plain() -> None:
    model = models.VisionTransformer(32, 8, 2, 2, 16, 32).eval()
    images = torch.zeros(2, 3, 32, 32)
    attention = find_call(trace(model, images, rounds=0), "encoder.layers.encoder_layer_0.self_attention")
    tokens = 17
    assert attention.multiply_adds == 2 * (tokens * 16 * 48 + 2 * tokens * tokens * 16 + tokens * 16 * 16)
    assert trace(model, images, rounds=0).multiply_adds == trace(model.to("meta"), images).multiply_adds


X = torch.ones(2, 5, 8)
IMAGE = torch.ones(2, 4, 7, 9)
CLIP = torch.ones(1, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), torch.ones(2, 4, 10), 2 * 6 * 8 * 2 * 3),
        (nn.Conv2d(4, 8, 3, groups=4), IMAGE, 2 * 8 * 5 * 7 * 1 * 9),
        (nn.Conv2d(4, 6, (3, 5), stride=2, dilation=(2, 1)), IMAGE, 2 * 6 * 2 * 3 * 4 * 15),
        (nn.Conv3d(4, 6, 3), CLIP, 6 * 3 * 4 * 5 * 4 * 27),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), IMAGE, 2 * 63 * 4 * 3 * 9),
        (nn.Linear(8, 3), X, 10 * 24),
        (nn.Linear(8, 3), X[0, 0], 24),
        (nn.Linear(8, 3, bias=False), X[0, 0], 24),
        (nn.LSTM(8, 3, 2), X, 10 * (8 * 12 + 3 * 12) + 10 * (3 * 12 + 3 * 12)),
        (nn.LSTM(8, 3, bidirectional=True), X, 2 * 10 * (8 * 12 + 3 * 12)),
        (nn.GRU(8, 3), X, 10 * (8 * 9 + 3 * 9)),
        (nn.RNN(8, 3), X, 10 * (8 * 3 + 3 * 3)),
        (nn.LSTMCell(8, 3), X[0], 5 * (8 * 12 + 3 * 12)),
        (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X), 10 * 8 * 24 + 2 * 2 * 25 * 8 + 10 * 64),
        (nn.MultiheadAttention(8, 2, batch_first=True), (X, X + 1, X), 10 * 8 * 24 + 2 * 2 * 25 * 8 + 10 * 64),
        (FunctionModule(lambda self, x: F.linear(x, torch.ones(3, 8))), X, 10 * 24),
        (FunctionModule(lambda self, x: x @ x.transpose(1, 2)), X, 2 * 25 * 8),
        (FunctionModule(lambda self, x: torch.einsum("bij,bkj->bik", x, x)), X, 2 * 25 * 8),
        (FunctionModule(lambda self, x: x[0] @ x[0, 0] + x[0, :, 0].dot(x[0, :, 1])), X, 5 * 8 + 5),
        (FunctionModule(lambda self, x: torch.addmv(x[0, :, 0], x[0], x[0, 0])), X, 5 * 8),
        (FunctionModule(lambda self, x: F.scaled_dot_product_attention(x, x, x)), X[:, None], 2 * 2 * 25 * 8),
        (FunctionModule(lambda self, x: F.normalize(F.interpolate(x.sin(), 9)) * x.mean()), X, 0),
        (ops.DeformConv2d(4, 6, 3, padding=1), (IMAGE, torch.zeros(2, 18, 7, 9)), 2 * 6 * 63 * 4 * 9),
        (FunctionModule(lambda self, x: ops.roi_align(x, [torch.tensor([[0.0, 0, 2, 2]])] * 2, 2)), IMAGE, 0),
        (FunctionModule(lambda self, x: torch.fft.rfft(x)), X, None),
        (nn.Bilinear(8, 8, 3), (X, X), None),
        (FunctionModule(lambda self, x: torch.linalg.inv(x[:, :, :5])), X + 10 * torch.eye(5, 8), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_multiply_adds_worked_by_hand(module: nn.Module, inputs: Any, expected: int | None) -> None:
    assert trace(module, inputs, rounds=0).multiply_adds == expected


def test_operators_inside_inference_mode_are_counted() -> None:
    def run(self: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.linear(self.conv(x).clone().mean((2, 3)))

    report = trace(FunctionModule(run, conv=nn.Conv2d(4, 6, 3), linear=nn.Linear(6, 2)), IMAGE, rounds=0)
    assert report.multiply_adds == 2 * 6 * 35 * 36 + 2 * 12


@pytest.mark.filterwarnings("ignore")  # PyTorch's deprecation warnings
def test_an_unknown_count_makes_all_enclosing_counts_unknown() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    quantised = torch.ao.quantization.quantize_dynamic(inner, {nn.Linear})
    report = trace(nn.Sequential(nn.Linear(8, 8), quantised), X, rounds=0)
    counts = {call.name: call.multiply_adds for call in report.calls}
    assert counts == {"": None, "0": 640, "1": None, "1.0": None, "1.1": 0}
    assert "unknown multiply-adds" in repr(report)


def test_memory_is_that_of_outputs_kept_side_by_side() -> None:
    model = models.resnet18(weights=None, num_classes=7).eval()
    images = torch.zeros(2, 3, 64, 64)
    outputs: list[Tensor] = []  # holding all outputs keeps their addresses distinct
    with (
        nn.modules.module.register_module_forward_hook(lambda _, args, output: outputs.append(output)),
        torch.no_grad(),
    ):
        model(images)
    expected = {tensor.data_ptr(): tensor.numel() * 4 for tensor in outputs}
    assert trace(model, images, rounds=0).activation_bytes == sum(expected.values())


def test_memory_of_views_of_parts_and_of_several_at_once() -> None:
    def run(self: nn.Module, x: Tensor) -> Any:
        first, second = self.halves(x * 2)
        return self.wide(first + second), self.given(x), self.weight(x)

    table = nn.Linear(4, 4)
    model = FunctionModule(
        run,
        halves=FunctionModule(lambda self, x: (x * 1).chunk(2, dim=1)),  # two views of one tensor of 2 x 8
        wide=FunctionModule(lambda self, x: x.sum().expand(1000)),  # 1000 elements that share 4 bytes
        given=nn.Identity(),
        weight=FunctionModule(lambda self, x: table.weight, table=table),
    )
    report = trace(model, torch.ones(2, 8), rounds=0)
    sizes = {call.name: call.activation_bytes for call in report.calls}
    assert sizes == {"": 2 * 8 * 4 + 4, "halves": 2 * 8 * 4, "wide": 4, "given": 0, "weight": 0}
    part = trace(FunctionModule(lambda self, x: (x * 1)[:, :3]), torch.ones(2, 8), rounds=0)
    assert part.activation_bytes == 2 * 3 * 4


def test_a_module_that_runs_three_times_and_one_with_two_names() -> None:
    def run(self: nn.Module, x: Tensor) -> Tensor:
        return self.other(self.act(self.one(self.act(self.alias(self.act(x))))))

    layer = nn.Linear(8, 8)
    model = FunctionModule(run, act=nn.Sequential(nn.ReLU()), one=layer, alias=layer, other=nn.Linear(8, 8))
    model.other.weight = layer.weight
    report = trace(model, X, rounds=0)
    names = ["", "act", "act.0", "one", "act", "act.0", "one", "act", "act.0", "other"]
    assert [call.name for call in report.calls] == names
    assert [call.depth for call in report.calls] == [0, 1, 2, 1, 1, 2, 1, 1, 2, 1]
    assert [(call.run, call.runs) for call in report.calls if call.name == "act.0"] == [(1, 3), (2, 3), (3, 3)]
    runs = [(call.run, call.runs, call.other_names) for call in report.calls if call.name == "one"]
    assert runs == [(1, 2, ("alias",)), (2, 2, ("alias",))]
    tied = {call.name: call.tied for call in report.calls if call.tied}
    assert tied == {"one": ("other.weight",), "other": ("one.weight",)}
    assert report.parameters == 64 + 8 + 8  # the tied weight counts once
    assert find_call(report, "other").parameters == 64 + 8
    assert report.multiply_adds == 3 * 10 * 64


def test_nested_outputs_dtypes_and_keyword_arguments() -> None:
    def run(self: nn.Module, *, image: Tensor, mask: Tensor) -> Any:
        return {"a": image.double(), "b": (mask, [image.half()]), "c": None, "d": 3}

    report = trace(FunctionModule(run), {"image": torch.ones(1, 2), "mask": torch.ones(4, dtype=torch.bool)})
    (call,) = report.calls
    assert call.inputs == ((1, 2), (4,))
    assert call.outputs == ((1, 2), (4,), (1, 2))
    assert call.dtypes == ("float64", "bool", "float16")
    assert call.activation_bytes == 16 + 4  # the mask is an input of the caller, so it does not count


def test_token_ids_and_a_bfloat16_model() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).bfloat16()
    report = trace(model, torch.zeros(2, 3, dtype=torch.long), rounds=1)
    assert [call.dtypes for call in report.calls] == [("bfloat16",)] * 3
    assert [call.activation_bytes for call in report.calls] == [2 * (24 + 12), 2 * 24, 2 * 12]
    assert [call.multiply_adds for call in report.calls] == [48, 0, 48]


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about nested tensors
def test_nested_tensors_are_ragged_and_unknown() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=torch.jagged)
    (call,) = trace(nn.Linear(8, 3), jagged, rounds=0).calls
    assert (call.inputs, call.outputs) == (((2, -1, 8),), ((2, -1, 3),))
    assert (call.multiply_adds, call.activation_bytes) == (5 * 24, 5 * 3 * 4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    model = FunctionModule(lambda self, x, mask: self.encoder(x, src_key_padding_mask=mask), encoder=encoder)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    report = trace(model, (X, padded), rounds=0)
    if VERSION < (2, 5):
        return  # older versions take no fast path when there are hooks, so there is no nested tensor
    assert report.multiply_adds is None
    assert report.calls[0].outputs == ((2, 5, 8),)
    assert find_call(report, "encoder.layers.1.linear2").outputs == ((2, -1, 8),)
    assert find_call(report, "encoder.layers.1.linear2").multiply_adds == 8 * 16 * 8  # eight rows are not padding


class Sleeps(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


def test_times_hold_those_of_parts() -> None:
    model = nn.Sequential(nn.Sequential(Sleeps(0.02), Sleeps(0.03)), Sleeps(0.01))
    report = trace(model, X, rounds=1)  # with several rounds, the medians would not add up
    seconds = {call.name: call.seconds or 0 for call in report.calls}
    least = {"": 0.06, "0": 0.05, "0.0": 0.02, "0.1": 0.03, "1": 0.01}
    for name, expected in least.items():
        assert expected <= seconds[name] < expected + 1  # a busy machine takes longer
    assert seconds[""] >= seconds["0"] + seconds["1"]
    assert seconds["0"] >= seconds["0.0"] + seconds["0.1"]
    assert report.seconds == seconds[""]
    assert f"{1000 * seconds['']:.1f} ms" in repr(report)


def test_times_are_medians_of_the_rounds_behind_one_pass_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    model = FunctionModule(lambda self, x: passes.append(1) or x)
    now = iter([0.0, 7.0, 10.0, 12.0, 20.0, 23.0, 30.0, 39.0, 40.0, 44.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    assert trace(model, X, rounds=5).seconds == 4.0  # the median of 7, 2, 3, 9 and 4
    assert len(passes) == 6
    passes.clear()
    assert trace(model, X, rounds=0).seconds is None
    assert len(passes) == 1


def test_a_model_that_draws_at_random_does_the_same_in_each_pass() -> None:
    parts = {"a": nn.ReLU(), "b": nn.Tanh(), "c": nn.Sigmoid()}
    model = FunctionModule(lambda self, x: self.get_submodule("abc"[int(torch.randint(3, ()))])(x), **parts)
    for seed in range(6):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        report = trace(model, X, rounds=6)
        assert report.notes == ()
        assert all(call.seconds is not None for call in report.calls)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_does_something_else_in_each_pass_has_no_times() -> None:
    choose = random.Random(0)
    model = FunctionModule(lambda self, x: self.get_submodule(choose.choice("ab"))(x), a=nn.ReLU(), b=nn.Tanh())
    report = trace(model, X, rounds=10)
    assert [call.seconds for call in report.calls] == [None, None]
    assert report.notes == ("The model's calls differ between passes, so no times are listed.",)


def test_each_pass_gets_the_callers_values_and_leaves_them() -> None:
    sums = []
    model = FunctionModule(lambda self, x: sums.append(float(x.sum())) or x.add_(1))
    tensor = torch.zeros(2)
    trace(model, tensor)
    assert sums == [0.0] * 4
    assert tensor.tolist() == [0, 0]


def test_a_part_that_raises_what_its_caller_catches() -> None:
    def run(self: nn.Module, x: Tensor) -> Tensor:
        try:
            return self.wrong(x)
        except RuntimeError:
            return self.right(x)

    report = trace(FunctionModule(run, wrong=nn.Sequential(nn.Linear(3, 3)), right=nn.Linear(8, 2)), X)
    assert [(call.name, call.depth) for call in report.calls] == [("", 0), ("wrong", 1), ("wrong.0", 2), ("right", 1)]
    assert [call.outputs for call in report.calls] == [((2, 5, 2),), (), (), ((2, 5, 2),)]
    assert [call.seconds is None for call in report.calls] == [False, True, True, False]
    assert [call.multiply_adds for call in report.calls] == [160, None, None, 160]


def test_a_module_called_by_its_forward_is_not_seen_but_counted() -> None:
    report = trace(FunctionModule(lambda self, x: self.part.forward(x), part=nn.Linear(8, 3)), X)
    assert [call.name for call in report.calls] == [""]
    assert report.multiply_adds == 240


@pytest.mark.filterwarnings("ignore")  # PyTorch's deprecation warnings
def test_compiled_models_and_torchscript_inside() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    inner = torch.compile(nn.Sequential(nn.Linear(3, 3)), backend="eager")
    model = torch.compile(nn.Sequential(nn.Linear(8, 3), inner, script), backend="eager")
    report = trace(model, X)
    assert [call.name for call in report.calls] == ["", "0", "1", "1.0"]
    assert report.multiply_adds == 240 + 90 + 90
    assert report.notes == ("Hooks cannot follow TorchScript, so the calls inside '2' are not listed.",)
    assert [call.name for call in trace(nn.DataParallel(nn.Linear(8, 3)), X).calls] == [""]
    itself = nn.Sequential(nn.Linear(8, 3))
    itself.compile(backend="eager")
    assert [call.name for call in trace(itself, X).calls] == ["", "0"]


def test_nothing_is_left_on_the_model() -> None:
    model = tiny_model().train()
    model[1].eval()
    before = traces(model)
    images = TINY.clone().requires_grad_()
    trace(model, images)
    assert_same(before, traces(model))
    assert images.grad is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("passes", [0, 1])
def test_nothing_is_left_after_an_error_in_any_pass(error: type[BaseException], passes: int) -> None:
    ran = []

    def run(self: nn.Module, x: Tensor) -> Tensor:
        ran.append(1)
        if len(ran) > passes:
            raise error("on purpose")
        return x

    model = nn.Sequential(tiny_model().train(), nn.Sequential(FunctionModule(run)))
    before = traces(model)
    with pytest.raises(error, match="on purpose"):
        trace(model, TINY)
    assert len(ran) == passes + 1
    assert_same(before, traces(model))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_several_threads_trace_one_model_and_others_are_not_seen() -> None:
    model = tiny_model().train()
    before = traces(model)
    expected = [call.name for call in trace(model, TINY).calls]
    results: list[Trace] = []
    stop = threading.Event()

    def disturb() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model[0](TINY)

    def work() -> None:
        results.extend(trace(model, TINY) for _ in range(5))

    disturber = threading.Thread(target=disturb)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in (disturber, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    disturber.join()
    assert len(results) == 15
    assert all([call.name for call in item.calls] == expected for item in results)
    assert len({(item.multiply_adds, item.activation_bytes) for item in results}) == 1
    assert all(item.seconds is not None for item in results)
    del before["random"]
    assert_same(before, {key: value for key, value in traces(model).items() if key != "random"})


def test_an_error_says_in_which_layer_it_arose() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(5, 2, 1)))
    with pytest.raises(RuntimeError, match="expected input") as caught:
        trace(model, torch.zeros(1, 3, 8, 8))
    notes = getattr(caught.value, "__notes__", None)
    if hasattr(caught.value, "add_note"):
        assert notes == ["In layer '1.0', Conv2d, with input (1, 4, 8, 8)."]


@pytest.mark.filterwarnings("ignore")  # PyTorch's deprecation warnings
@pytest.mark.parametrize(
    ("model", "images", "rounds", "error", "message"),
    [
        (lambda x: x, X, 3, ModelError, "The model is function, expected a torch.nn.Module"),
        (nn.Linear(8, 3), 3, 3, ImageError, "The images are int, expected a tensor, or a tuple or dict with tensors"),
        (nn.Linear(8, 3), (), 3, ImageError, "The images are tuple"),
        (nn.Linear(8, 3), {1: X}, 3, ImageError, "expected the names of the model's arguments"),
        (nn.Linear(8, 3), X, -1, GradcamError, "rounds is -1, expected the number of timed passes"),
        (nn.Linear(8, 3), X, 1.5, GradcamError, "rounds is 1.5"),
        (nn.Linear(8, 3), X, True, GradcamError, "rounds is True"),
        (lambda: torch.jit.script(nn.Linear(8, 3)), X, 3, ModelError, "TorchScript"),
    ],
)
def test_one_clear_error(model: Any, images: Any, rounds: Any, error: type[Exception], message: str) -> None:
    candidate = model() if "TorchScript" in message else model
    with pytest.raises(error, match=message):
        trace(candidate, images, rounds=rounds)


@pytest.mark.cuda
def test_times_on_cuda_are_those_of_the_device() -> None:
    heavy = FunctionModule(lambda self, x: [x := (x @ x).softmax(-1) for _ in range(20)][-1])
    model = nn.Sequential(nn.Identity(), heavy).cuda()
    tensor = torch.randn(4096, 4096, device="cuda")
    report = trace(model, tensor)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        model(tensor)
    torch.cuda.synchronize()
    alone = time.perf_counter() - start
    idle, busy = find_call(report, "0").seconds, find_call(report, "1").seconds
    assert idle is not None
    assert busy is not None
    assert 0.5 * alone < busy < 2 * alone
    assert idle < 0.1 * busy
    assert report.device == "cuda:0"
    assert report.multiply_adds == 20 * 4096**3
    recurrent = nn.LSTM(8, 3, 2).cuda()
    assert trace(recurrent, X.cuda()).multiply_adds == 10 * (8 * 12 + 3 * 12) + 10 * (3 * 12 + 3 * 12)
