"""A trained policy, loaded from a checkpoint, ready to act.

    policy = rookery.load("runs/a")
    state = None
    action, state = policy.predict(obs, state)

Loading reads safetensors and JSON; it runs no code of the run's environment.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rookery.algorithms.base import Algorithm
from rookery.algorithms.registry import build_algorithm
from rookery.core import tree
from rookery.core.config import RunConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.seeding import seed_of
from rookery.core.types import ActOutput, EnvSpec, Explore, Tree
from rookery.core.wording import setting
from rookery.envs.last import ACTION, REWARD, Last
from rookery.play.legal import mask_rows
from rookery.play.memory import check_state, forgotten, per_row, starts_of
from rookery.play.observation import read
from rookery.play.prediction import Prediction
from rookery.run.env import resolve
from rookery.run.finished import trusted
from rookery.storage import checkpoint
from rookery.storage import folder as folders
from rookery.storage.folder import run_of
from rookery.storage.stored import check_sizes, check_values, decode_spec, read_config

LAST = (ACTION, REWARD)
CHOICES = ("newest", "best")  # of the checkpoints of a run


class _Step(NamedTuple):
    single: bool
    rows: dict[str, np.ndarray]  # what the networks were given
    before: Tree
    output: ActOutput
    action: Any  # as the environment takes it
    after: Tree | None


class Policy:
    """A policy that acts: see `predict`. `rookery.load` makes one from a run or a checkpoint.

    >>> env = gymnasium.make("CartPole-v1")
    >>> policy, (obs, _), state, over = rookery.load(run), env.reset(seed=1), None, False
    >>> while not over:
    ...     action, state = policy.predict(obs, state)
    ...     obs, reward, terminated, truncated, _ = env.step(action)
    ...     over = terminated or truncated
    """

    trust: tuple[str, ...] = ()  # modules that its run may name, besides what Rookery knows itself
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
        self.seed(config.seed)

    def __repr__(self) -> str:
        at = f"{self.config.recipe} on {self.spec.id} after {self.env_steps:,} steps"
        return f"<Policy {at}: {outline(self.spec)}>"

    def check_fits(self, spec: EnvSpec) -> None:
        """Refuse an environment with other observations or actions than the policy has learnt from."""
        if looks(spec) != looks(self.spec):
            raise CheckpointError(
                f"{self.path} does not fit the environment {spec.id}: it was trained on "
                f"{outline(self.spec)}, and this one has {outline(spec)}"
            )

    def initial_state(self, lanes: int) -> Tree:
        return self.algorithm.initial_state(self.nets, lanes)

    def seed(self, seed: int) -> None:
        """Start the random numbers of `deterministic=False` again."""
        self._draws = torch.Generator().manual_seed(seed_of(seed, "predict"))

    def predict(
        self, obs: Any, state: Tree | None = None, deterministic: bool = True, *, episode_start: Any = None,
        reward: Any = 0.0, action_mask: Any = None, generator: torch.Generator | None = None,
    ) -> tuple[Any, Tree | None]:  # fmt: skip
        """The action for an observation, or the actions for a batch of them, and the state for the next call.

        `obs`: as the Gymnasium environment has it: an array, tensor or list, or dicts and tuples of these; a batch has
        one axis more. Actions are what `env.step` takes: boxes within their bounds.
        `state`: what the last call returned; None begins episodes. Policies without memory return None.
        `deterministic`: the likeliest action, or the one of the highest value; else it is drawn as in training, from
        `generator` or from numbers that `seed` starts.
        `episode_start`: of each row of a batch, whether an episode begins there: its state is forgotten.
        `reward`: of the last step; only runs with net.feed_last look at it.
        `action_mask`: which actions are legal (`info["action_mask"]`, or what `action_masks()` returned), if the
        observation does not say so; None: all are.

        >>> policy = rookery.load(run)
        >>> action, state = policy.predict([0.0, 0.1, 0.0, -0.1])
        >>> actions, state = policy.predict(numpy.zeros((3, 4)), deterministic=False)
        >>> actions.shape
        (3,)
        """
        done = self._step(obs, state, deterministic, episode_start, reward, action_mask, generator)
        return done.action, done.after

    def explain(
        self, obs: Any, state: Tree | None = None, deterministic: bool = True, *, episode_start: Any = None,
        reward: Any = 0.0, action_mask: Any = None, generator: torch.Generator | None = None,
    ) -> Prediction:  # fmt: skip
        """As `predict`, with what the policy knows besides: `value`, `logp` and `q`, as far as its algorithm has them.

        >>> found = rookery.load(run).explain([0.0, 0.1, 0.0, -0.1])
        >>> found.has
        ('logp', 'value')
        >>> found.action in (0, 1) and found.logp <= 0
        True
        """
        done = self._step(obs, state, deterministic, episode_start, reward, action_mask, generator)
        with torch.inference_mode():
            known = self.algorithm.quantities(self.nets, tree.to_torch(done.rows), done.before, done.output)
        numbers = {name: _first(x) if done.single else x.numpy() for name, x in known.items()}
        return Prediction(done.action, done.after, numbers, type(self.algorithm).__name__)

    def _step(
        self, obs: Any, state: Tree | None, deterministic: bool, episode_start: Any, reward: Any, action_mask: Any,
        generator: torch.Generator | None,
    ) -> _Step:  # fmt: skip
        fed = self.config.net.feed_last
        found = read(obs, self.spec.seen, LAST if fed else ())
        before = self._before(state, found.size, episode_start)
        rows = found.rows | mask_rows(self.spec, obs, action_mask, found.size, found.single)
        if fed:
            last = Last(self.spec, found.size, self.spec.clipped)
            if state is not None:
                last.write(before["last_action"], per_row("reward", reward, found.size, np.float32))
                last.forget(starts_of(episode_start, found.size))
            rows |= last.leaves()
            before = before["core"]
        output = self.act_rows(rows, before, None if deterministic else generator or self._draws)
        after = {"core": output.state, "last_action": np.asarray(output.action).copy()} if fed else output.state
        action: Any = self.spec.action.to_gym(np.asarray(output.action))
        if found.single:
            action = int(action[0]) if self.spec.action.kind == "discrete" else action[0]
        return _Step(found.single, rows, before, output, action, after or None)

    def _before(self, state: Tree | None, count: int, episode_start: Any) -> Tree:
        """The state that a step starts from, zero where an episode begins; UsageError for one of another form."""
        fresh = self.initial_state(count)
        if self.config.net.feed_last:
            fresh = {"core": fresh, "last_action": np.zeros((count, *self.spec.action.shape), self.spec.action.dtype)}
        starts = starts_of(episode_start, count)
        if state is None:
            return fresh
        check_state(state, fresh, count)
        return forgotten(state, starts) if starts.any() else state

    def act_batch(self, obs: dict[str, np.ndarray], state: Tree, explore: torch.Generator | None = None) -> Any:
        """Actions [B, ...] in Rookery's form for observations as lanes return them, and the next state."""
        rows = {name: np.ascontiguousarray(obs[name], leaf.dtype) for name, leaf in self.spec.obs.items()}
        output = self.act_rows(rows, state, explore)
        return np.asarray(output.action), output.state

    @torch.inference_mode()
    def act_rows(self, rows: dict[str, np.ndarray], state: Tree, explore: torch.Generator | None) -> ActOutput:
        """What the algorithm does for rows [B, ...] as networks take them."""
        noise = None
        if explore is not None:  # environments take turns on a ladder of epsilons or noises
            noise = Explore(explore, np.arange(len(next(iter(rows.values())))) % self.config.lanes)
        return self.algorithm.act(self.nets, tree.to_torch(rows), state, noise)


