"""One honest run, small and finished, that attacks work on copies of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rookery


@pytest.fixture(scope="session")
def honest(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("attack") / "honest"
    rookery.train("ppo", env="CartPole-v1", env_steps=256, algo={"epochs": 1}, out=str(folder), quiet=True)
    return folder


@pytest.fixture
def forged(honest, tmp_path) -> Callable[..., Path]:
    """A copy of the honest run with other fields in its config.json, by dotted path."""

    def forge(fields: dict[str, Any] = {}, **more: Any) -> Path:  # noqa: B006 - read only
        folder = tmp_path / "forged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(honest, folder)
        config = json.loads((folder / "config.json").read_text())
        for path, value in (fields | more).items():
            *groups, name = path.split(".")
            group = config
            for each in groups:
                group = group[each]
            group[name] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return forge
