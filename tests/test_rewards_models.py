"""Rewards that are models, on random checkpoints in the published layouts: against a direct computation, by value."""

import logging

import judge_fixtures as toys
import numpy as np
import pytest
import torch
from judge_fixtures import batch, noise
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity
from transformers import CLIPImageProcessor, CLIPImageProcessorPil, CLIPTokenizer, Qwen2VLImageProcessorPil

from verst.config.sections import (
    AestheticReward,
    ClapReward,
    ClipScoreReward,
    HpsV2Reward,
    HpsV3Reward,
    ImageRewardReward,
    PickScoreReward,
)
from verst.errors import ConfigError, PromptError, RewardError
from verst.rewards import make_reward
from verst.rewards.frozen import image_processor, processed
from verst.rewards.hps_v2 import letterbox
from verst.rewards.hps_v3 import load_model
from verst.rewards.preflight import check_rewards

PROMPTS = ("a red cat", "two dogs", "a red cat")


@pytest.fixture(scope="module")
def clip_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    toys.clip_folder(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clip_model(clip_path):
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(clip_path).eval()


@pytest.fixture(scope="module")
def head_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("head") / "linear.pth"
    torch.save(toys.head_weights(24), file)
    return str(file)


def crop(frame, size=32):
    """The published transform of CLIP: Pillow's bicubic to the shorter side, the middle square, mean and std."""
    image = Image.fromarray(frame.numpy())
    width, height = image.size
    short = min(width, height)
    image = image.resize((int(size * width / short), int(size * height / short)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    array = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float64) / 255
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return torch.from_numpy((array - mean) / std).permute(2, 0, 1).float()


@torch.no_grad()
def clip_cosines(model, folder, frames, prompts):
    """Each pair by itself, without padding and without the reward's code."""
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    values = []
    for frame, prompt in zip(frames, prompts, strict=True):
        out = model(pixel_values=crop(frame)[None], input_ids=tokenizer(prompt, return_tensors="pt")["input_ids"])
        values.append(float(cosine_similarity(out.image_embeds.double(), out.text_embeds.double())))
    return values


def test_clip_rewards_are_the_cosine_of_the_published_transform(clip_path, clip_model):
    media = noise(3)
    want = clip_cosines(clip_model, clip_path, media[:, 0], PROMPTS)
    assert np.std(want) > 0.01
    assert make_reward(ClipScoreReward(path=clip_path)).score(batch(media, PROMPTS)) == pytest.approx(want, abs=1e-5)
    hundred = make_reward(ClipScoreReward(path=clip_path, scale=100.0, batch_size=2)).score(batch(media, PROMPTS))
    assert hundred == pytest.approx([100 * value for value in want], abs=1e-3)


def test_pick_score_is_the_scaled_cosine_over_26(clip_path, clip_model):
    media = noise(3)
    scale = float(clip_model.logit_scale.detach().exp())
    assert scale == pytest.approx(14.28, abs=0.02)
    want = [scale * value for value in clip_cosines(clip_model, clip_path, media[:, 0], PROMPTS)]
    raw = make_reward(PickScoreReward(path=clip_path, normalise=False)).score(batch(media, PROMPTS))
    assert raw == pytest.approx(want, abs=1e-4)
    normal = make_reward(PickScoreReward(path=clip_path)).score(batch(media, PROMPTS))
    assert normal == pytest.approx([value / 26 for value in want], abs=1e-5)


@pytest.mark.parametrize("saved_as", ["HPS_v2.1_compressed.pt", "open_clip.safetensors"])
def test_hps_v2_reads_an_open_clip_file_and_gives_open_clips_value(clip_path, tmp_path, saved_as):
    tokenizer = CLIPTokenizer.from_pretrained(clip_path)
    theirs = toys.randomise(toys.OpenClip(len(tokenizer)), seed=7)
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    file = tmp_path / saved_as
    if file.suffix == ".pt":
        torch.save({"epoch": 1, "state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, file)
    else:
        save_file(state, file)
    media = noise(3, 48, 48)
    want = []
    with torch.no_grad():
        for frame, prompt in zip(media[:, 0], PROMPTS, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            full = torch.nn.functional.pad(ids, (0, toys.NUM_TOKENS - ids.shape[1]))
            text = theirs.encode_text(full, torch.tensor([ids.shape[1] - 1]))
            want.append(float(cosine_similarity(theirs.visual(crop(frame)[None]), text)))
    assert np.std(want) > 1e-3
    reward = make_reward(HpsV2Reward(path=clip_path, checkpoint=str(file)))
    assert reward.score(batch(media, PROMPTS)) == pytest.approx(want, abs=1e-5)


def test_hps_v2_of_a_converted_folder_is_the_scaled_cosine(clip_path, clip_model):
    media = noise(3, 40, 40)
    want = [100 * value for value in clip_cosines(clip_model, clip_path, media[:, 0], PROMPTS)]
    assert make_reward(HpsV2Reward(path=clip_path, scale=100.0)).score(batch(media, PROMPTS)) == pytest.approx(
        want, abs=1e-3
    )


def test_hps_v2_fits_a_wide_image_into_the_square_with_black_borders(clip_path):
    wide = noise(1, 20, 40)
    boxed = letterbox(wide[:, 0], 32)
    assert boxed.shape == (1, 32, 32, 3)
    assert int(boxed[:, :8].max()) == int(boxed[:, 24:].max()) == 0
    inside = Image.fromarray(wide[0, 0].numpy()).resize((32, 16), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(boxed[0, 8:24].numpy(), np.asarray(inside))
    reward = make_reward(HpsV2Reward(path=clip_path))
    assert reward.score(batch(wide, ["x"])) == pytest.approx(reward.score(batch(boxed[:, None], ["x"])), abs=1e-6)


def test_aesthetic_is_a_linear_regression_of_the_unit_vector(clip_path, clip_model, head_file):
    media = noise(3)
    with torch.no_grad():
        pixels = torch.stack([crop(frame) for frame in media[:, 0]])
        x = clip_model.get_image_features(pixels).pooler_output.double()
        x = x / x.norm(dim=-1, keepdim=True)
        weights = toys.head_weights(24)
        for place in (0, 2, 4, 6, 7):
            x = x @ weights[f"layers.{place}.weight"].double().T + weights[f"layers.{place}.bias"].double()
    want = x[:, 0].tolist()
    assert np.std(want) > 1e-3
    raw = make_reward(AestheticReward(path=clip_path, head=head_file))
    assert raw.score(batch(media)) == pytest.approx(want, abs=1e-5)
    tenth = make_reward(AestheticReward(path=clip_path, head=head_file, normalise=True))
    assert tenth.score(batch(media)) == pytest.approx([value / 10 for value in want], abs=1e-6)


def test_image_reward_is_blips_rating_of_the_pair(tmp_path):
    vision, text, state = toys.image_reward_folder(tmp_path)
    tokenizer = toys.bert_tokenizer()
    media = noise(3)
    want = []
    with torch.no_grad():
        for frame, prompt in zip(media[:, 0], PROMPTS, strict=True):
            inputs = tokenizer(prompt, return_tensors="pt")
            read = text(
                **{k: inputs[k] for k in ("input_ids", "attention_mask")},
                encoder_hidden_states=vision(crop(frame)[None]),
            )
            x = read.last_hidden_state[0, 0].double()
            for place in (0, 2, 4, 6, 7):
                x = state[f"mlp.layers.{place}.weight"].double() @ x + state[f"mlp.layers.{place}.bias"].double()
            want.append((float(x) - 0.16717362830052426) / 1.0333394966054072)
    assert np.std(want) > 1e-3
    reward = make_reward(ImageRewardReward(path=str(tmp_path), batch_size=2))
    assert reward.score(batch(media, PROMPTS)) == pytest.approx(want, abs=2e-5)


@pytest.mark.parametrize("old_names", [False, True])
def test_hps_v3_rates_at_the_reward_token(tmp_path, old_names):
    model, head, tokenizer = toys.hps_v3_folder(tmp_path, old_names=old_names)
    media, prompts = noise(2, 60, 60), ("a red cat", "red")
    pixels = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)(
        [frame.numpy() for frame in media[:, 0]], return_tensors="pt", input_data_format="channels_last",
        size={"shortest_edge": 256 * 28 * 28, "longest_edge": 256 * 28 * 28},
    )  # fmt: skip
    assert pixels["image_grid_thw"].tolist() == [[1, 32, 32]] * 2
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    image_id, reward_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|Reward|>"])
    want = []
    for i, prompt in enumerate(prompts):
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            + "<|image_pad|>" * 256 + "<|vision_end|>" + toys.INSTRUCTION.format(text_prompt=prompt)
            + "<|im_end|>\n<|im_start|>assistant\n"
        )  # fmt: skip
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            hidden = model(
                input_ids=ids, pixel_values=pixels["pixel_values"][1024 * i : 1024 * (i + 1)],
                image_grid_thw=pixels["image_grid_thw"][i : i + 1], mm_token_type_ids=(ids == image_id).int(),
            ).last_hidden_state  # fmt: skip
            want.append(float(head(hidden[ids == reward_id])[0, 0]))
    assert abs(want[0] - want[1]) > 1e-3
    reward = make_reward(HpsV3Reward(path=str(tmp_path), dtype="float32"))
    assert reward.score(batch(media, prompts)) == pytest.approx(want, abs=1e-4)
    spelled = reward.score(batch(media[:1], ("a <|Reward|> cat <|image_pad|>",)))
    assert len(spelled) == 1
    assert np.isfinite(spelled[0])


def test_hps_v3_needs_the_instruction_with_its_two_places(tmp_path):
    toys.hps_v3_folder(tmp_path)
    (tmp_path / "instruction.txt").write_text("Rate {text_prompt}")
    with pytest.raises(ConfigError, match=r"<\|Reward\|> 0 times"):
        make_reward(HpsV3Reward(path=str(tmp_path)))


def wave(num, seconds, rate=16000, channels=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tones = torch.rand(num, channels, 1, generator=generator) * 3000 + 200
    time = torch.arange(int(seconds * rate)) / rate
    return torch.sin(2 * torch.pi * tones * time) * 0.4


@pytest.mark.parametrize("fusion", [False, True])
def test_clap_is_the_cosine_of_sound_and_prompt(tmp_path, fusion):
    from transformers import ClapFeatureExtractor

    model = toys.clap_folder(tmp_path, fusion=fusion)
    extract, tokenizer = ClapFeatureExtractor.from_pretrained(tmp_path), toys.word_tokenizer(96)
    audio = wave(3, 0.8)
    want = []
    with torch.no_grad():
        for one, prompt in zip(audio, PROMPTS, strict=True):
            features = extract(one.mean(0).numpy(), sampling_rate=16000, return_tensors="pt")["input_features"]
            sound = model.get_audio_features(features, is_longer=torch.tensor([[False]])).pooler_output
            inputs = tokenizer(prompt, return_tensors="pt")
            text = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
            want.append(float(cosine_similarity(sound, text)))
    assert np.std(want) > 1e-3
    reward = make_reward(ClapReward(path=str(tmp_path), batch_size=2))
    more = {"audio": audio, "sample_rate": 16000}
    assert reward.score(batch(noise(3), PROMPTS, **more)) == pytest.approx(want, abs=1e-4)
    # Longer than its window of a second: the same value twice, and the mean over the windows that cover it.
    longer = wave(2, 1.5, seed=3)
    twice = [reward.score(batch(noise(2), ("a", "b"), audio=longer, sample_rate=16000)) for _ in range(2)]
    assert twice[0] == twice[1]
    parts = [longer[:, :, :16000], longer[:, :, 8000:]]
    alone = [reward.score(batch(noise(2), ("a", "b"), audio=part, sample_rate=16000)) for part in parts]
    assert twice[0] == pytest.approx(np.mean(alone, axis=0).tolist(), abs=1e-5)


def test_clap_refuses_a_batch_without_sound(tmp_path):
    toys.clap_folder(tmp_path)
    with pytest.raises(RewardError, match="clap scores sound"):
        make_reward(ClapReward(path=str(tmp_path))).score(batch(noise(1)))


@pytest.fixture(scope="module")
def judges(tmp_path_factory, clip_path, head_file):
    """Every judge of pictures, made once."""
    blip, qwen = tmp_path_factory.mktemp("blip"), tmp_path_factory.mktemp("qwen")
    toys.image_reward_folder(blip)
    toys.hps_v3_folder(qwen)
    configs = [
        ClipScoreReward(path=clip_path, batch_size=2),
        PickScoreReward(path=clip_path, batch_size=3),
        HpsV2Reward(path=clip_path, batch_size=2),
        AestheticReward(path=clip_path, head=head_file, batch_size=2),
        ImageRewardReward(path=str(blip), batch_size=2),
        HpsV3Reward(path=str(qwen), batch_size=2, dtype="float32"),
    ]
    return [make_reward(config) for config in configs]


def test_a_score_depends_on_its_own_row_alone(judges):
    media = noise(4, 40, 56, seed=5)
    prompts = ["red", "a cat of two words", "red", "dogs"]
    order = [2, 0, 3, 1]
    for reward in judges:
        together = reward.score(batch(media, prompts))
        assert all(type(value) is float for value in together)
        shuffled = reward.score(batch(media[order], [prompts[i] for i in order]))
        alone = [reward.score(batch(media[i : i + 1], prompts[i : i + 1]))[0] for i in range(4)]
        assert shuffled == pytest.approx([together[i] for i in order], abs=1e-5), reward.name
        assert alone == pytest.approx(together, abs=1e-5), reward.name


def test_wrong_media_is_refused_and_a_clip_is_its_middle_frame(judges):
    clips = noise(2, frames=3, seed=8)
    with pytest.raises(RewardError, match="uint8"):
        batch(clips.float())
    for reward in judges:
        assert reward.score(batch(clips)) == pytest.approx(reward.score(batch(clips[:, 1:2])), abs=1e-6)


def test_a_long_prompt_is_refused_or_cut_and_reported(clip_path, caplog):
    long = "a b c d e f g h i j " * 5
    media = noise(1)
    refusing = ClipScoreReward(path=clip_path)
    with pytest.raises(PromptError, match=r"1 prompts cannot be scored.*52 tokens of at most 24"):
        check_rewards([refusing], [long, "a"], [{}, {}])
    with pytest.raises(RewardError, match="52 tokens of at most 24"):
        make_reward(refusing).score(batch(media, [long]))
    allowing = ClipScoreReward(path=clip_path, long_prompts="truncate")
    check_rewards([allowing], [long], [{}])
    cutting = make_reward(allowing)
    with caplog.at_level(logging.WARNING):
        cut = cutting.score(batch(media, [long]))
    assert "1 of 1 prompts cut to 24 tokens" in caplog.text
    assert cut == pytest.approx(cutting.score(batch(media, [long[:44]])), abs=1e-6)


def test_torchvisions_pixels_are_pillows_within_a_level(clip_path):
    """On a GPU the processor is torchvision's; its antialiased bicubic differs from Pillow's in rounding."""
    frames = noise(2, 90, 70)[:, 0]
    cpu = torch.device("cpu")
    slow = processed(CLIPImageProcessorPil.from_pretrained(clip_path), frames, cpu)["pixel_values"]
    fast = processed(CLIPImageProcessor.from_pretrained(clip_path), frames, cpu)["pixel_values"]
    assert image_processor(clip_path, ClipScoreReward(path=clip_path)).backend == "pil"
    torch.testing.assert_close(slow, torch.stack([crop(frame) for frame in frames]), atol=1e-5, rtol=0)
    level = 1 / 255 / 0.26
    assert float((fast - slow).abs().max()) < 1.5 * level
    assert float((fast - slow).abs().mean()) < 0.3 * level


def test_half_precision_stays_near(clip_path):
    media = noise(3)
    full = make_reward(ClipScoreReward(path=clip_path)).score(batch(media, PROMPTS))
    half = make_reward(ClipScoreReward(path=clip_path, dtype="bfloat16")).score(batch(media, PROMPTS))
    assert half == pytest.approx(full, abs=0.05)
    assert half != full


def test_half_precision_leaves_rotary_frequencies_alone(tmp_path):
    """In bfloat16 a position of 100 would be off by most of a turn."""
    toys.hps_v3_folder(tmp_path)
    model, head = load_model(tmp_path, HpsV3Reward(path=str(tmp_path)))
    assert model.dtype == torch.bfloat16
    assert head[0].weight.dtype == torch.float32
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert len(frequencies) >= 2
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}


def test_folders_that_lack_something_are_refused_by_name(clip_path, tmp_path, head_file):
    with pytest.raises(ConfigError, match="path = '/absent' is no folder"):
        make_reward(PickScoreReward(path="/absent"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        make_reward(PickScoreReward(path=str(tmp_path)))
    toys.clip_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors or"):
        make_reward(ClipScoreReward(path=str(tmp_path)))
    weights = load_file(f"{clip_path}/model.safetensors")
    dropped = weights.pop("visual_projection.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, e\.g\. visual_projection\.weight"):
        make_reward(ClipScoreReward(path=str(tmp_path)))
    assert dropped.shape == (24, 32)
    with pytest.raises(ConfigError, match=r"checkpoint = 'absent\.pt' is no file"):
        make_reward(HpsV2Reward(path=clip_path, checkpoint="absent.pt"))
    with pytest.raises(ConfigError, match=r"layers\.0\.weight is no weight of an open_clip CLIP"):
        make_reward(HpsV2Reward(path=clip_path, checkpoint=head_file))
    wide = tmp_path / "wide.pth"
    torch.save({**toys.head_weights(24), "layers.7.bias": torch.zeros(2)}, wide)
    with pytest.raises(ConfigError, match=r"layers\.7\.bias is \[2\], the model takes \[1\]"):
        make_reward(AestheticReward(path=clip_path, head=str(wide)))
    bare = tmp_path / "bare.pth"
    torch.save(torch.zeros(3), bare)
    with pytest.raises(ConfigError, match=r"bare\.pth holds no tensors by name"):
        make_reward(AestheticReward(path=clip_path, head=str(bare)))
    with pytest.raises(ConfigError, match="CUDA"):
        make_reward(ClipScoreReward(path=clip_path, device="cuda:99"))


def test_pickled_code_is_not_run(clip_path, tmp_path):
    """weights_only: a checkpoint from elsewhere can hold anything."""

    class Trap:
        def __reduce__(self):
            return (print, ("run",))

    file = tmp_path / "trap.pth"
    torch.save(Trap(), file)
    with pytest.raises(ConfigError, match="cannot be read as weights"):
        make_reward(AestheticReward(path=clip_path, head=str(file)))
