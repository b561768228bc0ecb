"""A trained policy, loaded from a checkpoint, ready to act.

    policy = rookery.load("runs/a")
    state = None
    action, state = policy.act(obs, state)

Loading reads safetensors and JSON; it runs no code of the run's environment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rookery.algorithms.registry import build_algorithm
from rookery.core import tree
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.types import MASK, EnvSpec, Explore, Tree
from rookery.envs.last import Last
from rookery.play.legal import mask_rows
from rookery.play.observation import check_integers, counted, entries
from rookery.storage import checkpoint
from rookery.storage import folder as folders
from rookery.storage.stored import check_sizes, check_values, decode_spec, read_config

CHOICES = ("newest", "best")  # of the checkpoints of a run


class Policy:
    notes: tuple[str, ...] = ()  # why this is another checkpoint than was asked for

    def __init__(self, config: RunConfig, spec: EnvSpec, saved: checkpoint.Checkpoint):
        self.config, self.spec, self.env_steps, self.path = config, spec, saved.env_steps, saved.path
        try:
            self.algorithm = build_algorithm(config, spec)
            check_sizes(self.algorithm, saved, "the checkpoint does not fit its own config.json and spec.json")
            self.nets = self.algorithm.nets()
        except UsageError as error:
            if config.net.module:
                raise
            raise CheckpointError(f"{saved.path}: its config.json and spec.json do not fit: {error}") from error
        prefix, own = "nets/", self.nets.state_dict()
        weights = {n.removeprefix(prefix): t for n, t in saved.tensors.items() if n.startswith(prefix)}
        check_values(weights, own, saved)
        try:
            self.nets.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(f"{saved.path} does not fit its own config.json: {error}") from error
        self.nets.eval()

    def check_fits(self, spec: EnvSpec) -> None:
        """Refuse an environment with other observations or actions than the policy has learnt from."""
        if _looks(spec) != _looks(self.spec):
            raise CheckpointError(
                f"{self.path} does not fit the environment of its config.json, {spec.id}: it was trained on "
                f"{_outline(self.spec)}, and this one has {_outline(spec)}"
            )

    def initial_state(self, lanes: int) -> Tree:
        return self.algorithm.initial_state(self.nets, lanes)

    @torch.inference_mode()
    def act_batch(self, obs: Any, state: Tree, explore: torch.Generator | None = None, action_mask: Any = None) -> Any:
        """Actions [B, ...] in Rookery's own form (`spec_action` converts one) for observations [B, ...]; next state.

        Observations are an array, or dicts and tuples of arrays: nested as the environment has them, or flat as lanes
        return them. Integers are counted from 0, wherever the environment begins.
        `action_mask` [B, n] says which actions are legal, if the observations do not; None: all are.
        """
        rows = {name: torch.from_numpy(each) for name, each in self._rows(obs, action_mask).items()}
        noise = None
        if explore is not None:  # environments take turns on a ladder of epsilons or noises
            noise = Explore(explore, np.arange(len(tree.leaves(rows)[0])) % self.config.lanes)
        output = self.algorithm.act(self.nets, rows, state, noise)
        return np.asarray(output.action), output.state

    def act(
        self, obs: Any, state: Tree | None = None, explore: torch.Generator | None = None, reward: float = 0.0,
        action_mask: Any = None,
    ) -> tuple[Any, Tree]:  # fmt: skip
        """The action for one observation, both as the Gymnasium environment has them; greedy unless `explore`.

        No state begins an episode. Runs with `net.feed_last` want the reward of the last step too; the last action
        is in the state that they return. `action_mask`: which actions are legal, if the observation does not say so
        (`info["action_mask"]`, or what `action_masks()` returned); None: all are.
        """
        last = None
        if self.config.net.feed_last:
            last = Last(self.spec, 1, self.spec.clipped)
            if state is not None:
                last.write(state["last_action"], reward)
                state = state["core"]
        fed = {} if last is None else last.leaves()
        found = entries(obs, self.spec.seen, tuple(fed))
        batch = fed | {name: self._single(name, each)[None] for name, each in found.items()}
        if self.spec.masked:
            mask = obs[MASK] if isinstance(obs, dict) and MASK in obs else action_mask
            action_mask = None if mask is None else np.asarray(mask)[None]
        action, state = self.act_batch(batch, self.initial_state(1) if state is None else state, explore, action_mask)
        return self.spec_action(action[0]), state if last is None else {"core": state, "last_action": action.copy()}

    def _single(self, name: str, value: Any) -> np.ndarray:
        """An entry of one observation of the environment, as networks take it; UsageError if it does not fit."""
        leaf = self.spec.obs[name]
        try:
            each = np.asarray(value).reshape(leaf.shape)
            return counted(name, each, leaf).astype(leaf.dtype, copy=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"observation {name!r} has shape {np.shape(value)}, expected {leaf.shape}: {error}"
            ) from error

    def _rows(self, obs: Any, action_mask: Any) -> dict[str, np.ndarray]:
        """Every entry of the observation [B, ...], contiguous, as networks take it; UsageError if it does not fit."""
        found, size = {}, None
        for name, given in entries(obs, self.spec.seen).items():
            leaf, each = self.spec.obs[name], np.asarray(given)
            if each.ndim == 0 or each.shape[1:] != leaf.shape or (size is not None and len(each) != size):
                rows = "B" if size is None else size
                expected = ", ".join(map(str, (rows, *leaf.shape)))
                raise UsageError(
                    f"observation {name!r} has shape {each.shape}, expected ({expected}): a batch of observations; "
                    "`act` takes a single one"
                )
            check_integers(name, each, leaf)
            found[name], size = np.ascontiguousarray(each, leaf.dtype), len(each)
        return found | mask_rows(self.spec, obs, action_mask, size or 0)

    def spec_action(self, action: np.ndarray) -> Any:
        """An action as the environment takes it: boxes are scaled from [-1, 1] to their bounds."""
        spec = self.spec.action
        action = spec.to_env(action)
        if spec.kind == "discrete":
            return int(action)
        return action.reshape(spec.box_shape) if spec.kind == "box" else action


def _looks(spec: EnvSpec) -> tuple[Any, ...]:
    """What a network sees of an environment: not how frames were stacked."""
    return {
        name: (leaf.kind, leaf.shape, leaf.dtype, leaf.n, leaf.counts) for name, leaf in spec.obs.items()
    }, spec.action


def _outline(spec: EnvSpec) -> str:
    """Observations and actions, for a message."""
    obs = [
        f"{name} {leaf.kind} {list(leaf.shape)}"
        + (f" of {leaf.n or list(leaf.counts)}" if leaf.n or leaf.counts else "")
        for name, leaf in spec.obs.items()
    ]
    action = spec.action
    size = action.size if action.kind == "box" else list(action.choices)
    return f"observations {', '.join(sorted(obs))} and {action.kind} actions {size}"


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def load(
    path: str | Path, which: str = "newest", trust: tuple[str, ...] = (), tell: Callable[[str], None] = _warn
) -> Policy:
    """The policy of a run folder (its newest complete checkpoint, or which="best") or of one checkpoint folder.

    `path` of a checkpoint leaves nothing to choose: `which` is then not looked at.
    `tell` is called with a message if another checkpoint than the requested one is used; `notes` has it too.
    """
    if which not in CHOICES:
        raise UsageError(f"which={which!r} is not a choice; which is {' or '.join(map(repr, CHOICES))}")
    path = folders.real(path)
    run = path if folders.exists(path, "config.json") else path.parent.parent
    config = read_config(run, trust, env=None)
    spec = decode_spec(folders.read(run, "spec.json"), run / "spec.json")
    notes: list[str] = []
    if path != run:
        saved = checkpoint.load(path)
    elif which == "best" and (best := checkpoint.best(run / "checkpoints")) is not None:
        saved = checkpoint.load(best)
    else:
        saved, notes = checkpoint.newest_told(run / "checkpoints")
        if which == "best":
            notes = [
                *notes,
                f"no checkpoint has a score yet: {saved.path.name} is the newest, and not known as the best",
            ]
    policy = Policy(config, spec, saved)
    policy.notes = tuple(notes)
    for note in notes:
        tell(note)
    return policy
