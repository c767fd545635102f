"""LoRA in the one form that engine and trainer share: unmerged, by PEFT, on a diffusers model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from verst.errors import ConfigError

ADAPTER = "default"


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float
    """The update is (alpha / rank) B A."""
    targets: tuple[str, ...]
    """Module name suffixes."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LoraSpec:
        return cls(rank=data["rank"], alpha=data["alpha"], targets=tuple(data["targets"]))


def attach_lora(module: nn.Module, spec: LoraSpec) -> int:
    """Wrap the target layers; returns how many. A starts random from torch's generator, B at 0.

    Raises ConfigError when a target matches no layer: an adapter that binds to nothing would train in silence.
    """
    target_layers(module, spec)
    config = LoraConfig(
        r=spec.rank, lora_alpha=cast(int, spec.alpha), target_modules=list(spec.targets), lora_dropout=0.0, bias="none"
    )
    for model in adaptable(module):
        model.add_adapter(config, adapter_name=ADAPTER)
        # PEFT shortens a long list of targets in its own config, which then no longer says what was asked for.
        model.verst_lora = spec
    return sum(isinstance(layer, LoraLayer) for layer in module.modules())


def target_layers(module: nn.Module, spec: LoraSpec) -> dict[str, nn.Linear]:
    """name -> layer of those that the LoRA adapts. Raises ConfigError for a target that matches none."""
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}

    def matched(target: str) -> set[str]:
        return {name for name in linear if name == target or name.endswith("." + target)}

    idle = [target for target in spec.targets if not matched(target)]
    if idle:
        raise ConfigError(
            f"LoRA targets {', '.join(idle)} match no linear layer of {type(module).__name__}; "
            f"layers there are called like {', '.join(sorted({n.split('.', 2)[-1] for n in linear})[:8])}"
        )
    wanted = set().union(*(matched(target) for target in spec.targets))
    return {name: layer for name, layer in linear.items() if name in wanted}


def detach_lora(module: nn.Module) -> None:
    """Undo `attach_lora`: the layers and their names are as they were."""
    for model in adaptable(module):
        model.unload_lora()


def adaptable(module: nn.Module) -> list[Any]:
    """The diffusers models inside: the module itself, or each expert of a ModuleDict."""
    return list(module.children()) if isinstance(module, nn.ModuleDict) else [module]


def is_lora_parameter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def lora_spec_of(module: nn.Module) -> LoraSpec | None:
    """The LoRA that `attach_lora` put on a module, targets sorted; None where there is none."""
    if not any(isinstance(layer, LoraLayer) for layer in module.modules()):
        return None
    spec: LoraSpec = adaptable(module)[0].verst_lora
    return replace(spec, targets=tuple(sorted(spec.targets)))
