"""Trackers for tests of what can go wrong with one; they run in a process of their own."""

import json
import os
import signal
import subprocess
import sys
import time


class Recording:
    """Writes what it is told into the file that TRACKED names."""

    def __init__(self, project, name, id, config):
        self.id, self.about = id or "new-1", f"recorded for {name}"
        self._write(["start", project, name, id, config])

    def log(self, env_steps, wall_time, numbers):
        self._write(["log", env_steps, numbers])

    def finish(self, summary, exit_code):
        self._write(["finish", summary, exit_code])

    def _write(self, row):
        with open(os.environ["TRACKED"], "a") as file:
            file.write(json.dumps(row) + "\n")


class Refusing(Recording):
    def __init__(self, **arguments):
        raise ConnectionError(f"no answer from https://me:pw@host/ with key {os.environ['WANDB_API_KEY']}\nmore")


class Blocking(Recording):
    """Does not come back from the first record. What it has started does not end by itself either."""

    def log(self, env_steps, wall_time, numbers):
        pause = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._write(["started", subprocess.Popen(pause, start_new_session=True).pid])
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)


class Dying(Recording):
    def log(self, env_steps, wall_time, numbers):
        os.kill(os.getpid(), signal.SIGKILL)
