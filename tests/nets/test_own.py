"""Torsos of the user's that cannot be trained are refused, with the reason, before anything starts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rookery
from rookery.cli.main import main
from rookery.core.config import NetConfig
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.nets.torso import make_torso

SPEC = EnvSpec("any", {"obs": Leaf((4,), "float32", "vector")}, ActionSpec("discrete", (2,), (0,)))


class Own(nn.Module):
    features = 8

    def __init__(self, spec, net):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), *self.more())

    def more(self):
        return []

    def forward(self, obs):
        return self.layers(obs["obs"])


class Normed(Own):
    def more(self):
        return [nn.BatchNorm1d(8)]


class Dropped(Own):
    def more(self):
        return [nn.Dropout(0.1)]


class Attentive(Own):
    def more(self):
        return [nn.TransformerEncoderLayer(8, 2, dropout=0.1)]


class Harmless(Own):
    def more(self):
        return [nn.Dropout(0.0), nn.LayerNorm(8)]


class Hidden(Own):
    def forward(self, obs):
        return F.dropout(super().forward(obs), 0.5, self.training)


class Narrow(Own):
    def more(self):
        return [nn.Linear(8, 5)]


class Pair(Own):
    def forward(self, obs):
        return super().forward(obs), None


class Failing(Own):
    def forward(self, obs):
        return self.layers(obs["picture"])


class Unmade(Own):
    def more(self):
        raise ValueError("no licence")


def name(cls):
    return f"{__name__}:{cls.__name__}"


@pytest.mark.parametrize("cls, message", [
    (Normed, r"has BatchNorm1d \(layers.1\): a row must give the same numbers .* use nn.LayerNorm"),
    (Dropped, r"has Dropout \(layers.1\) with dropout 0.1: a row must give the same numbers"),
    (Attentive, r"has (MultiheadAttention|Dropout) \(.*\) with dropout 0.1"),
    (Hidden, "gives other numbers when it is given the same observations again"),
    (Narrow, r"returned torch.float32 of shape \[3, 5\] for 3 observations, expected floats of shape \[3, 8\]"),
    (Pair, r"returned a tuple, expected a tensor of shape \[N, features\]"),
    (Failing, r"raised KeyError for observations obs: .*: 'picture'\n  File \".*test_own.py\", line"),
    (Unmade, r"raised when it was made: ValueError: no licence\n  File \".*test_own.py\", line"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(cls, message):
    with pytest.raises(UsageError, match=message):
        make_torso(SPEC, NetConfig(module=name(cls)))


def test_layers_that_treat_every_row_the_same_are_allowed_and_the_check_draws_no_random_numbers():
    torch.manual_seed(1)
    Harmless(SPEC, NetConfig())
    expected = torch.rand(3)
    torch.manual_seed(1)
    make_torso(SPEC, NetConfig(module=name(Harmless)))
    assert torch.equal(torch.rand(3), expected)


def test_a_run_with_such_a_network_is_a_usage_error_and_leaves_no_folder(tmp_path, capsys):
    words = ["--net.module", name(Normed), "--out", str(tmp_path / "run")]
    assert main(["train", "ppo", "--env", "CartPole-v1", *words]) == UsageError.exit_code
    assert "BatchNorm1d" in capsys.readouterr().err and not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="expected floats of shape"):
        rookery.train("ppo", env="CartPole-v1", net={"module": name(Narrow)}, out=str(tmp_path / "other"))
