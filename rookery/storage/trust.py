"""What a stored run may do: the one place where an untrusted config.json is checked, before anything is imported.

    judge(fields, trust)        # fields: the parsed JSON; trust: modules that the user named

A config names code by import path (algorithm, environment, network) and says what an environment is called with. Names
on the list of `trusted.py` pass, with arguments of the listed types. Everything else is code named by an untrusted
file: it is refused unless the user has trusted its module, and then it may be called with anything. The refusal shows
each name with its arguments. Not here: types and ranges of other fields (`registry.py`), and configs that a worker gets
from its parent, which has checked them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from rookery.core.config import nameless
from rookery.core.errors import UsageError
from rookery.core.printable import printable, shown
from rookery.core.wording import by_flags
from rookery.storage.trusted import ALGORITHMS, ATARI, ENVS, OWN_MODULES, TEST_TASKS, Known

MODULE = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*"
CODE = re.compile(rf"({MODULE}):([A-Za-z_][A-Za-z0-9_]*)")  # package.module:name
ID = re.compile(rf"(?:({MODULE}):)?([A-Za-z0-9_./-]+)")  # a Gymnasium id; "module:Id-v0" imports the module first


@dataclass(frozen=True)
class Finding:
    """Something that a stored run asks for and does not get by itself."""

    what: str
    module: str = ""  # trusting this would allow it; empty: nothing would


class Refused(UsageError):
    """A stored run asks for code that the user did not trust."""

    def __init__(self, found: Sequence[Finding]):
        self.modules = tuple(dict.fromkeys(each.module for each in found if each.module))
        self.what = "; ".join(each.what for each in found)
        self.about = f"the run asks for what a stored run may not use by itself: {self.what}"
        self.helps = all(each.module for each in found)
        super().__init__(f"{self.about}; if you trust it: trust={self.modules!r}" if self.helps else self.about)


def judge(fields: Any, trust: Sequence[str] = (), env: str | None = "") -> None:
    """Refuse a parsed config.json that names code, or arguments, beyond the list and what the user trusts.

    `env`: the environment that the caller gives instead of the stored one, which is trusted like a module that the
    caller names; None: none will be made.
    """
    if found := findings(fields, trust, env):
        raise Refused(found)


def findings(fields: Any, trust: Sequence[str] = (), env: str | None = "") -> list[Finding]:
    """Everything that `judge` would refuse."""
    trust = modules(trust)
    if not isinstance(fields, dict):
        raise UsageError("config.json cannot be read: it is not a JSON object")
    _check_characters({name: value for name, value in fields.items() if name not in ("env_kwargs", "history")})
    net = _field(fields, "net", dict, {})
    code = [("algorithm", _field(fields, "algorithm", str)), ("net.module", _field(net, "module", str, "", "net."))]
    found = [_code(*each, trust) for each in code]
    stored, kwargs = _field(fields, "env", str), _field(fields, "env_kwargs", dict, {})
    if not env and not (env is None and nameless(stored)):
        found += _env(stored, kwargs, trust)
    if wrong := _beyond(_field(fields, "atari", dict, {}), ATARI, others=True):
        found.append(None if _allows(trust, "ale_py") else Finding(f"atari with {shown(wrong)}", "ale_py"))
    return [each for each in found if each is not None]


def flags(modules: Sequence[str]) -> str:
    """Modules as `--trust` takes them."""
    return " ".join(f"--trust {quote(module)}" for module in modules)


def needed(config: Any) -> tuple[str, ...]:
    """The modules that have to be trusted to open a run of this config (a RunConfig, or its fields)."""
    try:
        return tuple(dict.fromkeys(each.module for each in findings(msgspec.to_builtins(config)) if each.module))
    except UsageError:  # such as a folder's name that cannot be shown: opening it will say so
        return ()


def needs(config: Any) -> str:
    """The flags that opening a run of this config would need, a space before each."""
    return "".join(f" {flags((module,))}" for module in needed(config))


def resume_command(folder: Path, config: Any, more: str = "") -> str:
    """What continues a run, with what it has to be allowed: a command, or a call. `more`: flags that change the run."""
    fields = msgspec.to_builtins(config)
    if isinstance(fields, dict) and nameless(str(fields.get("env", ""))):
        return f"rookery.resume({str(folder)!r}, env=...)" + (" in Python" if by_flags() else "")
    if not by_flags():
        trust = f", trust={names!r}" if (names := needed(fields)) else ""
        compiles = ", compile=True" if isinstance(fields, dict) and fields.get("compile") is True else ""
        return f"rookery.resume({str(folder)!r}{trust}{compiles})"
    compiles = " --compile" if isinstance(fields, dict) and fields.get("compile") is True else ""
    return f"rookery resume {quote(str(folder))}{more and f' {more}'}{needs(fields)}{compiles}"


def modules(trust: Sequence[str]) -> tuple[str, ...]:
    """The modules that a user named as trusted; UsageError for what names none, or one of ours that calls others.

    Functions of Rookery take names of code as arguments: trusting them would trust whatever a file makes them call.
    """
    names = (trust,) if isinstance(trust, str) else tuple(trust)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(MODULE, name):
            raise UsageError(f"{shown(name)} cannot be trusted: give the name of a module, such as examples.own_env")
        if _ours(name) and name not in OWN_MODULES:
            raise UsageError(f"{name} cannot be trusted: of Rookery itself only {', '.join(OWN_MODULES)} can")
    return names


def _allows(trust: tuple[str, ...], module: str) -> bool:
    """A trusted package includes its modules; of ours, only whole modules can be trusted."""
    return any(module == name or module.startswith(name + ".") for name in trust)


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "rookery"


def _remedy(module: str) -> str:
    """The module as one to trust, or nothing: most of Rookery's modules are not meant to be named."""
    return module if not _ours(module) or module in OWN_MODULES else ""


