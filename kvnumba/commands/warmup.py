"""``kvnumba warmup``: compile ahead."""

from __future__ import annotations

import time
from itertools import product

from kvnumba._jit import cache_folder
from kvnumba.commands import CommandError, print_json
from kvnumba.spec import FORMATS


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Pairs of formats: "int8", "int8/int4", several with commas, or "all"."""
    if text == "all":
        return list(product(FORMATS, FORMATS))
    pairs = []
    for part in text.split(","):
        k, _, v = part.strip().partition("/")
        if k not in FORMATS or (v or k) not in FORMATS:
            raise CommandError(
                f"--formats must be of {', '.join(FORMATS)}, as K or K/V with commas between, or all, got {part!r}", 2
            )
        pairs.append((k, v or k))
    return pairs


def warmup(formats: str, as_json: bool) -> None:
    """Compile the kernels of these formats, with a bar."""
    pairs = pairs_of(formats)
    from kvnumba.commands.progress import bar, table
    from kvnumba.warm import warmup as compile_ahead

    start = time.perf_counter()
    with bar("formats", len(pairs)) as advance:
        for k_format, v_format in pairs:
            compile_ahead(k_format=k_format, v_format=v_format)
            advance(1)
    told = {
        "formats": [f"{k}/{v}" for k, v in pairs], "seconds": time.perf_counter() - start, "kept_in": cache_folder(),
    }  # fmt: skip
    print_json(told) if as_json else table(told)
