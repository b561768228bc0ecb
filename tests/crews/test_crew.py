"""The crew at its seams: deaths between two messages, unrolls that were announced and not read yet, a wish to leave."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from rookery.crews.local_actor import body
from rookery.topologies.feed import ReplayFeed

import rookery
from rookery.core.errors import EnvError
from rookery.crews.process import Crew
from rookery.envs.scripted import Counter
from rookery.pipes.shm import Slots
from rookery.processes.child import serve
from rookery.processes.signals import Patience, Signals, Stopped
from rookery.storage import checkpoint
from rookery.topologies import local

LONG = 120.0  # seconds: never reached unless something is broken
REPLAY = {"min_size": 100, "batch": 16, "capacity": 600, "samples_per_insert": 2.0}
PPO = {"quiet": True, "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "actors": 2, "envs_per_actor": 2}
APEX = PPO | {
    "algo": {"unroll": 10, "n_step": 1, "replay": REPLAY | {"samples_per_insert": 0.0, "save": False}},
    "topology": "local",
}
GORILA = PPO | {"algo": {"replay": REPLAY}, "topology": "async_grads"}


@pytest.fixture(autouse=True)
def crews(monkeypatch) -> Iterator[list[Crew]]:
    """Every crew that a test starts; nobody of it is there at the end."""
    began: list[Crew] = []
    enter = Crew.__enter__

    def enter_seen(crew: Crew) -> Crew:
        began.append(crew)
        return enter(crew)

    monkeypatch.setattr(Crew, "__enter__", enter_seen)
    yield began
    assert not [worker.name for crew in began for worker in crew.staff.workers if worker.alive()]


class Secretive(Counter):
    """It has a get_state, and nothing to get by it."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def get_state(self) -> dict[str, Any]:
        if self.how == "raises":
            raise RuntimeError("not in the middle of an episode")
        if self.how == "exits":
            os._exit(9)
        if self.how == "hangs":
            select.select([], [], [])
        return {"handle": object()}


def secretive(how: str) -> gymnasium.Env:
    return Secretive(how)


def slow(calls: str, at: int) -> gymnasium.Env:
    """An environment whose construction has no end in the worker number `at`, and makes the user lose patience."""
    with open(calls, "a") as file:
        file.write("made\n")
    if len(Path(calls).read_text().splitlines()) == at:
        os.kill(os.getppid(), signal.SIGTERM)
        select.select([], [], [])
    return Counter()


def deaf(marker: str) -> gymnasium.Env:
    """At its first step, once: hears no SIGABRT, writes no stack, and gives no sign of life any more."""
    env = Counter()
    step = env.step

    def hang(action: Any) -> Any:
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            return step(action)
        faulthandler.disable()
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        select.select([], [], [])

    env.step = hang
    return env


def train_ppo(tmp_path: Path, env: str, kwargs: dict[str, Any], **fields: Any) -> rookery.Run:
    settings = PPO | {"topology": "local", "preset": "vector", "out": str(tmp_path / "run")} | fields
    return rookery.train("ppo", env=f"test_crew:{env}", env_kwargs=kwargs, **settings)


def messages(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["kind"] == "message"]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        os.sched_yield()


def idle(crew: Crew, index: int) -> bool:
    """Whether a worker has announced all it was told to fill, and waits for the next word."""
    status = Path(f"/proc/{crew.staff.workers[index].pid}/stat").read_text().rpartition(")")[2].split()[0]
    filled = [crew.slots.stamp(slot).state == Slots.FULL for slot in crew._busy.get(index, ())]
    return bool(filled) and all(filled) and status == "S"


def kill(crew: Crew, index: int) -> None:
    """SIGKILL to a worker; comes back when it is dead, and its end of the channel closed."""
    fd = os.pidfd_open(crew.staff.workers[index].pid)
    crew.staff.workers[index].kill()
    ended, _, _ = select.select([fd], [], [], LONG)
    os.close(fd)
    assert ended


