"""Threads: a small pool that shares the units of one call.

The kernels hold no lock of Python's while they run, and units are independent, so plain threads are enough: nothing is
started before the first large call, nothing survives a fork, and two callers at once do not meet.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue

#: Does units [first, last) of a call; returns whether the result is finite.
Work = Callable[[int, int], bool]

_limit: int | None = None


def set_num_threads(n: int) -> None:
    """Let every later call, from any thread, use at most *n* threads.

    Results do not depend on it.
    """
    from kvnumba.checks import positive_int

    global _limit
    _limit = positive_int("n", n)


def get_num_threads() -> int:
    """Threads that one call uses at most.

    What was set; else ``NUMBA_NUM_THREADS``; else the number of CPUs that this process may use.
    """
    global _limit
    if _limit is None:
        _limit = _default()
    return _limit


def _default() -> int:
    wanted = os.environ.get("NUMBA_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Task:
    """One call: its units are handed out one by one to whoever asks."""

    def __init__(self, work: Work, units: int) -> None:
        self.work, self.units = work, units
        self._next = count()
        self.reports: SimpleQueue[tuple[int, bool, BaseException | None]] = SimpleQueue()

    def share(self) -> None:
        """Do units until none is left, and report how many were done here."""
        done, finite, error = 0, True, None
        try:
            while (unit := next(self._next)) < self.units:
                done += 1
                finite &= self.work(unit, unit + 1)
        except BaseException as raised:  # to the caller, who waits for it
            error = raised
        if done:
            self.reports.put((done, finite, error))


_tasks: SimpleQueue[_Task] = SimpleQueue()
_workers: list[threading.Thread] = []
_starting = threading.Lock()


def _serve(tasks: SimpleQueue[_Task]) -> None:
    while True:
        tasks.get().share()


def _ensure_workers(n: int) -> None:
    if len(_workers) < n:
        with _starting:
            while len(_workers) < n:
                worker = threading.Thread(target=_serve, args=(_tasks,), name="kvnumba", daemon=True)
                worker.start()
                _workers.append(worker)


def _forget_workers() -> None:
    """In the child of a fork: the threads of the parent are not there."""
    global _tasks, _starting
    _tasks, _starting = SimpleQueue(), threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


def run(work: Work, units: int, shared: bool = True) -> bool:
    """Do units [0, units) of *work*, *shared* between the threads that are allowed; True if each result is finite."""
    others = min(get_num_threads(), units) - 1 if shared else 0
    if others <= 0:
        return work(0, units)
    task = _Task(work, units)
    _ensure_workers(others)
    for _ in range(others):
        _tasks.put(task)
    task.share()
    done, finite = 0, True
    while done < units:  # every unit is reported by who did it; workers that come late find none and are not waited for
        part, fine, error = task.reports.get()
        if error is not None:
            raise error
        done, finite = done + part, finite and fine
    return finite
