"""
Files that are never half there: written beside their place, then renamed.

    write_json(Path("out/stdlib/config.json"), {"n_layer": 4})
    read_json(Path("out/stdlib/config.json"))                   # {} where there is none
    write_atomically(path, array.tofile)                        # or what else writes to a path

Not run by itself: tokenizers, checkpoints, corpora and training runs write with it. Who reads a
directory that is not there says how it can be had.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

# raised where a file is broken, or its content is not what is looked for
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def write_atomically(path: Path, write: Callable[[Path], None]):
    """
    Let `write` fill a temporary file beside `path`, flush it to disk, then rename it: a reader sees
    the old file or the new one, never half of one, whenever the process dies.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk it takes the rest of the room
        raise


def write_json(path: Path, content: dict):
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict:
    """The content of a file, {} where there is none. Raises what is in MALFORMED."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def how_to_download(directory: Path) -> str:
    """
    What to say of a directory that is missing, where its name may be one of the Hugging Face Hub
    (OWNER/NAME): nothing is fetched here. "" for any other name; train.py writes to out/NAME.
    """
    id = directory.as_posix()
    is_hub_name = re.fullmatch(r"(?!out/)[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", id, re.ASCII)
    if directory.exists() or not is_hub_name:
        return ""
    return (
        f"there is no directory {id}; if it is a model of the Hugging Face Hub, run `hf download "
        f"{id} --local-dir {directory.name}`, then `python serve.py --model {directory.name}`"
    )
