"""Each auxiliary task learns its task on a scripted environment, from replayed unrolls, where the answer is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support_auxiliary import MLP, lanes_of, rig
from support_lanes import Rig

from rookery.algorithms.a2c import A2C, A2CConfig
from rookery.core.config import AuxConfig, NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.core.unroll import Unroll
from rookery.envs.lanes import Lanes

QUIET = {"optimizer": "adam", "lr": 5e-3, "lr_end": 5e-4, "entropy": 0.0, "max_grad_norm": 10.0}  # no other goals


def trained(rig: Rig, updates: int) -> list[dict[str, float]]:
    return [rig.update(step / updates).metrics for step in range(updates)]


# Pixel control


def test_pixel_control_learns_which_action_changes_which_quadrant():
    """The Q-value of the action that flips a quadrant is larger there by 1, in every cell and for every frame."""
    cell, side = 5, 4
    aux = AuxConfig(pixel_control=1.0, cell=cell, gamma=0.5)
    lanes = lanes_of("rookery/PixelSwitch-v0", 8, truncate=True, length=7)
    made = rig(A2C, A2CConfig(**QUIET, unroll=5, aux=aux), lanes)

    def gaps() -> torch.Tensor:
        """[frames, actions, side, side]: by how much the action of a cell's quadrant is better than each other one."""
        lit = np.array(list(itertools.product((0, 255), repeat=4)), np.uint8).reshape(-1, 1, 2, 2)
        frames = torch.from_numpy(lit.repeat(10, 2).repeat(10, 3))
        nets = made.learner.nets
        with torch.no_grad():
            q = nets["pixel_control"](nets["body"].step({"obs": frames}, {})[0])
        assert q.shape == (16, 4, side, side)
        own = torch.arange(4).view(2, 2).repeat_interleave(2, 0).repeat_interleave(2, 1)  # the quadrant of each cell
        gap = q.gather(1, own.expand(16, 1, side, side)) - q
        return gap[torch.arange(4).view(1, 4, 1, 1).expand_as(q) != own]

    before = gaps()
    metrics = trained(made, 250)
    gap = gaps()
    assert (before <= 0).float().mean() > 0.3, "it is not so by chance"
    assert (gap > 0).all(), "in its own quadrant an action is the best"
    assert gap.mean() == pytest.approx(1.0, abs=0.1) and gap.min() > 0.6 and gap.max() < 1.4, gap.aminmax()
    assert metrics[-1]["pixel_control_loss"] < 0.3 * metrics[0]["pixel_control_loss"]


# Reward prediction


def test_reward_prediction_learns_what_a_cue_announces():
    """Rewards follow a cue by two steps: they are known from three frames, and not from two."""
    aux = AuxConfig(reward_prediction=1.0)
    made = rig(A2C, A2CConfig(**QUIET, unroll=16, aux=aux), lanes_of("rookery/Cue-v0", 8, rate=0.3))
    guessed = accuracy(made)
    metrics = trained(made, 120)
    assert guessed < 0.7 and accuracy(made) > 0.95
    assert metrics[-1]["reward_prediction_loss"] < 0.2 * metrics[0]["reward_prediction_loss"]


def accuracy(made: Rig) -> float:
    """Mean over the three classes of the share of rows that are predicted, on new unrolls."""
    nets, right = made.learner.nets, {0: [], 1: [], 2: []}
    for _ in range(4):
        batch = fresh(made)
        for t, lane in itertools.product(range(2, len(batch.live)), range(batch.live.shape[1])):
            if not batch.live[t - 2 : t + 1, lane].all():
                continue
            with torch.no_grad():
                codes = nets["body"].step({"obs": batch.obs["obs"][t - 2 : t + 1, lane]}, {})[0]
                predicted = int(nets["reward_prediction"](codes.view(1, -1)).argmax())
            reward = float(batch.reward[t, lane])
            right[{0.0: 0, 1.0: 1, -1.0: 2}[reward]].append(predicted == {0.0: 0, 1.0: 1, -1.0: 2}[reward])
    assert all(len(rows) > 20 for rows in right.values())
    return float(np.mean([np.mean(rows) for rows in right.values()]))


def fresh(made: Rig) -> Unroll:
    """New unrolls, without the replayed ones beside them."""
    batch, lanes = made.collect(), made.actors[0].lanes.count
    assert batch.replayed is None or not batch.replayed[:lanes].any()
    return made.algorithm.own(batch)


# Value replay


class Ladder(Lanes):
    """Episodes of as many steps as there are rewards; the observation is the number of the step, one-hot."""

    rewards = (1.0, 0.0, -2.0, 4.0)

    def __init__(self, count: int = 3):
        width = len(self.rewards) + 1
        action = ActionSpec("discrete", choices=(2,), starts=(0,))
        self.spec, self.count = EnvSpec("ladder", {"obs": Leaf((width,), "float32", "vector")}, action), count

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        self.t = np.arange(self.count) % len(self.rewards)  # lanes are not in step
        return self._shown()

    def step(self, action: np.ndarray):
        over = self.t == len(self.rewards)
        reward = np.where(over, 0.0, np.array([*self.rewards, 0.0])[self.t]).astype(np.float32)
        self.t = np.where(over, 0, self.t + 1)
        return self._shown(), reward, self.t == len(self.rewards), np.zeros(self.count, bool)

    def _shown(self) -> dict[str, np.ndarray]:
        return {"obs": np.eye(len(self.rewards) + 1, dtype=np.float32)[self.t]}

    def close(self) -> None: ...


