"""
Corpora from a user's own files: data/text/prepare.py and data/chat/prepare.py. Which tokens have a
loss is compared with transformers, or written out by hand. An unusable file is named.
"""

import json
import os
import re
import runpy
import signal
import stat
import subprocess
import sys
from itertools import cycle, groupby
from pathlib import Path

import pytest
from test_data import ALONE, documents
from tokenizer_kinds import save
from transformers import AutoTokenizer

from training.corpus import (
    Corpus,
    bpe_tokenizer,
    char_tokenizer,
    load_corpus,
    read_about,
    run_recipe,
    train_bpe,
)

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {name: ROOT / "data" / name / "prepare.py" for name in ("text", "chat")}
RECIPES = {name: runpy.run_path(str(path)) for name, path in COMMANDS.items()}
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def prepare(name: str, source: Path, out: Path, *more: str) -> Corpus:
    """Return what train.py finds in `out` after the command; `more`: flags, then sources."""
    argv = [f"--out={out}", *more, str(source)]
    run_recipe(RECIPES[name]["read"], out, argv)
    return load_corpus(str(out), ALONE)


def turns(*contents: str) -> list[dict]:
    """Return a dialogue that a user begins."""
    pairs = zip(cycle(["user", "assistant"]), contents, strict=False)
    return [{"role": role, "content": content} for role, content in pairs]


def write_lines(path: Path, *dialogues: list[dict]) -> Path:
    lines = [json.dumps({"messages": messages}) for messages in dialogues]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """
    Return a tokenizer of bytes, with <|im_start|> as 257, <|im_end|> as 258, and a chat template.
    """
    folder = tmp_path / "checkpoint"
    tokenizer = bpe_tokenizer([])
    tokenizer.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture
def path(tmp_path) -> Path:
    """Return a text file."""
    path = tmp_path / "a.txt"
    path.write_text("note 0\n" * 10)
    return path


# --------------------------------------------------------------------------------------------------
# Texts


@pytest.fixture
def notes(tmp_path) -> Path:
    """
    Make 21 files, one of them in a folder, and three that do not count: a hidden one, an empty one,
    and a socket. (A socket cannot be read, like a pipe, but fails immediately.)
    """
    folder = tmp_path / "notes"
    (folder / "inner").mkdir(parents=True)
    for i in range(20):
        (folder / f"{i:02}.txt").write_bytes(b"note %d\r\n" % i)
    (folder / "inner" / "grüße.md").write_text("<|endoftext|> is text")
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "empty").touch()
    os.mknod(folder / "socket", stat.S_IFSOCK | 0o600)
    return folder


def test_each_file_is_a_document_and_every_tenth_is_held_out(notes, tmp_path):
    """
    Line ends are kept, what looks like a control token is text, a byte order mark is removed, and
    train.py accepts the folder.
    """
    out = tmp_path / "out"
    marked = notes / "04.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + marked.read_bytes())
    prepare("text", notes, out)
    contents = [b"note %d\r\n" % i for i in range(20)] + [b"<|endoftext|> is text"]
    assert documents(out, "val") == contents[::10]
    assert documents(out, "train") == contents[1:10] + contents[11:20]


def test_a_file_counts_once_whatever_its_names(notes, tmp_path):
    """
    Previously a file named together with its folder, or found through a link to it, was both
    trained on and held out.
    """
    file = notes / "03.txt"
    out = tmp_path / "out"
    link = tmp_path / "link"
    link.symlink_to(notes)
    sources = [str(link), str(file), str(notes / "empty")]
    prepare("text", notes, out, *sources)
    contents = documents(out, "train") + documents(out, "val")
    assert len(contents) == len(set(contents)) == 21
    prepare("text", notes, out, f"--val={file}", *sources)
    assert documents(out, "val") == [file.read_bytes()]
    assert {*documents(out, "train")} == {*contents} - {file.read_bytes()}
    with pytest.raises(SystemExit, match=r"--val .*03\.txt holds out every document: add files to"):
        prepare("text", file, out, f"--val={file}")


@pytest.mark.parametrize("inside", ["", "inner/out"])
def test_a_corpus_within_its_own_source_is_refused(inside, notes, path):
    """
    Previously, when such a corpus was made again, its own tokenizer.json and meta.json became
    texts.
    """
    for source, *more in ([notes], [path, f"--val={notes}"]):
        with pytest.raises(SystemExit, match=r"--out .*notes.* is inside .*notes, an input:"):
            prepare("text", source, notes / inside, *more)
    assert not (notes / inside / "meta.json").exists()


