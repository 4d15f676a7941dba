"""
Fixtures shared by tests of other people's programs: their environment, and a model to serve. The
programs in tests/clients.txt are installed into .venv-clients, once, in 3 minutes. If they cannot
be installed, for example without a network, their tests are skipped with the reason. There is also
`house`, a server without sockets.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from wires import House

from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from training.corpus import train_bpe

ROOT = Path(__file__).parents[2]
PINS = ROOT / "tests" / "clients.txt"
HOME = ROOT / ".venv-clients"
INSTALL_SECONDS = 480  # the tests then still end within ten minutes


def install():
    """Rebuild the environment. Raises subprocess.SubprocessError."""
    shutil.rmtree(HOME, ignore_errors=True)
    (first,) = [line for line in PINS.read_text().splitlines() if line.startswith("torch==")]
    pip = [HOME / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--no-compile"]  # most modules are never imported
    pip += shlex.split(os.environ.get("PIP_OPTIONS", ""))
    deadline = time.monotonic() + INSTALL_SECONDS
    for command in [sys.executable, "-m", "venv", HOME], [*pip, first], [*pip, "-r", PINS]:
        left = deadline - time.monotonic()
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=left)
    shutil.copy(PINS, HOME / PINS.name)  # last, so that an interrupted installation is redone


def is_installed() -> bool:
    installed = HOME / PINS.name
    return installed.is_file() and installed.read_text() == PINS.read_text()


@pytest.fixture(scope="module")
def bin(tmp_path_factory):
    """
    Return the folder with the clients' programs. All test processes share it, and one of them makes
    it.
    """
    with FileLock(tmp_path_factory.getbasetemp().parent / "clients.lock"):
        if not is_installed():
            try:
                install()
            except subprocess.CalledProcessError as error:
                reason = error.stderr.strip().splitlines()[-1:]
                pytest.skip(f"the clients cannot be installed: {reason}")
            except subprocess.TimeoutExpired:
                pytest.skip(f"the clients were not installed within {INSTALL_SECONDS} s")
    return HOME / "bin"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """
    Return a checkpoint with a chat template, and random weights so large that each token depends on
    those before.
    """
    folder = tmp_path_factory.mktemp("clients") / "tiny"
    folder.mkdir()
    tokenizer = train_bpe([(ROOT / "paged.py").read_text()], 400)
    tokenizer.save(folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "chat_template.jinja").write_text(template)
    torch.manual_seed(0)
    sizes = {"context_length": 1024, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(tokenizer.vocab_size, eos_token_ids=(tokenizer.eos_token_id,), **sizes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight *= 8
    save_checkpoint(model, folder)
    return folder


@pytest.fixture
def house():
    with House() as house:
        yield house


if __name__ == "__main__" and not is_installed():
    install()
