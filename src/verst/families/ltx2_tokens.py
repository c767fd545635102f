"""LTX-2: how its tokens of video and sound are cut over ranks."""

from __future__ import annotations

from verst.families.sequence import Along, Attention, Blocks, SequencePlan, self_attention

SEQUENCE_PLAN = SequencePlan(
    blocks=(
        Blocks(
            path="transformer_blocks",
            tokens=("hidden_states", "audio_hidden_states"),
            returns=("hidden_states", "audio_hidden_states"),
            # Rotary angles are [B, N, D] or [B, H, N, D].
            along={
                "video_rotary_emb": Along(of=("hidden_states",), dim=-2),
                "audio_rotary_emb": Along(of=("audio_hidden_states",), dim=-2),
                "ca_video_rotary_emb": Along(of=("hidden_states",), dim=-2),
                "ca_audio_rotary_emb": Along(of=("audio_hidden_states",), dim=-2),
            },
            attention={
                "attn1": self_attention("hidden_states"),
                "audio_attn1": self_attention("audio_hidden_states"),
                "audio_to_video_attn": (Attention(query=("hidden_states",), key=("audio_hidden_states",)),),
                "video_to_audio_attn": (Attention(query=("audio_hidden_states",), key=("hidden_states",)),),
            },
        ),
    ),
    heads=("num_attention_heads", "audio_num_attention_heads"),
)
