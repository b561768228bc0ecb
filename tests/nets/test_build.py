"""Actor-critics put together: acting and learning compute the same, and what is not wanted does not run."""

import math

import pytest
import torch

from rookery.core.config import NetConfig
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.build import actor_critic, policy_value_sequence
from rookery.nets.flat import FlatParams

VECTOR = EnvSpec("toy", {"obs": Leaf((4,), "float32", "vector")}, ActionSpec("discrete", choices=(3,)))
IMAGE = EnvSpec("toy", {"obs": Leaf((2, 36, 36), "uint8", "image")}, ActionSpec("discrete", choices=(3,)))
DICT = EnvSpec(
    "toy",
    {
        "p": Leaf((36, 36, 3), "uint8", "image"),
        "v": Leaf((4,), "float32", "vector"),
        "n": Leaf((), "int64", "discrete", 3),
    },
    ActionSpec("box", size=2),
)
SPECS = pytest.mark.parametrize("spec", [VECTOR, IMAGE, DICT], ids=["vector", "image", "dict"])


def make(spec, **net):
    torch.manual_seed(0)
    return actor_critic(spec, NetConfig(features=32, core_size=16, **net))


def random_obs(spec, *lead):
    g = torch.Generator().manual_seed(0)
    obs = {}
    for key, leaf in spec.obs.items():
        if leaf.kind == "vector":
            obs[key] = torch.randn(*lead, *leaf.shape, generator=g) * 3 + 1
        else:
            obs[key] = torch.randint(0, leaf.n or 256, (*lead, *leaf.shape), generator=g)
            obs[key] = obs[key].to(getattr(torch, leaf.dtype))
    return obs


def rows(obs, t):
    return {key: x[t] for key, x in obs.items()}


def test_entries_and_their_order():
    assert list(make(VECTOR)) == ["normalizer", "body", "policy", "value_body", "value"]
    assert list(make(VECTOR, shared=True)) == ["normalizer", "body", "policy", "value"]
    assert list(make(VECTOR, core="gru")) == ["normalizer", "body", "policy", "value"]
    assert list(make(IMAGE)) == ["normalizer", "body", "policy", "value"]  # images share
    nets = make(VECTOR)
    flat = FlatParams(nets.values())
    n = flat.prefix([nets[name] for name in ("normalizer", "body", "policy")])
    assert 0 < n < flat.data.numel()


@SPECS
@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("normalize", [False, True])
def test_acting_and_learning_compute_the_same(spec, core, normalize):  # P27
    nets = make(spec, core=core, core_layers=2, normalize_obs=normalize)
    T, B = 6, 3
    obs = random_obs(spec, T, B)
    nets["normalizer"].update(obs, torch.ones(T, B, dtype=torch.bool))
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[2, 1] = reset[4, 0] = reset[0, 2] = True
    state0 = {key: torch.randn_like(x) for key, x in nets["body"].initial(B).items()}
    params, value, _ = policy_value_sequence(nets, obs, state0, reset)
    assert value.shape == (T, B)
    head, state = nets["policy"], state0
    for t in range(T):
        fresh = nets["body"].initial(B)
        state = {key: torch.where(reset[t].view(B, 1, 1), fresh[key], x) for key, x in state.items()}
        features, state = nets["body"].step(nets["normalizer"](rows(obs, t)), state)
        action, logp = head.sample(head(features), torch.Generator().manual_seed(t))
        at = params[t] if torch.is_tensor(params) else tuple(p[t] for p in params)
        torch.testing.assert_close(head.logp_entropy(at, action)[0], logp, rtol=1e-5, atol=1e-5)


@SPECS
def test_flat_batches_equal_time_major_ones(spec):
    nets, obs = make(spec), random_obs(spec, 4, 3)
    params, value, _ = policy_value_sequence(nets, obs, {}, None)
    flat_params, flat_value, _ = policy_value_sequence(nets, {k: x.flatten(0, 1) for k, x in obs.items()}, {}, None)
    torch.testing.assert_close(value.flatten(), flat_value)
    first = lambda p: p if torch.is_tensor(p) else p[0]  # noqa: E731
    torch.testing.assert_close(first(params).flatten(0, 1), first(flat_params))


def test_what_is_not_wanted_does_not_run():
    nets, obs = make(VECTOR), random_obs(VECTOR, 4, 3)
    ran = []
    for name, module in nets.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    params, value, _ = policy_value_sequence(nets, obs, {}, None, want_policy=False)
    assert params is None and value.shape == (4, 3)
    assert {"value_body.torso", "value"} <= set(ran) and not {"body.torso", "policy"} & set(ran)


def test_separate_torsos_do_not_touch_each_other():
    nets, obs = make(VECTOR), random_obs(VECTOR, 5)
    _, value, _ = policy_value_sequence(nets, obs, {}, None)
    value.sum().backward()
    assert all(p.grad is None for name in ("body", "policy") for p in nets[name].parameters())
    assert all(p.grad is not None for name in ("value_body", "value") for p in nets[name].parameters())


def test_the_first_policy_is_nearly_uniform():  # P31
    for spec in (VECTOR, IMAGE):
        nets = make(spec)
        params, *_ = policy_value_sequence(nets, random_obs(spec, 64), {}, None)
        _, entropy = nets["policy"].logp_entropy(params, torch.zeros(64, dtype=torch.long))
        assert entropy.min() >= 0.99 * math.log(3)


def test_state_is_empty_without_a_core():
    body = make(VECTOR)["body"]
    assert body.initial(3) == {}
    assert body.step(random_obs(VECTOR, 3), {})[1] == {}
