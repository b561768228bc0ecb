"""The direction of imports, and what the package must never import or call, read from the source with `ast`.

An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as a literal given to
`import_module`. A module that is not in the table fails: give it a place first.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "rookery"

CONTRACT = {"algorithms.base", "algorithms.registry"}  # what those who run an algorithm know of it
BASE = {"core", "ops"}
SERVICES = {"roles", "pipes", "processes", "storage", "metrics"}
TOP = {"recipes", "cli", "run", "play", "sweeps", "__init__", "__main__"}
LOWER = {*BASE, "nets", "envs", "tables", *CONTRACT}
EVERYTHING = {*BASE, "nets", "envs", "tables", "algorithms", *SERVICES, "crews", "topologies", *TOP}

# First part of a module's name -> the parts (or single modules) of Rookery it may know, besides its own part.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "ops": set(),
    "nets": BASE,
    "envs": BASE,
    "tables": BASE,
    "algorithms": {*BASE, "nets", "tables"},
    "roles": {*LOWER, "storage.codec"},
    "processes": {"core", "pipes.channel", "storage.folder"},
    "pipes": {"core"},
    "storage": {*LOWER, "roles", "metrics"},
    "metrics": {"core", "storage.folder"},
    "crews": {*LOWER, *SERVICES},
    "topologies": {*LOWER, *SERVICES, "crews"},
    **dict.fromkeys(TOP, EVERYTHING),
}

# Modules of others -> the parts of Rookery that may know them.
CONFINED = {
    "ray": {"pipes", "crews", "topologies"},
    "multiprocessing": {"pipes", "crews", "topologies"},
    "torch.multiprocessing": {"pipes", "crews", "topologies"},
    "torch.distributed": {"pipes", "crews", "topologies"},
    "subprocess": {"processes", "crews", "cli"},
}
EXTRAS = ("ale_py", "mujoco", "dm_control", "ray", "wandb", "tensorboard", "torch.utils.tensorboard", "matplotlib")
EXTRAS += ("numba", "imageio", "imageio_ffmpeg", "Box2D", "pygame")  # optional to install: imported where used
FORBIDDEN = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch.load")


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    at_import_time: bool  # runs when the module is imported


def within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """The absolute dotted name of `a.b.c` where `a` is an imported module, else ''."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        parent = dotted(node.value, aliases)
        return parent and f"{parent}.{node.attr}"
    return ""


def from_names(node: ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    """`from a import b` as a.b: whether b is a module or a name in one makes no difference to prefixes."""
    parent = node.module or ""
    if node.level:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        parent = ".".join([*parts, *([parent] if parent else [])])
    for alias in node.names:
        yield parent if alias.name == "*" else f"{parent}.{alias.name}"


def imports(tree: ast.Module, module: str, is_package: bool) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend(Import(name, node.lineno, runs) for name in from_names(node, module, is_package))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append(Import(node.args[0].value, node.lineno, runs))
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, runs)
            return
        inside = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, True)
    return found


