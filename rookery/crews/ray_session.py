"""The Ray cluster of a run: started on this machine, or joined.

Without an address a cluster is started for this run: on the loopback interface, with a token that only this run knows,
without a dashboard. It is removed at the end. Another cluster is joined only if it is named (`ray.address`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from rookery.core.config import RunConfig
from rookery.core.errors import UsageError
from rookery.core.wording import setting
from rookery.processes.orphans import GONE, end_marked, guarded, marking, new_mark
from rookery.processes.threads import available_cores

INSTALL = 'topology ray_cluster needs Ray, which is not installed: pip install "rookery[ray]"'
LOOPBACK = "127.0.0.1"
ANSWER = 5.0  # seconds for a cluster to answer
# A node that has gone silent is noticed after 2 × (period + timeout) = 4.6 s. Not more and shorter timeouts: under much
# load nodes that lived were given up, because none of three answers came within a second.
HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 1800, "health_check_failure_threshold": 2}
OURS = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}  # of a cluster that we start
SLACK = 1e-6  # CPUs, for sums of fractions
# What Ray writes in its folder until its last process has ended, after a kill -9 of this one.
SWEEP = """
import shutil, sys, time
sys.stdin.read()
for _ in range(10):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.5)
"""
# What a client of HTTP/2 says first, with no settings of its own. Ray's servers speak it.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
SETTINGS = 4  # type of the frame that such a server answers with


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[Any]:
    """The cluster of this run. One that this process has joined before, by itself, is used as it is."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(INSTALL) from error
    if ray.is_initialized():
        check_cpus(config)
        yield ray
        return
    cluster = _named(config.ray.address) if config.ray.address else _started(config)
    with guarded(), cluster:
        check_cpus(config)
        yield ray


