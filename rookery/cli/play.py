"""`rookery eval` and `rookery record`: play with what a run has learnt."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from rookery.cli.flags import parse
from rookery.cli.runs import open_run, trusted
from rookery.cli.show import console, count, escape, facts, number, only_answer, warn
from rookery.core.errors import StorageError, UsageError
from rookery.storage.folder import Refused, run_of

if TYPE_CHECKING:
    from rookery.play.evaluate import Evaluation


@dataclass(frozen=True)
class Eval:
    run: tyro.conf.Positional[Path]  # run folder, or one of its checkpoints
    episodes: int = 100  # whole episodes to play
    seed: int = 7  # of the environments
    envs: int = 8  # environments played together, at most: every one plays the same number of episodes
    best: bool = False  # the best checkpoint instead of the newest
    sample: bool = False  # sample actions, as in training, instead of the likeliest
    epsilon: float = 0.0  # share of actions drawn at random, as papers on Atari evaluate (DQN 0.05, Rainbow 0.001)
    json: bool = False  # print the result as JSON, and nothing else
    trust: tuple[str, ...] = ()  # modules that the run may import and call, besides those on the list of Rookery
    debug: bool = False  # show tracebacks


def evaluate(words: list[str]) -> int:
    args = parse(Eval, words, "rookery eval", "Play whole episodes: unclipped rewards, fixed seeds, frozen statistics.")
    if args.episodes < 1 or args.envs < 1:
        raise UsageError("--episodes and --envs must be at least 1")
    if not 0 <= args.epsilon <= 1:
        raise UsageError("--epsilon is a share of actions, from 0 to 1")
    args = dataclasses.replace(args, trust=trusted(words))  # of several --trust, all count
    open_run(args.run, args.trust, ["rookery", "eval", *words])
    from rookery.play import interface

    with only_answer() if args.json else console().status(f"playing {args.episodes} episodes …"):
        result = interface.evaluate(
            args.run, episodes=args.episodes, seed=args.seed, envs=args.envs, deterministic=not args.sample,
            epsilon=args.epsilon, which="best" if args.best else "newest", trust=args.trust, tell=warn,
        )  # fmt: skip
        saved = _store(args.run, result)
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
        return _stored(saved)
    how = ("greedy" if result.greedy else "sampled") + (f", {result.epsilon:g} at random" if result.epsilon else "")
    console().print(facts({
        "policy": f"{escape(str(args.run))}, {escape(result.checkpoint)} ({result.env_steps:,} steps)",
        "played": f"{count(result.episodes, 'episode')} of {escape(result.env)}, {how}, seed {result.seed}",
        "return": f"[bold]{number(result.return_mean)}[/] ± {number(result.return_std)}, "
        f"from {number(result.return_min)} to {number(result.return_max)}",
        "length": f"{number(result.length_mean)} steps",
        **{escape(name): number(mean) for name, mean in result.info.items()},
        "saved": escape(saved) if isinstance(saved, str) else "[yellow]no[/]",
    }))  # fmt: skip
    return _stored(saved)


def _store(run: Path, result: Evaluation) -> str | OSError:
    """Where the result is, or why it was not saved; it is printed either way."""
    from rookery.play import interface

    try:
        return str(interface.store(run_of(run), result))
    except OSError as error:
        return error


def _stored(saved: str | OSError) -> int:
    """The exit code. A read-only folder does not fail the evaluation; a link in it is refused."""
    if isinstance(saved, Refused):
        raise StorageError(f"the result was not saved: cannot write {saved.filename}: {saved.strerror}")
    if isinstance(saved, OSError):
        warn(f"the result was not saved: {saved.strerror or saved} ({saved.filename})")
    return 0


@dataclass(frozen=True)
class Record:
    run: tyro.conf.Positional[Path]  # run folder, or one of its checkpoints
    episodes: int = 1  # whole episodes to record
    out: Path | None = None  # video file; none: RUN/report/<checkpoint>-<seed>.mp4
    seed: int = 7  # of the environment
    fps: float = 0.0  # pictures per second; 0: as the environment says
    max_steps: int = 10_000  # an episode is cut after so many steps
    best: bool = False  # the best checkpoint instead of the newest
    sample: bool = False  # sample actions, as in training, instead of the likeliest
    trust: tuple[str, ...] = ()  # modules that the run may import and call, besides those on the list of Rookery
    debug: bool = False  # show tracebacks


def record(words: list[str]) -> int:
    args = parse(Record, words, "rookery record", "Record episodes. Frames stream to ffmpeg; memory does not grow.")
    if args.episodes < 1 or args.max_steps < 1:
        raise UsageError("--episodes and --max-steps must be at least 1")
    if not 0 <= args.fps <= 1000:
        raise UsageError("--fps is a number of pictures per second, or 0 for what the environment says")
    args = dataclasses.replace(args, trust=trusted(words))  # of several --trust, all count
    config = open_run(args.run, args.trust, ["rookery", "record", *words])
    from rookery.play import interface

    done = interface.record(
        args.run, args.out, episodes=args.episodes, seed=args.seed, fps=args.fps, max_steps=args.max_steps,
        deterministic=not args.sample, which="best" if args.best else "newest", trust=args.trust, tell=warn,
    )  # fmt: skip
    rows = {
        "video": f"[bold]{escape(str(done.path))}[/]",
        "shows": f"{count(len(done.returns), 'episode')} of {escape(config.env)}, return "
        + ", ".join(number(value) for value in done.returns),
        "length": f"{done.frames:,} pictures, {done.frames / done.fps:.1f} s at {done.fps:g} per second",
    }
    if done.note:
        rows["note"] = done.note
    console().print(facts(rows))
    return 0
