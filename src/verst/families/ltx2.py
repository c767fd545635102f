"""LTX-2 and LTX-2.3: diffusers' LTX2Pipeline layout, video and sound denoised together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verst.errors import ModelError, RequestError
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, falling_sigmas, linear_mu
from verst.families.loading import config_of, load_components
from verst.families.ltx2_tokens import SEQUENCE_PLAN
from verst.families.mel import log_mel
from verst.families.sequence import SequencePlan
from verst.families.sizes import check_pixels
from verst.families.video import check_frames, module_dtype, to_clip, to_pixels
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer", "connectors"),
    "autoencoder": ("vae", "audio_vae", "vocoder"),
    "scheduler": ("scheduler",),
}
_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
_FPS = 24.0
"""Of a geometry that states none: the pipeline's default."""
_AUDIO_COMPRESSION = 4
"""Mel frames a latent frame and mel bins a latent bin, fixed in diffusers' audio autoencoder."""
_SHIFT_DEFAULTS = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
"""The pipeline's, for a scheduler that states none."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What one stream's guidance adds to c + (g - 1)(c - u); every term is an estimate of the clean latent."""

    scale: float | None = None
    """g of this stream; None: the guidance_scale that velocity is called with."""
    stg: float = 0.0
    """Spatio-temporal guidance: weight of c - p, p with perturbed self-attention in `stg_blocks` (one forward more)."""
    modality: float = 1.0
    """Weight + 1 of c - m, m without attention between picture and sound (one forward more)."""
    rescale: float = 0.0
    """Share of the result that is rescaled to c's standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Latent sizes of a checkpoint."""

    spatial: int
    """Pixels a latent pixel."""
    temporal: int
    """Frames a latent frame."""
    mel_bins: int
    """Latent bins."""
    audio_channels: int
    audio_frames_a_second: float
    """Latent frames."""


