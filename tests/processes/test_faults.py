import os
import signal
import subprocess
import sys

import pytest

from rookery.core.errors import UsageError
from rookery.processes import faults
from rookery.processes.faults import FaultPlan, InjectedFault


@pytest.fixture
def struck(monkeypatch):
    """What the plan did to its own process, instead of doing it."""
    done = []
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid == os.getpid(), number)))
    monkeypatch.setattr(os, "_exit", lambda code: done.append(("exit", code)))
    return done


def test_a_fault_strikes_its_victim_at_its_count_and_once(struck):
    plan = FaultPlan.parse("actor[1]@env_step=137:sigkill")
    for step in range(137):
        plan.fire("actor", 1, env_step=step)
    plan.fire("actor", 0, env_step=137)
    plan.fire("learner", 1, env_step=137)
    plan.fire("actor", 1, unroll=137)
    assert struck == [] and plan
    plan.fire("actor", 1, env_step=137)
    plan.fire("actor", 1, env_step=138)
    assert struck == [(True, signal.SIGKILL)] and not plan


def test_a_count_that_is_jumped_over_is_not_missed(struck):
    plan = FaultPlan.parse("actor[0]@env_step=137:sigstop")
    for step in (128, 136, 144, 152):
        plan.fire("actor", 0, step)
    assert struck == [(True, signal.SIGSTOP)]


def test_a_replacement_is_spared_unless_the_fault_is_for_always(struck):
    plan = FaultPlan.parse("actor[0]@unroll=3:sigkill")
    assert plan.fire("actor", 0, 0, 3, 1) is None and struck == []
    always = FaultPlan.parse("actor[0]@start=0:exit:always")
    always.fire("actor", 0, incarnation=2, start=0)
    assert struck == [("exit", 1)]


def test_without_an_index_anyone_is_meant(struck):
    FaultPlan.parse("actor@unroll=0:sigterm").fire("actor", 5, unroll=0)
    assert struck == [(True, signal.SIGTERM)]


def test_what_only_the_caller_can_do_is_returned_once_per_fault():
    plan = FaultPlan.parse("learner@update=7:nan; learner@update=8:nan;")
    assert [plan.fire("learner", update=n) for n in range(6, 11)] == [None, "nan", "nan", None, None]


def test_raise_raises_with_the_fault_in_words():
    with pytest.raises(InjectedFault, match=r"actor\[2\]@unroll=1:raise:always"):
        FaultPlan.parse("actor[2]@unroll=1:raise:always").fire("actor", 2, unroll=1)


def test_hang_never_comes_back(monkeypatch):
    class Enough(Exception):
        pass

    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise Enough

    monkeypatch.setattr(faults.time, "sleep", sleep)
    with pytest.raises(Enough):
        FaultPlan.parse("actor[0]@unroll=3:hang").fire("actor", 0, unroll=3)


def test_the_part_of_one_worker_is_mostly_empty():
    plan = FaultPlan.parse("actor[1]@env_step=137:sigkill;actor[0]@unroll=3:hang;learner@update=7:nan")
    assert plan.only("actor", 1) and plan.only("actor", 0) and plan.only("learner")
    assert not plan.only("actor", 2)
    assert not plan.only("actor", 1, incarnation=1)


def test_an_empty_plan_does_nothing():
    plan = FaultPlan.parse(" ; ")
    assert not plan
    assert plan.fire("actor", 0, env_step=1) is None


WRONG = ["sigkill", "actor[1]", "actor[x]@env_step=1:hang", "actor@env_step=-1:hang", "actor@env_step=1:hang:never"]
WRONG += ["acter[1]@env_step=1:hang", "actor[1]@frame=1:hang", "actor[1]@env_step=1:explode"]


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_read_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match=r"write for example actor\[1\]@env_step=137:sigkill") as error:
        FaultPlan.parse(f"actor[1]@env_step=1:hang;{text}")
    assert text in str(error.value)


@pytest.mark.parametrize("action, code", [("sigkill", -signal.SIGKILL), ("exit", 1), ("sigterm", -signal.SIGTERM)])
def test_it_is_the_process_itself_that_ends(action, code):
    script = f"""
from rookery.processes.faults import FaultPlan
FaultPlan.parse("learner@update=2:{action}").fire("learner", update=2)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=120).returncode == code
