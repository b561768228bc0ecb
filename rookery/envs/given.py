"""Environments that a Python caller gives as objects: the name that stands for each in a config, and what it names.

    name = named(make)          # "package.module:make"; or "<make>" if no other process can import it
    given(name)                 # the object itself, in this process

A module-level function or class is named by its import path, one of a script that runs as `__main__` by the script's
own name: worker processes import that. Lambdas, functions inside functions and what a notebook defines have no path.
They get a name that nothing can import, so that a stored config never names them by accident. Nothing is pickled.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookery.core.errors import UsageError


@dataclass(frozen=True)
class Given:
    """What a name stands for in this process."""

    make: Callable[..., Any] | None  # None: the name is an id that was registered with Gymnasium
    why: str = ""  # why no other process can make it; empty: others can
    script: str = ""  # the running script that it belongs to, which workers import


_given: dict[str, Given] = {}
_importing: list[str] = []  # environments whose module is being imported


def given(name: str) -> Given | None:
    """What the caller gave under this name in this process, if anything."""
    return _given.get(name)


def remember(name: str, what: Given) -> str:
    _given[name] = what
    return name


def named(env: Any) -> str:
    """The name of an environment given as a callable; text is returned as it is."""
    if isinstance(env, str):
        return env
    if not callable(env):
        raise UsageError(
            f"env is {_a(type(env).__name__)} that exists already, and a run makes its environments itself: give what "
            "makes one, such as its class or a function"
        )
    path, script, why = import_path(env)
    if path:
        return remember(path, Given(env, script=script))
    for name in _names(_title(env)):
        if name not in _given or _given[name].make is env:
            return remember(name, Given(env, why))
    raise AssertionError("there is always another name")


def import_path(code: Any) -> tuple[str, str, str]:
    """The path "module:name" by which another process can import this object, the script that it is in if that is the
    running one, and else why there is none."""
    name, module = getattr(code, "__qualname__", ""), getattr(code, "__module__", None)
    if not name or not module or isinstance(code, type(sys)):
        return "", "", f"is {_a(type(code).__name__)}, and only functions and classes have an import path"
    if name.endswith("<lambda>"):
        return "", "", "is a lambda, which has no import path"
    if not name.isidentifier():
        return "", "", f"is defined inside {name.rpartition('.')[0].removesuffix('.<locals>')}, and has no import path"
    loaded = sys.modules.get(module)
    if loaded is None or getattr(loaded, name, None) is not code:
        return "", "", f"is not what {module}.{name} is"
    script = ""
    if module == "__main__":
        module, script, why = main_module()
        if why:
            return "", "", why
    file = getattr(loaded, "__file__", None)
    origin = _origin(module)
    if origin is None or file is None or not _same_file(origin, file):
        return "", script, f"is defined in {module}, which is not a file that can be imported"
    return f"{module}:{name}", script, ""


def main_module() -> tuple[str, str, str]:
    """The name of the script or module that runs as `__main__`, its file, and else why it has none."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if file is None:
        return "", "", "is defined in a notebook or an interactive session, which other processes cannot import"
    if spec is not None and spec.name not in ("__main__", ""):  # python -m package.module
        return spec.name, str(file), ""
    stem = Path(file).stem
    if not stem.isidentifier():
        return (
            "",
            "",
            f"is defined in {Path(file).name}, whose name is no module's name: rename it, such as my_script.py",
        )
    if (origin := _origin(stem)) is None or not _same_file(origin, file):
        return "", "", f"is defined in {Path(file).name}, but {stem!r} is imported from {origin or 'nowhere'}"
    return stem, str(file), ""


def _origin(module: str) -> str | None:
    """The file that a fresh process would import under this name; nothing is imported."""
    name, path = "", None
    spec: Any = None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next((found for each in finders if (found := each.find_spec(name, path)) is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _title(env: Any) -> str:
    title = getattr(env, "__qualname__", "") or getattr(getattr(env, "func", None), "__qualname__", "")
    title = re.sub(r"[^A-Za-z0-9_.]+", "", title.rpartition("<locals>.")[2]) or type(env).__name__
    return title if getattr(env, "__qualname__", "") else f"{type(env).__name__} {title}"


def _names(title: str) -> Iterator[str]:
    yield f"<{title}>"
    count = 1
    while True:
        count += 1
        yield f"<{title} {count}>"


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def unguarded(script: str) -> bool:
    """Whether a script has no `if __name__ == "__main__":` at its top level; workers would run all of it."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    tests = [node.test for node in body if isinstance(node, ast.If)]
    return not any(isinstance(name, ast.Name) and name.id == "__name__" for test in tests for name in ast.walk(test))


@contextmanager
def importing(env_id: str) -> Iterator[None]:
    """Around the import of an environment's module."""
    _importing.append(env_id)
    try:
        yield
    finally:
        _importing.pop()


def check_not_importing() -> None:
    """Refuse to train while a module is imported for its environment: a script without a guard would start itself."""
    if _importing:
        raise UsageError(
            f"importing {_importing[-1]!r} starts a run: workers import the file for its environment. Put what starts "
            'the run under `if __name__ == "__main__":`'
        )
