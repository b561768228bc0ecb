"""What `import rookery` and the command line offer about runs that exist: evaluate, record, export, plot, and so on.

Runs are given as `train` returned them, as a run folder or a checkpoint's folder; to play, a policy will do too. How
episodes are played and pages are drawn is in `evaluate.py`, `record.py` and `rookery/metrics`.
"""

from __future__ import annotations

import base64
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core.config import RunConfig
from rookery.core.errors import EnvError, UsageError
from rookery.core.frames import with_frames
from rookery.storage import folder as folders
from rookery.storage.folder import run_of

if TYPE_CHECKING:
    from rookery.play.comparison import Comparison
    from rookery.play.evaluate import Evaluation
    from rookery.play.export import Exported, Format
    from rookery.play.policy import Policy
    from rookery.play.record import Recording

AnyPath = str | os.PathLike[str]  # a Run is one too
Env = str | Callable[..., Any]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def evaluate(
    what: AnyPath | Policy, *, env: Env | None = None, env_kwargs: Mapping[str, Any] | None = None, episodes: int = 100,
    seed: int = 7, envs: int = 8, deterministic: bool = True, epsilon: float = 0.0, which: str = "newest",
    trust: tuple[str, ...] = (), tell: Callable[[str], None] = _warn,
) -> Evaluation:  # fmt: skip
    """Play whole episodes with a run or a policy: unclipped rewards, fixed seeds, frozen statistics.

    `env`: another environment than that of the run, as `train` takes it, with the same observations and actions;
    `env_kwargs`: its arguments, else those of the run. `envs`: environments played together, at most: each plays the
    same number of episodes. `epsilon`: share of actions drawn at random. `which`: "newest" or "best" checkpoint.
    `trust`: modules that a stored run may name, besides what Rookery knows itself.

    >>> result = rookery.evaluate(run, episodes=10)
    >>> result.episodes, len(result.returns)
    (10, 10)
    >>> result.return_min <= result.return_mean <= result.return_max
    True
    """
    from rookery.envs.make import make
    from rookery.play.evaluate import divisor
    from rookery.play.evaluate import evaluate as play

    _at_least_one(episodes=episodes, envs=envs)
    policy = _policy(what, which, trust, tell, env)
    config = _playing(policy, env, env_kwargs, trust)
    lanes = make(config, divisor(episodes, envs), training=False)
    try:
        return play(policy, lanes, episodes, seed, greedy=deterministic, epsilon=epsilon, tell=tell)
    finally:
        lanes.close()


def store(folder: Path, result: Evaluation) -> Path:
    """Write an evaluation into a run folder, where the report and the comparison of runs find it."""
    how = ("" if result.greedy else "-sampled") + (f"-epsilon{result.epsilon:g}" if result.epsilon else "")
    name = f"eval/{result.checkpoint}-seed{result.seed}-episodes{result.episodes}{how}.json"
    try:
        return folders.write(folder, name, (json.dumps(asdict(result), indent=2) + "\n").encode())
    except OSError as error:
        error.filename = str(folder / name) if error.filename is None else error.filename
        raise


