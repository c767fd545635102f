"""Z-Image: diffusers' ZImagePipeline layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.families import autoencoder_kl
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, linear_mu
from verst.families.loading import config_of, load_components
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_is_image, check_pixels
from verst.families.video import module_dtype
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents, join_rows

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}
_PATCH = 2


class ZImage:
    name: str = "z_image"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    fsdp_blocks: tuple[str, ...] = ("ZImageTransformerBlock",)
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = SequencePlan(
        blocks=tuple(
            Blocks(
                path=path,
                tokens=("x",),
                returns=("x",),
                along={"freqs_cis": Along(of=("x",), dim=1)},
                attention={"attention": self_attention("x")},
            )
            for path in ("noise_refiner", "layers")
        ),
        heads=("n_heads",),
        ring="masks the padding of its text",
    )
    unguided_scale: float = 0.0
    own_guidance: str = "c + g (c - u)"
    num_images: int = 0

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        tokenizer = components.modules["tokenizer"]
        chats = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
            )
            for prompt in prompts
        ]
        return [
            f"prompt {prompt!r} has {len(ids)} tokens with its chat template, room is for {max_sequence_length}"
            for prompt, ids in zip(prompts, tokenizer(chats, truncation=False)["input_ids"], strict=True)
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
        embeds, _ = _pipeline(components).encode_prompt(
            list(prompts),
            device=components.device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        masks = [torch.ones(1, len(row), dtype=torch.bool, device=row.device) for row in embeds]
        return join_rows([{"cap_feats": row[None], "cap_mask": mask} for row, mask in zip(embeds, masks, strict=True)])

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        # The defaults of ZImagePipeline.__call__.
        return SamplingDefaults(
            geometry=Geometry(height=1024, width=1024),
            num_steps=50,
            guidance_scale=5.0,
            negative_prompt="",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=_vae_factor(components) * _PATCH)
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = _vae_factor(components)
        channels = config_of(components, "transformer")["in_channels"]
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        config = dict(components.modules["scheduler"].config)
        _, height, width = self.latent_shapes(components, geometry)["visual"]
        mu = linear_mu((height // _PATCH) * (width // _PATCH), config)
        # Rounded to fp32 before the shift, as in the pipeline.
        sigmas = torch.linspace(1.0, 1 / num_steps, num_steps).tolist()
        return {"visual": euler_schedule(config, sigmas, mu=mu, shift=shift)}

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
        """The model's time runs from 0 (noise) to 1, and it predicts x0 - eps."""
        dtype = dtype or module_dtype(transformer)
        x = latents["visual"].to(dtype).unsqueeze(2)
        # The pipeline's own way round, whose last bits are not always those of 1 - sigma.
        time = (1000 - sigmas["visual"].float() * 1000) / 1000
        captions = _captions(conditioning.positive, dtype)
        guided = guidance_scale > self.unguided_scale and conditioning.negative is not None
        if guided:
            assert conditioning.negative is not None
            # One doubled list, positive rows first, as diffusers' pipeline does it.
            x, time = torch.cat([x, x]), torch.cat([time, time])
            captions += _captions(conditioning.negative, dtype)
        output: list[Tensor] = transformer(list(x.unbind(0)), time, captions, return_dict=False)[0]
        v = torch.stack([row.float() for row in output])
        if guided:
            positive, negative = v.chunk(2)
            v = positive + guidance_scale * (positive - negative)
        return {"visual": -v.squeeze(2)}

    def encode_media(self, components: Components, media: Tensor) -> Latents:
        return {"visual": autoencoder_kl.encode_images(components.modules["vae"], media, components.device)}

    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        return autoencoder_kl.decode_images(components.modules["vae"], latents["visual"])

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents


def _captions(side: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each row's own tokens [L_i, D]: the transformer pads them in its own way."""
    masks = side["cap_mask"].bool()
    return [row[mask].to(dtype) for row, mask in zip(side["cap_feats"], masks, strict=True)]


def _vae_factor(components: Components) -> int:
    return int(2 ** (len(config_of(components, "vae")["block_out_channels"]) - 1))


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
    from diffusers import ZImagePipeline

    parts = {name: components.modules[name] for name in _PARTS["text"]}
    return ZImagePipeline(scheduler=None, vae=None, transformer=None, **parts)
