"""Who plays the episodes of an evaluation: this process (`Inline`), or one of its own beside the training (`Beside`).

Both play the same: the same code, seeds and number of torch threads, so the same weights have the same score. Not here:
when an evaluation is due, and what its result is for (`evaluation.py`).
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rookery.algorithms.registry import encode_config
from rookery.core.config import RunConfig
from rookery.core.errors import RookeryError
from rookery.core.frames import with_frames
from rookery.core.types import EnvSpec
from rookery.pipes.channel import ChannelClosed, ChannelTimeout
from rookery.play.evaluate import Evaluation, evaluate_as_set
from rookery.play.policy import Policy
from rookery.processes.signals import Signals
from rookery.processes.worker import Worker
from rookery.storage import checkpoint
from rookery.storage.files import step_name

MODULE = "rookery.run.evaluator_main"
POLICIES = "eval/policies"  # weights that are being evaluated, on their way to the process
STOPPING = 2.0  # seconds for its process to end
CLOSING = 5.0  # seconds for the thread to end
SENDING = 10.0  # seconds for the process to take an order


@dataclass(frozen=True)
class Weights:
    """A copy of the networks."""

    env_steps: int
    updates: int
    wall_s: float
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    weights: Weights
    evaluation: Evaluation | None  # None: it failed
    why: str = ""  # it failed; or else, what the user should know besides
    seconds: float = 0.0


class Failed(RookeryError):
    """There is no result; the message says why."""


class Shutdown(Exception):
    """Requested during an evaluation, which is of no use any more."""


class BestWeights:
    """Those with the best evaluation so far, in the run folder: of equals the newest."""

    def __init__(self, folder: Path):
        self._place = folder / checkpoint.EVALUATED
        self._score = checkpoint.best_score(self._place)

    def offer(self, weights: Weights, score: float) -> str:
        """Keep them if they are the best; what the user should know if that fails."""
        if self._score is not None and score < self._score:
            return ""
        try:
            checkpoint.save(self._place, weights.env_steps, weights.tensors, {}, keep=1, best=score)
        except RookeryError as error:
            return f"the weights with the best evaluation so far could not be kept: {error}"
        self._score = score
        return ""


class Inline:
    """Between two updates, in this process. No random stream of the run moves, so training computes the same bits."""

    stage, busy = "evaluate", False

    def __init__(self, config: RunConfig, spec: EnvSpec, folder: Path, signals: Signals, best: BestWeights):
        self._config, self._spec, self._folder, self._signals, self._best = config, spec, folder, signals, best
        self.outcomes: deque[Outcome] = deque()

    def begin(self, weights: Weights) -> int:
        """Evaluate them; returns how many are skipped for it: none."""
        began = time.monotonic()
        try:
            with _no_draws():
                place = self._folder / step_name(weights.env_steps)
                saved = checkpoint.Checkpoint(place, weights.env_steps, weights.tensors, {})
                found = evaluate_as_set(Policy(self._config, self._spec, saved), self._config, self._watch(began))
        except Shutdown:
            return 0
        except Exception as error:
            self.outcomes.append(Outcome(weights, None, reason(error)))
        else:
            note = self._best.offer(weights, found.return_mean)
            self.outcomes.append(Outcome(weights, found, note, time.monotonic() - began))
        return 0

    def _watch(self, began: float) -> Any:
        limit = self._config.eval.minutes

        def tick() -> None:
            if self._signals.requested is not None:
                raise Shutdown
            if time.monotonic() - began > 60 * limit:
                raise Failed(_too_long(limit))

        return tick

    def wait(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass


class Beside:
    """In a process of its own. A thread of this one writes the weights to disk for it, and waits for the results.

    Weights that come while others are evaluated wait; newer ones take their place.
    """

    stage = "transfer"

    def __init__(self, config: RunConfig, folder: Path, best: BestWeights):
        """If evaluations are planned, the process starts now, so that the first one does not wait for it."""
        self._config, self._folder, self._best = config, folder, best
        self.outcomes: deque[Outcome] = deque()
        self._changed = threading.Condition()
        self._waiting: Weights | None = None
        self._playing = self._closed = False
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None
        shutil.rmtree(folder / POLICIES, ignore_errors=True)  # of a run that was killed
        if config.eval.every:
            self._start_thread()

    @property
    def busy(self) -> bool:
        with self._changed:  # the thread takes what waits in two steps
            return self._playing or self._waiting is not None

    def begin(self, weights: Weights) -> int:
        """Evaluate them next; returns how many are skipped for it."""
        with self._changed:
            skipped, self._waiting = int(self._waiting is not None), weights
            if why := self._start_thread():
                self._waiting = None
                self.outcomes.append(Outcome(weights, None, why))
            self._changed.notify_all()
        return skipped

    def _start_thread(self) -> str:
        """Unless there is one; why that is not possible."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="evaluator", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit on threads
                return str(error)
            self._thread = thread
        return ""

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.busy, seconds)

    def close(self) -> None:
        """End the process at once; an evaluation that is going on is lost."""
        with self._changed:
            self._closed, self._waiting = True, None
            self._changed.notify_all()
        if (worker := self._worker) is not None:
            worker.kill()  # the thread notices, and ends what it has started
        if self._thread is not None:
            self._thread.join(CLOSING)
        shutil.rmtree(self._folder / POLICIES, ignore_errors=True)

    # The thread

    def _work(self) -> None:
        try:
            with suppress(Exception):  # the first evaluation tries again, and says so
                self._started()
            while (weights := self._next()) is not None:
                outcome = self._outcome(weights)
                with self._changed:
                    self._playing = False
                    if not self._closed:
                        self.outcomes.append(outcome)
                    self._changed.notify_all()
        finally:
            self._end(STOPPING)

    def _next(self) -> Weights | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            weights, self._waiting = self._waiting, None
            self._playing = weights is not None
            return weights

    def _outcome(self, weights: Weights) -> Outcome:
        began = time.monotonic()
        try:
            saved = checkpoint.save(self._folder / POLICIES, weights.env_steps, weights.tensors, {}, keep=1)
            found = Evaluation(**self._answer({"op": "play", "policy": str(saved)})["evaluation"])
        except Exception as error:
            return Outcome(weights, None, reason(error))
        note = self._best.offer(weights, found.return_mean)
        return Outcome(weights, found, note, time.monotonic() - began)

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Of the process, which is started if there is none."""
        limit = self._config.eval.minutes
        worker, starting = self._started()
        try:
            worker.channel.send(order, SENDING)
            answer = worker.channel.recv(60 * limit + starting)
        except ChannelTimeout:
            self._end(0.0)
            raise Failed(f"{_too_long(limit)}; the stack of its process is in logs/evaluator.log") from None
        except ChannelClosed:
            self._end(STOPPING)
            raise Failed(f"its process {worker.describe_exit()}") from None
        if answer["op"] != "played":
            raise Failed(str(answer.get("why") or answer.get("error")))
        return answer

    def _started(self) -> tuple[Worker, float]:
        """The process, and the seconds that it may take to start."""
        if self._worker is not None and self._worker.alive() and not self._worker.channel.ended:
            return self._worker, 0.0
        self._end(STOPPING)
        start = {"config": encode_config(self._config), "folder": str(self._folder)}
        self._worker = Worker.start(MODULE, "evaluator", start, {}, self._folder / "logs" / "evaluator.log")
        if self._closed:
            self._worker.kill()
        return self._worker, self._config.supervisor.start_deadline

    def _end(self, patience: float) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(patience)


def reason(error: Exception) -> str:
    """Why an evaluation failed, with the place in the user's code if it was that."""
    return str(error) if isinstance(error, RookeryError) else with_frames(f"{type(error).__name__}: {error}", error)


def _too_long(minutes: float) -> str:
    return f"it took longer than {minutes:g} minutes (eval.minutes) and was given up"


@contextmanager
def _no_draws() -> Iterator[None]:
    """Nothing is drawn from the random streams of this process, whatever environments and networks do."""
    streams = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            np.random.set_state(streams[0])
            random.setstate(streams[1])
