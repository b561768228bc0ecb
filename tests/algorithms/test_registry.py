"""Configs from files: read back as they were written, refused when misspelt, and never a way to run code."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest

from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.algorithms.registry import algorithm_class, build_algorithm, encode_config
from rookery.core.config import AtariConfig, CheckpointConfig, NetConfig, RunConfig, SupervisorConfig
from rookery.core.errors import UsageError
from rookery.core.types import ActionSpec, EnvSpec, Leaf
from rookery.envs.lanes import Lanes
from rookery.storage.stored import decode_config

PATH = "rookery.algorithms.ppo:PPO"
PLAIN = RunConfig("ppo", PATH, "CartPole-v1", PPOConfig())
FULL = RunConfig(
    "ppo", PATH, "ALE/Pong-v5",
    PPOConfig(unroll=64, clip_end=0.05, value_clip=0.2, entropy_end=0.0, target_kl=0.02, lr=1e-3, scale_reward=True),
    net=NetConfig(hidden=(32, 16, 8), core="lstm", core_layers=2, normalize_obs=True, log_std=-0.5),
    atari=AtariConfig(sticky=0.25, size=42), env_kwargs={"x": 1, "deep": {"y": [1.5, None, "z"]}, "flag": True},
    preset="atari", env_steps=123_456_789_012, seed=2**40 + 1, out="runs/ä b", topology="local", actors=3,
    envs_per_actor=5, threads=2, compile=True, target_return=-12.75, quiet=True, log_every=0.1,
    fault_plan="actor[1]@env_step=137:sigkill", debug=True, checkpoint=CheckpointConfig(500, 2),
    supervisor=SupervisorConfig(step_deadline=0.5, restarts=0),
)  # fmt: skip
SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, ActionSpec("discrete", choices=(2,), starts=(0,)))


def fields(config: RunConfig = PLAIN) -> dict:
    return json.loads(encode_config(config))


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_a_config_is_read_back_as_it_was_written(config):
    back = decode_config(encode_config(config), trust=("ale_py",))  # for arguments that no game of the list takes
    assert back == config
    assert type(back.algo) is PPOConfig and type(back.net.hidden) is tuple and type(back.supervisor) is SupervisorConfig
    assert encode_config(back) == encode_config(config)
    assert fields(config).keys() == {f.name for f in dataclasses.fields(RunConfig)}, "fully resolved"


def test_none_stays_none_and_numbers_stay_numbers():
    back = decode_config(encode_config(PLAIN))
    assert back.target_return is None and back.algo.target_kl is None and back.algo.value_clip is None
    assert decode_config(json.dumps(fields() | {"target_return": 475})).target_return == 475.0
    assert decode_config(encode_config(dataclasses.replace(PLAIN, net=NetConfig(hidden=())))).net.hidden == ()


@pytest.mark.parametrize("field", ["max_grad_norm", "target_kl"])
def test_infinity_is_read_back_or_refused_when_written(field):
    """ "No clip" is naturally written as infinity; JSON has none, and null means something else."""
    config = dataclasses.replace(PLAIN, algo=PPOConfig(**{field: math.inf}))
    try:
        data = encode_config(config)
    except UsageError:
        return
    assert decode_config(data) == config


@pytest.mark.parametrize(
    "path", ["sed", "algo.clipp", "net.hiden", "atari.stak", "checkpoint.evry", "supervisor.step_dedline"]
)
def test_an_unknown_field_is_refused_by_its_name(path):
    data = fields()
    *parents, name = path.split(".")
    node = data
    for parent in parents:
        node = node[parent]
    node[name] = 1
    with pytest.raises(UsageError, match=name):
        decode_config(json.dumps(data))


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_steps": "many"}, {"actors": 1.5}, {"topology": "cloud"}, {"device": None}, {"net": {"hidden": 64}},
        {"algo": {"lr": "fast"}}, {"algo": 5}, {"algo": None}, {"algorithm": 5}, {"algorithm": None}, {"net": []},
        {"algorithm": ""}, {"algorithm": "rookery.algorithms.ppo"}, {"algorithm": "rookery.algorithms.ppo:Nobody"},
        {"algorithm": "rookery.algorithms.nowhere:PPO"}, {"algorithm": "rookery.envs.lanes:Lanes"},
        {"algorithm": "rookery.algorithms.base:Algorithm"}, {"algorithm": "rookery..algorithms:x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_is_an_error_in_words(wrong):
    with pytest.raises(UsageError):
        decode_config(json.dumps(fields() | wrong))


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"5", b'"x"', b'["recipe"]', b"\xff\xfe", b"{}"])
def test_a_file_that_is_no_config_is_an_error_in_words(data):
    with pytest.raises(UsageError):
        decode_config(data)


@pytest.mark.parametrize("field", ["recipe", "algorithm", "env", "algo"])
def test_a_field_without_a_default_must_be_there(field):
    data = fields()
    del data[field]
    with pytest.raises(UsageError, match=field):
        decode_config(json.dumps(data))


# Trust


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module that leaves a trace when it is imported."""
    canary = tmp_path / "canary"
    code = (
        f"open({str(canary)!r}, 'w').write('x')\n"
        "from rookery.algorithms.ppo import PPO, PPOConfig\n"
        "from rookery.nets.torso import Torso\n"
        "class Planted(PPO):\n    Config = PPOConfig\n"
        "class Net(Torso):\n    def __init__(self, spec, net):\n"
        "        import dataclasses\n        super().__init__(spec, dataclasses.replace(net, module=''))\n"
    )
    names = ("planted_module", "rookery_planted", "planted_pack", "planted_pack.inner")
    (tmp_path / "planted_pack").mkdir()
    for name in names:
        path = tmp_path / "planted_pack" / "__init__.py" if name == "planted_pack" else None
        path = path or tmp_path / (name.replace(".", "/") + ".py")
        path.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield canary
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("module", "trust"),
    [
        ("planted_module", ()),
        ("planted_module", ("planted_mod",)),
        ("planted_module", ("planted_module.inner",)),
        ("rookery_planted", ()),
        ("planted_pack.inner", ("planted_pack.inne",)),
    ],
)
@pytest.mark.parametrize("where", ["algorithm", "module"])
def test_code_that_nobody_trusts_is_not_imported(planted, module, trust, where):
    """Reading the config and building what it describes: a stranger's file must not run a stranger's code."""
    if where == "algorithm":
        config = dataclasses.replace(PLAIN, algorithm=f"{module}:Planted")
    else:
        config = dataclasses.replace(PLAIN, net=NetConfig(module=f"{module}:Net"))
    with pytest.raises(UsageError, match=module) as caught:
        read = decode_config(encode_config(config), trust)
        build_algorithm(read, SPEC).nets()  # what `rookery.load` does
    assert not planted.exists()
    assert f"trust=({module!r},)" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "trust"), [("planted_module", "planted_module"), ("planted_pack.inner", "planted_pack")]
)
@pytest.mark.parametrize("where", ["algorithm", "module"])
def test_code_that_is_trusted_is_used(planted, module, trust, where):
    if where == "algorithm":
        config = dataclasses.replace(PLAIN, algorithm=f"{module}:Planted")
    else:
        config = dataclasses.replace(PLAIN, net=NetConfig(module=f"{module}:Net"))
    read = decode_config(encode_config(config), (trust,))
    assert read == config
    assert "body" in build_algorithm(read, SPEC).nets()
    assert planted.exists()


def test_a_module_of_ours_that_does_something_is_not_run_on_a_files_word(monkeypatch):
    """`rookery.__main__` is the command line itself."""
    monkeypatch.setattr(sys, "argv", ["rookery", "--version"])
    monkeypatch.delitem(sys.modules, "rookery.__main__", raising=False)
    with pytest.raises(UsageError):
        decode_config(json.dumps(fields() | {"algorithm": "rookery.__main__:main"}))


def test_names_lead_to_classes():
    assert algorithm_class(PATH) is PPO
    assert isinstance(build_algorithm(PLAIN, SPEC), PPO)
    assert build_algorithm(dataclasses.replace(PLAIN, actors=2, envs_per_actor=4), SPEC).lanes == 8
    with pytest.raises(UsageError, match="not an Algorithm"):
        algorithm_class(f"{Lanes.__module__}:{Lanes.__name__}")