def _code(field: str, path: str, trust: tuple[str, ...]) -> Finding | None:
    if path in ALGORITHMS if field == "algorithm" else not path:
        return None
    named = CODE.fullmatch(path)
    if named is None:
        return Finding(f"{field} {shown(path)}, which is not written as package.module:Class")
    return None if _allows(trust, named[1]) else Finding(f"{field} {shown(path)}", _remedy(named[1]))


def _env(env: str, kwargs: dict[str, Any], trust: tuple[str, ...]) -> list[Finding]:
    called = f"env {shown(env)}" + (f" called with {shown(kwargs)}" if kwargs else "")
    if named := CODE.fullmatch(env):
        return [] if _allows(trust, named[1]) else [Finding(called, _remedy(named[1]))]
    named = ID.fullmatch(env)
    if nameless(env):
        return [Finding(f"{called}, which was an object of the Python process; in Python, give it again with env=...")]
    if named is None:
        return [Finding(f"{called}, which is not written as an environment's id")]
    module, name = named[1], named[2]
    found = [Finding(called, _remedy(module))] if module and not _allows(trust, module) else []
    if name in ENVS:
        return found + _arguments(name, ENVS[name], kwargs, trust)
    makers = _makers(name)
    if not makers and not module:
        return [Finding(f"{called}, which nothing that is installed provides")]
    return found + [Finding(called, _root(maker)) for maker in makers if not _allows(trust, maker)]


def _arguments(env: str, known: Known, kwargs: dict[str, Any], trust: tuple[str, ...]) -> list[Finding]:
    wrong = _beyond(kwargs, known.arguments)
    if not wrong or _allows(trust, known.module):
        return []
    return [Finding(f"env {shown(env)} called with {shown(wrong)}", known.module)]


def _beyond(given: Mapping[str, Any], types: Mapping[str, Any], others: bool = False) -> dict[str, Any]:
    """The arguments that are not of their listed type; without `others`, those that are not listed too."""
    return {name: value for name, value in given.items() if not _fits(value, types.get(name, Any if others else None))}


def _fits(value: Any, kind: Any) -> bool:
    if kind is None:
        return False
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _makers(env: str) -> list[str]:
    """The modules whose code makes an id that is registered with Gymnasium, and wraps it."""
    if env in TEST_TASKS:
        return [TEST_TASKS[env]]
    import gymnasium

    spec = gymnasium.registry.get(env)
    if spec is None:
        return []
    points = [spec.entry_point, spec.vector_entry_point, *(each.entry_point for each in spec.additional_wrappers)]
    return list(dict.fromkeys(_module_of(each) for each in points if each is not None))


def _module_of(entry_point: Any) -> str:
    """Of "package.module:name", or of the function itself."""
    if isinstance(entry_point, str):
        return entry_point.partition(":")[0]
    return str(getattr(entry_point, "__module__", None) or type(entry_point).__module__)


def _root(module: str) -> str:
    """What to trust for a registered id: the package. Ours is never trusted as a whole."""
    return _remedy(module) if _ours(module) else module.partition(".")[0]


def _field(fields: Mapping[str, Any], name: str, kind: type, otherwise: Any = None, group: str = "") -> Any:
    value = fields.get(name, otherwise)
    if not isinstance(value, kind):
        is_what = f"is {shown(value)}" if name in fields else "is missing"
        wanted = "text" if kind is str else "a group of fields"
        raise UsageError(f"config.json cannot be read: {group}{name} {is_what}; it must be {wanted}")
    return value


def _check_characters(fields: Any) -> None:
    """Names are shown in messages and titles: control characters are refused. Arguments are shown as JSON."""
    for text in _texts(fields):
        if printable(text) != text:
            raise UsageError(f"config.json cannot be read: {shown(text)} has characters that cannot be shown")


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, Sequence):
            waiting += value
