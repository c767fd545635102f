"""The files under examples/cluster: scripts that bash reads, and KubeRay's documented fields alone."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from verst.config import RlRecipe, load_recipe

EXAMPLES = Path(__file__).parents[1] / "examples" / "cluster"
GRPO = Path(__file__).parent / "data" / "grpo.toml"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))

# ray.io/v1, from KubeRay's API reference (ray-project.github.io/kuberay/reference/api).
CLUSTER = {
    "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling", "authOptions",
    "gcsFaultToleranceOptions", "upgradeStrategy", "headGroupSpec", "rayVersion", "workerGroupSpecs",
}  # fmt: skip
HEAD = {"template", "headService", "enableIngress", "resources", "labels", "rayStartParams", "serviceType"}
WORKER = {
    "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds", "resources", "labels",
    "rayStartParams", "template", "scaleStrategy", "numOfHosts",
}  # fmt: skip
JOB = {
    "activeDeadlineSeconds", "preRunningDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate",
    "metadata", "clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML",
    "jobId", "submissionMode", "entrypointResources", "entrypointNumCpus", "entrypointNumGpus",
    "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
RAY_START = {"num-cpus", "num-gpus", "resources", "node-ip-address", "dashboard-host", "object-store-memory"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_scripts(script: Path):
    assert script.read_text().splitlines()[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_bare_says_how_it_is_used():
    done = subprocess.run([EXAMPLES / "bare.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)


def check_cluster(spec: dict[str, Any]) -> None:
    assert set(spec) <= CLUSTER
    assert set(spec["headGroupSpec"]) <= HEAD
    groups = spec["workerGroupSpecs"]
    assert all(set(group) <= WORKER for group in groups)
    assert len({group["groupName"] for group in groups}) == len(groups)
    for group in (spec["headGroupSpec"], *groups):
        params = group["rayStartParams"]
        assert set(params) <= RAY_START
        assert all(isinstance(value, str) for value in params.values())
        if "resources" in params:
            # The value stands in a shell command: quoted, then JSON.
            (text,) = shlex.split(params["resources"])
            assert all(amount > 0 for amount in json.loads(text).values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
    for group in groups:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_ray_cluster():
    document = yaml.safe_load((EXAMPLES / "raycluster.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayCluster")
    check_cluster(document["spec"])


def test_ray_job_runs_a_command_that_a_recipe_takes():
    document = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayJob")
    spec = document["spec"]
    assert set(spec) <= JOB
    check_cluster(spec["rayClusterSpec"])
    program, command, path, *overrides = shlex.split(spec["entrypoint"])
    assert (program, command, path) == ("verst", "train", "/shared/recipes/recipe.toml")
    more = ["rollout.num_groups=16", 'model.finetune={type="lora"}']
    recipe = load_recipe(GRPO, [*overrides, *more])
    assert isinstance(recipe, RlRecipe)
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert recipe.trainer.ranks == workers["replicas"] * int(limits["nvidia.com/gpu"])
