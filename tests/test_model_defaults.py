"""
generation_config.json: the defaults of a model's makers apply to a request without its own values,
and never override them. (vLLM's users lost their own temperature to it; elsewhere the file was
never read.)
"""

import json

import pytest
from wires import House

import serve
from params import GENERATION_FIELDS, model_defaults

ALL = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
IDS = {"eos_token_id": [2, 5], "_from_model_config": True, "do_sample": True, "num_beams": 4}


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes a directory with this file, from a text or a dictionary."""

    def make(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(text)
        return str(tmp_path)

    return make


# --------------------------------------------------------------------------------------------------
# The file


SAVED = [(ALL | IDS | {"max_new_tokens": 99}, ALL | {"max_tokens": 99})]
SAVED += [({"top_k": -1}, {"top_k": 0})]  # vLLM has two values that mean all tokens
SAVED += [(dict.fromkeys(GENERATION_FIELDS), {})]


@pytest.mark.parametrize(("saved", "taken"), SAVED)
def test_what_vllm_takes_is_taken(folder, saved, taken):
    """
    The file is read from the model's directory or another one, unless a flag forbids it. The
    defaults are printed.
    """
    place = folder(saved)
    defaults, note = model_defaults(place)
    assert defaults == taken
    assert model_defaults("other", place) == (defaults, note)
    assert model_defaults(place, "vllm") == model_defaults("no/such") == ({}, "")
    values = ", ".join(f"{name} {value}" for name, value in taken.items())
    start = f"{place}/generation_config.json: by default {values} (to ignore this file: "
    assert note.startswith(start) if taken else note == ""


BROKEN = ["", "{", "[]", "5", "null", "[" * 100_000, '"\\ud800']
BROKEN += ['{"temperature": 99}', '{"top_k": -2}', '{"top_p": NaN}', '{"max_new_tokens": -2}']


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_refused(folder, broken):
    """So are values out of range: see test_the_defaults_are_printed_once."""
    place = folder(broken)
    with pytest.raises(ValueError, match=r"generation_config\.json: .*config vllm$"):
        model_defaults(place)
    with pytest.raises(ValueError, match=r"other/generation_config\.json: there is no such file"):
        model_defaults(place, "other")


# --------------------------------------------------------------------------------------------------
# The start


# generation_config.json, what is typed, the terminal's temperature
TEMPERATURES = """
{} | | 0.8
{"temperature": 0.5} | | 0.5
{"temperature": 0.0} | | 0.0
{"temperature": 0.5} | --temperature 0 | 0.0
{"temperature": 0.5} | --temperature 1 | 1.0
{"temperature": 0.5} | --generation-config vllm | 0.8
"""


@pytest.mark.parametrize("row", TEMPERATURES.strip().splitlines())
def test_the_terminals_temperature(folder, row):
    """Previously a typed 0 was taken for not given."""
    saved, typed, temperature = row.split("|")
    args = serve.parse_args(["--model", folder(saved), "--prompt", "x", *typed.split()])
    assert args.temperature == float(temperature)
    assert args.sampling == ({} if "vllm" in typed else json.loads(saved))


def test_the_defaults_are_printed_once(folder, capfd):
    """A wrong value ends the start with one message, before anything is loaded."""
    with pytest.raises(SystemExit) as ended:
        serve.main(["--model", folder({"temperature": 99}), "--chat"])
    assert "temperature is 99; it must be a number from 0" in ended.value.code
    with pytest.raises(SystemExit):
        serve.main(["--model", folder(ALL), "--prompt", "x"])
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors.count("temperature 0.5, top_k 7, top_p 0.75") == 1


# --------------------------------------------------------------------------------------------------
# Over HTTP


def test_a_server_has_them(folder, capfd):
    """The engine and the log get the defaults, except those that the request sets itself."""
    place = folder(ALL | {"max_new_tokens": 30})
    with House("--generation-config", place, "--log-requests") as house:
        house.ask(temperature=0)
    params = house.engine.added["params"]
    assert params == params | ALL | {"temperature": 0, "max_tokens": 4}
    (logged,) = [line for line in capfd.readouterr().err.splitlines() if '"request"' in line]
    logged = json.loads(logged)
    assert logged == logged | ALL | {"temperature": 0}
