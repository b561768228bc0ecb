"""The state of a single environment as a tree of arrays, numbers and strings, wrappers and generator included.

An environment that can be restored offers `get_state() -> dict` and `set_state(dict)` on its innermost class, which
include its random generator (`generator_state`). Of the wrappers, only TimeLimit keeps a state we can carry; an
environment in any other wrapper is not restored at all.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit


def env_state(env: gymnasium.Env) -> dict[str, Any] | None:
    """None if the environment, or a wrapper around it, cannot be restored exactly."""
    chain = _wrappers(env)
    inner = env.unwrapped
    if chain is None or not (hasattr(inner, "get_state") and hasattr(inner, "set_state")):
        return None
    state = inner.get_state()
    if state is None:
        return None
    # Before the first reset there is no count; -1 stands for that.
    elapsed = [-1 if w._elapsed_steps is None else int(w._elapsed_steps) for w in chain if isinstance(w, TimeLimit)]
    return {"env": state, "elapsed": elapsed}


def restore_env(env: gymnasium.Env, state: dict[str, Any]) -> None:
    chain = _wrappers(env)
    assert chain is not None, env
    limits: list[Any] = [w for w in chain if isinstance(w, TimeLimit)]  # Gymnasium types their count as None
    for limit, elapsed in zip(limits, state["elapsed"], strict=True):
        limit._elapsed_steps = None if elapsed == -1 else int(elapsed)
    for wrapper in chain:
        if isinstance(wrapper, OrderEnforcing):
            wrapper._has_reset = True
    inner: Any = env.unwrapped
    inner.set_state(state["env"])


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """The generator as numpy describes it: nested dicts of names and (large) integers."""
    return dict(generator.bit_generator.state)


def restored_generator(state: dict[str, Any]) -> np.random.Generator:
    bits = getattr(np.random, str(state["bit_generator"]), None)
    if not (isinstance(bits, type) and issubclass(bits, np.random.BitGenerator)):
        raise ValueError(f"{state['bit_generator']!r} is not a bit generator of numpy")
    generator = np.random.Generator(bits())
    generator.bit_generator.state = state
    return generator


def _wrappers(env: gymnasium.Env) -> list[gymnasium.Wrapper] | None:
    """Wrappers from the outside in; None if one of them may keep a state that we do not know."""
    chain = []
    while isinstance(env, gymnasium.Wrapper):
        if type(env) not in (TimeLimit, OrderEnforcing, PassiveEnvChecker):
            return None
        chain.append(env)
        env = env.env
    return chain