def _first(x: torch.Tensor) -> Any:
    return x[0].numpy() if x.dim() > 1 else x[0].item()


def check_resumed(algorithm: Algorithm, spec: EnvSpec, saved: checkpoint.Checkpoint, run: Path) -> None:
    """That a run can be resumed with these networks; where it cannot because of its environment, that is the error."""
    try:
        check_sizes(algorithm, saved)
    except CheckpointError as error:
        before = decode_spec(folders.read(run, "spec.json"), run / "spec.json")
        if looks(spec) == looks(before):
            raise
        raise CheckpointError(
            f"{run} cannot be resumed in {spec.id}: it was trained on {outline(before)}, and this environment has "
            f"{outline(spec)}; to begin with its networks elsewhere, train a new run with {setting('init_from')}"
        ) from error


def looks(spec: EnvSpec) -> tuple[Any, ...]:
    """What a network sees of an environment: not how frames were stacked."""
    return {
        name: (leaf.kind, leaf.shape, leaf.dtype, leaf.n, leaf.counts) for name, leaf in spec.obs.items()
    }, spec.action


def outline(spec: EnvSpec) -> str:
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
    path: str | os.PathLike[str], which: str = "newest", trust: tuple[str, ...] = (),
    tell: Callable[[str], None] = _warn, *, env: str | Callable[..., Any] | None = None,
) -> Policy:  # fmt: skip
    """The policy of a run or its folder (its newest complete checkpoint, or which="best") or of one checkpoint folder.

    The best is that of the evaluations during training if there were any, else of the checkpoints, by the mean return.
    `trust`: modules that its config.json may name, besides what Rookery knows itself. A run that this process has
    trained needs none. `env`: what it is to be played in, instead of what config.json names.
    `path` of a checkpoint leaves nothing to choose: `which` is then not looked at.
    `tell` is called with a message if another checkpoint than the requested one is used; `notes` has it too.

    >>> policy = rookery.load(run)
    >>> policy.config.recipe, policy.spec.id
    ('ppo', 'CartPole-v1')
    """
    if which not in CHOICES:
        raise UsageError(f"which={which!r} is not a choice; which is {' or '.join(map(repr, CHOICES))}")
    trust = trusted(path, trust)
    path = folders.real(Path(path))
    run = run_of(path)
    config = read_config(run, trust, None if env is None else resolve(env))
    spec = decode_spec(folders.read(run, "spec.json"), run / "spec.json")
    notes: list[str] = []
    if path != run:
        saved = checkpoint.load(path)
    elif which == "best" and (best := checkpoint.best_of_run(run)) is not None:
        saved = checkpoint.load(best)
    else:
        saved, notes = checkpoint.newest_told(run / "checkpoints")
        if which == "best":
            notes = [
                *notes,
                f"no checkpoint has a score yet: {saved.path.name} is the newest, and not known as the best",
            ]
    policy = Policy(config, spec, saved)
    policy.trust, policy.notes = trust, tuple(notes)
    for note in notes:
        tell(note)
    return policy