def test_a_vocabulary_is_learnt_from_words_of_any_length():
    """
    Previously a line of 1 MB without a blank took minutes, so long words are now cut. Encoding cuts
    none.
    """
    tokenizer = train_bpe(["a" * 1024])
    ids = tokenizer.encode("a" * 1024)
    assert [*map(len, map(tokenizer.token_bytes, ids))] == [256] * 4


def test_of_one_text_the_last_tenth_is_held_out_and_shapes_no_vocabulary(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("to be or not to be " * 9 + "quixotic, quixotic.")
    tokenizer = prepare("text", path, tmp_path).tokenizer
    assert documents(tmp_path, "train") == [b"to be or not to be " * 9]
    assert documents(tmp_path, "val") == [b"quixotic, quixotic."]
    assert [len(tokenizer.encode(word)) for word in (" not", "quixotic")] == [1, 8]


# whether texts have a BOS, and an end
ENDS = {"gpt2": (False, True), "llama3": (True, True), "mistral": (True, False)}


@pytest.mark.parametrize("kind", ENDS)
def test_the_tokenizer_is_that_of_init(kind, path, tmp_path):
    """A document begins like a prompt in transformers and serve.py. Its BOS is not predicted."""
    has_bos, has_end = ENDS[kind]
    save(kind, tmp_path)
    corpus = prepare("text", path, tmp_path / "out", f"--init={tmp_path}")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for tokens, count in (corpus.train, 9), (corpus.val, 1):
        first, *rest = reference("note 0\n" * count)["input_ids"]
        end = [corpus.tokenizer.eos_token_id] * has_end
        assert tokens.tolist() == [~first if has_bos else first, *rest, *end]


# --------------------------------------------------------------------------------------------------
# Dialogues

# with the tags that tell transformers which words are the assistant's
TAGGED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
DIALOGUES = [
    turns("Hello, wörld 😀!", "Hi <b>there</b>, 語 12 ", "def f():\n    pass\n", "1\n\n2"),
    [{"role": "system", "content": "Be brief."}, *turns("2 + 2?", "4")],
    turns("And you?", ""),
]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "gemma", "mistral", "llama2"])
@pytest.mark.quick("llama3", "qwen2", "llama2")
def test_the_tokens_with_a_loss_are_those_that_transformers_masks(kind, tmp_path):
    """
    Neither a user's words nor the newline after an answer have one. (If an answer begins with a
    blank, transformers misses the blank when the tokenizer's offsets leave it out.)
    """
    config = tmp_path / "tokenizer_config.json"
    save(kind, tmp_path)
    names = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": TAGGED}
    config.write_text(json.dumps(json.loads(config.read_text()) | names))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for dialogue in DIALOGUES:
        answer = reference.apply_chat_template(dialogue, return_assistant_tokens_mask=True)
        pairs = zip(answer["input_ids"], answer["assistant_masks"], strict=True)
        expected += [token if mask else ~token for token, mask in pairs]
    lines = write_lines(tmp_path / "a.jsonl", *DIALOGUES)
    val = write_lines(tmp_path / "b.jsonl", *DIALOGUES)
    corpus = prepare("chat", lines, tmp_path, f"--init={tmp_path}", f"--val={val}")
    assert corpus.train.tolist() == corpus.val.tolist() == expected


# without an end-of-turn token, everything that the template puts after the prompt counts
PLAIN = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
TALK = [{"messages": turns("hi", " yes", "<|im_end|>", "no")}]
SAID = {"messages": turns("hi", "yes")}


def call(arguments) -> dict:
    function = {"name": "f", "arguments": arguments}
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


# template, the lines of the file, their tokens as `shown` writes them
HANDMADE = {
    "chatml": (
        CHATML,
        TALK,
        "[«user\nhi»\n«assistant\n] yes»[\n«user\n<|im_end|>»\n«assistant\n]no»[\n]",
    ),
    "plain": (PLAIN, TALK, "[u:hi\na:] yes\n[u:<|im_end|>\na:]no\n"),
    # tools used to be ignored; an empty list means none, as in a request, and each dialogue has its
    # own
    "tools": (
        "{{ tools | tojson }}" + PLAIN,
        [SAID | {"tools": ["f"]}, SAID, SAID | {"tools": []}],
        '[["f"]u:hi\na:]yes\n[nullu:hi\na:]yes\n[nullu:hi\na:]yes\n',
    ),
    # arguments as text, which OpenAI's files have, used to be written as a JSON string with its
    # quotes
    "arguments": (
        PLAIN.replace("m.content", "m.tool_calls[0].function.arguments | tojson"),
        [call('{"a": 1}'), call({"a": 1})],
        '[a:]{"a": 1}\n[a:]{"a": 1}\n',
    ),
}


