"""Checkpoints of toy width for the rewards that are models: the published layouts, random weights, no download."""

import itertools
import json
import string
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessorPil,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen2VLModel,
    ResNetConfig,
    SwinConfig,
)

from verst.families.tiny.qwen_text import qwen_tokenizer
from verst.families.tiny.tokenizers import clip_tokenizer
from verst.rewards.base import RewardBatch

NUM_TOKENS = 24
"""Of the toy CLIP's text tower."""
INSTRUCTION = "Rate this image.\nTextual prompt - {text_prompt}\n\nThe rating: <|Reward|>\nEND\n"
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def noise(num, height=40, width=48, frames=1, seed=0):
    """uint8 [num, frames, height, width, 3]: coarse coloured blocks, which survive a resize."""
    blocks = np.random.default_rng(seed).integers(0, 256, (num, frames, 5, 6, 3), dtype=np.uint8)
    array = blocks.repeat(-(-height // 5), axis=2).repeat(-(-width // 6), axis=3)[:, :, :height, :width]
    return torch.from_numpy(np.ascontiguousarray(array))


def batch(media, prompts=None, **more):
    prompts = tuple(prompts or [f"prompt {i}" for i in range(len(media))])
    return RewardBatch(**{"media": media, "prompts": prompts, "metadata": ({},) * len(prompts), **more})


def randomise(module, seed=0, std=0.2):
    """Every parameter drawn anew: initial weights of these models are so small that all inputs look alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name != "logit_scale":
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * std + ("norm" in name or "ln_" in name) * 1.0
                )
    return module.eval()


def clip_folder(folder: Path, *, seed=0, projection=24, num_tokens=NUM_TOKENS) -> CLIPModel:
    tokenizer = clip_tokenizer(string.printable[:94], max_length=num_tokens)
    text = {**_SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": num_tokens, "hidden_act": "gelu"}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = {**_SMALL, "image_size": 32, "patch_size": 8, "hidden_act": "gelu"}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection)
    model = randomise(CLIPModel(config), seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return model


def head_weights(width, seed=0, prefix="layers."):
    sizes = [width, 1024, 128, 64, 16, 1]
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for place, (columns, rows) in zip((0, 2, 4, 6, 7), itertools.pairwise(sizes), strict=True):
        state[f"{prefix}{place}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
        state[f"{prefix}{place}.bias"] = torch.randn(rows, generator=generator)
    return state


class OpenClipBlock(nn.Module):
    """A residual block as open_clip writes it; the forward too, so that a conversion is compared by value."""

    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 48))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(48, width))

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class OpenClipTower(nn.Module):
    def __init__(self, width=32, heads=2, depth=2):
        super().__init__()
        self.resblocks = nn.ModuleList(OpenClipBlock(width, heads) for _ in range(depth))

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class OpenClipVision(nn.Module):
    def __init__(self, projection):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(32))
        self.positional_embedding = nn.Parameter(torch.empty(17, 32))
        self.proj = nn.Parameter(torch.empty(32, projection))
        self.conv1 = nn.Conv2d(3, 32, 8, 8, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(32), nn.LayerNorm(32)
        self.transformer = OpenClipTower()

    def forward(self, pixels):
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """The CLIP of open_clip with towers of toy width, written from its published parameter names."""

    def __init__(self, vocab_size, projection=24):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.positional_embedding = nn.Parameter(torch.empty(NUM_TOKENS, 32))
        self.text_projection = nn.Parameter(torch.empty(32, projection))
        self.token_embedding = nn.Embedding(vocab_size, 32)
        self.ln_final = nn.LayerNorm(32)
        self.transformer = OpenClipTower()
        self.visual = OpenClipVision(projection)

    def encode_text(self, ids, ends):
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        x = self.ln_final(self.transformer(self.token_embedding(ids) + self.positional_embedding, mask))
        return x[torch.arange(len(ids)), ends] @ self.text_projection


def bert_tokenizer():
    characters = sorted(set(string.printable[:94].lower()))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    return BertTokenizer(vocab={token: i for i, token in enumerate(vocab)})


class Vit(nn.Module):
    """The vision transformer of BLIP under its own names, two heads of 64."""

    def __init__(self, width=128):
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 17, width))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(VitBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, pixels):
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), 1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VitBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x):
        q, k, v = self.attn.qkv(self.norm1(x)).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.attn.proj(mixed)
        return x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))


def image_reward_folder(folder: Path, seed=0):
    """The original layout: ImageReward.pt, med_config.json, a BERT tokenizer. Returns vision tower, text encoder, state."""
    tokenizer = bert_tokenizer()
    tokenizer.save_pretrained(folder)
    med = {**_SMALL, "vocab_size": len(tokenizer) + 2, "max_position_embeddings": 64, "layer_norm_eps": 1e-12}
    med |= {"hidden_act": "gelu", "add_cross_attention": True, "model_type": "bert"}
    (folder / "med_config.json").write_text(json.dumps(med))
    vision = randomise(Vit(), seed, std=0.1)
    text_config = BlipTextConfig(
        **{k: v for k, v in med.items() if k in (*_SMALL, "vocab_size", "max_position_embeddings", "layer_norm_eps")},
        hidden_act="gelu", encoder_hidden_size=128, is_decoder=True,
    )  # fmt: skip
    text = randomise(BlipTextModel(text_config, add_pooling_layer=False), seed + 1)
    state = {f"blip.visual_encoder.{k}": v for k, v in vision.state_dict().items()}
    state |= {f"blip.text_encoder.{k}": v for k, v in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
    state |= {"blip.vision_proj.weight": torch.zeros(4, 128), "blip.text_proj.weight": torch.zeros(4, 32)}
    state |= head_weights(32, seed, prefix="mlp.layers.")
    torch.save(state, folder / "ImageReward.pt")
    return vision, text, state


def hps_v3_folder(folder: Path, *, old_names=False, seed=0):
    """Base model's config, tokenizer and processor, and the published file with backbone and rating head."""
    tokenizer = qwen_tokenizer(INSTRUCTION, "prompt red cat You are a helpful assistant system user")
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    text = {**_SMALL, "vocab_size": len(tokenizer), "num_key_value_heads": 1, "max_position_embeddings": 1024}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision,
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip
    config.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2).save_pretrained(folder)
    (folder / "instruction.txt").write_text(INSTRUCTION)
    # Training added one token to the vocabulary.
    config.text_config.vocab_size += 1
    model = randomise(Qwen2VLModel(config), seed, std=0.1)
    head = randomise(
        nn.Sequential(nn.Linear(32, 20), nn.ReLU(), nn.Dropout(0.05), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2)),
        seed,
    )
    names = {"language_model.": "model.", "visual.": "visual."} if old_names else {"": "model."}
    state = {}
    for name, tensor in model.state_dict().items():
        old = next(prefix for prefix in names if name.startswith(prefix))
        state[names[old] + name.removeprefix(old)] = tensor.contiguous()
    state |= {f"rm_head.{k}": v for k, v in head.state_dict().items()}
    state["lm_head.weight"] = torch.zeros(config.text_config.vocab_size, 32)
    save_file(state, folder / "HPSv3.safetensors")
    return model, head, tokenizer


