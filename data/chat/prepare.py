"""
A corpus of dialogues for a chat model that exists: in its own chat template, with a loss on the
assistant's tokens alone. Each line of a file is {"messages": [{"role": .., "content": ..}, ..]}.

    python data/chat/prepare.py data/chat/dialogues.jsonl --val data/chat/held_out.jsonl --init DIR
    python train.py --init DIR --data chat

An answer is what the template puts behind the prompt that serve.py would make of the messages
before, up to the token that ends the turn. Dialogues are
packed: they stand one behind another, windows of training cut across them, and attention sees the
dialogues before in the same window.
"""

import json
import sys
from itertools import chain
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/../.."

from common import MALFORMED, Parser, add_flag
from server.text import Chat, Messages, load_chat
from tokenizer import TokenizerError, load_tokenizer
from training.corpus import hold_out, write_corpus


def encode(chat: Chat, messages: Messages) -> list[int]:
    """
    The tokens of a dialogue, ~id for those that are not the assistant's. Raises TokenizerError
    where the template does not show which are.
    """
    ids = chat.encode(messages)
    tokens = [~token for token in ids]
    control = chat.tokenizer.names
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.encode(messages[:i], add_generation_prompt=True)
            turn = chat.encode(messages[: i + 1])
            start = len(prompt)
            if turn[:start] != prompt or ids[: len(turn)] != turn:
                raise TokenizerError(
                    "the chat template cannot mark the assistant's answers, as it does not write "
                    "one behind its generation prompt and leave it there"
                )
            answer = turn[start:]
            # a model never says what is behind the token that ends the turn, mostly a newline
            while control.keys() & answer and answer[-1] not in control:
                answer.pop()
            tokens[start : start + len(answer)] = answer
    if max(tokens) < 0:
        raise TokenizerError("the assistant says nothing")
    return tokens


def read_dialogues(path: str, chat: Chat) -> list[list[int]]:
    """The tokens of each dialogue of a file. Exits with the number of a line that is none."""
    dialogues = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            dialogues.append(encode(chat, messages))
        except MALFORMED as error:
            sys.exit(
                f"{path}, line {number}: {type(error).__name__}: {error}; wanted is a line of JSON "
                'like {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", ..}]}'
            )
    return dialogues


def main(argv: list[str] | None = None):
    parser = Parser(description="Make a corpus of dialogues, for train.py --data.")
    parser.add_argument("file", help="dialogues to train on, one a line")
    add_flag(parser, "--val", "dialogues to hold out; default: every tenth of the file's")
    add_flag(parser, "--init", "checkpoint whose chat template and tokenizer to use", required=True)
    add_flag(parser, "--out", "folder of the corpus", Path(__file__).parent, Path)
    args = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(args.init)
        chat = load_chat(args.init, tokenizer)
        if chat is None:
            raise TokenizerError(f"{args.init} has no chat template: take a chat model's directory")
        train = read_dialogues(args.file, chat)
        train, val = (train, read_dialogues(args.val, chat)) if args.val else hold_out(train)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    write_corpus(args.out, tokenizer, [*chain(*train)], [*chain(*val)])


if __name__ == "__main__":
    main()