@pytest.mark.parametrize(("recipe", "fields"), [("ppo", PPO | {"topology": "local"}), ("gorila", GORILA)])
def test_a_worker_that_dies_before_it_is_told_of_the_memory_is_replaced(tmp_path, monkeypatch, recipe, fields):
    opened = Crew.open

    def open_late(crew: Crew, *args, **kwargs) -> None:
        kill(crew, 1)
        opened(crew, *args, **kwargs)

    monkeypatch.setattr(Crew, "open", open_late)
    run = rookery.train(recipe, env="CartPole-v1", out=str(tmp_path / "run"), env_steps=300, **fields)
    assert run.summary["restarts"] == 1 and run.summary["exit_reason"] == "env_steps"
    assert run.summary["ledger"]["dropped"] == {}


@pytest.mark.parametrize(("topology", "how"), [("serial", "raises"), ("serial", "object"), ("local", "raises")])
def test_an_environment_that_cannot_tell_its_state_costs_new_episodes_and_nothing_else(tmp_path, topology, how):
    actors = 1 if topology == "serial" else 2
    fields = {"topology": topology, "actors": actors, "checkpoint": {"every": 64}}
    run = train_ppo(tmp_path, "secretive", {"how": how}, env_steps=500, **fields)
    assert run.summary["restarts"] == 0 and run.summary["exit_reason"] == "env_steps"
    said = [text for text in messages(run.path) if "get_state" in text]
    assert len(said) == 1 and ("middle of an episode" if how == "raises" else "object") in said[0], said
    if topology == "serial":
        again = rookery.resume(run.path, trust=("test_crew",), env_steps=600)
        assert again.summary["exit_reason"] == "env_steps"
        assert any("new episodes begin" in text for text in messages(run.path))


def test_what_was_announced_before_a_death_is_used(tmp_path, monkeypatch):
    ordered, waiting = Crew.order, []

    def order(crew: Crew, index: int, **more: Any) -> None:
        if index == 1 and crew.orders(1) == 2 and not waiting and crew._job.journal.env_steps > 100:
            until(lambda: idle(crew, 1), "two unrolls")
            waiting.extend(crew._busy[1])
            kill(crew, 1)
        ordered(crew, index, **more)

    monkeypatch.setattr(Crew, "order", order)
    run = rookery.train("apex_dqn", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=600, **APEX)
    assert len(waiting) == 2 and run.summary["restarts"] == 1
    # Of each environment at most the step that its next one would have completed; an unroll would be ten.
    assert run.summary["ledger"]["dropped"].get("actor_died", 0) <= APEX["envs_per_actor"]


def test_a_whole_unroll_that_could_not_be_announced_is_counted_to_its_last_row(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "Crew", partial(Crew, module="test_crew"))  # this file, see its end
    fields = PPO | {"topology": "local", "preset": "vector", "actors": 1, "env_kwargs": {"lengths": [1000]}}
    run = rookery.train("ppo", env="rookery/Counter-v0", out=str(tmp_path / "run"), env_steps=200, **fields)
    assert run.summary["ledger"]["dropped"] == {"actor_died": PPO["algo"]["unroll"] * PPO["envs_per_actor"]}


def test_an_actor_whose_unrolls_we_were_too_busy_to_read_does_not_count_as_hung(tmp_path, monkeypatch, crews):
    """A long update with the wish to leave in it."""
    updates, trained, grace = [], ReplayFeed.train, 6.0

    def train(feed: ReplayFeed, sample: Any) -> None:
        updates.append(sample)
        crew = crews[0]
        if len(updates) >= 10 and crew.signals.requested is None and all(map(crew.orders, (0, 1))):
            for index in (0, 1):
                until(lambda: idle(crew, index) and crew._arena.pulse.age(index) > grace / 2, f"actor {index}")  # noqa: B023
            os.kill(os.getpid(), signal.SIGTERM)
        trained(feed, sample)

    monkeypatch.setattr(ReplayFeed, "train", train)
    run = rookery.train(
        "apex_dqn", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=10**6, supervisor={"grace": grace}, **APEX
    )
    assert run.exit_code == 75 and run.summary["restarts"] == 0
    assert run.summary["ledger"]["dropped"] == {}


# The wish to leave. Where it is not heard, the deadlines are too long for these tests to end in time.

LEAVING = {"grace": 3.0, "step_deadline": LONG, "start_deadline": LONG}
ALONE = {"actors": 1, "envs_per_actor": 1, "supervisor": LEAVING}


