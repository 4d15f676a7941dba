"""
The environment of the programs that others wrote: those of tests/clients.txt, installed into
.venv-clients, once: 2.5 minutes. If they cannot be installed (no network, say), every test of them
is skipped with the reason.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
PINS = ROOT / "tests" / "clients.txt"
HOME = ROOT / ".venv-clients"
INSTALL_SECONDS = 480  # with the tests that makes less than ten minutes


def install():
    """Make the environment anew. Raises subprocess.SubprocessError."""
    shutil.rmtree(HOME, ignore_errors=True)
    requirements = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    pip = [HOME / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += shlex.split(os.environ.get("PIP_OPTIONS", ""))
    options = {"check": True, "capture_output": True, "text": True, "timeout": INSTALL_SECONDS / 2}
    subprocess.run([sys.executable, "-m", "venv", HOME], **options)
    subprocess.run([*pip, requirements[0]], **options)
    subprocess.run([*pip, *requirements], **options)
    shutil.copy(PINS, HOME / PINS.name)  # last: an installation that was stopped is begun again


@pytest.fixture(scope="module")
def bin(tmp_path_factory):
    """
    The folder with the clients' programs. The processes that share the tests share it, and one of
    them makes it.
    """
    installed = HOME / PINS.name
    with FileLock(tmp_path_factory.getbasetemp().parent / "clients.lock"):
        if not installed.is_file() or installed.read_text() != PINS.read_text():
            try:
                install()
            except subprocess.CalledProcessError as error:
                reason = error.stderr.strip().splitlines()[-1:]
                pytest.skip(f"the clients cannot be installed: {reason}")
            except subprocess.TimeoutExpired as error:
                pytest.skip(f"the clients were not installed within {error.timeout:.0f} s")
    return HOME / "bin"
