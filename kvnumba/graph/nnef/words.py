"""Strings, escaped names and comments in the text of a graph, as tract reads and writes them."""

from __future__ import annotations

import re

_WORD = re.compile(r"""#[^\r\n]*|((?<!\w)i)?(['"])((?:\\.|(?!\2)[^\\])*)\2""", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Hidden:
    """A text without its comments, in which a plain word stands for each string and each name that is escaped.

    So nothing in a string is taken for the language around it. ``text`` is what is left.
    """

    def __init__(self, source: str) -> None:
        self._mark = "word_"
        while self._mark in source:
            self._mark += "_"
        self._words: dict[str, str] = {}
        self.text = _WORD.sub(self._hide, source)
        self._content = {word: content for content, word in self._words.items()}

    def _hide(self, found: re.Match[str]) -> str:
        if found[0].startswith("#"):
            return " "
        content = re.sub(r"\\(.)", r"\1", found[3], flags=re.DOTALL)
        if found[1] and _NAME.fullmatch(content):
            return content
        word = self._words.setdefault(content, f"{self._mark}{len(self._words)}")
        return word if found[1] else f"'{word}'"

    def content(self, word: str) -> str:
        """What *word* stands for: itself, if it was not hidden."""
        return self._content.get(word, word)

    def shown(self, text: str) -> str:
        """*text* with strings and escaped names as they are written."""
        return re.sub(rf"('?)({self._mark}\d+)\1", self._show, text)

    def _show(self, found: re.Match[str]) -> str:
        return quoted(self.content(found[2])) if found[1] else identifier(self.content(found[2]))


def identifier(x: str) -> str:
    """*x* as an identifier: escaped, i'like this', if it is not of letters, digits and underscores."""
    return x if _NAME.fullmatch(x) else f"i{quoted(x)}"


def quoted(x: str) -> str:
    """*x* as a string."""
    return "'" + re.sub(r"""([\\'"])""", r"\\\1", x) + "'"


def literal(x: bool | int | float | str) -> str:
    """A constant."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, str):
        return quoted(x)
    return repr(float(x)) if isinstance(x, float) else str(x)
