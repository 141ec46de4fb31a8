"""Test the page of one image: its numbers equal those of `explain`, and its data follows page.schema.json."""

import base64
import html
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import jsonschema
import numpy as np
import pytest
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image

import gradcam
from gradcam.errors import GradcamError, OutputError
from gradcam.targets import Box, Like, Text
from gradcam.web.page import MapSet, Page, PageTargets
from gradcam.web.preview import FIRST_MAP_SIDE
from tests.helpers import assert_same, tiny_model, traces

Photo = Callable[[str], Path]
ROOT = Path(__file__).parent.parent.parent
SCHEMA = json.loads((ROOT / "docs/reference/page.schema.json").read_text())
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script> & \u202e'\""
CLASSES = 1000


def read(path: Path) -> dict[str, Any]:
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    matches = re.findall(pattern, path.read_text(encoding="utf-8"), re.S)
    assert len(matches) == 1
    data: dict[str, Any] = json.loads(matches[0])
    jsonschema.validate(data, SCHEMA, jsonschema.Draft202012Validator)
    return data


def to_rows(entry: dict[str, Any]) -> NDArray[np.float32]:
    """Decode quantised rows as docs/reference describes."""
    kind = {"int8": "<i1", "int16": "<i2"}[entry["type"]]
    numbers = np.frombuffer(base64.b64decode(entry["data"]), kind)
    scales = np.frombuffer(base64.b64decode(entry["scales"]), "<f4")
    return (numbers.reshape(entry["shape"]) * scales[:, None]).astype(np.float32)


def to_maps(entry: dict[str, Any]) -> NDArray[np.float32]:
    """Return the maps of an entry, (K,h,w)."""
    rows = to_rows(entry["maps"]) if "maps" in entry else to_rows(entry["weights"]) @ to_rows(entry["channels"])
    return rows.reshape(-1, *entry["grid"])


@pytest.fixture(scope="module")
def cat(classifier: gradcam.Classifier, photo: Photo) -> Page:
    return gradcam.page(photo("cat_and_espresso.jpg"), classifier)


class Odd(torch.nn.Module):
    """Network with grouped, dilated and padded convolutions, batch norms without weights, and nonlinear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 12, 9, stride=9)
        self.rest = torch.nn.Sequential(
            torch.nn.LeakyReLU(0.3, inplace=True),  # Changes the layer's output in place.
            torch.nn.Conv2d(12, 24, 3, padding=2, dilation=2, groups=12),
            torch.nn.BatchNorm2d(24, affine=False),
            torch.nn.SiLU(),
            torch.nn.Conv2d(24, 24, 3, padding="same", groups=4),
            torch.nn.BatchNorm2d(24),
            torch.nn.GELU(),
            torch.nn.Conv2d(24, 16, 2, stride=2, bias=False),
            torch.nn.LayerNorm([16, 12, 12]),
            torch.nn.Flatten(2),
            torch.nn.Conv1d(16, 8, 5, stride=3),
            torch.nn.Softplus(),
            torch.nn.Flatten(),
            torch.nn.Linear(376, 7),
        )
        for scale in (self.rest[2], self.rest[5]):
            scale.running_mean.normal_()
            scale.running_var.uniform_(0.5, 2)

    def forward(self, images: torch.Tensor) -> Any:
        return self.rest(self.first(images))


@pytest.mark.parametrize("method", ["gradcam", "hirescam"])
def test_maps_through_odd_layers_are_those_of_backward_passes(photo: Photo, monkeypatch: Any, method: str) -> None:
    monkeypatch.setattr("gradcam.cam.all_classes.MAX_DIRECTIONS", 700)  # The grid has 24 x 24 cells.
    classifier = gradcam.load_classifier(Odd(), layer="first", size=224)
    progress_calls: list[tuple[int, int]] = []
    progress = lambda count, total: progress_calls.append((count, total))  # noqa: E731
    page = gradcam.page(photo("coffee.jpg"), classifier, methods=[method], progress=progress)
    assert page.maps[0].targets is None, "all classes, by the short way, in place of the 7 most probable"
    assert progress_calls == [(i + 1, len(progress_calls)) for i in range(12 if method == "gradcam" else 576)]
    options: Any = {"target": [page.targets.indices], "method": method, "evidence": "signed"}
    explanation = classifier.explain(photo("coffee.jpg"), **options)
    (item,) = page.maps
    maps = item.maps if item.maps is not None else np.tensordot(item.weights, item.channels, 1)
    np.testing.assert_allclose(maps, explanation.maps[0].numpy(), atol=1e-5 * float(explanation.maps.abs().max()))


def test_making_a_page_loads_no_compiler(photo: Photo, tmp_path: Path) -> None:
    """Check that making a page does not import torch.compile's modules, which cost seconds and 190 MB."""
    code = f"""
import sys
from gradcam.cli import main
sys.argv = ["gradcam", "page", {str(photo("coffee.jpg"))!r}, "-o", {str(tmp_path / "coffee.html")!r}, "--layer", "layer4"]
try:
    main()
except SystemExit as error:
    print(error.code)
print({{"torch._dynamo", "torch._inductor", "sympy"}} & set(sys.modules))
"""
    stdout = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert stdout.splitlines()[-2:] == ["0", "set()"]
    assert '"targets":null' in (tmp_path / "coffee.html").read_text()


