"""Which name an environment gets that is given as an object, and which of them another process can import."""

from __future__ import annotations

import functools
import sys
import types

import gymnasium
import pytest
import support_flaky

from rookery.core.config import nameless
from rookery.core.errors import UsageError
from rookery.envs import given
from rookery.envs.make import _factory


class Nested:
    @staticmethod
    def make():
        return gymnasium.make("CartPole-v1")


def test_text_stays_as_it_is():
    assert given.named("CartPole-v1") == "CartPole-v1" and given.given("CartPole-v1") is None


def test_a_function_or_class_of_a_module_is_named_by_its_path():
    assert given.named(support_flaky.make) == "support_flaky:make"
    assert given.named(support_flaky.Flaky) == "support_flaky:Flaky"
    assert given.given("support_flaky:make") == given.Given(support_flaky.make)


@pytest.mark.parametrize(
    ("code", "name", "why"),
    [
        (lambda: None, "<lambda>", "is a lambda"),
        (Nested.make, "<Nested.make>", "is defined inside Nested"),
        (functools.partial(support_flaky.make), "<partial make>", "is a partial, and only functions and classes"),
    ],
)
def test_what_has_no_path_gets_a_name_that_nothing_imports(code, name, why):
    found = given.named(code)
    assert found.startswith(name.rstrip(">")) and nameless(found)
    assert why in given.given(found).why and _factory(found) is code
    assert given.named(code) == found


def test_two_lambdas_have_two_names():
    one, other = given.named(lambda: 1), given.named(lambda: 2)
    assert one != other and _factory(one)() == 1 and _factory(other)() == 2


def test_a_function_that_is_not_what_its_name_says_has_no_path(monkeypatch):
    old = support_flaky.make
    monkeypatch.setattr(support_flaky, "make", lambda: None)
    assert given.import_path(old) == ("", "", "is not what support_flaky.make is")


def test_a_module_without_a_file_has_no_path(monkeypatch):
    module = types.ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, "typed_in", module)
    exec("def make(): pass", vars(module))
    assert given.import_path(module.make) == (
        "",
        "",
        "is defined in typed_in, which is not a file that can be imported",
    )


def test_a_notebook_has_no_path(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def make(): pass", vars(main))
    assert "a notebook or an interactive session" in given.import_path(main.make)[2]


@pytest.mark.parametrize(("name", "why"), [("my-run.py", "rename it"), ("json.py", "but 'json' is imported from")])
def test_a_script_whose_name_cannot_be_imported_says_so(tmp_path, monkeypatch, name, why):
    (tmp_path / name).write_text("def make(): pass\n")
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / name)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def make(): pass", vars(main))
    assert why in given.import_path(main.make)[2]


def test_an_environment_that_exists_is_refused():
    with pytest.raises(UsageError, match=r"is a Flaky that exists already.*its class or a function"):
        given.named(support_flaky.Flaky())


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("import rookery\nrookery.train('ppo')\n", True),
        ("if True:\n    pass\n", True),
        ("def f():\n    if __name__ == '__main__':\n        pass\n", True),
        ('if __name__ == "__main__":\n    pass\n', False),
        ('if "__main__" == __name__:\n    pass\n', False),
    ],
)
def test_a_script_without_a_guard_is_known(tmp_path, text, bare):
    (tmp_path / "script.py").write_text(text)
    assert given.unguarded(str(tmp_path / "script.py")) is bare


def test_training_while_an_environment_is_imported_is_refused():
    given.check_not_importing()
    with given.importing("script:make"), pytest.raises(UsageError, match=r"importing 'script:make'.*__main__"):
        given.check_not_importing()
    given.check_not_importing()
