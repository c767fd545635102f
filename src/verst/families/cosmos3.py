"""Cosmos 3: diffusers' Cosmos3OmniPipeline layout; text to image, to video, and to video with sound."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verst.errors import ModelError
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.latent_stats import denormalised, normalised
from verst.families.loading import config_of, index_of, load_components
from verst.families.ranks import max_over_ranks
from verst.families.sequence import Along, Attention, Blocks, SequencePlan
from verst.families.sizes import check_pixels
from verst.families.video import check_frames, euler_on_flow_sigmas, module_dtype, to_clip, to_pixels, whole_timesteps
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents, join_rows

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_tokenizer",),
    "autoencoder": ("vae", "sound_tokenizer"),
    "scheduler": ("scheduler",),
}
_FPS = 24.0
"""Of the pipeline, where nothing else is asked for."""


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """What diffusers' own packing of a sequence reads of its pipeline."""

    transformer: nn.Module
    vae_scale_factor_temporal: int


@dataclass(frozen=True, kw_only=True)
class _Autoencoder:
    """What the pipeline asks of its autoencoder when it is constructed, also where none was loaded."""

    config: SimpleNamespace
    dtype: torch.dtype = torch.float32


class Cosmos3:
    """The model embeds the prompt's tokens itself and takes one sample a call: rows of a batch follow each other.

    A checkpoint that can make sound makes it with every video, and none with an image. The pipeline's guardrail is
    not part of the model: whether to put one before the prompts and behind the media is for who serves them.
    """

    name: str = "cosmos3"
    # to_q, to_k, to_v, to_out are the text's path.
    lora_targets: tuple[str, ...] = (
        "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj", "mlp_moe_gen.down_proj",
    )  # fmt: skip
    fsdp_blocks: tuple[str, ...] = ("Cosmos3VLTextMoTDecoderLayer",)
    fp32_modules: tuple[str, ...] = ("time_embedder",)
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="layers",
                tokens=("und_seq", "gen_seq"),
                returns=("und_seq", "gen_seq"),
                dim=0,
                along={
                    "rotary_emb": tuple(
                        Along(of=(name,), dim=0) for name in ("und_seq", "und_seq", "gen_seq", "gen_seq")
                    )
                },
                attention={
                    "self_attn": (
                        Attention(query=("und_seq",), key=("und_seq",)),
                        Attention(query=("gen_seq",), key=("und_seq", "gen_seq")),
                    )
                },
            ),
        ),
        ring="reads its text causally",
    )
    # Any scale but 1 is guidance, also one below.
    unguided_scale: float = -1.0
    num_images: int = 0

    def __init__(self, *, sound: bool = False, whole_timesteps: bool = True, frames_a_latent: int = 4) -> None:
        """sound: the checkpoint has a sound tokenizer; whole_timesteps: its scheduler rounds them down."""
        self.streams: tuple[str, ...] = ("visual", "audio") if sound else ("visual",)
        self.whole_timesteps = whole_timesteps
        self.frames_a_latent = frames_a_latent

    def for_checkpoint(self, folder: Path) -> Cosmos3:
        index = json.loads((folder / "model_index.json").read_text())
        config = json.loads((folder / "transformer" / "config.json").read_text())
        vae = json.loads((folder / "vae" / "config.json").read_text())
        return type(self)(
            sound=bool(config.get("sound_gen")) and (index.get("sound_tokenizer") or [None])[0] is not None,
            whole_timesteps=index["scheduler"][1] != "FlowMatchEulerDiscreteScheduler",
            frames_a_latent=vae["scale_factor_temporal"],
        )

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(
            self,
            folder,
            _PARTS,
            parts=parts,
            dtype=dtype,
            device=device,
            optional=("sound_tokenizer",),
            keep_fp32=("vae", "sound_tokenizer"),
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
        """`input_ids` [B, L] int64 and where they are, `text_mask`: the prompt, and its size and length in words."""
        assert geometry is not None
        pipeline = _pipeline(components)
        rows = []
        for prompt in prompts:
            positive_ids, negative_ids = pipeline.tokenize_prompt(
                prompt,
                prompt,
                num_frames=geometry.num_frames,
                height=geometry.height,
                width=geometry.width,
                fps=geometry.fps or _FPS,
            )
            ids = torch.tensor([negative_ids if negative else positive_ids], device=components.device)
            rows.append({"input_ids": ids, "text_mask": torch.ones_like(ids, dtype=torch.bool)})
        return join_rows(rows)

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        # The defaults of Cosmos3OmniPipeline.__call__; the last is not read.
        return SamplingDefaults(
            geometry=Geometry(height=720, width=1280, num_frames=189, fps=_FPS),
            num_steps=35,
            guidance_scale=6.0,
            negative_prompt="",
            max_sequence_length=4096,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=config_of(components, "vae")["scale_factor_spatial"])
        check_frames(geometry, factor=self.frames_a_latent)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        config, factor = config_of(components, "transformer"), config_of(components, "vae")["scale_factor_spatial"]
        frames = (geometry.num_frames - 1) // self.frames_a_latent + 1
        shapes: dict[str, tuple[int, ...]] = {
            "visual": (config["latent_channel"], frames, geometry.height // factor, geometry.width // factor)
        }
        if "audio" in self.streams and geometry.num_frames > 1:
            sound = config_of(components, "sound_tokenizer")
            num_samples = int(geometry.num_frames / (geometry.fps or _FPS) * sound["sampling_rate"])
            hop = sound.get("hop_size") or math.prod(sound["dec_strides"])
            shapes["audio"] = (config["sound_dim"], -(-num_samples // hop))
        return shapes

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        sigmas = None
        if index_of(components).get("use_native_flow_schedule"):
            last = 1.0 - 1.0 / components.modules["scheduler"].config.num_train_timesteps
            sigmas = np.linspace(last, 0.0, num_steps + 1)[:-1]
        return {
            stream: euler_on_flow_sigmas(components, num_steps=num_steps, shift=shift, sigmas=sigmas)
            for stream in self.latent_shapes(components, geometry)
        }

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
        """Two passes for each row; under FSDP2 as many rows as the rank with most of them."""
        dtype = dtype or module_dtype(transformer)
        assert conditioning.geometry is not None
        fps = conditioning.geometry.fps or _FPS
        rows, batch = [], len(latents["visual"])
        for index in [*range(batch), *[0] * (max_over_ranks(transformer, [batch])[0] - batch)]:
            x = {stream: value[index].to(dtype) for stream, value in latents.items()}
            times = {stream: self._timestep(sigmas[stream][index]) for stream in latents}
            row = conditioning.rows(slice(index, index + 1))
            v = self._forward(transformer, x, times, row.positive, fps)
            if guidance_scale != 1 and row.negative is not None:
                u = self._forward(transformer, x, times, row.negative, fps)
                v = {stream: classifier_free(v[stream], u[stream], guidance_scale) for stream in v}
            rows.append(v)
        idle = sum(0 * value.sum() for row in rows[batch:] for value in row.values())
        return {stream: torch.stack([row[stream] for row in rows[:batch]]) + idle for stream in latents}

    def _timestep(self, sigma: Tensor) -> Tensor:
        return whole_timesteps(sigma) if self.whole_timesteps else sigma.float() * 1000

    def _forward(
        self, transformer: nn.Module, x: Latents, times: dict[str, Tensor], side: dict[str, Tensor], fps: float
    ) -> Latents:
        """One sample, one side: visual [C, T, H, W], audio [C, N], fp32."""
        ids = side["input_ids"][0][side["text_mask"][0].bool()]
        packed = self._packed(transformer, x, ids, fps)
        sound: dict[str, Any] = {}
        if "audio" in x:
            sound = {"sound_tokens": [x["audio"]], "sound_timesteps": times["audio"].expand(packed["sound_len"])}
        visual, audio, _ = transformer(
            **{name: value for name, value in packed.items() if name not in _ASSEMBLY},
            vision_tokens=[x["visual"][None]],
            vision_timesteps=times["visual"].expand(packed["num_noisy_vision_tokens"]),
            **sound,
            return_dict=False,
        )
        v = {"visual": visual[0][0].float()}
        return {**v, "audio": audio[0].float()} if "audio" in x else v

    def _packed(self, transformer: nn.Module, x: Latents, ids: Tensor, fps: float) -> dict[str, Any]:
        """The joint sequence [text, vision, sound], laid out by the pipeline's own functions."""
        from diffusers import Cosmos3OmniPipeline

        pipeline: Any = Cosmos3OmniPipeline
        packing = _Packing(transformer=transformer, vae_scale_factor_temporal=self.frames_a_latent)
        text = pipeline._prepare_text_segment(packing, ids.tolist(), device=ids.device)
        start = text["vision_start_temporal_offset"]
        vision = pipeline._prepare_vision_segment(
            packing, x["visual"][None], False, start, fps, curr=text["und_len"], device=ids.device
        )
        length = text["und_len"] + vision["num_vision_tokens"]
        positions, sound = [text["text_mrope_ids"], vision["vision_mrope_ids"]], {}
        if "audio" in x:
            config: Any = transformer.config
            sound = pipeline._prepare_sound_segment(
                packing, x["audio"], start, float(config.sound_latent_fps), curr=length, device=ids.device
            )
            positions.append(sound["sound_mrope_ids"])
            length += sound["sound_len"]
        return {
            **text,
            **vision,
            **sound,
            "position_ids": torch.cat(positions, dim=1),
            "sequence_length": length,
        }

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        return {"visual": normalised(vae.encode(to_clip(media, vae)).latent_dist.mode(), vae).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        return to_pixels(vae.decode(denormalised(latents["visual"].to(vae.dtype), vae), return_dict=False)[0])

    @torch.no_grad()
    def decode_audio(self, components: Components, latents: Latents) -> tuple[Tensor, int] | None:
        if "audio" not in latents:
            return None
        sound = components.modules["sound_tokenizer"]
        return sound.decode(latents["audio"].to(sound.dtype)).float(), sound.config.sampling_rate

    def sound_format(self, components: Components) -> tuple[int, int]:
        sound, config = components.modules["sound_tokenizer"], config_of(components, "sound_tokenizer")
        if sound.encoder is None:
            raise ModelError(
                f"{components.folder / 'sound_tokenizer'} holds a decoder alone, so {self.name} cannot learn sound from it"
            )
        return config["sampling_rate"], 2 if config["stereo"] else 1

    @torch.no_grad()
    def encode_audio(self, components: Components, audio: Tensor, geometry: Geometry) -> Latents:
        sound, length = components.modules["sound_tokenizer"], self.latent_shapes(components, geometry)["audio"][1]
        x0 = sound.encode(audio.to(components.device, sound.dtype)).latent_dist.mode().float()
        return {"audio": torch.nn.functional.pad(x0, (0, max(0, length - x0.shape[2])), mode="replicate")[..., :length]}

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        """The pipeline steps one sample with a batch dimension of its own: visual [B, 1, C, T, H, W]."""
        return {**latents, "visual": latents["visual"].unsqueeze(1)}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {**latents, "visual": latents["visual"].squeeze(1)}


_ASSEMBLY = frozenset(
    {
        "text_mrope_ids", "vision_start_temporal_offset", "vision_mrope_ids", "num_vision_tokens",
        "num_noisy_vision_tokens", "sound_mrope_ids", "sound_len",
    }
)  # fmt: skip
"""What the segments say for their own assembly, not for the transformer."""


def _pipeline(components: Components) -> Any:
    """diffusers' own pipeline around the tokenizer, for its exact prompt templates."""
    from diffusers import Cosmos3OmniPipeline

    vae = _Autoencoder(config=SimpleNamespace(**config_of(components, "vae")))
    return Cosmos3OmniPipeline(
        transformer=None,
        text_tokenizer=components.modules["text_tokenizer"],
        vae=vae,
        scheduler=None,
        enable_safety_checker=False,
        default_use_system_prompt=index_of(components).get("default_use_system_prompt", True),
    )
