"""
A tiny model that calls tools: its chat template shows them and writes calls as Qwen's does.

    save_caller(folder)        # a checkpoint of random weights, one token per byte

Its weights know nothing of calls. A special token, TAG, begins one. With a bias of 100 for TAG,
every answer that may call a tool begins with it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken

from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from tokenizer import Tokenizer
from training.corpus import bpe_tokenizer

END, TAG, CLOSING = 256, 257, 258
SHOWN = r"""{% if tools %}{{ 'Call in <tools></tools> or <tool_call></tool_call>:\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n' }}
{{- '</tool_call>\n' }}{% endif %}"""
TALK = r"""{% for m in messages %}{{ m.role + ':' }}
{%- if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{% set call = call.function %}CALL{% endfor %}
{{- '\n' }}{% endfor %}assistant:"""
QWEN = r"""{{ '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\n</tool_call>' }}"""
HERMES = r"""{{ '\n<tool_call>\n{ "arguments": ' }}{{ call.arguments | tojson }}
{{- ', "name": "' + call.name + '"}\n</tool_call> ' }}"""
TEMPLATE = SHOWN + TALK.replace("CALL", QWEN)


def ids_of(tokens: Iterable[str]) -> dict[str, int]:
    """Return the ids of the tokens that `save_tokens` adds."""
    return {name: TAG + i for i, name in enumerate(tokens)}


def with_tokens(text: str, tokens: Iterable[str]) -> list[int]:
    """Return the bytes of a text, with its markers as tokens where such tokens exist."""
    ids = ids_of(tokens)
    parts = re.split(r"(</?think>|<tool_call>|(?<=\n)</tool_call>)", text)  # not within JSON
    return [i for part in parts for i in ([ids[part]] if part in ids else part.encode())]


def save_tokens(folder: Path, tokens: dict[str, bool], template: str = TEMPLATE):
    """Save one token per byte, an end, and these tokens: whether each is a control token."""
    backend = bpe_tokenizer([]).backend
    for name, special in tokens.items():
        backend.add_tokens([AddedToken(name, special=special)])
    Tokenizer(backend).save(folder)
    (folder / "chat_template.jinja").write_text(template)


def save_caller(folder: Path, tokens: dict[str, bool] | None = None):
    save_tokens(folder, tokens or {"<tool_call>": False})
    torch.manual_seed(0)
    sizes = {"context_length": 8192, "n_layer": 1, "n_head": 1, "n_embd": 16}
    rows = 257 + len(tokens or "1")
    save_checkpoint(GPT(GPTConfig(rows, eos_token_ids=(END,), **sizes)), folder)
