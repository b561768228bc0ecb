"""Marks: who wears one, who does not, and who is ended by it. The whole story is in tests/attack/test_orphans.py."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading

import pytest
from support_orphans import WAYS, clear, guards, living, start, until

import rookery
from rookery.processes import orphans
from rookery.processes.orphans import MarkedHere, end_marked, guarded, new_mark, put_mark

LONG = 60.0  # seconds: never reached unless something is broken
LOCKS = 10  # RLIMIT_LOCKS


def limit() -> tuple[int, int]:
    return resource.getrlimit(LOCKS)


@pytest.fixture(autouse=True)
def as_before():
    before = limit()
    yield
    assert limit() == before


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "3600"])
    yield process
    process.kill()
    process.wait(LONG)


def test_marks_differ():
    assert len({new_mark() for _ in range(1000)}) == 1000


def test_only_those_with_the_mark_are_ended(sleeper):
    with subprocess.Popen(["sleep", "3600"]) as other:
        assert put_mark(sleeper.pid) is not None
        mark = put_mark(other.pid)
        assert end_marked([mark, None], LONG)
        assert other.wait(LONG) in (-9, 0)  # 0: collected by end_marked
    assert sleeper.poll() is None
    assert end_marked([None]) and end_marked([])


@pytest.mark.parametrize("way", WAYS)
def test_what_this_process_starts_while_it_is_marked_is_ended_and_nothing_else(tmp_path, sleeper, way):
    try:
        with MarkedHere():
            start(way, str(tmp_path))
            until(lambda: len(living(tmp_path)) == 1, "the process")
        assert living(tmp_path) == [] and sleeper.poll() is None
    finally:
        clear(tmp_path)


def test_what_is_started_in_a_pause_stays(tmp_path):
    try:
        with MarkedHere() as marked:
            marked.paused(lambda: start("session", str(tmp_path)))()
            start("fork_setsid", str(tmp_path))
            until(lambda: len(living(tmp_path)) == 2, "two processes")
        assert len(living(tmp_path)) == 1
    finally:
        clear(tmp_path)


def test_marks_of_several_runs_in_one_process_may_end_in_any_order(tmp_path):
    first, second = MarkedHere(), MarkedHere()
    try:
        first.__enter__()
        start("session", str(tmp_path))
        second.__enter__()
        start("session", str(tmp_path))
        first.__exit__()
        assert len(living(tmp_path)) == 1
        start("session", str(tmp_path))
        second.__exit__()
        assert living(tmp_path) == []
    finally:
        clear(tmp_path)


def test_a_forked_child_that_unwinds_our_stack_ends_nobody(tmp_path):
    """An environment that forks and raises SystemExit in the child leaves our `with` blocks there."""
    try:
        with guarded(), MarkedHere():
            start("session", str(tmp_path))
            until(lambda: len(guards(os.getpid())) == 1, "the guard")
            child = os.fork()
            if child == 0:
                raise SystemExit
            os.waitpid(child, 0)
            assert len(living(tmp_path)) == 1 and len(guards(os.getpid())) == 1
    except SystemExit:
        os._exit(0)
    finally:
        clear(tmp_path)


def test_a_guard_ends_with_the_block_and_only_then():
    with guarded():
        until(lambda: len(guards(os.getpid())) == 1, "the guard")
    assert guards(os.getpid()) == []


PARENT = """
import os, sys
from rookery.processes.orphans import MarkedHere, guarded
from support_orphans import start
with guarded(), MarkedHere():
    start("bare", sys.argv[1])
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_at_once_leaves_nobody(tmp_path):
    """The guard has not even begun to look when its parent dies."""
    path = os.pathsep.join(sys.path)
    for _ in range(5):
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env=os.environ | {"PYTHONPATH": path})
        assert parent.wait(LONG) == -9
        until(lambda: not living(tmp_path) and not guards(parent.pid), "nobody")  # noqa: B023


def test_a_system_without_marks_trains_all_the_same(tmp_path, monkeypatch, sleeper):
    monkeypatch.setattr(orphans, "resource", None)
    assert put_mark(sleeper.pid) is None
    run = rookery.train(
        "ppo", env="CartPole-v1", env_steps=64, out=str(tmp_path / "run"), topology="serial", actors=1,
        envs_per_actor=2, quiet=True, algo={"unroll": 16, "epochs": 1, "minibatches": 1},
    )  # fmt: skip
    assert run.exit_code == 0


def test_it_works_from_any_thread(tmp_path):
    def work() -> None:
        with guarded(), MarkedHere():
            start("session", str(tmp_path))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)
    assert living(tmp_path) == [] and guards(os.getpid()) == []
