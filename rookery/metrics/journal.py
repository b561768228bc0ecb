"""The journal of a run: what was collected, how it was used, how fast, and whether to stop.

A topology reports to it; it keeps the counters, the ledger, the moving windows and the time split, and feeds
the panel and metrics.jsonl. It takes no decision about processes and touches no tensor. It belongs to the learner's
thread. Panel and sinks have threads of their own, so what they are given is a new object each time and never changed.

The ledger (`ledger.py`) says what became of every environment step. With several ranks each has a journal, and what
counts for the run (steps, the ledger, episodes) is what all of them know since their last exchange.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rookery.core.config import RunConfig
from rookery.core.machine import Machine
from rookery.core.types import ActorReport, Episode, Failure, StepReport
from rookery.metrics.evaluated import KIND, Evaluated
from rookery.metrics.ledger import Ledger, RankBooks, Ranks
from rookery.metrics.split import Split, advice
from rookery.metrics.window import ReturnWindow


class Journal:
    def __init__(self, config: RunConfig, sinks: Any, panel: Any, clock=time.perf_counter, rank: int = 0):
        self.rank = rank
        self.config, self.sinks, self.panel, self._clock = config, sinks, panel, clock
        self.ledger, self.window, self.split = Ledger(), ReturnWindow(100), Split(clock)
        self.episodes = self.restarts = 0
        self.ranks = Ranks() if config.ranks > 1 else None  # what all ranks know; None: there are no others
        self.lag_sum = self.lag_count = self.lag_max = 0
        self.env_steps_to_target: int | None = None
        self.wall_s_to_target: float | None = None
        self.best: float | None = None  # highest moving mean of the return at a checkpoint
        self.evaluations = Evaluated()
        self.reached: tuple[int, float] | None = None  # by an evaluation: steps and time of the weights; see `reach`
        self.messages: deque[str] = deque(maxlen=5)
        self._why = ""  # this topology was chosen; empty: it was named
        self.history: list[tuple[int, float]] = []
        self.losses: dict[str, float] = {}
        self.queue_depth = 0
        self.replay: dict[str, float] = {}  # statistics of the table: a replay memory, or a queue with lag
        self.paced_by_env = False  # progress counts steps taken, not steps trained on
        self.waiting: Callable[[], int] | None = None  # counts the steps that wait in the table; asked once per record
        self.pending: dict[int, int] = {}  # by actor: steps that it holds back until an item is whole
        self._round: dict[int, tuple[ActorReport, int]] = {}  # by actor: unrolls of the present round
        self.collect_s = 0.0  # wall time of collecting
        self.idle_s = 0.0  # wall time that the learner had nothing to train on
        self.busy_s = 0.0  # time that the mean actor acted, beside the learner
        self._unexplained = 0.0  # wall time of collecting that no report has explained yet
        self._cores = Machine().cores()
        self.begun = False
        self.stop_reason = ""  # why a callback ends the run
        self.ended: list[Episode] | None = None  # episodes that callbacks have not seen yet; None: none want to
        self._updates = 0
        self._started = self._logged_at = clock()
        self._ended: float | None = None
        self._wall_before = 0.0  # wall time of the run before it was resumed
        self._env_steps_before = 0
        self._rate_marks: deque[tuple[float, int]] = deque(maxlen=30)

    @property
    def whole(self) -> Ledger:
        """Of all ranks, as they know it since their last exchange; of this process where there are no others."""
        return self.ledger if self.ranks is None else self.ranks.ledger

    @property
    def env_steps(self) -> int:
        return self.whole.collected

    @property
    def wall_s(self) -> float:
        return self._wall_before + self.life_s

    @property
    def life_s(self) -> float:
        """Wall time since this process started or resumed the run, until its last checkpoint is written."""
        return (self._clock() if self._ended is None else self._ended) - self._started

    def begin(self) -> None:
        """Start the clock: everything is set up, the first step is about to be taken."""
        self.begun = True
        self._started = self._logged_at = self._clock()
        self._env_steps_before, self.collect_s, self._ended = self.env_steps, 0.0, None

    def not_before(self, wall_s: float) -> None:
        """The run has lasted at least so long already."""
        self._wall_before = max(self._wall_before, wall_s)

    def end(self) -> None:
        """Stop the clock: what follows is only the end of processes."""
        self._ended = self._clock()

    # What happened

    def collected(self, report: ActorReport) -> None:
        self.ledger.collected += report.steps
        self.ledger.drop(report.skipped, "cut")
        if self.ranks is None:
            self._finish_episodes(report.episodes)
        else:
            self.ranks.ended += report.episodes
            self.ranks.cut = self.ranks.cut or report.cut

    def _finish_episodes(self, episodes: Sequence[Episode]) -> None:
        if self.ended is not None:
            self.ended.extend(episodes)
        for episode in episodes:
            self.episodes += 1
            self.window.add(episode.total, episode.length, episode.info)
        target = None if self.config.eval.stop else self.config.target_return
        if (
            target is not None
            and self.env_steps_to_target is None
            and self.window.full
            and (mean := self.window.return_mean) is not None
            and mean >= target
        ):
            self.env_steps_to_target, self.wall_s_to_target = self.env_steps, self.wall_s

    def evaluated(self, record: dict[str, Any], updates: int, wall_s: float) -> None:
        """An evaluation has ended; `wall_s` is when its weights were as they are."""
        self.evaluations.add(record)
        self.sinks.write({"kind": KIND, "updates": updates, "wall_s": self.wall_s} | record)
        target = self.config.target_return
        if self.config.eval.stop and target is not None and self.reached is None and record["return_mean"] >= target:
            self.reached = record["env_steps"], wall_s

    def reach(self, at: tuple[int, float] | None) -> None:
        """The target was reached by an evaluation, as all ranks know."""
        if at is not None and self.env_steps_to_target is None:
            self.env_steps_to_target, self.wall_s_to_target = at

    @contextmanager
    def collecting(self, overlaps: bool, waits: bool) -> Iterator[None]:
        """Around taking what has arrived. `overlaps`: actors act beside the learner. `waits`: it had nothing to do."""
        started = self._clock()
        yield
        wall = self._clock() - started
        if not overlaps:
            self.collect_s += wall
            self._unexplained += wall
            return
        self.collect_s = self.life_s
        if waits:
            self.idle_s += wall
            self.split.add("wait", wall)

    def told(self, actor: int, report: ActorReport, parallel: int, overlaps: bool) -> None:
        """One unroll of an actor has come. Of `parallel` actors, the time is what the mean one did with it.

        Where they overlap with the learner, the actors' time passed beside the learner's. Where they take turns, what
        is left of the time of collecting is time that actors waited for the slowest, and the unrolls of a round count
        when it is over, in the order of the actors: episodes then come in the same order in every run.
        """
        if overlaps:
            self._count(actor, report, parallel, overlaps)
        else:
            self._round[actor] = report, parallel

    def end_round(self) -> None:
        """All unrolls of the round have come, or no more will."""
        for actor in sorted(self._round):
            self._count_of_round(actor)

    def _count_of_round(self, actor: int) -> None:
        if actor in self._round:
            report, parallel = self._round.pop(actor)
            self._count(actor, report, parallel, overlaps=False)

    def _count(self, actor: int, report: ActorReport, parallel: int, overlaps: bool) -> None:
        self.collected(report)
        self.pending[actor] = report.pending
        parts = {"env": report.env_s, "inference": report.inference_s, "learn": report.learn_s}
        if not overlaps:
            parts["other"] = report.total_s - report.env_s - report.inference_s
            self._unexplained -= report.total_s / parallel
        else:
            self.busy_s += report.total_s / parallel
        for stage, seconds in parts.items():
            self.split.add(stage, seconds / parallel)

    def failed(self, failure: Failure, held: int = 0) -> None:
        """An actor, or environments of it: the steps it took since its last unroll, and those it held, are lost."""
        self._count_of_round(failure.actor)
        self.ledger.collected += failure.steps
        self.ledger.drop(failure.steps + self.pending.pop(failure.actor, 0) + held, failure.reason)
        self.restarts += 1
        self.say(failure.message)

    def trained(self, steps: int, lags: Sequence[int] | np.ndarray, report: StepReport, updates: int) -> None:
        lags = np.asarray(lags)
        self.split.add("wait", max(0.0, self._unexplained))
        self._unexplained = 0.0
        self.ledger.trained += steps
        self.lag_sum, self.lag_count = self.lag_sum + int(lags.sum()), self.lag_count + len(lags)
        self.lag_max = max(self.lag_max, int(lags.max()))
        self.losses, self._updates = report.metrics or self.losses, updates

    def own(self, held: int = 0) -> RankBooks:
        """What this rank tells the others: its books so far, and what is new since the last time.

        `held`: steps that have left the table and will be trained on next.
        """
        assert self.ranks is not None
        self.count_in_flight()
        self.ledger.in_flight += held
        ended, self.ranks.ended = self.ranks.ended, []
        done, self.ranks.round = self.ranks.round, None
        if done is not None:
            done.cut, self.ranks.cut = self.ranks.cut, False
        return RankBooks(self.ledger, self.restarts, ended, done)

    def agree(self, books: list[RankBooks]) -> None:
        """The books of all ranks, in their order: from here on all know the same of the run."""
        assert self.ranks is not None
        self.ranks.take(books)
        for each in books:
            self._finish_episodes(each.ended)

    def count_in_flight(self) -> None:
        if self.waiting is not None:
            self.ledger.in_flight = self.waiting() + sum(self.pending.values())

    def say(self, message: str) -> None:
        self.messages.append(message)
        self._record(message)

    def chose(self, why: str) -> None:
        """The topology, by a measurement; not a message of the panel, which has a place of its own for it."""
        self._why = why
        if why:
            self._record(f"topology {why}")

    def _record(self, message: str) -> None:
        wall_s = self.wall_s if self.begun else self._wall_before  # the time before `begin` does not count
        self.sinks.write({"kind": "message", "env_steps": self.env_steps, "wall_s": wall_s, "text": message})

    def resumed(self, about: Mapping[str, Any]) -> None:
        """The run goes on from a checkpoint: when, with which version, and what was changed."""
        self.sinks.write({"kind": "resume", "env_steps": self.env_steps, "wall_s": self._wall_before, **about})

    def log(self, numbers: dict[str, float], updates: int) -> None:
        """Numbers of the user's own."""
        at = {"kind": "log", "env_steps": self.env_steps, "updates": updates, "wall_s": self.wall_s}
        self.sinks.write(at | numbers)

    # Stop conditions

    @property
    def progress(self) -> float:
        """Share of the run that lies behind: trained on, or with a replay memory, taken."""
        done = self.env_steps if self.paced_by_env else self.whole.trained
        return min(1.0, done / self.config.env_steps)

    def finished(self) -> str | None:
        """The reason to stop, if there is one."""
        if self.stop_reason:
            return "callback"
        if self.env_steps_to_target is not None:
            return "target_return"
        return "env_steps" if self.env_steps >= self.config.env_steps else None

    # Reporting

    @property
    def _target_of(self) -> str:
        """What has to reach the target: the mean of an evaluation, or of the last 100 episodes."""
        return "evaluation" if self.config.eval.stop else "return"

    @property
    def due(self) -> bool:
        """Whether the next report will be written: what only it needs need not be computed before."""
        return self._clock() - self._logged_at >= self.config.log_every

    def report(self, force: bool = False) -> None:
        """Feed panel and metrics.jsonl if the last time is long enough ago."""
        if not force and not self.due:
            return
        for text in self.sinks.news():
            self.say(text)
        now = self._clock()
        self._logged_at = now
        self._rate_marks.append((now, self.env_steps))
        if (mean := self.window.return_mean) is not None:
            self.history.append((self.env_steps, mean))
        if len(self.history) > 2000:  # thin out: the curve stays, memory does not grow
            self.history = self.history[::2]
        snapshot = self.snapshot()
        self.sinks.write({"kind": "train", **{k: v for k, v in snapshot.items() if k not in _PANEL_ONLY}})
        self.panel.update(snapshot)

    @property
    def _restarts(self) -> int:
        """Of all ranks."""
        return self.restarts if self.ranks is None else self.ranks.restarts

    def _rate(self) -> float:
        if len(self._rate_marks) < 2:
            return self.steps_per_s
        (t0, s0), (t1, s1) = self._rate_marks[0], self._rate_marks[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else 0.0

    @property
    def steps_per_s(self) -> float:
        return (self.env_steps - self._env_steps_before) / max(1e-9, self.life_s)

    def snapshot(self) -> dict[str, Any]:
        config, rate, shares = self.config, self._rate(), self.split.shares(self.life_s)
        self.count_in_flight()
        return {
            "recipe": config.recipe, "env": config.env, "preset": config.preset,
            "topology": self._why or config.topology,
            "seed": config.seed, "device": config.device, "env_steps": self.env_steps,
            "env_steps_limit": config.env_steps, "updates": self._updates, "wall_s": self.wall_s,
            "eta_s": (config.env_steps - self.env_steps) / rate if rate > 0 else None, "steps_per_s": rate,
            "return_mean": self.window.return_mean, "return_std": self.window.return_std,
            "episodes": self.episodes, "length_mean": self.window.length_mean, "info": self.window.info_means,
            "target_return": config.target_return, "losses": self.losses, "lag_mean": self.lag_mean,
            "lag_max": self.lag_max, "queue_depth": self.queue_depth, "replay": self.replay, "shares": shares,
            "ledger": self.whole.as_dict(), "restarts": self._restarts, "advice": advice(shares, config, self._cores),
            "messages": list(self.messages), "history": list(self.history),
            "evaluation": self.evaluations.shown(), "target_of": self._target_of,
        } | ({} if self.ranks is None else {"ranks": self.ranks.stats()})  # fmt: skip

    @property
    def lag_mean(self) -> float:
        return self.lag_sum / self.lag_count if self.lag_count else 0.0

    def summary(self, exit_reason: str, updates: int, skipped: int) -> dict[str, Any]:
        config = self.config
        more: dict[str, Any] = {"stop_reason": self.stop_reason} if self.stop_reason else {}
        more |= {"topology_why": self._why} if self._why else {}
        if config.eval.every or self.evaluations.asked:
            more["evaluation"] = self.evaluations.summary()
        return more | {
            "recipe": config.recipe, "env": config.env, "preset": config.preset, "seed": config.seed,
            "topology": config.topology, "actors": config.actors, "envs_per_actor": config.envs_per_actor,
            "env_steps": self.env_steps, "updates": updates, "updates_skipped": skipped,
            "wall_s": self.wall_s, "steps_per_s": self.steps_per_s,
            "acting_steps_per_s": (self.env_steps - self._env_steps_before) / max(1e-9, self.collect_s),
            "episodes": self.episodes, "info": self.window.info_means,
            "return_mean": self.window.return_mean, "return_std": self.window.return_std,
            "env_steps_to_target": self.env_steps_to_target, "wall_s_to_target": self.wall_s_to_target,
            "policy_lag": {"mean": self.lag_mean, "max": self.lag_max},
            "time_split": self.split.shares(self.life_s), "ledger": self.whole.as_dict(),
            "replay": self.replay, "restarts": self._restarts, "exit_reason": exit_reason,
        } | ({} if self.ranks is None else {"ranks": self.ranks.summary()})  # fmt: skip

    # State, for resuming

    def state(self) -> dict[str, Any]:
        return {
            "env_steps": self.env_steps, "episodes": self.episodes, "window": self.window.to_dict(),
            "ledger": self.whole.as_dict(), "lag": [self.lag_sum, self.lag_count, self.lag_max],
            "target": [self.config.target_return, self.env_steps_to_target, self.wall_s_to_target],
            "target_of": self._target_of,
            "updates": self._updates, "wall_s": self.wall_s, "best": self.best,
            "restarts": self._restarts, "history": [list(point) for point in self.history],
        }  # fmt: skip

    def settle(self, kept: int) -> None:
        """After resuming: of the steps in flight in the checkpoint, `kept` were restored and the rest were lost."""
        self.ledger.drop(self.ledger.in_flight - kept, "resumed")
        self.ledger.in_flight = 0

    def load(self, state: dict[str, Any]) -> None:
        self.episodes = state["episodes"]
        self.window = ReturnWindow.from_dict(state["window"])
        self.ledger = Ledger(**state["ledger"])
        self.lag_sum, self.lag_count, self.lag_max = state["lag"]
        target, *reached = state["target"]
        same = target == self.config.target_return and state.get("target_of", "return") == self._target_of
        if same:  # a new target has not been reached yet
            self.env_steps_to_target, self.wall_s_to_target = reached
        self._updates = state["updates"]
        self.not_before(state["wall_s"])
        self.best, self.restarts = state["best"], state["restarts"]
        if self.ranks is not None:  # rank 0 goes on with the books of the run, and the others begin new ones
            self.ranks.ledger, self.ranks.restarts = self.ledger, self.restarts
            if self.rank > 0:
                self.ledger, self.restarts = Ledger(), 0
        self.history = [(int(step), float(mean)) for step, mean in state["history"]]


_PANEL_ONLY = (
    "messages", "history", "recipe", "env", "preset", "topology", "device", "env_steps_limit", "target_return",
    "evaluation", "target_of",
)  # fmt: skip
