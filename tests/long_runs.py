"""Long runs: a million tokens through a small window, and many threads on shared snapshots.

``python tests/long_runs.py 1000000 60`` takes so many tokens and so many seconds; the tests take a few of each.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
from conftest import largest_errors

import kvnumba as kv
from kvnumba import reference
from kvnumba.spec import BLOCK, SINK

HEADS, DIM, WINDOW = 2, 64, 256
#: Most tokens of a guess that is taken back: a cut into the last sealed block leaves no trace of them.
GUESS = 28
#: Different tokens; the one at position p is item p % PERIOD, and a prime keeps blocks from repeating for long.
PERIOD = 9973


def stream(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [1, HEADS, 2 * PERIOD, DIM], twice over so that any part of up to PERIOD is one slice."""
    x = np.random.default_rng(seed).standard_normal((2, 1, HEADS, PERIOD, DIM), dtype=np.float32)
    return tuple(np.concatenate([one, one], 2) for one in x)


def digest(cache: kv.KVCache) -> bytes:
    return hashlib.sha256(cache.keys().tobytes() + cache.values().tobytes()).digest()


def resident() -> int:
    """Bytes of the process in memory; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * 4096


def million(tokens: int, seed: int = 0) -> dict[str, int]:
    """Append *tokens* in all to an int4 cache with a window, with guesses taken back and snapshots gone on from.

    Raises AssertionError if memory grows, a snapshot changes, or what is held or attended at the end is not that of a
    cache which was fed the last tokens only.
    """
    choose, (k, v) = random.Random(seed), stream(seed)
    guesses = stream(seed + 1)
    cache = kv.KVCache(HEADS, DIM, k_format="int4", v_format="int4", window=WINDOW)
    cache.reserve(10**9)
    room, memory = cache.nbytes_allocated, 0
    snapshots: list[tuple[kv.Snapshot, bytes]] = []
    appended = backs = resumed = 0

    def append(source: tuple[np.ndarray, np.ndarray], count: int) -> None:
        start = len(cache) % PERIOD
        cache.append(*(x[:, :, start : start + count] for x in source))

    while appended < tokens:
        count = choose.choice((1, 1, 1, 1, 2, 7, 33, 100))
        append((k, v), count)
        appended += count
        what = choose.random()
        if what < 0.1:
            before, guess = len(cache), choose.randint(1, GUESS)
            append(guesses, guess)
            cache.truncate(before)
            appended, backs = appended + guess, backs + 1
        elif what < 0.11:
            snapshots.append((cache.freeze(), digest(cache)))
            del snapshots[:-4]
        elif what < 0.115 and snapshots:
            snapshot, held = choose.choice(snapshots)
            cache = snapshot.unfreeze()
            assert digest(cache) == held, "a snapshot must not change"
            resumed += 1
        assert cache.nbytes_allocated <= room, "memory must not grow"
        if memory == 0 and appended > tokens // 4:
            memory = resident()
    grown = resident() - memory
    assert grown < 16 << 20, f"the process must not grow, got {grown} bytes"

    at = cache.positions
    assert at[:SINK].tolist() == list(range(SINK))
    assert at[SINK:].tolist() == list(range(at[SINK], len(cache)))
    assert (at[SINK] - SINK) % BLOCK == 0, "what is left must begin where a block does"
    fresh = kv.KVCache(HEADS, DIM, k_format="int4", v_format="int4")
    fresh.append(*(x[:, :, at % PERIOD] for x in (k, v)))
    assert digest(fresh) == digest(cache), "the newest tokens must be those of a cache that was fed nothing else"
    q = np.random.default_rng(seed).standard_normal((1, 2 * HEADS, 1, DIM), dtype=np.float32)
    seen = (at < SINK) | (at > len(cache) - 1 - WINDOW)
    truth = reference.attention(q, fresh.keys(), fresh.values(), mask=seen)
    bound, _ = largest_errors(cache.spec, q[0], fresh.keys()[0], fresh.values()[0])
    assert np.abs(cache.attend(q) - truth).max() <= bound
    return {"appended": appended, "length": len(cache), "taken back": backs, "resumed": resumed, "grown": grown}


def many_threads(seconds: float, count: int = 16, seed: int = 0) -> int:
    """Let *count* threads go on from shared snapshots for so many *seconds*; return how many continuations were right.

    Raises AssertionError if one differs from what a single thread gets.
    """
    k, v = stream(seed)
    q = np.random.default_rng(seed).standard_normal((1, 2 * HEADS, 1, DIM), dtype=np.float32)
    shared = []
    for i, formats in enumerate((("float32", "int4"), ("int4", "int8"), ("int8", "float32"))):
        for length in (3, 70, 300):
            cache = kv.KVCache(HEADS, DIM, k_format=formats[0], v_format=formats[1], capacity=400)
            cache.append(*(x[:, :, i : i + length] for x in (k, v)))
            shared.append(cache.freeze())

    def go_on(snapshot: kv.Snapshot, way: int) -> bytes:
        cache, found = snapshot.unfreeze(), hashlib.sha256()
        for part in range(6):
            start = 500 * way + 40 * part
            cache.append(*(x[:, :, start : start + 1 + 7 * part] for x in (k, v)))
            if part == 3:
                cache.truncate(len(cache) - 9)
            if part == 4:
                cache = cache.freeze().unfreeze()
            found.update(cache.attend(q).tobytes())
        found.update(digest(cache))
        return found.digest()

    expected = {(i, way): go_on(snapshot, way) for i, snapshot in enumerate(shared) for way in range(8)}
    assert expected == {(i, way): go_on(shared[i], way) for i, way in expected}
    until, right, faults = time.monotonic() + seconds, [0] * count, []

    def work(number: int) -> None:
        choose = random.Random(seed + number)
        while time.monotonic() < until and not faults:
            i, way = choose.randrange(len(shared)), choose.randrange(8)
            try:
                assert go_on(shared[i], way) == expected[i, way], (i, way)
            except BaseException as fault:  # reported by the thread that waits
                faults.append(fault)
            right[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert min(right) > 0
    return sum(right)


if __name__ == "__main__":
    print(million(int(sys.argv[1])))
    print(many_threads(float(sys.argv[2])), "continuations, each as it should be")
