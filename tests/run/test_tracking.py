"""Trackers get what a run records; one that refuses, blocks or dies costs records at most, which are counted."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

import rookery
from rookery.cli.main import main
from rookery.core.errors import UsageError
from rookery.metrics import tracker
from rookery.metrics.sink import Sinks, read_records
from rookery.metrics.sink_thread import STUCK, SinkThread
from rookery.run.tracking import flat

SMALL = {
    "env": "CartPole-v1", "env_steps": 512, "envs_per_actor": 2, "quiet": True, "log_every": 0, "net": {"hidden": (8,)},
    "algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "track": ("wandb",),
}  # fmt: skip
SECRET = "canary-0123456789abcdef0123456789abcdef"


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """A function: with a tracker of `support_tracker` in the place of wandb; it returns the file it writes."""

    def use(name: str) -> Path:
        monkeypatch.setitem(tracker.CLASSES, "wandb", f"support_tracker:{name}")
        monkeypatch.setitem(tracker.MODULES, "wandb", "support_tracker")
        monkeypatch.setenv("TRACKED", str(tmp_path / "tracked"))
        return tmp_path / "tracked"

    return use


def rows(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def messages(folder: Path) -> list[str]:
    return [record["text"] for record in read_records(folder / "metrics.jsonl") if record["kind"] == "message"]


def test_a_tracker_gets_the_config_the_records_and_the_end_and_a_resumed_run_continues_there(tmp_path, tracked):
    path = tracked("Recording")
    run = rookery.train("ppo", **SMALL, out=str(tmp_path / "run"), track_project="mine")
    start, *logged, finish = rows(path)
    assert start[:4] == ["start", "mine", "run", ""] and run.summary["records_lost"] == {}
    assert start[4] == dict(flat(run.config)) and start[4]["algo.unroll"] == 16 and start[4]["net.hidden"] == "(8,)"
    trained = [r for r in read_records(run.path / "metrics.jsonl") if r["kind"] == "train"]
    assert [row[1] for row in logged] == [record["env_steps"] for record in trained]
    assert [row[2].get("train/return_mean") for row in logged] == [record["return_mean"] for record in trained]
    assert finish[1]["exit_reason"] == "env_steps" and finish[2] == 0
    path.unlink()
    rookery.resume(run.path, env_steps=1024)
    assert rows(path)[0][:4] == ["start", "mine", "run", "new-1"] and rows(path)[1][1] > 512
    (run.path / "trackers" / "wandb.json").write_text('{"id": "../x"}')
    path.unlink()
    more = ["--env-steps", "99999999", "--fault-plan", "learner@update=50:sigterm", "--log-every", "0.1"]
    assert main(["resume", str(run.path), *more]) == 75
    assert rows(path)[0][3] == "" and any("a new run is started there" in text for text in messages(run.path))
    assert rows(path)[-1][0] == "finish" and rows(path)[-1][2] == 75


def test_a_tracker_that_blocks_for_ever_costs_the_learner_nothing_and_is_killed(tmp_path, tracked, monkeypatch):
    path, spent, real = tracked("Blocking"), [], Sinks.write

    def write(self, record):
        began = time.perf_counter()
        real(self, record)
        spent.append(time.perf_counter() - began)

    monkeypatch.setattr(Sinks, "write", write)
    monkeypatch.setattr("rookery.run.run.TRACKED_CLOSING", 0.5)
    fields = SMALL | {"env_steps": 10**8}

    def until_blocked(training):
        if path.exists() and len(rows(path)) > 1 and training.env_steps > 512:
            training.stop("the tracker is blocked")

    with pytest.warns(UserWarning, match=r"^wandb: [\d,]+ records were not written \(blocked\)$"):
        run = rookery.train("ppo", **fields, out=str(tmp_path / "run"), callbacks=[until_blocked])
    assert run.summary["exit_reason"] == "callback" and run.exit_code == 0
    trained = [r for r in read_records(run.path / "metrics.jsonl") if r["kind"] == "train"]
    assert run.summary["records_lost"]["wandb"] >= len(trained), "none was written"
    usual = sorted(spent)[: int(0.95 * len(spent))]  # in the others, the system gave the core to somebody else
    assert sum(usual) < 0.01 * run.summary["wall_s"], "all that the learner does for its sinks"
    started = rows(path)[-1]
    assert started[0] == "started" and ended(started[1]), "what it has started ends with it"


def ended(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_tracker_that_refuses_is_told_without_its_secrets_and_the_run_goes_on(tmp_path, tracked, monkeypatch):
    tracked("Refusing")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    fields = SMALL | {"env_steps": 10**8, "log_every": 0.1}

    def until_told(training):
        if any("ConnectionError" in text for text in messages(tmp_path / "run")):
            training.stop("it was told")

    with pytest.warns(UserWarning, match="wandb: .* records were not written"):
        run = rookery.train("ppo", **fields, out=str(tmp_path / "run"), callbacks=[until_told])
    assert run.exit_code == 0 and run.summary["records_lost"]["wandb"] > 0
    told = "wandb: failed, training continues: ConnectionError: no answer from https://***@host/ with key ***"
    assert told in messages(run.path)
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(written) > 4 and not any(SECRET.encode() in path.read_bytes() for path in written)


def test_a_tracker_that_dies_is_counted(tmp_path, tracked):
    tracked("Dying")
    with pytest.warns(UserWarning, match=r"wandb: .* records were not written \(its process was killed by SIGKILL"):
        run = rookery.train("ppo", **SMALL, out=str(tmp_path / "run"))
    assert run.exit_code == 0 and run.summary["records_lost"]["wandb"] > 0


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tracker.MODULES, "mlflow", "no_such_module")
    with pytest.raises(UsageError, match=r"mlflow is not installed: pip install 'rookery\[mlflow\]'"):
        rookery.train("ppo", **SMALL | {"track": ("mlflow",)}, out=str(tmp_path / "run"))
    assert main(["train", "ppo", "--env", "CartPole-v1", "--track", "wandby", "--out", str(tmp_path / "run")]) == 2
    assert "wandb" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_sink_that_is_blocked_for_long_is_told_once():
    now = [0.0]
    thread = SinkThread(object(), clock=lambda: now[0])
    thread._since = 0.0
    assert thread.news() == []
    now[0] = STUCK + 1
    assert len(thread.news()) == 1 and thread.news() == []


@pytest.mark.filterwarnings("error")
def test_wandb_offline_and_mlflow_in_files(tmp_path, monkeypatch):
    """The real ones, as one run and its continuation."""
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_API_KEY": SECRET, "WANDB_PROJECT": "p",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rookery.run.run.TRACKED_CLOSING", 60.0)
    fields = SMALL | {"track": ("wandb", "mlflow"), "log_every": 0.0}
    run = rookery.train("ppo", **fields, out=str(tmp_path / "run"))
    again = rookery.resume(run.path, env_steps=1024, net={"log_std": 0.0}, checkpoint={"keep": 2})
    assert run.summary["records_lost"] == again.summary["records_lost"] == {}
    ids = {name: json.loads((run.path / "trackers" / f"{name}.json").read_text())["id"] for name in ("wandb", "mlflow")}

    (there,) = tmp_path.glob("mlruns/*/*/meta.yaml")
    assert there.parent.name == ids["mlflow"] and re.search(r"^run_name: run$", there.read_text(), re.MULTILINE)
    assert re.search(r"^status: 3$", there.read_text(), re.MULTILINE), "finished"
    steps = [int(line.split()[2]) for line in (there.parent / "metrics/train/updates").read_text().splitlines()]
    assert steps == sorted(steps) and steps[0] < 512 < 1024 <= steps[-1]
    assert (there.parent / "params/algo.unroll").read_text() == "16"
    assert (there.parent / "params/checkpoint.keep").read_text() == "3"
    assert (there.parent / "tags/resumed.checkpoint.keep").read_text() == "2"

    recorded = list(tmp_path.glob(f"wandb/offline-run-*-{ids['wandb']}/run-{ids['wandb']}.wandb"))
    assert len(recorded) == 2 and all(b"train/updates" in path.read_bytes() for path in recorded)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any(SECRET.encode() in path.read_bytes() for path in written)
    commands = [read(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    assert not [line for line in commands if str(tmp_path).encode() in line or b"rookery.run.tracker_main" in line]


def read(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
