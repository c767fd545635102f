"""The Ray that a run lives in: one of its own, or a cluster that is there."""

from __future__ import annotations

import logging
import os
import resource
import sys

import ray

from verst.config.plan import process_plan
from verst.config.recipe import RlRecipe
from verst.errors import ConfigError

_OPEN_FILES = 2**18


def connect(recipe: RlRecipe) -> None:
    """Start a local Ray, or attach to `cluster.address`. Raises ConfigError where a local one has too few CPUs."""
    allow_open_files()
    config = recipe.cluster
    environment = _environment(recipe)
    if config.address is not None:
        ray.init(config.address, runtime_env={"env_vars": environment}, log_to_driver=False)
        return
    cpus = config.num_cpus or os.cpu_count() or 1
    asked = sum(p.cpus * p.count for p in process_plan(recipe))
    if asked > cpus:
        raise ConfigError(
            f"the run's processes ask for {asked:g} CPUs, local Ray has {cpus}; raise cluster.num_cpus "
            f"(a logical count) to {int(asked + 0.99)} or ask for fewer processes"
        )
    # Worker processes of a local Ray inherit this; it must be there before they import torch.
    os.environ.update(environment)
    ray.init(
        "local",  # whatever RAY_ADDRESS says
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=config.object_store_bytes,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def allow_open_files() -> None:
    """As many as the system lets this process and its children have: every answer that is held is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _environment(recipe: RlRecipe) -> dict[str, str]:
    """Environment of every process, read when torch is imported there."""
    threads = recipe.run.threads or os.cpu_count() or 1
    environment = {
        # Waiting threads sleep: with spinning, two busy processes on two cores slow each other down many times over.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if recipe.cluster.address is None:
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return environment
