"""From a name in the configuration to environments: ALE/... and dmc/... ids, factories of your own, Gymnasium ids.

An id that has a vector version of its own is made with it; all others run in our loop (`SyncLanes`). Not here: how
each of these keeps the reset convention (`lanes.py`, `vector.py`, `atari.py`).
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.vector import AutoresetMode, VectorEnv

from rookery.core.config import AtariConfig, NetConfig, nameless
from rookery.core.errors import EnvError, RookeryError, UsageError
from rookery.core.frames import with_frames
from rookery.core.types import EnvSpec
from rookery.core.wording import setting
from rookery.envs import atari, dmc
from rookery.envs.given import given, importing
from rookery.envs.lanes import Lanes, SyncLanes
from rookery.envs.last import LastLanes
from rookery.envs.masks import MaskInInfo, Setting, source
from rookery.envs.vector import adapt, reset_mode

EXTRAS = {
    "ale_py": "rookery[atari]",
    "mujoco": "rookery[mujoco]",
    "imageio": "rookery[mujoco]",
    "box2d": "rookery[box2d]",
}  # what an error names -> what to install
# Gymnasium's vector CartPole draws the resets of all lanes from one generator; ours gives each lane its own.
OWN_VECTOR = dict.fromkeys(("CartPole-v0", "CartPole-v1"), "rookery.envs.cartpole:CartPoleVector")


class Config(Protocol):
    """The part of a RunConfig that environments are made from."""

    @property
    def env(self) -> str: ...
    @property
    def env_kwargs(self) -> dict[str, Any]: ...
    @property
    def atari(self) -> AtariConfig: ...
    @property
    def net(self) -> NetConfig: ...  # feed_last, action_mask

    # and `metrics_from_info`, where there is one: names of numbers in `info`


def make(config: Config, lanes: int, training: bool = True, threads: int = 1) -> Lanes:
    """`lanes` environments stepped together; `threads` of their own for those that step in threads (Atari)."""
    if lanes < 1:
        raise UsageError(f"{lanes} environments: at least one is needed")
    made = _make(config, lanes, training, threads)
    made.metrics = tuple(getattr(config, "metrics_from_info", ())) or made.metrics
    return LastLanes(made) if config.net.feed_last else made


def stepped_together(env_id: str) -> bool:
    """Whether an id is known, without a look at it, to step all its lanes in one call: it has a version for that."""
    if nameless(env_id) or given(env_id) is not None:
        return False
    spec = gymnasium.registry.get(env_id)
    return atari.is_atari(env_id) or env_id in OWN_VECTOR or (spec is not None and spec.vector_entry_point is not None)


def look(config: Config, play: Callable[[Lanes], None] | None = None) -> EnvSpec:
    """What the environments of a config look like; a mask in `info`, which only a reset shows, among it.

    `play` gets one of them, if they are stepped one by one.
    """
    lanes = _make(config, 1, training=True, threads=1)
    spec = lanes.spec
    if config.net.action_mask == "auto" and spec.action.kind != "box" and not spec.masked:
        try:
            lanes.reset([1])
        except MaskInInfo:
            spec = source(spec, "info", None)
            if play is not None:
                lanes.close()
                lanes = _make(WithMask(config), 1, training=True, threads=1)
        except Exception:
            pass  # those who play in it will find the fault again, and say where it was
    if play is not None and isinstance(lanes, SyncLanes):
        play(lanes)
    lanes.close()
    return spec


class WithMask:
    """A config by which the mask in `info` is read."""

    def __init__(self, config: Config):
        self.env, self.env_kwargs, self.atari = config.env, config.env_kwargs, config.atari
        self.net = replace(config.net, action_mask="info")


def _make(config: Config, lanes: int, training: bool, threads: int) -> Lanes:
    env_id, kwargs, masks = config.env, dict(config.env_kwargs), config.net.action_mask
    if (factory := _factory(env_id)) is not None:
        return _from_factory(env_id, factory, kwargs, lanes, masks)
    if dmc.is_dmc(env_id):
        with _building(env_id, kwargs):
            build: Callable[[], gymnasium.Env] = partial(dmc.make_env, env_id, **kwargs)
            return SyncLanes(env_id, _several(build, lanes), _again(env_id, kwargs, build))
    spec = None if atari.is_atari(env_id) else _registered(env_id)
    if spec is None or _is_ale(spec):
        _no_kwargs(env_id, kwargs)
        with _building(env_id, kwargs):
            return atari.make_lanes(spec.id if spec else env_id, config.atari, lanes, training, threads)
    with _building(env_id, kwargs):
        env = _vector(spec, kwargs, lanes)
        if env is not None:
            return adapt(env, env_id, masks)
        lean = _lean(spec)
        build = partial(gymnasium.make, lean, disable_env_checker=True, **kwargs)
        return SyncLanes(env_id, _several(build, lanes), _again(env_id, kwargs, build), masks)


def make_single(config: Config, render_mode: str | None = None) -> gymnasium.Env:
    """One environment by itself, as evaluation sees it: for recording and for checks."""
    env_id, kwargs = config.env, dict(config.env_kwargs)
    look: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    if (factory := _factory(env_id)) is not None:
        with _building(env_id, kwargs | look):
            env = factory(**kwargs, **look)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"{env_id} made a {type(env).__name__}; this needs a single gymnasium.Env")
        return env
    if dmc.is_dmc(env_id):
        with _building(env_id, kwargs):
            return dmc.make_env(env_id, **kwargs, **look)
    spec = None if atari.is_atari(env_id) else _registered(env_id)
    if spec is None or _is_ale(spec):
        _no_kwargs(env_id, kwargs)
        with _building(env_id, kwargs):
            return atari.AtariSingle(spec.id if spec else env_id, config.atari, render_mode)
    with _building(env_id, kwargs | look):
        return gymnasium.make(_lean(spec), disable_env_checker=True, **kwargs, **look)


def _factory(env_id: str) -> Callable[..., Any] | None:
    """The callable that the caller gave, or that "package.module:factory" names; None for anything else."""
    if (known := given(env_id)) is not None and known.make is not None:
        return known.make
    if nameless(env_id):
        raise UsageError(
            f"env {env_id} was an object of the Python process that trained the run, and has no import path: in "
            "Python, give it again with env=..."
        )
    module, colon, name = env_id.partition(":")
    if not colon or not name.isidentifier():
        return None
    found = _import(module, env_id)
    if not hasattr(found, name):
        near = difflib.get_close_matches(name, dir(found), 3)
        raise UsageError(f"{module} has no {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return getattr(found, name)


def _import(module: str, env_id: str) -> Any:
    try:
        with importing(env_id):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise UsageError(
                f"env {env_id!r}: no module {error.name!r} to import; install it or put its folder on PYTHONPATH"
            ) from error
        raise UsageError(f"env {env_id!r}: {module} needs {error.name!r}, which is not installed") from error


def _from_factory(
    env_id: str, factory: Callable[..., Any], kwargs: dict[str, Any], lanes: int, masks: Setting
) -> Lanes:
    try:
        vector = "num_envs" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        vector = False
    with _building(env_id, kwargs):
        envs: list[Any]
        envs = [factory(num_envs=lanes, **kwargs)] if vector else _several(partial(factory, **kwargs), lanes)
    wanted: Any = VectorEnv if vector else gymnasium.Env
    if not isinstance(envs[0], wanted):
        takes = "takes num_envs and should return" if vector else "should return"
        raise UsageError(f"{env_id} returned a {type(envs[0]).__name__}; it {takes} a gymnasium.{wanted.__name__}")
    if not vector:
        return SyncLanes(env_id, envs, _again(env_id, kwargs, partial(factory, **kwargs)), masks)
    if envs[0].num_envs != lanes:
        raise UsageError(f"{env_id} returned {envs[0].num_envs} environments for num_envs={lanes}")
    return adapt(envs[0], env_id, masks)


def _again(env_id: str, kwargs: dict[str, Any], build: Callable[[], gymnasium.Env]) -> Callable[[int], gymnasium.Env]:
    """A function that recreates the environment of one lane."""

    def build_lane(lane: int) -> gymnasium.Env:
        with _building(env_id, kwargs):
            return build()

    return build_lane


def _several(build: Callable[[], gymnasium.Env], count: int) -> list[gymnasium.Env]:
    """`count` environments, or none: those already open are closed if a later one fails."""
    envs: list[gymnasium.Env] = []
    try:
        for _ in range(count):
            envs.append(build())
    except BaseException:
        for env in envs:
            env.close()
        raise
    return envs


def _vector(spec: Registered, kwargs: dict[str, Any], lanes: int) -> VectorEnv | None:
    """The id's own vector version if it has one that keeps, or can be brought to, next-step reset."""
    if spec.additional_wrappers or (spec.vector_entry_point is None and spec.id not in OWN_VECTOR):
        return None
    spec = copy.deepcopy(spec)
    spec.vector_entry_point = OWN_VECTOR.get(spec.id, spec.vector_entry_point)
    env = gymnasium.make_vec(spec, num_envs=lanes, vectorization_mode="vector_entry_point", **kwargs)
    if spec.entry_point is None or reset_mode(env) in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        return env
    env.close()  # single environments can do what this one cannot
    return None