def record(
    what: AnyPath | Policy, out: AnyPath | None = None, *, env: Env | None = None,
    env_kwargs: Mapping[str, Any] | None = None, episodes: int = 1, seed: int = 7, fps: float = 0.0,
    max_steps: int = 10_000, deterministic: bool = True, which: str = "newest", trust: tuple[str, ...] = (),
    tell: Callable[[str], None] = _warn,
) -> Recording:  # fmt: skip
    """Record whole episodes as a video. A notebook shows it.

    `out`: a file ending in .mp4, .mkv or .mov; None: `report/<checkpoint>-<seed>.mp4` in the run folder. `fps`:
    pictures per second; 0: as the environment says. An episode is cut after `max_steps`. The others are those of
    `evaluate`.

    >>> video = rookery.record(run, max_steps=20)
    >>> video.path.suffix, len(video.returns)
    ('.mp4', 1)
    """
    import torch

    from rookery.play.record import record as film

    _at_least_one(episodes=episodes, max_steps=max_steps)
    if not 0 <= fps <= 1000:
        raise UsageError(f"fps is {fps}; it is a number of pictures per second, or 0 for what the environment says")
    policy = _policy(what, which, trust, tell, env)
    config = _playing(policy, env, env_kwargs, trust)
    within = None if out is not None else run_of(policy.path)
    target = f"report/{policy.path.name}-{seed}.mp4" if out is None else Path(out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as when acting in training: the same sums, the same digits
    try:
        with _located(config.env):
            return film(policy, config, target, episodes, seed, fps, max_steps, deterministic, within)
    finally:
        torch.set_num_threads(threads)


def export(
    what: AnyPath | Policy, out: AnyPath | None = None, *, format: Format = "onnx", which: str = "newest",
    trust: tuple[str, ...] = (), tell: Callable[[str], None] = _warn,
) -> Exported:  # fmt: skip
    """Write the policy as one file that needs no Rookery; it gives greedy actions, as the environment takes them.

    `out`: a file ending in .onnx, or .pt2 for format "torch", a program of `torch.export`; None:
    `export/<checkpoint>.onnx` in the run folder. `which` and `trust` are those of `evaluate`. The file is compared with
    the policy on random observations before it is written.

    >>> done = rookery.export(run, format="torch")
    >>> done.path.suffix, [port.name for port in done.inputs], [port.name for port in done.outputs]
    ('.pt2', ['obs'], ['action', 'logits', 'value'])
    """
    from rookery.play.export import export as write

    return write(_policy(what, which, trust, tell, None), None if out is None else Path(out), format)


@dataclass(frozen=True)
class Picture:
    """A picture file. A notebook shows it, and it can be given wherever a path is expected."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown: dict[str, Any] = {"text/plain": repr(self)}
        if self.path.suffix == ".png":
            shown["image/png"] = base64.b64encode(self.path.read_bytes()).decode()
        elif self.path.suffix == ".svg":
            shown["image/svg+xml"] = self.path.read_text()
        return shown


def plot(*runs: AnyPath | Iterable[AnyPath], out: AnyPath | None = None) -> Picture:
    """Draw the learning curves of runs into a file; those that differ by their seed only are one line with a band.

    `out`: a .png, .svg or .pdf; None: `report/curve.png` in the run folder, or `curves.png` here for several runs.

    >>> rookery.plot(run).path.name
    'curve.png'
    """
    from rookery.metrics.plot import plot_runs

    paths = _folders(runs)
    if out is None and len(paths) == 1:
        return Picture(plot_runs(paths, "report/curve.png", within=paths[0]))
    return Picture(plot_runs(paths, Path("curves.png" if out is None else out)))


def report(*runs: AnyPath | Iterable[AnyPath], out: AnyPath | None = None) -> Path:
    """Write one HTML page about runs: curves, losses, evaluations, time, messages, and how the runs differ.

    `out`: the file; None: `report/index.html` in the run folder, or `report.html` here for several runs.

    >>> rookery.report(run).name
    'index.html'
    """
    from rookery.metrics.report import write_report

    return write_report(_folders(runs), None if out is None else Path(out))


def compare(
    *runs: AnyPath | Iterable[AnyPath], target: float | None = None,
    scores: Mapping[str, tuple[float, float]] | None = None,
) -> Comparison:  # fmt: skip
    """One row for each setting: interquartile mean of its seeds with a 95 % bootstrap interval. Printed, it is a table.

    `target`: the return for "steps to it"; None: the `target_return` of the runs. `scores`: by environment the returns
    that count as 0 and 1, for a row over several environments.

    >>> [row] = rookery.compare(run, target=20.0)
    >>> row.env, row.runs
    ('CartPole-v1', 1)
    """
    from rookery.metrics.compare import compare as rows
    from rookery.play.comparison import Comparison

    return Comparison(rows(_folders(runs), target, scores))


def _folders(runs: Iterable[Any]) -> list[Path]:
    """The run folders of runs, paths, or lists of these."""
    found: list[Path] = []
    for run in runs:
        if isinstance(run, str | os.PathLike):
            found.append(run_of(Path(run)))
        elif isinstance(run, Iterable):
            found += _folders(run)
        else:
            raise UsageError(f"a run or its folder is needed, and this is a {type(run).__name__}")
    if not found:
        raise UsageError("which runs? give at least one run or run folder")
    return found


def _policy(
    what: Any, which: str, trust: tuple[str, ...], tell: Callable[[str], None], env: Env | None
) -> Policy:  # fmt: skip
    from rookery.play import policy

    if isinstance(what, policy.Policy):
        return what
    if not isinstance(what, str | os.PathLike):
        raise UsageError(f"a run, its folder, or a policy is needed, and this is a {type(what).__name__}")
    return policy.load(what, which, trust, tell, env=env)


def _playing(
    policy: Policy, env: Env | None, env_kwargs: Mapping[str, Any] | None, trust: tuple[str, ...]
) -> RunConfig:
    """The config to make environments from. What a stored run names is made only if it may be."""
    from rookery.envs.given import given
    from rookery.run.env import resolve
    from rookery.storage.trust import judge, modules

    config = policy.config
    if env_kwargs is not None:
        config = replace(config, env_kwargs=dict(env_kwargs))
    if env is not None:
        return replace(config, env=resolve(env))
    own = config.env if given(config.env) is not None else ""
    stored = config if env_kwargs is None else replace(config, env_kwargs={})  # the caller's are the caller's own
    judge(msgspec.to_builtins(stored), (*policy.trust, *modules(trust)), own)
    return config


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name} is {number}; it must be at least 1")


@contextmanager
def _located(env: str) -> Iterator[None]:
    """An environment's fault, as the error of the environment it is."""
    from rookery.envs.lanes import LaneFault

    try:
        yield
    except LaneFault as fault:
        raise EnvError(with_frames(f"environment {env}: {fault}", fault.cause), fault.reason) from fault