@pytest.mark.slow
def test_all_classes_at_four_layers(cat: Page, classifier: gradcam.Classifier, photo: Photo, tmp_path: Path) -> None:
    cat.save(tmp_path / "cat.html")
    data = read(tmp_path / "cat.html")
    assert [entry["layer"] for entry in data["maps"]] == ["layer4", "layer3", "layer2", "layer1"]
    assert sorted(data["targets"]["indices"]) == list(range(CLASSES))
    shares = data["targets"]["shares"]
    assert shares == sorted(shares, reverse=True)
    positions = [0, 1, 7, 400, 999]
    indices = [data["targets"]["indices"][item] for item in positions]
    for entry, tolerance in zip(data["maps"], (0.004, 0.004, 0.02, 0.02)):
        assert entry["targets"] is None
        maps = to_maps(entry)
        assert len(maps) == CLASSES
        picture = photo("cat_and_espresso.jpg")
        explanation = classifier.explain(picture, entry["layer"], target=[indices], evidence="signed")
        for position, expected in zip(positions, explanation.maps[0].numpy()):
            assert np.abs(maps[position] - expected).max() <= tolerance * np.abs(expected).max()
    (source,) = re.findall(r'<img id="image"[^>]* src="([^"]*)"', (tmp_path / "cat.html").read_text())
    count = len(source)
    assert (tmp_path / "cat.html").stat().st_size - count < 1_000_000


def test_the_exact_maps_are_those_of_backward_passes(classifier: gradcam.Classifier, photo: Photo) -> None:
    """Compare the maps before quantisation with backward passes, up to rounding."""
    page = gradcam.page(photo("coffee.jpg"), classifier, layers=["layer4"], methods=["gradcam", "hirescam"])
    for item in page.maps:
        indices = [page.targets.indices[at] for at in (0, 10, 500)]
        options: Any = {"method": item.method, "target": [indices], "evidence": "signed"}
        maps = classifier.explain(photo("coffee.jpg"), "layer4", **options).maps
        np.testing.assert_allclose(item.maps[[0, 10, 500]], maps[0].numpy(), atol=1e-5 * float(maps.abs().max()))


def test_the_last_layer_takes_two_passes_more_than_run(photo: Photo) -> None:
    passes: list[int] = []
    model = torchvision.models.resnet18(weights=None).eval()
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    classifier = gradcam.load_classifier(model, layer="layer4")
    passes.clear()
    classifier.explain(photo("coffee.jpg"))
    count = len(passes)
    page = gradcam.page(photo("coffee.jpg"), classifier, layers=["layer4"])
    assert page.maps[0].targets is None
    assert len(passes) <= 2 * count + 2


