"""What a checkpoint must hold to be used: numbers in their ranges that agree with each other, and tensors that fit.

The digests of a checkpoint say that its files are as they were written, not who wrote them. So every number is checked
before it is used, and the sizes of networks before memory is taken for them. What does not pass is a CheckpointError.
Not here: the state of an actor (`actor_state.py`), and replay memories (`tables/verify.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import nn

from rookery.algorithms.base import Algorithm
from rookery.algorithms.registry import config_of, fields_of
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.machine import Machine, amount
from rookery.core.types import MASK, ActionSpec, EnvSpec, Leaf
from rookery.core.wording import setting
from rookery.metrics.ledger import Ledger
from rookery.nets.modules import Nets
from rookery.roles.learner import Learner
from rookery.roles.producer import handover_shapes
from rookery.storage import folder as folders
from rookery.storage.checkpoint import Checkpoint
from rookery.storage.codec import decode_tree
from rookery.storage.trust import judge

Whole = Annotated[int, Meta(ge=0, lt=2**53)]
LANES = 1 << 20  # environments of a run
NUMBERS = 1 << 31  # numbers in one observation
CHOICES = 1 << 20  # of an action, in all
LAYERS = 64  # of a network, and entries of any list in a config
LARGEST, LARGEST32 = 1e100, 1e30  # of the numbers that statistics are made of, and networks
MOST = {  # of numbers in a config that threads, processes or pictures are made by, of seconds to wait, of repetitions
    "actors": 1 << 16, "threads": 1024, "net.core_layers": LAYERS, "algo.replay.loaders": 256,
    "algo.replay.prefetch": 1 << 16, "algo.replay.shards": 1 << 12, "atari": 1 << 31, "atari.size": 4096,
    "atari.stack": 256, "supervisor": 1e6, "eval.envs": 1 << 12, "eval.episodes": 1 << 20, "eval.minutes": 1e6,
    "algo.epochs": 1 << 12,
}  # fmt: skip
FOREIGN = "restore it from a copy, or use an earlier checkpoint"
OTHER = (
    "the checkpoint holds other networks or optimisers than these settings ask for; resume without changing them, or "
    "start a new run"
)
_OLD_STATES = "actors/"  # tensors of the actors' states, as checkpoints used to have them
_DTYPES = {"float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"}


class LearnerNumbers(Struct):
    version: Whole
    updates: Whole
    skipped: Whole


class LedgerNumbers(Struct):
    collected: Whole
    trained: Whole
    evicted: Whole
    dropped: Annotated[dict[str, Whole], Meta(max_length=1000)]
    in_flight: Whole


class WindowNumbers(Struct):
    size: Annotated[int, Meta(ge=1, le=10_000)]
    episodes: Whole
    returns: list[float]
    lengths: list[Whole]
    infos: dict[str, list[float]] = {}


class JournalNumbers(Struct):
    env_steps: Whole
    episodes: Whole
    window: WindowNumbers
    ledger: LedgerNumbers
    lag: tuple[Whole, Whole, Whole]  # sum, count, largest
    target: tuple[float | None, Whole | None, float | None]
    updates: Whole
    wall_s: Annotated[float, Meta(ge=0)]
    best: float | None
    restarts: Whole
    history: Annotated[list[tuple[Whole, float]], Meta(max_length=10_000)]
    target_of: str = "return"  # what had to reach the target


class Numbers(Struct):
    """All of `meta.json` but the states of the actors. Fields that this version does not know are ignored."""

    learner: LearnerNumbers
    journal: JournalNumbers
    sequences: list[Whole]
    exact: bool


def check_numbers(saved: Checkpoint, actors: int) -> Numbers:
    """The numbers of a run's checkpoint, if they are of their types and agree with each other."""
    try:
        numbers = msgspec.convert(saved.meta, Numbers)
        problem = _inconsistent(numbers, saved, actors)
    except (msgspec.ValidationError, TypeError) as error:
        problem = str(error)
    if problem:
        raise CheckpointError(f"checkpoint {saved.path}: meta.json: {problem}; {FOREIGN}")
    return numbers