def shown(tokens) -> str:
    """Return bytes as characters, control tokens as « and », with unpredicted text in brackets."""
    text = ""
    for is_predicted, group in groupby(tokens.tolist(), lambda token: token >= 0):
        characters = (chr(max(token, ~token)) for token in group)
        part = "".join(characters).replace(chr(257), "«").replace(chr(258), "»")
        text += part if is_predicted else f"[{part}]"
    return text


@pytest.mark.parametrize("kind", HANDMADE)
def test_answers_are_found_without_tags(kind, checkpoint, tmp_path):
    """
    User text that looks like a control token stays text. Tools and calls are written as in a
    request.
    """
    template, lines, expected = HANDMADE[kind]
    (checkpoint / "chat_template.jinja").write_text(template)
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file in files:
        file.write_text("\n".join(map(json.dumps, lines)))
    corpus = prepare("chat", files[0], tmp_path, f"--init={checkpoint}", f"--val={files[1]}")
    assert shown(corpus.train) == shown(corpus.val) == expected


def test_without_val_every_tenth_dialogue_is_held_out(checkpoint, tmp_path):
    """This also holds for a file that is named twice."""
    lines = write_lines(tmp_path / "a.jsonl", *[turns("?", f"{i}!") for i in range(21)])
    corpus = prepare("chat", lines, tmp_path, f"--init={checkpoint}", str(lines))
    train = [i for i in range(21) if i % 10]
    for tokens, numbers in (corpus.train, train), (corpus.val, [0, 10, 20]):
        answers = corpus.tokenizer.decode(tokens[tokens >= 0])
        assert answers == "".join(f"{i}!" for i in numbers)


