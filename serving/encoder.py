"""
Texts and conversations -> token ids, and back, without blocking the event loop.

    encoder = Encoder("out/stdlib")
    ids = encoder.encode("def ")                   # blocks; `await encoder.ask(..)` does not
    ids = encoder.encode_chat([{"role": "user", "content": "hello"}])

Short texts are encoded in place. Long ones and all chat templates go to a process of their own,
because both hold Python's interpreter lock (GIL). It starts with the first job that needs it,
imports no torch, and does one job after the other. A job that takes too much time or memory ends
the process; its client gets an error, and the next job starts another one. `python -m
serving.encoder DIRECTORY FILE_DESCRIPTOR` is that process. It may run a hostile template, so no
pickles come from it.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from serving.chat import Chat, load_chat, read_template
from tokenizer import Tokenizer, TokenizerError, load_tokenizer, token_name

ROOT = Path(__file__).parents[1]
# Encoding takes 0.1 to 2 us a character, whatever the text: for 1,024 or so many ids at most 2 ms.
SHORT = 1024
JOB_SECONDS = 20  # of CPU time for one job: 4 MiB, the largest body, take 1 to 10
JOB_MEMORY = 2**31  # bytes that a job may take: 4 MiB take 0.3 to 1.2 GiB
TOO_LARGE = f"takes more than {JOB_MEMORY >> 20} MiB to encode or render: shorten it"
MAX_WAITING = 2**26  # characters and ids of all jobs not yet done: they are held in memory here
MAX_NAMES = 2**18  # tokens that one answer names: 4 million would take a minute


class EncoderBusy(RuntimeError):
    """Too much is waiting to be encoded."""


class Encoder:
    """
    A checkpoint's tokenizer and chat template, and the process for long jobs. `variables` are those
    of the template that a conversation does not give itself. Raises TokenizerError.
    """

    def __init__(
        self,
        directory: str | Path,
        tokenizer: Tokenizer | None = None,
        variables: dict | None = None,
    ):
        self.directory = directory
        self.tokenizer = tokenizer or load_tokenizer(directory)
        self.has_chat = read_template(directory) is not None
        self.variables = variables or {}
        if variables and not self.has_chat:
            raise TokenizerError(
                f"--default-chat-template-kwargs: {directory} has no chat template, leave it out"
            )
        self.waiting = 0  # characters and ids
        self.thread = ThreadPoolExecutor(1)  # asks the process, one job after the other
        self.process: subprocess.Popen | None = None
        self.link: Connection | None = None

    def check(self):
        """
        Raises TokenizerError for a chat template that is broken. Even compiling it may compute
        without end, so the process does that.
        """
        if self.has_chat:
            self.thread.submit(self._start).result()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """
        Token ids of a raw prompt, by default with the BOS of a tokenizer that has one; the name of
        a control token in it becomes that token. Blocks. Raises TokenizerError.
        """
        job = {"texts": [text], "add_special_tokens": add_special_tokens}
        return read_ids(*asyncio.run(self.ask(job)))[0]

    def encode_chat(self, messages: list[dict], /, **options) -> list[int]:
        """
        Token ids of a conversation: [{"role", "content"}, ..], and variables of the template.
        """
        return read_ids(*asyncio.run(self.ask(self.chat_job(messages, **options))))[0]

    def chat_job(self, messages: list[dict], /, **options) -> dict:
        """The job that encodes a conversation."""
        return {"messages": messages, "options": self.variables | options}

    async def ask(self, job: dict) -> tuple[dict, bytes]:
        """
        What `do_job` makes of a job. Raises TokenizerError for what the client can change, a job
        that takes too much time or memory included, EncoderBusy if too much waits already, and
        RuntimeError if the process dies.
        """
        if self.is_short(job):
            return do_job(job, self.tokenizer, None)
        size = size_of(job)
        if self.waiting + size > MAX_WAITING:
            raise EncoderBusy("too much text is waiting to be encoded: try again later")
        self.waiting += size
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.thread, self._exchange, job)
        finally:
            self.waiting -= size

    def close(self):
        """End the process, even in the middle of a job."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        process = self.process  # the thread sets it to None when the process has ended
        if process:
            process.kill()
            process.wait()

    def is_short(self, job: dict) -> bool:
        """
        Whether a job takes at most 2 ms. That is not known of a chat template, which is a program,
        nor of a regular expression that the checkpoint brings.
        """
        if "messages" in job or not self.tokenizer.has_known_pattern:
            return False
        # beside its characters, each text costs a call: as much as some 16 characters
        return size_of(job) + 16 * len(job.get("texts", ())) <= SHORT

    def _exchange(self, job: dict) -> tuple[dict, bytes]:
        """Have the process do a job."""
        if self.process is None:
            self._start()
        data = json.dumps(job, ensure_ascii=False).encode("utf-8", "surrogatepass")
        with contextlib.suppress(OSError):  # the process has ended: `_receive` raises why
            self.link.send_bytes(data)
        head, data = self._receive("this")
        if "error" in head:
            raise TokenizerError(head["error"])
        return head, data

    def _start(self):
        """Start the process and wait until it has read the checkpoint."""
        self.link, theirs = Pipe()
        directory = str(Path(self.directory).resolve())
        command = [sys.executable, "-m", "serving.encoder", directory, str(theirs.fileno())]
        # in a session of its own, so that Ctrl-C at the terminal does not reach it
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], start_new_session=True, cwd=ROOT
        )
        theirs.close()
        what = f"reading the tokenizer and chat template of {self.directory}"
        head, _ = self._receive(what)
        if "error" in head:
            self._reap(what)
            raise TokenizerError(head["error"])

    def _receive(self, what: str) -> tuple[dict, bytes]:
        """The process's reply to a job; `what` the job is, for the message if it ends instead."""
        try:
            return json.loads(self.link.recv_bytes()), self.link.recv_bytes()
        except (EOFError, OSError):
            raise self._reap(what) from None

    def _reap(self, what: str) -> Exception:
        """Wait for the end of the process. Returns the exception that says why it ended."""
        self.link.close()
        code = self.process.wait()
        self.process = self.link = None
        if code == -signal.SIGPROF:
            limit = f"{JOB_SECONDS} s of CPU time"
            return TokenizerError(f"{what} takes more than {limit} to encode or render: shorten it")
        if code == -signal.SIGABRT:  # how the `tokenizers` library ends where memory does
            return TokenizerError(f"{what} {TOO_LARGE}")
        return RuntimeError(f"the encoding process ended (exit code {code})")


