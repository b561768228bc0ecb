"""A sweep with real processes: what fails, is interrupted or killed, and how it goes on. Trainings are tiny."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support_orphans import until

import rookery
from rookery.core.errors import UsageError
from rookery.metrics.compare import as_numbers, compare

TINY = {"env_steps": 512, "envs_per_actor": 4, "quiet": True, "log_every": 0.05}
TINY |= {"algo": {"unroll": 16, "epochs": 1, "minibatches": 1}}
ENDLESS = ["--env-steps", "100M", "--seeds", "4,", "--jobs", "1", "--log-every", "0.05"]


def test_one_failed_and_one_stopped_run_are_told_and_go_on(tmp_path):
    """The faults are those of the first process of a run: a resumed one has none."""
    plans = ["learner@update=4:sigterm", "learner@update=2:raise"]
    asked = {"seeds": [7], "set": {"fault_plan": plans}, "jobs": 2, "out": tmp_path / "s", **TINY}
    with pytest.warns(UserWarning, match=r"has failed .*InjectedFault"):
        found = rookery.sweep("ppo", env="CartPole-v1", **asked)
    stopped, failed = found.runs
    assert (stopped.state, stopped.exit_code, failed.state, failed.exit_code) == ("stopped", 75, "failed", 4)
    assert found.exit_code == 75 and "InjectedFault" in failed.error
    assert "InjectedFault" in (failed.path / "logs" / "run.log").read_text()
    (saved,) = (stopped.path / "checkpoints").iterdir()

    found = rookery.sweep("ppo", env="CartPole-v1", **asked)  # goes on with what was stopped
    assert [run.state for run in found.runs] == ["done", "failed"] and found.exit_code == 4
    assert found.failed[0].error == failed.error  # as stored
    assert saved.exists() and not (stopped.path / "metrics-1.jsonl").exists()  # from its checkpoint, no step again
    ended = (stopped.path / "summary.json").stat().st_mtime_ns

    found = rookery.sweep("ppo", env="CartPole-v1", retry=True, **asked)
    assert [run.state for run in found.runs] == ["done", "done"] and found.exit_code == 0
    assert (stopped.path / "summary.json").stat().st_mtime_ns == ended  # a complete run is kept
    assert all(run.summary["env_steps"] >= 512 for run in found.runs)
    assert found.best.config.topology == "serial"  # auto

    for each in found.table:
        (row,) = compare([run.path for run in found.runs if run.setting == each.setting])
        assert each.row == row
    summary = json.loads((found.path / "summary.json").read_text())
    assert [each["result"] for each in summary["settings"]] == [as_numbers(each.row) for each in found.table]
    assert found.best.row.final.value == max(each.row.final.value for each in found.table)
    assert "<td>" in found._repr_html_() and "| runs | return |" in (found.path / "sweep.md").read_text()


def test_a_run_that_is_killed_has_failed_and_the_next_one_begins(tmp_path):
    """Its process ends without a word, as for want of memory; the next one gets its descriptors."""
    plans = ["learner@update=1:sigkill", ""]
    with pytest.warns(UserWarning, match=r"has failed .*SIGKILL"):
        found = rookery.sweep(
            "ppo", env="CartPole-v1", seeds=[7], set={"fault_plan": plans}, jobs=1, out=tmp_path / "s", **TINY
        )
    assert [(run.state, run.exit_code) for run in found.runs] == [("failed", 4), ("done", 0)]


def command(*words: str) -> subprocess.Popen:
    wide = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # paths are not broken
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", "rookery", "sweep", *words], env=wide, **pipes)


def trains(run: Path, besides: str = "") -> bool:
    """Whether another process than `besides` trains in the folder, and has written records."""
    return (run / "lock").is_file() and (run / "lock").read_text() not in ("", besides) and records(run) > 0


def records(run: Path) -> int:
    return (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").is_file() else 0


def test_ctrl_c_saves_the_runs_and_kill_9_leaves_none_behind(tmp_path):
    out = tmp_path / "s"
    run = out / "runs" / "base-seed-4"
    first = command("ppo", "--env", "CartPole-v1", "--out", str(out), *ENDLESS)
    until(lambda: trains(run), "the run to begin")
    first.send_signal(signal.SIGINT)
    told, _ = first.communicate(timeout=60)
    assert first.returncode == 130, told
    assert f"rookery sweep --resume {out}" in told and len(list((run / "checkpoints").iterdir())) == 1
    before, size = (run / "lock").read_text(), records(run)

    second = command("--resume", str(out))
    until(lambda: trains(run, before) and records(run) > size, "the run to go on")
    child = os.pidfd_open(int((run / "lock").read_text().split()[1]))
    second.kill()
    second.communicate(timeout=60)
    assert select.select([child], [], [], 30)[0]  # it has ended
    os.close(child)
    assert "starts from the beginning" not in (run / "logs" / "run.log").read_text()


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path):
    asked = {"seeds": 1, "out": tmp_path / "s", **TINY}
    with pytest.raises(UsageError, match=r"is a lambda.*every run of a sweep is a process of its own"):
        rookery.sweep("ppo", env=lambda: None, preset="vector", **asked)
    with pytest.raises(UsageError, match=r"algo\.gamma is 7"):
        rookery.sweep("ppo", env="CartPole-v1", set={"algo.gamma": [0.9, 7]}, **asked)
    with pytest.raises(UsageError, match="give the seeds of the sweep"):
        rookery.sweep("ppo", env="CartPole-v1", seed=3, **asked)
    with pytest.raises(UsageError, match="jobs is 0"):
        rookery.sweep("ppo", env="CartPole-v1", jobs=0, **asked)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a run"):
        rookery.sweep("ppo", env="CartPole-v1", seeds=1, out=tmp_path, **TINY)


def test_trials_are_trained_and_a_sweep_goes_on_to_more_of_them(tmp_path):
    asked = {"search": {"algo.lr": ("log", 1e-5, 1e-2)}, "jobs": 1, "out": tmp_path / "s", **TINY}
    one = rookery.sweep("ppo", env="CartPole-v1", optuna=1, **asked)
    two = rookery.sweep("ppo", env="CartPole-v1", optuna=2, **asked)
    assert [run.name for run in two.runs] == ["trial-0000-seed-1", "trial-0001-seed-1"]
    assert two.runs[0] == one.runs[0] and two.exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "s" / "optuna.log").read_text().splitlines()]
    values = [line["values"][0] for line in lines if line.get("values")]
    assert values == [run.summary["return_mean"] for run in two.runs]
    with pytest.raises(UsageError, match="holds another sweep, with trials"):
        rookery.sweep("ppo", env="CartPole-v1", set={"algo.lr": [1e-3]}, **{**asked, "search": None})
