"""
What newcomers are told: the greeting at the terminal, the page at /, and what to call instead of a
path that is not served.

    print(greeting("out/stdlib", "http://127.0.0.1:8000", chats=False, key=""))

Plain texts, made of what api.py knows. Not run by itself.
"""

import base64
import difflib
import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

# What clients of other servers call, with all paths below it -> what to call here instead.
INSTEAD = {
    "/v1/responses": "POST /v1/chat/completions",
    "/v1/messages": "POST /v1/chat/completions",  # Anthropic's
    "/api/chat": "POST /v1/chat/completions",  # Ollama's, as the next ones
    "/api/generate": "POST /v1/completions",
    "/api/tags": "GET /v1/models",
    "/api/show": "GET /v1/models",
    "/api/ps": "GET /v1/models",
    "/api/version": "GET /v1/models",
    "/generate": "POST /v1/completions",  # Text Generation Inference's
    "/completion": "POST /v1/completions",  # llama.cpp's
}
EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/api/embed", "/api/embeddings")


def example_call(url: str, chats: bool, key: str) -> list[str]:
    """
    The parts of a curl command to paste into a shell; `key` is how the shell spells the API key.
    """
    if chats:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    else:  # a small model reads better below temperature 1
        path = "/v1/completions"
        body = {"prompt": "def ", "max_tokens": 64, "temperature": 0.6}
    parts = [f"curl {url}{path}", "-H 'Content-Type: application/json'"]
    if key:
        parts.append(f'-H "Authorization: Bearer {key}"')
    parts.append(f"-d '{json.dumps(body)}'")
    return parts


def base_url(sock) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(name: str, url: str, chats: bool, key: str) -> str:
    """
    What the server prints when it is ready: a line that scripts wait for, and a command to try.
    """
    return f"serving {name} at {url}\n    {' '.join(example_call(url, chats, key))}"


def page() -> str:
    """The page at /, as HTML: one file."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def content_policy(html: str) -> str:
    """
    The Content Security Policy of the page: nothing runs but its own script, and nothing is asked
    for but from its own origin. Its icon is empty, so that browsers request none.
    """
    script, style = (hash_of(html, element) for element in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def hash_of(html: str, element: str) -> str:
    """How a Content Security Policy names the one element of this kind, by its content."""
    _, _, rest = html.partition(f"<{element}>")
    content, _, _ = rest.partition(f"</{element}>")
    return f"'sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}'"


def page_headers(html: str) -> dict[str, str]:
    """With its policy; and no other page frames it (clickjacking)."""
    return {
        "Content-Security-Policy": f"{content_policy(html)}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def page_with_record(lines: Iterable[dict]) -> str:
    """The page as one file with a record inside, to be hosted anywhere, its policy included."""
    html = page()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy(html)}">'
    # in JSON a "<" is in a text; as it stands there "</script>" would end the element
    record = json.dumps(list(lines), separators=(",", ":")).replace("<", "\\u003c")
    element = f'<script type="application/json" id="record">{record}</script>'
    html = html.replace("<style>", f"{policy}\n<style>", 1)
    return html.replace("<script>", f"{element}\n<script>", 1)  # before the one that reads it


def not_found(method: str, path: str, routes: list[tuple[str, str]]) -> str:
    """The message for a method and path that are not among the routes (method, path)."""
    hint = hint_for(path.rstrip("/")[:200], routes)
    paths = [other for _, other in routes]
    there = "/openapi.json lists what there is"
    if "/record" in paths:
        there = f"there is {', '.join(paths)}"
    return f"there is no {method} {path:.200} here; {hint}{there}"


def hint_for(path: str, routes: list[tuple[str, str]]) -> str:
    """What to call instead of a path that is not served, by what it resembles; "" if nothing."""
    if path in EMBEDDINGS:
        return "embeddings are not served, vLLM serves them; "
    for prefix, call in INSTEAD.items():
        if f"{path}/".startswith(f"{prefix}/"):
            return f"call {call}, as this is OpenAI's API; "
    known = [other for _, other in routes]
    if f"/v1{path}" in known:
        return f"call /v1{path}, a base URL ends in /v1; "
    # a base URL with /v1 where none belongs, as in /v1/tokenize, or /v1 alone
    meant = [path.removeprefix("/v1") or "/v1/models"]
    meant += difflib.get_close_matches(path, known, 1, cutoff=0.85)
    for wanted in meant:
        for method, other in routes:
            if other == wanted:
                return f"call {method} {other}; "
    return ""