def test_the_model_is_left_as_it_was(photo: Photo) -> None:
    model = torchvision.models.resnet18(weights=None).train()
    classifier = gradcam.load_classifier(model, layer="layer4")
    before = traces(model)
    gradcam.page(photo("coffee.jpg"), classifier)
    assert_same(before, traces(model))


def test_other_methods_have_maps_of_the_most_probable_and_say_so(classifier: gradcam.Classifier, photo: Photo) -> None:
    options: Any = {"layers": ["layer4"], "methods": ["gradcam", "layercam"], "target": "tripod", "top": 5}
    page = gradcam.page(photo("coffee.jpg"), classifier, **options)
    gradcam_entry, layercam_entry = page.to_data()["maps"]
    assert gradcam_entry["targets"] is None
    assert layercam_entry["evidence"] == "positive"
    at = page.targets.names.index("tripod")
    assert set(layercam_entry["targets"]) == {*range(5), at}
    assert page.first == at
    explanation = classifier.explain(photo("coffee.jpg"), "layer4", method="layercam", target="tripod")
    values = to_maps(layercam_entry)[layercam_entry["targets"].index(at)]
    tolerance = 0.005 * float(explanation.maps.max())
    np.testing.assert_allclose(values, explanation.maps[0, 0].numpy(), atol=tolerance)
    (note,) = page.notes
    assert "layercam at layer4" in note
    assert "6 of 1000" in note
    assert "--top" in note


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "vgg11", "vit_b_16"])
@pytest.mark.slow
def test_models_of_all_kinds(name: str, photo: Photo) -> None:
    model = getattr(torchvision.models, name)(weights=None).eval()
    if hasattr(model, "heads"):
        torch.nn.init.normal_(model.heads.head.weight)  # torchvision initialises these weights to zero.
    classifier = gradcam.load_classifier(model)
    page = gradcam.page(photo("coffee.jpg"), classifier, top=3)
    jsonschema.validate(page.to_data(), SCHEMA)
    for item in page.to_data()["maps"]:
        rows = item["targets"] or [0, 1, 2]
        index = page.targets.indices[rows[1]]
        explanation = classifier.explain(photo("coffee.jpg"), item["layer"], target=index, evidence="signed")
        expected = explanation.maps[0, 0].numpy()
        assert np.abs(to_maps(item)[1] - expected).max() <= 0.03 * np.abs(expected).max()


def test_an_explanation_has_a_page_of_its_own_maps(classifier: Any, photo: Photo, tmp_path: Path) -> None:
    explanation = classifier.explain(photo("coffee.jpg"), target=[["tripod", "espresso"]], evidence="negative")
    page = explanation.page(tmp_path / "page.html")
    data = read(tmp_path / "page.html")
    assert data["targets"]["names"] == ["espresso", "tripod"]  # The more probable class comes first.
    expected = -explanation.maps[0].numpy()[::-1]  # The page restores the sign of evidence against a class.
    assert np.abs(to_maps(data["maps"][0]) - expected).max() <= 0.005 * np.abs(expected).max()
    assert "2 of the model's 1000 classes" in page.notes[0]


def test_a_detector_has_boxes_in_place_of_classes(photo: Photo) -> None:
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0, detections_per_img=3
    ).eval()
    detector = gradcam.load_detector(model, labels=["background", HOSTILE, "cat"])
    data = gradcam.page(photo("coffee.jpg"), detector).to_data()
    jsonschema.validate(data, SCHEMA)
    assert data["targets"]["kind"] == "box"
    count = len(data["targets"]["names"])
    assert count == len(data["targets"]["boxes"]) == len(to_maps(data["maps"][0])) > 1
    assert data["targets"]["words"][1] == ["--box", "1"]
    explanation = detector.explain(photo("coffee.jpg"), target=Box(1), evidence="signed")
    assert explanation.maps.shape[2:] == tuple(data["maps"][0]["grid"])
    expected = explanation.maps[0, 0].numpy()
    assert np.abs(to_maps(data["maps"][0])[1] - expected).max() <= 0.005 * max(np.abs(expected).max(), 1e-9)