def test_a_start_that_takes_too_long_for_the_user_ends_and_nobody_is_replaced(tmp_path):
    calls = tmp_path / "calls"
    with pytest.raises(Stopped) as caught:
        train_ppo(tmp_path, "slow", {"calls": str(calls), "at": 1}, env_steps=600, **ALONE)
    assert caught.value.exit_code == 75
    assert (tmp_path / "run" / "config.json").exists(), "it can be resumed"
    assert len(calls.read_text().splitlines()) == 1


def test_a_replacement_that_takes_too_long_for_the_user_is_given_up_and_the_run_is_saved(tmp_path):
    calls = tmp_path / "calls"
    run = train_ppo(
        tmp_path, "slow", {"calls": str(calls), "at": 2}, env_steps=600, fault_plan="actor[0]@unroll=3:sigkill", **ALONE
    )
    assert run.exit_code == 75 and len(calls.read_text().splitlines()) == 2
    assert checkpoint.newest(run.path / "checkpoints")[0].env_steps == run.summary["env_steps"] > 0


def test_all_snapshots_share_the_time_that_a_user_who_wants_to_leave_has(tmp_path, monkeypatch):
    snapshots, spent = Crew.snapshots, []

    def timed(crew: Crew) -> list[Any]:
        began = time.monotonic()
        states = snapshots(crew)
        spent.append(time.monotonic() - began)
        return states

    monkeypatch.setattr(Crew, "snapshots", timed)
    fields = {"supervisor": LEAVING, "fault_plan": "learner@update=2:sigterm"}
    run = train_ppo(tmp_path, "secretive", {"how": "hangs"}, env_steps=10**6, **fields)
    assert run.exit_code == 75 and len(spent) == 1 and spent[0] < LONG / 2
    assert checkpoint.newest(run.path / "checkpoints")[0].env_steps == run.summary["env_steps"] > 0


def test_patience_is_shorter_from_the_wish_to_leave_on():
    now = [100.0]

    def clock() -> float:
        return now[0]

    with Signals(clock=clock) as signals:
        patience = Patience(signals, 60.0, 10.0, clock=clock)
        now[0] = 130.0
        assert patience.left() == 30.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert patience.left() == 10.0
        now[0] = 150.0
        assert patience.left() == 0.0
        assert Patience(signals, 60.0, 10.0, clock=clock).left() == 0.0
        assert Patience(signals, 60.0, 10.0, since=150.0, clock=clock).left() == 10.0
        assert Patience(signals, 5.0, 10.0, since=150.0, clock=clock).left() == 5.0


if __name__ == "__main__":  # as an actor, which dies in its first life between a whole unroll and the news of it
    finish = Slots.finish

    def finish_and_die(slots: Slots, slot: int) -> None:
        finish(slots, slot)
        if slots.stamp(slot).incarnation == 0 and slots.stamp(slot).sequence == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Slots.finish = finish_and_die
    serve(body)


@pytest.mark.parametrize(("recipe", "fields"), [("apex_dqn", APEX), ("gorila", GORILA)])
def test_nobody_waits_while_a_replacement_comes_up(tmp_path, monkeypatch, recipe, fields):
    """Its process loads libraries for seconds: the learner learns meanwhile, and the other actor delivers."""
    spawn, started, seen = Crew._spawn, Crew._started, {}

    def now(crew: Crew) -> tuple[int, int]:
        return crew._job.learner.updates, crew._job.sequences[0]

    def seen_spawn(crew: Crew, index: int) -> None:
        spawn(crew, index)
        if crew.staff.incarnation[index]:
            seen["spawned"], seen["job"] = now(crew), crew._job

    def seen_started(crew: Crew, index: int):
        yield from started(crew, index)
        if crew.staff.incarnation[index]:
            seen["up"] = now(crew)

    def wanted(journal) -> str | None:  # as many steps as it takes, and then until the newcomer has delivered
        if "up" not in seen:
            return None
        delivered = seen["job"].sequences[1]
        return "env_steps" if delivered > seen.setdefault("first", delivered) else None

    monkeypatch.setattr(Crew, "_spawn", seen_spawn)
    monkeypatch.setattr(Crew, "_started", seen_started)
    monkeypatch.setattr("rookery.metrics.journal.Journal.finished", wanted)
    run = rookery.train(
        recipe, env="CartPole-v1", out=str(tmp_path / "run"), env_steps=10**9,
        fault_plan="actor[1]@env_step=137:sigkill", **fields,
    )  # fmt: skip
    assert run.summary["restarts"] == 1
    updates, unrolls = (after - before for before, after in zip(seen["spawned"], seen["up"]))
    assert updates > 10 and unrolls > 10, (updates, unrolls)


