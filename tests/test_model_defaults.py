"""
generation_config.json: what a model's makers want for defaults holds where a request does not say,
and never against what it says; what of it is not understood is told. (vLLM's users lost their own
temperature to it, others' never saw the file read.)
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from server import ROOT, Server, ask
from test_flags import SPELL, OneAnswer
from test_protocol import HELLO, parse

import serve
from serving import api, params, terminal
from serving.params import RANGES, model_defaults
from serving.protocol import ApiError, ChatRequest, CompletionRequest, TokenizeRequest

QWEN = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip
ALL = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}


@pytest.fixture
def folder(tmp_path):
    """Makes a directory with such a file, of a text or a dictionary."""

    def make(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(text)
        return str(tmp_path)

    return make


def flags(*more):
    return serve.parse_args([*more, "--port", "0"])


# --------------------------------------------------------------------------------------------------
# The file


def test_what_vllm_takes_is_taken(folder):
    assert model_defaults(folder(QWEN))[0] == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    taken, _ = model_defaults(folder(ALL | {"max_new_tokens": 99}))
    assert taken == ALL | {"max_tokens": 99}


def test_without_a_file_and_with_one_of_ids_alone_there_is_nothing_to_tell(folder, tmp_path):
    """Most files are such."""
    assert model_defaults(tmp_path) == model_defaults("no/such") == ({}, "")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "_from_model_config": True}
    assert model_defaults(folder(ids | {"transformers_version": "5"})) == ({}, "")


def test_null_is_not_given(folder):
    assert model_defaults(folder(dict.fromkeys(params.TAKEN) | {"num_beams": None})) == ({}, "")


def test_what_is_taken_is_told_with_the_flag_against_it(folder):
    place = folder(QWEN)
    assert model_defaults(place)[1] == (
        f"{place}/generation_config.json: where a request does not say, temperature 0.6, top_k 20, "
        "top_p 0.95 (--generation-config vllm: without this file)"
    )


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"num_beams": 4}, "num_beams 4"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size 1"),
        ({"bad_words_ids": [[1], [2]]}, "bad_words_ids [[1], [2]]"),
        ({"suppress_tokens": [*range(99)]}, "suppress_tokens [0, 1, 2, 3, 4, 5, ...]"),
        ({"do_sample": False}, "do_sample False"),  # in transformers: greedy
        ({"forced_eos_token_id": 5}, "forced_eos_token_id 5"),
        ({"min_new_tokens": 1}, "min_new_tokens 1"),
        ({"a_new_way": 0.5, "typical_p": 0.9}, "a_new_way 0.5, typical_p 0.9"),
        ({"\x1b[2J": "\x1b[2J"}, r"\x1b[2J '\x1b[2J'"),  # would clear a terminal
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "bad_words_ids": [], "do_sample": True}, None),
        ({"length_penalty": 1.0, "early_stopping": False, "min_length": 0}, None),
        ({"use_cache": False, "cache_implementation": "hybrid", "output_scores": True}, None),
    ],
)
def test_what_is_not_understood_is_told(folder, saved, told):
    """Transformers would give another answer, and nobody would know why."""
    defaults, note = model_defaults(folder(saved))
    assert defaults == {}
    if told is None:
        assert note == ""
    else:
        assert f": not applied, {told} (--" in note
    _, note = model_defaults(folder(saved | {"top_k": 5}))
    assert "does not say, top_k 5" in note and (told is None or f"; not applied, {told} (" in note)


@pytest.mark.parametrize("name", params.TAKEN)
def test_values_out_of_range_are_refused(folder, name):
    ours = "max_tokens" if name == "max_new_tokens" else name
    for value in (99 if name == "temperature" else -2, "1", True, [1], float("nan")):
        with pytest.raises(ValueError) as raised:
            model_defaults(folder({name: value}))
        message = str(raised.value)
        assert f"generation_config.json: {ours} is {value!r}, not {RANGES[ours].wanted}" in message
        assert message.endswith("leave it out with --generation-config vllm")


def test_top_k_has_vllms_second_word_for_all(folder):
    assert model_defaults(folder({"top_k": -1}))[0] == {"top_k": 0}


@pytest.mark.parametrize("broken", ["", "{", "[]", "5", "null", "[" * 100_000, '"\\ud800'])
def test_a_broken_file_is_refused(folder, broken):
    place = folder(broken)
    with pytest.raises(ValueError, match=r"generation_config\.json is broken .*config vllm$"):
        model_defaults(place)
    assert model_defaults(place, "vllm") == ({}, "")


def test_a_flag_says_whose_file(folder, tmp_path):
    place = folder(QWEN)
    assert model_defaults(place, "vllm") == ({}, "")
    assert model_defaults("other", place) == model_defaults(place, "auto") != ({}, "")
    with pytest.raises(ValueError, match="there is no other/generation_config"):
        model_defaults(place, "other")


# --------------------------------------------------------------------------------------------------
# The start


def test_flags_bring_them_to_every_process(folder):
    place = folder(ALL)
    assert flags("--model", place).sampling == ALL
    assert flags("--model", "no/such", "--generation-config", place).sampling == ALL
    ignored = flags("--model", place, "--generation-config", "vllm")
    assert (ignored.sampling, ignored.sampling_note) == ({}, "")


def test_a_wrong_value_ends_the_start_with_one_message(folder):
    """Before anything is loaded, at the terminal as for HTTP."""
    for more in [], ["--prompt", "x"], ["--chat"]:
        with pytest.raises(SystemExit) as ended:
            serve.main(["--model", folder({"temperature": 99}), *more])
        assert "temperature is 99, not a number from 0 (greedy) to 2" in ended.value.code


@pytest.mark.parametrize(
    ("saved", "typed", "temperature"),
    [({}, [], 0.8), ({"temperature": 0.5}, [], 0.5), ({"temperature": 0.0}, [], 0.0),
     ({"temperature": 0.5}, ["--temperature", "0"], 0.0),
     ({"temperature": 0.5}, ["--temperature", "1"], 1.0)],
)  # fmt: skip
def test_the_terminals_temperature(folder, saved, typed, temperature):
    """A 0 that is typed was taken for not given."""
    args = flags("--model", folder(saved), "--prompt", "x", *typed)
    assert args.temperature == temperature


def test_what_was_taken_is_told_once(folder):
    """On stderr, by one process."""
    command = [sys.executable, "serve.py", "--model", folder(QWEN), "--prompt", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("temperature 0.6, top_k 20, top_p 0.95") == 1
    assert "no tokenizer" in done.stderr


# --------------------------------------------------------------------------------------------------
# At the terminal


@pytest.mark.parametrize(
    ("saved", "typed", "wanted"),
    [
        ({}, [], {"temperature": 0.8, "max_tokens": 200}),
        (ALL, [], ALL | {"max_tokens": 200}),
        (ALL, ["--temperature", "0"], ALL | {"temperature": 0, "max_tokens": 200}),
        ({"max_new_tokens": 300}, [], {"temperature": 0.8, "max_tokens": 300}),
        ({"max_new_tokens": 10**6}, [], {"temperature": 0.8, "max_tokens": 997}),
        ({"max_new_tokens": 3}, ["--max-tokens", "5"], {"temperature": 0.8, "max_tokens": 5}),
    ],
)
def test_the_terminal_has_them(folder, monkeypatch, capsys, saved, typed, wanted):
    made = SimpleNamespace(encode=lambda text: [1, 2, 3], close=lambda: None, tokenizer=SPELL)
    monkeypatch.setattr(terminal, "open_encoder", lambda args: (made, False))
    args, engine = flags("--model", folder(saved), "--prompt", "abc", *typed), OneAnswer()
    terminal.continue_prompt(args, lambda args: engine)
    assert {name: getattr(engine.params, name) for name in wanted} == wanted


# --------------------------------------------------------------------------------------------------
# Over HTTP


def test_a_request_goes_before_them():
    """Down to a 0, and to vLLM's own defaults; null is not given."""
    for kind, own in (CompletionRequest, {"prompt": "p"}), (ChatRequest, {"messages": HELLO}):
        for name, value in ALL.items():
            neutral = {"temperature": 0, "top_k": 0, "min_p": 0}.get(name, 1)
            for given, taken in ({}, value), ({name: None}, value), ({name: neutral}, neutral):
                body = kind.model_validate(own | given, context=ALL)
                assert getattr(body, name) == taken
                assert body.sampling_params(1, 99)[name] == taken
    assert TokenizeRequest.model_validate({"prompt": "p"}, context=ALL).prompt == "p"
    with pytest.raises(ApiError, match="prompt must be"):
        CompletionRequest.model_validate({"prompt": 5}, context=ALL)


