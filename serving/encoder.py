"""
Texts and conversations -> token ids, and back, without holding up whoever asks.

    encoder = Encoder("out/stdlib")
    ids = encoder.encode("def ")                               # blocks; `await encoder.ask(job)` does not
    ids = encoder.chat([{"role": "user", "content": "hello"}])

Short texts are encoded where they are. Long ones, and all chat templates, go to a process of their
own, because both hold Python's interpreter: it starts with the first that needs it, imports no
torch, and does one job after the other. A job that takes too much time or memory ends the process,
its client gets one error, and the next job starts another. `python -m serving.encoder DIRECTORY
FILE_DESCRIPTOR` is that process.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from serving.chat import Chat, load_chat, read_template
from tokenizer import Tokenizer, TokenizerError, load_tokenizer, token_name

ROOT = Path(__file__).parents[1]
# Encoding takes 20 to 500 ns a byte, whatever the text: 4,096 characters or ids are at most 2 ms.
SHORT = 4096
JOB_SECONDS = 20  # of CPU time for one job: 4 MiB, the largest body, take 1 to 5
JOB_MEMORY = 2**30  # bytes that a job may take: 4 MiB take 0.4 GiB
MAX_WAITING = (
    2**26
)  # characters and ids of all jobs that wait or are worked at: so much memory they hold here
MAX_NAMES = 2**18  # tokens that one answer names


class EncoderBusy(Exception):
    """Too much is waiting to be encoded: try again later."""


class Encoder:
    """A checkpoint's tokenizer and chat template, and the process for what takes long."""

    def __init__(self, directory: str | Path, tokenizer: Tokenizer | None = None):
        self.directory = directory
        self.tokenizer = tokenizer or load_tokenizer(directory)
        self.has_chat = read_template(directory) is not None
        self.waiting = 0  # characters and ids
        self.thread = ThreadPoolExecutor(1)  # asks the process, one job after the other
        self.process: subprocess.Popen | None = None
        self.link: Connection | None = None

    def check(self):
        """
        Raises TokenizerError for a chat template that is broken. It is a program, so the process
        compiles it.
        """
        if self.has_chat:
            self.thread.submit(self._start).result()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, the names of control tokens included. Raises TokenizerError."""
        return read_ids(*self._do({"texts": [text]}, len(text)))[0]

    def chat(self, messages: list[dict], **options) -> list[int]:
        """
        Token ids of a conversation: [{"role", "content"}, ...], and variables of the template.
        """
        return read_ids(*self._do({"messages": messages, "options": options}, 0))[0]

    async def ask(self, job: dict, size: int) -> tuple[dict, bytes]:
        """
        What `work` makes of a job whose texts have so many characters, or ids. Raises
        TokenizerError for what the client can change, EncoderBusy, and RuntimeError should the
        process end for another reason.
        """
        if self.is_short(job, size):
            return work(job, self.tokenizer, None)
        if self.waiting + size > MAX_WAITING:
            raise EncoderBusy
        self.waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self.thread, self._exchange, job
            )
        finally:
            self.waiting -= size

    def close(self):
        """End the process, whatever it does."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        process = self.process  # its thread forgets it once it has ended
        if process:
            process.kill()
            process.wait()

    def is_short(self, job: dict, size: int) -> bool:
        """
        Whether a job takes 2 ms at most. A template can be any program, and a checkpoint's own
        pattern is one.
        """
        if "messages" in job or not self.tokenizer.has_known_pattern:
            return False
        return size + 16 * len(job.get("texts", ())) <= SHORT

    def _do(self, job: dict, size: int) -> tuple[dict, bytes]:
        if self.is_short(job, size):
            return work(job, self.tokenizer, None)
        return self.thread.submit(self._exchange, job).result()

    def _exchange(self, job: dict) -> tuple[dict, bytes]:
        if self.process is None:
            self._start()
        try:
            self.link.send_bytes(
                json.dumps(job, ensure_ascii=False).encode("utf-8", "surrogatepass")
            )
            return self._receive()
        except (EOFError, OSError):
            raise self._ended("this") from None

    def _receive(self) -> tuple[dict, bytes]:
        head = json.loads(self.link.recv_bytes())
        if "error" in head:
            raise TokenizerError(head["error"])
        return head, self.link.recv_bytes()

    def _start(self):
        """Start the process and wait until it is ready."""
        ours, theirs = socket.socketpair()
        directory = str(Path(self.directory).resolve())
        command = [sys.executable, "-m", "serving.encoder", directory, str(theirs.fileno())]
        # a session of its own: Ctrl-C at the terminal is for us
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], start_new_session=True, cwd=ROOT
        )
        theirs.close()
        self.link = Connection(ours.detach())
        what = f"reading the tokenizer and chat template of {self.directory}"
        try:
            self._receive()
        except (EOFError, OSError):
            raise self._ended(what) from None
        except TokenizerError:
            self._ended(what)
            raise

    def _ended(self, what: str) -> Exception:
        """Forget the process. Returns what to raise about its end."""
        self.link.close()
        code = self.process.wait()
        self.process = self.link = None
        if code == -signal.SIGPROF:
            return TokenizerError(
                f"{what} takes more than {JOB_SECONDS} s of CPU time to encode or render: shorten it"
            )
        return RuntimeError(f"the encoding process ended (exit code {code})")


