import subprocess
import sys

import pytest

from rookery.core.machine import Machine

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    return Machine(tmp_path / "proc", tmp_path / "cgroup")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_cgroups_the_available_memory_counts(machine):
    write(machine.proc / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    4096 kB")
    assert machine.memory() == (4096 * 1024, "available memory of the machine")


def test_without_any_file_no_limit_is_known(machine):
    have, source = machine.memory()
    assert have > 2**62 and source == "no limit known"
    assert machine.oom_kills() == 0
    assert machine.cores() >= 1


def test_a_v2_limit_counts_idle_file_pages_as_free(machine):
    write(machine.proc / "meminfo", f"MemAvailable: {64 * 2**20} kB")
    write(machine.proc / "self" / "cgroup", "0::/box")
    write(machine.cgroups / "box" / "memory.max", 4 * GIB)
    write(machine.cgroups / "box" / "memory.current", 3 * GIB)
    write(machine.cgroups / "box" / "memory.stat", f"anon 1\ninactive_file {GIB}")
    have, source = machine.memory()
    assert have == 2 * GIB
    assert "box/memory.max" in source


def test_the_tightest_limit_on_the_way_up_binds(machine):
    write(machine.proc / "self" / "cgroup", "0::/outer/inner")
    for folder, limit in (("outer/inner", "max"), ("outer", GIB)):
        write(machine.cgroups / folder / "memory.max", limit)
        write(machine.cgroups / folder / "memory.current", 0)
    assert machine.memory()[0] == GIB


def test_a_v1_limit_is_found_also_where_the_container_hides_our_path(machine):
    write(machine.proc / "self" / "cgroup", "7:cpu,cpuacct:/docker/x\n4:memory:/docker/abc\n0::/")
    write(machine.cgroups / "memory" / "memory.limit_in_bytes", 2 * GIB)
    write(machine.cgroups / "memory" / "memory.usage_in_bytes", 3 * GIB)
    assert machine.memory()[0] == 0  # over the limit is nothing left, not less


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max data size             {data}           unlimited            bytes
Max open files            20000                20000                files
Max address space         {space}            unlimited            bytes"""


def limit(machine, data="unlimited", space="unlimited"):
    write(machine.proc / "meminfo", f"MemAvailable: {64 * 2**20} kB")
    write(machine.proc / "self" / "limits", LIMITS.format(data=data, space=space))
    write(machine.proc / "self" / "status", f"Name: x\nVmSize:\t{2 * 2**20} kB\nVmData:\t{2**20} kB")


def test_the_limits_of_the_process_count_less_what_it_has_taken(machine):
    limit(machine)
    assert machine.memory()[0] == 64 * GIB
    limit(machine, space=10 * GIB)
    assert machine.memory() == (8 * GIB, "limit of the process (ulimit -v, RLIMIT_AS)")
    assert machine.memory(shared=True)[0] == 8 * GIB
    limit(machine, data=4 * GIB, space=10 * GIB)
    assert machine.memory() == (3 * GIB, "limit of the process (ulimit -d, RLIMIT_DATA)")
    assert machine.memory(shared=True)[0] == 8 * GIB, "shared memory is not data"
    limit(machine, space=GIB)
    assert machine.memory()[0] == 0


def test_a_limit_of_one_process_is_not_one_of_several(machine):
    limit(machine, space=10 * GIB)
    assert machine.memory(processes=4)[0] == 32 * GIB
    write(machine.proc / "meminfo", f"MemAvailable: {16 * 2**20} kB")
    assert machine.memory(processes=4)[0] == 16 * GIB


LIMITED = """
import resource, sys
from rookery.core.errors import StorageError
from rookery.core.machine import Machine
from rookery.pipes.shm import Segment
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
assert 0 < Machine().memory()[0] < 2**30, Machine().memory()
try:
    Segment.create(2**30, "unrolls")
except StorageError as error:
    sys.exit(str(error))
"""


def test_shared_memory_beyond_the_limit_of_a_real_process_is_refused_with_its_name():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert "need 1.0 GiB" in done.stderr and "RLIMIT_AS" in done.stderr, done.stderr


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quota, cores", [(50_000, 1), (100_000, 1), (-1, None)])
def test_a_cpu_quota_cuts_the_cores(machine, version, quota, cores):
    free = machine.cores()
    if version == 1:
        write(machine.proc / "self" / "cgroup", "3:cpu,cpuacct:/")
        write(machine.cgroups / "cpu,cpuacct" / "cpu.cfs_quota_us", quota)
        write(machine.cgroups / "cpu,cpuacct" / "cpu.cfs_period_us", 100_000)
    else:
        write(machine.proc / "self" / "cgroup", "0::/a")
        write(machine.cgroups / "a" / "cpu.max", f"{'max' if quota < 0 else quota} 100000")
    assert machine.cores() == (cores or free)


@pytest.mark.parametrize("line, file", [("0::/a", "a/memory.events"), ("4:memory:/a", "memory/a/memory.oom_control")])
def test_oom_kills_are_read_from_both_versions(machine, line, file):
    write(machine.proc / "self" / "cgroup", line)
    write(machine.cgroups / file, "oom 5\noom_kill 3")
    assert machine.oom_kills() == 3