def test_a_likeness_says_which_picture_and_not_where(photo: Photo) -> None:
    model = torchvision.models.resnet18(weights=None)
    model.fc = torch.nn.Identity()
    matcher = gradcam.load_matcher(model)
    page = gradcam.page(photo("coffee.jpg"), matcher, target=Like(photo("rocket.jpg")))
    assert page.targets.names == ["like rocket.jpg"]
    assert "reference image" in page.notes[0]
    assert str(photo("rocket.jpg").parent) not in page.to_html()


def test_sentences_are_shown_by_the_methods_of_their_tower(photo: Photo) -> None:
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2}
    model = open_clip.CLIP(16, vision, {"width": 16, "heads": 2, "layers": 1}).eval()
    matcher = gradcam.load_matcher(model, size=32)
    target = Text(torch.randn(2, 16))
    (maps,) = gradcam.page(photo("coffee.jpg"), matcher, target=target).maps
    explanation = matcher.explain(photo("coffee.jpg"), target=target)
    assert (maps.method, maps.evidence) == (explanation.method, explanation.evidence)
    assert torch.equal(torch.from_numpy(np.asarray(maps.maps)), explanation.maps[0])


@pytest.mark.parametrize("fit", ["whole", "tiles"])
def test_another_fit_has_the_most_probable_classes(fit: str, photo: Photo) -> None:
    classifier = gradcam.load_classifier(fit=fit)
    page = gradcam.page(photo("coffee.jpg"), classifier, layers=["layer4"], top=2)
    assert page.region == (0, 0, 400, 600)
    assert list(page.maps[0].targets or ()) == [0, 1]
    explanation = classifier.explain(photo("coffee.jpg"), "layer4", target=page.targets.indices[1], evidence="signed")
    np.testing.assert_allclose(page.maps[0].maps[1], explanation.maps[0, 0].numpy(), rtol=1e-4, atol=1e-6)


def test_a_function_is_named_by_its_number(classifier: gradcam.Classifier, photo: Photo) -> None:
    page = gradcam.page(photo("coffee.jpg"), classifier, target=lambda output: output[:, :2])
    assert page.targets.names == ["score 0", "score 1"]
    assert page.targets.indices == [None, None]


def test_nan_is_an_error(photo: Photo) -> None:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(GradcamError, match="NaN"):
        gradcam.page(photo("coffee.jpg"), gradcam.load_classifier(model, size=24, layer="3"))


def test_hostile_names_are_texts(classifier: gradcam.Classifier, photo: Photo, tmp_path: Path) -> None:
    labels = [HOSTILE] * CLASSES
    renamed = gradcam.load_classifier(classifier.model, labels=labels, layer="layer4")
    page = gradcam.page(photo("coffee.jpg"), renamed, layers=["layer4"], name=f"{HOSTILE}.jpg")
    text = page.to_html()
    body = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert "<img src=x" not in text
    assert "alert(2)</script>" not in body
    assert text.count("<script") == 4


def test_the_policy_heeds_nothing_but_what_is_in_the_page(cat: Page) -> None:
    import hashlib

    text = cat.to_html()
    (policy,) = re.findall('Content-Security-Policy" content="(.*?)"', text)
    policy = html.unescape(policy)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for kind in ("script", "style"):
        for code in re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S):
            digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy


