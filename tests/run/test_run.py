"""A run from outside: what a mistake may cost, and what may not be asked for."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import support_flaky

import rookery
from rookery.cli.main import main
from rookery.core.errors import CheckpointError, EnvError, StorageError, UsageError
from rookery.storage import checkpoint
from rookery.topologies.job import Job

ROOT = Path(__file__).parents[2]
PPO = {"quiet": True, "topology": "serial", "actors": 2, "envs_per_actor": 1}
PPO |= {"algo": {"unroll": 8, "epochs": 1, "minibatches": 1}}
REPLAY = {"min_size": 50, "batch": 8, "capacity": 500, "samples_per_insert": 1.0}
DQN = {"quiet": True, "topology": "serial", "actors": 1, "envs_per_actor": 2, "env_steps": 200}
DQN |= {"algo": {"unroll": 4, "replay": REPLAY}}
FLAKY = {"preset": "vector", "env_steps": 400, "checkpoint": {"every": 50}, "supervisor": {"restarts": 2}}


@pytest.fixture(autouse=True)
def nothing_fails_yet():
    support_flaky.plan.clear()
    support_flaky.closed.clear()


def flaky(out, **fields) -> rookery.Run:
    return rookery.train("ppo", env="support_flaky:make", out=str(out), **(PPO | FLAKY | fields))


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError, match="discrete actions"):
        rookery.train("dqn", env="Pendulum-v1", preset="vector", out=str(tmp_path / "run"), **DQN)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_takes_nothing_away_that_was_there_before(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years of work")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="discrete actions"):
        rookery.train("dqn", env="Pendulum-v1", preset="vector", out=str(tmp_path), **DQN)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "notes", "thesis.tex"]


def test_what_is_drawn_at_the_end_comes_after_the_last_checkpoint_and_the_exit_code(tmp_path, monkeypatch):
    """A signal that comes while it is drawn changes nothing any more."""
    seen = []

    def draw(folder, tell):
        saved, _ = checkpoint.newest(folder / "checkpoints")
        seen.append((saved.env_steps, json.loads((folder / "summary.json").read_text())["exit_reason"]))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("rookery.run.run.write_beside", draw)
    run = rookery.train("ppo", env="CartPole-v1", preset="vector", env_steps=64, out=str(tmp_path / "run"), **PPO)
    assert (run.exit_code, seen) == (0, [(run.summary["env_steps"], "env_steps")])


def test_environments_that_cannot_be_made_again_cost_no_checkpoint(tmp_path):
    support_flaky.plan |= {"step": 150, "make": 3}  # two are made at the start
    with pytest.raises(EnvError, match=r"could be made before cannot any more.*a library has gone"):
        flaky(tmp_path / "run")
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert saved.env_steps >= 100
    assert len(support_flaky.closed) >= 2


def test_what_was_learnt_before_that_is_saved_too(tmp_path):
    support_flaky.plan |= {"step": 150, "make": 3}
    with pytest.raises(EnvError, match=r"cannot any more.*a library has gone") as caught:
        flaky(tmp_path / "run", checkpoint={"every": 10_000})
    assert any("rookery.resume(" in note for note in caught.value.__notes__)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].env_steps >= 100


@pytest.mark.parametrize("when", [1, 20])
def test_a_reset_that_fails_once_is_tried_on_new_environments(tmp_path, when):
    support_flaky.plan["reset"] = when
    run = flaky(tmp_path / "run")
    assert run.summary["restarts"] == 1 and run.summary["env_steps"] >= 400


def test_a_replacement_that_fails_too_is_replaced(tmp_path):
    support_flaky.plan |= {"step": 30, "reset": 8}
    run = flaky(tmp_path / "run")
    assert run.summary["restarts"] >= 1 and run.summary["exit_reason"] == "env_steps"


def test_what_was_made_is_closed_if_the_rest_cannot_be(tmp_path):
    support_flaky.plan["make"] = 2
    with pytest.raises(UsageError, match="a library has gone"):
        flaky(tmp_path / "run")
    assert len(support_flaky.closed) == 1


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"algo": {"replay": REPLAY | {"capacity": 10**12}}}, "needs .* TiB"),
        ({"actors": 2}, r"the run has actors 1.*cannot be resumed with 2"),
        ({"envs_per_actor": 3}, r"the run has envs_per_actor 2.*cannot be resumed with 3"),
        ({"env": "Acrobot-v1"}, r"cannot be resumed in Acrobot-v1: it was trained on .* \[4\] .* has .* \[6\]"),
        ({"net": {"hidden": (7,)}}, "other networks .* than these settings ask for"),
    ],
)
def test_a_resume_that_is_refused_spoils_nothing(tmp_path, fields, why):
    run = rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **DQN)
    before = (run.path / "config.json").read_bytes()
    with pytest.raises(rookery.core.errors.RookeryError, match=why):
        rookery.resume(run.path, env_steps=300, **fields)
    assert (run.path / "config.json").read_bytes() == before
    assert rookery.resume(run.path, env_steps=300).summary["env_steps"] >= 300


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_a_run_goes_on_whose_last_unrolls_were_not_delivered_by_all(tmp_path, monkeypatch, topology):
    """A signal may come while one actor hangs: the others have delivered, and that one has not."""
    write = Job._write

    def without_one(job, snapshots, sequences):
        write(job, [None, None], [sequences[0], sequences[1] - 1])

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_write", without_one)
        run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=100)
    resumed = rookery.resume(run.path, env_steps=200, topology=topology)
    assert resumed.summary["updates"] > run.summary["updates"] and resumed.summary["env_steps"] >= 200


def test_a_signal_ends_a_burst_of_updates(tmp_path):
    replay = REPLAY | {"samples_per_insert": 10_000.0}
    fields = DQN | {"algo": {"unroll": 4, "replay": replay}, "fault_plan": "learner@update=5:sigterm"}
    run = rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **fields)
    assert run.exit_code == 75 and run.summary["updates"] <= 6, "hundreds of thousands are due"


# An environment that ends the run


@pytest.mark.parametrize("recipe", ["ppo", "dqn"])
def test_what_was_learnt_before_environments_ended_the_run_is_saved(tmp_path, recipe):
    support_flaky.plan["step"] = 350
    fields = PPO if recipe == "ppo" else DQN
    fields = fields | {"env_steps": 400, "supervisor": {"restarts": 0}, "preset": "vector"}
    with pytest.raises(EnvError, match="no step today") as caught:
        rookery.train(recipe, env="support_flaky:make", out=str(tmp_path / "run"), **fields)
    assert any(f"rookery.resume('{tmp_path / 'run'}'" in note for note in caught.value.__notes__)
    saved, skipped = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert 250 < saved.env_steps < 350 and not skipped and saved.meta["learner"]["updates"] > 0
    resumed = rookery.resume(tmp_path / "run", trust=("support_flaky",))
    ledger = resumed.summary["ledger"]
    assert resumed.summary["env_steps"] >= 400 and resumed.summary["updates"] > saved.meta["learner"]["updates"]
    out = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    assert ledger["collected"] == out


def test_a_disk_that_does_not_take_it_is_said_and_the_environments_words_come_first(tmp_path, monkeypatch):
    support_flaky.plan["step"] = 350

    def full(job, snapshots, sequences):
        raise StorageError("no space left")

    monkeypatch.setattr(Job, "_write", full)
    with pytest.raises(EnvError, match="no step today") as caught:
        flaky(tmp_path / "run", supervisor={"restarts": 0}, checkpoint={"every": 10_000})
    assert any("could not be saved: no space left" in note for note in caught.value.__notes__)


def test_what_was_saved_already_is_not_saved_again(tmp_path):
    support_flaky.plan["step"] = 3
    with pytest.raises(EnvError, match="no step today") as caught:
        flaky(tmp_path / "run", supervisor={"restarts": 0})
    assert not any("what was learnt" in note for note in caught.value.__notes__)
    assert not (tmp_path / "run" / "checkpoints").exists()


# A run folder


def test_a_run_that_has_no_checkpoint_yet_is_resumed_from_its_start(tmp_path):
    support_flaky.plan["step"] = 3
    with pytest.raises(EnvError):
        flaky(tmp_path / "run", supervisor={"restarts": 0})
    support_flaky.plan.clear()
    run = rookery.resume(tmp_path / "run", trust=("support_flaky",))
    assert run.summary["env_steps"] >= 400 and run.summary["exit_reason"] == "env_steps"
    assert "no checkpoint yet: it starts from the beginning" in (run.path / "metrics.jsonl").read_text()


def test_it_may_then_have_another_number_of_actors(tmp_path):
    support_flaky.plan["step"] = 3
    with pytest.raises(EnvError):
        flaky(tmp_path / "run", supervisor={"restarts": 0})
    support_flaky.plan.clear()
    run = rookery.resume(tmp_path / "run", trust=("support_flaky",), actors=1, envs_per_actor=3)
    assert run.summary["env_steps"] >= 400 and (run.config.actors, run.config.envs_per_actor) == (1, 3)


def test_a_run_whose_checkpoints_are_gone_is_not_taken_for_one_that_had_none(tmp_path):
    run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=64)
    shutil.rmtree(run.path / "checkpoints")
    summary = (run.path / "summary.json").read_bytes()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        rookery.resume(run.path, env_steps=200)
    assert (run.path / "summary.json").read_bytes() == summary


def test_damaged_checkpoints_are_not_taken_for_none(tmp_path):
    run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=64)
    for file in (run.path / "checkpoints").glob("*/tensors.safetensors"):
        file.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded"):
        rookery.resume(run.path, env_steps=200)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=64)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    code = "import sys; from pathlib import Path; from rookery.storage.claim import claimed\n"
    code += "with claimed(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(UsageError, match=f"is being trained in already, by process {other.pid} on "):
            rookery.resume(run.path, env_steps=200)
        with pytest.raises(UsageError, match="is being trained in already"):
            rookery.train("ppo", env="CartPole-v1", out=str(run.path), **PPO)
        after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "lock"}
        assert after == {path: data for path, data in before.items() if path.name != "lock"}
        other.kill()
    assert rookery.resume(run.path, env_steps=200).summary["env_steps"] >= 200


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    def refuse(handle, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", refuse)
    assert rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=64).exit_code == 0


def test_a_disk_that_cannot_be_written_is_storage(tmp_path, monkeypatch):
    run = rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "run"), **PPO, env_steps=64)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*config.json: No space left on device"):
        rookery.resume(run.path, env_steps=200)


def test_two_runs_that_begin_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    runs = [rookery.train("ppo", env="CartPole-v1", **PPO, env_steps=64) for _ in range(3)]
    assert [run.path.name for run in runs] == [f"ppo-CartPole-v1-1-20260101-000000{end}" for end in ("", "-2", "-3")]


def test_a_run_without_an_update_says_that_nothing_was_learnt(tmp_path):
    fields = DQN | {"algo": {"replay": REPLAY | {"min_size": 400}}}
    run = rookery.train("dqn", env="CartPole-v1", out=str(tmp_path / "run"), **fields)
    assert run.summary["updates"] == 0
    assert "before its first update, nothing was learnt" in (run.path / "metrics.jsonl").read_text()
    again = rookery.resume(run.path, env_steps=1000)
    assert again.summary["updates"] > 0


# Checkpoints by the clock


def test_a_slow_environment_is_saved_by_the_clock(tmp_path, monkeypatch):
    """Ten minutes pass with every look: a checkpoint each time there is something new, and none twice."""
    times = itertools.count(0.0, 600.0)
    saved = []
    write = Job._write
    monkeypatch.setattr(Job, "_write", lambda job, *told: (saved.append(job.journal.env_steps), write(job, *told)))
    init = Job.__post_init__
    monkeypatch.setattr(Job, "__post_init__", lambda job: (setattr(job, "clock", lambda: next(times)), init(job))[0])
    rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "a"), **PPO, env_steps=80)
    assert saved[0] == 16 and len(saved) >= 5 and len(set(saved[:-1])) == len(saved[:-1])
    saved.clear()
    rookery.train("ppo", env="CartPole-v1", out=str(tmp_path / "b"), **PPO, env_steps=80, checkpoint={"minutes": 1e9})
    assert len(saved) == 1


def test_a_config_takes_more_fields_and_no_other_environment(tmp_path):
    config = rookery.configure("ppo", "CartPole-v1", env_steps=256, quiet=True)
    run = rookery.train(config, out=str(tmp_path / "run"), envs_per_actor=2, net={"hidden": [8]})
    assert (run.config.out, run.config.envs_per_actor, run.config.net.hidden) == (str(tmp_path / "run"), 2, (8,))
    for named in ({"env": "Acrobot-v1"}, {"preset": "pixels"}):
        with pytest.raises(UsageError, match=r"the config is for CartPole-v1 with the preset 'cartpole': name others"):
            rookery.train(config, **named)
    with pytest.raises(UsageError, match="there is no field 'env_stepz'; did you mean env_steps"):
        rookery.train(config, env_stepz=3)


def test_a_folder_that_is_taken_is_told_in_the_terms_of_the_caller(tmp_path, capsys):
    run = rookery.train("ppo", env="CartPole-v1", env_steps=64, out=str(tmp_path / "run"), **PPO)
    with pytest.raises(UsageError) as told:
        rookery.train("ppo", env="CartPole-v1", out=str(run.path), **PPO)
    assert str(told.value).endswith(
        f"already holds a run; resume it (rookery.resume({str(run.path)!r})) or choose another out"
    )
    assert main(["train", "ppo", "--env", "CartPole-v1", "--out", str(run.path)]) == UsageError.exit_code
    assert f"resume it (rookery resume {run.path}) or choose another --out\n" in capsys.readouterr().err


def test_no_message_of_the_library_has_flags_in_it():
    """They name fields by `setting` of core/wording.py. Left out: tools of the command line, and commands of others."""
    shown = ("cluster_plan.py", "cluster_work.py", "result.py", "page.py", "trust.py", "wording.py")
    found = []
    for path in (ROOT / "rookery").rglob("*.py"):
        if path.parent.name == "cli" or path.name in shown:
            continue
        code = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for text in (each for each in texts if id(each) not in docs and "ray start" not in each.value):
            found += [
                f"{path.name}:{text.lineno} {flag}" for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text.value)
            ]
    assert found == []
