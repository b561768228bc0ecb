"""Every public name of the package has an example in its docstring, and the examples say what happens.

They share one small run, under the name `run`, and begin with `rookery`, `numpy` and `gymnasium` imported.
"""

import doctest
import inspect

import gymnasium
import numpy
import pytest

import rookery


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("examples") / "run")
    return rookery.train("ppo", env="CartPole-v1", env_steps=2_000, quiet=True, out=out)


def examples(name):
    """Of a public name: of its own docstring, and of those of its methods."""
    thing = getattr(rookery, name)
    found = [(name, thing.__doc__)]
    if inspect.isclass(thing):
        found += [(f"{name}.{key}", inspect.getdoc(each)) for key, each in vars(thing).items() if key[0] != "_"]
    return [(where, doc) for where, doc in found if doc and ">>>" in doc]


@pytest.mark.parametrize("name", rookery.__all__)
def test_a_public_name_has_an_example_that_runs(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert examples(name)[0][0] == name, f"the docstring of rookery.{name} has no example"
    for where, doc in examples(name):
        names = {"rookery": rookery, "numpy": numpy, "gymnasium": gymnasium, "run": run}
        test = doctest.DocTestParser().get_doctest(doc, names, where, None, None)
        told = []
        doctest.DocTestRunner().run(test, out=told.append)
        assert not told, "".join(told)
