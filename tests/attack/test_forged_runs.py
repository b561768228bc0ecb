"""Run folders forged by the thousand: nothing that they name is imported, written, opened or started.

ROOKERY_ATTACK_ROUNDS=N makes it longer, from a random seed that is printed; ROOKERY_ATTACK_SEED repeats one.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROUNDS = int(os.environ.get("ROOKERY_ATTACK_ROUNDS") or 0)
CHILD = Path(__file__).with_name("forged_runs.py")


def test_forged_folders_do_nothing_but_get_refused(honest, tmp_path):
    seed = int(os.environ.get("ROOKERY_ATTACK_SEED") or (random.randrange(1, 10**9) if ROUNDS else 1))
    print(f"ROOKERY_ATTACK_SEED={seed}")
    command = [sys.executable, str(CHILD), str(honest), str(tmp_path), str(seed), str(ROUNDS or 60)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7000 if ROUNDS else 200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    print(report["forged"], "configs:", report["counts"])
    assert not report["faults"], "\n\n".join(report["faults"][:3])
    assert not report["loot"]
    assert report["forged"] > 10_000
    for way in ("eval", "record", "resume", "resume()", "load()"):
        assert report["counts"][f"{way} 2"] >= 5, "every way was tried, and refused"
    assert any("payload.py" in event for event in report["control"]), "the hook sees what it is there for"
    assert any("loot" in event for event in report["control"])
