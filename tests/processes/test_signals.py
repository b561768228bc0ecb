import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support_descriptors import descriptors

from rookery.pipes.channel import pair, wait
from rookery.processes.signals import CODES, ECHO, Signals, ended

SUPPORT = Path(__file__).parents[1] / "support"
OURS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize("number, code", list(zip(OURS, [130, 75, 75, 75])))
def test_a_signal_becomes_an_exit_code_and_nothing_is_raised(number, code):
    with Signals() as signals:
        assert signals.requested is None
        os.kill(os.getpid(), number)
        assert signals.requested == code
        assert signals.requested == code


def test_the_old_handlers_come_back():
    before = [signal.getsignal(number) for number in OURS]
    opened = descriptors()
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with Signals():
        assert [signal.getsignal(number) for number in OURS] != before
        assert descriptors() > opened
    assert [signal.getsignal(number) for number in OURS] == before
    assert signal.set_wakeup_fd(-1) == wakeup
    signal.set_wakeup_fd(wakeup)
    assert descriptors() == opened


def test_the_old_handlers_come_back_after_an_error():
    before = [signal.getsignal(number) for number in OURS]
    with pytest.raises(KeyError), Signals():
        raise KeyError
    assert [signal.getsignal(number) for number in OURS] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_background_job_or_nohup_ignores_stays_ignored(number):
    before = {each: signal.getsignal(each) for each in CODES}
    signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), number)
            assert signals.requested is None
            ended(3)
            os.kill(os.getpid(), number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_once_the_exit_code_is_decided_a_signal_ends_the_process_with_it():
    script = "import os, signal; from rookery.processes.signals import Signals, ended\n"
    script += "with Signals(): ended(42)\nos.kill(os.getpid(), signal.SIGTERM)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 42


def test_in_another_thread_it_is_inert():
    before = [signal.getsignal(number) for number in OURS]
    found = []

    def work():
        with Signals() as signals:
            found.extend([signal.getsignal(number) for number in OURS])
            found.append(signals.requested)
            found.append(select.select([signals], [], [], 0)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [*before, None, []]


def test_a_blocked_wait_notices_at_once():
    channel, fd = pair()
    with Signals() as signals:
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        sender.start()
        assert wait([channel], 3600, wake=signals.fileno()) == []
        assert signals.requested == 75
        sender.join(60)
        assert select.select([signals], [], [], 0)[0] == []  # known: later waits are waits again
    os.close(fd)
    channel.close()


def test_a_signal_before_the_wait_ends_it_too():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait([], 3600, wake=signals.fileno()) == []


def test_foreign_signals_wake_a_wait_only_once():
    old = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGWINCH)
            assert wait([], 3600, wake=signals.fileno()) == []
            assert signals.requested is None
            assert select.select([signals], [], [], 0)[0] == []
    finally:
        signal.signal(signal.SIGWINCH, old)


def test_the_second_signal_kills_the_workers_then_exits(monkeypatch):
    done, now = [], [0.0]

    class Exited(Exception):
        pass

    def leave(code):
        done.append(code)
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    with Signals(clock=lambda: now[0]) as signals:
        signals.kill = lambda: done.append("killed")
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = ECHO / 2  # `timeout` signals the process, then its group: still the first request
        os.kill(os.getpid(), signal.SIGTERM)
        assert done == [] and signals.requested == 75
        now[0] = 2 * ECHO
        with pytest.raises(Exited):
            os.kill(os.getpid(), signal.SIGTERM)
        assert done == ["killed", 75]


def test_another_signal_is_never_an_echo_and_a_broken_kill_does_not_keep_us(monkeypatch):
    class Exited(Exception):
        pass

    def leave(code):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    with Signals(kill=lambda: 1 / 0, clock=lambda: 0.0):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Exited, match="130"):
            os.kill(os.getpid(), signal.SIGINT)


SCRIPT = """
import os, signal, sys, time
from rookery.processes.signals import Signals
from rookery.processes.worker import Worker
now = [0.0]
with Signals(clock=lambda: now[0]) as signals:
    worker = Worker.start("scripted_worker", "actor[0]", {"do": "hang"}, {})
    worker.channel.recv(120.0)
    signals.kill = worker.kill
    print(worker.pid, flush=True)
    os.killpg(0, signal.SIGINT)
    assert signals.requested == 130 and worker.alive()
    print("asked", flush=True)
    now[0] = 10.0
    os.killpg(0, signal.SIGINT)
    print("still here", flush=True)
"""


def test_an_exit_at_once_leaves_no_worker_behind():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, process_group=0)
    pid = int(process.stdout.readline())
    with process.stdout as stdout:  # not communicate(), which would miss what readline has already buffered
        assert stdout.read() == "asked\n"
    assert process.wait(120) == 130
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 120)[0], "the worker is still there"
    os.close(fd)
