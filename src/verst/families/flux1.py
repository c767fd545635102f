"""FLUX.1 (dev, schnell): diffusers' FluxPipeline layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.families import autoencoder_kl
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, falling_sigmas, linear_mu
from verst.families.loading import config_of, load_components
from verst.families.patches import pack_frames, token_grid, unpack_frames
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_is_image, check_pixels
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}


class Flux1:
    """Its guidance scale is an input of the transformer (dev) or nothing at all (schnell): there is no negative side."""

    name: str = "flux1"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip
    fsdp_blocks: tuple[str, ...] = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = SequencePlan(
        blocks=tuple(
            Blocks(
                path=path,
                tokens=("encoder_hidden_states", "hidden_states"),
                returns=("encoder_hidden_states", "hidden_states"),
                along={"image_rotary_emb": Along(of=("encoder_hidden_states", "hidden_states"), dim=0)},
                attention={"attn": self_attention("encoder_hidden_states", "hidden_states")},
            )
            for path in ("transformer_blocks", "single_transformer_blocks")
        )
    )
    unguided_scale: float = math.inf
    num_images: int = 0

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        problems = []
        for name in ("tokenizer", "tokenizer_2"):
            tokenizer = components.modules[name]
            limit = max_sequence_length if name == "tokenizer_2" else tokenizer.model_max_length
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
        """`encoder_hidden_states` [B, max_sequence_length, D], with T5's padding, and `pooled_projections` [B, D']."""
        del geometry, negative
        embeds, pooled, _ = _pipeline(components).encode_prompt(
            prompt=list(prompts), device=components.device, max_sequence_length=max_sequence_length
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        size = 128 * _vae_factor(components)
        # FluxPipeline.__call__'s.
        return SamplingDefaults(
            geometry=Geometry(height=size, width=size),
            num_steps=28,
            guidance_scale=3.5,
            negative_prompt="",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=2 * _vae_factor(components))
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = _vae_factor(components)
        channels = config_of(components, "transformer")["in_channels"] // 4
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        config = components.modules["scheduler"].config
        _, height, width = self.latent_shapes(components, geometry)["visual"]
        mu = linear_mu((height // 2) * (width // 2), config)
        return {"visual": euler_schedule(config, falling_sigmas(num_steps), mu=mu, shift=shift)}

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
        x, side = latents["visual"], conditioning.positive
        height, width = x.shape[-2:]
        text = side["encoder_hidden_states"].to(dtype)
        config: Any = transformer.config
        output: Tensor = transformer(
            hidden_states=pack_frames(x.unsqueeze(1)).to(dtype),
            timestep=sigmas["visual"].float() * 1000 / 1000,  # the pipeline's own way round: the last bits may differ
            guidance=x.new_full((len(x),), guidance_scale, dtype=torch.float32) if config.guidance_embeds else None,
            pooled_projections=side["pooled_projections"].to(dtype),
            encoder_hidden_states=text,
            txt_ids=text.new_zeros((text.shape[1], 3), dtype=torch.float32),
            img_ids=_position_ids(height // 2, width // 2, x.device),
            return_dict=False,
        )[0]
        return {"visual": unpack_frames(output.float(), 1, height, width)[:, 0]}

    def encode_media(self, components: Components, media: Tensor) -> Latents:
        return {"visual": autoencoder_kl.encode_images(components.modules["vae"], media, components.device)}

    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        return autoencoder_kl.decode_images(components.modules["vae"], latents["visual"])

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {"visual": pack_frames(latents["visual"].unsqueeze(1))}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        """[B, S, 4 C] -> [B, C, H, W]."""
        tokens = latents["visual"]
        height, width = token_grid(tokens.shape[1], geometry)
        return {"visual": unpack_frames(tokens, 1, 2 * height, 2 * width)[:, 0]}


def _position_ids(height: int, width: int, device: torch.device) -> Tensor:
    """[height * width, 3] fp32: (0, row, column) of each token."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float().to(device)


def _vae_factor(components: Components) -> int:
    return int(2 ** (len(config_of(components, "vae")["block_out_channels"]) - 1))


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoders, for its exact prompt encoding."""
    from diffusers import FluxPipeline

    text = {name: components.modules[name] for name in _PARTS["text"]}
    return FluxPipeline(scheduler=None, vae=None, transformer=None, **text)