def _inconsistent(numbers: Numbers, saved: Checkpoint, actors: int) -> str:
    journal, window = numbers.journal, numbers.journal.window
    ledger = Ledger(**msgspec.to_builtins(journal.ledger))
    if not _sensible(saved.meta["journal"]):
        return "a number of the journal is not finite, or too large to compute with"
    if not saved.env_steps == journal.env_steps == ledger.collected:
        return (
            f"it counts {journal.env_steps} environment steps, {ledger.collected} of them collected, and the manifest "
            f"{saved.env_steps}"
        )
    if ledger.imbalance:
        return f"the ledger does not balance, by {ledger.imbalance} steps"
    if not len(window.returns) == len(window.lengths) <= min(window.size, window.episodes):
        return f"{len(window.returns)} returns and {len(window.lengths)} lengths in a window of {window.size} episodes"
    if any(not 0 < len(values) <= len(window.returns) for values in window.infos.values()):
        return f"more or fewer numbers of episodes than the window of {len(window.returns)} has"
    if journal.lag[1] == 0 < max(journal.lag) or journal.lag[2] > journal.lag[0]:
        return f"a policy lag of {journal.lag[0]} in all, over {journal.lag[1]}, and {journal.lag[2]} at most"
    if len(numbers.sequences) != actors:
        return f"it is of {len(numbers.sequences)} actors, and config.json has {actors}"
    return ""


def _sensible(tree: Any) -> bool:
    """Whether the squares of all numbers are finite, and their sums."""
    if isinstance(tree, dict):
        return all(map(_sensible, tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_sensible, tree))
    return not isinstance(tree, float) or abs(tree) < LARGEST


def actor_states(saved: Checkpoint) -> dict[str, Any]:
    """The actors' states by number, as stored by this version or older ones; not checked."""
    if "states" in saved.meta:
        states = saved.meta["states"]
    else:
        states = decode_tree(saved.meta.get("actors"), saved.tensors)
    if not isinstance(states, dict):
        raise CheckpointError(f"checkpoint {saved.path}: the states of the actors are no dictionary; {FOREIGN}")
    return states


# Sizes


def absurd(config: RunConfig) -> str:
    """Why a config is refused as absurd, or nothing: numbers so large that building the run would not end."""
    if config.lanes > LANES:
        return f"actors times envs_per_actor is {config.lanes}; it must be at most {LANES}"
    for path, value in _fields(config, ""):
        most = MOST.get(path, MOST.get(path.rpartition(".")[0], LARGEST32 if isinstance(value, float) else 2**53))
        if isinstance(value, tuple):
            if len(value) > LAYERS:
                return f"{path} has {len(value)} entries; it must have at most {LAYERS}"
        elif path != "seed" and not abs(value) <= most:
            return f"{path} is {value}; it must be at most {most:g}"
    return ""


def _fields(record: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Numbers and tuples in a dataclass of dataclasses, by path."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float | tuple):
            yield prefix + field.name, value


def check_sizes(algorithm: Algorithm, saved: Checkpoint, complaint: str = OTHER) -> None:
    """That a checkpoint has the networks the algorithm asks for, by names and shapes; before memory is taken."""
    try:
        wanted = outline_of(algorithm)
    except (RuntimeError, ValueError, OverflowError, TypeError, MemoryError) as error:
        raise CheckpointError(f"checkpoint {saved.path}: the networks that config.json asks for: {error}") from error
    if wanted is not None:
        given = {name: tensor for name, tensor in saved.tensors.items() if name.startswith("nets/")}
        _check_same(given, {f"nets/{name}": tensor for name, tensor in wanted.items()}, saved, complaint)


def check_room(algorithm: Algorithm) -> None:
    """Refuse networks that do not fit into memory with their gradients and an optimiser, before any is taken."""
    try:
        nets = outline_of(algorithm) or {}
        need = 4 * sum(tensor.nbytes for tensor in nets.values())
    except (RuntimeError, OverflowError) as error:
        raise UsageError(
            f"these networks cannot be made: {error}; use smaller ones ({setting('net.hidden')}, ...)"
        ) from error
    have, source = Machine().memory()
    if need > have:
        raise UsageError(
            f"these networks need {amount(need)} with their gradients and optimisers, and there are {amount(have)} "
            f"({source}); use smaller ones ({setting('net.hidden')}, ...)"
        )


def check_arrays(config: RunConfig, algorithm: Algorithm, nets: Nets, spec: EnvSpec) -> None:
    """The same for what actors fill."""
    shapes = handover_shapes(spec, algorithm.plan(), config.envs_per_actor, algorithm.initial_state(nets, 1))
    need = config.actors * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
    have, source = Machine().memory()
    if need > have:
        raise UsageError(
            f"the unrolls of {config.actors} actors need {amount(need)}, and there are {amount(have)} ({source}); use "
            f"shorter ones, or fewer environments ({setting('envs_per_actor')})"
        )


def outline_of(algorithm: Algorithm) -> dict[str, torch.Tensor] | None:
    """Tensors of the networks by name, without memory; None where code of the user's own makes them and may need it."""
    if algorithm.net.module or type(algorithm).__module__.split(".")[0] != "rookery":
        return None
    with torch.device("meta"):
        return dict(algorithm.nets().state_dict())


def check_tensors(learner: Learner, saved: Checkpoint) -> None:
    """That a checkpoint has the tensors of this learner and no others, all of them finite."""
    own, _ = learner.state()
    optimizers = {name: t for name, t in _optimizer_states(learner).items() if _group_of(name, saved.tensors)}
    wanted = {name: tensor for name, tensor in own.items() if name.startswith("nets/")} | optimizers
    given = {name: tensor for name, tensor in saved.tensors.items() if not name.startswith(_OLD_STATES)}
    check_weights(given, wanted, own, saved, OTHER)


def check_weights(
    given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], own: dict[str, torch.Tensor], saved: Checkpoint,
    complaint: str,
) -> None:  # fmt: skip
    """That tensors have the names, types and shapes of `wanted`, and values that `own` could have."""
    _check_same(given, wanted, saved, complaint)
    check_values(given, own, saved)
    for name, tensor in given.items():
        if _not_negative(name) and bool((tensor < 0).any()):
            raise CheckpointError(f"checkpoint {saved.path}: {name} is negative; {FOREIGN}")


