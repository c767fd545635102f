"""Cosmos-Predict 2.5: diffusers' Cosmos2_5_PredictBasePipeline layout, text to video or image."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.errors import ModelError, RequestError
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.latent_stats import denormalised, normalised
from verst.families.loading import config_of, load_components
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_pixels
from verst.families.video import check_frames, euler_on_flow_sigmas, module_dtype, to_clip, to_pixels
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}


@dataclass(frozen=True, kw_only=True)
class _TextEncoder:
    """What diffusers' own prompt encoding reads of its pipeline."""

    text_encoder: Any
    tokenizer: Any


class CosmosPredict2:
    """The pipeline's guardrail is not part of the model: whether to put one before the prompts and behind the media
    is for who serves them."""

    name: str = "cosmos_predict2"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
    fsdp_blocks: tuple[str, ...] = ("CosmosTransformerBlock",)
    fp32_modules: tuple[str, ...] = ("learnable_pos_embed",)
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={
                    "embedded_timestep": Along(of=("hidden_states",), dim=1, ndim=3),
                    "temb": Along(of=("hidden_states",), dim=1, ndim=3),
                    "image_rotary_emb": Along(of=("hidden_states",), dim=0),
                    "extra_pos_emb": Along(of=("hidden_states",), dim=1),
                },
                attention={"attn1": self_attention("hidden_states")},
            ),
        )
    )
    unguided_scale: float = 1.0
    own_guidance: str = "c + g (c - u), from g = 1 on"
    num_images: int = 0

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        parts = tuple(parts)
        if "transformer" in parts and importlib.util.find_spec("torchvision") is None:
            raise ModelError(f"{folder}: {self.name} needs torchvision, whose resize its transformer calls")
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        tokenizer = components.modules["tokenizer"]
        around = len(_chat(tokenizer, ""))
        lengths = [len(_chat(tokenizer, prompt)) for prompt in prompts]
        return [
            f"prompt {prompt!r} has {length} tokens, {around} of them its chat template; room is for {max_sequence_length}"
            for prompt, length in zip(prompts, lengths, strict=True)
            if length > max_sequence_length
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
        """All layers of the encoder side by side: [B, L, layers D]. Padding up to L is text to it and to the model."""
        from diffusers import Cosmos2_5_PredictBasePipeline

        pipeline: Any = Cosmos2_5_PredictBasePipeline
        parts = _TextEncoder(**{name: components.modules[name] for name in _PARTS["text"]})
        embeds = pipeline._get_prompt_embeds(parts, list(prompts), max_sequence_length, device=components.device)
        return {"encoder_hidden_states": embeds}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        from diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict import DEFAULT_NEGATIVE_PROMPT

        # The defaults of Cosmos2_5_PredictBasePipeline.__call__; frames a second as its documentation exports them.
        return SamplingDefaults(
            geometry=Geometry(height=704, width=1280, num_frames=93, fps=16.0),
            num_steps=36,
            guidance_scale=7.0,
            negative_prompt=DEFAULT_NEGATIVE_PROMPT,
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        spatial, temporal = _vae_factors(components)
        check_pixels(geometry, multiple=spatial * config_of(components, "transformer")["patch_size"][2])
        check_frames(geometry, factor=temporal)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        spatial, temporal = _vae_factors(components)
        channels = config_of(components, "transformer")["out_channels"]
        frames = (geometry.num_frames - 1) // temporal + 1
        return {"visual": (channels, frames, geometry.height // spatial, geometry.width // spatial)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """Karras' grid in sigma / (1 + sigma): it starts a little below 1 and has no shift."""
        del geometry
        if shift is not None and components.modules["scheduler"].config.get("use_karras_sigmas"):
            raise RequestError(f"sigma_shift = {shift}: the grid of {self.name} is Karras', which has no shift")
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
        """Two passes, c + g (c - u)."""
        dtype = dtype or module_dtype(transformer)
        x = latents["visual"]
        batch, _, frames, height, width = x.shape
        time = sigmas["visual"].float().view(batch, 1, 1, 1, 1).expand(-1, 1, frames, 1, 1)

        def forward(side: dict[str, Tensor]) -> Tensor:
            output: Tensor = transformer(
                hidden_states=x.to(dtype),
                condition_mask=x.new_zeros(batch, 1, frames, height, width, dtype=dtype),
                timestep=time,
                encoder_hidden_states=side["encoder_hidden_states"].to(dtype),
                # Nothing is padded, so it is 0 in whatever size the transformer would resize it from.
                padding_mask=x.new_zeros(1, 1, height, width, dtype=dtype),
                return_dict=False,
            )[0]
            return output.float()

        v = forward(conditioning.positive)
        if guidance_scale > self.unguided_scale and conditioning.negative is not None:
            v = v + guidance_scale * (v - forward(conditioning.negative))
        return {"visual": v}

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        return {"visual": normalised(vae.encode(to_clip(media, vae)).latent_dist.mode(), vae).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        return to_pixels(vae.decode(denormalised(latents["visual"].float(), vae).to(vae.dtype), return_dict=False)[0])

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents


def _chat(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of the pipeline's conversation around a prompt, uncut."""
    system = "You are a helpful assistant who will provide prompts to an image generator."
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("system", system), ("user", prompt))
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, add_vision_id=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    return ids


def _vae_factors(components: Components) -> tuple[int, int]:
    """Pixels a latent pixel, frames a latent frame."""
    downsample = config_of(components, "vae")["temperal_downsample"]
    return int(2 ** len(downsample)), int(2 ** sum(downsample))
