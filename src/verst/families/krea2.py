"""Krea 2: diffusers' Krea2Pipeline layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, falling_sigmas, linear_mu
from verst.families.latent_stats import denormalised, normalised
from verst.families.loading import config_of, index_of, load_components, take_contiguous
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_is_image, check_pixels
from verst.families.video import module_dtype
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}
_PATCH = 2
_DISTILLED_MU = 1.15


class Krea2:
    name: str = "krea2"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_gate", "ff.up", "ff.down",
    )  # fmt: skip
    fsdp_blocks: tuple[str, ...] = ("Krea2TransformerBlock", "Krea2TextFusionBlock")
    fp32_modules: tuple[str, ...] = ("norm", "norm1", "norm2", "norm_q", "norm_k")
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={"image_rotary_emb": Along(of=("hidden_states",), dim=0)},
                attention={"attn": self_attention("hidden_states")},
            ),
        ),
        ring="masks the padding of its text",
    )
    unguided_scale: float = 0.0
    own_guidance: str = "c + g (c - u)"
    num_images: int = 0

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        components = load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)
        if "transformer" in components.modules:
            take_contiguous(components.modules["transformer"].text_fusion.projector)
        return components

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        pipeline = _pipeline(components)
        prefix = pipeline.prompt_template_encode_start_idx
        limit = max_sequence_length - pipeline.prompt_template_encode_num_suffix_tokens
        texts = [pipeline.prompt_template_encode_prefix + prompt for prompt in prompts]
        encoded = components.modules["tokenizer"](texts, truncation=False)["input_ids"]
        return [
            f"prompt {prompt!r} has {len(ids) - prefix} tokens, room is for {limit}"
            for prompt, ids in zip(prompts, encoded, strict=True)
            if len(ids) - prefix > limit
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
        # Always `max_sequence_length` rows, with the padding in the middle: the mask says where.
        embeds, mask = _pipeline(components).encode_prompt(
            list(prompts), device=components.device, max_sequence_length=max_sequence_length
        )
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        distilled = index_of(components).get("is_distilled", False)
        # The defaults of Krea2Pipeline.__call__, and what its documentation says of the distilled checkpoint.
        return SamplingDefaults(
            geometry=Geometry(height=1024, width=1024),
            num_steps=8 if distilled else 28,
            guidance_scale=0.0 if distilled else 4.5,
            negative_prompt="",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=_vae_factor(components) * _PATCH)
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = _vae_factor(components)
        channels = config_of(components, "transformer")["in_channels"] // _PATCH**2
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        config = dict(components.modules["scheduler"].config)
        _, height, width = self.latent_shapes(components, geometry)["visual"]
        distilled = index_of(components).get("is_distilled", False)
        mu = _DISTILLED_MU if distilled else linear_mu((height // _PATCH) * (width // _PATCH), config)
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
        dtype = dtype or module_dtype(transformer)
        x, sigma = latents["visual"], sigmas["visual"].float()
        height, width = x.shape[-2:]

        def forward(side: dict[str, Tensor]) -> Tensor:
            text = side["encoder_hidden_states"].to(dtype)
            output: Tensor = transformer(
                hidden_states=_pack(x).to(dtype),
                encoder_hidden_states=text,
                timestep=sigma * 1000 / 1000,  # the pipeline's own way round, whose last bit is not always sigma's
                position_ids=_position_ids(text.shape[1], height // _PATCH, width // _PATCH, x.device),
                encoder_attention_mask=side["encoder_attention_mask"],
                return_dict=False,
            )[0]
            return output.float()

        v = forward(conditioning.positive)
        if guidance_scale > self.unguided_scale and conditioning.negative is not None:
            v = v + guidance_scale * (v - forward(conditioning.negative))
        return {"visual": _unpack(v, height, width)}

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        pixels = media.permute(0, 4, 1, 2, 3).to(components.device, vae.dtype) / 127.5 - 1
        return {"visual": normalised(vae.encode(pixels).latent_dist.mode(), vae)[:, :, 0].float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        x0 = denormalised(latents["visual"].unsqueeze(2).to(vae.dtype), vae)
        pixels = vae.decode(x0, return_dict=False)[0]
        return (pixels / 2 + 0.5).clamp(0, 1).float().transpose(1, 2)

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {"visual": _pack(latents["visual"])}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        packed = latents["visual"]
        # The sides in patches follow from the picture's and the number of patches.
        factor = round((geometry.height * geometry.width / packed.shape[1]) ** 0.5) // _PATCH
        return {"visual": _unpack(packed, geometry.height // factor, geometry.width // factor)}


def _pack(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 W/2, 4 C]: one token for each 2x2 patch, channels outermost."""
    batch, channels, height, width = x.shape
    x = x.view(batch, channels, height // _PATCH, _PATCH, width // _PATCH, _PATCH)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * _PATCH**2)


def _unpack(x: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `_pack`; sizes in latent pixels."""
    x = x.view(len(x), height // _PATCH, width // _PATCH, -1, _PATCH, _PATCH)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(len(x), -1, height, width)


def _position_ids(text_length: int, height: int, width: int, device: torch.device) -> Tensor:
    """[L + height * width, 3]: text at the origin, image tokens at (0, row, column)."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    return torch.cat([image.new_zeros(text_length, 3), image]).float().to(device)


def _vae_factor(components: Components) -> int:
    return int(2 ** len(config_of(components, "vae")["temperal_downsample"]))


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
    from diffusers import Krea2Pipeline

    return Krea2Pipeline(
        scheduler=None,
        vae=None,
        transformer=None,
        text_encoder=components.modules["text_encoder"],
        tokenizer=components.modules["tokenizer"],
        text_encoder_select_layers=index_of(components).get("text_encoder_select_layers"),
    )