# --------------------------------------------------------------------------------------------------
# The work, here or in the process


def work(job: dict, tokenizer: Tokenizer, chat: Chat | None) -> tuple[dict, bytes]:
    """
    Do one job. Returns what it says and what it brings. Raises TokenizerError.

        {"texts": [..]} or {"messages": [..], "options": {..}}
                                    -> {"counts": of tokens of each}, their ids; none if one has more than the "limit"
        the same and "answer": fields, with "names": whether to name the tokens
                                    -> {}, the JSON of /tokenize
        {"tokens": [..]}            -> {}, the JSON of /detokenize
    """
    if "tokens" in job:
        text = b"".join(map(tokenizer.spelled_bytes, job["tokens"])).decode("utf-8", "replace")
        return {}, json.dumps({"prompt": text}, ensure_ascii=False).encode()
    if "messages" in job:
        ids = [chat.encode(job["messages"], **job["options"])]
    else:
        ids = [tokenizer.encode(text, allow_special=True) for text in job["texts"]]
    if "answer" in job:
        return {}, tokenize_answer(ids[0], tokenizer, **job["answer"])
    counts = [len(own) for own in ids]
    if max(counts) > job.get("limit", max(counts)):
        return {"counts": counts}, b""
    return {"counts": counts}, array("I", [i for own in ids for i in own]).tobytes()


def read_ids(head: dict, data: bytes) -> list[list[int]]:
    """The ids of each text."""
    ids = array("I", data).tolist()
    start, found = 0, []
    for count in head["counts"]:
        found.append(ids[start : start + count])
        start += count
    return found


def tokenize_answer(ids: list[int], tokenizer: Tokenizer, names: bool, **fields) -> bytes:
    """
    The JSON of /tokenize. Its lists are written by hand: `json` would take 60 bytes and more for
    each id.
    """
    if names and len(ids) > MAX_NAMES:
        raise TokenizerError(
            f"return_token_strs for {len(ids)} tokens, at most {MAX_NAMES} are named: leave it out"
        )
    head = json.dumps({"count": len(ids)} | fields)[:-1].encode()
    strings = (
        joined(json.dumps(token_name(tokenizer.spelled_bytes(i))) for i in ids)
        if names
        else b"null"
    )
    return b'%s, "tokens": %s, "token_strs": %s}' % (head, joined(map(str, ids)), strings)


def joined(items: Iterable[str]) -> bytes:
    """A JSON list, a piece at a time, so that not all its small strings are there at once."""
    remaining = iter(items)
    pieces = iter(lambda: ",".join(islice(remaining, 2**16)), "")
    return f"[{','.join(pieces)}]".encode()


# --------------------------------------------------------------------------------------------------
# The process


def limit_memory():
    """
    A job that needs more than JOB_MEMORY gets a MemoryError, where the system can tell what we have
    already.
    """
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    limit = pages * resource.getpagesize() + JOB_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def attempt(do: Callable, *args) -> tuple[dict, bytes]:
    """
    What `do(*args)` replies. The kernel ends the process if it takes more than JOB_SECONDS of CPU
    time.
    """
    signal.setitimer(signal.ITIMER_PROF, JOB_SECONDS)
    try:
        return do(*args)
    except TokenizerError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {
            "error": f"this takes more than {JOB_MEMORY >> 20} MiB to encode or render: shorten it"
        }, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(directory: str, descriptor: int):
    """Do jobs until the other side is gone."""
    link = Connection(descriptor)
    loaded = []

    def load() -> tuple[dict, bytes]:
        tokenizer = load_tokenizer(directory)
        limit_memory()
        loaded.extend([tokenizer, load_chat(directory, tokenizer)])
        return {}, b""

    def reply(head: dict, data: bytes):
        link.send_bytes(json.dumps(head).encode())
        if "error" not in head:
            link.send_bytes(data)

    try:
        reply(*attempt(load))
        while loaded:
            job = json.loads(link.recv_bytes())
            reply(*attempt(work, job, *loaded))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
