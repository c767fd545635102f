"""SANA: diffusers' SanaPipeline layout."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.loading import config_of, load_components, take_contiguous
from verst.families.sequence import Blocks, SequencePlan
from verst.families.sizes import check_is_image, check_pixels
from verst.families.video import euler_on_flow_sigmas, module_dtype, whole_timesteps
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}


class Sana:
    """Pictures are made in the size that is asked for: diffusers' resolution binning is left off."""

    name: str = "sana"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v")
    fsdp_blocks: tuple[str, ...] = ("SanaTransformerBlock",)
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={},
                attention={},
                linear=("attn1",),
                convolutions=("ff.conv_depth",),
                rows=("height", "width"),
            ),
        ),
        heads=(),
    )
    fp32_modules: tuple[str, ...] = ()
    unguided_scale: float = 1.0
    num_images: int = 0

    def __init__(self, *, whole_timesteps: bool = True, timestep_scale: float = 1.0) -> None:
        """whole_timesteps: the pipeline's scheduler rounds them down; timestep_scale: of the transformer's config."""
        self.whole_timesteps = whole_timesteps
        self.timestep_scale = timestep_scale

    def for_checkpoint(self, folder: Path) -> Sana:
        index = json.loads((folder / "model_index.json").read_text())
        config = json.loads((folder / "transformer" / "config.json").read_text())
        return type(self)(
            whole_timesteps=index["scheduler"][1] != "FlowMatchEulerDiscreteScheduler",
            timestep_scale=config.get("timestep_scale", 1.0),
        )

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        components = load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)
        for block in (
            components.modules["transformer"].transformer_blocks if "transformer" in components.modules else ()
        ):
            take_contiguous(block.attn1)
            take_contiguous(block.attn2)
        return components

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        texts = [prompt.lower().strip() for prompt in prompts]
        encoded = components.modules["tokenizer"](texts, truncation=False)["input_ids"]
        return [
            f"prompt {prompt!r} has {len(ids)} tokens, room is for {max_sequence_length}"
            for prompt, ids in zip(prompts, encoded, strict=True)
            if len(ids) > max_sequence_length
        ]

    def encode_prompts(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry | None = None,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """The encoder reads an instruction to enhance the prompt before it, but not before a negative prompt."""
        from diffusers import SanaPipeline

        instruction = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
        parts = {name: components.modules[name] for name in _PARTS["text"]}
        pipeline: Any = SanaPipeline(vae=None, transformer=None, scheduler=None, **parts)
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            device=components.device,
            max_sequence_length=max_sequence_length,
            complex_human_instruction=None if negative else instruction,
        )
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        size = config_of(components, "transformer")["sample_size"] * _vae_factor(components)
        # The defaults of SanaPipeline.__call__.
        return SamplingDefaults(
            geometry=Geometry(height=size, width=size),
            num_steps=20,
            guidance_scale=4.5,
            negative_prompt="",
            max_sequence_length=300,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        patch = config_of(components, "transformer").get("patch_size", 1)
        check_pixels(geometry, multiple=_vae_factor(components) * patch)
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = _vae_factor(components)
        channels = config_of(components, "transformer")["in_channels"]
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        del geometry  # SANA's shift is static
        return {"visual": euler_on_flow_sigmas(components, num_steps=num_steps, shift=shift)}

    def velocity(
        self,
        transformer: nn.Module,
        latents: Latents,
        sigmas: dict[str, Tensor],
        conditioning: Conditioning,
        *,
        guidance_scale: float,
        dtype: torch.dtype | None = None,
    ) -> Latents:
        dtype = dtype or module_dtype(transformer)
        x, timestep = latents["visual"], self._timestep(sigmas["visual"])
        side = conditioning.positive
        guided = guidance_scale > self.unguided_scale and conditioning.negative is not None
        if guided:
            assert conditioning.negative is not None
            # One doubled batch, negative rows first, as diffusers' pipeline does it.
            side = {name: torch.cat([conditioning.negative[name], rows]) for name, rows in side.items()}
            x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
        v: Tensor = transformer(
            x.to(dtype),
            encoder_hidden_states=side["encoder_hidden_states"].to(dtype),
            encoder_attention_mask=side["encoder_attention_mask"],
            timestep=timestep * self.timestep_scale,
            return_dict=False,
        )[0].float()
        if guided:
            negative, positive = v.chunk(2)
            v = classifier_free(positive, negative, guidance_scale)
        return {"visual": v[:, : x.shape[1]]}  # a model that also learned its variance has twice the channels

    def _timestep(self, sigma: Tensor) -> Tensor:
        """[B] int64, or fp32 with a scheduler that keeps fractions."""
        return whole_timesteps(sigma) if self.whole_timesteps else sigma.float() * 1000

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        pixels = media[:, 0].permute(0, 3, 1, 2).to(components.device, vae.dtype) / 127.5 - 1
        return {"visual": (vae.encode(pixels).latent * vae.config.scaling_factor).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        pixels = vae.decode(latents["visual"].to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
        return (pixels / 2 + 0.5).clamp(0, 1).float().unsqueeze(1)

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents


def _vae_factor(components: Components) -> int:
    return int(2 ** (len(config_of(components, "vae")["encoder_block_out_channels"]) - 1))
