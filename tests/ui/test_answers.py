"""Test the server of the local page: its numbers equal those of `explain`, and its errors are sentences."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError
from gradcam.images.edit import edit_image
from gradcam.ui.explainer import Explainer
from gradcam.ui.guard import TOKEN_HEADER
from gradcam.ui.jobs import JobQueue, JobStopped, stop_between_modules
from gradcam.ui.model_cache import MAX_CACHED_MODELS, LoadedModel, ModelCache, ModelRequest
from gradcam.ui.server import Server, find_hosts
from gradcam.ui.strip import ImageStrip, list_images
from tests.cli.test_tasks import MODELS as TASK_MODELS
from tests.cli.test_tasks import write_colours, write_noise
from tests.targets.test_text import word_tokenizer
from tests.ui.serving import HOSTILE, make_bomb, serve
from tests.ui.serving import MODELS as WRONG_MODELS

Client = Callable[..., "Talk"]


class Talk:
    """Client of a server that runs in the test process."""

    def __init__(self, load: Callable[[ModelRequest], LoadedModel], files: Any = ()) -> None:
        self.server = Server(Explainer(ModelCache(load), ImageStrip(files)), "usual")
        self.web = TestClient(self.server.to_application({"testserver"}), headers={TOKEN_HEADER: self.server.token})

    def drop(self, data: bytes, name: str = "a.jpg") -> Any:
        return self.web.post("/drop", content=data, headers={"x-name": name}).json()

    def ask(self, picture: Any = 0, **options: Any) -> Any:
        return self.web.post("/ask", content=json.dumps({"tab": "one", "picture": picture, **options})).json()


def loader(*models: gradcam.Classifier) -> Callable[[ModelRequest], LoadedModel]:
    models_by_name = dict(zip((None, "second", "third"), models))
    return lambda request: LoadedModel(models_by_name[request.model], ("--model", "it"), "gradcam.load_classifier()")


@pytest.fixture
def talk(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> Talk:
    return Talk(loader(classifier), [("coffee.jpg", photo("coffee.jpg"))])


def to_maps(entry: Any) -> Any:
    encoded = entry["maps"]
    quantised = np.frombuffer(base64.b64decode(encoded["data"]), f"<{np.dtype(encoded['type']).str[1:]}").reshape(
        encoded["shape"]
    )
    rows = quantised.astype(np.float32) * np.frombuffer(base64.b64decode(encoded["scales"]), "<f4")[:, None]
    return rows.reshape(-1, *entry["grid"])


def test_an_answer_has_explain_maps(talk: Talk, classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    answer = talk.ask(first=505)
    page = answer["page"]
    at = page["first"]
    assert page["targets"]["indices"][at] == 505
    explanation = classifier.explain(photo("coffee.jpg"), target=505, evidence="signed")
    np.testing.assert_allclose(
        to_maps(page["maps"][0])[at], explanation.maps[0, 0].numpy(), atol=0.005 * float(explanation.maps.abs().max())
    )
    assert answer["layers"] == ["layer4", "layer3", "layer2", "layer1", "stem"]
    assert (answer["task"], answer["other"]) == ("classification", None)
    assert {"gradcam", "layercam"} <= set(answer["methods"])


def test_a_layer_and_a_method_are_chosen(talk: Talk) -> None:
    (heatmap,) = talk.ask(layer="layer3", method="layercam")["page"]["maps"]
    assert (heatmap["layer"], heatmap["method"], heatmap["evidence"]) == ("layer3", "layercam", "positive")


@pytest.mark.parametrize("method", [None, "layercam"])
def test_under_the_brush_scores_and_map_are_those_of_the_edited_picture(
    talk: Talk, classifier: gradcam.Classifier, photo: Callable[[str], Path], method: str | None
) -> None:
    edits = ["blur:60:300,200+340,220", "erase:0,0,200,200"]
    answer = talk.ask(edits=edits, quick=True, first=967, method=method)["quick"]
    edited = edit_image(gradcam.read_image(photo("coffee.jpg")), edits)
    evidence: Any = "signed" if method is None else "positive"
    explanation = classifier.explain(
        edited, classifier.layer_for(method or "gradcam"), method=method or "gradcam", target=967, evidence=evidence
    )
    np.testing.assert_allclose(answer["shares"], explanation.probabilities()[0].numpy(), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(
        to_maps(answer["map"])[0], explanation.maps[0, 0].numpy(), atol=0.005 * float(explanation.maps.abs().max())
    )
    full = talk.ask(edits=edits)["page"]["targets"]
    assert max(full["shares"]) == pytest.approx(max(answer["shares"]), rel=1e-3)


def test_two_models_explain_the_same_class(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    reversed_labels = list(reversed(classifier.labels))  # The same network with its labels in reverse order.
    reordered = gradcam.load_classifier(classifier.model, layer="layer4", labels=reversed_labels, size=224)
    talk = Talk(loader(classifier, reordered), [("coffee.jpg", photo("coffee.jpg"))])
    answer = talk.ask(other={"model": "second"}, first=967)
    first, second = answer["page"]["targets"], answer["other"]["targets"]
    assert first["names"][answer["page"]["first"]] == second["names"][answer["other"]["first"]] == "espresso"
    assert second["indices"][answer["other"]["first"]] == 999 - 967


def test_two_classes_with_one_name_are_distinct(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    labels = ["crane" if index in (134, 517) else str(index) for index in range(1000)]
    twice = gradcam.load_classifier(classifier.model, layer="layer4", labels=labels, size=224)
    talk = Talk(loader(twice, twice), [("coffee.jpg", photo("coffee.jpg"))])
    for index in (134, 517):
        answer = talk.ask(other={"model": "second"}, first=index)
        assert answer["other"]["targets"]["indices"][answer["other"]["first"]] == index


def space() -> dict[str, Any]:
    results: dict[str, Any] = {}
    exec(TASK_MODELS, results)
    return results


def test_boxes(tmp_path: Path) -> None:
    detector = gradcam.load_model(space()["detector"](), labels=["background", "person", "dog"])
    talk = Talk(loader(detector), [("street.png", write_noise(tmp_path / "street.png", 0))])
    answer = talk.ask()
    page_targets = answer["page"]["targets"]
    assert answer["task"] == "detection"
    assert page_targets["kind"] == "box"
    assert len(page_targets["boxes"]) > 1
    assert page_targets["words"][1] == ["--box", "1"]
    explanation = detector.explain(
        tmp_path / "street.png",
        target=gradcam.targets.Box(1),
        method=answer["page"]["maps"][0]["method"],
        evidence="signed",
    )
    heatmap = to_maps(answer["page"]["maps"][0])[1]
    np.testing.assert_allclose(heatmap, explanation.maps[0, 0].numpy(), atol=0.01 * float(explanation.maps.abs().max()))
    # Edits of detections get a full answer.
    assert talk.ask(edits=["erase:0,0,96,64"], quick=True)["page"]["targets"]["kind"] == "box"


def test_masks(tmp_path: Path) -> None:
    segmenter = gradcam.load_model(
        space()["segmenter"](), labels=["red", "green", "blue"], task="segmentation", size=32
    )
    talk = Talk(loader(segmenter), [("flag.png", write_colours(tmp_path / "flag.png", (220, 20, 20), (20, 220, 20)))])
    page_targets = talk.ask()["page"]["targets"]
    assert page_targets["kind"] == "mask"
    assert set(page_targets["names"]) & {"red", "green"}


def test_sentences(tmp_path: Path) -> None:
    matcher = gradcam.load_model(space()["towers"](), task="matching", size=(32, 64))
    talk = Talk(loader(matcher), [("flag.png", write_colours(tmp_path / "flag.png", (220, 20, 20), (20, 220, 20)))])
    assert "sentences" in talk.ask()["error"]
    page = talk.ask(texts=["a red flag", " ", "green"])["page"]
    assert page["targets"]["kind"] == "text"
    assert page["targets"]["names"] == ["a red flag", "green"]
    red, green = (item.clip(0).sum(0) for item in to_maps(page["maps"][0]))
    half = red.shape[0] // 2
    assert red[:half].sum() > red[half:].sum()
    assert green[half:].sum() > green[:half].sum()


@pytest.mark.slow
def test_words_of_a_caption(tmp_path: Path) -> None:
    captioner = gradcam.load_model(space()["captioner"](), size=(32, 32), mean=(0, 0, 0), std=(1, 1, 1))
    talk = Talk(loader(captioner), [("street.png", write_noise(tmp_path / "street.png", 0))])
    answer = talk.ask()
    assert answer["task"] == "captioning"
    page_targets = answer["page"]["targets"]
    assert page_targets["kind"] == "word"
    assert page_targets["words"][0] == ["--word", "0"]


READER = """
import numpy as np

