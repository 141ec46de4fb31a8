"""A web service: upload an image, get the overlay and the prediction.

    pip install . fastapi uvicorn python-multipart        in the folder of this repository
    uvicorn web_service:app --app-dir examples            then open http://127.0.0.1:8000

    curl -F image=@photo.jpg "http://127.0.0.1:8000/explain?label=espresso" -o overlay.png

All requests share one model: explanations in several threads do not disturb one another. GRADCAM_MAX_PIXELS limits the size
of uploaded images. The service fetches nothing from URLs in a request.
"""

from __future__ import annotations

import io
from typing import Annotated
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, UploadFile
from fastapi.responses import HTMLResponse, Response
from PIL import Image

import gradcam

app = FastAPI(title="See where the model looks")
classifier = gradcam.load_classifier()

PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><title>See where the model looks</title>
<form action="explain" method="post" enctype="multipart/form-data">
  <input type="file" name="image" accept="image/*" required> <button>Explain</button>
</form>"""


@app.get("/", response_class=HTMLResponse)
def show_form() -> str:
    return PAGE


# This function is not `async`, so FastAPI runs it in a thread pool, and the event loop is not blocked.
@app.post("/explain")
def explain(image: UploadFile, label: Annotated[str | None, "class name; default: the top class"] = None) -> Response:
    try:
        explanation = classifier.explain(image.file.read(), target=label)
    except gradcam.GradcamError as error:  # for example: not an image, too large, unknown class
        raise HTTPException(400, str(error)) from error
    png = io.BytesIO()
    Image.fromarray(explanation.overlay()).save(png, "PNG")
    told = {"X-Label": quote(explanation.label() or ""), "X-Probability": f"{explanation.probability():.4f}"}
    return Response(png.getvalue(), media_type="image/png", headers=told)
