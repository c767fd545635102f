"""Qwen-Image 2.1: diffusers' QwenImage21Pipeline layout, with or without condition images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from verst.errors import RequestError
from verst.families.base import ALL_PARTS, ANY_IMAGES, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, falling_sigmas, linear_mu
from verst.families.loading import config_of, index_of, load_components
from verst.families.patches import token_grid
from verst.families.qwen_image_edit import encode_picture, resized, scaled_size
from verst.families.ranks import max_over_ranks
from verst.families.sequence import Along, Blocks, SequencePlan
from verst.families.sizes import check_is_image, check_pixels
from verst.families.tensor import TensorPlan
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents, join_rows

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "processor"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}
_FACTOR = 16
"""Pixels a latent column; a token is one latent pixel, and four tokens share a slot of the text encoder's sequence."""


class QwenImage21:
    """One causal sequence of text, condition images and picture: a token's place depends on the length of its text.

    So a transformer call takes rows of one text length, and a mixed batch is split.

    Its pictures have an opacity, which media lack: they are shown on white. Every step computes text and condition
    images anew, where diffusers' pipeline keeps their keys and values from the first (`use_kv_cache`): the same up to
    rounding.
    """

    name: str = "qwen_image_21"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out",
    )  # fmt: skip
    fsdp_blocks: tuple[str, ...] = ("QwenImage21TransformerBlock",)
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={"target_token_mask": Along(of=("hidden_states",), dim=0)},
                attention={},
                projected={"attn": ("hidden_states",)},
            ),
        ),
        ring="reads its text causally",
    )
    tensor_plan: TensorPlan = TensorPlan(
        blocks="transformer_blocks",
        columns=("attn.to_q", "attn.to_k", "attn.to_v", "img_mlp.proj", "img_mlp.gate_layer"),
        rows=("attn.to_out.0", "img_mlp.out"),
        norms=("attn.norm_q", "attn.norm_k"),
    )
    fp32_modules: tuple[str, ...] = ()
    unguided_scale: float = 1.0
    num_images: int = ANY_IMAGES
    area: int = 1024 * 1024
    """Pixels of a condition image as the model sees it, whatever size it came in (the pipeline's output_resolution)."""

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """None is too long: the pipeline crops no prompt, whatever the length asked for."""
        return []

    def encode_prompts(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry | None = None,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """`encoder_hidden_states` [B, L, D], and of each token whether it is text (`encoder_attention_mask`, 0 for
        padding) and whether it stands for four tokens of a condition image (`image_slots`), [B, L] both.
        """
        del max_sequence_length, geometry, negative
        return self._encode(components, prompts, None)

    def encode_prompts_with_images(
        self,
        components: Components,
        prompts: Sequence[str],
        images: Sequence[Tensor],
        *,
        max_sequence_length: int,
        geometry: Geometry,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        del max_sequence_length, geometry, negative
        return self._encode(components, prompts, [self._picture(image) for image in images])

    def _encode(self, components: Components, prompts: Sequence[str], pictures: Any) -> dict[str, Tensor]:
        pipeline = _pipeline(components)
        rows = []
        for prompt in prompts:
            embeds, _, slots = pipeline.encode_prompt(prompt, image=pictures, device=components.device)
            mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
            rows.append({"encoder_hidden_states": embeds, "encoder_attention_mask": mask, "image_slots": slots.long()})
        return join_rows(rows)

    def _picture(self, image: Tensor) -> Image.Image:
        return resized(image, *scaled_size(image, self.area), mode="RGBA")

    def geometry_of(self, components: Components, images: Sequence[Tensor]) -> Geometry:
        """About `area` pixels in the proportions of the last image."""
        width, height = scaled_size(images[-1], self.area)
        return Geometry(height=height, width=width)

    def encode_images(self, components: Components, images: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """`image_latents_<i>` [1, 1, C, h, w] of each image."""
        del geometry
        return {
            f"image_latents_{index}": encode_picture(components, self._picture(image))
            for index, image in enumerate(images)
        }

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        own = index_of(components).get("sample_sigmas")
        # QwenImage21Pipeline.__call__'s: made to be sampled without guidance.
        return SamplingDefaults(
            geometry=Geometry(height=1024, width=1024),
            num_steps=len(own) if own else 40,
            guidance_scale=1.0,
            negative_prompt=" ",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=2 * _FACTOR)
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        channels = config_of(components, "transformer")["in_channels"]
        return {"visual": (channels, geometry.height // _FACTOR, geometry.width // _FACTOR)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """Raises RequestError for another number of steps than that of a checkpoint's own sigmas."""
        config = components.modules["scheduler"].config
        own = index_of(components).get("sample_sigmas")
        if own and len(own) != num_steps:
            raise RequestError(
                f"num_inference_steps = {num_steps}, but this checkpoint has sigmas for {len(own)} steps"
            )
        _, height, width = self.latent_shapes(components, geometry)["visual"]
        mu = linear_mu(height * width, config)
        return {"visual": euler_schedule(config, own or falling_sigmas(num_steps), mu=mu, shift=shift)}

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
        x, sigma = latents["visual"], sigmas["visual"].float()
        v = _forward(transformer, x, sigma, conditioning.positive, dtype)
        if guidance_scale > self.unguided_scale and conditioning.negative is not None:
            v = classifier_free(v, _forward(transformer, x, sigma, conditioning.negative, dtype), guidance_scale)
        return {"visual": v.transpose(1, 2).reshape(x.shape)}

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        colours = media.permute(0, 4, 1, 2, 3).to(components.device, vae.dtype) / 127.5 - 1
        pixels = torch.cat([colours, torch.ones_like(colours[:, :1])], dim=1)
        mean, std = _latent_stats(vae)
        return {"visual": ((vae.encode(pixels).latent_dist.mode() - mean) / std)[:, :, 0].float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        mean, std = _latent_stats(vae)
        x0 = latents["visual"].unsqueeze(2).to(vae.dtype) * std + mean
        rgba = (vae.decode(x0, return_dict=False)[0][:, :, 0] / 2 + 0.5).clamp(0, 1).float()
        colours, opacity = rgba[:, :3], rgba[:, 3:]
        return (colours * opacity + (1 - opacity)).unsqueeze(1)

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {"visual": latents["visual"].flatten(2).transpose(1, 2)}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        tokens = latents["visual"]
        height, width = token_grid(tokens.shape[1], geometry)
        return {"visual": tokens.transpose(1, 2).reshape(len(tokens), -1, height, width)}


def _forward(transformer: nn.Module, x: Tensor, sigma: Tensor, side: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """[B, S, C] fp32; one transformer call for each text length among the rows.

    Under FSDP2 as many calls as the rank with most lengths makes: the last again, times 0.
    """
    lengths = side["encoder_attention_mask"].sum(dim=1).tolist()
    distinct = sorted(set(lengths))
    num_calls = max_over_ranks(transformer, [len(distinct)])[0]
    if num_calls == 1:
        return _forward_one_length(transformer, x, sigma, side, lengths[0], dtype)
    parts: dict[int, Tensor] = {}
    idle: Tensor | float = 0.0
    for call in range(num_calls):
        length = distinct[min(call, len(distinct) - 1)]
        rows = [row for row, own in enumerate(lengths) if own == length]
        part = {name: tensor[rows] for name, tensor in side.items()}
        v = _forward_one_length(transformer, x[rows], sigma[rows], part, length, dtype)
        if call < len(distinct):
            parts |= dict(zip(rows, v, strict=True))
        else:
            idle = idle + 0 * v.sum()
    return torch.stack([parts[row] for row in range(len(lengths))]) + idle


def _forward_one_length(
    transformer: nn.Module, x: Tensor, sigma: Tensor, side: dict[str, Tensor], length: int, dtype: torch.dtype
) -> Tensor:
    count = sum(name.startswith("image_latents_") for name in side)
    grids = [*(side[f"image_latents_{index}"].squeeze(1) for index in range(count)), x]
    slots = side["image_slots"][:, :length].bool()
    num_tokens = x.shape[2] * x.shape[3]
    output: Tensor = transformer(
        hidden_states=torch.cat([grid.flatten(2).transpose(1, 2) for grid in grids], dim=1).to(dtype),
        timestep=sigma * 1000 / 1000,  # the pipeline's own way round, whose last bit is not always sigma's
        encoder_hidden_states=side["encoder_hidden_states"][:, :length].to(dtype),
        img_shapes=[[(1, grid.shape[2], grid.shape[3]) for grid in grids]] * len(x),
        img_mask=torch.cat([slots, slots.new_ones((len(x), num_tokens // 4))], dim=1),
        return_dict=False,
    )[0]
    return output[:, -num_tokens:].float()


def _latent_stats(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation [1, C, 1, 1, 1] of the latents."""
    mean, std = (
        torch.tensor(values, device=vae.device, dtype=vae.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
    from diffusers import QwenImage21Pipeline

    text = {name: components.modules[name] for name in _PARTS["text"]}
    return QwenImage21Pipeline(scheduler=None, vae=None, transformer=None, **text)
