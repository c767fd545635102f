"""Qwen-Image: diffusers' QwenImagePipeline layout, and what its relatives for editing share with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, falling_sigmas, linear_mu
from verst.families.latent_stats import denormalised, normalised
from verst.families.loading import config_of, load_components
from verst.families.patches import pack_frames, token_grid, unpack_frames
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_is_image, check_pixels
from verst.families.tensor import TensorPlan
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents, join_rows

MAX_PROMPT_TOKENS = 1024
"""The pipelines' tokenizers crop here, after the template's own tokens."""


class QwenImage:
    name: str = "qwen_image"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    fsdp_blocks: tuple[str, ...] = ("QwenImageTransformerBlock",)
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("encoder_hidden_states", "hidden_states"),
                returns=("encoder_hidden_states", "hidden_states"),
                along={
                    "image_rotary_emb": (
                        Along(of=("hidden_states",), dim=0),
                        Along(of=("encoder_hidden_states",), dim=0),
                    ),
                    "encoder_hidden_states_mask": Along(of=("encoder_hidden_states",), dim=1),
                    "modulate_index": Along(of=("hidden_states",), dim=1),
                },
                attention={"attn": self_attention("encoder_hidden_states", "hidden_states", mask="keys")},
            ),
        ),
        ring="masks the padding of its text",
    )
    tensor_plan: TensorPlan = TensorPlan(
        blocks="transformer_blocks",
        columns=(
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
            "img_mlp.net.0.proj", "txt_mlp.net.0.proj",
        ),
        rows=("attn.to_out.0", "attn.to_add_out", "img_mlp.net.2", "txt_mlp.net.2"),
        norms=("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"),
    )  # fmt: skip
    unguided_scale: float = 1.0
    num_images: int = 0
    parts: dict[Part, tuple[str, ...]] = {  # noqa: RUF012
        "transformer": ("transformer",),
        "text": ("text_encoder", "tokenizer"),
        "autoencoder": ("vae",),
        "scheduler": ("scheduler",),
    }
    own_guidance: str = "u + g (c - u), scaled to the norm of c token by token"
    keeps_norm: bool = True
    """Whether it is scaled."""

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, self.parts, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        pipeline = self.pipeline(components)
        limit, problems = min(max_sequence_length, MAX_PROMPT_TOKENS), []
        for prompt in prompts:
            ids = components.modules["tokenizer"](pipeline.prompt_template_encode.format(prompt))["input_ids"]
            length = len(ids) - pipeline.prompt_template_encode_start_idx
            if length > limit:
                problems.append(f"prompt {prompt!r} has {length} tokens, the model takes {limit}")
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
        """`encoder_hidden_states` [B, L, D] and `encoder_attention_mask` [B, L], 0 where a row is padded."""
        del geometry, negative
        pipeline = self.pipeline(components)
        rows = [
            pipeline.encode_prompt(prompt, device=components.device, max_sequence_length=max_sequence_length)
            for prompt in prompts
        ]
        return join_rows([prompt_row(*row) for row in rows])

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        size = 128 * vae_factor(components)
        # QwenImagePipeline.__call__'s; it guides only when a negative prompt is given, and its examples give a space.
        return SamplingDefaults(
            geometry=Geometry(height=size, width=size),
            num_steps=50,
            guidance_scale=4.0,
            negative_prompt=" ",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=2 * vae_factor(components))
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = vae_factor(components)
        channels = config_of(components, "transformer")["in_channels"] // 4
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        config = components.modules["scheduler"].config
        *_, height, width = self.latent_shapes(components, geometry)["visual"]
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
        x = latents["visual"]
        timestep = sigmas["visual"].float() * 1000 / 1000  # As the pipeline makes it: not always sigma's own bits.
        tokens = pack_frames(self._frames(x))

        def forward(side: dict[str, Tensor]) -> Tensor:
            images = condition_images(side)
            shapes = [frame for latent in (self._frames(x), *images) for frame in frame_shapes(latent)]
            output: Tensor = transformer(
                hidden_states=torch.cat([tokens, *(pack_frames(image) for image in images)], dim=1).to(dtype),
                timestep=timestep,
                img_shapes=[shapes] * len(x),
                return_dict=False,
                **text_arguments(side, dtype),
                **self._more_arguments(x),
            )[0]
            return output[:, : tokens.shape[1]].float()

        v = forward(conditioning.positive)
        if guidance_scale > self.unguided_scale and conditioning.negative is not None:
            v = self._guided(v, forward(conditioning.negative), guidance_scale)
        num_frames, _, height, width = self._frames(x).shape[1:]
        return {"visual": unpack_frames(v, num_frames, height, width).reshape(x.shape)}

    def _guided(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """[B, S, C] each."""
        v = classifier_free(positive, negative, scale)
        if not self.keeps_norm:
            return v
        return v * (torch.norm(positive, dim=-1, keepdim=True) / torch.norm(v, dim=-1, keepdim=True))

    def _frames(self, x: Tensor) -> Tensor:
        """One sample's latent as frames: [B, T, C, H, W]."""
        return x.unsqueeze(1)

    def _more_arguments(self, x: Tensor) -> dict[str, Any]:
        """Arguments that the transformer takes besides those of every variant."""
        del x
        return {}

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        pixels = media.permute(0, 4, 1, 2, 3).to(components.device, vae.dtype) / 127.5 - 1
        x0 = vae.encode(pixels).latent_dist.mode()
        return {"visual": normalised(x0, vae)[:, :, 0].float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        x0 = denormalised(latents["visual"].unsqueeze(2).to(vae.dtype), vae)
        pixels = vae.decode(x0, return_dict=False)[0]
        return (pixels / 2 + 0.5).clamp(0, 1).float().transpose(1, 2)

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {"visual": pack_frames(self._frames(latents["visual"]))}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        """[B, S, 4 C] -> [B, C, H, W]."""
        tokens = latents["visual"]
        height, width = token_grid(tokens.shape[1], geometry)
        return {"visual": unpack_frames(tokens, 1, 2 * height, 2 * width)[:, 0]}

    def pipeline(self, components: Components) -> Any:
        """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
        from diffusers import QwenImagePipeline

        return QwenImagePipeline(scheduler=None, vae=None, transformer=None, **text_modules(self, components))


def text_modules(family: QwenImage, components: Components) -> dict[str, Any]:
    return {name: components.modules[name] for name in family.parts["text"]}


def prompt_row(embeds: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Conditioning of one prompt from what a pipeline's encode_prompt returns; its mask is None without padding."""
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device) if mask is None else mask
    return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}


def text_arguments(side: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The transformer's text arguments, cropped to the longest row, without a mask where no row is shorter.

    As the pipelines do it: attention without a mask takes another kernel, so a row alone must not carry one.
    """
    mask = side["encoder_attention_mask"]
    lengths = mask.sum(dim=1).tolist()
    longest = max(lengths)
    return {
        "encoder_hidden_states": side["encoder_hidden_states"][:, :longest].to(dtype),
        "encoder_hidden_states_mask": None if min(lengths) == longest else mask[:, :longest],
    }


def condition_images(side: dict[str, Tensor]) -> list[Tensor]:
    """Latents of the condition images in order, each [B, 1, C, H, W]."""
    count = sum(name.startswith("image_latents_") for name in side)
    return [side[f"image_latents_{index}"] for index in range(count)]


def frame_shapes(frames: Tensor) -> list[tuple[int, int, int]]:
    """(1, height, width) in tokens for each of the frames [B, T, C, H, W]."""
    return [(1, frames.shape[3] // 2, frames.shape[4] // 2)] * frames.shape[1]


def vae_factor(components: Components) -> int:
    """Pixels a latent column."""
    return int(2 ** len(config_of(components, "vae")["temperal_downsample"]))
