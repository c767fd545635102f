"""The receiving end: all tensors or none, and a certificate over what the module then holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verst.errors import ConfigError, SyncError
from verst.weights.digest import Digester, Ledger, has_kernel, kind_of
from verst.weights.fill import Filler
from verst.weights.lora import LoraSpec, attach_lora, detach_lora, is_lora_parameter, lora_spec_of
from verst.weights.manifest import Certificate, Manifest, TensorEntry
from verst.weights.merge import MergedLora
from verst.weights.transports import RECEIVERS, Incoming, Receiver


class _Targets:
    """Where the tensors of one layout go."""

    def __init__(self, key: Any, places: dict[str, Tensor], layout: Sequence[Sequence[TensorEntry]]) -> None:
        self.key, self.places = key, places
        self._fillers = [Filler([places[entry["name"]] for entry in entries]) for entries in layout]
        self._ledger = Ledger((e["name"], e["dtype"], e["shape"]) for entries in layout for e in entries)
        self._digester = Digester(places)
        self._sha256 = Digester(places, "sha256")
        # Without the kernel a filler reads the places every time.
        self._was_read_back = not any(has_kernel(place.device) for place in places.values())

    def fill(self, bucket: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """The digests of the bucket's tensors as written; tensors in the layout's order."""
        return self._fillers[bucket].fill(list(tensors.values())).digests

    def digest(self, written: Sequence[Tensor], sent: str) -> str:
        """Of what is held now, of the kind of `sent`."""
        if kind_of(sent) == "sha256":
            return self._sha256.digest()
        held = self._ledger.digest(torch.cat(list(written)))
        if not self._was_read_back and held == sent:
            # Once for each layout the places themselves are read again: that the words went where the module has its
            # weights is then no assumption.
            self._was_read_back = True
            return self._digester.digest()
        return held


class WeightReceiver:
    """Writes announced tensors into `module`'s parameters, from one publication to the next."""

    def __init__(self, module: nn.Module, *, device: torch.device, base_is_borrowed: bool = False) -> None:
        """base_is_borrowed: what is no LoRA is another process's memory and is never written."""
        self._module, self._device, self._base_is_borrowed = module, device, base_is_borrowed
        self._transports: dict[str, Receiver] = {}
        self._merged: MergedLora | None = None
        self._known: _Targets | None = None
        self.invalid: str | None = None
        """Why the weights are of no version at all: an update broke off in the middle. None = they are whole."""

    @property
    def holds_merged_lora(self) -> bool:
        return self._merged is not None

    def apply(self, manifest: Manifest) -> Certificate:
        """Take the weights of one publication.

        LoRA layers are attached, or base weights put aside, at the first LoRA manifest. Names, shapes, dtypes and the
        transport are checked before the first byte is written; raises SyncError, and the module is then as it was.
        What goes wrong after that (the sender dies, a checksum differs) raises SyncError too and leaves `invalid` set
        until an update arrives whole.
        """
        was_fresh = lora_spec_of(self._module) is None and self._merged is None
        transport = self._transport(manifest)
        writing = False
        try:
            targets = self._check(manifest, transport)
            with transport.open(manifest) as incoming:
                writing = True
                return self._write(manifest, targets, incoming)
        except SyncError:
            if was_fresh and not writing:
                self._forget_lora()
            raise

    def forget_values(self) -> None:
        """The module's weights were given up: it computes nothing until an update arrives whole."""
        self.invalid = "they were given up while the engine slept"

    def to(self, device: torch.device) -> None:
        """Move what is kept beside the module."""
        if self._merged is not None:
            self._merged.to(device)
            self._known = None

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _write(self, manifest: Manifest, targets: _Targets, incoming: Incoming) -> Certificate:
        version = manifest["version"]
        self.invalid = f"the update to version {version} broke off in the middle"
        written = [targets.fill(number, tensors) for number, tensors in enumerate(incoming.buckets())]
        sent = incoming.digest()
        held = targets.digest(written, sent)
        if held != sent:
            self.invalid = f"version {version} arrived damaged"
            raise SyncError(
                f"digest of what the engine holds is {held}, expected {sent}: version {version} was damaged on its way"
            )
        if self._merged is not None:
            self._merged.merge()
        self.invalid = None
        return Certificate(version=version, num_applied=len(targets.places), digest=held)

    def _check(self, manifest: Manifest, transport: Receiver) -> _Targets:
        layout = [bucket["tensors"] for bucket in manifest["buckets"]]
        key = (manifest["finetune"], layout)
        # A module has a thousand parameters, and the same ones every time.
        if self._known is not None and self._known.key == key:
            return self._known
        try:
            targets = self._targets(manifest["finetune"])
            _check_entries([entry for entries in layout for entry in entries], targets)
        except SyncError as error:
            transport.refuse(manifest, str(error))
            raise
        self._known = _Targets(key, targets, layout)
        return self._known

    def _targets(self, finetune: Mapping[str, Any]) -> dict[str, Tensor]:
        attached = lora_spec_of(self._module)
        held = self._merged.spec if self._merged else attached
        if self._base_is_borrowed and (finetune["type"] == "full" or finetune["form"] == "merged"):
            raise SyncError(
                "the engine computes with the trainer's own frozen weights (cluster.placement.share_base), which nobody may "
                "overwrite: send LoRA pairs (sync.lora = pairs). Nothing was changed."
            )
        if finetune["type"] == "full":
            if held is not None:
                raise SyncError("full weights were sent to an engine that holds a LoRA; restart the engine")
            return dict(self._module.named_parameters())
        sent = LoraSpec.from_dict(dict(finetune))
        sent = LoraSpec(rank=sent.rank, alpha=sent.alpha, targets=tuple(sorted(sent.targets)))
        merged = finetune["form"] == "merged"
        if held is not None and (held != sent or merged != self.holds_merged_lora):
            form = "merged" if self.holds_merged_lora else "pairs"
            raise SyncError(
                f"a LoRA of {sent} in the form {finetune['form']!r} was sent to an engine that holds {held} in the form "
                f"{form!r}; restart the engine"
            )
        try:
            if merged:
                self._merged = self._merged or MergedLora(self._module, sent)
                return dict(self._merged.pairs())
            if held is None:
                attach_lora(self._module, sent)
                self._module.requires_grad_(False)
        except ConfigError as error:
            raise SyncError(str(error)) from error
        return {name: p for name, p in self._module.named_parameters() if is_lora_parameter(name)}

    def _forget_lora(self) -> None:
        self._known = self._merged = None
        if lora_spec_of(self._module) is not None:
            detach_lora(self._module)

    def _transport(self, manifest: Manifest) -> Receiver:
        name = manifest["transport"]
        if name not in RECEIVERS:
            raise SyncError(f"transport {name!r} is unknown here; known: {', '.join(RECEIVERS)}")
        if name not in self._transports:
            self._transports[name] = RECEIVERS[name](self._device)
        return self._transports[name]


def _check_entries(entries: Sequence[TensorEntry], targets: Mapping[str, Tensor]) -> None:
    _check_names({entry["name"] for entry in entries}, set(targets))
    for entry in entries:
        own = targets[entry["name"]]
        sent = (entry["dtype"], tuple(entry["shape"]))
        held = (str(own.dtype).removeprefix("torch."), tuple(own.shape))
        if sent != held:
            raise SyncError(
                f"{entry['name']} was sent as {sent[0]}{list(sent[1])}, the engine holds {held[0]}{list(held[1])}"
            )


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
