"""FLUX.2 dev and klein: diffusers' Flux2Pipeline and Flux2KleinPipeline layouts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from verst.errors import RequestError
from verst.families.base import ALL_PARTS, ANY_IMAGES, Components, Part, SamplingDefaults
from verst.families.dynamic_shift import euler_schedule, falling_sigmas
from verst.families.loading import config_of, load_components
from verst.families.patches import token_grid
from verst.families.sequence import Along, Blocks, SequencePlan, self_attention
from verst.families.sizes import check_is_image, check_pixels
from verst.flow.guidance import classifier_free
from verst.flow.scheduler import FlowMatchEulerDiscreteScheduler
from verst.types import Conditioning, Geometry, Latents, join_rows

_PARTS: dict[Part, tuple[str, ...]] = {
    "transformer": ("transformer",),
    "text": ("text_encoder", "tokenizer"),
    "autoencoder": ("vae",),
    "scheduler": ("scheduler",),
}
_LARGEST_IMAGE = 1024 * 1024
"""Pixels; a larger condition image is scaled down to this many."""


class Flux2:
    """dev: its guidance scale is an input of the transformer, so there is no negative side.

    A latent's 2x2 patches are channels of the stream already ([B, 4 C, H/16, W/16]): noise is drawn in that layout.
    """

    name: str = "flux2"
    streams: tuple[str, ...] = ("visual",)
    lora_targets: tuple[str, ...] = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj")
    """The single-stream blocks' own `attn.to_out` is left out: in the others that name is a list of layers."""
    fsdp_blocks: tuple[str, ...] = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    fp32_modules: tuple[str, ...] = ()
    sequence_plan: SequencePlan = SequencePlan(
        blocks=(
            Blocks(
                path="transformer_blocks",
                tokens=("encoder_hidden_states", "hidden_states"),
                returns=("encoder_hidden_states", "hidden_states"),
                along={"image_rotary_emb": Along(of=("encoder_hidden_states", "hidden_states"), dim=0)},
                attention={"attn": self_attention("encoder_hidden_states", "hidden_states")},
            ),
            Blocks(
                path="single_transformer_blocks",
                tokens=("hidden_states",),
                returns=("hidden_states",),
                along={"image_rotary_emb": Along(of=("hidden_states",), dim=0)},
                attention={"attn": self_attention("hidden_states")},
            ),
        )
    )
    unguided_scale: float = math.inf
    num_images: int = ANY_IMAGES

    def load(
        self, folder: Path, *, parts: Iterable[Part] = ALL_PARTS, dtype: torch.dtype, device: torch.device
    ) -> Components:
        return load_components(self, folder, _PARTS, parts=parts, dtype=dtype, device=device)

    def check_prompts(self, components: Components, prompts: Sequence[str], *, max_sequence_length: int) -> list[str]:
        """The length counts the system message and the chat template as well."""
        lengths = [self._num_tokens(components, prompt) for prompt in prompts]
        return [
            f"prompt {prompt!r} has {length} tokens with its template, the model takes {max_sequence_length}"
            for prompt, length in zip(prompts, lengths, strict=True)
            if length > max_sequence_length
        ]

    def _num_tokens(self, components: Components, prompt: str) -> int:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input(prompts=[prompt])
        encoded = components.modules["tokenizer"].apply_chat_template(
            messages, add_generation_prompt=False, tokenize=True, return_dict=True
        )
        return len(encoded["input_ids"][0])

    def encode_prompts(
        self,
        components: Components,
        prompts: Sequence[str],
        *,
        max_sequence_length: int,
        geometry: Geometry | None = None,
        negative: bool = False,
    ) -> dict[str, Tensor]:
        """`encoder_hidden_states` [B, max_sequence_length, 3 D]: three layers, with their padding, which is not masked."""
        del geometry, negative
        pipeline = self._pipeline(components)
        rows = [
            pipeline.encode_prompt(prompt, device=components.device, max_sequence_length=max_sequence_length)[0]
            for prompt in prompts
        ]
        return join_rows([{"encoder_hidden_states": row} for row in rows])

    def sampling_defaults(self, components: Components) -> SamplingDefaults:
        size = 128 * _vae_factor(components)
        # Of both pipelines' __call__; klein's negative side is always the empty prompt.
        return SamplingDefaults(
            geometry=Geometry(height=size, width=size),
            num_steps=50,
            guidance_scale=4.0,
            negative_prompt="",
            max_sequence_length=512,
        )

    def check_geometry(self, components: Components, geometry: Geometry) -> None:
        check_pixels(geometry, multiple=2 * _vae_factor(components))
        check_is_image(geometry, self.name)

    def latent_shapes(self, components: Components, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        factor = 2 * _vae_factor(components)
        channels = config_of(components, "transformer")["in_channels"]
        return {"visual": (channels, geometry.height // factor, geometry.width // factor)}

    def schedule(
        self, components: Components, geometry: Geometry, *, num_steps: int, shift: float | None
    ) -> dict[str, FlowMatchEulerDiscreteScheduler]:
        """The shift depends on the number of steps as well as on that of tokens."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        _, height, width = self.latent_shapes(components, geometry)["visual"]
        config = components.modules["scheduler"].config
        mu = compute_empirical_mu(height * width, num_steps)
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
        images = _image_latents(conditioning.positive)
        tokens = torch.cat([_pack(part) for part in (x, *images)], dim=1).to(dtype)
        ids = torch.cat(
            [_grid_ids(part, t) for part, t in zip((x, *images), range(0, 10 * len(images) + 1, 10), strict=True)]
        )
        timestep = sigmas["visual"].float() * 1000 / 1000  # The pipeline's own way round: the last bits may differ.

        def forward(side: dict[str, Tensor]) -> Tensor:
            text = side["encoder_hidden_states"].to(dtype)
            output: Tensor = transformer(
                hidden_states=tokens,
                timestep=timestep,
                guidance=self._embedded_guidance(x, guidance_scale),
                encoder_hidden_states=text,
                txt_ids=_text_ids(text).expand(len(x), -1, -1),
                img_ids=ids.to(x.device).expand(len(x), -1, -1),
                return_dict=False,
            )[0]
            return output[:, : x.shape[2] * x.shape[3]].float()

        v = forward(conditioning.positive)
        if guidance_scale > self.unguided_scale and conditioning.negative is not None:
            v = classifier_free(v, forward(conditioning.negative), guidance_scale)
        return {"visual": v.transpose(1, 2).reshape(x.shape)}

    def _embedded_guidance(self, x: Tensor, scale: float) -> Tensor | None:
        return x.new_full((len(x),), scale, dtype=torch.float32)

    @torch.no_grad()
    def encode_media(self, components: Components, media: Tensor) -> Latents:
        vae = components.modules["vae"]
        pixels = media[:, 0].permute(0, 3, 1, 2).to(components.device, vae.dtype) / 127.5 - 1
        return {"visual": _encode(vae, pixels)}

    @torch.no_grad()
    def decode_pixels(self, components: Components, latents: Latents) -> Tensor:
        vae = components.modules["vae"]
        mean, std = _latent_stats(vae)
        x0 = _unpatchify(latents["visual"].to(vae.dtype) * std + mean)
        return (vae.decode(x0, return_dict=False)[0] / 2 + 0.5).clamp(0, 1).float().unsqueeze(1)

    def geometry_of(self, components: Components, images: Sequence[Tensor]) -> Geometry:
        """The size of the first condition image, as the model sees it."""
        picture = _checked(images[0], multiple=2 * _vae_factor(components))[0]
        height, width = _whole(picture, multiple=2 * _vae_factor(components))
        return Geometry(height=height, width=width)

    @torch.no_grad()
    def encode_images(self, components: Components, images: Sequence[Tensor], geometry: Geometry) -> dict[str, Tensor]:
        """`image_latents_<i>` [1, 4 C, H/16, W/16] of each image, in its own size."""
        del geometry
        vae, multiple = components.modules["vae"], 2 * _vae_factor(components)
        rows = {}
        for index, image in enumerate(images):
            picture, processor = _checked(image, multiple=multiple)
            height, width = _whole(picture, multiple=multiple)
            pixels = processor.preprocess(picture, height=height, width=width, resize_mode="crop")
            rows[f"image_latents_{index}"] = _encode(vae, pixels.to(components.device, vae.dtype))
        return rows

    def pack(self, latents: Latents, geometry: Geometry) -> Latents:
        return {"visual": _pack(latents["visual"])}

    def unpack(self, latents: Latents, geometry: Geometry) -> Latents:
        tokens = latents["visual"]
        height, width = token_grid(tokens.shape[1], geometry)
        return {"visual": tokens.transpose(1, 2).reshape(len(tokens), -1, height, width)}

    def _pipeline(self, components: Components) -> Any:
        """diffusers' own pipeline around the text encoder, for its exact prompt encoding."""
        from diffusers import Flux2Pipeline

        return Flux2Pipeline(scheduler=None, vae=None, transformer=None, **_text(components))


class Flux2Klein(Flux2):
    """Two passes with an unconditional side; a step-distilled checkpoint (`is_distilled`) has none."""

    name: str = "flux2_klein"
    unguided_scale: float = 1.0

    def for_checkpoint(self, folder: Path) -> Flux2Klein:
        family = Flux2Klein()
        if json.loads((folder / "model_index.json").read_text()).get("is_distilled"):
            family.unguided_scale = math.inf
        return family

    def _num_tokens(self, components: Components, prompt: str) -> int:
        tokenizer = components.modules["tokenizer"]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return len(tokenizer(text)["input_ids"])

    def _embedded_guidance(self, x: Tensor, scale: float) -> Tensor | None:
        return None

    def _pipeline(self, components: Components) -> Any:
        from diffusers import Flux2KleinPipeline

        return Flux2KleinPipeline(scheduler=None, vae=None, transformer=None, **_text(components))


def _text(components: Components) -> dict[str, Any]:
    return {name: components.modules[name] for name in _PARTS["text"]}


def _image_latents(side: dict[str, Tensor]) -> list[Tensor]:
    """[B, 4 C, h, w] of each condition image, in order."""
    count = sum(name.startswith("image_latents_") for name in side)
    return [side[f"image_latents_{index}"] for index in range(count)]


def _pack(x: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h w, C]."""
    return x.flatten(2).transpose(1, 2)


def _grid_ids(x: Tensor, t: int) -> Tensor:
    """[h w, 4] int64: (t, row, column, 0) of each token; t = 0 is what is made, 10, 20, ... the condition images."""
    return torch.cartesian_prod(torch.tensor([t]), torch.arange(x.shape[2]), torch.arange(x.shape[3]), torch.arange(1))


def _text_ids(text: Tensor) -> Tensor:
    """[L, 4] int64: (0, 0, 0, position)."""
    ids = torch.zeros((text.shape[1], 4), dtype=torch.int64, device=text.device)
    ids[:, 3] = torch.arange(text.shape[1], device=text.device)
    return ids


def _patchify(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, 4 C, H/2, W/2]."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def _unpatchify(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def _latent_stats(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and deviation [1, 4 C, 1, 1] of the latents: running statistics of a batch norm that normalises nothing else."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    return mean, torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)


def _encode(vae: Any, pixels: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] -> normalised latents [B, 4 C, H/16, W/16] fp32."""
    mean, std = _latent_stats(vae)
    return ((_patchify(vae.encode(pixels).latent_dist.mode()) - mean) / std).float()


def _checked(image: Tensor, *, multiple: int) -> tuple[Image.Image, Any]:
    """A condition image of at most a million pixels, and diffusers' processor for it. Raises RequestError."""
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    processor: Any = Flux2ImageProcessor(vae_scale_factor=multiple)
    picture = Image.fromarray(image.numpy())
    try:
        processor.check_image_input(picture)
    except ValueError as error:
        raise RequestError(f"image_path: {error}") from None
    if picture.width * picture.height > _LARGEST_IMAGE:
        picture = processor._resize_to_target_area(picture, _LARGEST_IMAGE)
    return picture, processor


def _whole(picture: Image.Image, *, multiple: int) -> tuple[int, int]:
    """(height, width) cut down to whole tokens."""
    return picture.height // multiple * multiple, picture.width // multiple * multiple


def _vae_factor(components: Components) -> int:
    return int(2 ** (len(config_of(components, "vae")["block_out_channels"]) - 1))
