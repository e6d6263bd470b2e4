"""Write ``tests/data/model_kv.npz``: keys, values and queries of two layers of the demo's model.

``python -m tests.dump_model_kv``, with the extra ``demo`` installed. float16; the last query of each layer attends
over all tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvnumba.demo.measure import sample_text
from kvnumba.demo.model import attend as attend_and_append
from kvnumba.demo.model import read_model
from kvnumba.demo.text import read_text
from kvnumba.demo.weights import find_weights

LAYERS, TOKENS, QUERIES = (0, 29), 196, 4
PATH = Path(__file__).parent / "data" / "model_kv.npz"


def main() -> None:
    model, reader = read_model(find_weights(lambda done, total: None))
    tokens = read_text(reader).encode(sample_text())[:TOKENS]
    seen: list[dict[str, np.ndarray]] = []

    def attend(cache: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        seen.append({"q": q[:, :, -QUERIES:], "k": k, "v": v})
        return attend_and_append(cache, q, k, v)

    model.forward(tokens, [model.new_caches("float32", "float32", TOKENS)], attend)
    arrays = {f"{name}{layer}": seen[layer][name].astype(np.float16) for layer in LAYERS for name in "qkv"}
    PATH.parent.mkdir(exist_ok=True)
    np.savez_compressed(PATH, **arrays)


if __name__ == "__main__":
    main()
