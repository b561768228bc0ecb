import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_descriptors import descriptors

from rookery.core.errors import RookeryError
from rookery.pipes.channel import ChannelClosed, wait
from rookery.pipes.shm import Segment
from rookery.processes import worker as supervise
from rookery.processes.worker import Deadline, Restarts, Worker, abort_all, stop_all

SUPPORT = Path(__file__).parents[1] / "support"
LONG = 120.0  # seconds: never reached unless something is broken


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setattr(supervise, "ABORT_WAIT", LONG)  # a stack is written in time on a busy machine too


@pytest.fixture
def start(tmp_path):
    workers = []

    def go(do, module="scripted_worker", fds=None, **message):
        log = tmp_path / "logs" / f"{len(workers)}.log"
        workers.append(Worker.start(module, f"actor[{len(workers)}]", {"do": do, **message}, fds or {}, log))
        return workers[-1]

    yield go
    for worker in workers:
        abort_all([worker])
        worker.channel.close()
        assert not Path(f"/proc/{worker.pid}").exists(), "a zombie is left"


def ended(worker):
    """The worker, once it has ended by itself: its end of stream comes a moment before its end."""
    assert supervise.await_end([worker], LONG) == []
    return worker


def ready(worker):
    message = worker.channel.recv(LONG)
    assert message["op"] == "ready", message
    return message


