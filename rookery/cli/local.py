"""Code of the user's own in the current directory: found if the user names a module that is there and nowhere else.

The current directory may be untrusted: a run folder, or the folder around one. So it becomes a source of code only
for a module that the words of the command name themselves, by `--trust` or as package.module:name, and only behind
everything that is installed. A verb that opens a stored run takes `--trust` and no other word for it.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder

from rookery.cli.runs import trusted
from rookery.storage.trust import MODULE

STORED = ("resume", "eval", "record", "plot")  # verbs that open a stored run
NAMED = re.compile(rf"(?:--[A-Za-z0-9_.-]+=)?({MODULE}):[^:]+")


def find_local_code(verb: str, words: list[str]) -> None:
    """Put the current directory at the end of sys.path if the words name code that is there."""
    named = list(trusted(words))
    if verb not in STORED:
        named += [match[1] for word in words if (match := NAMED.fullmatch(word))]
    here = os.getcwd()
    if any(not _found(module, sys.path) and _found(module, [here]) for module in named):
        sys.path.append(here)


def _found(module: str, path: list[str]) -> bool:
    """Whether a module lies on the path; nothing is imported."""
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True
