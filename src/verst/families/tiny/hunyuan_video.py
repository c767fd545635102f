"""Small random models in the layouts of HunyuanVideo and HunyuanVideo-1.5."""

from __future__ import annotations

import inspect
import json
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from verst.families.tiny.qwen_text import qwen_tokenizer
from verst.families.tiny.spec import Tiny
from verst.families.tiny.tokenizers import BYTES, clip_tokenizer

_WIDTH = 16
"""Of the text encoders."""
_LLAMA_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Of Llama 3's tokenizer.json."""
_LLAMA_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<pad>",
)  # fmt: skip


def tiny_hunyuan_video() -> HunyuanVideoPipeline:
    """Clips in multiples of 16 pixels."""
    tokenizer = _llama_tokenizer()
    clip = clip_tokenizer(BYTES, max_length=77)
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=32, num_hidden_layers=3,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.2,
                pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        ),
        tokenizer=tokenizer,
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
            num_single_layers=1, num_refiner_layers=1, mlp_ratio=2.0, guidance_embeds=True, text_embed_dim=_WIDTH,
            pooled_projection_dim=_WIDTH, rope_axes_dim=(4, 6, 6),
        ),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4,
            scaling_factor=0.476986,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(
            CLIPTextConfig(
                hidden_size=_WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                vocab_size=len(clip), max_position_embeddings=77, initializer_factor=10.0,
                bos_token_id=clip.bos_token_id, eos_token_id=clip.eos_token_id, pad_token_id=clip.pad_token_id,
            )
        ),
        tokenizer_2=clip,
    )  # fmt: skip


def tiny_hunyuan_video_15() -> HunyuanVideo15Pipeline:
    """Clips in multiples of 16 pixels. Its 1985 tokens of text, glyphs and picture cannot be made fewer."""
    tokenizer = qwen_tokenizer(_system_message(), max_length=2048)
    return HunyuanVideo15Pipeline(
        text_encoder=Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=32, num_hidden_layers=3,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, initializer_range=0.2,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
                bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            )
        ),
        tokenizer=tokenizer,
        transformer=HunyuanVideo15Transformer3DModel(
            in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
            num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=_WIDTH, text_embed_2_dim=_WIDTH, image_embed_dim=8,
            rope_axes_dim=(4, 6, 6), target_size=640, task_type="t2v",
        ),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1,
            spatial_compression_ratio=16, temporal_compression_ratio=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=T5EncoderModel(
            T5Config(
                vocab_size=384, d_model=_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
            )
        ),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip


def _system_message() -> str:
    embed: Any = HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    message: str = inspect.signature(embed).parameters["system_message"].default
    return message


def _llama_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every word of the pipeline's template is one token: it cuts its first 95 off."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split
    text = str(DEFAULT_PROMPT_TEMPLATE["template"])
    for special in _LLAMA_SPECIALS:
        text = text.replace(special, "\0")
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator([*text.replace("{}", "\0").split("\0"), "system", "user"], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _LLAMA_SPECIALS])
    begin = _LLAMA_SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token="<|eot_id|>",
        pad_token="<pad>",
        padding_side="right",
        model_max_length=512,
    )


_SIZE: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 6.0}
_SIZE_15: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}

TINY: dict[str, Tiny] = {
    "hunyuanvideo": Tiny(
        build=tiny_hunyuan_video,
        request={**_SIZE, "num_inference_steps": 4, "max_sequence_length": 64},
        call={**_SIZE, "num_inference_steps": 4, "max_sequence_length": 64},
    ),
    "hunyuanvideo1.5": Tiny(
        build=tiny_hunyuan_video_15,
        request={**_SIZE_15, "guidance_scale": 6.0, "max_sequence_length": 1000},
        call=_SIZE_15,
        prompts=("a red cat on a table", 'two big dogs running, with the words "dogs run"'),
        negative_prompt="",  # the pipeline's own, which the call leaves out
    ),
}
"""Name of a tiny checkpoint -> how it is made and used."""
