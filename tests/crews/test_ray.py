"""Joining a Ray cluster, or starting one: what cannot work is told in time, nobody else gets in, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support_ray import LONG, SMALL, cluster_of, ledger_balances, messages, until

import rookery
from rookery.core.errors import EnvError, UsageError
from rookery.crews import ray as crews_ray
from rookery.crews import ray_session

ANSWER = 10.0  # seconds for an address that does not work to be told
PPO: dict[str, Any] = {"algo": {"unroll": 16, "epochs": 1, "minibatches": 1}, "preset": "vector", "env_steps": 200}
JOIN = """
import sys, time
import rookery
{before}
from rookery.core.errors import UsageError
from rookery.run.configured import configure
from rookery.crews.ray_session import joined
config = configure("ppo", "CartPole-v1", topology="ray_cluster", ray={{"address": sys.argv[1]}})
began = time.monotonic()
try:
    with joined(config) as ray:
        print("joined", ray.get_runtime_context().gcs_address)
except UsageError as error:
    print(f"{{time.monotonic() - began:.1f}}", error)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(2) as cluster:
        yield cluster


def train(folder: Path, recipe: str = "ppo", **fields: Any) -> rookery.Run:
    return rookery.train(recipe, out=str(folder), **(SMALL | {"env": "CartPole-v1"} | PPO | fields))


def joined(address: str, before: str = "", **variables: str) -> str:
    """What another process says that joins the cluster at this address."""
    code, environ = JOIN.format(before=before), os.environ | variables
    command = [sys.executable, "-c", code, address]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(address: str, before: str = "", **variables: str) -> str:
    seconds, _, text = joined(address, before, **variables).partition(" ")
    assert float(seconds) < ANSWER
    return text


# Addresses. These are told without Ray


@pytest.fixture
def silent() -> Iterator[str]:
    """Something listens at this address, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """Nobody listens at this address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def address_error(address: str) -> str:
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        ray_session._check_reachable(address)
    assert time.monotonic() - began < ANSWER
    return str(caught.value)


def test_an_address_where_nobody_listens_is_told_with_what_was_tried(closed):
    text = address_error(closed)
    assert f"no Ray cluster at {closed}: tried to connect" in text and "ray status" in text


def test_an_address_that_does_not_answer_is_told_in_time(silent):
    assert "does not answer as Ray does" in address_error(silent)


