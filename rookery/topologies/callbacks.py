"""Callbacks: code of the user's that the training loop calls, in the learner's process, in every topology.

    rookery.train("ppo", env="CartPole-v1", callbacks=[lambda run: run.log(double=2 * run.return_mean)])

They are called between two turns of the loop, never per environment step, in the order given; where there are several
ranks, by rank 0. They see the run through a `Training`, which they cannot change except by its five methods. Without
callbacks the loop makes one comparison per turn. An exception in a callback ends the run, after a checkpoint.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rookery.core.config import RunConfig
from rookery.core.errors import RookeryError, UsageError
from rookery.core.types import Episode
from rookery.envs.given import import_path, importing

if TYPE_CHECKING:
    from rookery.topologies.job import Job

HOOKS = ("on_start", "on_episode", "on_update", "on_evaluation", "on_checkpoint", "on_end")
RESERVED = ("kind", "env_steps", "updates", "wall_s")  # of every record


class Callback:
    """What a run calls. Subclass it and override what you need; any object with some of these methods is accepted.

    A plain function is `on_update`; a class is made without arguments.

    >>> class Patience(rookery.Callback):
    ...     def on_update(self, run):
    ...         if run.version == 2:
    ...             run.stop("two updates are enough")
    >>> rookery.train("ppo", env="CartPole-v1", callbacks=[Patience()], quiet=True).summary["stop_reason"]
    'two updates are enough'
    """

    def on_start(self, run: Training) -> None:
        """Before the first step of the run, or of a resumed one."""

    def on_episode(self, run: Training, episode: Episode) -> None:
        """After an episode: `episode.total` (the return), `.length`, `.lane`, `.info`."""

    def on_update(self, run: Training) -> None:
        """After an update of the learner on one batch: all its epochs and minibatches."""

    def on_evaluation(self, run: Training, evaluation: Any) -> None:
        """After an evaluation: `evaluation.return_mean`, `.returns`, `.episodes`, `.env_steps` of the weights, ….

        The run may have newer weights by then: where it has other processes, one of them evaluates beside the training.
        """

    def on_checkpoint(self, run: Training, path: Path) -> None:
        """After a checkpoint was written to the folder `path`."""

    def on_end(self, run: Training) -> None:
        """After the last checkpoint. Not called if the run ends with an error."""


class Training:
    """A run while it trains, as a callback sees it.

    >>> def halve(run):
    ...     run.log(half=run.env_steps / 2)
    ...     if run.version == 2:
    ...         run.change("algo.lr", 1e-4)
    >>> run = rookery.train("ppo", env="CartPole-v1", env_steps=2_000, callbacks=[halve], quiet=True)
    >>> '"half":' in (run.path / "metrics.jsonl").read_text()
    True
    """

    def __init__(self, job: Job, policy: Callable[[], Any]):
        self._job, self._policy = job, policy
        self._stop, self._checkpoint = "", False
        self._changes: dict[str, float] = {}  # step size by parameter group

    def __repr__(self) -> str:
        return f"<Training {self.folder}: {self.env_steps} steps, {self.updates} updates>"

    @property
    def config(self) -> RunConfig:
        """Every field of the run; frozen."""
        return self._job.config

    @property
    def folder(self) -> Path:
        return self._job.folder

    @property
    def env_steps(self) -> int:
        """Environment steps so far, of all ranks."""
        return self._job.journal.env_steps

    @property
    def updates(self) -> int:
        """Steps of the optimiser so far."""
        return self._job.learner.updates

    @property
    def version(self) -> int:
        """Updates on whole batches so far: the version of the weights."""
        return self._job.learner.version

    @property
    def episodes(self) -> int:
        return self._job.journal.episodes

    @property
    def progress(self) -> float:
        """Share of the run that lies behind, in [0, 1]; schedules follow it."""
        return self._job.journal.progress

    @property
    def wall_s(self) -> float:
        return self._job.journal.wall_s

    @property
    def return_mean(self) -> float | None:
        """Of the last 100 episodes, or of those there are; None before the first."""
        return self._job.journal.window.return_mean

    @property
    def return_std(self) -> float | None:
        return self._job.journal.window.return_std

    @property
    def length_mean(self) -> float | None:
        return self._job.journal.window.length_mean

    @property
    def info(self) -> dict[str, float]:
        """Means of what environments gave in `info` (see `metrics_from_info`), over the same episodes."""
        return self._job.journal.window.info_means

    @property
    def metrics(self) -> dict[str, float]:
        """Losses and other numbers of the last update; a copy."""
        return dict(self._job.journal.losses)

    @property
    def policy(self) -> Any:
        """A copy of the policy as it is now (a `rookery.Policy`). Making it takes time: keep it for several uses."""
        return self._policy()

    def log(self, values: dict[str, Any] | None = None, /, **more: Any) -> None:
        """Write numbers to metrics.jsonl (a record of kind "log") and TensorBoard (`log/<name>`)."""
        numbers = {str(name): _number(name, value) for name, value in {**(values or {}), **more}.items()}
        if taken := [name for name in numbers if name in RESERVED]:
            raise ValueError(f"{taken[0]!r} is a field of every record; log it under another name")
        self._job.journal.log(numbers, self.updates)

    def checkpoint(self) -> None:
        """Ask for a checkpoint: it is written as soon as what it needs is complete, such as a rollout."""
        self._checkpoint = True

    def evaluate(self) -> None:
        """Ask for an evaluation, as the `eval` fields of the config say; the result comes to `on_evaluation`.

        In one process it is done before the next update; else beside the training, after one that has begun already.
        """
        assert self._job.evaluator is not None  # wherever there are callbacks
        self._job.evaluator.ask()

    def stop(self, reason: str) -> None:
        """End the run: what was collected is trained on, a checkpoint is written, and the exit code is 0.

        The reason is in summary.json as `stop_reason`.
        """
        if not reason or not isinstance(reason, str):
            raise ValueError('say why the run stops: run.stop("the return has not changed for 50 updates")')
        self._stop = self._stop or reason

    def change(self, name: str, value: float) -> None:
        """Use another step size from the next update on, instead of its schedule: `run.change("algo.lr", 1e-4)`.

        Of the scheduled numbers only the step size is the learner's alone; others, such as an exploration rate, are
        used by actors too, which may be elsewhere. It is not part of a checkpoint: set it again in `on_start`.
        """
        groups = {"algo.lr" if group == "all" else f"algo.{group}_lr": group for group in self._job.learner.optimizers}
        if name not in groups:
            raise ValueError(f"{name!r} cannot be changed while a run trains; what can be: {', '.join(groups)}")
        value = _number(name, value)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; a step size is a finite number, 0 or larger")
        self._changes[groups[name]] = value

    def _take(self) -> tuple[str, dict[str, float]]:
        """What was asked for since the last call: the reason to stop, and step sizes by group."""
        changes, self._changes = self._changes, {}
        return self._stop, changes


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Sequence[Any], training: Training):
        self.training = training
        self.failed: BaseException | None = None  # what one of them has raised
        self._version = training.version
        made = [each() if isinstance(each, type) else each for each in callbacks]
        self._hooks = {name: [hook for each in made if (hook := _hook(each, name)) is not None] for name in HOOKS}
        if self._hooks["on_episode"]:
            training._job.journal.ended = []

    @property
    def checkpoint_due(self) -> bool:
        return self.training._checkpoint

    def take(self) -> tuple[str, dict[str, float]]:
        return self.training._take()

    def start(self) -> None:
        self._call("on_start")

    def turn(self) -> None:
        """After a turn of the loop: episodes that have ended, and the update if there was one."""
        journal, version = self.training._job.journal, self.training.version
        if journal.ended:
            ended, journal.ended = journal.ended, []
            for episode in ended:
                self._call("on_episode", episode)
        if version != self._version:
            self._version = version
            self._call("on_update")

    def saved(self, path: Path) -> None:
        self.training._checkpoint = False
        if self.failed is None:
            self._call("on_checkpoint", path)

    def evaluated(self, evaluation: Any) -> None:
        self._call("on_evaluation", evaluation)

    def end(self) -> None:
        self._call("on_end")

    def _call(self, name: str, *values: Any) -> None:
        for hook in self._hooks[name]:
            try:
                hook(self.training, *values)
            except BaseException as error:
                self.failed = error
                if isinstance(error, RookeryError):  # which would say that the run itself is at fault
                    self.failed = RuntimeError(f"a callback raised in {name}: {type(error).__name__}: {error}")
                    raise self.failed from error
                raise


def check(callbacks: Sequence[Any]) -> None:
    """UsageError for what cannot be called."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, list | tuple):
        raise UsageError("callbacks is a list: callbacks=[...]")
    for each in callbacks:
        if odd := [name for name in dir(each) if name.startswith("on_") and name not in HOOKS]:
            near = difflib.get_close_matches(odd[0], HOOKS, 1)
            raise UsageError(
                f"callback {_title(each)} has {odd[0]}, which is not called; "
                + (f"did you mean {near[0]}?" if near else f"what is: {', '.join(HOOKS)}")
            )
        if not callable(each) and not any(hasattr(each, name) for name in HOOKS):
            raise UsageError(f"callback {_title(each)} is not a function and has none of {', '.join(HOOKS)}")