def test_another_suffix_and_a_folder_that_is_not_there(cat: Page, tmp_path: Path) -> None:
    with pytest.raises(GradcamError, match=r"page\.png: .*\.html"):
        cat.save(tmp_path / "page.png")
    with pytest.raises(OutputError, match="does not exist"):
        cat.save(tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize("top", [0, True, 1.5, "many"])
def test_a_number_of_classes_is_a_number(top: Any, classifier: gradcam.Classifier, photo: Photo) -> None:
    with pytest.raises(GradcamError, match="expected a number of classes"):
        gradcam.page(photo("coffee.jpg"), classifier, top=top)


# What is visible without JavaScript, and in chats


def read_first_map(page: Page) -> Any:
    """Return the page's image with the first heatmap, as a browser without JavaScript shows it; None if it is blank."""
    sources = re.findall(r'<img id="first-map" alt="" src="data:image/png;base64,([^"]*)">', page.to_html())
    if not sources:
        return None
    height, width = page.image.shape[:2]
    layer = Image.open(io.BytesIO(base64.b64decode(sources[0])))
    assert max(layer.size) == FIRST_MAP_SIDE
    layer = layer.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(Image.alpha_composite(Image.fromarray(page.image).convert("RGBA"), layer))[..., :3].astype(int)


def test_the_first_heatmap_is_visible_without_javascript(classifier: gradcam.Classifier, photo: Photo) -> None:
    page = gradcam.page(photo("coffee.jpg"), classifier, layers=["layer4"], target="espresso")
    explanation = classifier.explain(photo("coffee.jpg"), "layer4", target="espresso")
    expected, image = explanation.overlay(outline=False, base="color").astype(int), page.image.astype(int)
    composed = read_first_map(page)
    error, effect = np.abs(composed - expected).mean(), np.abs(image - expected).mean()
    assert error < 0.05 * effect
    top, left, height, width = page.region
    assert (height, width) != page.image.shape[:2]
    outside = np.ones(page.image.shape[:2], bool)
    margin = 2 * max(page.image.shape) // FIRST_MAP_SIDE  # The heatmap is enlarged, so its border is not sharp.
    outside[max(0, top - margin) : top + height + margin, max(0, left - margin) : left + width + margin] = False
    assert outside.any()
    np.testing.assert_array_equal(composed[outside], image[outside])


@pytest.mark.parametrize("values", [np.zeros((2, 3), np.float32), -np.ones((2, 3), np.float32)])
def test_a_heatmap_without_positive_values_is_not_drawn(cat: Page, values: Any, tmp_path: Path) -> None:
    targets = PageTargets("class", ["cat"], [281], [0.5])
    page = replace(cat, targets=targets, maps=[MapSet("layer4", "gradcam", "signed", values[None])])
    assert read_first_map(page) is None
    page.save(tmp_path / "cat.html", url="https://example.org/")
    np.testing.assert_array_equal(gradcam.read_image(tmp_path / "cat.png"), page.image)


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (700, 3)])
def test_the_first_heatmap_of_a_narrow_image(cat: Page, size: tuple[int, int]) -> None:
    region = (size[0] - 1, size[1] - 1, 1, 1)
    page = replace(cat, image=np.full((*size, 3), 128, np.uint8), region=region)
    composed = read_first_map(page)
    assert (composed != page.image).any(), "the heatmap of a single pixel is visible"


def test_the_map_of_a_target_and_the_strongest_value() -> None:
    rng = np.random.default_rng(0)
    weights, channels = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (7, 30, 20)))
    maps = np.tensordot(weights, channels, 1)
    for map_set in (
        MapSet("a", "gradcam", "signed", maps, targets=[4, 0, 3, 8, 9]),
        MapSet("a", "gradcam", "signed", weights=weights, channels=channels, targets=[4, 0, 3, 8, 9]),
    ):
        assert map_set.find_map(1) is None
        np.testing.assert_allclose(map_set.find_map(3), maps[2], atol=1e-5)
        assert map_set.find_strongest() == pytest.approx(maps.max(), rel=1e-5)
        assert map_set.to_data(10)["strongest"] == pytest.approx(maps.max(), rel=1e-5)
    np.testing.assert_array_equal(MapSet("a", "gradcam", "signed", maps).find_map(3), maps[3])
    assert MapSet("a", "gradcam", "signed", -np.abs(maps)).find_strongest() == 0
    negative = MapSet("a", "gradcam", "signed", weights=-np.ones((1, 1), np.float32), channels=channels[:1] ** 2)
    assert negative.find_strongest() == 0


def read_tags(path: Path) -> dict[str, str]:
    tags = re.findall(r'<meta property="(og:[a-z]+)" content="([^"]*)">', path.read_text(encoding="utf-8"))
    return {name: html.unescape(content) for name, content in tags}


