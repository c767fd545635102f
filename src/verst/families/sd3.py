"""Stable Diffusion 3 and 3.5: diffusers' StableDiffusion3Pipeline layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from verst.errors import RequestError
from verst.families import autoencoder_kl
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.loading import config_of, load_components
from verst.families.sequence import Blocks, SequencePlan, self_attention
from verst.families.tensor import TensorPlan
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}


class Sd3:
    name: str = "sd3"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip
    fsdp_blocks: tuple[str, ...] = ("JointTransformerBlock",)
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("hidden_states", "encoder_hidden_states"),
                returns=("encoder_hidden_states", "hidden_states"),
                along={},
                attention={
                    "attn": self_attention("hidden_states", "encoder_hidden_states"),
                    "attn2": self_attention("hidden_states"),
                },
            ),
        )
    )
    tensor_plan: TensorPlan = TensorPlan(
        blocks="transformer_blocks",
        columns=(
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
            "attn2.to_q", "attn2.to_k", "attn2.to_v", "ff.net.0.proj", "ff_context.net.0.proj",
        ),
        rows=("attn.to_out.0", "attn.to_add_out", "attn2.to_out.0", "ff.net.2", "ff_context.net.2"),
        norms=(
            "attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k", "attn2.norm_q", "attn2.norm_k",
        ),
        counted=("attn", "attn2"),
    )  # fmt: skip
    unguided_scale: float = 1.0
    num_images: int = 0

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(
            self, folder, _PARTS, parts=parts, dtype=dtype, device=device, optional=("text_encoder_3", "tokenizer_3")
        )

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        problems = []
        for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
            tokenizer = components.modules[name]
            if tokenizer is None:
                continue
            limit = max_sequence_length if name == "tokenizer_3" else tokenizer.model_max_length
            for prompt, ids in zip(prompts, tokenizer(list(prompts), truncation=False)["input_ids"], strict=True):
                if len(ids) > limit:
                    problems.append(f"prompt {prompt!r} has {len(ids)} tokens for {name}, which takes {limit}")
        return problems

    def encode_prompts(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry | None = None,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        pipeline = _pipeline(components)
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=components.device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        size = components.modules["transformer"].config.sample_size * _vae_factor(components)
        # The defaults of StableDiffusion3Pipeline.__call__.
        return SamplingDefaults(
            geometry=Geometry(height=size, width=size),
            num_steps=28,
            guidance_scale=7.0,
            negative_prompt="",
            max_sequence_length=256,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        config = components.modules["transformer"].config
        multiple = _vae_factor(components) * config.patch_size
        largest = multiple * config.pos_embed_max_size
        for side, pixels in (("height", geometry.height), ("width", geometry.width)):
            if pixels % multiple or not 0 < pixels <= largest:
                nearest = min(max(multiple, round(pixels / multiple) * multiple), largest)
                raise RequestError(
                    f"{side} = {pixels} is not a multiple of {multiple} up to {largest} pixels; nearest that is: {nearest}"
                )
        if geometry.num_frames != 1:
            raise RequestError(f"num_frames = {geometry.num_frames}: SD3 makes images, so it must be 1")

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = _vae_factor(components)
        channels = components.modules["transformer"].config.in_channels
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        del geometry  # SD3's shift is static
        config = dict(components.modules["scheduler"].config)
        if shift is not None:
            config["shift"] = shift
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        scheduler.set_timesteps(num_steps)
        return {"visual": scheduler}

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
        dtype = dtype or next(transformer.parameters()).dtype
        x, timestep = latents["visual"], sigmas["visual"].float() * 1000
        if guidance_scale <= 1 or conditioning.negative is None:
            return {"visual": _forward(transformer, x, timestep, conditioning.positive, dtype)}
        # One doubled batch, negative rows first, as diffusers' pipeline does it.
        both = {k: torch.cat([conditioning.negative[k], v]) for k, v in conditioning.positive.items()}
        v = _forward(transformer, torch.cat([x, x]), torch.cat([timestep, timestep]), both, dtype)
        negative, positive = v.chunk(2)
        return {"visual": classifier_free(positive, negative, guidance_scale)}

    def encode_media(self, components: Components, media: Tensor) -> Latents:
        return {"visual": autoencoder_kl.encode_images(components.modules["vae"], media, components.device)}

    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        return autoencoder_kl.decode_images(components.modules["vae"], latents["visual"])

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents


def _forward(
    transformer: nn.Module, x: Tensor, timestep: Tensor, conditioning: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    output: Tensor = transformer(
        hidden_states=x.to(dtype),
        timestep=timestep,
        encoder_hidden_states=conditioning["encoder_hidden_states"].to(dtype),
        pooled_projections=conditioning["pooled_projections"].to(dtype),
        return_dict=False,
    )[0]
    return output.float()


def _vae_factor(components: Components) -> int:
    return int(2 ** (len(config_of(components, "vae")["block_out_channels"]) - 1))


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoders, for its exact prompt encoding."""
    names = [*_PARTS["text"], "transformer", "vae", "scheduler"]
    parts = {name: components.modules.get(name) for name in names}
    # encode_prompt asks the pipeline for a dtype and a device only through these modules.
    parts["vae"] = parts["scheduler"] = None
    return diffusers.StableDiffusion3Pipeline(**parts)
