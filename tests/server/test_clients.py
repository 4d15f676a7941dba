"""
Other people's clients, used as their users use them, against serve.py in a separate process. This
takes a minute once they are installed (conftest.py). vLLM's own load generator is not among them,
because it needs all of vLLM.
"""

import json
import math
import os
import re
import socket
import subprocess
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import torch
from callers import save_caller
from processes import ROOT, Process, wait_until

from checkpoint import load_checkpoint
from tokenizer import load_tokenizer

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

pytestmark = pytest.mark.slow


# --------------------------------------------------------------------------------------------------
# A server, and the clients' runs


@pytest.fixture(scope="module")
def server(checkpoint):
    with Process(checkpoint, "--served-model-name", "tiny") as server:
        yield server


def run_client(command: list, folder: Path) -> str:
    """
    Run a client and return its output. Everything that it caches or writes goes into the folder.
    """
    homes = {"HOME": str(folder), "HF_HOME": str(folder)}
    environment = os.environ | OFFLINE | homes
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run(script: str, bin: Path, server: Process, folder: Path):
    """
    Run lines of Python in the clients' environment, where `url` and `messages` are defined, and
    return their `result`.
    """
    before = f"import json\nurl = '{server.url}/v1'\n"
    before += "messages = [{'role': 'user', 'content': 'hello'}]\n"
    after = "\nprint(json.dumps(result))\n"
    printed = run_client([bin / "python", "-c", before + script + after], folder)
    return json.loads(printed.splitlines()[-1])


# --------------------------------------------------------------------------------------------------
# Load generators and evaluations


def test_guidellm_measures_every_request(bin, server, checkpoint, tmp_path):
    """
    Previously each of its requests was refused because of `stream_options.continuous_usage_stats`,
    but the program still exited with 0.
    """
    report = tmp_path / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={server.url},model=tiny",
        "--profile": "kind=concurrent,streams=4",
        "--constraint": "kind=max_requests,count=12",
        "--tokenizer": f"kind=hf_auto,model={checkpoint}",
        "--data": "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--output": f"kind=json,path={report}",
    }
    flags = [part for option in options.items() for part in option]
    run_client([bin / "guidellm", "run", *flags, "--disable-console"], tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}
    assert benchmark["metrics"]["request_totals"] == totals
    assert [request["output_tokens"] for request in benchmark["requests"]["successful"]] == [8] * 12


