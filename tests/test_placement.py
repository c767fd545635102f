"""Who stands where: what a recipe reserves, what is refused, and what Ray then does on two nodes."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster as Nodes
from run_fixtures import final_tensors, recipe_with, run_to_end, write_recipe
from trainer_fixtures import LORA

from verst.cluster.nodes import (
    SharedFolders,
    advertised,
    check_addresses,
    check_seen,
    unseen,
    with_absolute_paths,
)
from verst.cluster.placement import Placement, bundles_of, room_problem
from verst.config import RlRecipe, load_recipe
from verst.config.plan import process_plan
from verst.errors import ConfigError
from verst.trainer.topology import Place

GRPO = Path(__file__).parent / "data" / "grpo.toml"
COLOCATED = 'cluster.placement={type="colocated"}'
SEPARATE = 'cluster.placement={type="separate", trainer_nodes="trainer", engine_nodes="engine"}'
TWO = ("trainer.ranks=2", "engine.num=2")


def recipe(*overrides: str) -> RlRecipe:
    loaded = load_recipe(GRPO, overrides)
    assert isinstance(loaded, RlRecipe)
    return loaded


def test_free_placement_reserves_nothing():
    assert bundles_of(recipe(), cuda=True) == []


def test_colocated_pairs_share_a_gpu():
    (group,) = bundles_of(recipe(COLOCATED, *TWO), cuda=True)
    assert (group.roles, group.count, group.strategy) == (("trainer", "engine"), 2, "PACK")
    assert group.resources == {"CPU": 1.0, "GPU": 1.0}
    assert bundles_of(recipe(COLOCATED), cuda=False)[0].resources == {"CPU": 1.0}


def test_separate_processes_have_a_gpu_each_less_a_sliver_for_rewards():
    reward = 'rewards=[{type="clip_score",path="clip",device="cuda"}]'
    trainer, engine = bundles_of(recipe(SEPARATE, "trainer.ranks=2", reward), cuda=True)
    assert (trainer.roles, trainer.count, engine.roles, engine.count) == (("trainer",), 2, ("engine",), 1)
    assert trainer.resources == {"CPU": 0.5, "GPU": 0.999, "trainer": 0.001}
    assert engine.resources == {"CPU": 0.5, "GPU": 0.999, "engine": 0.001}


def test_colocated_needs_an_engine_for_each_rank():
    with pytest.raises(ConfigError, match=r"engine\.num = 1 and trainer\.ranks = 2; use engine\.num = 2"):
        recipe(COLOCATED, "trainer.ranks=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((SEPARATE, 'cluster.sleep.engine="host"'), r"placement\.type = separate frees GPUs that nobody else uses"),
        (('cluster.sleep.engine="host"', 'schedule={type="async"}'), r"schedule\.staleness = 1 .*use off, or"),
        (
            ('cluster.sleep.engine="drop"', 'model.finetune={type="lora"}'),
            r"finetune\.type = lora does not bring; use host",
        ),
    ],
)
def test_sleep_that_makes_no_sense_is_refused(overrides: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        recipe(*overrides)


@pytest.mark.parametrize(
    ("placement", "nodes", "problem"),
    [
        ('{type="colocated"}', [{"CPU": 8, "GPU": 2}], None),
        ('{type="colocated"}', [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 1}], None),
        ('{type="colocated"}', [{"CPU": 8, "GPU": 1}], "2 x 1 CPU, 1 GPU for trainer with engine .PACK. do not fit"),
        ('{type="colocated"}', [{"CPU": 1, "GPU": 4}], "do not fit: 1 nodes have 1 CPU, 4 GPU"),
        (
            '{type="colocated", strategy="STRICT_PACK"}',
            [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 1}],
            "do not fit on one node",
        ),
        ('{type="colocated", strategy="STRICT_SPREAD"}', [{"CPU": 8, "GPU": 8}], "need 2 nodes, 1 of them"),
        ('{type="separate"}', [{"CPU": 8, "GPU": 4}], None),
        ('{type="separate"}', [{"CPU": 8, "GPU": 3}], "ask for 4 GPUs together, 1 nodes have 3"),
        ('{type="separate", engine_nodes="x"}', [{"CPU": 8, "GPU": 4}], "0.001 x for engine"),
        ('{type="separate", engine_nodes="x"}', [{"CPU": 8, "GPU": 4, "x": 1}], None),
    ],
)
def test_too_small_machines_are_told_what_they_lack(placement, nodes, problem):
    found = room_problem(bundles_of(recipe(f"cluster.placement={placement}", *TWO), cuda=True), nodes)
    if problem is None:
        assert found is None
    else:
        assert re.search(problem, found), found


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes on this machine, one marked for trainers, one for engines."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (else workers wait for everybody else)
    nodes = Nodes(
        initialize_head=True,
        head_node_args={"num_cpus": 3, "resources": {"trainer": 1}, "include_dashboard": False},
    )
    nodes.add_node(num_cpus=3, resources={"engine": 1})
    ray.init(nodes.address, log_to_driver=False, logging_level="error")
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


async def nodes_of(folder: Path, address: str, *overrides: str) -> dict[str, list[str]]:
    """role -> node of each of two processes, placed as the cluster places them."""

    class Whereabouts:  # here, so that it travels by value: workers cannot import tests
        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

    config = recipe_with(folder, f'cluster.address="{address}"', "cluster.wait_s=2", *TWO, *overrides)
    placement = Placement(config, cuda=False)
    try:
        await placement.reserve()
        actors = {
            role: [
                ray.remote(Whereabouts).options(num_cpus=0.5, **placement.options(role, i)).remote() for i in range(2)
            ]
            for role in ("trainer", "engine")
        }
        return {role: ray.get([actor.node.remote() for actor in pair]) for role, pair in actors.items()}
    finally:
        placement.release()


@pytest.mark.ray
def test_two_nodes(tmp_path: Path, two_nodes: str):
    def place(*overrides: str) -> dict[str, list[str]]:
        return asyncio.run(nodes_of(tmp_path, two_nodes, *overrides))

    placed = place(SEPARATE)
    assert len(set(placed["trainer"])) == len(set(placed["engine"])) == 1
    assert placed["trainer"] != placed["engine"]
    placed = place('cluster.placement={type="colocated", strategy="STRICT_SPREAD"}')
    assert placed["trainer"] == placed["engine"]
    assert len(set(placed["trainer"])) == 2
    with pytest.raises(ConfigError, match=r"0\.001 moon for trainer .*nodes have"):
        place('cluster.placement={type="separate", trainer_nodes="moon"}')


SMALL_RUN = (
    "run.iterations=2",
    "rollout.num_groups=1",
    "rollout.group_size=2",
    "sampling.num_steps=3",
    "checkpoint.every=2",
    LORA,
)


@pytest.mark.ray
def test_two_nodes_end_with_the_bits_of_one(tmp_path: Path, two_nodes: str):
    """Engine and trainer on nodes of their own, against both on one device with one base, where the engine sleeps."""
    attached = f'cluster.address="{two_nodes}"'
    ends = []
    for name, overrides in {
        "one": ('cluster.placement={type="colocated", share_base=true}', 'cluster.sleep.engine="host"'),
        "two": (SEPARATE, 'sync={type="collective"}'),
    }.items():
        given = (*SMALL_RUN, f'run.name="{name}"', attached, *overrides)
        code, output = run_to_end(write_recipe(tmp_path, *given), *given, timeout_s=900)
        assert code == 0, output
        ends.append(final_tensors(tmp_path / "runs" / name))
    one, two = ends
    assert one.keys() == two.keys()
    assert all(torch.equal(two[name], value) for name, value in one.items())


def test_paths_are_absolute_where_they_lead_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    table = with_absolute_paths(recipe('model.path="models/tiny"', 'run.folder="runs"'))
    assert (table.model.path, table.run.folder) == (tmp_path / "models" / "tiny", tmp_path / "runs")
    hub = with_absolute_paths(recipe('model.path="somebody/something"'))
    assert hub.model.path == Path("somebody/something")


def test_a_node_without_the_shared_folder_is_named(tmp_path: Path):
    config = recipe(f'run.folder="{tmp_path}"', f'model.path="{tmp_path}"')
    folders = SharedFolders(config)
    assert unseen(folders.wanted) == []
    folders.marks["run.folder"].unlink()
    found = unseen(folders.wanted)
    with pytest.raises(ConfigError, match=r"run\.folder = .* is not there for the trainer rank 1 on node 10\.0\.0\.2"):
        check_seen([("trainer rank 0", "10.0.0.1", []), ("trainer rank 1", "10.0.0.2", found)], folders.wanted)
    folders.remove()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_engines_that_only_their_own_machine_reaches_are_refused_elsewhere():
    here, there = Place(host="a", device="cpu"), Place(host="b", device="cpu")
    check_addresses("127.0.0.1", here, [here])
    check_addresses(None, here, [there])
    check_addresses("0.0.0.0", here, [there])
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(ConfigError, match=r"1 engines are on others than the driver: leave engine\.host unset"):
            check_addresses(host, here, [here, there])


def test_a_server_on_all_interfaces_advertises_its_nodes_address():
    assert advertised("http://0.0.0.0:30000", "10.0.0.7") == "http://10.0.0.7:30000"
    assert advertised("http://[::]:30000", "10.0.0.7") == "http://10.0.0.7:30000"
    assert advertised("http://10.0.0.3:30000", "10.0.0.7") == "http://10.0.0.3:30000"


def test_ranks_of_an_engine_need_a_gpu_each() -> None:
    several = recipe("engine.parallel.ulysses=2")
    assert next(p.count for p in process_plan(several) if p.role == "engine") == 2
    with pytest.raises(
        ConfigError, match=r"type = free may put the 2 ranks of an engine \(engine\.parallel\) on one GPU"
    ):
        Placement(several, cuda=True)
    Placement(several, cuda=False)
    Placement(recipe("engine.parallel.ulysses=2", SEPARATE), cuda=True)
