"""What a command prints reaches its reader as it should: closed pipes, narrow encodings, names that hold anything."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any


def printable(text: str, kept: str = "") -> str:
    """*text* with a backslash code in place of each character that a terminal would obey, hide or fail to encode.

    Those of *kept* stay.
    """
    shown = "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


class _Output(io.FileIO):
    """Standard output that ends the program, well and without a word, when its reader wants no more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # what is still buffered is written at the exit
            if isinstance(error, BrokenPipeError):
                raise SystemExit(0) from None
            raise


def prepare() -> None:
    """Make the standard streams safe to print to, and signals that end the program raise, so that it cleans up."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            _keep(number)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    old: Any = sys.stdout
    buffer = getattr(old, "buffer", None)
    if type(getattr(buffer, "raw", buffer)) is io.FileIO:
        output = io.BufferedWriter(_Output(old.fileno(), "w", closefd=False))
        at_once = old.line_buffering or old.write_through
        sys.stdout = io.TextIOWrapper(output, old.encoding, old.errors, line_buffering=at_once)
    for name in ("SIGTERM", "SIGHUP"):
        one = getattr(signal, name, None)
        if one is not None and signal.getsignal(one) is signal.SIG_DFL:
            signal.signal(one, _end)


def _end(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _keep(number: int) -> None:
    """Let *number*, which is closed, take everything: else the next file that is opened would get what is printed."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
