"""Exported policies act as the policies do: every family of networks, with memory, masks and every kind of space."""

import json
import subprocess
import sys
import zipfile

import numpy as np
import onnxruntime
import pytest
import torch
from support_export import BOX, MEMORY, MIXED, ONE, PIXELS, TWO, VECTOR, policy_of

import rookery
from rookery.core.errors import UsageError
from rookery.play import parity
from rookery.play.graph import PolicyGraph
from rookery.play.parity import Disagreement, largest_difference

SMALL = {"torso": "nips", "features": 16}
ROWS = 1_000

# Every one is compared with what `explain` says on 1,000 observations; those of ONNX as a file, too.
KINDS = {
    "ppo": ("ppo", VECTOR, ONE, {}),
    "branches, masked": ("ppo", VECTOR, TWO, {"masked": True}),
    "gaussian": ("ppo", VECTOR, BOX, {"net": {"normalize_obs": True}}),
    "squashed": ("ppo", VECTOR, BOX, {"net": {"squash": True, "state_std": True}}),
    "all spaces, masked": ("ppo", MIXED, ONE, {"masked": True, "net": SMALL}),
    "lstm, last action": (
        "a2c", VECTOR, TWO, {"clipped": True, "net": {"core": "lstm", "core_layers": 2, "feed_last": True, **MEMORY}}
    ),
    "last action, box": ("ppo", VECTOR, BOX, {"net": {"feed_last": True}}),
    "auto-encoder": ("appo", MIXED, ONE, {"algo": {"autoencoder": {"on": True}}, "net": SMALL}),
    "impala": ("impala", PIXELS, ONE, {"net": SMALL}),
    "dqn": ("dqn", VECTOR, ONE, {}),
    "rainbow, masked": ("rainbow", VECTOR, ONE, {"masked": True}),
    "r2d2, masked": ("r2d2", VECTOR, ONE, {"masked": True, "net": {"feed_last": True, **MEMORY}}),
    "ddpg": ("ddpg", VECTOR, BOX, {"net": {"normalize_obs": True}}),
    "d4pg, gru": ("d4pg", VECTOR, BOX, {"net": {"core": "gru", **MEMORY}}),
}  # fmt: skip
AS_FILES = ("branches, masked", "gaussian", "all spaces, masked", "lstm, last action", "rainbow, masked", "d4pg, gru")


def policy(kind):
    recipe, obs, action, fields = KINDS[kind]
    return policy_of(recipe, obs, action, **fields)


def eager(graph):
    def run(inputs):
        with torch.no_grad():
            outputs = graph({name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()})
        return {name: x.numpy() for name, x in outputs.items()}

    return run


def of_onnx(path):
    session = onnxruntime.InferenceSession(str(path))
    names = [each.name for each in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs)))


@pytest.mark.filterwarnings("ignore:random has actions without bounds")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_acts_as_the_policy_does(kind):
    loaded = policy(kind)
    graph = PolicyGraph(loaded)
    assert largest_difference(loaded, graph, eager(graph), 200 if "impala" in kind else ROWS) <= 2e-6


@pytest.mark.filterwarnings("ignore:random has actions without bounds")
@pytest.mark.parametrize("kind", AS_FILES)
def test_a_file_of_onnx_acts_as_the_policy_does(kind, tmp_path):
    loaded = policy(kind)
    done = rookery.export(loaded, tmp_path / "policy.onnx")
    difference = largest_difference(loaded, PolicyGraph(loaded), of_onnx(done.path), ROWS, seed=1)
    assert 0 < difference <= 1e-5


