"""
A feature is a file. Without it, and without the lines that name it in one place, everything else
works as before, and a request for it gets a message that says what is missing.
"""

import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import httpx
import pytest
from callers import save_caller
from planting import copy_repo
from processes import RUN, Process

from engine.stages import FILES, STAGES

ROOT = Path(__file__).parents[1]
GREEDY = {"temperature": 0, "max_tokens": 24}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# feature: its file, the file that lists it, how the lines there begin
LISTED = {
    name: (file, "engine/stages.py", (f'    "{name}": "engine.',)) for name, file in FILES.items()
}
CHOSEN = ("        prefix,", "        group_finder=prefix.")
LISTED["prefixes"] = "ops/prefix.py", "ops/choice.py", CHOSEN
FLAGS = {"drafts": ["--speculate"], "record": ["--record", "r.jsonl"]}
FIELDS = {
    "grammar": [{"response_format": {"type": "json_object"}}, {"tools": [TOOL]}],
    "scores": [{"logprobs": True}],
}


def answers_of(url: str) -> list[str]:
    """
    Return greedy answers: of a completion, a chat, and a stream, whose events may have several
    tokens.
    """
    with httpx.Client(base_url=url, timeout=60) as client:

        def post(**body):
            kind = "chat/completions" if "messages" in body else "completions"
            return client.post(f"/v1/{kind}", json=body | GREEDY)

        (text,) = post(prompt="def f").json()["choices"]
        (chat,) = post(messages=HELLO).json()["choices"]
        events = post(prompt="def f", stream=True).text.split("data: ")
        chunks = [json.loads(event) for event in events if event.startswith("{")]
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert "vllm:num_requests_running" in client.get("/metrics").text
    return [text["text"], chat["message"]["content"], streamed]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caller")
    save_caller(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    with Process(model) as server:
        return answers_of(server.url)


def without(feature: str, folder: Path) -> Path:
    """Return a copy of the tree in which a feature's files and lines are deleted."""
    repo = copy_repo(folder / "repo")
    file, list_file, beginnings = LISTED[feature]
    (repo / file).unlink()
    if feature == "grammar":
        (repo / "server/tools.py").unlink()
    lines = (repo / list_file).read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(beginnings)]
    assert len(lines) - len(kept) == len(beginnings)
    (repo / list_file).write_text("".join(kept))
    return repo


@pytest.mark.slow
@pytest.mark.parametrize("feature", LISTED)
def test_a_feature_can_be_deleted(feature, model, expected, tmp_path):
    repo = without(feature, tmp_path)
    here = RUN | {"cwd": repo}
    for command in (["test_paged.py"], ["bench.py", "--help"]):
        done = subprocess.run([sys.executable, *command], **here, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    missing = f"this server has no {feature} ({FILES.get(feature)})"
    if feature in FLAGS:
        command = [sys.executable, "serve.py", "--model", str(model), *FLAGS[feature]]
        done = subprocess.run(command, **here, capture_output=True)
        assert done.returncode == 2 and missing in done.stderr
    with Process(model, cwd=repo) as server:
        assert answers_of(server.url) == expected
        for fields in FIELDS.get(feature, []):
            body = {"messages": HELLO, **GREEDY, **fields}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert reply.status_code == 400 and missing in reply.text, reply.text
        if feature == "record":
            reply = httpx.get(f"{server.url}/events")
            assert reply.status_code == 400 and missing in reply.text


@pytest.mark.parametrize("name", ["engine/engine.py", "engine/device.py", "engine/runner.py"])
def test_no_stage_has_a_name_in_the_engine(name):
    """Only the list in engine/stages.py has it. Would catch: a stage that cannot be deleted."""
    parts = {part for kind in STAGES.values() for part in re.split("[.:]", kind)[1:]}
    names = {*STAGES, *parts, "recorder", "prefix"} - {"record", "windows"}
    source = io.StringIO((ROOT / name).read_text())
    tokens = tokenize.generate_tokens(source.readline)
    used = {t.string.strip("\"'") for t in tokens if t.type in (tokenize.NAME, tokenize.STRING)}
    assert used & names == set()