def await_end(pid):
    """Wait for the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([fd], [], [], LONG)
    os.close(fd)
    assert ended, f"process {pid} is still there"


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(pid, state):
    until = time.monotonic() + LONG
    while state_of(pid) != state:
        assert time.monotonic() < until, state_of(pid)
        os.sched_yield()


def test_a_worker_answers_and_stops_when_asked(start):
    worker = start("echo")
    ready(worker)
    worker.channel.send({"op": "unroll", "slot": 3}, 1)
    assert worker.channel.recv(LONG) == {"op": "echo", "order": {"op": "unroll", "slot": 3}}
    assert worker.alive() and worker.exitcode is None and worker.describe_exit() == "is running"
    assert worker.stop(LONG) == [{"op": "farewell"}]
    assert not worker.alive() and worker.exitcode == 0
    assert worker.describe_exit() == "ended with exit code 0"


def test_a_worker_sees_our_path_one_thread_and_nothing_of_how_it_was_started(start, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    message = ready(start("echo"))
    assert message["path"] == [os.getcwd(), *sys.path[1:]]
    assert message["env"]["PYTHONPATH"] == "/somewhere/else"
    assert message["env"]["OMP_NUM_THREADS"] == message["env"]["MKL_NUM_THREADS"] == "1"
    assert message["argv"] == []


def test_a_file_in_the_working_directory_does_not_shadow_the_standard_library(start, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    ready(start("echo"))


def test_descriptors_reach_the_worker(start):
    segment = Segment.create(4096, "test")
    ready(start("write", fds={"memory": segment.fd}, size=4096))
    assert (segment.array((4096,), "uint8") == 7).all()


def test_its_output_is_in_the_log_and_the_tail_is_of_this_incarnation(tmp_path):
    log = tmp_path / "run" / "actor.log"
    for code in (3, 4):
        worker = Worker.start("scripted_worker", "actor[0]", {"do": "exit", "code": code}, {}, log)
        with pytest.raises(ChannelClosed):
            worker.channel.recv(LONG)
        assert ended(worker).describe_exit() == f"ended with exit code {code}"
        assert worker.log_tail() == "leaving now"
        worker.channel.close()
    assert log.read_text() == "leaving now\n" * 2
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_does_not_stop_the_worker(tmp_path):
    (tmp_path / "file").write_text("")
    worker = Worker.start("scripted_worker", "actor[0]", {"do": "echo"}, {}, tmp_path / "file" / "actor.log")
    ready(worker)
    assert worker.log_tail() == ""
    worker.stop(LONG)


@pytest.mark.parametrize("name", ["logs", "logs/actor.log"])
def test_a_log_that_is_a_link_is_not_written(tmp_path, name):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "actor.log").write_text("mine\n")
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "home" / ("actor.log" if "." in name else ""))
    worker = Worker.start("scripted_worker", "actor[0]", {"do": "exit", "code": 3}, {}, tmp_path / "run/logs/actor.log")
    with pytest.raises(ChannelClosed):
        worker.channel.recv(LONG)
    worker.stop(LONG)
    assert (tmp_path / "home" / "actor.log").read_text() == "mine\n"


def test_an_error_in_the_worker_comes_first_and_in_its_own_words(start):
    worker = start("fail")
    message = worker.channel.recv(LONG)
    assert message["op"] == "failed"
    assert message["error"] == "the door is stuck"
    assert (message["reason"], message["exit_code"]) == ("env_raised", 3)
    assert 'raise EnvError("the door is stuck"' in message["traceback"]
    assert worker.describe_exit() == "is running" or worker.exitcode == 1
    with pytest.raises(ChannelClosed):
        worker.channel.recv(LONG)
    assert ended(worker).describe_exit() == "ended with exit code 1"
    assert "EnvError: the door is stuck" in worker.log_tail()


def test_any_other_error_has_a_reason_and_a_code_too(start):
    message = start("raise").channel.recv(LONG)
    assert (message["error"], message["reason"], message["exit_code"]) == (
        "ValueError: broken on purpose",
        "worker_error",
        1,
    )


def test_a_module_that_does_not_exist_is_a_worker_that_has_ended(start):
    worker = start("echo", module="no_such_module")
    with pytest.raises(ChannelClosed):
        worker.channel.recv(LONG)
    assert ended(worker).describe_exit() == "ended with exit code 1"
    assert "No module named no_such_module" in worker.log_tail()


def test_a_program_that_cannot_be_started_leaves_no_descriptor(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    before = descriptors()
    with pytest.raises(RookeryError, match=r"cannot start actor\[0\]"):
        Worker.start("scripted_worker", "actor[0]", {}, {}, tmp_path / "log")
    assert descriptors() == before


def test_a_message_that_cannot_be_sent_leaves_no_process(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        Worker, "__init__", lambda self, *a, init=Worker.__init__: (init(self, *a), started.append(self))[0]
    )
    with pytest.raises(TypeError):
        Worker.start("scripted_worker", "actor[0]", {"do": object()}, {}, tmp_path / "log")
    assert started[0].exitcode == -signal.SIGKILL


SIGNALS = [
    (signal.SIGKILL, "was killed by SIGKILL: probably out of memory (its peak was "),
    (signal.SIGSEGV, "was killed by SIGSEGV: a crash in native code; its stack is in "),
    (signal.SIGALRM, "was killed by SIGALRM"),
    (signal.SIGRTMIN + 1, "was killed by signal 35"),
]


@pytest.mark.parametrize("number, words", SIGNALS)
def test_death_by_signal_is_noticed_at_the_channel_and_described(start, number, words):
    worker = start("signal", signal=int(number))
    assert wait([worker.channel], LONG) == [worker.channel]
    with pytest.raises(ChannelClosed):
        worker.channel.recv(0.0)
    assert ended(worker).describe_exit().startswith(words)
    assert worker.exitcode == -number
    if number == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in worker.log_tail(100)


def test_the_out_of_memory_killer_is_named_where_the_cgroup_saw_it(start, monkeypatch):
    kills = iter([4, 5])

    class Fake:
        def oom_kills(self):
            return next(kills)

    monkeypatch.setattr(supervise, "Machine", Fake)
    worker = start("signal", signal=int(signal.SIGKILL))
    with pytest.raises(ChannelClosed):
        worker.channel.recv(LONG)
    assert ended(worker).describe_exit().startswith("was killed by SIGKILL: out of memory in its cgroup (its peak was ")


@pytest.mark.parametrize("do, where", [("hang", "stuck_here"), ("hang_in_c", "stuck_in_c"), ("stop_itself", "body")])
def test_a_stuck_worker_is_aborted_with_its_stack_in_the_log(start, do, where):
    worker = start(do)
    ready(worker)
    if do == "stop_itself":
        await_state(worker.pid, "T")
    abort_all([worker])
    assert worker.exitcode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in worker.log_tail(100)
    assert f"in {where}" in worker.log_tail(100)
    assert worker.describe_exit().startswith("was aborted by us; its stack is in ")
    abort_all([worker])  # once more does no harm


def test_a_worker_that_survives_the_abort_is_killed(start, monkeypatch):
    worker = start("echo")
    ready(worker)
    send = worker._signal
    monkeypatch.setattr(worker, "_signal", lambda number: send(0))  # as if the kernel could not deliver it
    monkeypatch.setattr(supervise, "ABORT_WAIT", 0.01)
    abort_all([worker])
    assert worker.exitcode == -signal.SIGKILL


def test_an_abort_does_not_wait_and_goes_on_from_look_to_look(start, monkeypatch):
    """Of one that ignores SIGABRT and does not answer: killed when its time is over, and collected."""
    monkeypatch.setattr(supervise, "ABORT_WAIT", 0.3)
    worker = start("ignore")
    ready(worker)
    began, looks = time.monotonic(), 0
    worker.abort()
    while not worker.gone():
        looks += 1
        assert time.monotonic() - began < LONG
    assert looks > 100 and worker.exitcode == -signal.SIGKILL
    assert worker.describe_exit().startswith("was aborted by us")


def test_an_abort_with_patience_lets_a_worker_end_by_itself(start):
    worker = start("raise")
    assert worker.channel.recv(LONG)["op"] == "failed"
    worker.abort(patience=LONG)
    assert ended(worker).exitcode == 1 and "Aborted" not in worker.log_tail(100)


def test_a_spare_process_loads_waits_and_takes_over_the_place_and_log_of_another(start, tmp_path):
    worker, log = start("", spare=True), tmp_path / "logs" / "actor.log"
    assert worker.channel.recv(LONG) == {"op": "loaded"} and worker.log_tail() == "loaded"
    log.write_text("an earlier life\n")
    assert worker.assign("actor[7]", {"do": "exit", "code": 5}, log)
    assert ended(worker).exitcode == 5
    assert worker.name == "actor[7]" and worker.log_tail() == "leaving now"
    assert log.read_text() == "an earlier life\nleaving now\n"


def test_a_spare_process_that_is_not_needed_ends_when_asked_to(start):
    worker = start("", spare=True)
    worker.stop(LONG)
    assert worker.exitcode == 0


def test_a_spare_process_that_has_died_takes_nothing(start, tmp_path):
    worker = start("", spare=True)
    worker.kill()
    ended(worker)
    assert not worker.assign("actor[7]", {"do": "exit", "code": 5}, tmp_path / "log")


def test_stop_aborts_at_the_deadline(start):
    worker = start("hang")
    ready(worker)
    assert worker.stop(0.05) == []
    assert worker.exitcode == -signal.SIGABRT
    assert "in stuck_here" in worker.log_tail(100)


def test_stop_does_not_wait_for_a_worker_that_only_talks(start):
    worker = start("chatter")
    ready(worker)
    said = worker.stop(0.2)
    assert all(message["op"] == "noise" for message in said)
    assert not worker.alive()


def test_many_are_stopped_under_one_deadline(start):
    workers = [start("echo") for _ in range(3)]
    for worker in workers:
        ready(worker)
    workers[1].kill()
    said = stop_all(workers, LONG)
    assert said == {"actor[0]": [{"op": "farewell"}], "actor[1]": [], "actor[2]": [{"op": "farewell"}]}
    assert [worker.exitcode for worker in workers] == [0, -signal.SIGKILL, 0]


def test_signals_meant_for_the_parent_do_not_end_a_worker_from_its_first_moment(start):
    worker = start("echo")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(worker.pid, number)
    ready(worker)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(worker.pid, number)
    worker.channel.send({"op": "hello"}, 1)
    assert worker.channel.recv(LONG)["op"] == "echo"
    assert worker.stop(LONG) == [{"op": "farewell"}]


def test_our_own_signals_are_not_lost_or_blocked_by_a_start(start):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    start("echo")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


def test_programs_of_an_environment_hear_signals_as_usual(start):
    assert ready(start("terminate"))["ended"] == -signal.SIGTERM


@pytest.mark.parametrize("do", ["program", "fork"])
@pytest.mark.parametrize("end", ["abort", "stop", "dies"])
def test_what_a_worker_has_started_goes_with_it(start, do, end):
    worker = start(do)
    message = ready(worker)
    assert message["group"] == worker.pid != os.getpgid(0)
    if end == "dies":
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ChannelClosed):  # also where a forked process could hold the channel open
            worker.channel.recv(LONG)
        assert "SIGKILL" in ended(worker).describe_exit()
    elif end == "stop":
        worker.stop(LONG)
    else:
        abort_all([worker])
    await_end(message["program"])


PARENT = """
import sys, time
from rookery.processes.worker import Worker
worker = Worker.start(sys.argv[1], "actor[0]", {"do": "hang"}, {})
if sys.argv[1] == "scripted_worker":
    worker.channel.recv(120.0)
