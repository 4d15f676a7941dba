"""
First contact: the greeting at the terminal, and the message for a path that is not served.

    print(greeting("out/stdlib", "http://127.0.0.1:8000", chats=False, has_key=False))

Plain texts. Not run by itself.
"""

import json


def base_url(sock) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(name: str, url: str, chats: bool, has_key: bool) -> str:
    """
    The output of a server that is ready: a line that scripts wait for, and a command to try.
    """
    if chats:
        path = "chat/completions"
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    else:  # a small model reads better below temperature 1
        path = "completions"
        body = {"prompt": "def ", "max_tokens": 64, "temperature": 0.6}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    return (
        f"serving {name} at {url}\n"
        f"    curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    )


def not_found(method: str, path: str, routes: list[tuple[str, str]]) -> str:
    """The message for a method and path that are not among the routes (method, path)."""
    paths = [other for _, other in routes]
    hint = f"call /v1{path}, a base URL ends in /v1; " if f"/v1{path}" in paths else ""
    rest = "/openapi.json lists what there is"
    if "/record" in paths:
        rest = f"there is {', '.join(paths)}"
    return f"there is no {method} {path:.200} here; {hint}{rest}"
