"""Random attacks from a printed seed: a few in the suite, and `make test-attack` for 20 minutes of them.

ROOKERY_ATTACK_SEED repeats a siege, ROOKERY_ATTACK_MINUTES sets its length.
"""

from __future__ import annotations

import os
import statistics
import time

import pytest
from attack.siege import Siege

# Damage, links and forged configs have tests of their own here and in tests/storage.
KINDS = ("stop_the_run", "damage_a_file", "plant_a_link", "forge_a_config")


@pytest.mark.parametrize("attack", ["kill_the_run", *(pytest.param(name, marks=pytest.mark.attack) for name in KINDS)])
def test_one_attack_of_each_kind(tmp_path, attack):
    siege = Siege(tmp_path, seed=1)
    siege.attacks = [getattr(siege, attack)]
    assert siege.round(0) == attack


@pytest.mark.attack
def test_a_siege(tmp_path, capsys):
    seed = int(os.environ.get("ROOKERY_ATTACK_SEED") or time.time_ns() % 10**9)
    minutes = float(os.environ.get("ROOKERY_ATTACK_MINUTES") or 20)
    siege, until, number = Siege(tmp_path, seed), time.monotonic() + 60 * minutes, 0
    with capsys.disabled():
        print(f"\nsiege of {minutes:g} minutes, seed {seed}")
        while time.monotonic() < until:
            siege.round(number)
            number += 1
        print(f"{number} attacks survived: {dict(siege.counts)}")
        for name, times in (("a successor after kill -9 of a worker", siege.recovery), ("nothing left", siege.gone)):
            if times:
                print(f"{name}: median {statistics.median(times):.2f} s, most {max(times):.2f} s of {len(times)}")
    assert number > 0
