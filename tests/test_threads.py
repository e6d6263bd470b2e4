"""Threads share large calls without changing a bit, survive a fork, and obey their limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvnumba as kv
from kvnumba import threads


@pytest.fixture(autouse=True)
def default_limit(monkeypatch):
    monkeypatch.setattr(threads, "_limit", None)


def filled(formats, tokens, rng, heads=8, dim=80, batch=1):
    cache = kv.KVCache(heads, dim, k_format=formats[0], v_format=formats[1], batch_size=batch, capacity=tokens)
    cache.append(*(rng.standard_normal((batch, heads, tokens, dim), dtype=np.float32) for _ in range(2)))
    return cache


@pytest.mark.parametrize("formats", [("float32", "float32"), ("int8", "int4")])
@pytest.mark.parametrize("queries", [1, 60])
def test_k62_results_have_the_same_bits_for_1_2_and_4_threads(formats, queries, rng, monkeypatch):
    monkeypatch.setattr("kvnumba.functional.SHARED_WORK", 0)
    cache = filled(formats, 513, rng, batch=2)
    q = rng.standard_normal((2, 32, queries, 80), dtype=np.float32)
    results = set()
    for n in (1, 2, 4):
        kv.set_num_threads(n)
        for _ in range(50):
            out, lse = cache.attend(q, return_lse=True)
            results.add(out.tobytes() + lse.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("formats", [("float32", "float32"), ("int8", "int4")])
def test_k62_one_head_over_20_000_tokens_and_appends_of_many_heads_do_not_depend_on_threads(formats, rng, monkeypatch):
    monkeypatch.setattr("kvnumba.functional.SHARED_WORK", 0)
    cache = filled(formats, 20_000, rng, heads=1)
    q = rng.standard_normal((1, 1, 1, 80), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 64, 100, 80), dtype=np.float32)
    results, states = set(), set()
    for n in (1, 2, 4):
        kv.set_num_threads(n)
        for _ in range(50):
            results.add(cache.attend(q).tobytes())
        for _ in range(3):
            wide = kv.KVCache(64, 80, k_format=formats[0], v_format=formats[1], batch_size=2)
            wide.append(k, v)
            states.add(wide.keys().tobytes() + wide.values().tobytes())
    assert len(results) == len(states) == 1


def test_every_unit_is_done_once_whatever_the_number_of_threads():
    for n in (1, 2, 4, 7):
        kv.set_num_threads(n)
        for units in (1, 2, 5, 100):
            done, lock = [], threading.Lock()

            def work(first, last, done=done, lock=lock):
                with lock:
                    done.extend(range(first, last))
                return True

            assert threads.run(work, units)
            assert sorted(done) == list(range(units))


def test_an_error_in_a_unit_reaches_the_caller_and_the_pool_goes_on():
    kv.set_num_threads(3)

    def work(first, last):
        if first == 3:
            raise KeyError("unit 3")
        return True

    for _ in range(20):
        with pytest.raises(KeyError, match="unit 3"):
            threads.run(work, 8)
    assert threads.run(lambda first, last: first != 5, 8) is False


def test_k20_many_python_threads_at_once_get_the_serial_result(rng, monkeypatch):
    monkeypatch.setattr("kvnumba.functional.SHARED_WORK", 0)
    kv.set_num_threads(2)
    caches = [filled(("int8", "int4"), 200 + i, rng, heads=2, dim=32) for i in range(8)]
    q = rng.standard_normal((1, 8, 1, 32), dtype=np.float32)
    expected = [cache.attend(q).tobytes() for cache in caches]
    shared = caches[0].freeze()

    def call(i):  # 8 threads with a cache each, 8 on one snapshot
        cache, result = (caches[i], expected[i]) if i < 8 else (shared.unfreeze(), expected[0])
        return all(cache.attend(q).tobytes() == result for _ in range(50))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(16)))


CHILD = """
import os, sys, threading, time
import numpy as np
import kvnumba as kv
import kvnumba.functional
kvnumba.functional.SHARED_WORK = 0
kv.set_num_threads(4)
cache = kv.KVCache(8, 64, k_format="int8", v_format="int8")
x = np.random.default_rng(0).standard_normal((1, 8, 500, 64), dtype=np.float32)
cache.append(x, x)
expected = cache.attend(x[:, :, :1]).tobytes()

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if cache.attend(x[:, :, :1]).tobytes() == expected else 3)
    deadline = time.time() + 60
    while time.time() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(pid, 9)
    return -1

results = [fork()]
other = threading.Thread(target=lambda: results.append(fork()))
other.start()
other.join()
sys.exit(0 if results == [0, 0] else 1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_k19_a_forked_child_attends_after_the_parent_used_threads():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], timeout=300, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_k63_the_limit_holds_in_every_python_thread_and_starts_from_the_environment(monkeypatch):
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert kv.get_num_threads() == 1
    kv.set_num_threads(3)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(kv.get_num_threads).result() == 3
    monkeypatch.setattr(threads, "_limit", None)
    monkeypatch.delenv("NUMBA_NUM_THREADS")
    assert kv.get_num_threads() == len(os.sched_getaffinity(0))


SETTINGS = """
import os
import numpy as np
import kvnumba as kv
import kvnumba.functional
kvnumba.functional.SHARED_WORK = 0
cache = kv.KVCache(8, 64)
x = np.ones((1, 8, 500, 64), np.float32)
cache.append(x, x)

def attend():
    assert (cache.attend(x[:, :, :1]) == 1).all()

"""


def run(code, **environment):
    command = [sys.executable, "-c", SETTINGS + code]
    done = subprocess.run(
        command, env={**os.environ, **environment}, timeout=300, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("n", [1, 3])
def test_k63_no_more_threads_are_started_than_the_environment_allows(n):
    run(
        f"""
before = len(os.listdir("/proc/self/task"))
for _ in range(5):
    attend()
assert len(os.listdir("/proc/self/task")) == before + {n - 1}
""",
        NUMBA_NUM_THREADS=str(n),
    )


def test_k63_the_threads_of_numba_itself_are_left_as_they_were():
    run("import numba; numba.set_num_threads(1); attend(); assert numba.get_num_threads() == 1", NUMBA_NUM_THREADS="2")


@pytest.mark.torch
def test_k63_the_threads_of_torch_are_left_as_they_were():
    pytest.importorskip("torch", reason="torch is not installed")
    code = "import torch; torch.set_num_threads({0}); attend(); assert torch.get_num_threads() == {0}"
    for n in (1, 2):
        run(code.format(n))


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None, "2"])
def test_a_limit_that_is_no_positive_integer_is_refused(n):
    with pytest.raises((TypeError, ValueError), match="n must be a positive integer"):
        kv.set_num_threads(n)
