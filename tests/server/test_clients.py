"""
Other people's clients, used as their users use them, against serve.py in a separate process. This
takes a minute once they are installed (conftest.py). vLLM's own load generator is not among them,
because it needs all of vLLM.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from callers import save_caller
from processes import Process

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