DOCUMENTS = [
    "def forward(self, x):\n    return self.head(x)\n",
    "for block in blocks:\n    print(block)\n",
]
TASK = """
task: documents
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def bits_per_byte(checkpoint) -> float:
    """Return the model's bits per byte for the documents, each after an end-of-text token."""
    model = load_checkpoint(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    nats = 0.0
    for text in DOCUMENTS:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
        with torch.no_grad():
            _, loss = model(ids[:, :-1], ids[:, 1:])
        nats += loss.item() * (ids.shape[1] - 1)
    return nats / math.log(2) / sum(len(text.encode()) for text in DOCUMENTS)


@pytest.mark.parametrize("tokenized", [False, True])
def test_lm_eval_finds_the_models_bits_per_byte(tokenized, bin, server, checkpoint, tmp_path):
    """
    With prompts as text, as in its README, each used to begin with 7 tokens that spell
    `<|endoftext|>` instead of that one token. The result was 7.77 bits per byte where the model had
    2.10, without any warning.
    """
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    (tmp_path / "documents.yaml").write_text(TASK.format(file=documents))
    address = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={checkpoint}"
    command = [bin / "lm_eval", "--model", "local-completions", "--tasks", "documents"]
    command += ["--include_path", tmp_path]
    limits = f"tokenized_requests={tokenized},max_length=1024,max_retries=1"
    command += ["--model_args", f"{address},{limits}"]
    run_client([*command, "--output_path", tmp_path / "results"], tmp_path)
    (results,) = (tmp_path / "results").rglob("results_*.json")
    measured = json.loads(results.read_text())["results"]["documents"]["bits_per_byte,none"]
    assert measured == pytest.approx(bits_per_byte(checkpoint), rel=1e-4)


# --------------------------------------------------------------------------------------------------
# Libraries


def test_litellm_completes_streams_and_knows_a_prompt_that_is_too_long(bin, server, tmp_path):
    """
    Its routers shorten the conversation or try a larger model when they see its exception, which is
    recognised by the message. Previously our message made it an ordinary BadRequestError.
    """
    script = """
from litellm import completion, text_completion, ContextWindowExceededError
call = {"api_base": url, "api_key": "none", "max_tokens": 8, "temperature": 0}
whole = completion("openai/tiny", messages, **call)
chunks = list(completion("openai/tiny", messages, stream=True, **call))
other = completion("hosted_vllm/tiny", messages, **call)
text = text_completion("def ", "text-completion-openai/tiny", **call)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
answers = [whole.choices[0].message.content, streamed, other.choices[0].message.content]
counts = [whole.usage.completion_tokens, text.usage.completion_tokens]
long = "def " * 2000
refused = {}
for provider in ("openai", "hosted_vllm", "text-completion-openai"):
    try:
        if "text" in provider:
            text_completion(long, f"{provider}/tiny", **call)
        else:
            completion(f"{provider}/tiny", [{"role": "user", "content": long}], **call)
    except ContextWindowExceededError as error:
        refused[provider] = "1024" in str(error)
result = [answers, *counts, chunks[-1].choices[0].finish_reason, refused]
"""
    answers, *ends, refused = run(script, bin, server, tmp_path)
    assert len(set(answers)) == 1
    assert answers[0]
    assert ends == [8, 8, "length"]
    assert [*refused.values()] == [True] * 3


# --------------------------------------------------------------------------------------------------
# Answers by schema, and tools: the model is random, so only the grammar makes answers fit

PERSON = """
from typing import Annotated, Literal
from pydantic import BaseModel, Field

class Person(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    age: Literal[1, 20, 300]
    pets: Annotated[list[Literal["cat", "dog"]], Field(max_length=2)]

def check(person):
    assert isinstance(person, Person), repr(person)
    return [person.age in (1, 20, 300), len(person.name) <= 8, len(person.pets) <= 2]

call = {"max_tokens": 400, "seed": 3}
function = {"name": "Person", "parameters": Person.model_json_schema()}
tool = {"type": "function", "function": function}
named = {"tool_choice": {"type": "function", "function": {"name": "Person"}}}
begins = {"logit_bias": {"257": 100}, "parallel_tool_calls": False}
ends = {"256": 4}  # a bias
thinks = False
"""
SCHEMA_USERS = {
    "openai": """
from openai import OpenAI, pydantic_function_tool
client = OpenAI(base_url=url, api_key="none", max_retries=0)
call |= {"model": "tiny", "messages": messages}
parsed = client.chat.completions.parse(response_format=Person, **call)
result = check(parsed.choices[0].message.parsed)
with client.chat.completions.stream(response_format=Person, **call) as stream:
    result += check(stream.get_final_completion().choices[0].message.parsed)
tools = [pydantic_function_tool(Person)]
parsed = client.chat.completions.parse(tools=tools, tool_choice="required", **call)
result += check(parsed.choices[0].message.tool_calls[0].function.parsed_arguments)
with client.chat.completions.stream(tools=tools, **begins, **call) as stream:
    message = stream.get_final_completion().choices[0].message
result += check(message.tool_calls[0].function.parsed_arguments)
""",
    "instructor": """
import instructor
from openai import OpenAI
result = []
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(client, mode=mode)
    asked = {"model": "tiny", "messages": messages, "response_model": Person, "max_retries": 0}
    result += check(client.chat.completions.create(**asked, **call))
""",
    "pydantic-ai": """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
call |= {"temperature": 2.0, "parallel_tool_calls": False}
agent = Agent(model, output_type=NativeOutput(Person), model_settings=call)
result = check(agent.run_sync("hi").output)
thrown = []
agent = Agent(model, output_type=Person, model_settings=call)
agent.tool_plain(lambda: thrown.append(6) or "6", name="dice")
for seed in range(9):  # it answers, or throws dice and goes on with what came
    call["seed"] = seed
    result += check(agent.run_sync("hi", model_settings=call).output)
result.append(bool(thrown))
""",
    "litellm": """
from litellm import completion
call |= {"api_base": url, "api_key": "none", "messages": messages}
result = []
for model in ("openai/tiny", "hosted_vllm/tiny"):
    said = completion(model, response_format=Person, **call).choices[0].message.content
    result += check(Person.model_validate_json(said))
    for way in ({"tool_choice": "required"}, named, begins):
        (one, *_) = completion(model, tools=[tool], **way, **call).choices[0].message.tool_calls
        result += check(Person.model_validate_json(one.function.arguments))
chunks = completion(model, tools=[tool], stream=True, **begins, **call)
calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
assert calls[0].function.name == "Person"
result += check(Person.model_validate_json("".join(c.function.arguments for c in calls)))
""",
    "llama-index": """
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
settings = {"model": "tiny", "api_base": url, "api_key": "none", "context_window": 8192}
settings |= {"max_tokens": 400, "is_chat_model": True, "is_function_calling_model": True}
llm = OpenAILike(max_retries=0, **settings)
tools = [FunctionTool.from_defaults(Person, name="Person", fn_schema=Person)]
said = llm.chat_with_tools(tools, user_msg="hello", tool_required=True)
(one, *_) = llm.get_tool_calls_from_response(said)
result = check(Person(**one.tool_kwargs))
""",
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    folder = tmp_path_factory.mktemp("caller")
    save_caller(folder)
    with Process(folder, "--served-model-name", "tiny") as server:
        yield server


@pytest.mark.parametrize("name", SCHEMA_USERS)
def test_answers_and_calls_fit_their_schemas(name, bin, caller, tmp_path):
    result = run(PERSON + SCHEMA_USERS[name], bin, caller, tmp_path)
    assert result
    assert all(result)


# Conversations of four turns, each with a call and its result. `streamed` is defined.
TURNS = {
    "openai": """
from openai import OpenAI, pydantic_function_tool
client = OpenAI(base_url=url, api_key="none", max_retries=0)
call |= {"model": "tiny", "messages": messages, "tools": [pydantic_function_tool(Person)]}
result = []
for turn in range(5):
    last = {"tool_choice": "none", "logit_bias": ends}
    last = call | (last if turn == 4 else begins)
    if streamed:
        with client.chat.completions.stream(**last) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(**last).choices[0].message
    messages.append(message)
    for one in message.tool_calls or ():
        result += check(one.function.parsed_arguments)
        messages.append({"role": "tool", "tool_call_id": one.id, "content": "6"})
result.append(thinks == any(getattr(message, "reasoning_content", 0) for message in messages))
""",
    "instructor": """
import instructor
from openai import OpenAI
client = OpenAI(base_url=url, api_key="none", max_retries=0)
client = instructor.from_openai(client, mode=instructor.Mode.TOOLS)

class Person(Person, extra="forbid"):
    pass

call |= {"model": "tiny", "messages": messages, "response_model": Person, "max_retries": 0}
result = []
for turn in range(4):
    if streamed:
        *_, person = client.chat.completions.create_partial(**call)
        result += [person.age in (1, 20, 300)]
        function = {"name": "Person", "arguments": person.model_dump_json()}
        one = {"id": "a", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [one]})
    else:
        person, whole = client.chat.completions.create_with_completion(**call)
        result += check(person)
        messages.append(whole.choices[0].message.model_dump())
        one = whole.choices[0].message.tool_calls[0].model_dump()
    messages.append({"role": "tool", "tool_call_id": one["id"], "content": "6"})
""",
    "pydantic-ai": """
import asyncio
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
agent = Agent(model, output_type=Person, model_settings=call | {"parallel_tool_calls": False})
agent.tool_plain(lambda: "6", name="dice")
result = []

async def talk():
    history = []
    for turn in range(4):
        settings = call | {"seed": turn, "temperature": 2.0}
        options = {"message_history": history, "model_settings": settings}
        if streamed:
            async with agent.run_stream("hi", **options) as run:
                result.extend(check(await run.get_output()))
        else:
            run = await agent.run("hi", **options)
            result.extend(check(run.output))
        history = run.all_messages()

asyncio.run(talk())
""",
    "langchain": """
from functools import reduce
from operator import add
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_retries=0, **call)
held = llm.bind_tools([Person], strict=True, **begins)
history = [HumanMessage("hi")]
result = []
for turn in range(5):
    model = llm if turn == 4 else held
    said = reduce(add, model.stream(history)) if streamed else model.invoke(history)
    history.append(said)
    for one in said.tool_calls:
        result += check(Person.model_validate(one["args"]))
        history.append(ToolMessage("6", tool_call_id=one["id"]))
""",
}


# A model whose prompt opens its thoughts, and which soon closes them.
THINKS = """
thinks = True
ends["260"] = 4
call["logit_bias"] = begins.pop("logit_bias") | {"260": 4}
"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker")
    save_caller(folder, dict.fromkeys(["<tool_call>", "</tool_call>", "<think>", "</think>"], True))
    with open(folder / "chat_template.jinja", "a") as template:
        template.write("{{ '<think>\\n' }}{# </think> #}")
    with Process(folder, "--served-model-name", "tiny") as server:
        yield server


@pytest.mark.parametrize("name", TURNS)
def test_a_conversation_goes_on_after_calls(name, bin, caller, thinker, tmp_path):
    """
    It also continues after thoughts. Would catch: an answer in the library's own form that is
    refused as history. One process runs all four conversations, because importing the library takes
    most of the time.
    """
    scripts = {
        (server.url, streamed): f"{PERSON}\n{thinks}\nstreamed = {streamed}\n{TURNS[name]}"
        for server, thinks in ((caller, ""), (thinker, THINKS))
        for streamed in (False, True)
    }
    every = f"""
result = []
for (url, streamed), script in {scripts}.items():
    print("streamed:", streamed, "by", url)
    names = {{"url": url + "/v1", "messages": list(messages)}}
    exec(script, names)
    result.append(names["result"])
"""
    results = run(every, bin, caller, tmp_path)
    assert all(len(result) >= 4 and all(result) for result in results), results


# --------------------------------------------------------------------------------------------------
# Agents behind a gateway

KEY = "sk-alpha"  # the gateway's


@pytest.fixture(scope="module")
def gateway(bin, caller, tmp_path_factory):
    """Return the address of LiteLLM's proxy before the caller, as in examples/gateway.yaml."""
    folder = tmp_path_factory.mktemp("gateway")
    config = (ROOT / "examples/gateway.yaml").read_text()
    for text, own in ("http://127.0.0.1:8000", caller.url), ("openai/chat", "openai/tiny"):
        assert config.count(text) == 1
        config = config.replace(text, own)
    (folder / "gateway.yaml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [bin / "litellm", "--config", "gateway.yaml"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | OFFLINE | {"HOME": str(folder), "LITELLM_MASTER_KEY": KEY}
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        with suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health/readiness").is_success
        return False

    try:
        wait_until(is_ready, 0.2)
        yield url
    finally:
        process.kill()
        process.wait(10)


# Each asks for a text and for a call, whole and as a stream. Then it sends the call's result and,
# last, a prompt that is too long. `url` is the server's, `gateway` the gateway's.
AGENT = """
import httpx

city = {"enum": ["x", "y"]}
schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
schema["additionalProperties"] = False
function = {"name": "weather", "description": "of a city", "parameters": schema}


def count(function, called):
    "Return the length of the prompt, asked without the gateway."
    call = {"id": called.pop("id"), "type": "function", "function": called}
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    talk.append({"role": "assistant", "tool_calls": [call]})
    talk.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
    body = {"messages": talk, "tools": [{"type": "function", "function": function}]}
    return httpx.post(url.replace("/v1", "/tokenize"), json=body).json()["count"]
"""
AGENTS = {
    "responses": """
from openai import BadRequestError, OpenAI
client = OpenAI(base_url=f"{gateway}/v1", api_key=key, max_retries=0)
call = {"model": "any", "instructions": "Be brief.", "temperature": 0, "store": False}
call |= {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
call |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "a"}
function["strict"] = False
call["tools"] = [{"type": "function"} | function, {"type": "web_search"}]
call["parallel_tool_calls"] = False
said = [{"type": "input_text", "text": "hello"}]
history = [{"type": "message", "role": "user", "content": said}]


def ask(**fields):
    whole = client.responses.create(input=history, **call, **fields)
    *_, last = client.responses.create(input=history, stream=True, **call, **fields)
    return [whole, last.response]


texts = [one.output_text for one in ask(tool_choice="none", max_output_tokens=8)]
calls = [one.output[-1] for one in ask(tool_choice="required")]
called = {"type": "function_call", "name": calls[0].name, "arguments": calls[0].arguments}
history += [called | {"call_id": calls[0].call_id}]
history += [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}]
counts = [one.usage.input_tokens for one in ask(max_output_tokens=8)]
del called["type"]
counts.append(count(function, called | {"id": calls[0].call_id}))
calls = [[one.name, json.loads(one.arguments)] for one in calls]
refused = []
for stream in (False, True):
    try:
        list(client.responses.create(model="any", input="def " * 9000, stream=stream))
    except BadRequestError as error:
        refused.append(str(error))
result = [texts, calls, counts, refused]
""",
    "messages": """
from anthropic import Anthropic, BadRequestError
client = Anthropic(base_url=gateway, api_key=key, max_retries=0)
cached = {"cache_control": {"type": "ephemeral"}}
call = {"model": "any", "metadata": {"user_id": "a"}, "extra_body": {"temperature": 0}}
call["system"] = [{"type": "text", "text": "Be brief."} | cached]
call["output_config"] = {"effort": "low"}
schemed = function | {"input_schema": function["parameters"]}
del schemed["parameters"]
call["tools"] = [schemed | cached, {"type": "web_search_20250305", "name": "web_search"}]
history = [{"role": "user", "content": [{"type": "text", "text": "hello"} | cached]}]


def ask(max_tokens=300, **fields):
    asked = call | {"max_tokens": max_tokens, "messages": history} | fields
    with client.messages.stream(**asked) as stream:
        return [client.messages.create(**asked), stream.get_final_message()]


texts = [one.content[0].text for one in ask(8, tool_choice={"type": "none"})]
named = {"type": "tool", "name": "weather"}
calls = [one.content[-1] for one in ask(tool_choice=named)]
used = {"type": "tool_use", "id": calls[0].id, "name": calls[0].name, "input": calls[0].input}
result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"}
history += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
usages = [one.usage for one in ask(8)]
counts = [one.input_tokens + (one.cache_read_input_tokens or 0) for one in usages]
called = {"name": calls[0].name, "arguments": json.dumps(calls[0].input), "id": calls[0].id}
counts.append(count(function, called))
calls = [[one.name, one.input] for one in calls]
refused = []
long = [{"role": "user", "content": "def " * 9000}]
for stream in (False, True):
    try:
        list(client.messages.create(model="any", messages=long, max_tokens=8, stream=stream))
    except BadRequestError as error:
        refused.append(str(error))
result = [texts, calls, counts, refused]
""",
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_talks_and_calls_through_a_gateway(name, bin, caller, gateway, tmp_path):
    """
    The calls have the forms that agents use, and the fields that they send. Would catch: a result
    that the template never saw; a call that is only read when whole; an error without a reason.
    """
    names = f"gateway, key = {gateway!r}, {KEY!r}\n"
    texts, calls, counts, refused = run(names + AGENT + AGENTS[name], bin, caller, tmp_path)
    assert texts[0] and texts[0] == texts[1]
    assert calls[0] == calls[1] and calls[0] in [["weather", {"city": city}] for city in "xy"]
    assert len(counts) == 3 and len(set(counts)) == 1
    assert ["maximum context length is 8192" in words for words in refused] == [True, True]


def count(server: Process, metric: str) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    return int(float(re.search(rf"\n{metric}\S* (\S+)", text)[1]))


LEAKS = "litellm[mcp,proxy]==1.108." in (ROOT / "tests/clients.txt").read_text()
WHY = "needs LiteLLM 1.109: before, Python's garbage collector decided when this stream is closed"


@pytest.mark.parametrize(
    "path, stream",
    [
        ("responses", False),
        ("responses", True),
        ("messages", False),
        pytest.param("messages", True, marks=pytest.mark.skipif(LEAKS, reason=WHY)),
    ],
)
def test_a_hang_up_goes_through_a_gateway(path, stream, caller, gateway):
    """
    Without `cancel_on_disconnect`, whole answers were computed to their end. Streams do not need
    it. LiteLLM itself must close them, which for /v1/messages it once did only by chance.
    """
    aborted = 'vllm:request_success_total{finished_reason="abort"'
    before = count(caller, aborted)
    said = [{"role": "user", "content": "hi"}]
    own = {"responses": {"input": said, "max_output_tokens": 8000}}
    own["messages"] = {"messages": said, "max_tokens": 8000}
    body = {"model": "any", "stream": stream, "ignore_eos": True} | own[path]
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with closing(HTTPConnection(gateway.removeprefix("http://"))) as connection:
        connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
        wait_until(lambda: count(caller, "vllm:num_requests_running") == 1)
        if stream:
            connection.getresponse().read(1)
    wait_until(lambda: count(caller, aborted) == before + 1)
