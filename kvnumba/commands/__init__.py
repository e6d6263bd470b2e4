"""The commands of ``kvnumba``, one file each; a command is imported when it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class CommandError(Exception):
    """What a user can mend; printed as one line. *code* is the exit code: 2 for wrong arguments, 1 for wrong data."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def print_json(value: Any) -> None:
    """Print *value* as JSON, and nothing else."""
    print(json.dumps(value, indent=1, default=str))


def existing(path: Path) -> Path:
    """*path* if it is a file; else an error with exit code 2."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "something else" if path.exists() else "nothing there"
        raise CommandError(f"{path} must be a file, got {got}", 2)
    return path


def free(path: Path, source: Path, force: bool) -> Path:
    """*path* if it may be written; never the source itself."""
    if path.exists() and path.samefile(source):
        raise CommandError(f"the output must be another file than the input, got {path} for both", 2)
    if path.exists() and not force:
        raise CommandError(f"{path} must not exist; give --force to replace it", 2)
    return in_folder(path)


def in_folder(path: Path) -> Path:
    """*path* if its folder exists and can be written."""
    if not path.parent.is_dir():
        raise CommandError(f"{path} must be in a folder that exists, got {path.parent}", 2)
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{path} must be in a folder that can be written, got {path.parent}", 2)
    return path
