"""The files in examples/cluster: Ray's own schema for `ray up`, the fields of the KubeRay manifest, the shell's syntax.

Nothing is started: there is no cloud, Kubernetes or SLURM here. docs/cluster.md says what was run by hand.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[1] / "examples" / "cluster"
HEALTH = {"RAY_health_check_period_ms", "RAY_health_check_timeout_ms", "RAY_health_check_failure_threshold"}


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load((FOLDER / "cluster.yaml").read_text())


@pytest.fixture(scope="module")
def manifests():
    return {part["kind"]: part for part in yaml.safe_load_all((FOLDER / "raycluster.yaml").read_text())}


def test_ray_up_takes_the_cluster(cluster):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))
    broken = cluster | {"max_worker": 4}
    with pytest.raises(Exception, match="max_worker"):
        validate_config(prepare_config(broken))


def test_the_cluster_has_a_token_and_no_dashboard(cluster):
    assert cluster["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    head, workers = (" ".join(cluster[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    assert "RAY_AUTH_MODE=token" in head and "RAY_AUTH_MODE=token" in workers
    assert "--include-dashboard=false" in head and all(f"{name}=" in head for name in HEALTH)


def test_the_kuberay_manifest_has_the_fields_of_a_ray_cluster(manifests):
    ray = manifests["RayCluster"]
    spec = ray["spec"]
    assert ray["apiVersion"] == "ray.io/v1" and spec["authOptions"] == {"mode": "token"}
    head, (actors,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert set(spec) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert set(head) == {"serviceType", "rayStartParams", "template"}
    assert set(actors) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert actors["minReplicas"] <= actors["replicas"] <= actors["maxReplicas"]
    for group in (head, actors):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # numbers are refused
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {each["name"] for each in container["env"]} >= HEALTH
        assert all(isinstance(each["value"], str) for each in container["env"])
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_only_pods_of_the_cluster_reach_it(manifests):
    own = {"matchLabels": {"ray.io/cluster": manifests["RayCluster"]["metadata"]["name"]}}
    policy = manifests["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == own and policy["ingress"] == [{"from": [{"podSelector": own}]}]
    claims = [each["persistentVolumeClaim"] for each in volumes(manifests) if "persistentVolumeClaim" in each]
    assert claims == [{"claimName": manifests["PersistentVolumeClaim"]["metadata"]["name"]}] * 2


def volumes(manifests):
    spec = manifests["RayCluster"]["spec"]
    return [each for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
            for each in group["template"]["spec"]["volumes"]]  # fmt: skip


def test_versions_are_those_that_are_tested(cluster, manifests):
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (FOLDER.parents[1] / "constraints.txt").read_text(), re.MULTILINE))
    setup = " ".join(cluster["setup_commands"])
    assert f"torch=={pins['torch'].partition('+')[0]}" in setup
    ray = manifests["RayCluster"]["spec"]["rayVersion"]
    assert f"ray[default]=={ray}" in setup and pins.get("ray", ray) == ray


def test_flags_of_ray_start_exist(cluster, manifests):
    from ray.scripts.scripts import start

    known = {name for option in start.params for name in option.opts}
    text = (FOLDER / "slurm.sh").read_text().replace("\\\n", " ")
    lines = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"], *text.splitlines()]
    used = {flag for line in lines if "ray start" in line
            for flag in re.findall(r"--[a-z-]+", line.partition("ray start")[2])}  # fmt: skip
    spec = manifests["RayCluster"]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        used |= {f"--{name}" for name in group["rayStartParams"]}
    assert len(used) > 5 and used <= known


def test_the_script_is_one_that_bash_understands():
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)
    if check := shutil.which("shellcheck"):
        subprocess.run([check, FOLDER / "slurm.sh"], check=True)


def test_the_script_calls_rookery_with_flags_that_exist(monkeypatch, tmp_path):
    from rookery.cli.main import main
    from rookery.core.errors import UsageError

    text = (FOLDER / "slurm.sh").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ *rookery train (.*) &$", text, re.MULTILINE)
    words = line.replace('"', "")
    for name, value in {
        "$address": "1.2.3.4:6379",
        "$RUN": str(tmp_path / "run"),
        "$actors": "8",
        "$cpus": "2",
    }.items():
        words = words.replace(name, value)
    seen = {}
    monkeypatch.setattr("rookery.run.run.start", lambda config, *more, **kw: seen.update(config=config) or 1 / 0)
    assert main(["train", *words.split()]) != UsageError.exit_code
    ray = seen["config"].ray
    assert (ray.address, ray.least, seen["config"].actors) == ("1.2.3.4:6379", 2, 8)