def uses(tree: ast.Module) -> list[Import]:
    """Attributes of imported modules: `torch.distributed.send` after `import torch` needs no import of its own."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
    names = ((dotted(node, aliases), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [Import(name, line, False) for name, line in names if name]


def layer_fault(module: str, target: str) -> str:
    """Why `module` may not know `target` (both inside rookery), or ''."""
    own = part_of(module)
    inner = target.removeprefix("rookery").removeprefix(".")
    part = inner.split(".")[0]
    part = part if part in EVERYTHING else "__init__"  # `import rookery` and names of the package itself
    allowed = MAY_IMPORT[own] | {own}
    if part in allowed or any(within(inner, name) for name in allowed if "." in name):
        return ""
    return f"{own} must not import {target}"


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """Everything wrong with one module of rookery, as `line: reason`."""
    tree, own = ast.parse(source), part_of(module)
    if own not in MAY_IMPORT:
        return [f"1: {own} has no layer; give it one in tests/test_layers.py"]
    found: list[tuple[int, str]] = []
    imported = imports(tree, module, is_package)
    for name, line, at_import_time in imported:
        if within(name, "rookery"):
            found.append((line, layer_fault(module, name)))
        elif own == "ops" and name.split(".")[0] not in {"torch", *sys.stdlib_module_names}:
            found.append((line, f"ops must not import {name}: torch and the standard library only"))
        if at_import_time and any(within(name, extra) for extra in EXTRAS):
            found.append((line, f"{name} is an extra: import it inside the function that uses it"))
    for name, line, _ in imported + uses(tree):
        if any(within(name, other) and own not in parts for other, parts in CONFINED.items()):
            found.append((line, f"{own} must not use {name}"))
        if any(within(name, other) for other in FORBIDDEN):
            found.append((line, f"{name} is forbidden: loading a file must not run code"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append((node.lineno, f"{node.func.id}() is forbidden"))
            unsafe = (k for k in node.keywords if k.arg == "allow_pickle" and getattr(k.value, "value", True))
            found.extend((node.lineno, "allow_pickle is forbidden") for _ in unsafe)
    return [f"{line}: {reason}" for line, reason in sorted(set(found)) if reason]


def test_the_package_keeps_its_layers():
    wrong = []
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths, PACKAGE
    for path in paths:
        parts = ["rookery", *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        name = path.relative_to(PACKAGE.parent)
        wrong += [f"{name}:{fault}" for fault in faults(module, path.read_text(encoding="utf-8"), is_package)]
    assert not wrong, "\n" + "\n".join(wrong)


BAD = [
    ("rookery.core.types", "from rookery.ops.value import value_loss"),
    ("rookery.core.tree", "import rookery.envs.make"),
    ("rookery.ops.value", "from rookery.core.types import Unroll"),
    ("rookery.ops.value", "import numpy as np"),
    ("rookery.ops.value", "from ..core import tree"),
    ("rookery.nets.heads", "from rookery.envs.spec import make"),
    ("rookery.nets.heads", "from rookery import envs"),
    ("rookery.nets.heads", "from ..tables.ring import Ring"),
    ("rookery.envs.spec", "import rookery"),
    ("rookery.tables.ring", "from rookery import train"),
    ("rookery.algorithms.ppo", "from rookery.envs.spec import make"),
    ("rookery.algorithms.ppo", "def f():\n    from rookery.roles.learner import Learner"),
    ("rookery.algorithms.ppo", "if TYPE_CHECKING:\n    from rookery.roles.actor import Actor"),
    ("rookery.algorithms.ppo", "importlib.import_module('rookery.topologies.serial')"),
    ("rookery.roles.actor", "from rookery.algorithms.ppo import PPO"),
    ("rookery.roles.actor", "from rookery.algorithms import ppo"),
    ("rookery.roles.actor", "import rookery.algorithms"),
    ("rookery.roles.actor", "from rookery.algorithms import *"),
    ("rookery.roles.actor", "from rookery.pipes.shm import Slots"),
    ("rookery.roles.learner", "from ..pipes import inproc"),
    ("rookery.roles.learner", "from rookery.storage.checkpoint import save"),
    ("rookery.metrics.panel", "from rookery.topologies.local import run"),
    ("rookery.topologies.local", "from rookery.recipes import ppo"),
    ("rookery.topologies.local", "from rookery.cli.main import main"),
    ("rookery.helpers", "import math"),
    ("rookery.tables.ring", "import multiprocessing.shared_memory"),
    ("rookery.roles.actor", "from torch import distributed"),
    ("rookery.roles.actor", "import torch as th\nth.distributed.barrier()"),
    ("rookery.roles.actor", "from torch.multiprocessing import Queue"),
    ("rookery.metrics.panel", "def f():\n    import subprocess"),
    ("rookery.recipes.ppo", "def f():\n    import ray"),
    ("rookery.topologies.ray_cluster", "import ray"),
    ("rookery.envs.atari", "try:\n    import ale_py\nexcept ImportError:\n    ale_py = None"),
    ("rookery.metrics.events", "from torch.utils.tensorboard import SummaryWriter"),
    ("rookery.metrics.plot", "class A:\n    from matplotlib import pyplot"),
    ("rookery.storage.checkpoint", "def f():\n    import pickle"),
    ("rookery.storage.checkpoint", "from joblib import dump"),
    ("rookery.storage.checkpoint", "__import__('cloudpickle')"),
    ("rookery.storage.checkpoint", "import torch\ntorch.load('x')"),
    ("rookery.storage.checkpoint", "from torch import load"),
    ("rookery.storage.checkpoint", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    ("rookery.cli.main", "eval('1 + 1')"),
    ("rookery.cli.main", "def f():\n    exec('x = 1')"),
]

GOOD = [
    ("rookery.core.tree", "from rookery.core.types import Tree"),
    ("rookery.ops.value", "import math\nimport torch\nfrom torch import nn\nfrom rookery.ops.moments import merge"),
    (
        "rookery.nets.heads",
        "from rookery.core.config import NetConfig\nfrom . import torso\nfrom rookery.core import tree",
    ),
    ("rookery.algorithms.ppo", "from rookery.nets.heads import Head\nfrom rookery.tables import queue"),
    ("rookery.roles.actor", "from rookery.algorithms.base import Algorithm\nfrom rookery.algorithms import base"),
    ("rookery.roles.learner", "from rookery.core.errors import NumericError\nimport torch\ntorch.nn.Module().eval()"),
    ("rookery.play.evaluate", "from rookery.roles.actor import Actor\nfrom rookery.envs.spec import make"),
    ("rookery.pipes.shm", "from multiprocessing import shared_memory\nimport torch.distributed as dist"),
    ("rookery.topologies.ray_cluster", "def f():\n    import ray"),
    ("rookery.processes.worker", "import subprocess\nfrom rookery.storage.folder import open_regular"),
    ("rookery.metrics.plot", "if TYPE_CHECKING:\n    import matplotlib\ndef f():\n    import matplotlib"),
    ("rookery.recipes.ppo", "from rookery.algorithms.ppo import PPO\nfrom rookery.topologies import serial"),
    ("rookery.cli.main", "import subprocess\nimport rookery"),
    (
        "rookery.storage.checkpoint",
        "import numpy as np\nnp.load('x', allow_pickle=False)\n'pickle, torch.load, eval()'",
    ),
]


@pytest.mark.parametrize("module, source", BAD)
def test_the_checker_flags(module, source):
    assert len(faults(module, source)) >= 1


@pytest.mark.parametrize("module, source", GOOD)
def test_the_checker_lets_pass(module, source):
    assert faults(module, source) == []


def test_relative_imports_of_a_package_start_at_the_package():
    assert faults("rookery.nets", "from .heads import Head", is_package=True) == []
    assert faults("rookery.nets", "from ..envs import spec", is_package=True) == [
        "1: nets must not import rookery.envs.spec"
    ]
    assert faults("rookery", "from .run import train", is_package=True) == []


def test_a_fault_names_its_line():
    assert faults("rookery.roles.actor", "import torch\n\nfrom rookery.cli import main") == [
        "3: roles must not import rookery.cli.main"
    ]
