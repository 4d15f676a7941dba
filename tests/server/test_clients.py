"""
Clients that others wrote, as their users run them, against serve.py in a process of its own: a
minute, once they are installed (conftest.py). vLLM's own load generator comes only with all of
vLLM.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
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
    """Its output. All that it caches or writes is put into the folder."""
    homes = {"HOME": str(folder), "HF_HOME": str(folder)}
    environment = os.environ | OFFLINE | homes
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def run_script(bin, server, tmp_path):
    """
    Runs lines of Python in the clients' environment, which know `url` and `messages`; returns their
    `result`.
    """

    def run(script: str):
        before = f"import json\nurl = '{server.url}/v1'\n"
        before += "messages = [{'role': 'user', 'content': 'hello'}]\n"
        after = "\nprint(json.dumps(result))\n"
        printed = run_client([bin / "python", "-c", before + script + after], tmp_path)
        return json.loads(printed.splitlines()[-1])

    return run


# --------------------------------------------------------------------------------------------------
# Load generators and evaluations


def test_guidellm_measures_every_request(bin, server, checkpoint, tmp_path):
    """
    Each of its requests was refused for `stream_options.continuous_usage_stats`; the program still
    ended with 0.
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
    """The model's own for the documents, each after an end of text."""
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
    With prompts as text, as its README has it, each began with 7 tokens that spell `<|endoftext|>`
    in place of one: 7.77 bits a byte where the model had 2.10, and nothing said so.
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


def test_litellm_completes_and_streams(run_script):
    script = """
from litellm import completion, text_completion
call = {"api_base": url, "api_key": "none", "max_tokens": 8, "temperature": 0}
whole = completion("openai/tiny", messages, **call)
chunks = list(completion("openai/tiny", messages, stream=True, **call))
other = completion("hosted_vllm/tiny", messages, **call)
text = text_completion("def ", "text-completion-openai/tiny", **call)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
answers = [whole.choices[0].message.content, streamed, other.choices[0].message.content]
counts = [whole.usage.completion_tokens, text.usage.completion_tokens]
result = [answers, *counts, chunks[-1].choices[0].finish_reason]
"""
    answers, tokens, text_tokens, finish_reason = run_script(script)
    assert len(set(answers)) == 1
    assert answers[0]
    assert (tokens, text_tokens, finish_reason) == (8, 8, "length")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "text-completion-openai"])
def test_litellm_knows_a_prompt_that_is_too_long(provider, run_script):
    """
    Its routers shorten the conversation or try a larger model when they see this exception: it
    knows it by words, and ours made it a BadRequestError like any other.
    """
    script = f"""
from litellm import completion, text_completion, ContextWindowExceededError
call = {{"api_base": url, "api_key": "none", "max_tokens": 8}}
long = "def " * 2000
try:
    if "text" in "{provider}":
        text_completion(long, "{provider}/tiny", **call)
    else:
        completion("{provider}/tiny", [{{"role": "user", "content": long}}], **call)
except ContextWindowExceededError as error:
    result = str(error)
"""
    assert "1024" in run_script(script)


def test_openai_lists_retrieves_and_streams(run_script):
    script = """
from openai import OpenAI
client = OpenAI(base_url=url, api_key="none", max_retries=0)
call = {"model": client.models.list().data[0].id, "max_tokens": 8, "temperature": 0}
whole = client.chat.completions.create(messages=messages, **call)
usage = {"include_usage": True}
streaming = {"stream": True, "stream_options": usage}
*chunks, last = client.chat.completions.create(messages=messages, **streaming, **call)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
retrieved = client.models.retrieve("tiny").id
result = [whole.choices[0].message.content, streamed, retrieved, last.usage.completion_tokens]
"""
    whole, streamed, retrieved, tokens = run_script(script)
    assert whole == streamed
    assert whole
    assert (retrieved, tokens) == ("tiny", 8)


# These send tools together with tool_choice or parallel_tool_calls. Our refusal once asked them to
# leave those out, which none of them can do.
TOOL_USERS = {
    "instructor": """
import instructor
from openai import OpenAI
from pydantic import BaseModel

class Person(BaseModel):
    name: str

client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0))
asked = {"model": "tiny", "messages": messages, "response_model": Person, "max_retries": 0}
call = lambda: client.chat.completions.create(**asked)
""",
    "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
agent = Agent(model, model_settings={"max_tokens": 8, "temperature": 0.0})
assert agent.run_sync("hello").output
agent.tool_plain(lambda: "6", name="dice")
call = lambda: agent.run_sync("hello")
""",
    "llama-index": """
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

def add(a: int, b: int) -> int:
    return a + b

settings = {"model": "tiny", "api_base": url, "api_key": "none", "context_window": 1024}
settings |= {"max_tokens": 8}
llm = OpenAILike(is_chat_model=True, is_function_calling_model=True, max_retries=0, **settings)
assert "".join(part.delta for part in llm.stream_chat([ChatMessage(role="user", content="hello")]))
assert OpenAILike(**settings).complete("def ").text
call = lambda: llm.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="hello")
""",
}
CATCH = """
try:
    result = f"no error: {call()!r}"
except Exception as error:
    result = str(error)
"""


@pytest.mark.parametrize("name", TOOL_USERS)
def test_a_refusal_of_tools_is_about_tools(name, run_script):
    said = run_script(TOOL_USERS[name] + CATCH)
    assert "400" in said and "'param': 'tools'" in said, said
