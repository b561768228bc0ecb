"""The check that an exported policy acts as the policy does: sequences of random observations, with episodes that end.

Actions and values are compared with those of `Policy.explain`, other outputs with the module that was exported. Two
choices whose logits or values are as good as equal may be taken for each other; everything else has to agree to
TOLERANCE, as a share of the largest number of that output, or of 1 if they are smaller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch

from rookery.core.errors import LearnerError
from rookery.core.legal import all_if_none, includes
from rookery.core.types import MASK, ActionSpec, EnvSpec, Leaf, Tree
from rookery.envs.last import REWARD
from rookery.play.graph import NEXT, START, PolicyGraph, Port, in_fp32
from rookery.play.policy import Policy

TOLERANCE = 1e-4  # sums in another order, through many layers: 4e-6 was seen with deep convolutions
LANES, ENDS, ALLOWED = 16, 0.1, 0.4  # episodes side by side; share of steps that begin one; of actions that are legal
Arrays = dict[str, np.ndarray]
Runner = Callable[[Arrays], Arrays]  # an exported policy: inputs by name -> outputs by name


class Disagreement(LearnerError):
    """An exported policy does not act as the policy does."""


def largest_difference(policy: Policy, graph: PolicyGraph, run: Runner, rows: int = 1_000, seed: int = 0) -> float:
    """The largest difference, as a share, over at least `rows` observations; Disagreement if it is too large."""
    draw, play, worst = _Draw(policy, graph, seed), _Play(policy, graph.outputs), 0.0
    state = {name: graph.example(LANES)[name].numpy() for name in graph.state}
    own, size = dict(state), {"q": _reach(policy)}
    for _ in range(-(-rows // LANES)):
        seen, obs, start = draw.step()
        told = play.step(obs, seen.get(REWARD, 0.0), start)
        expected = {name: x.numpy() for name, x in graph(_tensors(seen | own)).items()}
        found = run(seen | state)
        own, state = ({name: each[NEXT + name] for name in graph.state} for each in (expected, found))
        worst = max(worst, _compared(policy.spec, expected | told, found, seen.get(MASK), size))
    return worst


class _Draw:
    """Random observations, as the environment has them."""

    def __init__(self, policy: Policy, graph: PolicyGraph, seed: int):
        self._rng = np.random.default_rng(seed)
        self._ports = {port.name: port for port in graph.inputs if port.name not in graph.state}
        self._spec, self._names = policy.spec, graph.names
        self._spread = _spread(policy)
        self._first = True

    def step(self) -> tuple[Arrays, Arrays, np.ndarray]:
        """Inputs of an export, the observations among them by their own names, and where episodes begin."""
        rng, spec = self._rng, self._spec
        start = np.full(LANES, self._first) | (rng.random(LANES) < ENDS)
        self._first = False
        obs = {name: _as_given(self._leaf(name, spec.obs[name]), spec.obs[name]) for name in self._names}
        if spec.masked:
            obs[MASK] = rng.random((LANES, *spec.obs[MASK].shape)) < ALLOWED  # of some rows, all are False
        seen = {self._names.get(name, name): x for name, x in obs.items()}
        if REWARD in self._ports:
            seen[REWARD] = rng.normal(0, 2, LANES).astype(np.float32)
        if START in self._ports:
            seen[START] = start
        return seen, obs, start

    def _leaf(self, name: str, leaf: Leaf) -> np.ndarray:
        shape, rng = (LANES, *leaf.shape), self._rng
        if leaf.kind == "discrete":
            return rng.integers(0, leaf.n, shape)
        if leaf.kind == "multi":
            return rng.integers(0, np.reshape(leaf.counts, leaf.shape), shape)
        if leaf.dtype == "uint8":
            return rng.integers(0, 256, shape, np.uint8)
        mean, deviation = self._spread.get(name, (0.0, 1.0))
        return (mean + deviation * rng.normal(size=shape)).astype(leaf.dtype)


class _Play:
    """What `explain` returns for the same observations, as far as an export has it too."""

    def __init__(self, policy: Policy, outputs: list[Port]):
        self._policy = copy.copy(policy)
        self._policy.nets = in_fp32(policy.nets)
        self._names = {port.name for port in outputs}
        self._state: Tree | None = None

    def step(self, obs: Arrays, reward: np.ndarray | float, start: np.ndarray) -> Arrays:
        found = self._policy.explain(obs, self._state, episode_start=start, reward=reward, action_mask=obs.get(MASK))
        self._state = found.state
        return {"action": found.action} | {name: x for name, x in found.quantities.items() if name in self._names}


def _compared(spec: EnvSpec, expected: Arrays, found: Arrays, mask: np.ndarray | None, size: dict[str, float]) -> float:
    """The largest difference of the outputs of one step; `size`: what those of an output are a share of, at least."""
    if expected.keys() != found.keys():
        raise Disagreement(f"the exported policy has the outputs {sorted(found)}, expected are {sorted(expected)}")
    discrete = spec.action.kind != "box"
    if mask is not None:
        inside = found["action"] - np.reshape(spec.action.starts, spec.action.shape)
        if not includes(all_if_none(mask, spec.action.choices), inside, spec.action.choices).all():
            raise Disagreement("the exported policy takes actions that the mask does not allow")
    numbers = [name for name in expected if not (discrete and name == "action")]
    worst = max((_share(name, expected[name], found[name], size.get(name, 1.0)) for name in numbers), default=0.0)
    if discrete and (gap := _gap(spec.action, expected, found["action"], size.get("q", 1.0))) > TOLERANCE:
        raise Disagreement(f"the exported policy takes other actions than the policy, worse ones by {gap:.2g}")
    return worst


def _share(name: str, expected: np.ndarray, found: np.ndarray, least: float) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise Disagreement(
            f"the exported policy returns {name!r} as {found.dtype} {list(found.shape)}, expected "
            f"{expected.dtype} {list(expected.shape)}"
        )
    possible = np.abs(expected) < np.finfo(np.float32).max  # illegal choices have the lowest number
    if not np.array_equal(expected[~possible], found[~possible]):
        raise Disagreement(f"the exported policy returns other {name!r} for illegal actions than the policy")
    size = max(least, float(np.abs(expected[possible]).max(initial=0.0)))
    share = float(np.abs(expected[possible] - found[possible]).max(initial=0.0)) / size
    if not share <= TOLERANCE:  # NaN too
        raise Disagreement(
            f"the exported policy's {name!r} differs from the policy's by {share:.2g} of its size, more than "
            f"{TOLERANCE:g}"
        )
    return share


def _gap(action: ActionSpec, expected: Arrays, found: np.ndarray, least: float) -> float:
    """By how much the choices in `found` were worse than the expected ones, as a share; 0 if they are the same."""
    rows = len(found)
    mine, theirs = (np.reshape(x, (rows, -1)) - np.asarray(action.starts) for x in (expected["action"], found))
    if np.array_equal(mine, theirs):
        return 0.0
    values = next((expected[name] for name in ("logits", "q") if name in expected), None)
    if values is None:
        return np.inf
    begins = np.cumsum([0, *action.choices[:-1]])
    gap = np.take_along_axis(values, mine + begins, 1) - np.take_along_axis(values, theirs + begins, 1)
    return float(np.abs(gap).max()) / max(least, float(np.abs(values[values > np.finfo(np.float32).min]).max()))


def _as_given(x: np.ndarray, leaf: Leaf) -> np.ndarray:
    """An observation as the environment has it: integers from its own first value."""
    if leaf.kind not in ("discrete", "multi"):
        return x
    return x.astype(np.int64) + (np.reshape(leaf.starts, leaf.shape) if leaf.starts else 0)


def _spread(policy: Policy) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and deviation of the observations that the policy has seen, where it has kept them."""
    normalizer, spread = policy.nets["normalizer"], {}
    for name, leaf in zip(normalizer.keys, normalizer.leaves):
        count = max(float(leaf.running.count), 1.0)
        spread[name] = (leaf.running.mean.numpy(), np.sqrt(leaf.running.m2.numpy() / count + 1e-4))
    return spread


def _reach(policy: Policy) -> float:
    """The largest value that is summed up to an action value: where returns have a distribution, the last atom."""
    atoms = getattr(policy.nets["q"], "atoms", None) if "q" in policy.nets else None
    return 1.0 if atoms is None else max(1.0, float(atoms.abs().max()))


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}