@pytest.mark.parametrize("shared", [False, True], ids=["split", "shared"])
def test_value_replay_alone_learns_the_values(shared):
    """Without a value loss of its own the value head still reaches the discounted returns, by replayed unrolls."""
    gamma = 0.8
    config = A2CConfig(
        **QUIET | {"lr": 0.03}, unroll=3, gamma=gamma, value_coef=0.0, aux=AuxConfig(value_replay=1.0, ring=8)
    )
    made = rig(A2C, config, Ladder(), NetConfig(hidden=(16,), shared=shared))
    assert ("value_body" in made.learner.nets) is not shared
    metrics = trained(made, 300)
    returns, total = [], 0.0
    for reward in reversed(Ladder.rewards):
        returns.insert(0, total := reward + gamma * total)
    nets = made.learner.nets
    with torch.no_grad():
        body = nets["body" if shared else "value_body"]
        values = nets["value"](body.step({"obs": torch.eye(5)[:4]}, {})[0])
    torch.testing.assert_close(values, torch.tensor(returns), rtol=0, atol=0.1)
    assert metrics[-1]["value_replay_loss"] < 0.01 < metrics[0]["value_replay_loss"]
    assert metrics[0]["value_loss"] > 0, "told, and not learnt from"


def test_a_network_with_a_core_learns_from_the_states_that_were_stored():
    """The last step is worth 1 or 0, as the first has shown: an unroll that begins in between needs its state."""
    config = A2CConfig(
        **QUIET | {"lr": 0.02}, unroll=4, gamma=1.0, value_coef=0.0, aux=AuxConfig(value_replay=1.0, ring=16)
    )
    made = rig(A2C, config, Cued(), NetConfig(hidden=(), core="gru", core_size=8))
    metrics = trained(made, 250)
    assert metrics[-1]["value_replay_loss"] < 0.01
    nets, state = made.learner.nets, made.algorithm.initial_state(made.learner.nets, 2)
    with torch.no_grad():
        for row in range(4):
            shown = torch.zeros(2, 3)
            shown[:, :2] = torch.eye(2) if row == 0 else 0.0
            shown[:, 2] = float(row == 3)
            x, state = nets["body"].step({"obs": shown}, state)
            torch.testing.assert_close(nets["value"](x), torch.tensor([1.0, 0.0]), rtol=0, atol=0.1)


class Cued(Lanes):
    """Four steps: a cue is shown in the first (two places, one-hot), the last is marked; its reward is 1 or 0."""

    count = 4
    spec = EnvSpec("cued", {"obs": Leaf((3,), "float32", "vector")}, ActionSpec("discrete", choices=(2,), starts=(0,)))

    def reset(self, seeds: Sequence[int]) -> dict[str, np.ndarray]:
        self.t, self.cue = np.array([0, 1, 2, 3]), np.array([0, 1, 1, 0])
        return self._shown()

    def step(self, action: np.ndarray):
        over, last = self.t == 4, self.t == 3
        reward = np.where(last & (self.cue == 0), 1.0, 0.0).astype(np.float32)
        self.cue = np.where(over, 1 - self.cue, self.cue)
        self.t = np.where(over, 0, self.t + 1)
        return self._shown(), reward, self.t == 4, np.zeros(self.count, bool)

    def _shown(self) -> dict[str, np.ndarray]:
        shown = np.zeros((self.count, 3), np.float32)
        shown[:, :2] = np.eye(2, dtype=np.float32)[self.cue] * (self.t == 0)[:, None]
        shown[:, 2] = self.t == 3
        return {"obs": shown}

    def close(self) -> None: ...


# Weights of 0


@pytest.mark.parametrize("weights", list(itertools.product((0.0, 0.5), repeat=3)))
def test_a_weight_of_0_leaves_a_task_out(weights):
    pixels, reward, replay = weights
    aux = AuxConfig(pixel_control=pixels, reward_prediction=reward, value_replay=replay, cell=10)
    made = rig(A2C, A2CConfig(**QUIET, unroll=5, aux=aux), lanes_of("rookery/PixelSwitch-v0", 2))
    nets = made.learner.nets
    assert ("pixel_control" in nets, "reward_prediction" in nets) == (pixels > 0, reward > 0)
    batches = [made.collect() for _ in range(2)]
    assert (batches[1].replayed is not None) is any(weights), "without tasks nothing is replayed"
    metrics = made.learner.step(batches[1], 0.0).metrics
    told = {
        name for name in metrics if name.split("_loss")[0] in ("pixel_control", "reward_prediction", "value_replay")
    }
    wanted = {"pixel_control_loss": pixels, "reward_prediction_loss": reward, "value_replay_loss": replay}
    assert told == {name for name, weight in wanted.items() if weight}


def test_without_a_ring_the_tasks_are_learnt_from_new_unrolls():
    aux = AuxConfig(pixel_control=1.0, cell=10, replayed=0.0)
    made = rig(A2C, A2CConfig(**QUIET, unroll=5, aux=aux), lanes_of("rookery/PixelSwitch-v0", 2), MLP)
    for _ in range(3):
        batch = made.collect()
        assert batch.replayed is None and made.learner.step(batch, 0.0).metrics["pixel_control_loss"] > 0
