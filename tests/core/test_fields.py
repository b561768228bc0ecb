"""The keywords that editors complete are the fields of a run, with their types."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rookery.core import config, fields
from rookery.core.config import RunConfig

ROOT = Path(__file__).parents[2]
READ = (
    "__init__",
    "run/run",
    "run/configured",
    "run/finished",
    "core/fields",
    "core/config",
    "core/ranges",
    "play/interface",
)
NAMED_OTHERWISE = {"recipe", "algorithm", "env", "preset", "init_from", "history"}  # parameters of their own
WRONG = """
import rookery

rookery.train("ppo", env="CartPole-v1", env_stepz=3)
rookery.train("ppo", env="CartPole-v1", net={"cores": "gru"})
rookery.train("ppo", env="CartPole-v1", net={"core": "rnn"})
rookery.configure("ppo", "CartPole-v1", seed="one")
rookery.resume("runs/a", env_stepz=3)
run: str = rookery.train("ppo", env="CartPole-v1", env_steps=3, net={"core": "gru", "hidden": [64]})
rookery.evaluate(rookery.train("ppo", env=lambda: None), episodes=3).returns
"""


def expected(kind):
    """The fields of a dataclass as a caller gives them: groups as dicts, sequences for tuples, a path too for `out`."""
    found = {}
    for field in dataclasses.fields(kind):
        text = re.sub(r"^(\w+)Config$", r"\1Fields", field.type)
        text = re.sub(r"^tuple\[(\w+), \.\.\.\]$", r"Sequence[\1]", text)
        found[field.name] = {"AlgoConfig": "dict[str, Any]"}.get(text, text)
    if kind is RunConfig:
        found = {name: text for name, text in found.items() if name not in NAMED_OTHERWISE}
        found["algo"], found["out"] = "dict[str, Any]", "str | PurePath"
    return found


@pytest.mark.parametrize("name", [name for name in vars(fields) if name.endswith("Fields")])
def test_fields_are_those_of_the_config_with_the_same_types(name):
    kind = getattr(config, name.replace("Fields", "Config") if name != "Fields" else "RunConfig")
    told = {key: each.__forward_arg__ for key, each in getattr(fields, name).__annotations__.items()}
    assert told == expected(kind), f"write the class {name} of core/fields.py as {kind.__name__} in core/config.py"
    assert getattr(fields, name).__total__ is False


def test_a_misspelt_keyword_is_an_error_of_the_type_checker(tmp_path, monkeypatch):
    """Only what the signatures need is read: all of the package takes a minute."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "wrong.py").write_text(WRONG)
    files = [tmp_path / "wrong.py", *(f"rookery/{name}.py" for name in READ)]
    options = ["--follow-imports=skip", f"--cache-dir={tmp_path}"]
    done = subprocess.run([sys.executable, "-m", "mypy", *files, *options], capture_output=True, text=True, timeout=120)
    said = done.stdout
    assert not done.stderr
    lines = {int(line): text for line, text in re.findall(r"wrong\.py:(\d+): error: (.*)", said)}
    assert sorted(lines) == [4, 5, 6, 7, 8, 9], said
    told = {4: 'did you mean "env_steps"?', 5: '"cores"', 6: "'rnn'", 7: '"seed"', 8: '"env_stepz"', 9: "has type"}
    assert [line for line, text in told.items() if text not in lines[line]] == [], said
