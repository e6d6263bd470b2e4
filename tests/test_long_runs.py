"""The beginning of the long runs of ``long_runs.py``."""

from __future__ import annotations

import long_runs


def test_16_threads_on_shared_snapshots_get_what_one_gets():
    assert long_runs.many_threads(4) > 0


def test_memory_stays_and_results_are_right_through_many_tokens_cuts_and_snapshots():
    result = long_runs.million(100_000)
    assert min(result["taken back"], result["resumed"]) > 0
    assert 10 * long_runs.WINDOW < result["length"] < result["appended"]
