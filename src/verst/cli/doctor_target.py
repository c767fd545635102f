"""What `verst doctor` finds of a model folder or a recipe: files that are there and whole, and whether they fit here."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from verst.cli.doctor import Finding
from verst.cli.doctor_machine import GIB, compiler, disk, open_files, ports, shared_memory, usable_gpus
from verst.config.recipe import Recipe, RlRecipe
from verst.config.sections import SglangEngine
from verst.errors import ConfigError, EngineError, ModelError, VerstError

_POINTER = b"version https://git-lfs"
"""How the text begins that git leaves in a large file's place until git-lfs has fetched it."""


def target_findings(target: Path) -> list[Finding]:
    """target: a model folder or a recipe; one that is not there or cannot be read is a finding too."""
    if target.is_dir():
        return [*model_findings(target), room(target)]
    from verst.config import load_recipe, missing_files

    try:
        recipe = load_recipe(target)
    except ConfigError as error:
        return [
            Finding(name="recipe", level="fail", text=str(error), remedy="`verst plan` prints a recipe as it is read")
        ]
    findings = [Finding(name="recipe", level="ok", text=f"{target} can be read")]
    findings += [
        Finding(
            name="files",
            level="fail",
            text=line,
            remedy="correct the path, or start verst in the folder it is relative to",
        )
        for line in missing_files(recipe)
    ]
    if recipe.model.path.is_dir():
        findings += [*model_findings(recipe.model.path), room(recipe.model.path)]
    return [*findings, *recipe_findings(recipe)]


def model_findings(folder: Path) -> list[Finding]:
    """Family and files of a folder in the diffusers layout."""
    try:
        from verst.families import recognise

        family = recognise(folder)
    except VerstError as error:
        remedy = "give the folder that holds model_index.json, of a family in docs/families.md"
        return [Finding(name="model", level="fail", text=str(error), remedy=remedy)]
    except (ImportError, OSError) as error:
        remedy = "mend the packages named above first"
        return [Finding(name="model", level="fail", text=f"families cannot be imported: {error}", remedy=remedy)]
    broken = list(broken_files(folder))
    if broken:
        shown = "; ".join(broken[:4]) + (f"; and {len(broken) - 4} more" if len(broken) > 4 else "")
        remedy = "download the folder again, or `git lfs pull` in it"
        return [Finding(name="model", level="fail", text=f"{family.name}, but {shown}", remedy=remedy)]
    return [Finding(name="model", level="ok", text=f"{family.name}, {_size(folder) / GIB:.1f} GiB in {folder}")]


def broken_files(folder: Path) -> Iterator[str]:
    """One line for each component, shard or file of a model folder that is missing or only points to its contents."""
    from verst.families.loading import index_file

    index: dict[str, object] = json.loads(index_file(folder).read_text())
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) > 1 and entry[1] is not None and not (folder / name).is_dir():
            yield f"folder {name} is missing"
    for path in sorted(folder.rglob("*.index.json")):
        try:
            shards = set(json.loads(path.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            yield f"{path.relative_to(folder)} is no index of shards"
            continue
        missing = sorted(shard for shard in shards if not (path.parent / shard).exists())
        for shard in missing:
            yield f"{path.parent.name}/{shard} is missing"
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                yield f"{path.relative_to(folder)} is a git-lfs pointer"


def room(folder: Path) -> Finding:
    """Whether host memory takes the model once, through which it is loaded."""
    import psutil

    free, size = psutil.virtual_memory().available, _size(folder)
    text = f"the model's files are {size / GIB:.1f} GiB, {free / GIB:.1f} GiB of memory are free"
    if size <= free:
        return Finding(name="room", level="ok", text=text)
    remedy = "use a machine with more memory; `verst plan --memory` says what a rank and an engine need on a GPU"
    return Finding(name="room", level="warn", text=text, remedy=remedy)


def recipe_findings(recipe: Recipe) -> list[Finding]:
    """What it asks of the machine beyond what every run does."""
    folder = recipe.run.folder
    while not folder.exists():
        folder = folder.parent
    findings = [disk(folder, shutil.disk_usage(folder).free)]
    if recipe.model.compile == "inductor":
        findings.append(compiler(os.environ, asked=True))
    if isinstance(recipe, RlRecipe):
        findings += _rl_findings(recipe)
    return findings


def _rl_findings(recipe: RlRecipe) -> list[Finding]:
    from verst.config.plan import batch_plan, num_gpus

    shm = Path("/dev/shm")
    held = 2 * batch_plan(recipe).microgroups + 512
    findings = [
        shared_memory(shutil.disk_usage(shm).free if shm.exists() else None, recipe.cluster.object_store_bytes),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1], held),
    ]
    if recipe.engine.port:
        findings.append(ports(recipe.engine.port, recipe.engine.num))
    if recipe.engine.router.enabled and recipe.engine.router.port:
        findings.append(ports(recipe.engine.router.port, key="engine.router.port"))
    if isinstance(recipe.engine, SglangEngine):
        findings += _sglang_findings(recipe.engine)
    if recipe.run.device == "cpu" or recipe.cluster.address is not None:
        return findings
    asked, there = num_gpus(recipe), usable_gpus()
    text = f"the recipe takes {asked}, {there} can be used here"
    if there == 0 and recipe.run.device == "auto":
        return [
            *findings,
            Finding(name="gpus", level="ok", text="none can be used here, so run.device = auto takes processors"),
        ]
    if there >= asked:
        return [*findings, Finding(name="gpus", level="ok", text=text)]
    remedy = "lower trainer.ranks and engine.num, or cluster.placement.type = colocated, or name a cluster.address"
    return [*findings, Finding(name="gpus", level="fail", text=text, remedy=remedy)]


def _sglang_findings(engine: SglangEngine) -> list[Finding]:
    """Of the command that servers are launched by, or of those that run already."""
    from verst.engine.sglang.contract import OLDEST, SglangClient, release
    from verst.engine.sglang.process import check_executable

    if not engine.urls:
        try:
            check_executable(engine.executable)
        except ConfigError as error:
            return [Finding(name="sglang", level="fail", text="no server can be launched", remedy=str(error))]
        return [Finding(name="sglang", level="ok", text=f"servers are launched by {engine.executable}")]
    findings = []
    for url in engine.urls:
        client = SglangClient(url, timeout_s=5.0)
        try:
            version = client.server_version()
        except (EngineError, ModelError) as error:
            remedy = "start it first, or leave engine.urls out and let the run launch servers"
            findings.append(Finding(name="sglang", level="fail", text=str(error), remedy=remedy))
            continue
        finally:
            client.close()
        fits = release(version) >= OLDEST
        remedy = "" if fits else f"install {'.'.join(map(str, OLDEST))} or newer there"
        findings.append(
            Finding(name="sglang", level="ok" if fits else "fail", text=f"{url} is SGLang {version}", remedy=remedy)
        )
    return findings


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