class Ltx2:
    """Between steps: visual [B, C, T, H, W], audio [B, C, L, M] with L latent frames of M mel bins."""

    name: str = "ltx2"
    streams: tuple[str, ...] = ("visual", "audio")
    lora_targets: tuple[str, ...] = tuple(f"{a}.{p}" for a in _ATTENTIONS for p in _PROJECTIONS)
    fsdp_blocks: tuple[str, ...] = ("LTX2VideoTransformerBlock",)
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = SEQUENCE_PLAN
    unguided_scale: float = 1.0
    num_images: int = 0

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        visual: Terms | None = None,
        audio: Terms | None = None,
        stg_blocks: tuple[int, ...] = (),
    ) -> None:
        """layout: of a checkpoint, see `for_checkpoint`.

        Terms beside plain guidance are off by default: each costs a forward (and its gradients) at every step.
        """
        self.layout = layout
        self.terms = {"visual": visual or Terms(), "audio": audio or Terms()}
        self.stg_blocks = stg_blocks

    def for_checkpoint(self, folder: Path) -> Ltx2:
        """The adapter that knows the folder's latent sizes. Raises ModelError."""
        return Ltx2(layout=_layout(folder), **self.terms, stg_blocks=self.stg_blocks)

    @property
    def _sizes(self) -> Layout:
        assert self.layout is not None, "only the adapter of a checkpoint knows its latent sizes: use for_checkpoint"
        return self.layout

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(
            self, folder, _PARTS, parts=parts, dtype=dtype, device=device, keep_fp32=_PARTS["autoencoder"]
        )

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        config = config_of(components, "connectors")
        registers = config.get("video_connector_num_learnable_registers")
        if registers and max_sequence_length % registers:
            nearest = max(registers, round(max_sequence_length / registers) * registers)
            raise RequestError(
                f"max_sequence_length = {max_sequence_length} is not a multiple of the {registers} registers that "
                f"stand in for missing tokens; nearest that is: {nearest}"
            )
        ids = components.modules["tokenizer"]([p.strip() for p in prompts], truncation=False)["input_ids"]
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
        """What the connectors make of the text, once for each stream, and their mask [B, L]."""
        pipeline = _pipeline(components)
        embeds, mask, _, _ = pipeline.encode_prompt(
            prompt=list(prompts),
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            device=components.device,
        )
        visual, audio, mask = components.modules["connectors"](
            embeds, mask, padding_side=components.modules["tokenizer"].padding_side
        )
        return {"encoder_hidden_states": visual, "audio_encoder_hidden_states": audio, "attention_mask": mask}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        # The defaults of LTX2Pipeline.__call__.
        return SamplingDefaults(
            geometry=Geometry(height=512, width=768, num_frames=121, fps=_FPS),
            num_steps=30,
            guidance_scale=3.0,
            negative_prompt="",
            max_sequence_length=1024,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        layout = self._sizes
        check_pixels(geometry, multiple=max(32, layout.spatial))  # 32 is the pipeline's own check.
        check_frames(geometry, factor=layout.temporal)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        layout = self._sizes
        frames = (geometry.num_frames - 1) // layout.temporal + 1
        length = round(geometry.num_frames / (geometry.fps or _FPS) * layout.audio_frames_a_second)
        channels = config_of(components, "transformer")["in_channels"]
        return {
            "visual": (channels, frames, geometry.height // layout.spatial, geometry.width // layout.spatial),
            "audio": (layout.audio_channels, length, layout.mel_bins),
        }

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """One grid for both streams: its shift follows the number of video tokens."""
        _, frames, height, width = self.latent_shapes(components, geometry)["visual"]
        config = components.modules["scheduler"].config
        tokens = frames * height * width
        mu = linear_mu(tokens, {**_SHIFT_DEFAULTS, **config})
        grids = {name: euler_schedule(config, falling_sigmas(num_steps), mu=mu, shift=shift) for name in self.streams}
        if not grids["visual"].sigmas.isfinite().all():
            raise RequestError(
                f"{tokens} video tokens shift every noise level to 1, so there is no grid: "
                "make the clip smaller or shorter, or give sigma_shift"
            )
        return grids

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
        """Guidance is combined in data space, with each stream's own sigma, and turned back into a velocity."""
        call = _Call(transformer, latents, sigmas, conditioning, dtype or module_dtype(transformer))
        scales = {name: guidance_scale if t.scale is None else t.scale for name, t in self.terms.items()}
        if guidance_scale > 1 and conditioning.negative is not None:
            negative, clean = call.both_sides()
            deltas = {name: [(scales[name] - 1) * (clean[name] - negative[name])] for name in clean}
        else:
            clean = call.clean(conditioning.positive)
            deltas = {name: [] for name in clean}
        if any(t.stg > 0 for t in self.terms.values()):
            perturbed = call.clean(conditioning.positive, spatio_temporal_guidance_blocks=list(self.stg_blocks))
            for name, t in self.terms.items():
                deltas[name].append(t.stg * (clean[name] - perturbed[name]))
        if any(t.modality > 1 for t in self.terms.values()):
            apart = call.clean(conditioning.positive, isolate_modalities=True)
            for name, t in self.terms.items():
                deltas[name].append((t.modality - 1) * (clean[name] - apart[name]))
        guided = {name: _guided(clean[name], deltas[name], self.terms[name].rescale) for name in clean}
        return call.velocity(guided)

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        """The picture's latents alone: uint8 frames carry no sound."""
        vae = components.modules["vae"]
        latent = vae.encode(to_clip(media, vae)).latent_dist.mode()
        mean, std = (x.view(1, -1, 1, 1, 1).to(latent) for x in (vae.latents_mean, vae.latents_std))
        return {"visual": ((latent - mean) * vae.config.scaling_factor / std).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        x0 = latents["visual"]
        mean, std = (x.view(1, -1, 1, 1, 1).to(x0) for x in (vae.latents_mean, vae.latents_std))
        x0 = (x0 * std / vae.config.scaling_factor + mean).to(vae.dtype)
        # The pipeline's default decodes at time 0, where a decoder is told the time at all.
        time = x0.new_zeros(len(x0)) if vae.config.timestep_conditioning else None
        return to_pixels(vae.decode(x0, time, return_dict=False)[0])

    @torch.no_grad()
    def decode_audio(self, components: Components, latents: Latents) -> tuple[Tensor, int]:
        vae, vocoder = components.modules["audio_vae"], components.modules["vocoder"]
        packed = _pack_audio(latents["audio"])
        x0 = packed * vae.latents_std.to(packed) + vae.latents_mean.to(packed)
        x0 = _unpack_audio(x0, latents["audio"].shape[-1]).to(vae.dtype)
        wave: Tensor = vocoder(vae.decode(x0, return_dict=False)[0])
        return wave.float(), int(vocoder.config.output_sampling_rate)

    def sound_format(self, components: Components) -> tuple[int, int]:
        config = config_of(components, "audio_vae")
        return config["sample_rate"], config["in_channels"]

    @torch.no_grad()
    def encode_audio(self, components: Components, audio: Tensor, geometry: Geometry) -> Latents:
        vae, length = components.modules["audio_vae"], self.latent_shapes(components, geometry)["audio"][1]
        config = vae.config
        mel = log_mel(audio, sample_rate=config.sample_rate, hop=config.mel_hop_length, bins=config.mel_bins)
        # The encoder is causal: its first latent frame is of one mel frame, every other of four.
        wanted = _AUDIO_COMPRESSION * (length - 1) + 1
        mel = torch.nn.functional.pad(mel, (0, 0, 0, max(0, wanted - mel.shape[2])), mode="replicate")[:, :, :wanted]
        x0 = vae.encode(mel.to(vae.device, vae.dtype)).latent_dist.mode().float()
        packed = (_pack_audio(x0) - vae.latents_mean.to(x0)) / vae.latents_std.to(x0)
        return {"audio": _unpack_audio(packed, x0.shape[-1])}

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return _pack(latents)

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        layout = self._sizes
        height, width = geometry.height // layout.spatial, geometry.width // layout.spatial
        visual = latents["visual"].transpose(1, 2).unflatten(2, (-1, height, width)).contiguous()
        return {"visual": visual, "audio": _unpack_audio(latents["audio"], layout.mel_bins)}


class _Call:
    """The forwards of one step, on latents packed as diffusers' pipeline packs them."""

    def __init__(
        self, transformer: nn.Module, latents: Latents, sigmas: dict[str, Tensor], conditioning: Conditioning,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._transformer, self._conditioning, self._dtype = transformer, conditioning, dtype
        self._shapes = {name: x.shape for name, x in latents.items()}
        self._x = _pack(latents)
        self._sigma = {name: sigmas[name].float() for name in latents}
        self._fps = (conditioning.geometry and conditioning.geometry.fps) or _FPS
        config: Any = transformer.config
        # LTX-2 feeds each stream's cross-attention its own time, later versions the other stream's.
        self._cross_timestep = bool(config.cross_attn_mod or config.audio_cross_attn_mod)

    def clean(self, rows: dict[str, Tensor], **perturbation: Any) -> Latents:
        """Estimated clean latents, packed, fp32."""
        return self._to_clean(self._forward(self._x, self._sigma, rows, **perturbation))

    def both_sides(self) -> tuple[Latents, Latents]:
        """(negative, positive) from one doubled batch, as the pipeline does it."""
        negative, positive = self._conditioning.negative, self._conditioning.positive
        assert negative is not None
        rows = {name: torch.cat([negative[name], value]) for name, value in positive.items()}
        x, sigma = ({k: torch.cat([t, t]) for k, t in part.items()} for part in (self._x, self._sigma))
        v = self._forward(x, sigma, rows)
        halves = {name: value.chunk(2) for name, value in v.items()}
        first, second = ({name: half[side] for name, half in halves.items()} for side in (0, 1))
        return self._to_clean(first), self._to_clean(second)

    def velocity(self, clean: Latents) -> Latents:
        """Unpacked."""
        v = {name: (self._x[name] - x0) / self._sigma[name].view(-1, 1, 1) for name, x0 in clean.items()}
        visual = v["visual"].transpose(1, 2).reshape(self._shapes["visual"])
        return {"visual": visual, "audio": _unpack_audio(v["audio"], self._shapes["audio"][-1])}

    def _to_clean(self, v: Latents) -> Latents:
        return {name: self._x[name] - value * self._sigma[name].view(-1, 1, 1) for name, value in v.items()}

    def _forward(self, x: Latents, sigma: Latents, rows: dict[str, Tensor], **perturbation: Any) -> Latents:
        frames, height, width = self._shapes["visual"][2:]
        time = {name: value * 1000 for name, value in sigma.items()}
        mask = rows["attention_mask"]
        visual, audio = self._transformer(
            hidden_states=x["visual"].to(self._dtype),
            audio_hidden_states=x["audio"].to(self._dtype),
            encoder_hidden_states=rows["encoder_hidden_states"].to(self._dtype),
            audio_encoder_hidden_states=rows["audio_encoder_hidden_states"].to(self._dtype),
            timestep=time["visual"],
            audio_timestep=time["audio"],
            sigma=time["visual"],
            audio_sigma=time["audio"],
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=self._fps,
            audio_num_frames=self._shapes["audio"][2],
            use_cross_timestep=self._cross_timestep,
            return_dict=False,
            **perturbation,
        )
        return {"visual": visual.float(), "audio": audio.float()}


def _guided(clean: Tensor, deltas: Sequence[Tensor], rescale: float) -> Tensor:
    """c plus all terms, a share of it brought back to c's standard deviation (arXiv 2305.08891, equation 16)."""
    guided = clean
    for delta in deltas:
        guided = guided + delta
    if rescale == 0:
        return guided
    wanted, got = (x.std(dim=(1, 2), keepdim=True) for x in (clean, guided))
    return rescale * (guided * (wanted / got)) + (1 - rescale) * guided


def _pack(latents: Latents) -> Latents:
    return {"visual": latents["visual"].flatten(2).transpose(1, 2).contiguous(), "audio": _pack_audio(latents["audio"])}


def _pack_audio(audio: Tensor) -> Tensor:
    """[B, C, L, M] -> [B, L, C * M]"""
    return audio.transpose(1, 2).flatten(2, 3)


def _unpack_audio(packed: Tensor, mel_bins: int) -> Tensor:
    return packed.unflatten(2, (-1, mel_bins)).transpose(1, 2).contiguous()


def _layout(folder: Path) -> Layout:
    """Raises ModelError for a transformer that groups latent pixels, which no released one does."""
    transformer, vae, audio = (
        json.loads((folder / name / "config.json").read_text()) for name in ("transformer", "vae", "audio_vae")
    )
    if (transformer["patch_size"], transformer["patch_size_t"]) != (1, 1):
        raise ModelError(f"{folder / 'transformer'}: patch_size and patch_size_t other than 1 are not supported")
    scalings = sum(vae["spatio_temporal_scaling"])
    return Layout(
        spatial=vae.get("spatial_compression_ratio") or vae["patch_size"] * 2**scalings,
        temporal=vae.get("temporal_compression_ratio") or vae["patch_size_t"] * 2**scalings,
        mel_bins=audio["mel_bins"] // _AUDIO_COMPRESSION,
        audio_channels=audio["latent_channels"],
        audio_frames_a_second=audio["sample_rate"] / audio["mel_hop_length"] / float(_AUDIO_COMPRESSION),
    )


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
    from diffusers import LTX2Pipeline

    names = ("scheduler", "vae", "audio_vae", "text_encoder", "tokenizer", "connectors", "transformer", "vocoder")
    own = {name: components.modules[name] for name in ("text_encoder", "tokenizer")}
    return LTX2Pipeline(**dict.fromkeys(names) | own)
