"""
Files that are never half there: written beside their place, then renamed.

    write_json(Path("out/stdlib/config.json"), {"n_layer": 4})
    read_json(Path("out/stdlib/config.json"))                   # {} where there is none
    write_atomically(path, array.tofile)                        # or what else writes to a path

Not run by itself: tokenizers, checkpoints, corpora and training runs write with it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path


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
    """The content of a file, {} where there is none. Raises ValueError or RecursionError."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