def word_tokenizer(max_length):
    """Letters as tokens between <s> and </s>, as RoBERTa marks a text."""
    from tokenizers.processors import RobertaProcessing

    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *string.printable[:95]])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=max_length,
    )  # fmt: skip


def clap_folder(folder: Path, *, seed=0, fusion=False):
    tokenizer = word_tokenizer(96)
    tokenizer.save_pretrained(folder)
    text = {**_SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 96, "pad_token_id": 1}
    audio = {
        "window_size": 4, "num_mel_bins": 64, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4],
        "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "hidden_size": 32,
        "num_classes": 4, "enable_fusion": fusion, "fusion_num_hidden_layers": 1, "mlp_ratio": 1.0,
    }  # fmt: skip
    config = ClapConfig(text_config=text, audio_config=audio, projection_dim=24)
    model = randomise(ClapModel(config), seed)
    model.save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=64, sampling_rate=16000, hop_length=256, fft_window_size=512, max_length_s=1, frequency_max=8000,
        truncation="fusion" if fusion else "rand_trunc",
    ).save_pretrained(folder)  # fmt: skip
    return model


LABELS = {0: "person", 1: "cat", 2: "mouse", 3: "sofa"}


def mask2former_folder(folder: Path, *, seed=0):
    swin = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=5, id2label=LABELS,
    )  # fmt: skip
    model = randomise(Mask2FormerForUniversalSegmentation(config), seed, std=0.3)
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    return model


def detr_folder(folder: Path, *, seed=0):
    resnet = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        backbone_config=resnet, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=6, id2label=LABELS,
    )  # fmt: skip
    model = randomise(DetrForObjectDetection(config), seed, std=0.3)
    model.save_pretrained(folder)
    DetrImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(folder)
    return model
