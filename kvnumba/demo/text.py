"""Text to tokens and back, with the vocabulary and merges that a GGUF file carries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnumba.demo import DemoError
from kvnumba.demo.model import metadata

#: Values of ``tokenizer.ggml.token_type``.
CONTROL, USER_DEFINED = 3, 4

#: How a byte-level vocabulary cuts text into words, by ``tokenizer.ggml.pre``.
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
WHOLE_WORDS = {"default", "gpt-2", "gpt2"}
LLAMA3 = {"llama3", "llama-v3", "llama-bpe"}
LLAMA3_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Text:
    """Tokens of one vocabulary.

    Attributes
    ----------
    tokenizer : tokenizers.Tokenizer
    bos : int or None
        Token that the model expects before any text, where its file says so.
    ends : frozenset of int
        Tokens that end an answer.
    template : str
        The chat template of the file, or an empty string.
    """

    tokenizer: Any
    bos: int | None
    ends: frozenset[int]
    template: str

    def encode(self, text: str) -> NDArray[np.int64]:
        """Tokens of *text*, int64 [n], with the first token the model expects."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        first = [] if self.bos is None or ids[:1] == [self.bos] else [self.bos]
        return np.array(first + ids, dtype=np.int64)

    def decode(self, tokens: list[int] | NDArray[np.int64]) -> str:
        """Text of *tokens*; special tokens give nothing."""
        text: str = self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    def stream(self, tokens: Iterator[int]) -> Iterator[str]:
        """The text of each token as it comes; of a character of several tokens only the last one gives text."""
        seen: list[int] = []
        shown = ""
        for token in tokens:
            seen.append(token)
            text = self.decode(seen)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield ""
            else:
                yield text[len(shown) :]
                shown = text

    def chat(self, prompt: str) -> str:
        """*prompt* as the first question of a conversation, in the form the model was trained on."""
        if "<|im_start|>" in self.template:
            system = re.search(r"<\|im_start\|>system\n([^<{]+)<\|im_end\|>", self.template)
            head = f"<|im_start|>system\n{system[1]}<|im_end|>\n" if system else ""
            return f"{head}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        if "<|start_header_id|>" in self.template:
            user, assistant = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
            return f"{user}{prompt}<|eot_id|>{assistant}"
        return prompt


def read_text(reader: Any) -> Text:
    """Build the tokenizer of a GGUF file.

    Raises
    ------
    DemoError
        Where the file's vocabulary is not byte-level BPE with a known way to cut words.
    """
    kind = metadata(reader, "tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise DemoError(f"the model file must have a byte-level BPE vocabulary (gpt2), got {kind}")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    tokenizer = byte_level_bpe(
        tokens=tokens,
        merges=[tuple(merge.split(" ", 1)) for merge in metadata(reader, "tokenizer.ggml.merges")],
        types=metadata(reader, "tokenizer.ggml.token_type", [1] * len(tokens)),
        pre=metadata(reader, "tokenizer.ggml.pre", "default"),
    )
    eos = int(metadata(reader, "tokenizer.ggml.eos_token_id", -1))
    names = (tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"))
    return Text(
        tokenizer=tokenizer,
        bos=int(metadata(reader, "tokenizer.ggml.bos_token_id")) if adds_bos(reader) else None,
        ends=frozenset({eos, *(name for name in names if name is not None)}),
        template=metadata(reader, "tokenizer.chat_template", ""),
    )


def adds_bos(reader: Any) -> bool:
    """Whether text starts with a token of its own: as the file says, else as files of its kind do."""
    default = metadata(reader, "tokenizer.ggml.pre", "default") in LLAMA3
    return bool(metadata(reader, "tokenizer.ggml.add_bos_token", default))


def byte_level_bpe(tokens: list[str], merges: list[tuple[str, str]], types: list[int], pre: str) -> Any:
    """A ``tokenizers.Tokenizer`` from the tokens and their types, the merges, and the name of the word rule."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    words: Any
    if pre in DIGITS_APART:
        words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in WHOLE_WORDS:
        words = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in LLAMA3:
        split = pre_tokenizers.Split(Regex(LLAMA3_WORD), behavior="isolated")
        words = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        known = ", ".join(sorted(DIGITS_APART | WHOLE_WORDS | LLAMA3))
        raise DemoError(f"tokenizer.ggml.pre must be one of {known}, got {pre}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LLAMA3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    return tokenizer
