"""
A corpus of dialogues for fine-tuning a chat model. It uses the model's own chat template, and only
the assistant's tokens have a loss. Each line of a file is {"messages": [{"role": .., "content":
..}, ..]}. It may also have "tools", which the template shows as in a request to serve.py.

    python data/chat/prepare.py data/chat/dialogues.jsonl --val data/chat/held_out.jsonl --init DIR
    python train.py --init DIR --data chat

An answer is what the template writes after the prompt that serve.py would build from the earlier
messages, up to the token that ends the turn. Dialogues are packed (see training/corpus.py).
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/../.."
    from common import end_with_one_line

    end_with_one_line()

from common import MALFORMED
from server.text import Chat, Messages, load_chat
from tokenizer import TokenizerError, load_tokenizer
from training.corpus import run_recipe


def encode(chat: Chat, messages: Messages) -> list[int]:
    """
    Return the tokens of a dialogue, with ~id for tokens that are not the assistant's. Raises
    TokenizerError if the template does not show which tokens are the assistant's.
    """
    ids = chat.encode(messages)
    tokens = [~token for token in ids]
    control = chat.tokenizer.names
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.encode(messages[:i], add_generation_prompt=True)
            so_far = chat.encode(messages[: i + 1])
            start = len(prompt)
            answer = so_far[start:]
            if prompt + answer != ids[: len(so_far)]:
                raise TokenizerError(
                    "the chat template cannot mark the assistant's answers, because it does not "
                    "write one right after its generation prompt and leave it there"
                )
            # a model never generates what follows the end-of-turn token, usually a newline
            while control.keys() & answer and answer[-1] not in control:
                answer.pop()
            tokens[start : start + len(answer)] = answer
    if max(tokens) < 0:
        roles = {message["role"] for message in messages}
        raise TokenizerError(f"the assistant says nothing: roles here are {sorted(roles)}")
    return tokens


def with_object(call: dict) -> dict:
    """
    Return a call whose arguments are an object, as in serve.py, even if they are sent as a JSON
    string.
    """
    if isinstance(call.get("arguments"), str):
        call["arguments"] = json.loads(call["arguments"])
    return call


def read(path: Path, init: str | None) -> dict:
    """
    Return the tokens of each dialogue in a file, by line, using the chat template of the checkpoint
    `init`. Raises OSError, and ValueError with the number of any line that is not a dialogue.
    """
    if not init:
        raise ValueError("--init DIR is needed: the chat model whose template to use")
    chat = load_chat(init, load_tokenizer(init))
    if not chat:
        raise ValueError(f"--init {init} has no chat template: choose a checkpoint that has one")
    dialogues = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(line, object_hook=with_object)
            chat.variables = {"tools": line.get("tools") or None}
            dialogues[path.resolve(), number] = encode(chat, line["messages"])
        except MALFORMED as error:
            raise ValueError(
                f"{path}, line {number}: {type(error).__name__}: {error}; each line must be JSON "
                'like {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", ..}]}'
            ) from None
    return dialogues


if __name__ == "__main__":
    run_recipe(read, Path(__file__).parent)