print(worker.pid, flush=True)
time.sleep(3600.0)
"""


def start_parent(module, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]), **variables}
    command = [sys.executable, "-c", PARENT, module]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    return parent, int(parent.stdout.readline())


def kill_now(parent):
    parent.kill()
    parent.wait(LONG)
    parent.stdout.close()


def test_a_stuck_worker_dies_with_a_parent_that_was_killed():
    parent, child = start_parent("scripted_worker")
    assert state_of(child) in "SR"
    kill_now(parent)
    await_end(child)


def test_a_worker_whose_parent_was_killed_during_its_start_does_not_go_to_work(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    parent, child = start_parent("late_worker", ROOKERY_TEST_FIFO=str(fifo))
    kill_now(parent)
    assert Path(f"/proc/{child}").exists()
    fifo.open("w").close()
    await_end(child)


def test_twenty_starts_leak_no_descriptor_and_no_process(tmp_path):
    def batch(count):
        workers = [
            Worker.start("scripted_worker", f"actor[{i}]", {"do": "echo"}, {}, tmp_path / "log") for i in range(count)
        ]
        for worker in workers:
            ready(worker)
        abort_all(workers[:1])
        stop_all(workers, LONG)
        return [worker.pid for worker in workers]

    batch(1)
    before = descriptors()
    pids = [pid for _ in range(5) for pid in batch(4)]
    assert len(set(pids)) == 20
    assert descriptors() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def socket_inodes(pid):
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            found |= {link[8:-1]} if link.startswith("socket:[") else set()
    return found


def exposed_sockets(pid):
    """Sockets of a process that others could find: any of the internet, or a UNIX one with a name."""
    ours = socket_inodes(pid)
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        table = Path(f"/proc/{pid}/net/{name}")
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        found |= {f"{name} {row.split()[9]}" for row in rows if row.split()[9] in ours}
    for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        if row.split()[6] in ours and len(row.split()) > 7:
            found.add(row)
    return found


def test_nobody_else_can_reach_the_channel(start):
    with socket.create_server(("127.0.0.1", 0)):
        assert exposed_sockets(os.getpid()), "the check itself must see a listening socket"
    worker = start("echo")
    ready(worker)
    assert len(socket_inodes(worker.pid)) == 1
    assert exposed_sockets(worker.pid) == set()
    assert str(os.stat(worker.channel.fileno()).st_ino) not in " ".join(exposed_sockets(os.getpid()))


# When to give up


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_restarts_back_off_and_end_with_the_workers_own_error():
    clock, error = Clock(), ValueError("the last straw")
    restarts = Restarts(3, 600.0, clock)
    assert [restarts.next(error) for _ in range(3)] == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="the last straw"):
        restarts.next(error)
    assert restarts.count == 3


def test_restarts_forget_what_is_older_than_the_window():
    clock, error = Clock(), ValueError()
    restarts = Restarts(2, 600.0, clock)
    assert restarts.next(error) == 0.5
    clock.now += 400
    assert restarts.next(error) == 1.0
    restarts.worked()
    clock.now += 201  # the first one is forgotten
    assert restarts.next(error) == 1.0
    with pytest.raises(ValueError):
        restarts.next(error)
    restarts.worked()
    clock.now += 601
    assert restarts.next(error) == 0.5
    assert restarts.count == 4


def test_restarts_that_fail_slowly_end_too():
    """A start that takes its whole deadline before it fails never has enough company in the window."""
    clock, error = Clock(), ValueError("never comes up")
    restarts = Restarts(3, 600.0, clock)
    for _ in range(3):
        restarts.next(error)
        clock.now += 601
    with pytest.raises(ValueError, match="never comes up"):
        restarts.next(error)


def test_no_restarts_means_none():
    with pytest.raises(KeyError):
        Restarts(0, 600.0, Clock()).next(KeyError())


def test_the_pause_between_restarts_is_bounded():
    restarts = Restarts(50, 600.0, Clock())
    assert max(restarts.next(ValueError()) for _ in range(50)) == 30.0


def test_a_deadline_expires_at_its_time_and_a_sign_of_life_starts_it_anew():
    clock = Clock()
    deadline = Deadline(3.0, clock)
    clock.now += 2.9
    assert not deadline.expired("beat 1")  # another sign than none
    assert deadline.left() == 3.0
    clock.now += 2.9
    assert not deadline.expired("beat 1")
    assert deadline.left() == pytest.approx(0.1)
    clock.now += 0.1
    assert deadline.expired("beat 1")
    assert not deadline.expired("beat 2")
    clock.now += 3.0
    assert deadline.expired("beat 2")
    deadline.rearm()
    assert not deadline.expired("beat 2")


@pytest.mark.parametrize("seconds", [0.3, 60.0])
def test_a_gap_in_our_own_watch_is_no_hang_of_the_worker(seconds):
    clock = Clock()
    deadline = Deadline(seconds, clock)
    clock.now += 3600.0  # suspended
    assert not deadline.expired()
    clock.now += seconds - 0.01 if seconds < 5 else 4.0
    assert not deadline.expired()


def test_a_worker_that_hangs_across_a_gap_is_still_noticed():
    clock = Clock()
    deadline = Deadline(60.0, clock)
    clock.now += 3600.0
    assert not deadline.expired()
    looks = 0
    while not deadline.expired():
        clock.now += 1.0
        looks += 1
    assert looks == 60


def test_a_parent_that_looks_seldom_still_notices():
    clock = Clock()
    deadline = Deadline(60.0, clock)
    looks = 0
    while not deadline.expired():
        clock.now += 10.0  # a long update between two looks, every time
        looks += 1
    assert looks == 7


def test_a_gap_is_forgiven_again_after_a_sign_of_life():
    clock = Clock()
    deadline = Deadline(60.0, clock)
    for beat in range(3):
        assert not deadline.expired(beat)
        clock.now += 3600.0
        assert not deadline.expired(beat)
