"""The receiving end: all tensors or none, and a certificate over what the module then holds."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from verst.errors import ConfigError, SyncError
from verst.weights.block import open_block
from verst.weights.lora import LoraSpec, attach_lora, detach_lora, is_lora_parameter, lora_spec_of
from verst.weights.manifest import Certificate, Manifest, digest_of, view_in


def apply_manifest(manifest: Manifest, module: nn.Module) -> Certificate:
    """Write the announced tensors into `module`'s parameters.

    LoRA layers are attached at the first LoRA manifest. Everything is checked before the first byte is written.
    Raises SyncError for names that do not match, missing ones, other shapes or dtypes; the module is then as it was.
    """
    is_new_lora = manifest["finetune"]["type"] == "lora" and lora_spec_of(module) is None
    try:
        return _apply(manifest, module)
    except SyncError:
        if is_new_lora:
            detach_lora(module)
        raise


def _apply(manifest: Manifest, module: nn.Module) -> Certificate:
    targets = _target_parameters(manifest, module)
    entries = {entry["name"]: entry for bucket in manifest["buckets"] for entry in bucket["tensors"]}
    _check_names(set(entries), set(targets))
    for name, entry in entries.items():
        own = targets[name]
        sent = (entry["dtype"], tuple(entry["shape"]))
        held = (str(own.dtype).removeprefix("torch."), tuple(own.shape))
        if sent != held:
            raise SyncError(f"{name} was sent as {sent[0]}{list(sent[1])}, the engine holds {held[0]}{list(held[1])}")
    with ExitStack() as stack, torch.no_grad():
        blocks = [stack.enter_context(open_block(b["handle"], b["nbytes"])) for b in manifest["buckets"]]
        for block, bucket in zip(blocks, manifest["buckets"], strict=True):
            for entry in bucket["tensors"]:
                targets[entry["name"]].copy_(view_in(block, entry))
        del block
        blocks.clear()
    digest = digest_of({name: targets[name] for name in entries})
    return Certificate(version=manifest["version"], num_applied=len(entries), digest=digest)


def _target_parameters(manifest: Manifest, module: nn.Module) -> dict[str, Tensor]:
    held = lora_spec_of(module)
    if manifest["finetune"]["type"] == "full":
        if held is not None:
            raise SyncError("full weights were sent to an engine that holds a LoRA; restart the engine")
        return dict(module.named_parameters())
    sent = LoraSpec.from_dict(manifest["finetune"])
    sent = LoraSpec(rank=sent.rank, alpha=sent.alpha, targets=tuple(sorted(sent.targets)))
    if held is None:
        try:
            attach_lora(module, sent)
        except ConfigError as error:
            raise SyncError(str(error)) from error
        module.requires_grad_(False)
    elif held != sent:
        raise SyncError(f"a LoRA of {sent} was sent to an engine that holds {held}; restart the engine")
    return {name: p for name, p in module.named_parameters() if is_lora_parameter(name)}


def _check_names(sent: set[str], held: set[str]) -> None:
    if sent == held and sent:
        return
    unmatched, missing = sorted(sent - held), sorted(held - sent)
    parts = [f"{len(sent & held)} of {len(held)} tensors match"]
    if unmatched:
        parts.append(f"sent but unknown to the engine: {', '.join(unmatched[:3])} ({len(unmatched)})")
    if missing:
        parts.append(f"held by the engine but not sent: {', '.join(missing[:3])} ({len(missing)})")
    raise SyncError("; ".join(parts) + ". Nothing was changed.")
