"""What a stored config may name, judged before anything is imported."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import rookery
from rookery.algorithms.registry import encode_config
from rookery.core.errors import UsageError
from rookery.run.configured import configure
from rookery.storage.stored import decode_config
from rookery.storage.trust import Refused, findings, judge, modules

HONEST = json.loads(encode_config(configure("ppo", "CartPole-v1")))


def stored(**fields: Any) -> dict[str, Any]:
    """A config.json with other fields; `module` is that of the network."""
    net = HONEST["net"] | {"module": fields.pop("module", "")}
    return HONEST | {"net": net} | fields


def refused(fields: dict[str, Any], trust: Any = ()) -> Refused:
    with pytest.raises(Refused) as caught:
        judge(fields, trust)
    return caught.value


# Names


@pytest.mark.parametrize("recipe", ["ppo", "dqn", "r2d2", "d4pg", "gorila"])
def test_a_run_of_a_recipe_needs_no_trust(recipe):
    judge(json.loads(encode_config(configure(recipe, "Pendulum-v1" if recipe == "d4pg" else "CartPole-v1"))))


@pytest.mark.parametrize(
    "env",
    ["CartPole-v1", "Pendulum-v1", "Ant-v5", "ALE/MsPacman-v5", "PongNoFrameskip-v4", "SpaceInvaders-v4",
     "dmc/ball_in_cup-catch", "dmc/humanoid_CMU-run", "rookery/TMaze-v0", "FrozenLake-v1"],
)  # fmt: skip
def test_environments_of_the_list_need_no_trust(env):
    assert findings(stored(env=env)) == []


@pytest.mark.parametrize(
    ("env", "module"),
    [
        ("os:system", "os"),
        ("rookery.envs.memory:TMaze", "rookery.envs.memory"),  # the same task by its class: with any arguments
        ("rookery/Faulty-v0", "rookery.envs.scripted"),
        ("rookery/Counter-v0", "rookery.envs.scripted"),
        ("payload:X-v0", "payload"),
        ("GymV21Environment-v0", "gymnasium"),
        ("GymV26Environment-v0", "gymnasium"),
        ("phys2d/CartPole-v0", "gymnasium"),
    ],
)
def test_other_environments_name_code_and_the_refusal_says_which(env, module):
    error = refused(stored(env=env, env_kwargs={"command": "touch x"}))
    assert error.modules == (module,) and error.helps
    assert env in str(error) and '{"command": "touch x"}' in str(error)
    assert f"trust=({module!r},)" in str(error)
    judge(stored(env=env, env_kwargs={"command": "touch x"}), (module,))


@pytest.mark.parametrize(
    "env",
    ["", " ", ":", "a:", ":b", "a:b:c", "a b:c", "os:sys tem", "../os:system", "os.:x", ".os:x", "os..path:x",
     "ös:system", "ｏｓ:system", "a\nb:c", "CartPole-v1\n", "CartPole-v1 ", "cartpole-v1", "ALE/../../x-v5",
     "ALE/Pong-v5/../x", "ALE/Nobody-v5",
     "dmc/../x-y", "dmc/cartpole-../x", "dmc/cartpole-nothing", "dmc/cartpole-swingup:x-y", "rookery/TMaze-v1",
     "rookery/../Faulty-v0", "Nobody-v0", "-rf", "/etc/passwd", "file:///x", "http://x/y"],
)  # fmt: skip
@pytest.mark.parametrize("trust", [(), ("gymnasium", "ale_py", "dm_control", "rookery.envs.scripted")])
def test_what_is_no_name_is_refused_whatever_is_trusted(env, trust):
    with pytest.raises(UsageError):
        judge(stored(env=env), trust)


@pytest.mark.parametrize("field", ["algorithm", "module", "env"])
@pytest.mark.parametrize(
    "path",
    ["rookery.crews.probe:probe", "rookery.algorithms.base:Algorithm", "rookery.cli.main:main", "rookery:load",
     "rookery.crews.answer:answer", "rookery.envs.make:make", "rookery.nets.torso:make_torso"],
)  # fmt: skip
def test_functions_of_ours_that_call_others_cannot_be_allowed_at_all(field, path):
    error = refused(stored(**{field: path}, env_kwargs={"env": "os:system"} if field == "env" else {}))
    assert not error.helps and path in str(error) and "trust=" not in str(error)
    with pytest.raises(UsageError, match="cannot be trusted"):
        judge(HONEST, (path.partition(":")[0],))


@pytest.mark.parametrize("field", ["algorithm", "module"])
@pytest.mark.parametrize("path", ["os:system", "mine.algorithms:Own", "rookery.envs.scripted:Faulty"])
def test_algorithms_and_networks_beyond_the_list_need_trust(field, path):
    error = refused(stored(**{field: path}))
    assert error.modules == (path.partition(":")[0],) and path in str(error)
    judge(stored(**{field: path}), error.modules)


@pytest.mark.parametrize("field", ["algorithm", "module"])
@pytest.mark.parametrize(
    "path", ["os", "os:", ":x", "os:a.b", "os:system()", "rookery.algorithms.ppo", "a:b:c", "os.:x"]
)
def test_what_is_no_import_path_is_refused(field, path):
    assert not refused(stored(**{field: path}), ("os", "a")).helps


def test_an_algorithm_of_the_list_is_no_environment_and_no_network():
    for field in ("env", "module"):
        assert not refused(stored(**{field: "rookery.algorithms.ppo:PPO"})).helps


def test_everything_that_is_asked_for_is_in_one_refusal():
    error = refused(stored(algorithm="a.b:C", module="d:E", env="f:g", env_kwargs={"x": 1}))
    assert error.modules == ("a.b", "d", "f")
    assert refused(stored(algorithm="a.b:C", module="d:E", env="f:g"), ("a", "f")).modules == ("d",)


def test_nothing_is_imported_to_judge(monkeypatch, tmp_path):
    (tmp_path / "judged_payload.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for field in ("env", "algorithm", "module"):
        refused(stored(**{field: "judged_payload:X"}))
        judge(stored(**{field: "judged_payload:X"}), ("judged_payload",))
    assert "judged_payload" not in sys.modules


# Ids of installed packages


@pytest.fixture
def plugin():
    """An id that an installed package has registered with Gymnasium."""
    gymnasium.register("Plugged-v0", entry_point="plugged_pack.envs:Thing", vector_entry_point="other_pack:Many")
    yield "Plugged-v0"
    del gymnasium.registry["Plugged-v0"]


def test_an_id_of_an_installed_package_needs_trust_in_the_package(plugin):
    error = refused(stored(env=plugin))
    assert error.modules == ("plugged_pack", "other_pack")
    judge(stored(env=plugin, env_kwargs={"anything": "goes"}), error.modules)
    assert refused(stored(env=plugin), ("plugged_pack",)).modules == ("other_pack",)


def test_the_module_before_an_id_is_trusted_and_the_id_is_judged_by_itself(plugin):
    assert refused(stored(env=f"mine:{plugin}"), ("mine",)).modules == ("plugged_pack", "other_pack")
    assert refused(stored(env="mine:Ant-v5", env_kwargs={"xml_file": "x"}), ("mine",)).modules == ("gymnasium",)
    judge(stored(env="mine:Own-v0", env_kwargs={"anything": "goes"}), ("mine",))


def test_a_function_as_entry_point_is_judged_by_its_module():
    gymnasium.register("Function-v0", entry_point=json.loads)
    try:
        assert refused(stored(env="Function-v0")).modules == ("json",)
    finally:
        del gymnasium.registry["Function-v0"]


# Arguments


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        ("CartPole-v1", {"max_episode_steps": 100, "sutton_barto_reward": True}),
        ("rookery/TMaze-v0", {"length": 20}),
        ("rookery/CliffWalk-v0", {"n": 12, "one_hot": False}),
        ("rookery/Catch-v0", {"rows": 12, "columns": 9, "scale": 7}),
        ("rookery/PixelSwitch-v0", {"length": 5, "truncate": True}),
        ("rookery/Cue-v0", {"length": 9, "rate": 0.5}),
        ("FrozenLake-v1", {"desc": ["SFF", "FHF", "FFG"], "map_name": None, "is_slippery": False}),
        ("Pendulum-v1", {"g": 9}),
        ("Ant-v5", {"healthy_z_range": [0.1, 2], "frame_skip": 3, "terminate_when_unhealthy": False}),
        ("dmc/cartpole-swingup", {"flat": False, "time_limit": 5, "random": 3}),
        ("LunarLander-v3", {"gravity": -5.5, "enable_wind": True}),
    ],
)
def test_arguments_of_the_listed_types_need_no_trust(env, kwargs):
    judge(stored(env=env, env_kwargs=kwargs))


@pytest.mark.parametrize(
    ("env", "kwargs", "module"),
    [
        ("CartPole-v1", {"render_mode": "human"}, "gymnasium"),
        ("CartPole-v1", {"wrappers": ["os:system"]}, "gymnasium"),
        ("CartPole-v1", {"vector_kwargs": {}}, "gymnasium"),
        ("CartPole-v1", {"vectorization_mode": "async"}, "gymnasium"),
        ("CartPole-v1", {"additional_wrappers": []}, "gymnasium"),
        ("CartPole-v1", {"disable_env_checker": True}, "gymnasium"),
        ("CartPole-v1", {"max_episode_steps": True}, "gymnasium"),
        ("CartPole-v1", {"max_episode_steps": 10**10}, "gymnasium"),
        ("CartPole-v1", {"max_episode_steps": 1.5}, "gymnasium"),
        ("CartPole-v1", {"max_episode_steps": "1"}, "gymnasium"),
        ("CartPole-v1", {"max_episode_steps": None}, "gymnasium"),
        ("CartPole-v1", {"sutton_barto_reward": 1}, "gymnasium"),
        ("Pendulum-v1", {"g": 1e300}, "gymnasium"),
        ("Pendulum-v1", {"g": float("nan")}, "gymnasium"),
        ("Pendulum-v1", {"g": float("inf")}, "gymnasium"),
        ("Pendulum-v1", {"g": [1.0]}, "gymnasium"),
        ("Ant-v5", {"xml_file": "/tmp/x.xml"}, "gymnasium"),
        ("Ant-v5", {"main_body": "torso"}, "gymnasium"),
        ("Ant-v5", {"default_camera_config": {}}, "gymnasium"),
        ("Ant-v5", {"healthy_z_range": [1, 2, 3]}, "gymnasium"),
        ("FrozenLake-v1", {"map_name": "../x"}, "gymnasium"),
        ("FrozenLake-v1", {"desc": ["SX"]}, "gymnasium"),
        ("FrozenLake-v1", {"desc": ["S" * 65]}, "gymnasium"),
        ("FrozenLake-v1", {"desc": ["SF\n"]}, "gymnasium"),
        ("FrozenLake-v1", {"desc": [["S", "F"]] * 2}, "gymnasium"),
        ("FrozenLake-v1", {"desc": ["SG"] * 65}, "gymnasium"),
        ("ALE/Pong-v5", {"game": "../x"}, "ale_py"),
        ("dmc/cartpole-swingup", {"environment_kwargs": {"x": 1}}, "dm_control"),
        ("dmc/cartpole-swingup", {"time_limit": 0}, "dm_control"),
        ("rookery/TMaze-v0", {"length": 10**9}, "rookery.envs.memory"),
        ("rookery/TMaze-v0", {"length": 0}, "rookery.envs.memory"),
        ("rookery/CliffWalk-v0", {"env": "os:system"}, "rookery.envs.cliffwalk"),
        ("rookery/Catch-v0", {"scale": 10**6}, "rookery.envs.catch"),
        ("rookery/Cue-v0", {"rate": 2.0}, "rookery.envs.probe"),
    ],
)  # fmt: skip
def test_other_arguments_need_trust_in_who_takes_them(env, kwargs, module):
    error = refused(stored(env=env, env_kwargs=kwargs))
    assert error.modules == (module,) and next(iter(kwargs)) in str(error)
    judge(stored(env=env, env_kwargs=kwargs), (module,))


def test_the_refusal_shows_the_wrong_arguments_and_not_the_others():
    text = str(refused(stored(env="Ant-v5", env_kwargs={"frame_skip": 3, "xml_file": "x.xml"})))
    assert 'env "Ant-v5" called with {"xml_file": "x.xml"}' in text


@pytest.mark.parametrize("wrong", [{"size": 10**6}, {"stack": 2**31}, {"frame_skip": 10**9}, {"max_frames": 2**40}])
def test_numbers_for_the_emulator_are_bounded(wrong):
    fields = stored(env="ALE/Pong-v5", atari=HONEST["atari"] | wrong)
    assert refused(fields).modules == ("ale_py",)
    judge(fields, ("ale_py",))


# The user's word


@pytest.mark.parametrize(
    "trust",
    ["", ".", "..", "*", "a.", ".a", "a b", "a:b", "a-b", "ös", "os\n", "/tmp", 5, None, "rookery",
     "rookery.envs", "rookery.crews.probe", "rookery.envs.make"],
)  # fmt: skip
def test_trust_names_a_module_or_is_an_error(trust):
    with pytest.raises(UsageError):
        modules((trust,))
    with pytest.raises(UsageError):
        judge(HONEST, (trust,))


def test_trust_may_be_one_word():
    """A string is a sequence too: of letters, each of which would be a module."""
    assert modules("examples.own_env") == ("examples.own_env",)
    assert refused(stored(env="o:system"), "os").modules == ("o",)


@pytest.mark.parametrize(
    ("module", "trust", "allows"),
    [
        ("pack.inner", "pack", True),
        ("pack.inner", "pack.inner", True),
        ("pack.inner", "pack.inn", False),
        ("pack", "pack.inner", False),
        ("package", "pack", False),
        ("rookery.envs.scripted", "rookery.envs.scripted", True),
        ("rookery_more.envs", "rookery_more", True),
    ],
)
def test_a_trusted_package_includes_its_modules_and_no_others(module, trust, allows):
    assert (findings(stored(env=f"{module}:make"), (trust,)) == []) is allows


# Files that are no configs


@pytest.mark.parametrize(
    "wrong",
    [{"env": None}, {"env": 5}, {"env": ["CartPole-v1"]}, {"env": {"x": 1}}, {"algorithm": []}, {"net": []},
     {"net": None}, {"net": {"module": None}}, {"net": {"module": {}}}, {"env_kwargs": []}, {"env_kwargs": None},
     {"env_kwargs": "x"}, {"atari": 5}],
)  # fmt: skip
def test_a_field_of_another_type_is_refused(wrong):
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        judge(HONEST | wrong)


@pytest.mark.parametrize("name", ["algorithm", "env"])
def test_a_field_that_is_missing_is_named(name):
    with pytest.raises(UsageError, match=f"{name} is missing"):
        judge({key: value for key, value in HONEST.items() if key != name})


def test_defaults_that_are_missing_are_those_of_a_config():
    judge({key: value for key, value in HONEST.items() if key not in ("net", "env_kwargs", "atari")})


@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "\x9b1m", "abc\u202ecba", "\0"])
@pytest.mark.parametrize("where", ["recipe", "preset", "out", "fault_plan", "env", "key", "deep"])
def test_text_that_would_steer_a_terminal_is_refused_wherever_it_stands(text, where):
    odd = {"key": {"env_kwargs": {text: 1}}, "deep": {"env_kwargs": {"a": [{"b": [text]}]}}}.get(where, {where: text})
    with pytest.raises(UsageError) as caught:
        judge(HONEST | odd)
    assert text not in str(caught.value) and str(caught.value).isprintable()


def test_arguments_of_trusted_code_may_be_any_text():
    judge(stored(env="mine:make", env_kwargs={"separator": "\x1f"}), ("mine",))


def test_a_deep_value_is_refused_in_words():
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    assert "deeply" in str(refused(stored(env_kwargs={"x": deep})))
    with pytest.raises(UsageError):
        decode_config(
            json.dumps(HONEST | {"env_kwargs": "@"}).replace('"@"', '{"x":' + "[" * 100_000 + "]" * 100_000 + "}")
        )


def test_a_field_that_stands_twice_is_judged_as_it_is_used():
    """Parsers differ in which of the two counts; judge and reader take the same one."""
    text = json.dumps(HONEST).replace('"env": "CartPole-v1"', '"env": "os:system", "env": "CartPole-v1"')
    assert decode_config(text).env == "CartPole-v1"
    text = json.dumps(HONEST).replace('"env": "CartPole-v1"', '"env": "CartPole-v1", "env": "os:system"')
    with pytest.raises(Refused):
        decode_config(text)


# Who is judged


def test_only_workers_take_a_config_without_judgement():
    """Their parent has judged it. Everybody else reads files."""
    package = Path(rookery.__file__).parent
    users = {str(p.relative_to(package)) for p in package.rglob("*.py") if "parents_config" in p.read_text()}
    workers = {"crews/actor_process.py", "run/ranks.py", "run/evaluator_main.py", "sweeps/training.py"}
    assert users == {"algorithms/registry.py"} | workers
    hosts = {str(p.relative_to(package)) for p in package.rglob("*.py") if "import ActorProcess" in p.read_text()}
    assert hosts == {"crews/actor_main.py", "crews/ray.py"}


@pytest.mark.parametrize("topology", ["serial", "local"])
def test_a_run_of_a_test_task_is_trained_freely_and_resumed_with_trust(tmp_path, topology):
    run = rookery.train(
        "ppo", env="rookery/Counter-v0", preset="vector", env_steps=64, algo={"unroll": 8}, topology=topology, actors=1,
        envs_per_actor=4, out=str(tmp_path / "run"), quiet=True,
    )  # fmt: skip
    for open_again in (rookery.resume, rookery.load):
        with pytest.raises(Refused, match=r"rookery\.envs\.scripted"):
            open_again(run.path)
    resumed = rookery.resume(run.path, trust=("rookery.envs.scripted",), env_steps=128)
    assert resumed.summary["env_steps"] >= 128


def test_an_object_without_a_path_is_refused_unless_it_is_given_again_or_not_made():
    fields = HONEST | {"env": "<lambda>"}
    (found,) = findings(fields, ("anything",))
    assert found.module == "" and "give it again with env=..." in found.what
    assert findings(fields, env="own:make") == findings(fields, env=None) == []
    code = fields | {"env": "os:system"}
    assert findings(code, env=None) == findings(code) != []
    assert findings(fields | {"algorithm": "os:system"}, env="own:make") != []
