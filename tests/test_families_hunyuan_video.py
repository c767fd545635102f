"""HunyuanVideo: tokens as tokenizer.json has them, what is cropped is named, distilled guidance, the guider."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from family_fixtures import generate, request_of, tiny_folder, tiny_worker
from tokenizers import Tokenizer

from verst.engine.resolve import resolve
from verst.errors import ModelError, PromptError
from verst.families import recognise


def test_a_llama_tokenizer_is_read_as_its_file_states_it(tmp_path: Path) -> None:
    """The released index names LlamaTokenizerFast, whose class in transformers 5 splits words another way."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("hunyuanvideo"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "LlamaTokenizerFast"]
    (folder / "model_index.json").write_text(json.dumps(index))
    components = recognise(folder).load(folder, parts=("text",), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = components.modules["tokenizer"]
    template: Any = DEFAULT_PROMPT_TEMPLATE
    expected = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    for prompt in ("a red cat", "two dogs, running!"):
        text = template["template"].format(prompt)
        assert tokenizer(text)["input_ids"] == expected.encode(text).ids
    ids = tokenizer(template["template"].format("a red cat"))["input_ids"]
    assert tokenizer.decode(ids[template["crop_start"] :]) == "a red cat<|eot_id|>"
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("<pad>", "right")


def test_the_template_of_hunyuan_video_15_ends_where_it_is_cut_off() -> None:
    from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as upstream

    tokenizer = tiny_worker("hunyuanvideo1.5").components.modules["tokenizer"]
    system: Any = upstream.HunyuanVideo15Pipeline._get_mllm_prompt_embeds.__defaults__
    (ids,) = tokenizer.apply_chat_template(
        upstream.format_text_input(["a red cat"], system[2]), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.decode(ids[108:]).startswith("a red cat<|im_end|>")


def test_long_prompts_are_named_for_each_encoder() -> None:
    worker = tiny_worker("hunyuanvideo")
    with pytest.raises(
        PromptError, match=r"91 tokens for tokenizer, which takes 64.* 92 tokens for tokenizer_2, which takes 77"
    ):
        resolve(request_of("hunyuanvideo", prompt="x" * 90), worker.components)
    worker = tiny_worker("hunyuanvideo1.5")
    with pytest.raises(PromptError, match=r"tokens for tokenizer_2, which takes 256"):
        resolve(request_of("hunyuanvideo1.5", prompt=f'the word "{"x" * 260}"'), worker.components)


def test_the_scale_is_an_input_and_the_negative_prompt_is_none() -> None:
    worker = tiny_worker("hunyuanvideo")

    def clip(**changes: Any) -> torch.Tensor:
        return (
            generate(worker, request_of("hunyuanvideo", rollout=False, media_format="float", **changes))
            .samples[0]
            .media
        )

    assert not torch.equal(clip(guidance_scale=6.0), clip(guidance_scale=1.0))
    assert torch.equal(clip(negative_prompt="blurry"), clip(negative_prompt="dark"))
    assert not resolve(request_of("hunyuanvideo"), worker.components).guided


def test_quoted_words_reach_the_second_encoder() -> None:
    worker = tiny_worker("hunyuanvideo1.5")
    rows = [
        worker.family.encode_prompts(worker.components, [prompt], max_sequence_length=1000)
        for prompt in ('the word "dog"', "the word dog")
    ]
    assert [int(row["attention_mask_2"].sum()) for row in rows] == [13, 0]


def test_another_guider_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("hunyuanvideo1.5"), folder)
    config = json.loads((folder / "guider" / "guider_config.json").read_text())
    (folder / "guider" / "guider_config.json").write_text(json.dumps({**config, "guidance_rescale": 0.5}))
    with pytest.raises(ModelError, match=r"ClassifierFreeGuidance with \{'guidance_rescale': 0.5\}"):
        recognise(folder)
