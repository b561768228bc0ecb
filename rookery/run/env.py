"""`env=` of the Python interface: an id, an import path, or a callable; what is not importable stays in this process.

    name = resolve(env)                # for the config; the object is remembered in this process
    check_env(config)                  # UsageError if worker processes could not make it

An id that was registered in this process only is named "module:Id-v0" after the module that registers it, if one does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rookery.core.config import RunConfig
from rookery.core.errors import RookeryError, UsageError
from rookery.core.types import EnvSpec
from rookery.crews.answer import answer
from rookery.crews.probe import DEADLINE, ask, probe
from rookery.envs.given import Given, given, main_module, named, remember, unguarded
from rookery.envs.make import makers


def resolve(env: Any) -> str:
    """The name that stands for an environment in a config."""
    name = named(env)
    if not isinstance(env, str) or given(name) is not None:
        return name
    modules = makers(name)
    return _registered(name, modules) if modules else name


def _registered(env_id: str, modules: list[str]) -> str:
    """The name of an id that this process knows: as it is, or with the module that registers it."""
    script = ""
    if "__main__" in modules:
        main, script, _ = main_module()
        modules = [main if name == "__main__" else name for name in modules]
    modules += [name.rpartition(".")[0] for name in modules]  # a package may register what its modules define
    modules = [name for name in dict.fromkeys(modules) if name]
    try:
        found = ask({"what": "registers", "env": env_id, "env_kwargs": {}, "modules": modules}, DEADLINE)
    except RookeryError:
        found = None
    if found == "":
        return env_id
    if found is None:
        return remember(env_id, Given(None, "is registered in this process only"))
    return remember(f"{found}:{env_id}", Given(None, script=script))


def spec_of(env: str, env_kwargs: dict[str, Any]) -> EnvSpec:
    """What an environment looks like: one that was given is made here, any other in a process of its own."""
    if given(env) is None:
        return probe(env, env_kwargs)
    return msgspec.convert(msgspec.to_builtins(answer({"what": "spec", "env": env, "env_kwargs": env_kwargs})), EnvSpec)


def in_this_process(config: RunConfig) -> bool:
    """Whether the environments of a run are made by this process only."""
    alone = config.topology == "allreduce" and config.ranks == 1 and config.group.crew == "inline"
    return config.topology == "serial" or alone


def check_env(config: RunConfig) -> list[str]:
    """What the user should know of the environment; UsageError if workers are needed and could not make it."""
    known = given(config.env)
    if known is None or in_this_process(config):
        return []
    if known.why:
        fix = "call gymnasium.register" if known.make is None else "write it as a function"
        at = " and use env='module:Id-v0'" if known.make is None else ""
        raise UsageError(
            f"env {config.env} {known.why}, so worker processes (topology {config.topology!r}) cannot make it: use "
            f"topology='serial', or {fix} at the top level of a module or script{at}"
        )
    if known.script and unguarded(known.script):
        return [
            f'{known.script} has no `if __name__ == "__main__":`; worker processes import it for the environment and '
            "run all of its top level"
        ]
    return []
