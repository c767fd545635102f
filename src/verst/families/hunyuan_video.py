"""HunyuanVideo and HunyuanVideo-1.5: diffusers' HunyuanVideoPipeline and HunyuanVideo15Pipeline layouts."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from verst.errors import ModelError
from verst.families.base import ALL_PARTS, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule
from verst.families.loading import config_of, load_components
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_pixels
from verst.families.video import check_frames, module_dtype, to_clip, to_pixels
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}
_FPS = 24.0


class _Lineage:
    """Latents [B, C, T, H, W], one scale around an autoencoder, a static shift over linspace(1, 0)."""

    streams: tuple[str, ...] = ("visual",)
    num_images: int = 0
    name: str
    _spatial: int
    """Pixels a latent pixel, where the autoencoder's config states none."""

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        spatial, temporal = self._vae_factors(components)
        # 16 is HunyuanVideoPipeline's own check.
        check_pixels(geometry, multiple=max(16, spatial * config_of(components, "transformer")["patch_size"]))
        check_frames(geometry, factor=temporal)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        spatial, temporal = self._vae_factors(components)
        channels = config_of(components, "transformer")["out_channels"]
        frames = (geometry.num_frames - 1) // temporal + 1
        return {"visual": (channels, frames, geometry.height // spatial, geometry.width // spatial)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        del geometry  # the shift is static
        sigmas = np.linspace(1.0, 0.0, num_steps + 1)[:-1]
        return {"visual": euler_schedule(components.modules["scheduler"].config, sigmas, mu=0.0, shift=shift)}

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        """One clip at a time, as below."""
        vae = components.modules["vae"]
        latents = [vae.encode(clip).latent_dist.mode() for clip in to_clip(media, vae).split(1)]
        return {"visual": (torch.cat(latents) * vae.config.scaling_factor).float()}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        """One clip at a time: the attention mask of 1.5's autoencoder in diffusers 0.42 fits no other batch."""
        vae = components.modules["vae"]
        x0 = latents["visual"].to(vae.dtype) / vae.config.scaling_factor
        return to_pixels(torch.cat([vae.decode(row, return_dict=False)[0] for row in x0.split(1)]))

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        return latents

    def _vae_factors(self, components: Components) -> tuple[int, int]:
        """Pixels a latent pixel, frames a latent frame."""
        config = config_of(components, "vae")
        return config.get("spatial_compression_ratio") or self._spatial, config.get("temporal_compression_ratio") or 4


def _plan(*paths: str, mask: Literal["whole", "pairs"] = "whole") -> SequencePlan:
    both = ("hidden_states", "encoder_hidden_states")
    # The double blocks call it the one, the single blocks the other.
    along = {name: Along(of=("hidden_states",), dim=0) for name in ("freqs_cis", "image_rotary_emb")}
    if mask == "pairs":
        along["attention_mask"] = Along(of=("encoder_hidden_states",), dim=1)
    return SequencePlan(
        blocks=tuple(
            Blocks(
                path=path, tokens=both, returns=both, along=along, attention={"attn": self_attention(*both, mask=mask)}
            )
            for path in paths
        ),
        ring="masks the padding of its text",
    )


class HunyuanVideo(_Lineage):
    """Guidance is distilled into the model: the scale is an input, and no negative prompt is read."""

    name: str = "hunyuan_video"
    lora_targets: tuple[str, ...] = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip
    fsdp_blocks: tuple[str, ...] = ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock")
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = _plan("transformer_blocks", "single_transformer_blocks")
    unguided_scale: float = math.inf
    _spatial = 8

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

        template: Any = DEFAULT_PROMPT_TEMPLATE
        modules, problems = components.modules, []
        for prompt in prompts:
            long = len(modules["tokenizer"](template["template"].format(prompt))["input_ids"]) - template["crop_start"]
            short = len(modules["tokenizer_2"](prompt, truncation=False)["input_ids"])
            for name, count, limit in (("tokenizer", long, max_sequence_length), ("tokenizer_2", short, 77)):
                if count > limit:
                    problems.append(f"prompt {prompt!r} has {count} tokens for {name}, which takes {limit}")
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
        """Text rows of max_sequence_length tokens with their mask, and CLIP's pooled row."""
        from diffusers import HunyuanVideoPipeline

        parts = dict.fromkeys(("transformer", "vae", "scheduler"))
        pipeline: Any = HunyuanVideoPipeline(**parts, **{name: components.modules[name] for name in _PARTS["text"]})
        embeds, pooled, mask = pipeline.encode_prompt(
            prompt=list(prompts), device=components.device, max_sequence_length=max_sequence_length
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled, "attention_mask": mask}

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        # The defaults of HunyuanVideoPipeline.__call__; frames a second as the model was trained.
        return SamplingDefaults(
            geometry=Geometry(height=720, width=1280, num_frames=129, fps=_FPS),
            num_steps=50,
            guidance_scale=6.0,
            negative_prompt="",
            max_sequence_length=256,
        )

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
        x, rows = latents["visual"], conditioning.positive
        output: Tensor = transformer(
            hidden_states=x.to(dtype),
            timestep=sigmas["visual"].float() * 1000,
            encoder_hidden_states=rows["encoder_hidden_states"].to(dtype),
            encoder_attention_mask=rows["attention_mask"].to(dtype),
            pooled_projections=rows["pooled_projections"].to(dtype),
            guidance=torch.tensor([guidance_scale] * len(x), dtype=dtype, device=x.device) * 1000.0,
            return_dict=False,
        )[0]
        return {"visual": output.float()}


class HunyuanVideo15(_Lineage):
    """Two texts, of which the second is what stands in quotation marks; guidance in two passes."""

    name: str = "hunyuan_video_15"
    lora_targets: tuple[str, ...] = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    """The text's own projections are left out: the last block's output for the text is not read."""
    fsdp_blocks: tuple[str, ...] = ("HunyuanVideo15TransformerBlock",)
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = _plan("transformer_blocks", mask="pairs")
    unguided_scale: float = 1.0
    _spatial = 16
    _crop = 108
    """Tokens of the pipeline's template before the prompt."""
    _glyph_tokens = 256
    _vision_tokens = 729

    def for_checkpoint(self, folder: Path) -> HunyuanVideo15:
        """Itself, once the guider is one that velocity reproduces. Raises ModelError."""
        guider = _guider(folder)
        plain = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0, "enabled": True}
        other = {name: guider[name] for name, value in plain.items() if guider.get(name, value) != value}
        if guider["_class_name"] != "ClassifierFreeGuidance" or other:
            raise ModelError(
                f"{folder / 'guider'} is {guider['_class_name']} with {other}; only plain ClassifierFreeGuidance is known"
            )
        return self

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as upstream

        embed: Any = upstream.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
        system = inspect.signature(embed).parameters["system_message"].default
        modules, problems = components.modules, []
        for prompt in prompts:
            (ids,) = modules["tokenizer"].apply_chat_template(
                upstream.format_text_input([prompt], system), add_generation_prompt=True, return_dict=True
            )["input_ids"]
            glyphs = modules["tokenizer_2"](upstream.extract_glyph_texts(prompt) or "")["input_ids"]
            counts = (("tokenizer", len(ids) - self._crop, max_sequence_length),
                      ("tokenizer_2", len(glyphs), self._glyph_tokens))  # fmt: skip
            for name, count, limit in counts:
                if count > limit:
                    problems.append(f"prompt {prompt!r} has {count} tokens for {name}, which takes {limit}")
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
        """Both texts padded to their full lengths, each with its mask."""
        from diffusers import HunyuanVideo15Pipeline

        upstream: Any = HunyuanVideo15Pipeline
        modules, device = components.modules, components.device
        embeds, mask = upstream._get_mllm_prompt_embeds(
            text_encoder=modules["text_encoder"],
            tokenizer=modules["tokenizer"],
            prompt=list(prompts),
            device=device,
            tokenizer_max_length=max_sequence_length,
            crop_start=self._crop,
        )
        glyphs, glyph_mask = upstream._get_byt5_prompt_embeds(
            tokenizer=modules["tokenizer_2"],
            text_encoder=modules["text_encoder_2"],
            prompt=list(prompts),
            device=device,
            tokenizer_max_length=self._glyph_tokens,
        )
        return {
            "encoder_hidden_states": embeds,
            "attention_mask": mask,
            "encoder_hidden_states_2": glyphs,
            "attention_mask_2": glyph_mask,
        }

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

        spatial, _ = self._vae_factors(components)
        processor: Any = HunyuanVideo15ImageProcessor(vae_scale_factor=spatial)
        height, width = processor.calculate_default_height_width(
            9, 16, config_of(components, "transformer")["target_size"]
        )
        # The defaults of HunyuanVideo15Pipeline.__call__ and of its guider.
        return SamplingDefaults(
            geometry=Geometry(height=int(height), width=int(width), num_frames=121, fps=_FPS),
            num_steps=50,
            guidance_scale=_guider(components.folder)["guidance_scale"],
            negative_prompt="",
            max_sequence_length=1000,
        )

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
        """Text to video: the first frame's latent, its mask and its image embedding are zero."""
        dtype = dtype or module_dtype(transformer)
        x = latents["visual"].to(dtype)
        config: Any = transformer.config
        x = torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1)
        image = x.new_zeros(len(x), self._vision_tokens, config.image_embed_dim)

        def forward(rows: dict[str, Tensor]) -> Tensor:
            output: Tensor = transformer(
                hidden_states=x,
                image_embeds=image,
                timestep=(sigmas["visual"].float() * 1000).to(dtype),  # the embedder computes in its dtype
                encoder_hidden_states=rows["encoder_hidden_states"].to(dtype),
                encoder_attention_mask=rows["attention_mask"].to(dtype),
                encoder_hidden_states_2=rows["encoder_hidden_states_2"].to(dtype),
                encoder_attention_mask_2=rows["attention_mask_2"].to(dtype),
                return_dict=False,
            )[0]
            return output.float()

        positive = forward(conditioning.positive)
        if guidance_scale <= 1 or conditioning.negative is None:
            return {"visual": positive}
        return {"visual": classifier_free(positive, forward(conditioning.negative), guidance_scale)}


def _guider(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "guider" / "guider_config.json").read_text())
    return config
