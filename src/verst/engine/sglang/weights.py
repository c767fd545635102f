"""The mirror's weights into a server, and proof that it holds them.

A server reports success for tensors whose names it does not know, and a failed update leaves it half changed. So each
update is followed by SHA-256 of every tensor as the server must now hold it, in the dtype that it keeps it in.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from verst.engine.module_weights import tensor_hash
from verst.engine.sglang.contract import SglangClient, Way
from verst.errors import SyncError
from verst.weights.lora import LoraSpec, is_lora_parameter, lora_spec_of, target_layers
from verst.weights.manifest import Manifest

_SHARED_MEMORY = Path("/dev/shm")


class ServerWeights:
    """What one server holds of the transformer, or of each of a family's experts."""

    def __init__(self, client: SglangClient, transformer: nn.Module, *, dtype: torch.dtype, way: Way) -> None:
        """dtype: that the server was told to compute in."""
        self._client, self._dtype, self._way = client, dtype, way
        self._modules: dict[str, nn.Module] = (
            dict(transformer.named_children())
            if isinstance(transformer, nn.ModuleDict)
            else {"transformer": transformer}
        )
        self._kept: dict[str, dict[str, torch.dtype]] = {}
        """module -> tensors that the server keeps in another dtype."""
        self._wrapped: set[str] = set()
        """Modules whose layers the server has wrapped for a LoRA, with the base as it was."""

    def compare(self) -> int:
        """That a server that has begun holds the mirror's checkpoint, before anything is pushed; the number of its tensors.

        Raises SyncError where it holds other weights, or holds them under names of its own, so that nothing sent to it could
        be proven.
        """
        count = 0
        for name, module in self._modules.items():
            tensors = {key: t for key, t in module.state_dict().items() if not is_lora_parameter(key)}
            self._kept[name] = {}
            if problem := self._find_dtypes(name, tensors):
                raise SyncError(f"the server does not hold the checkpoint: {problem}")
            count += len(tensors)
        return count

    def know(self, other: ServerWeights) -> None:
        """What another has found out, of a server of the same kind: the mirror holds no checkpoint any more to compare."""
        self._kept = other._kept

    def _find_dtypes(self, module: str, tensors: Mapping[str, Tensor]) -> str | None:
        """Which tensors are kept in fp32, by halves; what fits neither way is the answer."""
        problem = self._client.mismatch(module, self._hashes(module, tensors))
        if problem is None:
            return None
        names = list(tensors)
        if len(names) == 1:
            if self._dtype == torch.float32:
                return problem
            self._kept[module][names[0]] = torch.float32
            return self._client.mismatch(module, self._hashes(module, tensors))
        half = len(names) // 2
        for part in (names[:half], names[half:]):
            if found := self._find_dtypes(module, {name: tensors[name] for name in part}):
                return found
        return None

    def push(self, manifest: Manifest) -> None:
        """What the mirror has just taken by `manifest`. Raises SyncError or EngineError; the server may hold anything then."""
        finetune = manifest["finetune"]
        for name, module in self._modules.items():
            if finetune["type"] == "full":
                self._push_whole(name, dict(module.named_parameters()))
            elif finetune["form"] == "merged":
                layers = target_layers(module, LoraSpec.from_dict(finetune))
                self._push_whole(name, {f"{path}.weight": layer.weight for path, layer in layers.items()})
            else:
                self._push_pairs(name, module)

    def _push_whole(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        if self._way == "disk":
            self._push_file(module, tensors)
        else:
            self._client.update(module, tensors, way=self._way)
        self._prove(module, self._hashes(module, tensors))

    def _push_file(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="verst-sglang-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
        try:
            (folder / module).mkdir()
            contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            safetensors.torch.save_file(contiguous, folder / module / "model.safetensors")
            self._client.update(module, tensors, way="disk", folder=folder)
        finally:
            shutil.rmtree(folder)

    def _push_pairs(self, module: str, mirror: nn.Module) -> None:
        spec = lora_spec_of(mirror)
        if spec is None:
            raise SyncError(f"LoRA pairs were announced, and {module} has no LoRA layer")
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        expected: dict[str, Tensor] = {}
        for layer, (a, b) in _pairs(mirror).items():
            pairs[layer] = (a.to(self._dtype), b.to(self._dtype))
            expected |= {f"{layer}.lora_A": pairs[layer][0], f"{layer}.lora_B": pairs[layer][1]}
            if module not in self._wrapped:
                # Gigabytes, which nothing changes from then on.
                expected[f"{layer}.base_layer.weight"] = mirror.get_submodule(layer).get_parameter("base_layer.weight")
        self._client.update_lora(module, pairs, rank=spec.rank, alpha=spec.alpha)
        self._prove(module, {name: tensor_hash(t.to(self._dtype)) for name, t in expected.items()})
        self._wrapped.add(module)

    def _prove(self, module: str, hashes: Mapping[str, str]) -> None:
        if problem := self._client.mismatch(module, hashes):
            raise SyncError(f"the server took an update of {len(hashes)} tensors and holds others: {problem}")

    def _hashes(self, module: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        kept = self._kept.get(module, {})
        return {name: tensor_hash(tensor.to(kept.get(name, self._dtype))) for name, tensor in tensors.items()}


def _pairs(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """layer -> A, B."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        if is_lora_parameter(name):
            layer, _, rest = name.rpartition(".lora_")
            found.setdefault(layer, {})[rest[0]] = parameter.detach()
    return {layer: (pair["A"], pair["B"]) for layer, pair in found.items()}
