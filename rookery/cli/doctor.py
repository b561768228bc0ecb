"""`rookery doctor`: what this machine offers, what is installed, and how fast a small run is."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.table import Table

from rookery.cli.flags import parse
from rookery.cli.show import console, escape, only_answer
from rookery.core.errors import RookeryError
from rookery.core.machine import Machine, amount
from rookery.crews.probe import probe

EXTRAS = {  # extra -> (modules it brings, what for)
    "atari": (("ale_py",), "Atari games"),
    "mujoco": (("mujoco", "imageio"), "MuJoCo tasks"),
    "dmc": (("dm_control", "mujoco"), "tasks of the DeepMind Control Suite"),
    "box2d": (("Box2D", "pygame"), "LunarLander, BipedalWalker, CarRacing"),
    "fast": (("numba",), "quick draws from prioritised replay"),
    "ray": (("ray",), "actors on a cluster"),
    "plots": (("matplotlib",), "learning curves as pictures"),
    "video": (("imageio_ffmpeg", "pygame"), "rookery record"),
    "tensorboard": (("tensorboard",), "TensorBoard events"),
    "wandb": (("wandb",), "the tracker of Weights & Biases"),
    "mlflow": (("mlflow",), "the tracker of MLflow"),
    "tune": (("optuna",), "sweeps that sample with Optuna"),
    "onnx": (("onnx", "onnxscript", "onnxruntime"), "exported policies"),
    "docs": (("mkdocs", "material"), "the pages as a site"),
}
ENVS = {  # extra -> a small environment that needs it
    "atari": "ALE/Pong-v5", "mujoco": "InvertedPendulum-v5", "dmc": "dmc/cartpole-swingup", "box2d": "LunarLander-v3",
}  # fmt: skip
DEADLINE = 60.0  # seconds one of them may take
CORE = ("torch", "numpy", "gymnasium", "safetensors", "msgspec", "tyro", "rich")
ROOM = 1 << 30  # bytes of memory below which a run is likely to fail
STEPS = 4_000  # of the self-test: about a second


@dataclass(frozen=True)
class Doctor:
    speed: bool = True  # train PPO on CartPole for a second
    json: bool = False  # as JSON


@dataclass(frozen=True)
class Finding:
    name: str
    value: str
    state: str = "ok"  # ok | optional | problem
    remedy: str = ""


def doctor(words: list[str]) -> int:
    args = parse(Doctor, words, "rookery doctor", "What this machine offers, what is installed, and how fast it is.")
    with only_answer() if args.json else console().status("looking around …"):
        findings = [*_system(), *_packages(), *_machine(), *_extras()]
        if args.speed:
            findings.append(_speed())
    problems = [finding for finding in findings if finding.state == "problem"]
    if args.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if problems else 0


def _show(findings: list[Finding]) -> None:
    mark = {"ok": "[green]✓[/]", "optional": "[bright_black]·[/]", "problem": "[bold red]✗[/]"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        remedy = f"   [dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(mark[finding.state], finding.name, escape(finding.value) + remedy)
    console().print(table)
    problems = [finding.name for finding in findings if finding.state == "problem"]
    end = f"[bold red]needs attention:[/] {', '.join(problems)}" if problems else "[green]all is well[/]"
    console().print("\n " + end)


def _system() -> list[Finding]:
    from rookery import __version__

    python = platform.python_version()
    old = sys.version_info < (3, 11)
    return [
        Finding("rookery", f"{__version__}, {Path(__file__).parents[1]}"),
        Finding("python", f"{python}, {sys.executable}", "problem" if old else "ok", "3.11 or newer" if old else ""),
        Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]


def _packages() -> list[Finding]:
    import torch

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in CORE)
    cuda = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none"
    return [
        Finding("packages", versions),
        Finding("threads", f"{torch.get_num_threads()} by torch's own choice; a run sets them itself"),
        Finding("cuda", cuda, "ok" if torch.cuda.is_available() else "optional"),
    ]


def _machine() -> list[Finding]:
    machine = Machine()
    memory, source = machine.memory()
    tight = memory < ROOM
    cores = machine.cores()
    found = [
        Finding("cores", f"{cores} usable" + (f" of {os.cpu_count()}" if cores != os.cpu_count() else "")),
        Finding("memory", f"{amount(memory)} available ({source})", "problem" if tight else "ok",
                "a run needs about 1 GiB" if tight else ""),
        _memfd(),
    ]  # fmt: skip
    return [*found, _bf16()]


def _bf16() -> Finding:
    from rookery.nets.torso import bf16_is_emulated

    if bf16_is_emulated("cpu"):
        return Finding("bf16", "emulated, about ten times slower than fp32", "optional", "keep --precision fp32")
    return Finding("bf16", "native: --precision bf16 pays for images")


def _memfd() -> Finding:
    """Shared memory is anonymous (memfd): it needs no /dev/shm, has no name, and ends with its processes."""
    try:
        os.close(os.memfd_create("rookery-doctor"))
    except (AttributeError, OSError) as error:
        return Finding("memfd", f"no ({error})", "problem", "--topology local needs it; --topology serial does not")
    return Finding("memfd", "yes; /dev/shm is not needed")


def _extras() -> list[Finding]:
    found = []
    for extra, (modules, use) in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            found.append(Finding(extra, f"not installed ({use})", "optional", f"pip install 'rookery[{extra}]'"))
        elif why := _trouble(extra):
            found.append(Finding(extra, f"installed, but {why}", "problem", f"pip install 'rookery[{extra}]'"))
        else:
            made = f", {ENVS[extra]} can be made" if extra in ENVS else ""
            found.append(Finding(extra, f"installed ({use}){made}"))
    return found


def _trouble(extra: str) -> str:
    """Why an environment of this extra cannot be made, in a process of its own; "" if it can, or there is none."""
    if extra not in ENVS:
        return ""
    try:
        probe(ENVS[extra], {}, DEADLINE)
    except RookeryError as error:
        return f"{ENVS[extra]} cannot be made: {str(error).splitlines()[0]}"
    return ""


def _speed() -> Finding:
    from rookery.run.run import train

    try:
        with tempfile.TemporaryDirectory(prefix="rookery-doctor-") as folder:
            run = train("ppo", env="CartPole-v1", env_steps=STEPS, quiet=True, out=f"{folder}/run")
    except (RookeryError, OSError) as error:
        return Finding("self-test", f"failed: {error}", "problem")
    return Finding("self-test", f"PPO on CartPole, one process: {run.summary['steps_per_s']:,.0f} steps/s")
