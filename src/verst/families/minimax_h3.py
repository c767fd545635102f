"""MiniMax H3: video and sound from text in one packed sequence; diffusers' MiniMaxH3ModularPipeline layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.errors import PromptError, RequestError
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.loading import config_of, load_components
from verst.families.ranks import max_over_ranks
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_pixels
from verst.families.video import module_dtype
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents, join_rows

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae", "audio_vae"),
    "scheduler": ("scheduler", "audio_scheduler"),
}
_SCHEDULERS = {"visual": "scheduler", "audio": "audio_scheduler"}
_FPS = 24
_SECONDS = (5, 15)
_AUDIO_CHANNELS = 2
_AUDIO_LATENTS_PER_SECOND = 40
_TEXT_LAYER = 50
"""The hidden state of the text encoder that the model is conditioned on."""
_PIXEL_MEAN, _PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, which the video autoencoder works in."""


class MiniMaxH3:
    """A latent is visual [B, C, T, H, W] and audio [B, 2 N, C]: the rows of the left channel, then of the right.

    The guidance is distilled into the weights: one forward, no negative prompt, and guidance_scale is not read. Video
    and sound are at noise levels of their own in the same forward, whose time runs from 0 (noise) to 1.
    """

    name: str = "minimax_h3"
    streams: tuple[str, ...] = ("visual", "audio")
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
    fsdp_blocks: tuple[str, ...] = ("MiniMaxH3TransformerBlock", "MiniMaxH3TokenRefinerBlock")
    fp32_modules: tuple[str, ...] = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope")
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={name: Along(of=("hidden_states",), dim=0) for name in ("adaln_indices", "rotary_emb")},
                attention={"attn": self_attention("hidden_states")},
            ),
        )
    )
    unguided_scale: float = math.inf
    num_images: int = 0

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(
            self, folder, _PARTS, parts=parts, dtype=dtype, device=device, keep_fp32=("vae", "audio_vae")
        )

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """None is too long: prompts are never cut, they only make the sequence longer."""
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
        """`encoder_hidden_states` [B, L, D] and where they are, `text_mask`. Raises PromptError for an empty prompt."""
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        encoder, tokenizer = components.modules["text_encoder"], components.modules["tokenizer"]
        rows = []
        for prompt in prompts:
            token_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if not token_ids:
                raise PromptError(f"prompt {prompt!r} has no tokens, and {self.name} has no other way to say nothing")
            embeds = get_qwen3vl_prompt_embeds(
                encoder, _TextOnly(), token_ids, {}, _TEXT_LAYER, device=components.device, dtype=encoder.dtype
            )
            mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
            rows.append({"encoder_hidden_states": embeds, "text_mask": mask})
        return join_rows(rows)

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        # The pipeline's own canvas and 50 points, which are 49 steps; the last is not read.
        return SamplingDefaults(
            geometry=Geometry(height=768, width=1344, num_frames=124, fps=_FPS),
            num_steps=49,
            guidance_scale=1.0,
            negative_prompt="",
            max_sequence_length=4096,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        chunk, kept, ratio = _vae_facts(components)
        check_pixels(geometry, multiple=ratio * config_of(components, "transformer")["patch_size"][2])
        frames, (least, most) = geometry.num_frames, (seconds * _FPS for seconds in _SECONDS)
        fitting = [count for count in range(least, most + 1) if count % chunk == kept]
        if frames not in fitting:
            nearest = min(fitting, key=lambda count: abs(count - frames))
            raise RequestError(
                f"num_frames = {frames} is not {kept} + a multiple of {chunk} from {least} to {most}; nearest: {nearest}"
            )
        if geometry.fps not in (None, _FPS):
            raise RequestError(f"fps = {geometry.fps}: {self.name} makes {_FPS} frames a second")

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        config, (chunk, kept, ratio) = config_of(components, "transformer"), _vae_facts(components)
        frames = (geometry.num_frames - kept) // chunk * kept + 2
        size = (geometry.height // ratio, geometry.width // ratio)
        audio = _AUDIO_CHANNELS * round(geometry.num_frames / _FPS * _AUDIO_LATENTS_PER_SECOND)
        return {"visual": (config["in_channels"], frames, *size), "audio": (audio, config["audio_in_channels"])}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """The pipeline's grid of num_steps + 1 points. shift: of the video; the sound keeps its own."""
        del geometry  # both shifts are static
        schedulers = {}
        for stream, name in _SCHEDULERS.items():
            own = type(components.modules[name]).from_config(components.modules[name].config)
            if shift is not None and stream == "visual":
                own.set_shift(shift)
            own.set_timesteps(num_steps + 1)
            if len(own.timesteps) != num_steps:
                raise RequestError(f"num_inference_steps = {num_steps}: with shift {own.shift} some fall on each other")
            scheduler = FlowMatchEulerDiscreteScheduler(shift=own.shift)
            scheduler.set_timesteps(num_steps)
            scheduler.sigmas, scheduler.timesteps = own.sigmas, own.timesteps
            scheduler.set_begin_index(0)
            schedulers[stream] = scheduler
        return schedulers

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
        """Rows of one prompt length and one pair of noise levels share a layout, and so a forward; under FSDP2 there are
        as many forwards as on the rank with most layouts. The model predicts x0 - eps.
        """
        dtype = dtype or module_dtype(transformer)
        text, mask = conditioning.positive["encoder_hidden_states"].to(dtype), conditioning.positive["text_mask"]
        times = {stream: 1.0 - sigmas[stream].float() for stream in self.streams}
        keys = zip(mask.sum(dim=1).tolist(), times["visual"].tolist(), times["audio"].tolist(), strict=True)
        groups: dict[tuple[int, float, float], list[int]] = {}
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        layouts = list(groups.items())
        layouts += layouts[:1] * (max_over_ranks(transformer, [len(groups)])[0] - len(groups))
        pieces = [
            _forward(transformer, {k: x[rows] for k, x in latents.items()}, text[rows, :length], visual, audio)
            for (length, visual, audio), rows in layouts
        ]
        idle = sum(0 * value.sum() for piece in pieces[len(groups) :] for value in piece.values())
        order = torch.tensor([row for rows in groups.values() for row in rows], device=text.device).argsort()
        return {
            stream: torch.cat([piece[stream] for piece in pieces[: len(groups)]])[order] + idle
            for stream in self.streams
        }

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        clip = media.permute(0, 4, 1, 2, 3).to(components.device, torch.float32) / 255
        clip = (clip - _per_channel(_PIXEL_MEAN, clip)) / _per_channel(_PIXEL_STD, clip)
        x0 = vae.encode(clip, return_dict=False)[0].mode().float()
        mean, std = (_per_channel(values, x0) for values in (vae.config.latents_mean, vae.config.latents_std))
        return {"visual": (x0 - mean) / std}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae, x = components.modules["vae"], latents["visual"]
        x = x * _per_channel(vae.config.latents_std, x) + _per_channel(vae.config.latents_mean, x)
        clip = vae.decode(x, return_dict=False)[0].float()
        clip = clip * _per_channel(_PIXEL_STD, clip) + _per_channel(_PIXEL_MEAN, clip)
        return clip.clamp(0, 1).transpose(1, 2)

    @torch.no_grad()
    def decode_audio(self, components: Components, latents: Latents) -> tuple[Tensor, int]:
        """The autoencoder of sound is mono: each channel is a sample of its batch."""
        vae, rows = components.modules["audio_vae"], latents["audio"]
        x = rows.reshape(len(rows) * _AUDIO_CHANNELS, -1, rows.shape[-1]).permute(0, 2, 1).contiguous()
        mean, std = (
            torch.tensor(values, device=x.device).view(1, -1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        audio: Tensor = vae.decode(x * std + mean, return_dict=False)[0].float()
        return audio.reshape(len(rows), _AUDIO_CHANNELS, -1), vae.config.sampling_rate

    def sound_format(self, components: Components) -> tuple[int, int]:
        return config_of(components, "audio_vae")["sampling_rate"], _AUDIO_CHANNELS

    @torch.no_grad()
    def encode_audio(self, components: Components, audio: Tensor, geometry: Geometry) -> Latents:
        """Each channel is a sample of the autoencoder's batch, as in `decode_audio`; the mean, as the model was made."""
        vae = components.modules["audio_vae"]
        rows = audio.flatten(0, 1).unsqueeze(1).to(components.device)
        x0 = vae.encode(rows, return_dict=False)[0].mode().float()
        mean, std = (
            torch.tensor(values, device=x0.device).view(1, -1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        length = self.latent_shapes(components, geometry)["audio"][0] // _AUDIO_CHANNELS
        x0 = torch.nn.functional.pad(x0, (0, max(0, length - x0.shape[2])), mode="replicate")[:, :, :length]
        return {"audio": ((x0 - mean) / std).transpose(1, 2).reshape(len(audio), -1, x0.shape[1])}

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        """The pipeline steps rows without a batch dimension: visual [B Nv, 4 C], audio [B 2 N, C]."""
        return {"visual": _pack(latents["visual"]).flatten(0, 1), "audio": latents["audio"].flatten(0, 1)}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        visual, audio = latents["visual"], latents["audio"]
        num_audio = _AUDIO_CHANNELS * round(geometry.num_frames / _FPS * _AUDIO_LATENTS_PER_SECOND)
        audio = audio.reshape(-1, num_audio, audio.shape[-1])
        visual = visual.reshape(len(audio), -1, visual.shape[-1])
        height, width = geometry.height // _RATIO, geometry.width // _RATIO
        return {"visual": _unpack(visual, height, width), "audio": audio}


_RATIO = 16
"""Pixels a latent pixel, of the only autoencoder that there is."""
_PATCH = (1, 2, 2)


class _TextOnly:
    """Stands in for the processor, which is asked for nothing but the kinds of tokens: 0 is text."""

    def create_mm_token_type_ids(self, token_ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in token_ids]


def _forward(transformer: nn.Module, x: Latents, text: Tensor, visual_time: float, audio_time: float) -> Latents:
    """Rows of one layout. text: [B, L, D]."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (
        MiniMaxH3PrepareLayoutStep,
        MiniMaxH3SetTimestepsStep,
    )
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
        MINIMAX_H3_AUDIO_TAG,
        MINIMAX_H3_TEXT_TAG,
        MINIMAX_H3_VIDEO_TAG,
    )

    frames, height, width = x["visual"].shape[2:]
    length, device = text.shape[1], text.device
    position_ids, tags, video, audio, words, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((length,), MINIMAX_H3_TEXT_TAG),
        frames,
        height,
        width,
        x["audio"].shape[1] // _AUDIO_CHANNELS,
        _PATCH,
        _AUDIO_CHANNELS,
        MINIMAX_H3_AUDIO_TAG,
        MINIMAX_H3_VIDEO_TAG,
    )
    times, time_indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, 0, 0, length, visual_time, audio_time, visual_time, audio_time
    )
    visual_out, audio_out = transformer(
        hidden_states=_pack(x["visual"]),
        audio_hidden_states=x["audio"],
        encoder_hidden_states=text,
        timestep=times.to(device),
        timestep_indices=time_indices.to(device),
        token_tags=tags.to(device),
        position_ids=position_ids.to(device),
        video_indices=video.to(device),
        audio_indices=audio.to(device),
        text_indices=words.to(device),
        return_dict=False,
    )
    return {"visual": -_unpack(visual_out.float(), height, width), "audio": -audio_out.float()}


def _pack(x: Tensor) -> Tensor:
    """[B, C, T, H, W] -> [B, T H/2 W/2, 4 C]: one row for each patch, channels outermost."""
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames, height // 2, 2, width // 2, 2)
    return x.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, channels * 4)


def _unpack(rows: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `_pack`; sizes in latent pixels."""
    x = rows.reshape(len(rows), -1, height // 2, width // 2, rows.shape[-1] // 4, 2, 2)
    return x.permute(0, 4, 1, 2, 5, 3, 6).reshape(len(rows), x.shape[4], -1, height, width)


def _per_channel(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device).view(1, -1, 1, 1, 1)


def _vae_facts(components: Components) -> tuple[int, int, int]:
    """Frames that are encoded together, latent frames that they become, pixels a latent pixel."""
    config: Any = config_of(components, "vae")
    chunk = config["clip_length"]
    kept = math.ceil(chunk / math.prod(config["temporal_downsample_factors"]))
    return chunk, kept, math.prod(config["spatial_downsample_factors"])