def test_the_learner_learns_while_a_worker_that_does_not_listen_is_being_ended(tmp_path, monkeypatch):
    """It ignores SIGABRT: only SIGKILL ends it, when the time for its stack is over."""
    monkeypatch.setattr("rookery.processes.worker.ABORT_WAIT", 2.0)
    end, seen = Crew._end, {}

    def seen_end(crew: Crew, index: int, lost: Any):
        before = crew._job.learner.updates
        error = yield from end(crew, index, lost)
        seen["updates"] = crew._job.learner.updates - before
        return error

    monkeypatch.setattr(Crew, "_end", seen_end)
    monkeypatch.setattr("rookery.metrics.journal.Journal.finished", lambda journal: "env_steps" if seen else None)
    run = rookery.train(
        "apex_dqn", env="test_crew:deaf", env_kwargs={"marker": str(tmp_path / "marker")}, out=str(tmp_path / "run"),
        env_steps=10**9, supervisor={"step_deadline": 2.0}, **APEX,
    )  # fmt: skip
    assert seen["updates"] > 10
    ledger = run.summary["ledger"]
    dropped, kept = sum(ledger["dropped"].values()), ledger["evicted"] + ledger["in_flight"]
    assert ledger["collected"] == ledger["trained"] + dropped + kept


@pytest.mark.parametrize(("recipe", "fields"), [("apex_dqn", APEX), ("gorila", GORILA)])
def test_a_replacement_that_comes_too_late_for_the_run_is_given_up(tmp_path, monkeypatch, recipe, fields):
    """The other actor has taken all the steps: nobody waits for one that would have nothing to do."""
    given_up, finish, started = [], Crew.finish, Crew._started

    def never(crew: Crew, index: int):
        while crew.staff.incarnation[index]:
            yield [], LONG
        yield from started(crew, index)

    def seen(crew: Crew) -> None:
        given_up.extend(crew._coming)
        finish(crew)

    monkeypatch.setattr(Crew, "_started", never)
    monkeypatch.setattr(Crew, "finish", seen)
    run = rookery.train(
        recipe, env="CartPole-v1", out=str(tmp_path / "run"), env_steps=2000,
        fault_plan="actor[1]@env_step=137:sigkill", **fields,
    )  # fmt: skip
    assert given_up == [1] and run.summary["exit_reason"] == "env_steps" and run.summary["restarts"] == 1


def test_an_actor_that_dies_when_all_is_done_is_nobodys_trouble(tmp_path, monkeypatch, crews):
    """No replacement, no failure: what was wanted is there, and what it was filling is booked."""
    arrived = Crew.arrived

    def dead() -> bool:
        return not crews[0].staff.workers[1].alive()

    def unnoticed(crew: Crew, timeout: float, again: bool = True):
        return iter(()) if dead() and not crew._finishing else arrived(crew, timeout, again)

    monkeypatch.setattr(Crew, "arrived", unnoticed)
    monkeypatch.setattr("rookery.metrics.journal.Journal.finished", lambda journal: "target_return" if dead() else None)
    run = rookery.train(
        "apex_dqn", env="CartPole-v1", out=str(tmp_path / "run"), env_steps=10**6, supervisor={"restarts": 0},
        fault_plan="actor[1]@env_step=137:sigkill", **APEX,
    )  # fmt: skip
    assert run.exit_code == 0 and run.summary["exit_reason"] == "target_return"
    assert run.summary["ledger"]["dropped"]["actor_died"] > 0


def test_what_was_learnt_is_saved_though_no_actor_can_tell_its_state(tmp_path):
    """The end comes while a checkpoint is being made: that one does not count as written."""
    with pytest.raises(EnvError) as caught:
        train_ppo(tmp_path, "secretive", {"how": "exits"}, env_steps=64, actors=1, supervisor={"restarts": 0})
    assert any("what was learnt is saved" in note for note in caught.value.__notes__)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps >= 64
