"""Wan 2.1 and 2.2: diffusers' WanPipeline and WanImageToVideoPipeline layouts, one expert or two."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from verst.errors import ModelError
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.latent_stats import denormalised, normalised
from verst.families.loading import config_of, load_components
from verst.families.ranks import max_over_ranks
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_pixels
from verst.families.video import check_frames, euler_on_flow_sigmas, module_dtype, to_clip, to_pixels, whole_timesteps
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer", "transformer_2"),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}


class Wan:
    """Text to video. Between steps a latent is [B, C, T, H, W], as in the pipeline."""

    name: str = "wan"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    fsdp_blocks: tuple[str, ...] = ("WanTransformerBlock",)
    fp32_modules: tuple[str, ...] = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={
                    "temb": Along(of=("hidden_states",), dim=1, ndim=4),
                    "rotary_emb": Along(of=("hidden_states",), dim=1),
                },
                attention={"attn1": self_attention("hidden_states")},
            ),
        )
    )
    unguided_scale: float = 1.0
    num_images: int = 0

    def __init__(
        self, *, boundary_ratio: float | None = None, expand_timesteps: bool = False, whole_timesteps: bool = True
    ) -> None:
        """boundary_ratio: sigma from which on "transformer" is the expert, "transformer_2" below it.

        expand_timesteps: one timestep a token (TI2V-5B). whole_timesteps: the pipeline's scheduler rounds them down.
        """
        self.boundary_ratio = boundary_ratio
        self.expand_timesteps = expand_timesteps
        self.whole_timesteps = whole_timesteps

    def for_checkpoint(self, folder: Path) -> Wan:
        """The adapter with the settings that the pipeline keeps in its index. Raises ModelError."""
        index = json.loads((folder / "model_index.json").read_text())
        if self.num_images and index.get("expand_timesteps"):
            raise ModelError(f"{folder}: a first frame for TI2V-5B is not supported; its WanPipeline layout is")
        boundary = index.get("boundary_ratio")
        if boundary is not None and (index.get("transformer_2") or [None])[0] is None:
            raise ModelError(f"{folder / 'model_index.json'} has boundary_ratio = {boundary} but no transformer_2")
        return type(self)(
            boundary_ratio=boundary,
            expand_timesteps=bool(index.get("expand_timesteps")),
            whole_timesteps=index["scheduler"][1] != "FlowMatchEulerDiscreteScheduler",
        )

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        components = load_components(
            self, folder, _PARTS, parts=parts, dtype=dtype, device=device, optional=("transformer_2",)
        )
        if self.boundary_ratio is None:
            components.modules.pop("transformer_2", None)  # The pipeline never calls it then.
        return components

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        ids = components.modules["tokenizer"]([prompt_clean(p) for p in prompts], truncation=False)["input_ids"]
        return [
            f"prompt {prompt!r} has {len(row)} tokens for tokenizer, which takes {max_sequence_length}"
            for prompt, row in zip(prompts, ids, strict=True)
            if len(row) > max_sequence_length
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
        """Rows are padded with zeros to max_sequence_length, which the transformer attends to: there is no mask."""
        embeds, _ = _pipeline(components).encode_prompt(
            prompt=list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            device=components.device,
        )
        return {"encoder_hidden_states": embeds}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        # The defaults of WanPipeline.__call__; frames a second as the models were trained.
        return SamplingDefaults(
            geometry=Geometry(height=480, width=832, num_frames=81, fps=24.0 if self.expand_timesteps else 16.0),
            num_steps=50,
            guidance_scale=5.0,
            negative_prompt="",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        spatial, temporal = _vae_factors(components)
        patch = config_of(components, "transformer")["patch_size"]
        # 16 is the pipeline's own check.
        check_pixels(geometry, multiple=max(16, spatial * patch[1]))
        check_frames(geometry, factor=temporal)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        spatial, temporal = _vae_factors(components)
        channels = config_of(components, "transformer")["out_channels"]
        frames = (geometry.num_frames - 1) // temporal + 1
        return {"visual": (channels, frames, geometry.height // spatial, geometry.width // spatial)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        del geometry  # Wan's shift is static
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
        """Rows on both sides of the boundary are split over the experts and put back in order."""
        x, t = latents["visual"], self._timestep(sigmas["visual"])
        guidance = guidance_scale if guidance_scale > 1 and conditioning.negative is not None else None
        if not isinstance(transformer, nn.ModuleDict):
            return {"visual": self._guided(transformer, x, t, conditioning, guidance, dtype)}
        assert self.boundary_ratio is not None
        high = t >= self.boundary_ratio * 1000
        rows_of = {"transformer": high.nonzero()[:, 0], "transformer_2": (~high).nonzero()[:, 0]}
        pieces, order, idle = [], [], x.new_zeros(())
        for name in _called_anywhere(transformer, rows_of):
            rows = rows_of[name] if len(rows_of[name]) else torch.zeros(1, dtype=torch.int64, device=x.device)
            part = conditioning.rows(rows)
            v = self._guided(transformer[name], x[rows], t[rows], part, guidance, dtype)
            if len(rows_of[name]):
                pieces.append(v)
                order.append(rows)
            else:
                idle = idle + 0 * v.sum()
        return {"visual": torch.cat(pieces)[torch.cat(order).argsort()] + idle}

    def _timestep(self, sigma: Tensor) -> Tensor:
        """[B] int64, or fp32 with a scheduler that keeps fractions."""
        return whole_timesteps(sigma) if self.whole_timesteps else sigma.float() * 1000

    def _guided(
        self,
        expert: nn.Module,
        x: Tensor,
        timestep: Tensor,
        conditioning: Conditioning,
        guidance: float | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Two passes, as diffusers' pipeline does it."""
        dtype = dtype or module_dtype(expert)
        model_input = torch.cat([x, conditioning.positive["condition"]], dim=1) if self.num_images else x
        if self.expand_timesteps:
            frames, height, width = x.shape[2:]
            tokens = frames * ((height + 1) // 2) * ((width + 1) // 2)
            timestep = timestep.float()[:, None].expand(-1, tokens)
        positive = _forward(expert, model_input, timestep, conditioning.positive, dtype)
        if guidance is None:
            return positive
        assert conditioning.negative is not None
        return classifier_free(
            positive, _forward(expert, model_input, timestep, conditioning.negative, dtype), guidance
        )

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        return {"visual": normalised(vae.encode(to_clip(media, vae)).latent_dist.mode(), vae).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        return to_pixels(vae.decode(denormalised(latents["visual"].to(vae.dtype), vae), return_dict=False)[0])

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents


class WanImageToVideo(Wan):
    """A first frame and a text to video: its latent and a mask stand beside the noisy latent's channels."""

    name: str = "wan_i2v"
    num_images: int = 1

    def for_checkpoint(self, folder: Path) -> Wan:
        config = json.loads((folder / "transformer" / "config.json").read_text())
        if config.get("image_dim") is not None:
            raise ModelError(
                f"{folder / 'transformer'} reads CLIP image embeddings (Wan 2.1 I2V), which is not supported"
            )
        return super().for_checkpoint(folder)

    @torch.no_grad()
    def encode_images(self, components: Components, images: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """`condition` [1, S + C, T, H, W]: a mask over the S pixel frames of a latent frame, then the clean latent of
        the first frame followed by black."""
        from diffusers.video_processor import VideoProcessor
        from PIL import Image

        vae = components.modules["vae"]
        (spatial, temporal), (height, width) = _vae_factors(components), (geometry.height, geometry.width)
        picture = VideoProcessor(vae_scale_factor=spatial).preprocess(
            Image.fromarray(images[0].cpu().numpy()), height=height, width=width
        )
        clip = picture.to(components.device, torch.float32).unsqueeze(2)
        clip = torch.cat([clip, clip.new_zeros(1, 3, geometry.num_frames - 1, height, width)], dim=2)
        latent = normalised(vae.encode(clip.to(vae.dtype)).latent_dist.mode(), vae).float()
        mask = latent.new_zeros(1, temporal, *latent.shape[2:])
        mask[:, :, 0] = 1
        return {"condition": torch.cat([mask, latent], dim=1)}


def _called_anywhere(experts: nn.ModuleDict, rows_of: Mapping[str, Tensor]) -> list[str]:
    """The experts that this call goes through, in order; under FSDP2 those that any rank has rows for."""
    used = max_over_ranks(experts, [int(len(rows_of[name]) > 0) for name in experts])
    return [name for name, flag in zip(experts, used, strict=True) if flag]


def _forward(
    expert: nn.Module, x: Tensor, timestep: Tensor, conditioning: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    output: Tensor = expert(
        hidden_states=x.to(dtype),
        timestep=timestep,
        encoder_hidden_states=conditioning["encoder_hidden_states"].to(dtype),
        return_dict=False,
    )[0]
    return output.float()


def _vae_factors(components: Components) -> tuple[int, int]:
    """Pixels a latent pixel, frames a latent frame."""
    config = config_of(components, "vae")
    return config.get("scale_factor_spatial") or 8, config.get("scale_factor_temporal") or 4


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer", "transformer_2")
    return diffusers.WanPipeline(**dict.fromkeys(names) | {n: components.modules[n] for n in _PARTS["text"]})
