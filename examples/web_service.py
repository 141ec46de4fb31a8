"""A web service: a picture in, an overlay and the prediction out.

    pip install "gradcam-torch" fastapi uvicorn python-multipart
    uvicorn web_service:app --app-dir examples            then open http://127.0.0.1:8000

    curl -F picture=@photo.jpg "http://127.0.0.1:8000/explain?label=espresso" -o overlay.png

One model for all requests: explanations of several threads at once do not disturb one another. What a stranger may send is
limited by GRADCAM_MAX_PIXELS, and nothing is fetched from addresses in a request.
"""

from __future__ import annotations

import io
from typing import Annotated
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, UploadFile
from fastapi.responses import HTMLResponse, Response
from PIL import Image

import gradcam

app = FastAPI(title="Where did the model look?")
classifier = gradcam.load_classifier()

PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><title>Where did the model look?</title>
<form action="explain" method="post" enctype="multipart/form-data">
  <input type="file" name="picture" accept="image/*" required> <button>Explain</button>
</form>"""


@app.get("/", response_class=HTMLResponse)
def show_form() -> str:
    return PAGE


# Not `async`: FastAPI runs it in a thread of its pool, and the event loop stays free.
@app.post("/explain")
def explain(
    picture: UploadFile, label: Annotated[str | None, "a class's name; the top class without"] = None
) -> Response:
    try:
        explanation = classifier.explain(picture.file.read(), target=label)
    except gradcam.GradcamError as error:  # no picture, too large, an unknown class: it says which
        raise HTTPException(400, str(error)) from error
    png = io.BytesIO()
    Image.fromarray(explanation.overlay()).save(png, "PNG")
    told = {"X-Label": quote(explanation.label() or ""), "X-Probability": f"{explanation.probability():.4f}"}
    return Response(png.getvalue(), media_type="image/png", headers=told)
