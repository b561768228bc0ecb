"""An actor: environments × policy → unrolls, written straight into the memory they will travel in.

It knows the algorithm's contract and nothing of where the memory lives (a slot of shared memory, a plain array) or
where the weights come from. Per step it does five things: act, step, write, look for what is not finite, zero recurrent
states; what can be computed for the whole unroll at once (which rows are live, episode returns) comes at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rookery.algorithms.base import Algorithm
from rookery.core import tree
from rookery.core.errors import EnvError
from rookery.core.seeding import seed_of
from rookery.core.types import MASK, ActorReport, ActOutput, Episode, Explore
from rookery.core.unroll import Unroll, live_steps
from rookery.envs.gate import check_actions, check_finite, check_legal, check_row, nonfinite_lane, watch
from rookery.envs.lanes import LaneFault, Lanes
from rookery.nets.modules import Nets
from rookery.roles.episodes import Episodes

CUT = object()  # the answer of `tick` that ends an unroll before its last row


class Actor:
    def __init__(self, algorithm: Algorithm, nets: Nets, lanes: Lanes, seed: int, index: int = 0):
        self.algorithm, self.nets, self.lanes = algorithm, nets, lanes
        self.plan = algorithm.plan()
        self.seed, self.index = seed, index
        self.first_lane = index * lanes.count
        lanes.number_lanes(self.first_lane)
        self.sequence = 0  # number of the next unroll
        self.attempt = 0  # how often that one was given up
        self._explore = Explore(torch.Generator(), self.first_lane + np.arange(lanes.count))

    def reset(self, life: str = "0") -> None:
        """Begin new episodes in every lane; `life` names this start, so that a restart does not repeat episodes."""
        count = self.lanes.count
        seeds = [seed_of(self.seed, "env", self.first_lane + lane, life) % 2**31 for lane in range(count)]
        self.episodes = Episodes(count, self.first_lane, self.lanes.take_infos)
        self._state = self.algorithm.initial_state(self.nets, count)
        self._forgive()
        try:
            self._obs = tree.map(np.copy, self.lanes.reset(seeds))
            check_finite(self._obs, np.zeros(count, np.float32))
        except LaneFault as fault:
            raise self._located(fault, 0) from fault

    def _forgive(self) -> None:
        """No lane has failed, as far as we know."""
        self.attempt = 0
        self._failed: list[int] = []  # lanes whose environment has to be recreated
        self._ended: list[Episode] = []  # episodes, in unrolls which were given up

    def unroll(self, out: Unroll, version: int, tick: Callable[[int], object] | None = None) -> ActorReport:
        """Fill `out` (numpy arrays) with the next T steps. `tick(row)` is called before each vector step.

        If it answers CUT (not in row 0) the unroll is cut short: the rows from there on are dead, the first of them has
        the observation that the last step led to, and the next unroll goes on from it.

        An EnvError ends it. If that is `mendable`, the other lanes have continued: `mend`, and start this unroll again.
        """
        started = perf_counter()
        plan, act, step, nets = self.plan, self.algorithm.act, self.lanes.step, self.nets
        explore = self._explore
        again = (self.attempt,) if self.attempt else ()  # the same choices would lead into the same fault
        explore.rng.manual_seed(seed_of(self.seed, "act", self.index, self.sequence, *again))
        state, live, obs_in, finite = self._state, self.episodes.live, _rows(out.obs), watch(out.obs, out.reward)
        recurrent = bool(state)
        # Episodes are told in the game's own points where the reward that trains is clipped.
        score = np.empty(out.reward.shape, np.float64) if self.lanes.score is not None else None
        env_s = inference_s = 0.0
        rows = plan.steps or plan.unroll
        out.live[0] = live
        out.version[:], out.lane[:] = version, explore.lane
        tree.map(lambda row, now: np.copyto(row[0], now), out.obs, self._obs)
        try:
            with torch.inference_mode():
                for row in range(plan.unroll):
                    if tick is not None and tick(row) is CUT and row:
                        rows = row
                    if recurrent and row % plan.chunk == 0:
                        tree.map(lambda to, now: np.copyto(to[row // plan.chunk], now.numpy()), out.state0, state)  # noqa: B023
                    t0 = perf_counter()
                    output = act(nets, obs_in[row], state, explore)
                    action = np.asarray(output.action)
                    t1 = perf_counter()
                    if row == rows:
                        _cut(out, row, action, output)
                        break
                    obs, reward, terminated, truncated = step(action)
                    t2 = perf_counter()
                    inference_s += t1 - t0
                    env_s += t2 - t1
                    _write(out, row, action, output, obs, reward, terminated, truncated)
                    if not finite(row):
                        check_row(out.obs, out.reward, row, (obs, reward, terminated, truncated))
                    if score is not None:
                        score[row] = self.lanes.score
                    if recurrent:
                        # A dead row's state is spent: the row after it starts an episode.
                        state = output.state if live.all() else _zeroed(output.state, live)
                        live = ~(terminated | truncated)
        except LaneFault as fault:
            raise self._give_up(fault, out, row, output, score) from fault
        self._state = tree.map(torch.clone, state)
        self._obs = tree.map(lambda rows: rows[-1].copy(), out.obs)
        report = self._finish(out, rows, out.reward if score is None else score)
        report.env_s, report.inference_s, report.total_s = env_s, inference_s, perf_counter() - started
        self.sequence, self.attempt = self.sequence + 1, 0
        return report

    def _finish(self, out: Unroll, rows: int, points: np.ndarray) -> ActorReport:
        """Which of the first `rows` rows are live, and the episodes that ended in them."""
        ends = (out.terminated | out.truncated)[:rows]
        np.logical_not(ends[:-1], out=out.live[1:rows])
        out.live[rows:] = False
        self._check_actions(out.action)
        if (spec := self.lanes.spec).masked:
            check_legal(out.obs[MASK], out.action, out.live, spec, self.first_lane)
        episodes = self._ended + self.episodes.walk(ends, out.live[:rows], points[:rows])
        self._ended = []
        return ActorReport(live_steps(out, rows), episodes, cut=rows < (self.plan.steps or self.plan.unroll))

    # A lane that fails: the others take the step to its end, and go on from there once it is mended.

    def _give_up(
        self, fault: LaneFault, out: Unroll, row: int, output: ActOutput, score: np.ndarray | None
    ) -> EnvError:
        """The error for a fault in `row` of the unroll; the other lanes continue behind that row."""
        out.action[row] = np.asarray(output.action)
        self._check_actions(out.action[: row + 1])  # an environment that chokes on what is no number is not the cause
        error = self._located(fault, row, out)
        if fault.row is None or not self.lanes.mendable:
            return error
        _write(out, row, out.action[row], output, *fault.row)
        if score is not None:
            score[row] = self.lanes.score
        error.steps, error.mendable = self._leave(out, row, out.reward if score is None else score, fault), True
        self._obs = tree.map(lambda rows: rows[row + 1].copy(), out.obs)
        self._state = tree.map(torch.clone, _zeroed(output.state, out.live[row]))
        self.attempt += 1
        return error

    def _leave(self, out: Unroll, row: int, points: np.ndarray, fault: LaneFault) -> int:
        """Count the rows up to this one for the episodes that they are of; how many steps were taken in them."""
        self._failed = failed = [each.lane for each in (fault, *fault.others)]
        for column in (out.terminated, out.truncated, points):
            column[row, failed] = 0
        ends = (out.terminated | out.truncated)[: row + 1]
        np.logical_not(ends[:-1], out=out.live[1 : row + 1])
        out.live[row, failed] = False  # a step that fails is not one
        self._ended += self.episodes.walk(ends, out.live[: row + 1], points[: row + 1])
        self.episodes.restart(failed)
        return int(np.count_nonzero(out.live[: row + 1]))

    @property
    def broken(self) -> bool:
        """Whether an environment has to be recreated before the next unroll."""
        return bool(self._failed)

    def mend(self, life: str) -> None:
        """Recreate the environments that failed, with new episodes; `life` names these, as that of `reset`."""
        while self._failed:
            lane = self._failed[0]
            try:
                obs = self.lanes.rebuild(lane, seed_of(self.seed, "env", self.first_lane + lane, life) % 2**31)
                if bad := nonfinite_lane(lane, obs, np.zeros(self.lanes.count, np.float32)):
                    raise bad
            except LaneFault as fault:
                self.attempt += 1
                error = self._located(fault, 0)
                error.mendable = True
                raise error from fault
            tree.map(lambda now, new: np.copyto(now[lane], new[lane]), self._obs, obs)  # noqa: B023
            del self._failed[0]

    def _check_actions(self, action: np.ndarray) -> None:
        check_actions(action, self.lanes.spec.id, self.index, self.first_lane, self.sequence)

    def _located(self, fault: LaneFault, row: int, rows_of: Unroll | None = None) -> EnvError:
        """The fault with its address, and the steps of the rows before it."""
        ends = None if rows_of is None else rows_of.terminated | rows_of.truncated
        place = self.episodes.place(fault.lane, row, ends)
        error = fault.located(self.lanes.spec.id, self.index, self.first_lane, *place)
        error.steps = 0 if rows_of is None else live_steps(rows_of, row)
        return error

    # What a checkpoint needs to go on exactly; None where the environments cannot be restored.

    def snapshot(self) -> dict[str, Any] | None:
        env = self.lanes.get_state()
        if env is None:
            return None
        return {
            "env": env, "obs": self._obs, "state": tree.map(lambda x: x.numpy(), self._state),
            "sequence": self.sequence, **self.episodes.state(),
        }  # fmt: skip

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._forgive()
        self.episodes = Episodes(self.lanes.count, self.first_lane, self.lanes.take_infos)
        self.episodes.load(snapshot)
        self.lanes.set_state(snapshot["env"])
        self._obs, self.sequence = snapshot["obs"], int(snapshot["sequence"])
        self._state = tree.map(lambda x: torch.from_numpy(np.array(x)), snapshot["state"])


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


def _cut(out: Unroll, row: int, action: np.ndarray, output: ActOutput) -> None:
    """Fill the rows from this one on, in which no step is taken: finite numbers, and the last observation again.

    Of this row we know what the policy would have done: its stored value is what the last step bootstraps from.
    """
    out.action[row:], out.logp[row:] = action, output.logp
    out.reward[row:] = 0.0
    out.terminated[row:] = out.truncated[row:] = False
    for rows in out.obs.values():
        rows[row + 1 :] = rows[row]
    for name, value in output.extras.items():
        out.extras[name][row:] = value.numpy()
    for states in tree.leaves(out.state0):
        chunk = len(out.live) // len(states)
        states[row // chunk + 1 :] = 0.0


def _rows(obs: dict[str, np.ndarray]) -> list[dict[str, torch.Tensor]]:
    """Torch views of each row, made once per unroll."""
    columns = {name: torch.from_numpy(rows).unbind(0) for name, rows in obs.items()}
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _zeroed(state: Any, live: np.ndarray) -> Any:
    keep = torch.from_numpy(live)
    return tree.map(lambda x: x * keep.view(-1, *[1] * (x.dim() - 1)), state)
