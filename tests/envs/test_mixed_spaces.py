"""Tuple, MultiDiscrete and MultiBinary observations from the environment to the network, to files and back."""

from copy import deepcopy
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import rookery
from rookery.core.config import NetConfig
from rookery.core.errors import CheckpointError, UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.envs.lanes import LaneFault, SyncLanes
from rookery.envs.vector import VectorLanes
from rookery.nets.autoencoder import Decoder
from rookery.nets.one_hot import one_hot
from rookery.nets.torso import make_torso
from rookery.storage.stored import decode_spec

SPACE = spaces.Tuple([
    spaces.Box(-1, 1, (1,), np.float32),
    spaces.Dict({
        "parts": spaces.MultiDiscrete([2, 3, 300], start=[0, 5, 0]),
        "flags": spaces.MultiBinary((2, 2)),
        "more": spaces.Tuple([spaces.Discrete(4, start=-2)]),
    }),
])  # fmt: skip


class Mixed(gymnasium.Env):
    """The right one of six actions is in the middle integer of `parts` and in the sign of the tuple's first entry."""

    action_space = spaces.Discrete(6)

    def __init__(self):
        self.observation_space = deepcopy(SPACE)  # each draws from its own

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self._next(), {}

    def step(self, action):
        right = int(self.obs[1]["parts"][1]) - 5 + 3 * int(self.obs[0][0] > 0)
        self.t += 1
        return self._next(), float(action == right), self.t == 10, False, {}

    def _next(self):
        self.obs = self.observation_space.sample()
        return self.obs


class Small(Mixed):
    def __init__(self):
        super().__init__()
        self.observation_space[1]["parts"] = spaces.MultiDiscrete([2, 3, 4], start=[0, 5, 0])


TRUST = (__name__,)
DQN = {"min_size": 100, "capacity": 2_000, "samples_per_insert": 8.0}
SEQUENCES = {"min_size": 4, "capacity": 200, "batch": 4, "samples_per_insert": 1.0}


def learnt(recipe, tmp_path, **fields):
    fields = {"env": Mixed, "out": str(tmp_path / recipe), "quiet": True, "seed": 3} | fields
    return rookery.train(recipe, **fields)


def test_integers_are_one_hot_side_by_side():
    leaf = Leaf((2, 2), "int16", "multi", counts=(2, 1, 3, 2))
    rows = torch.tensor([[[1, 0], [2, 0]], [[0, 0], [0, 1]]], dtype=torch.int16)
    assert one_hot(rows, leaf).tolist() == [[0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 0, 1]]
    assert leaf.width == 8
    single = Leaf((), "int64", "discrete", 3)
    assert one_hot(torch.tensor([2, 0]), single).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_the_network_tells_all_values_apart_and_reconstructs_them():
    spec = EnvSpec("env", {"m": Leaf((2,), "uint8", "multi", counts=(3, 4))}, ActionSpec("discrete", (2,), (0,)))
    torch.manual_seed(0)
    rows = torch.cartesian_prod(torch.arange(3), torch.arange(4)).to(torch.uint8)
    torso = make_torso(spec, NetConfig(hidden=(8,)))
    assert torso.vector.layers[0].in_features == 7
    assert len(torso({"m": rows}).unique(dim=0)) == 12
    decoder = Decoder(spec, 5)
    assert decoder.target({"m": rows})["m"].sum(1).tolist() == [2.0] * 12
    assert decoder.loss(torch.zeros(12, 5), {"m": rows}).shape == (12,)


@pytest.mark.parametrize("recipe, fields", [
    ("ppo", {"algo": {"lr": 3e-3, "unroll": 32}, "env_steps": 4_000}),
    ("dqn", {"algo": {"lr": 2e-3, "replay": DQN}, "env_steps": 2_500}),
])  # fmt: skip
def test_what_is_in_an_integer_and_in_a_tuple_is_learnt(recipe, fields, tmp_path):
    run = learnt(recipe, tmp_path, env=Small, **fields)
    policy, env = rookery.load(run.path, trust=TRUST), Small()
    obs, total = env.reset(seed=7)[0], 0.0
    for _ in range(200):
        obs, reward, *_ = env.step(policy.predict(obs)[0])
        total += reward
    assert total > 160, total  # 33 by chance, 100 with one of the two alone


@pytest.mark.parametrize("recipe, fields", [
    ("ppo", {"net": {"core": "lstm", "core_size": 8, "normalize_obs": True}, "algo": {"unroll": 32, "chunk": 8}}),
    ("dqn", {"algo": {"replay": DQN}}),
    ("r2d2", {"algo": {"replay": SEQUENCES}, "topology": "serial", "actors": 1}),
])  # fmt: skip
def test_replay_recurrence_and_files_carry_them_and_a_run_goes_on(recipe, fields, tmp_path):
    run = learnt(recipe, tmp_path, env_steps=300, envs_per_actor=4, **fields)
    again = rookery.resume(run.path, env=Mixed, env_steps=400)
    assert again.summary["env_steps"] >= 400 and again.summary["updates"] > run.summary["updates"] > 0