def paths(callbacks: Sequence[Any]) -> list[str]:
    """Their import paths, for a process that has to make its own; UsageError for one that has none."""
    found = []
    for each in callbacks:
        path, _, why = import_path(each)
        if not path:
            raise UsageError(
                f"callback {_title(each)} {why}. With several ranks, rank 0 is a process of its own and imports its "
                "callbacks: give a function or a class at the top level of a module or script, or use torchrun"
            )
        found.append(path)
    return found


def of_paths(names: Sequence[str]) -> list[Any]:
    """The callbacks that these import paths name; they come from the process that started this one."""
    found = []
    for path in names:
        module, _, name = path.partition(":")
        with importing(path):
            found.append(getattr(importlib.import_module(module), name))
    return found


def _hook(callback: Any, name: str) -> Callable[..., Any] | None:
    hook = getattr(callback, name, None)
    if hook is None:
        plain = name == "on_update" and callable(callback) and not any(hasattr(callback, other) for other in HOOKS)
        return callback if plain else None
    return None if getattr(hook, "__func__", None) is getattr(Callback, name) else hook


def _title(callback: Any) -> str:
    return getattr(callback, "__qualname__", "") or type(callback).__name__


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; only numbers can be logged or set")
    return int(value) if isinstance(value, int) else float(value)