@contextlib.contextmanager
def _started(config: RunConfig) -> Iterator[None]:
    """A cluster on this machine that ends with this run, also if it is killed."""
    import ray

    folder, mark = tempfile.mkdtemp(prefix="rookery-ray-"), new_mark()  # of ours only: Ray opens the one in it to all
    sweeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SWEEP, folder], stdin=subprocess.PIPE, start_new_session=True
    )
    before = {name: os.environ.get(name) for name in (*OURS, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")}
    os.environ.update(OURS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    _read_environment()
    cpus = max(available_cores(), math.ceil(_cpus(config)))
    store: dict[str, Any] = {"object_store_memory": int(config.ray.store_gib * 2**30)} if config.ray.store_gib else {}
    try:
        with _loopback():
            try:
                with _quietly(), _no_proxy(), _out_of_reach(), marking(mark):
                    ray.init(
                        address="local", num_cpus=int(cpus), include_dashboard=False, _node_ip_address=LOOPBACK,
                        _temp_dir=f"{folder}/r", _system_config=HEALTH, log_to_driver=False,
                        logging_level=logging.ERROR, **store,
                    )  # fmt: skip
            except Exception as error:
                raise UsageError(f"Ray could not start a cluster on this machine: {_told(error)}") from error
            if (address := ray.util.get_node_ip_address()) != LOOPBACK:
                raise UsageError(f"this version of Ray listens on {address}, and not on the loopback interface only")
            yield
    finally:
        ray.shutdown()
        end_marked([mark], GONE)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _read_environment()
        shutil.rmtree(folder, ignore_errors=True)
        sweeper.kill()
        sweeper.communicate()


def _read_environment() -> None:
    """Ray has read its variables when it was imported, and keeps a token that it has read."""
    from ray import _raylet

    raylet: Any = _raylet  # compiled: it has no types

    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _named(address: str) -> Iterator[None]:
    """The cluster at an address; it stays when we leave."""
    import ray

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _found()
    _check_reachable(address)
    _check_answers(address)
    with _loopback() if _loopback_only(address) else contextlib.nullcontext():
        try:
            with _quietly():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray has no class of its own for most of these
            raise UsageError(f"cannot join the Ray cluster at {address}: {_told(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """As on macOS: every server listens on the loopback interface only, and is looked for there."""
    from ray._private import ray_constants

    several = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several


def _loopback_only(address: str) -> bool:
    """Whether the head listens there only, as one that we have started: its ranks join it too."""
    from ray._private import services

    host, _, port = address.rpartition(":")
    outside = services.resolve_ip_for_localhost(host)  # where Ray would look for it
    if outside == host:
        return False
    try:
        socket.create_connection((outside, int(port)), ANSWER).close()
    except OSError:
        return True
    return False


def _found() -> str:
    """The address of the cluster that a node of runs on this machine."""
    from ray._private import services

    try:
        return services.canonicalize_bootstrap_address_or_die("auto")
    except (ConnectionError, ValueError) as error:
        raise UsageError(f"ray.address is auto, and there is no Ray cluster here: {_told(error)}") from error


def _check_reachable(address: str) -> None:
    """UsageError unless such a server listens there; Ray itself would try for two minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://"):
        raise UsageError(
            f"{address} is an address of Ray Client, which copies every array twice: run on a node of the cluster, "
            f"with {setting('ray.address', 'auto')}"
        )
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"ray.address is {address!r}: give host:port, such as 10.0.0.1:6379, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER) as peer:
            greeted = os.environ.get("RAY_USE_TLS") == "1" or _greets(peer)
    except OSError as error:
        raise UsageError(
            f"no Ray cluster at {address}: tried to connect for {ANSWER:g} s ({error.strerror or error}). Is it "
            "running (`ray status`), and may this machine reach it?"
        ) from error
    if not greeted:
        raise UsageError(
            f"no Ray cluster at {address}: something listens there, and does not answer as Ray does. "
            "Is it the port of the cluster's head (6379, unless `ray start --port` says otherwise)?"
        )


def _check_answers(address: str) -> None:
    """UsageError unless it is the head of a cluster that takes our token; Ray itself would ask 20 times."""
    import ray
    from ray import _raylet

    raylet: Any = _raylet
    try:
        raylet.GcsClient(address=address)
    except ray.exceptions.AuthenticationError as error:
        raise UsageError(
            f"the Ray cluster at {address} does not accept this process: its token is missing or wrong. Set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of the cluster"
        ) from error
    except Exception as error:
        raise UsageError(
            f"what listens at {address} does not answer as the head of a Ray cluster does: {_told(error)}"
        ) from error


def _greets(peer: socket.socket) -> bool:
    peer.settimeout(ANSWER)
    try:
        peer.sendall(HELLO)
        frame = peer.recv(9, socket.MSG_WAITALL)
    except TimeoutError:
        return False
    return len(frame) == 9 and frame[3] == SETTINGS


def _told(error: Exception) -> str:
    """The first lines of Ray's error: where versions differ, it has six."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6]) or type(error).__name__


def _cpus(config: RunConfig) -> float:
    """That all Ray actors of a run reserve."""
    places = config.actors if config.ranks == 1 else config.ranks * (config.actors + 1)
    return places * config.ray.cpus_per_actor + _cpus_of_services(config)


def _cpus_of_services(config: RunConfig) -> float:
    """Of parts of a replay memory, and of aggregators."""
    replay, ray = getattr(config.algo, "replay", None), config.ray
    shards = 0 if replay is None or replay.shards == 1 else replay.shards
    return shards * ray.cpus_per_shard + ray.aggregators * ray.cpus_per_aggregator


def check_cpus(config: RunConfig) -> None:
    """UsageError if the cluster will never have room for as many actors as are needed."""
    import ray

    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    services = _cpus_of_services(config)
    have = sum(nodes) - services
    each, least = config.ray.cpus_per_actor, config.ray.least or config.actors
    fit = min(sum(int((cpus + SLACK) // each) for cpus in nodes), int((have + SLACK) // each))
    beside = f" beside {services:g} for parts of the memory and aggregators" if services else ""
    where = f"the cluster has {have:g} on {len(nodes)} nodes{beside}, room for {max(0, fit)} of {each:g}"
    if config.ranks > 1:
        placed = config.ranks - 1 + (config.ranks * config.actors if config.group.crew == "processes" else 0)
        if placed > fit:
            raise UsageError(
                f"{config.ranks} ranks need {placed * each:g} CPUs beside the first one, and {where}: "
                "use fewer ranks or actors, or fewer CPUs for each (ray.cpus_per_actor)"
            )
        return
    if least <= fit:
        return
    fewer = f"use fewer CPUs for each ({setting('ray.cpus_per_actor')})"
    if fit > 0:
        fewer = f"use {setting('actors', fit)}, or {fewer[4:]}, or start with {fit} until there are more "
        fewer += f"({setting('ray.least', fit)})"
    raise UsageError(f"{config.actors} actors need {config.actors * each:g} CPUs, and {where}: {fewer}")


@contextlib.contextmanager
def _no_proxy() -> Iterator[None]:
    """A proxy of the environment is not for the loopback interface."""
    names = ("no_proxy", "NO_PROXY")
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ[name] = ",".join(filter(None, (before[name], "127.0.0.1", "localhost")))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _out_of_reach() -> Iterator[None]:
    """Ray's processes get a group of their own: a batch system that signals ours is heard by us, and not by them."""
    from ray._private import services

    module: Any = services
    start = module.ConsolePopen
    module.ConsolePopen = partial(start, process_group=0)
    try:
        yield
    finally:
        module.ConsolePopen = start


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Ray prints the end of every worker to the terminal; the journal says it, and the panel is there.

    It also exits at once on SIGTERM; we write a checkpoint first.
    """
    from ray._private import worker

    worker.print_worker_logs = lambda *args, **more: None
    logger = logging.getLogger("ray")
    level, handler = logger.level, signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