def test_shared_memory_carries_them(tmp_path):
    alone, local = (
        learnt("ppo", tmp_path / topology, env_steps=512, topology=topology, envs_per_actor=2)
        for topology in ("serial", "local")
    )
    nets = [rookery.load(run.path, trust=TRUST).nets.state_dict() for run in (alone, local)]
    assert all(torch.equal(tensor, nets[1][name]) for name, tensor in nets[0].items())


def test_one_observation_and_a_batch_of_nested_tuples_are_acted_on_alike(tmp_path):
    policy = rookery.load(learnt("ppo", tmp_path, env_steps=256, envs_per_actor=2).path, trust=TRUST)
    envs = SyncVectorEnv([Mixed] * 3)
    batch, _ = envs.reset(seed=1)
    one_by_one = [policy.predict(obs)[0] for obs in gymnasium.vector.utils.iterate(envs.observation_space, batch)]
    assert policy.predict(batch)[0].tolist() == one_by_one
    outside = SPACE.sample()
    outside[1]["parts"][1] = 8
    with pytest.raises(UsageError, match=r"'1\.parts' is outside its space of \[2, 3, 300\] values, counted from"):
        policy.predict(outside)
    with pytest.raises(UsageError, match=r"observation '1\..* is outside its space"):
        policy.predict((batch[0], batch[1] | {"parts": batch[1]["parts"] - [0, 5, 0]}))
    with pytest.raises(UsageError, match=r"reads '1\.flags' of an observation, and was given a tuple of 1"):
        policy.predict((batch[0],))


def test_a_vector_environment_reads_as_single_ones_do():
    single, together = SyncLanes("mixed", [Mixed(), Mixed()]), VectorLanes("mixed", SyncVectorEnv([Mixed] * 2))
    assert single.spec.obs == together.spec.obs
    assert [leaf.dtype for leaf in single.spec.obs.values()] == ["float32", "float32", "int64", "int16"]
    one, other = single.reset([1, 2]), together.reset([1, 2])
    assert all(np.array_equal(one[name], other[name]) for name in one)
    for _ in range(12):
        rows = [lanes.step(np.array([0, 5])) for lanes in (single, together)]
        assert all(np.array_equal(rows[0][0][name], rows[1][0][name]) for name in one)


class Outside(Mixed):
    def step(self, action):
        obs, *rest = super().step(action)
        obs[1]["parts"][2] = 300
        return obs, *rest


def test_a_value_outside_its_space_is_located(tmp_path):
    lanes = SyncLanes("mixed", [Mixed(), Outside()])
    lanes.reset([1, 2])
    with pytest.raises(LaneFault, match=r"lane 1 returned an observation '1\.parts' outside its space, \[2\] is 0 to"):
        lanes.step(np.zeros(2, np.int64))


def test_what_cannot_be_read_is_refused_before_anything_is_written(tmp_path):
    class Words(Mixed):
        def __init__(self):
            self.observation_space = spaces.Dict({"a": spaces.Tuple([spaces.Text(4)])})

    with pytest.raises(UsageError, match=r"observation 'a\.0' is a Text"):
        rookery.train("ppo", env=Words, out=str(tmp_path / "run"))
    assert not Path(tmp_path / "run").exists()


@pytest.mark.parametrize("changed", [
    {"counts": [3]}, {"counts": [3, 0]}, {"counts": [3, -1]}, {"counts": [3, 2**40]}, {"counts": [3, 257]},
    {"counts": []}, {"starts": [1]}, {"starts": [1, 2**63 - 1]}, {"dtype": "float32"}, {"kind": "vector"},
    {"kind": "discrete", "n": 3},
])  # fmt: skip
def test_forged_integers_in_a_file_are_refused(changed):
    leaf = {"shape": [2], "dtype": "uint8", "kind": "multi", "counts": [3, 2], "starts": [5, 0]}
    action = {"kind": "discrete", "choices": [2], "starts": [0]}

    def blob(fields):
        import msgspec

        return msgspec.json.encode({"id": "env", "obs": {"m": leaf | fields}, "action": action})

    assert decode_spec(blob({}), "spec.json").obs["m"].starts == (5, 0)
    with pytest.raises(CheckpointError, match=r"spec\.json cannot be used: an observation"):
        decode_spec(blob(changed), "spec.json")
