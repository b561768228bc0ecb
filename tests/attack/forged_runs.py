"""Thousands of forged run folders in one process, watched: `python forged_runs.py HONEST FOLDER SEED ROUNDS`.

An audit hook of Python sees every import, every file that is opened for writing, every program that is started, every
library and socket that is opened. What is needed legitimately is loaded and done once before the hook listens; after
that, a refused folder must cause none of these events. The report is JSON on standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import random
import re
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rookery
from rookery.cli.main import main
from rookery.core.errors import RookeryError
from rookery.core.printable import printable
from rookery.storage.trusted import ALGORITHMS, ENVS, TEST_TASKS

REFUSED = (2, 6)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Everything else that runs code, starts a program, changes a file or opens a connection.
ACTS = (
    "import", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
    "pty.spawn", "ctypes.dlopen", "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "os.mkdir",
    "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.utime",
    "os.putenv", "os.kill", "os.killpg", "shutil.rmtree", "shutil.copyfile", "shutil.move", "tempfile.mkstemp",
    "tempfile.mkdtemp", "pickle.find_class", "marshal.loads", "marshal.load", "code.__new__", "webbrowser.open",
)  # fmt: skip


# What `plot` does to write report/curve.png, relative to the descriptor of the folder.
DRAWN = re.compile(
    r"os\.mkdir \('report', \d+, \d+\)|open '\.tmp-[0-9a-f]{32}' None \d+|open \d+ w \d+"
    r"|os\.rename \('\.tmp-[0-9a-f]{32}', 'curve\.png', \d+, \d+\)"
)


# The command line tells the processes that it starts how their messages name fields.
TOLD = "os.putenv (b'ROOKERY_INTERFACE', b'flags')"


class Watch:
    """Notes what happens while it listens."""

    def __init__(self) -> None:
        self.listening = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.listening:
            return
        self.listening = False  # what follows is ours
        if event == "open":
            path, mode, flags = args
            if (mode and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & WRITES):
                self.seen.append(f"open {path!r} {mode} {flags}")
        elif event in ("exec", "compile"):
            where = getattr(args[0], "co_filename", None) or args[-1]
            if where not in ("<string>", None):  # dataclasses and named tuples are made of strings of their own
                self.seen.append(f"{event} {where!r}")
        elif event in ACTS:
            self.seen.append(f"{event} {args!r:.200}")
            if self.seen[-1] == TOLD:
                self.seen.pop()
        self.listening = True

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.listening = True
        try:
            yield
        finally:
            self.listening = False


# The forgery


def importable() -> list[str]:
    """Every name that an import path could lead to in the package, private ones and imported ones too."""
    found = []
    for module in pkgutil.walk_packages(rookery.__path__, "rookery."):
        names = dir(importlib.import_module(module.name))
        found += [f"{module.name}:{name}" for name in names]
    return found


def hostile(loot: str) -> list[dict[str, Any]]:
    """Arguments that name code, files, programs or other environments."""
    touch = f"touch {loot}"
    inner = {"env": "os:system", "env_kwargs": {"command": touch}}
    return [
        inner, {"command": touch}, {"args": ["touch", loot]}, {"args": touch, "shell": True}, {"path": loot},
        {"fault": "hang", "env": "payload:X-v0"}, {"fault": "raise_step", "marker": loot}, {"env": "payload:X-v0"},
        {"module": "payload"}, {"name": "payload"}, {"xml_file": loot}, {"render_mode": "human"}, {"folder": loot},
        {"wrappers": ["payload:X"]}, {"vector_kwargs": {"shared_memory": True}}, {"file": loot, "mode": "w"},
        {"question": inner, "deadline": 1}, {"config": {"env": "os:system"}}, {"argv": ["train", "ppo"]},
        {"words": [touch]}, {"num_envs": 1, "path": loot}, {"env_id": "payload:X-v0"}, {"entry_point": "os:system"},
        {"max_episode_steps": 10**30}, {"length": [[]] * 3}, {"x": {"y": {"z": "os:system"}}},
    ]  # fmt: skip


PIECES = (
    ":", "::", ".", "..", "/", "../", "-v0", "-v5", "os", "payload", "payload:", "os:system", "rookery.", "rookery/",
    "ALE/", "dmc/", "\0", "\n", "\x1b[2J", "\u202e", " ", "é", "ｏｓ", "%s", "{}", "\\", "'", '"', "[red]", "__class__",
    "gymnasium:", "subprocess:Popen", "builtins:exec", "GymV21Environment-v0", "rookery/Faulty-v0",
)  # fmt: skip

# Fields that are words, names or groups; the numbers of a config are other tests' affair.
WORDS = ("recipe", "algorithm", "env", "env_kwargs", "net", "atari", "algo", "preset", "out", "topology", "device",
         "compile", "quiet", "debug", "fault_plan", "new")  # fmt: skip


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(text))
        kind = rng.random()
        if kind < 0.6:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind < 0.8:
            text = text[:at] + text[at + rng.randint(1, 4) :]
        else:
            text = text[:at] + rng.choice([text[at : at + 1].swapcase(), chr(rng.randrange(0x300))]) + text[at + 1 :]
    return text


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A random value of JSON."""
    if depth < 3 and rng.random() < 0.3:
        values = [junk(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        return values if rng.random() < 0.5 else {rng.choice(PIECES): value for value in values}
    return rng.choice([None, True, 0, -1, 2**70, 1e308, -0.5, "", "x" * 10_000, *PIECES])


def forged_names(rng: random.Random, config: dict[str, Any], loot: str) -> list[dict[str, Any]]:
    """Every importable name in every place for code, and every listed environment with hostile arguments."""
    arguments, names = hostile(loot), importable()
    found = [config | {"env": env, "env_kwargs": rng.choice(arguments)} for env in ENVS]
    for path in names:
        found.append(config | {"env": path, "env_kwargs": rng.choice([{}, *arguments])})
        found.append(config | {"net": config["net"] | {"module": path}})
        if path not in ALGORITHMS:
            found.append(config | {"algorithm": path})
    return found


def mutations(rng: random.Random, config: dict[str, Any], loot: str, count: int) -> Iterator[dict[str, Any]]:
    """Names and values that are nearly right, or not at all."""
    arguments = hostile(loot)
    good = [*ALGORITHMS, *ENVS, *TEST_TASKS, "payload:X", "payload:X-v0", "os:system", "rookery.envs.make:make"]
    for _ in range(count):
        kind = rng.random()
        if kind < 0.6:
            path = mutated(rng, rng.choice(good))
            field = rng.choice(["algorithm", "env", "env", "module", "recipe", "out", "fault_plan"])
            other = {"net": config["net"] | {"module": path}} if field == "module" else {field: path}
            yield config | other | {"env_kwargs": rng.choice([{}, *arguments])}
        elif kind < 0.8:
            yield config | {rng.choice(WORDS): junk(rng)}
        else:
            group = rng.choice(["net", "atari"])
            words = [name for name, value in config[group].items() if not isinstance(value, int)]
            yield config | {group: config[group] | {rng.choice([*words, "new"]): junk(rng)}}


# The victim


def load(run: str) -> int:
    try:
        rookery.load(run)
    except RookeryError as error:
        return error.exit_code
    return 0


def resume(run: str) -> int:
    try:
        rookery.resume(run)
    except RookeryError as error:
        return error.exit_code
    return 0


def command(verb: str) -> Any:
    def call(run: str) -> int:
        return main([verb, run, *(["--episodes", "1"] if verb in ("eval", "record") else [])])

    return call


WAYS = {verb: command(verb) for verb in ("eval", "resume", "record", "plot")} | {"load()": load, "resume()": resume}


class Campaign:
    def __init__(self, honest: Path, folder: Path, seed: int):
        self.run, self.loot, self.rng = folder / "run", folder / "loot", random.Random(seed)
        (folder / "payload.py").write_text(f"open({str(self.loot)!r}, 'w').close()\n")
        sys.path.append(str(folder))
        shutil.copytree(honest, self.run)
        self.config = json.loads((self.run / "config.json").read_text())
        self.watch = Watch()
        self.modules: set[str] = set()
        self.counts: dict[str, int] = {}
        self.faults: list[str] = []

    def warm(self) -> None:
        """What every way needs is loaded and done once, for the honest run and for refused ones."""
        for way in WAYS.values():
            for env in (self.config["env"], "os:system", "Nobody-v0"):
                self._write(self.config | {"env": env})
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    way(str(self.run))
        self.modules = set(sys.modules)

    def _write(self, config: dict[str, Any]) -> None:
        (self.run / "config.json").write_text(json.dumps(config))

    def attack(self, config: dict[str, Any], name: str) -> None:
        self._write(config)
        said, code = io.StringIO(), -1
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                with self.watch():
                    code = WAYS[name](str(self.run))
            except BaseException:  # an exception is a finding, whatever it is
                said.write(traceback.format_exc())
        self.counts[f"{name} {code}"] = self.counts.get(f"{name} {code}", 0) + 1
        text, seen = said.getvalue(), self.watch.seen
        if name == "plot":  # it imports nothing that a file names, and draws
            seen = [each for each in seen if not DRAWN.fullmatch(each)]
        if more := set(sys.modules) - self.modules:  # importlib loads built-in modules without an event
            seen = [*seen, f"modules {sorted(more)}"]
            self.modules |= more
        wrong = ["events: " + "; ".join(seen)] if seen else []
        wrong += ["traceback"] if "Traceback" in text else []
        wrong += ["terminal"] if printable(text) != text else []
        wrong += [f"code {code}"] if code not in REFUSED and (code or (must_refuse(config) and name != "plot")) else []
        if wrong:
            changed = {key: value for key, value in config.items() if value != self.config.get(key)}
            self.faults.append(f"{name}: {wrong} {json.dumps(changed)[:600]}\n{text[-1500:]}")
        self.watch.seen.clear()

    def control(self) -> list[str]:
        """What the hook sees when a forged run gets its way: the user trusts it."""
        self._write(self.config | {"net": self.config["net"] | {"module": "payload:X"}})
        with self.watch(), contextlib.suppress(RookeryError):
            rookery.load(self.run, trust=("payload",))
        return list(self.watch.seen)


def must_refuse(config: dict[str, Any]) -> bool:
    """Told from the list alone: it names other code, or has arguments, and all of ours are hostile."""
    return (
        config["algorithm"] not in ALGORITHMS or config["env"] not in ENVS or config["net"].get("module")
        or config["env_kwargs"] != {}
    )  # fmt: skip


def report(honest: Path, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    campaign = Campaign(honest, folder, seed)
    rng, forged = campaign.rng, 0
    names = forged_names(rng, campaign.config, str(campaign.loot))  # imports all of the package
    campaign.warm()
    for config in names:
        campaign.attack(config, "load()")
    for config in mutations(rng, campaign.config, str(campaign.loot), 5 * rounds):
        campaign.attack(config, "load()")
        forged += 1
    for config in rng.sample(names, min(rounds, len(names))):
        campaign.attack(config, rng.choice([name for name in WAYS if name not in ("load()", "plot")]))
    for config in rng.sample(names, 1 + rounds // 100):
        campaign.attack(config, "plot")
    loot = campaign.loot.exists() or "payload" in sys.modules
    return {
        "forged": len(names) + forged, "counts": campaign.counts, "faults": campaign.faults[:20],
        "loot": loot, "control": campaign.control(),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