def _lean(spec: Registered) -> Registered:
    """Without the wrapper that checks the order of calls: our order is correct, and the check costs time."""
    spec = copy.deepcopy(spec)
    spec.order_enforce = False
    return spec


def _registered(env_id: str) -> Registered:
    module, colon, name = env_id.rpartition(":")
    if colon and given(env_id) is None:  # Gymnasium's "module:Id-v0": the module registers the id when imported
        _import(module, env_id)
    if name not in gymnasium.registry:
        _register_ale()
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    known = {each.lower(): each for each in gymnasium.registry}
    stem = name.lower().rpartition("-v")[0] or name.lower()
    near = [each for low, each in known.items() if low.rpartition("-v")[0] == stem]  # right name, wrong version or case
    near += [known[low] for low in difflib.get_close_matches(name.lower(), known, 3) if known[low] not in near]
    hint = f"; did you mean {', '.join(near[:4])}?" if near else ""
    own = setting("env", "package.module:factory")
    raise UsageError(
        f"unknown environment {env_id!r}{hint} (an environment of your own: {own}; "
        "Atari: 'ALE/Pong-v5' with pip install 'rookery[atari]'; dm_control: 'dmc/cartpole-swingup' with "
        "pip install 'rookery[dmc]')"
    )


def makers(env_id: str) -> list[str]:
    """Modules that may have registered an id of this process: those that define what makes it. None: it is Gymnasium's.

    Where the id is not registered there are none either.
    """
    spec = gymnasium.registry.get(env_id)
    if spec is None:
        return []
    points = [each for each in (spec.entry_point, spec.vector_entry_point) if each is not None]
    names = [each.partition(":")[0] if isinstance(each, str) else str(each.__module__) for each in points]
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] not in ("gymnasium", "ale_py")]


