"""The list of what stored runs may name, against what is installed: every name exists, every argument is one."""

import ast
import importlib
import inspect
import typing
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import pytest

import rookery.envs
from rookery.envs import cartpole, catch, cliffwalk, gridnav, memory, probe
from rookery.recipes import RECIPES
from rookery.storage.trusted import ALGORITHMS, ATARI, CONTROL, ENVS, GAMES, LIMIT, OWN_MODULES, TEST_TASKS

OURS = {module.__name__: module for module in (memory, cliffwalk, cartpole, catch, gridnav, probe)}

OLDER = ("CliffWalking-v0", "Taxi-v3")  # of a version that we support too
OF_GYMNASIUM = [env for env, known in ENVS.items() if known.module == "gymnasium" and env not in OLDER]


def test_the_algorithms_are_those_of_the_recipes():
    assert set(ALGORITHMS) == {recipe.algorithm for recipe in RECIPES.values()}


def test_our_tasks_are_on_the_list_except_those_that_break_on_purpose():
    listed = {env for env in ENVS if env.startswith("rookery/")}
    assert listed | set(TEST_TASKS) == set(rookery.envs._TASKS)
    for env in listed:
        assert rookery.envs._TASKS[env]["entry_point"].startswith(ENVS[env].module + ":")
    for env, module in TEST_TASKS.items():
        assert rookery.envs._TASKS[env]["entry_point"].startswith(module + ":")


def test_the_games_and_tasks_are_those_of_the_packages():
    from ale_py import roms
    from dm_control import suite

    assert sorted(GAMES) == sorted(roms.get_all_rom_ids())
    assert sorted(CONTROL) == sorted(f"{domain}-{task}" for domain, task in suite.ALL_TASKS)


def test_old_ids_of_games_are_those_that_are_registered():
    import ale_py  # noqa: F401

    registered = {env for env, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("ale_py")}
    assert registered <= {env for env, known in ENVS.items() if known.module == "ale_py"}


def test_ids_of_gymnasium_are_made_by_gymnasium():
    for env in OF_GYMNASIUM:
        spec = gymnasium.registry[env]
        package, room = str(spec.entry_point).split(".")[:3:2]
        assert package == "gymnasium" and room in ("classic_control", "box2d", "toy_text", "mujoco"), env
        assert not spec.additional_wrappers


def parameters(entry_point: str) -> set[str]:
    """Of a class of Gymnasium, from its source: what its module imports need not be installed here."""
    module, _, name = entry_point.partition(":")
    tree = ast.parse(Path(gymnasium.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    (init,) = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return {each.arg for each in (*init.args.args, *init.args.kwonlyargs)}


@pytest.mark.parametrize("env", OF_GYMNASIUM)
def test_arguments_are_parameters_of_the_environment(env):
    assert set(ENVS[env].arguments) - set(LIMIT) <= parameters(gymnasium.registry[env].entry_point)


@pytest.mark.parametrize("env", [env for env in ENVS if env.startswith("rookery/")])
def test_arguments_are_parameters_of_our_tasks(env):
    name = rookery.envs._TASKS[env]["vector_entry_point"].partition(":")[2]
    module = OURS[ENVS[env].module]
    taken = set(inspect.signature(getattr(module, name)).parameters)
    if "options" in taken:  # a dataclass of them
        taken = taken - {"options"} | set(inspect.signature(module.Options).parameters)
    assert set(ENVS[env].arguments) <= taken
    assert taken - {"num_envs"} <= set(ENVS[env].arguments), "all of ours are harmless, and listed"


def leaves(kind: Any) -> list[Any]:
    """The types at the ends of a type, with their bounds."""
    if typing.get_origin(kind) is Annotated:
        base, *metas = typing.get_args(kind)
        return [(base, metas[0])] if base in (int, float, str) else leaves(base)
    if typing.get_origin(kind) is typing.Literal:
        return []
    if args := typing.get_args(kind):
        return [leaf for arg in args for leaf in leaves(arg)]
    return [(kind, None)]


def test_arguments_are_switches_bounded_numbers_and_given_words():
    every = [kind for known in ENVS.values() for kind in known.arguments.values()] + list(ATARI.values())
    for kind, meta in {leaf for each in every for leaf in leaves(each)}:
        if kind in (int, float):
            assert (meta.ge is not None or meta.gt is not None) and (meta.le is not None or meta.lt is not None)
        elif kind is str:
            assert meta.pattern is not None
        else:
            assert kind in (bool, type(None))


def test_no_argument_names_code_or_a_file():
    names = {name for known in ENVS.values() for name in known.arguments}
    for part in ("file", "path", "module", "class", "env", "render", "wrapper", "camera", "config", "kwargs", "mode"):
        assert not [name for name in names if part in name]


def test_modules_of_ours_that_can_be_trusted_define_environments_and_call_nothing_by_name():
    for name in OWN_MODULES:
        module = importlib.import_module(name)
        own = {value for value in vars(module).values() if getattr(value, "__module__", None) == name}
        assert any(isinstance(value, type) and issubclass(value, gymnasium.Env) for value in own)
        assert not {"importlib", "subprocess"} & {getattr(value, "__name__", "") for value in vars(module).values()}