@pytest.mark.parametrize(
    ("url", "name", "address"),
    [
        ("https://example.org/a/", "cat.html", "https://example.org/a/cat.html"),
        ("http://example.org", "cat.htm", "http://example.org/cat.htm"),
        ("https://example.org/b.html?c=1", "cat.html", "https://example.org/b.html?c=1"),
        ("https://[::1]:8000/", "my cat?.html", "https://[::1]:8000/my%20cat%3F.html"),
    ],
)
def test_a_published_page_names_its_preview(cat: Page, tmp_path: Path, url: str, name: str, address: str) -> None:
    cat.save(tmp_path / name, url=url)
    tags = read_tags(tmp_path / name)
    preview = Path(name).with_suffix(".png").name
    assert (tags["og:url"], tags["og:image"]) == (address, urljoin(address, quote(preview)))
    assert tags["og:title"] == "cat_and_espresso.jpg"
    assert tags["og:description"] == "The network looked mostly here to say Egyptian cat (58 %)."
    read(tmp_path / name)
    cat.save(tmp_path / name, url=url)  # A page may replace its own preview.
    assert {path.name for path in tmp_path.iterdir()} == {name, preview}


def test_the_preview_is_the_overlay_of_the_first_heatmap(
    cat: Page, classifier: gradcam.Classifier, photo: Photo, tmp_path: Path
) -> None:
    cat.save(tmp_path / "cat.html", url="https://example.org/")
    explanation = classifier.explain(photo("cat_and_espresso.jpg"), "layer4")
    difference = gradcam.read_image(tmp_path / "cat.png").astype(int) - explanation.overlay(base="color")
    assert np.abs(difference).mean() < 0.5
    large = replace(cat, image=np.full((1500, 3000, 3), 90, np.uint8), region=(0, 0, 1500, 3000))
    large.save(tmp_path / "large.html", url="https://example.org/")
    assert gradcam.read_image(tmp_path / "large.png").shape == (600, 1200, 3)


def test_a_page_without_an_address_has_no_tags_and_no_preview(cat: Page, tmp_path: Path) -> None:
    cat.save(tmp_path / "cat.html")
    assert "og:" not in re.sub(
        r"<(script|style).*?</(script|style)>", "", (tmp_path / "cat.html").read_text(), flags=re.S
    )
    assert [path.name for path in tmp_path.iterdir()] == ["cat.html"]


def test_hostile_names_stay_inside_their_tags(cat: Page, tmp_path: Path) -> None:
    names = [HOSTILE, *list(cat.targets.names)[1:]]
    page = replace(cat, name=f"{HOSTILE}.jpg", targets=replace(cat.targets, names=names))
    page.save(tmp_path / "cat.html", url="https://example.org/?a='&b=1")
    text = (tmp_path / "cat.html").read_text(encoding="utf-8")
    assert "<img src=x" not in text
    assert text.count("<script") == 4
    assert "alert(1)" in read_tags(tmp_path / "cat.html")["og:description"]
    assert read_tags(tmp_path / "cat.html")["og:url"] == "https://example.org/cat.html"


@pytest.mark.parametrize(
    "url",
    [
        "", "example.org/cat.html", "/cat.html", "//example.org/", "ftp://example.org/", "javascript:alert(1)", "https://",
        "https:///cat.html", "https://[::1/", "https://example.org:99999/", "https://example.org/a b.html",
        'https://example.org/"onload="', "https://example.org/\n", "https://example.org/\u202e", "file:///cat.html",
    ],
)  # fmt: skip
def test_an_address_that_is_not_absolute_is_an_error(cat: Page, url: str, tmp_path: Path) -> None:
    with pytest.raises(GradcamError, match="is not an absolute URL") as caught:
        cat.save(tmp_path / "cat.html", url=url)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_preview_replaces_no_other_image(cat: Page, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"of the user")
    cat.save(tmp_path / "cat.html")  # This page has no preview, so the image is not its preview.
    for _ in range(2):
        with pytest.raises(OutputError, match=r"cat\.png exists already"):
            cat.save(tmp_path / "cat.html", url="https://example.org/")
    assert (tmp_path / "cat.png").read_bytes() == b"of the user"
    assert not read_tags(tmp_path / "cat.html")