# like Qwen3's: an answer is written differently once another message follows it
REWRITES = """{% for m in messages %}{{ m.role + ':' }}{% if loop.last and m.role == 'assistant' %}
{{- '<think></think>' }}{% endif %}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
TEMPLATES = {"chatml": CHATML, "rewrites": REWRITES, "first": "{{ messages[0].content }}"}
TEMPLATES["fails"] = "{{ raise_exception('no') if messages[1:] else 'a' }}"
# a text, or the template of dialogues | the text, or the line after a good one | the message
UNFIT = r"""
text     | grü           | \.txt is not UTF-8 \(.*0xfc in position 2
text     |               | out: 0 tokens to train on and 0 to hold out are too few: add
text     | MISSING       | ^No such file or directory: .*a\.txt; name files that can be read
text     | ab            | out: 1 tokens to train on and 1 to hold out are too few
text     | unknown?      | character 'u' .* is not among the 3 that this tokenizer knows
chatml   | {"messages": [                     | JSONDecodeError: .*; each line must be JSON like
chatml   |                                    | JSONDecodeError
chatml   | {"messages": [{"role": "ü"}]}      | UnicodeDecodeError: .* 0xfc
chatml   | ["messages"]                       | AttributeError
chatml   | {"conversation": []}               | KeyError: 'messages'
chatml   | {"messages": [{"from": "human"}]}  | KeyError|template refuses
chatml   | {"messages": [{"role": "user"}]}   | template refuses
chatml   | {"messages": [ME]}                 | the assistant says nothing: roles here are .'user'.;
rewrites | {"messages": [ME, YOU, ME, YOU]}   | cannot mark the assistant's answers
first    | {"messages": [ME, YOU]}            | line 1: TokenizerError: the assistant says nothing
fails    | {"messages": [ME, YOU]}            | line 1: TokenizerError: no
"""


@pytest.mark.parametrize("row", UNFIT.strip().splitlines())
def test_what_will_not_do_is_named_and_nothing_is_written(row, checkpoint, path, tmp_path):
    """The message names the text or the line."""
    kind, content, message = re.split(r" +\| ", row, maxsplit=2)
    content = content.replace("ME", '{"role": "user", "content": "a"}')
    content = content.replace("YOU", '{"role": "assistant", "content": "b"}')
    recipe = "text" if kind == "text" else "chat"
    if recipe == "text":
        char_tokenizer("abc").save(checkpoint)
        path.write_bytes(content.encode("latin-1"))  # where ü is not UTF-8
        if content == "MISSING":
            path.unlink()
    else:
        (checkpoint / "chat_template.jinja").write_text(TEMPLATES[kind])
        write_lines(path, turns("a", "b"))
        path.write_bytes(path.read_bytes() + f"\n{content}\n".encode("latin-1"))
        message = rf"^{path}, (?=line ).*({message})"
    with pytest.raises(SystemExit, match=message):
        prepare(recipe, path, tmp_path / "out", f"--init={checkpoint}")
    assert not (tmp_path / "out").exists()


def test_dialogues_need_a_file_two_lines_and_a_template(checkpoint, tmp_path):
    path = tmp_path / "a.jsonl"

    def refused(message: str):
        with pytest.raises(SystemExit, match=message):
            prepare("chat", path, tmp_path / "out", f"--init={checkpoint}")
        assert not (tmp_path / "out").exists()

    refused("No such file.*a.jsonl")
    path.touch()
    (checkpoint / "chat_template.jinja").write_bytes(b"\xff")
    refused("chat_template.jinja is broken .UnicodeDecodeError.*: restore it")
    (checkpoint / "chat_template.jinja").unlink()
    refused("--init .*checkpoint has no chat template")
    with pytest.raises(SystemExit, match="--init DIR is needed: the chat model"):
        prepare("chat", path, tmp_path / "out")
    (checkpoint / "tokenizer.json").unlink()
    refused("tokenizer.json is missing")


# --------------------------------------------------------------------------------------------------
# Both


def test_they_are_commands_from_any_folder_and_train_names_them(checkpoint, path, tmp_path):
    """Previously `import common` failed if the repo's root was not the current folder."""
    sources = {"text": path, "chat": write_lines(tmp_path / "b", *DIALOGUES[:2])}
    for name, recipe in COMMANDS.items():
        command = [sys.executable, recipe, sources[name], f"--init={checkpoint}", f"--out={name}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        assert len(load_corpus(str(tmp_path / name), ALONE).train) > 20
    if not COMMANDS["chat"].with_name("meta.json").exists():
        with pytest.raises(SystemExit, match=r"from your own files .*data/chat/prepare.py"):
            load_corpus("chat", ALONE)


def test_a_folder_may_be_relative(checkpoint, path, tmp_path, monkeypatch):
    """Previously `--data corpora/notes` was only looked for in this repo's data/."""
    monkeypatch.chdir(tmp_path)
    corpus = prepare("text", path, Path("corpora/notes"), f"--init={checkpoint}")
    assert len(corpus.train) > 20
    assert read_about("corpora/notes")["init"] == str(checkpoint)


def test_a_model_keeps_its_tokenizer(checkpoint, path):
    """
    Previously --out, typed instead of --init, overwrote the chat template in tokenizer_config.json.
    """
    (checkpoint / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(SystemExit, match=r"checkpoint holds a model, .*: choose another --out"):
        prepare("text", path, checkpoint)
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_corpus_that_is_replaced_is_named(checkpoint, path, tmp_path, capsys):
    """
    Previously it was silently overwritten. A corpus of an older version does not know its sources.
    """
    out = tmp_path / "out"
    prepare("text", path, out, f"--init={checkpoint}", str(checkpoint))
    assert "replaces" not in capsys.readouterr().out
    prepare("text", path, out)
    assert capsys.readouterr().out.endswith(
        f"this replaces the corpus made from {checkpoint}, {path}\n"
    )
    (out / "meta.json").write_text('{"dtype": "int32"}')
    prepare("text", path, out)
    assert capsys.readouterr().out.endswith("this replaces the corpus made from other texts\n")


DAMAGE = [("meta.json", "[]"), ("meta.json", "{"), ("train.bin", ""), ("val.bin", None)]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_a_damaged_corpus_is_named(name, content, path, tmp_path):
    prepare("text", path, tmp_path / "out")
    damaged = tmp_path / "out" / name
    damaged.unlink()
    if content is not None:
        damaged.write_text(content)
    with pytest.raises(ValueError, match=r"out is an incomplete corpus \(.*\): recreate it"):
        load_corpus(str(tmp_path / "out"), ALONE)


def test_control_c_ends_a_recipe_with_one_line(tmp_path):
    """It is reading a pipe whose writer sends nothing."""
    pipe = tmp_path / "a.txt"
    os.mkfifo(pipe)
    command = [sys.executable, COMMANDS["text"], pipe]
    recipe = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with open(pipe, "w"):  # returns once it is being read
        recipe.send_signal(signal.SIGINT)
        _, printed = recipe.communicate(timeout=60)
    assert printed == "interrupted\n"


@pytest.mark.parametrize(("name", "count"), [("dialogues", 200), ("held_out", 40)])
def test_our_dialogues_have_one_style(name, count):
    """
    A sentence that answers, an example and a closing line are a style that a small model can learn.
    """
    lines = COMMANDS["chat"].with_name(f"{name}.jsonl").read_text().splitlines()
    style = re.compile(r"[^.!?]+\. For example, [^.!?]+\.\nIn short: ([^ .!?]+ ?){,8}\.")
    for line in lines:
        messages = json.loads(line)["messages"]
        contents = [message["content"] for message in messages]
        assert messages == turns(*contents)
        for answer in contents[1::2]:
            assert style.fullmatch(answer), line
    assert len({*lines}) == count
