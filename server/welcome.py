"""
The page at /. Not run by itself.
"""

import base64
import json
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

# The files of the page at /, in the order in which they are joined; and the record of its tour.
PAGE = ("index.html", "page.css", "state.js", "pool.js", "timeline.js", "talk.js")
TOUR = Path(__file__).parents[1] / "assets/tour.jsonl"


@cache
def page() -> str:
    """The page at /, as HTML: the files of page/ and the tour's record, joined to one document."""
    folder = Path(__file__).with_name("page")
    html, style, *scripts = (folder.joinpath(name).read_text(encoding="utf-8") for name in PAGE)
    html = html.replace("<style></style>", f"<style>\n{style}</style>")
    html = html.replace("<script></script>", "<script>\n{}</script>".format("\n".join(scripts)))
    if not TOUR.exists():
        return html
    with TOUR.open(encoding="utf-8") as file:
        return with_lines(html, "tour-lines", map(json.loads, file))


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
    html = html.replace("<style>", f"{policy}\n<style>", 1)
    return with_lines(html, "record", lines)


def with_lines(html: str, name: str, lines: Iterable[dict]) -> str:
    """The page with a record in an element of this name."""
    # in JSON a "<" is in a text; as it stands there "</script>" would end the element
    record = json.dumps(list(lines), separators=(",", ":")).replace("<", "\\u003c")
    element = f'<script type="application/json" id="{name}">{record}</script>'
    return html.replace("<script>", f"{element}\n<script>", 1)  # before the one that reads it
