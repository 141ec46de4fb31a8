"""The response to a request without the token: a page whose script tries again with the token that the tab stored."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, Response

from gradcam.web.render import hash_inline

# The page of `gradcam ui` moves the token from the address to the tab's session storage. After a reload, this script
# gets the token from there. If the address already has a token, which was refused, the script deletes the stored token.
SCRIPT = """
try {
  const token = sessionStorage.getItem("gradcam-token");
  if (token && !location.search) {
    document.documentElement.hidden = true;
    location.replace(`/?token=${encodeURIComponent(token)}${location.hash}`);
  } else sessionStorage.removeItem("gradcam-token");
} catch { /* Without storage, there is no token. */ }
"""
REASONS = {
    "once": "This address works only once: open the address that gradcam ui printed.",
    "token": "The token is missing or wrong: open the address that gradcam ui printed.",
}
STYLE = "body { font: 17px/1.5 system-ui, sans-serif; max-width: 36em; margin: 20vh auto; color-scheme: light dark }"
PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>gradcam ui</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<style>{STYLE}</style><script>{SCRIPT}</script></head><body><h1>gradcam ui</h1><p>%s</p></body></html>"
)


POLICY = (
    f"default-src 'none'; script-src 'sha256-{hash_inline(SCRIPT)}'; style-src 'sha256-{hash_inline(STYLE)}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_refusal(scope: Any, headers: Mapping[str, str], status: int, reason: str, sent: Mapping[str, str]) -> Response:
    """Return the response to a refused request: a page for a browser that opens the start page, otherwise JSON.

    `sent` are the headers of the response.
    """
    is_start = scope["method"] == "GET" and scope["path"] == "/" and "text/html" in headers.get("accept", "")
    if not is_start or reason not in REASONS.values():
        return JSONResponse({"error": reason}, status, headers=dict(sent))
    return HTMLResponse(PAGE % html.escape(reason), status, headers={**sent, "content-security-policy": POLICY})