def test_numbers_beside_the_action_are_those_of_acting():
    ppo = policy_of("ppo", VECTOR, ONE, masked=True, net={"shared": True})
    ppo.algorithm.store_values()
    obs = {"obs": torch.randn(50, 4), "action_mask": torch.rand(50, 5) < 0.5}
    acted, graph = ppo.algorithm.act(ppo.nets, obs, {}, None), PolicyGraph(ppo)
    found = graph(obs)
    logp = found["logits"].log_softmax(1).gather(1, found["action"].unsqueeze(1) - 3).squeeze(1)
    torch.testing.assert_close(logp, torch.as_tensor(acted.logp))
    torch.testing.assert_close(found["value"], acted.extras["value"])
    dqn = policy_of("apex_dqn", VECTOR, ONE)
    best = dqn.algorithm.act(dqn.nets, {"obs": obs["obs"]}, {}, None).extras["q_max"]
    torch.testing.assert_close(PolicyGraph(dqn)({"obs": obs["obs"]})["q"].amax(1), best)


def wrong_action(inputs, outputs):
    outputs["action"] = np.where(outputs["action"] == 3, 4, 3)


def illegal(inputs, outputs):
    first = inputs["action_mask"].argmin(1)  # the first that is not allowed
    outputs["action"] = np.where(inputs["action_mask"].any(1), first + 3, outputs["action"])


def not_a_number(inputs, outputs):
    outputs["value"] = outputs["value"] * np.nan


def another_type(inputs, outputs):
    outputs["logits"] = outputs["logits"].astype(np.float64)


def forgetful(inputs, outputs):
    outputs["next_state_h"] = np.zeros_like(outputs["next_state_h"])


@pytest.mark.parametrize("fault, message", [
    (wrong_action, "takes other actions"), (illegal, "actions that the mask does not allow"),
    (not_a_number, "'value' differs from the policy's by nan"), (another_type, "returns 'logits' as float64"),
    (forgetful, "differs from the policy's by"),
])  # fmt: skip
def test_a_file_that_acts_otherwise_is_found_out(fault, message):
    masked = fault in (illegal, another_type)
    loaded = policy_of("ppo", VECTOR, ONE, masked=masked, net={"core": "gru", **MEMORY})
    graph = PolicyGraph(loaded)
    run = eager(graph)

    def faulty(inputs):
        outputs = run(inputs)
        fault(inputs, outputs)
        return outputs

    with pytest.raises(Disagreement, match=message):
        largest_difference(loaded, graph, faulty)


def test_a_state_that_goes_on_into_the_next_episode_is_found_out():
    loaded = policy_of("ppo", VECTOR, ONE, net={"core": "gru", **MEMORY})
    graph = PolicyGraph(loaded)
    run = eager(graph)
    with pytest.raises(Disagreement):
        largest_difference(
            loaded, graph, lambda inputs: run(inputs | {"episode_start": np.zeros_like(inputs["episode_start"])})
        )