def registering(env_id: str, modules: Sequence[str]) -> str | None:
    """The first of these modules whose import registers the id; "" if it is known without, None if none does."""
    if env_id in gymnasium.registry:
        return ""
    for module in modules:
        with suppress(UsageError):
            _import(module, f"{module}:{env_id}")
        if env_id in gymnasium.registry:
            return module
    return None


def _register_ale() -> None:
    """Importing ale-py registers the older Atari ids, so that they are known in any order of imports."""
    with suppress(ImportError):
        import ale_py  # noqa: F401


def _is_ale(spec: Registered) -> bool:
    return str(spec.entry_point).startswith("ale_py")


def _no_kwargs(env_id: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise UsageError(f"{env_id} takes no env_kwargs ({', '.join(kwargs)}); Atari options are those of `atari`")


@contextmanager
def _building(env_id: str, kwargs: dict[str, Any]) -> Iterator[None]:
    """Errors while an environment is built become messages for the user."""
    try:
        yield
    except RookeryError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        extra = next((extra for name, extra in EXTRAS.items() if name in str(error).lower()), None)
        fix = f": pip install '{extra}'" if extra else ""
        raise UsageError(f"{env_id} needs a package that is not installed ({error}){fix}") from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise _raised(env_id, error) from error
        if "render_mode" in kwargs and "'render_mode'" in str(error):
            raise UsageError(
                f"{env_id} cannot be recorded: the factory does not accept render_mode; add this parameter "
                "to it, and make the environment with it"
            ) from error
        raise UsageError(f"{env_id} does not take these env_kwargs: {kwargs} ({error})") from error
    except (Exception, SystemExit) as error:
        raise _raised(env_id, error) from error


def _raised(env_id: str, error: BaseException) -> EnvError:
    words = f"{env_id} raised when it was made: {type(error).__name__}: {error}"
    return EnvError(with_frames(words, error), "env_raised")