def test_a_server_of_another_kind_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "does not answer as Ray does" in address_error(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["somewhere", "127.0.0.1", "127.0.0.1:", "127.0.0.1:port", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_told_with_an_example(address):
    text = address_error(address)
    assert repr(address) in text and "10.0.0.1:6379" in text


def test_an_address_of_ray_client_is_refused_with_what_to_do():
    text = address_error("ray://127.0.0.1:10001")
    assert "Ray Client" in text and "auto" in text


def test_a_wrong_address_leaves_no_run_folder(tmp_path, closed):
    """As a user sees it."""
    words = ["train", "ppo", "--env", "CartPole-v1", "--topology", "ray_cluster", "--ray.address", closed]
    command = [sys.executable, "-m", "rookery", *words, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 2 and done.stderr.startswith("error: no Ray cluster at"), done.stderr
    assert not (tmp_path / "run").exists()


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "rookery\[ray\]"'):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


# On a cluster


def test_the_cluster_that_is_named_is_joined_whatever_the_environment_says(cluster, silent):
    assert joined(cluster.address, RAY_ADDRESS=silent) == f"joined {cluster.address}\n"


def test_auto_is_the_cluster_that_the_environment_names(cluster, closed):
    assert joined("auto", RAY_ADDRESS=cluster.address) == f"joined {cluster.address}\n"
    assert f"no Ray cluster at {closed}" in refused("auto", RAY_ADDRESS=closed)


def test_another_version_of_ray_is_told(cluster):
    text = refused(cluster.address, "import ray; ray.__version__ = '1.2.3'")
    assert "cannot join the Ray cluster at" in text and "1.2.3" in text


def test_another_port_of_the_cluster_is_told(cluster):
    import ray

    port, host = ray.nodes()[0]["NodeManagerPort"], cluster.address.rpartition(":")[0]
    assert "does not answer as the head of a Ray cluster does" in refused(f"{host}:{port}")


def test_more_actors_than_there_is_room_for_are_refused_with_how_many_fit(cluster, tmp_path):
    with pytest.raises(UsageError, match=r'7 actors need 7 CPUs, and the cluster has 4 .*actors=4.*ray=\{"least": 4\}'):
        train(tmp_path / "run", actors=7)


def test_room_is_counted_by_node(cluster, tmp_path):
    """Three times 1.3 CPUs are less than all there are, and only one fits on each node."""
    with pytest.raises(UsageError, match=r"3 actors need 3\.9 CPUs, .* 4 on 2 nodes, room for 2 of 1\.3: .*actors=2"):
        train(tmp_path / "run", actors=3, ray={"cpus_per_actor": 1.3})


def test_an_actor_that_fits_on_no_node_is_refused(cluster, tmp_path):
    with pytest.raises(UsageError, match=r"room for 0 of 3: use fewer CPUs for each \(ray.cpus_per_actor\)$"):
        train(tmp_path / "run", actors=1, ray={"cpus_per_actor": 3.0})


def test_fewer_actors_than_asked_for_are_refused_where_a_batch_needs_them_all(cluster, tmp_path):
    with pytest.raises(UsageError, match=r"trains on an unroll of every actor.*leave ray.least out"):
        train(tmp_path / "run", actors=1, ray={"least": 1})


def test_another_version_on_a_node_is_refused_with_both(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(crews_ray, "versions", lambda: {"rookery": rookery.__version__, "torch": "1.0"})
    with pytest.raises(UsageError, match=r"node .* has torch .*, and the one of the learner has 1\.0: install"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_environment_that_cannot_be_imported_on_a_node_is_the_first_thing_told(cluster, tmp_path):
    with pytest.raises((UsageError, EnvError)) as caught:
        train(tmp_path / "run", env="support_ray:missing_there", env_kwargs={"pid": os.getpid()})
    assert "a_library_that_is_not_installed_on_this_node" in str(caught.value).splitlines()[0]


def test_an_object_store_that_is_too_small_is_told_with_both_numbers(cluster, tmp_path):
    """A node of this cluster has 150 MiB."""
    algo = PPO["algo"] | {"unroll": 1_000_000}
    with pytest.raises(UsageError, match=r"object store .* too small: need .*MiB .*, have 150.* MiB"):
        train(tmp_path / "run", algo=algo, envs_per_actor=4)


def test_actors_end_with_a_driver_that_is_killed(cluster, started, tmp_path):
    run = started(tmp_path / "run", "--ray.address", cluster.address)
    hosts = [pid for pid in descendants(os.getpid()) if "ray::Host" in command_of(pid)]
    assert len(hosts) == 2
    run.kill()
    run.wait()
    until(lambda: not [pid for pid in hosts if "ray::Host" in command_of(pid)], "the end of the actors")
    assert cluster.head_node.remaining_processes_alive()


# A cluster of our own


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    try:
        words = [word for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    except OSError:
        return []
    return [pid, *(below for word in words for below in descendants(int(word)))]


def listening(pids: list[int]) -> set[str]:
    """Local addresses of the TCP sockets on which these processes listen, as host:port."""
    inodes: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                inodes[fields[9]] = f"{socket.inet_ntop(family, b''.join(words))} {int(port, 16)}"
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                held.add(target[8:-1])
    return {inodes[inode] for inode in held & inodes.keys()}


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts long runs in processes of their own; none of them outlives the test."""
    runs: list[subprocess.Popen] = []
    yield partial(_started, runs)
    for run in runs:
        run.kill()
        run.wait()


def _started(runs: list[subprocess.Popen], out: Path, *flags: str, **variables: str) -> subprocess.Popen:
    """A long run, in a group of its own, after its first checkpoint."""
    words = [
        "train", "ppo", "--env", "CartPole-v1", "--preset", "vector", "--topology", "ray_cluster", "--actors", "2",
        "--envs-per-actor", "2", "--env-steps", "100000000", "--algo.unroll", "16", "--algo.minibatches", "2",
        "--algo.epochs", "1", "--checkpoint.every", "500", "--quiet", "--out", str(out), *flags,
    ]  # fmt: skip
    run = subprocess.Popen(
        [sys.executable, "-m", "rookery", *words], env=os.environ | variables, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    runs.append(run)
    until(lambda: list(out.glob("checkpoints/step-*")) or run.poll() is not None, "the first checkpoint")
    assert run.poll() is None, run.stderr.read()
    return run


def folders() -> set[str]:
    return {str(path) for path in Path("/tmp").glob("rookery-ray-*")}


@pytest.mark.parametrize("end", ["SIGTERM to the group", "SIGKILL"])
def test_a_cluster_of_our_own_is_closed_to_others_and_leaves_nothing(tmp_path, started, silent, end):
    """No cluster was named: the one that the environment names is not joined."""
    run = started(tmp_path / "run", RAY_ADDRESS=silent, http_proxy="http://127.0.0.1:9")
    tree = descendants(run.pid)
    (folder,) = {folder for folder in folders() if any(f"{folder}/" in command_of(pid) for pid in tree)}
    assert os.stat(folder).st_mode & 0o077 == 0, "no other user reaches Ray's sockets"
    assert len(tree) > 6, "this process, the servers, an agent, two actors"
    assert [pid for pid in tree if os.getpgid(pid) == run.pid] == [run.pid], "a signal to the group is for it alone"
    ports = listening(tree)
    assert ports and {port.split()[0] for port in ports} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, ports
    assert not {port for port in ports if port.endswith(" 8265")}, "that is the dashboard's"
    server = next(pid for pid in tree if "gcs_server" in command_of(pid))
    variables = Path(f"/proc/{server}/environ").read_text().split("\0")
    assert "RAY_AUTH_MODE=token" in variables and any(len(v) == 79 for v in variables if "RAY_AUTH_TOKEN=" in v)
    if end != "SIGKILL":
        address = f"127.0.0.1:{next(port.split()[1] for port in listening([server]))}"
        wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
        assert "token is missing or wrong" in refused(address, **wrong)
    if end == "SIGKILL":
        run.kill()
        run.wait()
    else:  # as a batch system does
        os.killpg(run.pid, signal.SIGTERM)
        assert run.wait(60) == 75, run.stderr.read()
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["exit_reason"] == "requeue" and summary["restarts"] == 0, messages(tmp_path / "run")
        assert folder not in folders()
    until(lambda: not [command_of(pid) for pid in tree if command_of(pid)], "the end of every process")
    assert folder not in folders()


@pytest.mark.attack  # test_ray_ranks.py has the same ranks and actors on a cluster that is there
def test_ranks_and_their_actors_run_on_a_cluster_of_our_own(tmp_path):
    """It listens on the loopback interface only, and the ranks find it there."""
    words = [
        "train", "ddppo", "--env", "CartPole-v1", "--preset", "vector", "--topology", "ray_cluster", "--ranks", "2",
        "--actors", "1", "--group.crew", "processes", "--envs-per-actor", "2", "--env-steps", "600", "--algo.unroll",
        "32", "--algo.chunk", "16", "--algo.minibatches", "2", "--algo.epochs", "1", "--quiet",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rookery", *words, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ranks"]["size"] == 2 and ledger_balances(summary), summary["ledger"]


ALONE = """
import os, sys
before = dict(os.environ)
import rookery
assert not any(name.split(".")[0] == "ray" for name in sys.modules), "rookery imports ray"
small = {"env": "CartPole-v1", "preset": "vector", "env_steps": 100, "envs_per_actor": 2, "quiet": True}
small["algo"] = {"unroll": 16, "epochs": 1, "minibatches": 1}
for topology in sys.argv[2:]:
    rookery.train("ppo", topology=topology, out=f"{sys.argv[1]}/{topology}", **small)
print(*sorted(name for name in sys.modules if name.split(".")[0] == "ray"))
print(*sorted(name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)))
"""


def alone(tmp_path: Path, *topologies: str) -> tuple[list[str], list[str]]:
    """Modules of Ray that such runs have loaded, and variables of the environment that differ after them."""
    command = [sys.executable, "-c", ALONE, str(tmp_path), *topologies]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules, variables = done.stdout.split("\n")[:2]
    return modules.split(), variables.split()


def test_other_topologies_do_not_import_ray(tmp_path):
    modules, _ = alone(tmp_path, "local")  # of serial, test_startup.py has this
    assert modules == []


def test_no_variable_of_the_environment_stays_set(tmp_path):
    modules, variables = alone(tmp_path, "ray_cluster")
    assert modules and [name for name in variables if "RAY" in name or "PROXY" in name.upper()] == []
