"""Random attacks on runs, from outside: real commands, real signals, real damage, everything drawn from one seed.

Each attack is a method that raises AssertionError with what it saw. `Siege.round` draws one. What must hold after every
attack: the exit code is one of the interface, no traceback is printed, no process is left, no file outside the run
folder is touched, the ledger balances in every record, and the run can be resumed or is refused with a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support_damage import KINDS, damage

DEADLINE = 120.0  # seconds for one command
PATIENCE = 5.0  # seconds for what a killed run has started to be gone
SMALL = ["--quiet", "--log-every", "0", "--checkpoint.every", "2000", "--supervisor.step-deadline", "5"]
SMALL += ["--supervisor.start-deadline", "30"]  # a worker may be stopped while it starts
LOCAL = ["--topology", "local", "--actors", "2", "--envs-per-actor", "2"]
PPO = ["ppo", "--env", "CartPole-v1", "--algo.unroll", "32", "--algo.epochs", "1"]
REPLAY = ["--env", "CartPole-v1", "--algo.replay.min-size", "200", "--algo.replay.capacity", "5000"]
RUNS = {
    "ppo serial": [*PPO, "--envs-per-actor", "4"],
    "ppo local": [*PPO, *LOCAL],
    "dqn serial": ["dqn", *REPLAY, "--envs-per-actor", "2"],
    "apex local": ["apex_dqn", *REPLAY, *LOCAL],
    "gorila": ["gorila", *REPLAY, "--actors", "2", "--envs-per-actor", "2"],
}
PLACES = [
    "lock",
    "config.json",
    "config.json.tmp",
    "spec.json",
    "spec.json.tmp",
    "summary.json",
    "metrics.jsonl",
    "eval",
    "report",
    "report/curve.png",
    "logs",
    "logs/actor-0.log",
    "tensorboard",
    "checkpoints",
    "replay",
]
HOSTILE: dict[str, list[Any]] = {
    "env": ["os:system", "rookery.crews.probe:probe", "rookery/Faulty-v0", "GymV26Environment-v0"],
    "algorithm": ["os:system", "rookery.processes.worker:Worker", "rookery.algorithms.base:Algorithm"],
    "net.module": ["os:system", "rookery.storage.files:FileLayer", "antigravity:x"],
    "env_steps": [-1, 10**30, "many", None],
    "actors": [0, 10**9, "two"],
    "net.hidden": [[10**9, 10**9], [-1], "wide"],
    "topology": ["../../etc", "probe", 3],
    "out": ["/", "../.."],
    "recipe": ["\x1b]0;owned\x07", "\x1b[2J"],
}


@dataclass
class Done:
    code: int
    text: str  # standard output and error
    seconds: float


@dataclass
class Siege:
    folder: Path
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)  # seconds from the kill of a worker until its successor lives
    gone: list[float] = field(default_factory=list)  # seconds from the kill of a run until nothing of it was left

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.canary = self.folder / "canary"
        self.canary.mkdir(parents=True)
        (self.canary / "notes.txt").write_text("not yours")
        self._finished: dict[str, Path] = {}
        self.attacks: list[Callable[[], None]] = [
            self.kill_a_worker, self.kill_the_run, self.stop_the_run,
            self.damage_a_file, self.plant_a_link, self.forge_a_config,
        ]  # fmt: skip

    def round(self, number: int) -> str:
        """One attack; its name."""
        attack = self.rng.choice(self.attacks)
        place = self.folder / f"round-{number}"
        place.mkdir()
        self.place = place
        try:
            attack()
            self._check_canary()
        except AssertionError as error:
            error.add_note(f"attack {attack.__name__}, round {number}, seed {self.seed}")
            raise
        self.counts[attack.__name__] += 1
        shutil.rmtree(place)
        return attack.__name__

    # Attacks on a run that is on

    def kill_a_worker(self) -> None:
        kind = self.rng.choice(["ppo local", "apex local", "gorila"])
        number = self.rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
        with self._running(kind, 60_000) as (process, out):
            self._await(lambda: (out / "metrics.jsonl").exists() and len(workers_of(out)) >= 2, "workers", process)
            before = workers_of(out)
            victim = self.rng.choice(sorted(before))
            struck = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)
            self._await(lambda: workers_of(out) - before or process.poll() is not None, "a successor", process)
            if number == signal.SIGKILL and process.poll() is None:
                self.recovery.append(time.monotonic() - struck)
            assert process.wait(DEADLINE) == 0, (kind, number, said(out))
        self._check_books(out)
        self._check_gone(out)

    def kill_the_run(self) -> None:
        kind = self.rng.choice(sorted(RUNS))
        with self._running(kind, 10**9) as (process, out):
            self._await_start(process, out)
            self._linger(process)
            process.kill()
            process.wait(DEADLINE)
            began = time.monotonic()
            self._check_gone(out)
            self.gone.append(time.monotonic() - began)
        self._resume_to_the_end(out)

    def stop_the_run(self) -> None:
        kind = self.rng.choice(sorted(RUNS))
        number = self.rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
        with self._running(kind, 10**9) as (process, out):
            self._await_start(process, out)
            self._linger(process)
            process.send_signal(number)
            code = process.wait(DEADLINE)
            assert code == (130 if number == signal.SIGINT else 75), (kind, number, code, said(out))
        self._check_gone(out)
        self._check_books(out)
        self._resume_to_the_end(out)

    # Attacks on a folder

    def damage_a_file(self) -> None:
        out = self._copy()
        files = sorted(path for path in out.rglob("*") if path.is_file())
        victim = self.rng.choice(files)
        original, other = victim.read_bytes(), self.rng.choice(files).read_bytes()
        if not original:
            return
        kind = self.rng.choice(KINDS)
        damage(victim, original, other, kind, self.rng.random(), self.rng.randrange(8), self.rng.randbytes(1))
        self._try_verbs(out, f"{kind} of {victim.relative_to(out)}")

    def plant_a_link(self) -> None:
        out = self._copy()
        name = self.rng.choice(PLACES)
        victim = out / name
        if victim.is_dir() and not victim.is_symlink():
            shutil.rmtree(victim)
        else:
            victim.unlink(missing_ok=True)
        victim.parent.mkdir(exist_ok=True)
        kind = self.rng.choice(["file", "folder", "fifo", "nowhere"])
        if kind == "fifo":
            os.mkfifo(victim)
        else:
            targets = {"file": "notes.txt", "folder": ".", "nowhere": "made-by-us"}
            victim.symlink_to(self.canary / targets[kind])
        self._try_verbs(out, f"{name} as {kind}")

    def forge_a_config(self) -> None:
        out = self._copy()
        config = json.loads((out / "config.json").read_text())
        what = []
        for path in self.rng.sample(sorted(HOSTILE), self.rng.randint(1, 3)):
            value = self.rng.choice(HOSTILE[path])
            at = config
            *parents, last = path.split(".")
            for name in parents:
                at = at[name]
            at[last] = value
            what.append(f"{path}={value!r}")
        if self.rng.random() < 0.7:
            mark = str(self.canary / "owned")
            config["env_kwargs"] = {"command": f"touch {mark}", "marker": mark, "env": "os:system"}
        (out / "config.json").write_text(json.dumps(config))
        self._try_verbs(out, ", ".join(what), controls=True)

    # What they share

    def _try_verbs(self, out: Path, what: str, controls: bool = False) -> None:
        verbs = [["eval", str(out), "--episodes", "2"], ["plot", str(out)], ["resume", str(out), "--env-steps", "3000"]]
        for words in self.rng.sample(verbs, 2):
            done = self._command(words)
            assert done.code in (0, 2, 3, 6, 7), (what, words, done.code, done.text[-2000:])
            assert "Traceback" not in done.text, (what, words, done.text[-2000:])
            assert "\x1b" not in done.text or not controls, (what, words, done.text[-2000:])
            self._check_gone(out)
            self._check_canary()

    def _copy(self) -> Path:
        """A finished run of one kind, to be attacked."""
        kind = self.rng.choice(["ppo serial", "dqn serial", "ppo local"])
        if kind not in self._finished:
            made = self.folder / kind.replace(" ", "-")
            done = self._command(["train", *RUNS[kind], *SMALL, "--env-steps", "2500", "--out", str(made)])
            assert done.code == 0, done.text[-2000:]
            self._finished[kind] = made
        return Path(shutil.copytree(self._finished[kind], self.place / "run"))

    def _resume_to_the_end(self, out: Path) -> None:
        """From where it was stopped: a little further, and whole."""
        steps = max((record.get("env_steps", 0) for record in records(out)), default=0)
        done = self._command(["resume", str(out), "--env-steps", str(steps + 1000), "--quiet"])
        assert done.code == 0, (done.code, done.text[-2000:])
        self._check_books(out)
        self._check_gone(out)

    def _command(self, words: list[str]) -> Done:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "rookery", *words], capture_output=True, text=True, errors="replace",
            timeout=DEADLINE, stdin=subprocess.DEVNULL, cwd=self.place,
        )  # fmt: skip
        return Done(done.returncode, done.stdout + done.stderr, time.monotonic() - began)

    @contextlib.contextmanager
    def _running(self, kind: str, steps: int) -> Iterator[tuple[subprocess.Popen, Path]]:
        out = self.place / "run"
        command = [sys.executable, "-m", "rookery", "train", *RUNS[kind], *SMALL, "--env-steps", str(steps)]
        process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process, out
        finally:
            process.kill()
            process.wait(DEADLINE)

    def _await(self, condition: Callable[[], Any], what: str, process: subprocess.Popen) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert process.poll() is None, f"the run ended with {process.poll()} while we waited for {what}"
            assert time.monotonic() < until, f"waited in vain for {what}"
            time.sleep(0.02)

    def _await_start(self, process: subprocess.Popen, out: Path) -> None:
        self._await(lambda: any("ledger" in record for record in records(out)), "the first record", process)

    def _linger(self, process: subprocess.Popen) -> None:
        """A random moment of the run."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.rng.uniform(0.0, 3.0))

    def _check_books(self, out: Path) -> None:
        for record in records(out):
            if ledger := record.get("ledger"):
                ends = ledger["trained"] + ledger["evicted"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
                assert ledger["collected"] == ends, ledger

    def _check_gone(self, out: Path) -> None:
        until = time.monotonic() + PATIENCE
        while left := processes_of(out):
            assert time.monotonic() < until, f"left running: {left}"
            time.sleep(0.01)

    def _check_canary(self) -> None:
        found = {path.name: path.read_text() for path in self.canary.iterdir()}
        assert found == {"notes.txt": "not yours"}, found


def records(out: Path) -> list[dict[str, Any]]:
    """Whole records of a run that may be writing."""
    path = out / "metrics.jsonl"
    if path.is_symlink() or not path.is_file():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.split(b"\n") if line]


def said(out: Path) -> list[str]:
    return [record["text"] for record in records(out) if record.get("kind") == "message"][-5:]


def workers_of(out: Path) -> set[int]:
    """Living workers of a run: their output is the log of an actor. The spare process is none: nobody replaces it."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{out}/logs/actor-"):
                found.add(int(link.parts[2]))
    return found


def processes_of(out: Path) -> dict[int, str]:
    """Living processes that name the run in their command, or hold a file in its folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            held = any(_links_to(link, out) for link in (process / "fd").iterdir())
            state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if (str(out) in command or held) and state != "Z" and int(process.name) != os.getpid():
                found[int(process.name)] = command
    return found


def _links_to(link: Path, out: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(link).startswith(str(out))
    return False
