"""An actor: environments × policy → unrolls, written straight into the memory they will travel in.

It knows the algorithm's contract and nothing of where the memory lives (a slot of shared memory, a plain array) or
where the weights come from. Per step it does five things: act, step, write, look for what is not finite, zero recurrent
states; what can be computed for the whole unroll at once (which rows are live, episode returns) comes at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from rookery import tree
from rookery.algorithms.base import Algorithm
from rookery.envs.gate import find_nonfinite, watch
from rookery.envs.lanes import LaneFault, Lanes
from rookery.errors import EnvError, NumericError
from rookery.seeding import seed_of
from rookery.types import DataPlan, EnvSpec, Episode, Explore, Unroll


@dataclass
class ActorReport:
    """What came out of one unroll besides the data."""

    steps: int  # live environment steps
    episodes: list[Episode] = field(default_factory=list)
    env_s: float = 0.0
    inference_s: float = 0.0
    total_s: float = 0.0
    pending: int = 0  # of all steps so far, those still held back: an item of a replay memory needs what comes next


class Actor:
    def __init__(self, algorithm: Algorithm, nets: nn.ModuleDict, lanes: Lanes, seed: int, index: int = 0):
        self.algorithm, self.nets, self.lanes = algorithm, nets, lanes
        self.plan = algorithm.plan()
        self.seed, self.index = seed, index
        self.first_lane = index * lanes.count
        self.sequence = 0  # number of the next unroll
        self._explore = Explore(torch.Generator(), self.first_lane + np.arange(lanes.count))

    def reset(self, life: str = "0") -> None:
        """Begin new episodes in every lane; `life` names this start, so that a restart does not repeat episodes."""
        count = self.lanes.count
        seeds = [seed_of(self.seed, "env", self.first_lane + lane, life) % 2**31 for lane in range(count)]
        self._episode = np.zeros(count, np.int64)  # per lane: episodes finished, and the open one's return and length
        self._total = np.zeros(count, np.float64)
        self._length = np.zeros(count, np.int64)
        self._live = np.ones(count, bool)
        self._state = self.algorithm.initial_state(self.nets, count)
        try:
            self._obs = tree.map(np.copy, self.lanes.reset(seeds))
            self._check_finite(self._obs, np.zeros(count, np.float32))
        except LaneFault as fault:
            raise self._located(fault, fault.lane, 0, 0) from fault

    def unroll(self, out: Unroll, version: int, tick: Callable[[int], None] | None = None) -> ActorReport:
        """Fill `out` (numpy arrays) with the next T steps. `tick(row)` is called before each vector step."""
        started = perf_counter()
        plan, act, step, nets = self.plan, self.algorithm.act, self.lanes.step, self.nets
        explore = self._explore
        explore.rng.manual_seed(seed_of(self.seed, "act", self.index, self.sequence))
        state, live, obs_in, finite = self._state, self._live, _rows(out.obs), watch(out.obs, out.reward)
        recurrent = bool(state)
        # Episodes are told in the game's own points where the reward that trains is clipped.
        score = np.empty(out.reward.shape, np.float64) if self.lanes.score is not None else None
        env_s = inference_s = 0.0
        out.live[0] = live
        out.version[:], out.lane[:] = version, explore.lane
        tree.map(lambda row, now: np.copyto(row[0], now), out.obs, self._obs)
        row = 0
        try:
            with torch.inference_mode():
                for row in range(plan.unroll):
                    if tick is not None:
                        tick(row)
                    if recurrent and row % plan.chunk == 0:
                        tree.map(lambda to, now: np.copyto(to[row // plan.chunk], now.numpy()), out.state0, state)  # noqa: B023
                    t0 = perf_counter()
                    output = act(nets, obs_in[row], state, explore)
                    action = np.asarray(output.action)
                    t1 = perf_counter()
                    obs, reward, terminated, truncated = step(action)
                    t2 = perf_counter()
                    inference_s += t1 - t0
                    env_s += t2 - t1
                    _write(out, row, action, output, obs, reward, terminated, truncated)
                    if not finite(row):
                        self._check_finite(tree.map(lambda rows: rows[row + 1], out.obs), out.reward[row])  # noqa: B023
                    if score is not None:
                        score[row] = self.lanes.score
                    if recurrent:
                        # A dead row's state is spent: the row after it starts an episode.
                        state = output.state if live.all() else _zeroed(output.state, live)
                        live = ~(terminated | truncated)
        except LaneFault as fault:
            out.action[row] = action
            self._check_actions(out, row)  # an environment that chokes on what is no number is not the cause
            raise self._located(fault, fault.lane, row, live_steps(out, row), rows_of=out) from fault
        self._state = tree.map(torch.clone, state)
        self._obs = tree.map(lambda rows: rows[-1].copy(), out.obs)
        report = self._finish(out, out.reward if score is None else score)
        report.env_s, report.inference_s, report.total_s = env_s, inference_s, perf_counter() - started
        self.sequence += 1
        return report

    def _finish(self, out: Unroll, points: np.ndarray) -> ActorReport:
        ends = out.terminated | out.truncated
        np.logical_not(ends[:-1], out=out.live[1:])
        self._check_actions(out, self.plan.unroll - 1)
        report = ActorReport(live_steps(out, self.plan.unroll))
        total = self._total + np.cumsum(points, axis=0, dtype=np.float64)
        length = self._length + np.cumsum(out.live, axis=0)
        for lane in range(self.lanes.count):
            spent, walked = 0.0, 0
            for row in np.flatnonzero(ends[:, lane]):
                report.episodes.append(
                    Episode(self.first_lane + lane, float(total[row, lane] - spent), int(length[row, lane] - walked))
                )
                spent, walked = total[row, lane], length[row, lane]
                self._episode[lane] += 1
            self._total[lane], self._length[lane] = total[-1, lane] - spent, length[-1, lane] - walked
        self._live = ~ends[-1]
        return report

    def _check_finite(self, obs: dict[str, np.ndarray], reward: np.ndarray) -> None:
        """LaneFault if what one step has brought, [B, ...], is not finite."""
        bad = find_nonfinite(tree.map(lambda now: now[None], obs), reward[None])
        if bad is not None:
            raise LaneFault(bad[1], f"returned {bad[2]}", reason="nonfinite")

    def _check_actions(self, out: Unroll, row: int) -> None:
        """NumericError if up to this row the policy chose what is no number. All it has seen was finite."""
        action = out.action[: row + 1]
        if not np.issubdtype(action.dtype, np.floating) or np.isfinite(action).all():
            return
        at, lane = (int(i) for i in np.argwhere(~np.isfinite(action))[0][:2])
        raise NumericError(
            f"the policy chose {action[at, lane]} in environment {self.lanes.spec.id} (actor {self.index}, lane "
            f"{self.first_lane + lane}, unroll {self.sequence}): it has diverged; the last good checkpoint was "
            "kept. Lower the step sizes, or scale the rewards"
        )

    def _located(self, fault: LaneFault, lane: int, row: int, steps: int, rows_of: Unroll | None = None) -> EnvError:
        """The fault with its address: environment, lane, episode, step."""
        episode, step = int(self._episode[lane]), int(self._length[lane]) + row - (not self._live[lane])
        if rows_of is not None:
            ends = np.flatnonzero((rows_of.terminated | rows_of.truncated)[:row, lane])
            if len(ends):
                episode, step = episode + len(ends), row - int(ends[-1]) - 2
        error = EnvError(
            f"environment {self.lanes.spec.id} {fault.what} (actor {self.index}, lane {self.first_lane + lane}, "
            f"episode {episode}, step {max(step, 0)})"
            + (f": {type(fault.cause).__name__}: {fault.cause}" if fault.cause is not None else ""),
            reason=fault.reason,
        )
        error.steps = steps
        return error

    # What a checkpoint needs to go on exactly; None where the environments cannot be restored.

    def snapshot(self) -> dict[str, Any] | None:
        env = self.lanes.get_state()
        if env is None:
            return None
        return {
            "env": env, "obs": self._obs, "state": tree.map(lambda x: x.numpy(), self._state), "live": self._live,
            "episode": self._episode.copy(), "total": self._total.copy(), "length": self._length.copy(),
            "sequence": self.sequence,
        }  # fmt: skip

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.lanes.set_state(snapshot["env"])
        self._obs, self.sequence = snapshot["obs"], int(snapshot["sequence"])
        self._state = tree.map(lambda x: torch.from_numpy(np.array(x)), snapshot["state"])
        self._live, self._episode = np.array(snapshot["live"], bool), np.array(snapshot["episode"])
        self._total, self._length = np.array(snapshot["total"]), np.array(snapshot["length"])


def _write(
    out: Unroll, row: int, action: np.ndarray, output: Any, obs: Any, reward: Any, terminated: Any, truncated: Any
):
    out.action[row] = action
    out.logp[row] = output.logp
    out.reward[row] = reward
    out.terminated[row] = terminated
    out.truncated[row] = truncated
    for name, rows in out.obs.items():
        rows[row + 1] = obs[name]
    for name, value in output.extras.items():
        out.extras[name][row] = value.numpy()


def _rows(obs: dict[str, np.ndarray]) -> list[dict[str, torch.Tensor]]:
    """Torch views of each row, made once per unroll."""
    columns = {name: torch.from_numpy(rows).unbind(0) for name, rows in obs.items()}
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _zeroed(state: Any, live: np.ndarray) -> Any:
    keep = torch.from_numpy(live)
    return tree.map(lambda x: x * keep.view(-1, *[1] * (x.dim() - 1)), state)


def live_steps(unroll: Unroll, rows: int) -> int:
    """Environment steps in the first `rows` rows: each end makes the row behind it a dead one."""
    if rows == 0:
        return 0
    ends = np.count_nonzero(unroll.terminated[: rows - 1]) + np.count_nonzero(
        unroll.truncated[: rows - 1] & ~unroll.terminated[: rows - 1]
    )
    return int(unroll.live[0].sum()) + (rows - 1) * unroll.live.shape[1] - int(ends)


def unroll_shapes(spec: EnvSpec, plan: DataPlan, lanes: int, state: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of an unroll, by path; `state` is an initial state of any number of lanes."""
    steps, chunks = plan.unroll, plan.unroll // plan.chunk
    shapes = {f"obs/{name}": ((steps + 1, lanes, *leaf.shape), leaf.dtype) for name, leaf in spec.obs.items()}
    shapes["action"] = ((steps, lanes, *spec.action.shape), spec.action.dtype)
    shapes |= {name: ((steps, lanes), dtype) for name, dtype in _SCALARS.items()}
    for path, leaf in tree.flatten(state, "state0").items():
        shapes[path] = ((chunks, lanes, *leaf.shape[1:]), "float32")
    shapes |= {"version": ((lanes,), "int64"), "lane": ((lanes,), "int64")}
    return shapes | {f"extras/{name}": ((steps, lanes, *shape), dtype) for name, (shape, dtype) in plan.extras.items()}


_SCALARS = {"reward": "float32", "terminated": "bool", "truncated": "bool", "live": "bool", "logp": "float32"}


def as_unroll(arrays: dict[str, np.ndarray]) -> Unroll:
    """An unroll over given arrays, by path as in `unroll_shapes`."""
    return Unroll(**({"state0": {}, "extras": {}} | tree.unflatten(arrays)))


def empty_unroll(shapes: dict[str, tuple[tuple[int, ...], str]]) -> Unroll:
    return as_unroll({path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()})