# --------------------------------------------------------------------------------------------------
# The work, here or in the process


def size_of(job: dict) -> int:
    """How many characters, or ids, a job has."""
    fields = chain.from_iterable(map(dict.values, job.get("messages", ())))
    return sum(map(len, job.get("texts", fields))) + len(job.get("tokens", ()))


def do_job(job: dict, tokenizer: Tokenizer, chat: Chat | None) -> tuple[dict, bytes]:
    """
    Do one job. Returns a small dictionary and bulk data. Raises TokenizerError.

        {"texts": [..]} or {"messages": [..], "options": {..}}
                                -> {"counts": tokens of each text}, all their ids as uint32;
                                   no ids if a text has more tokens than "limit"
        the same and "add_special_tokens": whether to add the BOS of a tokenizer that has one
        the same and "answer": fields, with "names": whether to name the tokens
                                -> {}, the JSON of /tokenize
        {"tokens": [..]}        -> {}, the JSON of /detokenize
    """
    if "tokens" in job:
        text = tokenizer.decode(job["tokens"], skip_special_tokens=False)
        return {}, json.dumps({"prompt": text}, ensure_ascii=False).encode()
    add = job.get("add_special_tokens", False)
    if "messages" in job:
        ids = [chat.encode(job["messages"], add, **job["options"])]
    else:
        ids = [tokenizer.encode(text, True, add_special_tokens=add) for text in job["texts"]]
    if "answer" in job:
        return {}, tokenize_answer(ids[0], tokenizer, **job["answer"])
    counts = list(map(len, ids))
    longest = max(counts)
    if longest > job.get("limit", longest):
        return {"counts": counts}, b""
    return {"counts": counts}, array("I", chain.from_iterable(ids)).tobytes()


def read_ids(head: dict, data: bytes) -> list[list[int]]:
    """The ids of each text, from what `do_job` returned."""
    ids = iter(array("I", data).tolist())
    return [list(islice(ids, count)) for count in head["counts"]]


def tokenize_answer(ids: list[int], tokenizer: Tokenizer, names: bool, **fields) -> bytes:
    """The JSON of /tokenize."""
    strings = None
    if names:
        if len(ids) > MAX_NAMES:
            raise TokenizerError(
                f"return_token_strs for {len(ids)} tokens, at most {MAX_NAMES} are named: "
                "leave it out"
            )
        strings = [token_name(tokenizer.spelled_bytes(i)) for i in ids]
    answer = {"count": len(ids)} | fields | {"tokens": ids, "token_strs": strings}
    return json.dumps(answer, separators=(",", ":")).encode()


# --------------------------------------------------------------------------------------------------
# The process


def limit_memory():
    """
    Have a job that needs more than JOB_MEMORY get a MemoryError, where the system can tell how much
    memory this process has already.
    """
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    limit = pages * resource.getpagesize() + JOB_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def attempt(do: Callable, *args) -> tuple:
    """
    (what `do(*args)` returns, None), or (None, the error's message). SIGPROF ends the process when
    this takes more than JOB_SECONDS of CPU time.
    """
    signal.setitimer(signal.ITIMER_PROF, JOB_SECONDS)
    try:
        return do(*args), None
    except TokenizerError as error:
        return None, str(error)
    except MemoryError:
        return None, f"this {TOO_LARGE}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def load(directory: str) -> tuple[Tokenizer, Chat | None]:
    tokenizer = load_tokenizer(directory)
    limit_memory()
    return tokenizer, load_chat(directory, tokenizer)


def main(directory: str, descriptor: int):
    """Do jobs until the other end of the link is closed. The first reply says how loading went."""
    link = Connection(descriptor)
    loaded, problem = attempt(load, directory)
    done = {}, b""
    with contextlib.suppress(EOFError, OSError):
        while True:
            head, data = ({"error": problem}, b"") if problem else done
            link.send_bytes(json.dumps(head).encode())
            link.send_bytes(data)
            job = json.loads(link.recv_bytes())
            done, problem = attempt(do_job, job, *loaded)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