def _optimizer_states(learner: Learner) -> dict[str, torch.Tensor]:
    """What the optimisers hold once they have stepped, by name; as shapes only. Tried on a parameter of one number."""
    tiny = {group: nn.Parameter(torch.zeros(1)) for group in learner.optimizers}
    found = {}
    for group, optimizer in learner.algorithm.optimizers(tiny).items():
        tiny[group].grad = torch.zeros(1)
        optimizer.step()
        size = learner.flat[group].data.shape
        for name, value in optimizer.state[tiny[group]].items():
            value = torch.as_tensor(value)
            shape = size if value.dim() else ()
            found[f"optimizer/{group}/{name}"] = torch.empty(shape, dtype=value.dtype, device="meta")
    return found


def _group_of(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether there is anything of the optimiser that `name` belongs to: before its first step there is not."""
    prefix = name.rpartition("/")[0] + "/"
    return any(other.startswith(prefix) for other in tensors)


def _check_same(given: dict[str, Any], wanted: dict[str, Any], saved: Checkpoint, complaint: str) -> None:
    for name in sorted(given.keys() | wanted.keys()):
        here, there = (
            f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "absent"
            for tensors in (wanted, given)
        )
        if here != there:
            raise CheckpointError(f"{saved.path}: {name} is {there} in the checkpoint and {here} here: {complaint}")


def check_values(given: dict[str, torch.Tensor], own: dict[str, torch.Tensor], saved: Checkpoint) -> None:
    """That every tensor is finite; one that starts otherwise (no bound yet) may still be as it started."""
    for name, tensor in given.items():
        bad = tensor.is_floating_point() and not torch.isfinite(tensor).all()
        if bad and not (name in own and torch.equal(tensor, own[name])):  # no NaN equals itself
            raise CheckpointError(f"checkpoint {saved.path}: {name} is not finite; {FOREIGN}")


def _not_negative(name: str) -> bool:
    if name.startswith("optimizer/"):
        return name.rpartition("/")[2] in ("step", "exp_avg_sq", "square", "sum")
    return name.endswith(("running.count", "running.m2"))


# The files beside the checkpoints


def decode_config(data: bytes | str, trust: Sequence[str] = (), env: str | None = "") -> RunConfig[Any]:
    """The config of a stored run, as `encode_config` wrote it. `trust`: modules that it may name besides our list.

    The names in it are judged before anything is imported. An unknown or misspelt field is an error.
    `env`: the caller's, instead of the stored one; None: none will be made.
    """
    fields = fields_of(data)
    judge(fields, trust, env)
    if env:
        fields["env"] = env
    return config_of(fields)


def read_config(folder: Path, trust: tuple[str, ...] = (), env: str | None = "") -> RunConfig:
    """The config of a stored run; CheckpointError if the file is not one that could be run. `env`: see above."""
    if not folders.exists(folder, "config.json"):
        raise CheckpointError(folders.not_a_run(folder))
    data = folders.read(folder, "config.json")
    try:
        config = decode_config(data, trust, env)
    except UsageError as error:
        if str(error).startswith("config.json"):  # the file is at fault, not the request
            raise CheckpointError(f"{folder}: {error}") from error
        raise
    if why := absurd(config):
        raise CheckpointError(f"{folder / 'config.json'}: {why}")
    return config


def decode_spec(blob: bytes, where: Any) -> EnvSpec:
    """What an environment looks like, from a file; nothing in it may ask for absurd amounts of memory."""
    try:
        spec = msgspec.json.decode(blob, type=EnvSpec)
        problem = _odd_action(spec.action) or next(filter(None, map(_odd_leaf, spec.obs.values())), "")
        problem = problem or _odd_mask(spec)
        if not spec.obs or len(spec.obs) > 10_000:
            problem = f"{len(spec.obs)} observations"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise CheckpointError(f"{where} cannot be used: {problem}; restore it from a copy")
    return spec


def _odd_mask(spec: EnvSpec) -> str:
    """Masks are one entry with a name of its own, which fits the actions."""
    named = {name: leaf for name, leaf in spec.obs.items() if leaf.kind == "mask"}
    fits = Leaf((sum(spec.action.choices),), "bool", "mask")
    if named and (spec.action.kind == "box" or named != {MASK: fits} or not spec.seen.obs):
        return f"a mask of actions in {', '.join(named)[:200]} that does not fit them"
    return f"masks from {spec.mask_from}, and no mask" if spec.mask_from and not named else ""


def _odd_leaf(leaf: Leaf) -> str:
    sides = [*leaf.shape, max(leaf.n, 1)]
    if min(sides) < 0 or len(sides) > 9 or math.prod(sides) > NUMBERS or leaf.dtype not in _DTYPES:
        return f"an observation of shape {list(leaf.shape)[:9]}, {leaf.n} values, type {leaf.dtype[:20]!r}"
    integers = math.prod(leaf.shape) if leaf.kind in ("discrete", "multi") else 0
    if leaf.kind == "discrete" and leaf.n < 1:
        return "an observation that is one of none"
    if len(leaf.counts) != (integers if leaf.kind == "multi" else 0) or len(leaf.starts) not in (0, integers):
        return (
            f"an observation of {integers} integers with {len(leaf.counts)} counts and {len(leaf.starts)} first values"
        )
    if leaf.kind == "multi" and (problem := _odd_counts(leaf)):
        return problem
    if leaf.starts and max(map(abs, leaf.starts)) >= 2**62:
        return "an observation whose first value is no 64-bit integer"
    if leaf.stack < 1 or (leaf.stack > 1 and (not leaf.shape or leaf.shape[0] != leaf.stack)):
        return f"a stack of {leaf.stack} frames in an observation of shape {list(leaf.shape)}"
    return ""


def _odd_counts(leaf: Leaf) -> str:
    if not leaf.counts or min(leaf.counts) < 1 or sum(leaf.counts) > NUMBERS:
        return f"an observation of {len(leaf.counts)} integers with {sum(leaf.counts)} values in all"
    if np.dtype(leaf.dtype).kind not in "iu" or max(leaf.counts) - 1 > np.iinfo(leaf.dtype).max:
        return f"an observation of integers below {max(leaf.counts)} of type {leaf.dtype!r}"
    return ""


def _odd_action(action: ActionSpec) -> str:
    if action.kind == "box":
        sides = action.box_shape
        if min(sides, default=1) < 1 or len(sides) > 9 or action.size != math.prod(sides) or action.size > CHOICES:
            return f"an action of {action.size} numbers and shape {list(sides)[:9]}"
        if not len(action.low) == len(action.high) == action.size:
            return f"an action of {action.size} numbers with {len(action.low)} and {len(action.high)} bounds"
        bounds = [bound for bound in (*action.low, *action.high) if bound is not None]
        return "" if all(map(math.isfinite, bounds)) else "an action with a bound that is not finite"
    counts = action.choices
    if not counts or min(counts) < 1 or sum(counts) > CHOICES or len(action.starts) != len(counts):
        return f"an action of {len(counts)} parts, {sum(counts)} choices and {len(action.starts)} first values"
    if action.kind == "discrete" and len(counts) != 1:
        return f"a discrete action of {len(counts)} parts"
    return "" if max(map(abs, action.starts)) < 2**62 else "an action whose first value is no 64-bit integer"