def read(path):
    assert str(path).endswith(".npy")
    return np.load(path), np.full((64, 64, 3), (0, 0, 200), np.uint8)
"""


def test_the_model_that_was_named_keeps_its_options_and_its_reader_reads_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "rd.py").write_text(READER)
    (tmp_path / "mine.py").write_text(WRONG_MODELS)
    np.save(tmp_path / "scan.npy", np.zeros((64, 64, 3), np.uint8))
    options = ("--size", "128", "--reshape", "channels-first", "--allow-code")
    with serve(*options, "--reader", "rd.py:read", "scan.npy", folder=tmp_path) as server:
        dropped = server.drop("b.npy", (tmp_path / "scan.npy").read_bytes()).json()
        assert dropped == {"id": 1, "name": "b.npy"}
        assert "c.txt" in server.drop("c.txt", b"A text.").json()["error"]
        for number in (0, 1):
            with Image.open(io.BytesIO(server.ask(f"view/{number}").content)) as view:
                assert view.getpixel((5, 5))[2] > 150
        default_model = re.search(r'"model": ?"([^"]+)"', server.ask("").text)
        assert default_model
        for fields in ({}, {"model": default_model[1]}):
            page = server.explain(1, **fields)["page"]
            assert page["model"]["words"] == ["--size", "128", "--reader", "rd.py:read"]
            assert page["model"]["reshape"] == "channels-first"
            assert "path" not in page["image"]
        assert server.explain(0)["page"]["image"]["path"] == "scan.npy"
        assert "scan.npy" in server.explain(0, model="mine.py:small")["error"], "which has no such reader"


# ---- Errors


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b"This is a text.", "notes.txt", "notes.txt"),
        (b"", "empty.jpg", "empty.jpg"),
        (make_bomb(), "huge.png", "60000 x 60000"),
    ],
)
def test_what_is_no_picture_is_told_and_not_kept(talk: Talk, data: bytes, name: str, message: str) -> None:
    error = talk.drop(data, name)["error"]
    assert message in error
    assert "\n" not in error
    assert len(talk.web.get("/strip").json()) == 1


def test_a_name_is_a_name(talk: Talk, photo: Callable[[str], Path]) -> None:
    image = talk.drop(photo("coffee.jpg").read_bytes(), "..%2F..%2F%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E.jpg")
    assert image["name"] == f"{HOSTILE}.jpg"
    assert talk.ask(image["id"])["page"]["image"]["name"] == image["name"]
    assert talk.web.get(f"/view/{image['id']}").content[:3] == b"\xff\xd8\xff"


def test_nan_and_a_model_that_fails_are_told(photo: Callable[[str], Path]) -> None:
    models: dict[str, Any] = {}
    exec(WRONG_MODELS, models)
    wrong = [gradcam.load_classifier(models[item](), layer="layer", size=32) for item in ("nan", "small")]
    wrong[1].model.head.register_forward_hook(lambda *_: 1 / 0)
    talk = Talk(loader(*wrong), [("coffee.jpg", photo("coffee.jpg"))])
    for quick in (False, True):
        assert "NaN" in talk.ask(quick=quick, first=0)["error"]
    assert "ZeroDivisionError" in talk.ask(model="second")["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"picture": 7}, {"picture": "../etc"}, {"picture": None}, {"edits": ["smear"]}, {"edits": 3}, {"method": "magic"},
        {"layer": "nowhere"}, {"first": "x"}, {"first": 10**6}, {"other": 3}, {"texts": 5}, {"picture": [0]},
        {"picture": True}, {"first": float("inf")}, {"first": float("nan")}, {"first": 10**30},
        {"weights": "a\0b"}, {"other": {"model": "\0a"}},
    ],
)  # fmt: skip
def test_strange_questions_are_told(talk: Talk, fields: dict[str, Any]) -> None:
    answer = talk.web.post("/ask", content=json.dumps({"tab": "one", "picture": 0} | fields))
    assert answer.status_code == 422
    assert "\n" not in answer.json()["error"]
    assert "Error" not in answer.json()["error"]


def test_what_is_no_question_is_told(talk: Talk) -> None:
    for content in ("", "[]", "{}", "[" * 100_000):
        assert "reload the page" in talk.web.post("/ask", content=content).json()["error"]


def test_too_large_uploads_are_refused(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcam.ui.guard.MAX_UPLOAD_BYTES", 1000)
    assert talk.web.post("/drop", content=bytes(1001)).status_code == 413
    assert talk.web.post("/drop", content=(bytes(100) for _ in range(11))).status_code == 413
    assert talk.web.post("/drop", content=b"", headers={"content-length": str(2 * 10**9)}).status_code == 413


# ---- Methods, the example, and the page as a file


def make_models(tmp_path: Path) -> dict[str, tuple[gradcam.Classifier, list[str]]]:
    """Make small models of four kinds, each with the sentences that it needs."""
    from torchvision.models import VisionTransformer

    transformers = pytest.importorskip("transformers")

    def randomise(model: Any) -> Any:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)  # Heads are zero at first, and so are their gradients.
        return model

    convolution = torch.nn.Conv2d(3, 4, 4, 4)
    layers = (convolution, torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 5))
    sides = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**sides, "vocab_size": 99},
        vision_config={**sides, "image_size": 32, "patch_size": 8},
        projection_dim=8,
    )
    randomise(transformers.CLIPModel(config)).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    size = {"height": 32, "width": 32}
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(tmp_path)
    return {
        "cnn": (gradcam.load_classifier(randomise(torch.nn.Sequential(*layers)), size=32), []),
        "vit": (gradcam.load_classifier(randomise(VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)), size=32), []),
        "detector": (gradcam.load_model(space()["detector"](), labels=["background", "person", "dog"]), []),
        "clip": (gradcam.load_model(f"hf:{tmp_path}"), ["a red flag", "green"]),
    }


ATTENTION = {name for name, method in METHODS.items() if method.place == "attention"}
UNSUPPORTED = {
    "cnn": {*ATTENTION, "drise", "lens"},
    "vit": {"drise", "lens"},
    "detector": {*ATTENTION, "finercam", "lens"},
    "clip": {"finercam", "drise", "lens"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gradcam.GradcamWarning")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_each_listed_method_answers_and_no_other(kind: str, tmp_path: Path) -> None:
    model, texts = make_models(tmp_path / "clip")[kind]
    talk = Talk(loader(model), [("noise.png", write_noise(tmp_path / "noise.png", 0))])
    methods = talk.ask(texts=texts)["methods"]
    assert methods == [name for name in METHODS if name not in UNSUPPORTED[kind]]
    # D-RISE finds a box again, so it is listed for detectors only, although it can explain other scores.
    errors = {name: "error" in talk.ask(texts=texts, method=name) for name in METHODS if name != "drise"}
    assert [name for name, is_error in errors.items() if not is_error] == [name for name in methods if name != "drise"]


def test_a_second_model_without_the_method_gets_its_default(tmp_path: Path) -> None:
    models = make_models(tmp_path / "clip")
    talk = Talk(loader(models["vit"][0], models["cnn"][0]), [("noise.png", write_noise(tmp_path / "noise.png", 0))])
    answer = talk.ask(method="rollout", other={"model": "second"})
    assert [answer[key]["maps"][0]["method"] for key in ("page", "other")] == ["rollout", "gradcam"]


def test_the_example_image_is_small_and_is_added_once(talk: Talk) -> None:
    image = talk.web.get("/example")
    assert image.headers["content-type"] == "image/jpeg"
    assert len(image.content) < 40_000
    assert Image.open(io.BytesIO(image.content)).size == (560, 448)
    added, again = (talk.web.post("/example").json() for _ in range(2))
    assert added == again == {"id": 1, "name": "cat_and_espresso.jpg"}
    data = talk.ask(added["id"])["page"]
    assert data["targets"]["names"][0] == "Egyptian cat"
    assert Path(data["image"]["path"]).read_bytes() == image.content  # The copied command names a file that exists.


def read_saved(response: Any) -> Any:
    return json.loads(re.search(r'id="data">(.*?)</script>', response.text, re.DOTALL)[1])  # type: ignore[index]


def test_a_saved_page_is_that_of_the_command_line(
    talk: Talk, classifier: gradcam.Classifier, photo: Callable[[str], Path]
) -> None:
    question = {"tab": "one", "picture": 0, "edits": ["erase:0,0,200,200"], "layer": "layer3", "method": "hirescam"}
    talk.ask(**{name: value for name, value in question.items() if name not in ("tab", "picture")})
    passes: list[int] = []
    hook = classifier.model.register_forward_hook(lambda *_: passes.append(1))
    response = talk.web.post("/save", content=json.dumps(question | {"first": 967}))
    hook.remove()
    assert passes == []  # The last answer was the same page.
    assert response.headers["content-type"].startswith("text/html")
    saved = read_saved(response)
    edited = edit_image(gradcam.read_image(photo("coffee.jpg")), question["edits"])
    expected = gradcam.page(edited, classifier, layers=["layer3"], methods=["hirescam"], target=967, name="coffee.jpg")
    assert saved["maps"] == expected.to_data()["maps"]
    assert saved["edits"] == question["edits"]
    assert saved["targets"]["indices"][saved["first"]] == 967
    changed = talk.web.post("/save", content=json.dumps(question | {"edits": []}))
    assert read_saved(changed)["edits"] == []
    assert talk.web.post("/save", content=json.dumps(question | {"layer": "nowhere"})).status_code == 422


def test_a_saved_page_names_no_folder(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    weights = str(Path("/home/me/best.pth"))
    loaded = LoadedModel(classifier, ("--weights", weights), f'gradcam.load_classifier(weights="{weights}")')
    talk = Talk(lambda _: loaded, [("coffee.jpg", photo("coffee.jpg"))])
    response = talk.web.post("/save", content=json.dumps({"tab": "one", "picture": 0}))
    assert "/home/me" not in response.text
    assert str(photo("coffee.jpg").parent) not in response.text
    assert read_saved(response)["model"]["code"] == 'gradcam.load_classifier(weights="best.pth")'


def test_the_start_page_lists_models_without_the_file_system(talk: Talk) -> None:
    talk.server.models = ["resnet18", "timm:"]
    text = talk.web.get("/").text
    assert '<option value="resnet18">' in text
    assert text.count('name="starter"') == 3
    assert "resnet50 <small>downloads 98 MB" in text


# ---- Access


def test_only_a_browser_at_the_start_page_gets_the_refusal_as_a_page(talk: Talk) -> None:
    browser = {TOKEN_HEADER: "", "accept": "text/html,*/*;q=0.8"}
    response = talk.web.get("/", headers=browser)
    assert response.status_code == 403
    assert response.headers["content-type"].startswith("text/html")
    assert talk.server.token not in response.text
    policy = response.headers["content-security-policy"]
    script = re.search(r"<script>(.*?)</script>", response.text, re.DOTALL)[1]  # type: ignore[index]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-frame-options"] == "DENY"
    refused = [
        talk.web.get("/strip", headers=browser),
        talk.web.post("/", headers=browser),
        talk.web.get("/", headers={TOKEN_HEADER: ""}),
        talk.web.get("/", headers={**browser, "host": "evil.example"}),
        talk.web.get("/", headers={**browser, "origin": "http://evil.example"}),
    ]
    assert [(item.status_code, item.headers["content-type"]) for item in refused] == [(403, "application/json")] * 5


@pytest.mark.parametrize("path", ["/", "/strip", "/view/0", "/progress", "/nowhere"])
def test_nothing_is_told_without_the_token(talk: Talk, path: str) -> None:
    for token in ("", "wrong", talk.server.token[:-1]):
        answer = talk.web.get(path, headers={TOKEN_HEADER: token})
        assert answer.status_code == 403
        assert talk.server.token not in answer.text
    assert talk.web.get(path, headers={TOKEN_HEADER: ""}, params={"token": talk.server.token}).status_code != 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://testserver", "http://testserver:80.evil.example"]
)
def test_other_pages_may_not_ask(talk: Talk, origin: str) -> None:
    assert talk.web.post("/ask", content="{}", headers={"origin": origin}).status_code == 403
    assert talk.web.post("/ask", content="{}", headers={"origin": "http://testserver"}).status_code == 422


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "", "127.0.0.1.evil.example"])
def test_other_names_are_refused(talk: Talk, host: str) -> None:
    assert talk.web.get("/", headers={"host": host}).status_code == 403


def test_only_that_it_is_alive_is_told_to_anybody(talk: Talk) -> None:
    assert talk.web.get("/alive", headers={TOKEN_HEADER: ""}).json() == {"gradcam": "ui"}


def test_answers_are_not_kept_nor_framed(talk: Talk) -> None:
    for path in ("/", "/strip", "/alive"):
        headers = talk.web.get(path).headers
        assert (headers["x-frame-options"], headers["cache-control"]) == ("DENY", "no-store")


def test_the_names_of_a_server() -> None:
    assert find_hosts("127.0.0.1") == {"127.0.0.1"}
    assert find_hosts("::1") == {"[::1]"}
    assert socket.gethostname() in find_hosts("0.0.0.0")


@pytest.mark.parametrize("is_open", [True, False])
def test_numeric_addresses_are_accepted_on_request(classifier: gradcam.Classifier, is_open: bool) -> None:
    server = Server(Explainer(ModelCache(loader(classifier)), ImageStrip()), "usual")
    web = TestClient(server.to_application({"My-Machine"}, takes_addresses=is_open))
    statuses = {
        host: web.get("/alive", headers={"host": host}).status_code
        for host in (
            "192.0.2.2:8765", "[2001:db8::1]:8765", "my-machine:8765", "evil.example:8765", "1.evil.example", ""
        )
    }  # fmt: skip
    assert list(statuses.values()) == [200 if is_open else 403] * 2 + [200] + [403] * 3


def test_what_a_browser_is_started_with_leads_to_the_token_once(talk: Talk) -> None:
    def go(once: str) -> Any:
        return talk.web.get("/", params={"once": once}, headers={TOKEN_HEADER: ""}, follow_redirects=False)

    assert go("wrong").status_code == go("").status_code == 403
    first, second = go(talk.server.once), go(talk.server.once)
    assert (first.status_code, first.headers["location"]) == (303, f"/?token={talk.server.token}")
    assert second.status_code == 403
    assert talk.server.token not in second.text


# ---- Jobs, models, images


async def never() -> bool:
    return False


def test_the_newest_question_of_a_tab_wins_and_others_wait() -> None:
    ran: list[str] = []

    def work(name: str) -> Callable[[Any], str]:
        def run(progress: Any) -> str:
            for i in range(2000 if name == "first" else 20):
                progress(i, 2000)
                time.sleep(0.01)
            ran.append(name)
            return name

        return run

    async def go() -> list[Any]:
        jobs = JobQueue()
        runs = [
            jobs.run("a", work("first"), never),
            jobs.run("a", work("second"), never),
            jobs.run("b", work("other"), never),
        ]
        runs += [jobs.run("a", work("last"), never)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        jobs.close()
        return results

    first, second, parallel, last = asyncio.run(go())
    assert isinstance(first, JobStopped)
    assert isinstance(second, JobStopped)
    assert (parallel, last) == ("other", "last")
    assert ran == ["other", "last"]


def test_a_tab_that_goes_stops_what_it_asked_and_progress_is_told() -> None:
    async def go() -> tuple[Any, int, list[tuple[int, int]]]:
        jobs, progress_values, steps = JobQueue(), [], 0

        async def is_gone() -> bool:
            progress_values.append(jobs.progress("a"))
            return len(progress_values) > 1

        def work(progress: Any) -> None:
            nonlocal steps
            for i in range(400):
                progress(i + 1, 400)
                steps += 1
                time.sleep(0.01)

        (outcome,) = await asyncio.gather(jobs.run("a", work, is_gone), return_exceptions=True)
        assert jobs.progress("a") == (0, 0)
        return outcome, steps, progress_values

    outcome, steps, progress_values = asyncio.run(go())
    assert isinstance(outcome, JobStopped)
    assert steps < 390
    assert 0 < progress_values[0][0] < progress_values[1][0]
    assert progress_values[0][1] == 400


def test_a_job_stops_between_two_modules_of_one_pass() -> None:
    class Slow(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return values

    model, runs = torch.nn.Sequential(*(Slow() for _ in range(200))), []
    model[-1].register_forward_hook(lambda *_: runs.append(1))

    async def is_gone() -> bool:
        return True

    async def go() -> tuple[Any, float]:
        jobs, start = JobQueue(), time.monotonic()
        outcomes = await asyncio.gather(jobs.run("a", lambda _: model(torch.zeros(1)), is_gone), return_exceptions=True)
        return outcomes[0], time.monotonic() - start

    with stop_between_modules():
        outcome, seconds = asyncio.run(go())
        assert isinstance(outcome, JobStopped)
        assert seconds < 2
        assert runs == []
        model[:3](torch.zeros(1))  # Outside of jobs, models run as before.
    model = model[-30:]
    asyncio.run(go())
    assert runs == [1]  # Without the context, the pass goes on to its end.


def test_models_are_dropped_if_memory_is_short(classifier: gradcam.Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str | None] = []

    def load(request: ModelRequest) -> LoadedModel:
        loaded.append(request.model)
        return LoadedModel(classifier, (), "")

    free = [10**12]
    monkeypatch.setattr("gradcam.ui.model_cache.find_free_memory", lambda: free[0])
    models = ModelCache(load)
    for name in ("a", "b", "a", "c", "a", "d"):
        models.get(ModelRequest(name))
    assert loaded == ["a", "b", "c", "d"]
    assert len(models) == MAX_CACHED_MODELS
    free[0] = 10**6
    models.get(ModelRequest("e"))
    assert len(models) == 1
    tries = []

    def work() -> str:
        tries.append(len(models))
        if len(tries) == 1:
            raise torch.OutOfMemoryError
        return "done"

    free[0] = 10**12
    models.get(ModelRequest("f"))
    assert models.retry_out_of_memory(work) == "done"
    assert tries == [2, 1]


def test_the_oldest_drops_make_room(photo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    data = photo("coffee.jpg").read_bytes()
    monkeypatch.setattr("gradcam.ui.strip.MAX_DROPPED_BYTES", 2 * len(data))
    pictures = ImageStrip([("a", photo("coffee.jpg"))])
    numbers = [pictures.add("b", data) for _ in range(4)]
    assert [item["id"] for item in pictures.to_data()] == [0, *numbers[-2:]]
    with pytest.raises(GradcamError, match="onto the page again"):
        pictures.get(numbers[0])


def test_the_strip_of_a_folder_a_picture_and_a_finished_batch(photo: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("coffee.jpg", "rocket.jpg"):
        (folder / name).write_bytes(photo(name).read_bytes())
    assert [name for name, _ in list_images([folder, folder / "coffee.jpg"])] == [
        "coffee.jpg",
        "rocket.jpg",
        "coffee.jpg",
    ]
    line = [sys.executable, "-m", "gradcam", "batch", str(folder), "-o", str(tmp_path / "done")]
    subprocess.run(line, check=True, capture_output=True)
    assert [(name, path.resolve()) for name, path in list_images([tmp_path / "done"])] == [
        (name, (folder / name).resolve()) for name in ("coffee.jpg", "rocket.jpg")
    ]
    with pytest.raises(GradcamError, match="no such image"):
        list_images([tmp_path / "nowhere"])