@pytest.mark.parametrize(
    ("fields", "length"),
    [({}, 30), ({"max_tokens": None}, 30), ({"max_tokens": 50}, 50), ({"max_tokens": 3}, 3),
     ({"max_completion_tokens": 50}, 50), ({"min_tokens": 40}, 40)],
)  # fmt: skip
def test_the_length_of_a_chat(fields, length):
    """The file's is a default, no limit for what is asked for; in a full context it is less."""
    context = {"max_tokens": 30}
    chat = ChatRequest.model_validate({"messages": HELLO} | fields, context=context)
    chat.check_fits([[1] * 50], 300, 100)
    assert chat.sampling_params(50, 100)["max_tokens"] == length
    room = ChatRequest.model_validate({"messages": HELLO}, context=context)
    room.check_fits([[1] * 90], 300, 100)
    assert room.sampling_params(90, 100)["max_tokens"] == 10


def test_the_length_of_a_completion_is_openais():
    """In vLLM, too, the 16 of a request that names none goes before the file."""
    body = CompletionRequest.model_validate({"prompt": "p"}, context={"max_tokens": 30})
    assert body.sampling_params(1, 99)["max_tokens"] == parse().max_tokens == 16


def test_a_server_has_them(folder, chat, capfd):
    """What the engine is told, what the log and /openapi.json say."""
    place = folder(ALL | {"max_new_tokens": 30})
    directory = chat.service.encoder.directory
    more = ["--generation-config", place, "--log-requests"]
    with Server(*more, directory=directory) as server:
        server.answer(temperature=0)
        assert ask(server, top_k=0).status_code == 200
        schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    text, talk = (message["params"] for message in server.engine.added)
    assert text == text | ALL | {"temperature": 0, "max_tokens": 1000}
    assert talk == talk | ALL | {"top_k": 0, "max_tokens": 30}
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "{" in line]
    one, other = (line for line in logged if line["event"] == "request")
    assert one == one | ALL | {"temperature": 0} and other == other | ALL | {"top_k": 0}
    for name in "CompletionRequest", "ChatRequest":
        described = schemas[name]["properties"]
        assert {name: described[name]["default"] for name in ALL} == ALL
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["default"] == 16
    assert api.openapi(api.Service.routes, {}) != api.openapi(api.Service.routes, ALL)