def test_a_file_describes_itself_and_names_no_files_of_this_machine(tmp_path):
    loaded = policy_of("ppo", MIXED, ONE, masked=True, net={**SMALL, "core": "gru", **MEMORY})
    torch_file = rookery.export(loaded, tmp_path / "new" / "policy.pt2", format="torch")
    onnx_file = rookery.export(loaded, tmp_path / "new" / "policy.onnx")
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == ["policy.onnx", "policy.pt2"]
    told = onnxruntime.InferenceSession(str(onnx_file.path)).get_modelmeta().custom_metadata_map
    assert told["env"] == "random" and told["recipe"] == "ppo" and told["env_steps"] == "7"
    assert told["rookery"] == rookery.__version__ and json.loads(told["action"])["starts"] == [3]
    inputs = {each["name"]: each for each in json.loads(told["inputs"])}
    seen = ["arm.angle", "eye", "hand", "where", "obs.action"]
    assert list(inputs) == [*seen, "action_mask", "state_h", "episode_start"]
    assert inputs["eye"] == {"name": "eye", "dtype": "uint8", "shape": ["batch", 2, 36, 36], "about": "an image"}
    session = onnxruntime.InferenceSession(str(onnx_file.path))
    assert {each.name: each.shape for each in session.get_inputs()} == {n: each["shape"] for n, each in inputs.items()}
    with zipfile.ZipFile(torch_file.path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    description = json.loads(next(data for name, data in parts.items() if name.endswith("extra/rookery.json")))
    assert description["outputs"] == json.loads(told["outputs"])
    for data in (onnx_file.path.read_bytes(), *parts.values()):
        assert not [each for each in (b"/rookery/", b".py", b"site-packages", b"ctorch") if each in data]
    config = json.loads(next(data for name, data in parts.items() if name.endswith("constants_config.json")))
    assert config["config"] and not any(each["use_pickle"] for each in config["config"].values())
    assert not any(data for name, data in parts.items() if "sample_inputs" in name)  # these would be a pickle


ALONE = """
import sys, torch
policy = torch.export.load(sys.argv[1]).module()
state = {"state_h": torch.zeros(1, 1, 16), "state_c": torch.zeros(1, 1, 16)}
for step in range(3):
    out = policy(episode_start=torch.tensor([step == 0]), obs=torch.full((1, 4), float(step)), **state)
    state = {name: out["next_" + name] for name in state}
    print(*(float(x) for x in out["q"][0]))
assert "rookery" not in sys.modules
"""


def test_a_program_of_torch_runs_without_rookery(tmp_path):
    loaded = policy_of("r2d2", VECTOR, ONE, net=MEMORY)
    path = rookery.export(loaded, tmp_path / "policy.pt2", format="torch").path
    told = subprocess.run([sys.executable, "-c", ALONE, path], capture_output=True, text=True, check=True, cwd=tmp_path)
    graph, state, expected = PolicyGraph(loaded), None, []
    for step in range(3):
        inputs = graph.example(1) | {"obs": torch.full((1, 4), float(step))} | (state or {})
        out = graph(inputs)
        state = {name: out[f"next_{name}"] for name in graph.state}
        expected.append(out["q"][0].tolist())
    assert [[float(word) for word in line.split()] for line in told.stdout.splitlines()] == expected


def test_nothing_is_written_if_the_file_disagrees(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "TOLERANCE", -1.0)
    with pytest.raises(Disagreement):
        rookery.export(policy("ppo"), tmp_path / "policy.pt2", format="torch")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_met_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"format='torchscript' is not a choice; format is 'onnx' or 'torch'"):
        rookery.export(policy("ppo"), format="torchscript")
    with pytest.raises(UsageError, match=r"policy.pt2: a file of format 'onnx' ends in .onnx"):
        rookery.export(policy("ppo"), tmp_path / "policy.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"needs onnxscript: pip install 'rookery\[onnx\]'"):
        rookery.export(policy("ppo"), tmp_path / "policy.onnx")


OWN = """
import torch

class Fine(torch.nn.Module):
    features = 8

    def __init__(self, spec, net):
        super().__init__()
        self.layer = torch.nn.Linear(4, 8)

    def forward(self, obs):
        return torch.relu(self.layer(obs["obs"]))

class Branching(Fine):
    def forward(self, obs):
        x = super().forward(obs)
        return x if x.sum() > 0 else -x
"""


def test_networks_of_a_user_are_exported_or_the_line_that_cannot_be_is_shown(tmp_path, monkeypatch):
    (tmp_path / "own_torso.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    done = rookery.export(
        policy_of("ppo", VECTOR, ONE, net={"module": "own_torso:Fine"}), tmp_path / "a.pt2", format="torch"
    )
    assert done.difference <= 2e-6
    branching = policy_of("ppo", VECTOR, ONE, net={"module": "own_torso:Branching"})
    with pytest.raises(UsageError, match=r"(?s)'own_torso:Branching' cannot be exported.*own_torso.py.*x.sum\(\) > 0"):
        rookery.export(branching, tmp_path / "b.pt2", format="torch")
    odd = policy("ppo")
    del odd.nets["policy"]
    with pytest.raises(UsageError, match=r"ppo:PPO has networks that cannot be exported: expected are .* it has norm"):
        rookery.export(odd, tmp_path / "c.pt2", format="torch")
