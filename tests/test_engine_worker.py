"""The worker's numbers: diffusers' own pictures, independent log-probs, the same bits for the same seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from engine_fixtures import folder, keys, made, request  # noqa: F401
from torch import Tensor
from torch.distributions import Normal

from verst.engine.resolve import resolve
from verst.engine.wire import decode_response, encode_response, to_microgroup
from verst.engine.worker import Unavailable, Worker
from verst.errors import EngineError, PromptError, RequestError, SyncError
from verst.families import ALL_PARTS, recognise
from verst.flow import transitions
from verst.types import Microgroup, StreamTrajectory, join_conditioning
from verst.weights.lora import LoraSpec, attach_lora
from verst.weights.send import Outgoing, trained_tensors
from verst.weights.transports import ShmSender


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:  # noqa: F811
    return Worker(folder)


def visual(microgroup: Microgroup, row: int = 0) -> StreamTrajectory:
    return microgroup.samples[row].streams["visual"]


def records(worker: Worker, **changes: Any) -> list[dict[str, Any]]:
    (result,) = worker.generate([resolve(request(**changes), worker.components)])
    assert not isinstance(result, EngineError)
    return decode_response(encode_response(result))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_serving_is_the_diffusers_pipeline_bit_for_bit(worker: Worker, folder: Path, guidance: float) -> None:  # noqa: F811
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"height": 32, "width": 64, "num_inference_steps": 4, "max_sequence_length": 16}

    def picture(kind: str) -> Any:
        generators = [torch.Generator().manual_seed(seed) for seed in (11, 12)]
        return pipeline(
            "1234",
            negative_prompt="7",
            guidance_scale=guidance,
            num_images_per_prompt=2,
            generator=generators,
            output_type=kind,
            **options,
        ).images

    serving = {"rollout": False, "guidance_scale": guidance, "negative_prompt": "7"}
    floats = torch.stack([r["generated_output"] for r in records(worker, media_format="float", **serving)])
    assert torch.equal(floats, picture("pt"))
    pixels = torch.stack([r["media"][0] for r in records(worker, **serving)])
    expected = torch.from_numpy((picture("np") * 255).round().astype("uint8"))
    assert torch.equal(pixels, expected)
    assert floats.std() > 0.01


def normal_log_prob(kind: str, eta: float, x: Tensor, x_next: Tensor, v: Tensor, sigmas: Tensor, step: int) -> float:
    """Written from the papers in float64, with torch's own Normal; nothing of ours."""
    s, s_next = float(sigmas[step]), float(sigmas[step + 1])
    x, x_next, v = x.double(), x_next.double(), v.double()
    dt = s_next - s
    if kind == "cps":
        std = s_next * math.sin(eta * math.pi / 2)
        clean, noise = x - s * v, x + (1 - s) * v
        mean = clean * (1 - s_next) + noise * math.sqrt(s_next**2 - std**2)
    else:
        g = eta if kind == "dance" else eta * math.sqrt(s / (1 - (float(sigmas[1]) if s == 1 else s)))
        score = -(x + (1 - s) * v) / s
        mean = x + (v - g**2 / 2 * score) * dt
        std = g * math.sqrt(-dt)
    return float(Normal(mean, std).log_prob(x_next).mean())


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "eta", "steps"), [("sde", 0.7, 4), ("cps", 0.8, 3), ("dance", 0.3, 4)])
def test_log_probs_are_the_gaussians_of_the_stored_latents(
    worker: Worker, storage: str, kind: str, eta: float, steps: int
) -> None:
    asked = request(
        rollout_sde_type=kind,
        rollout_noise_level=eta,
        rollout_sde_step_indices=range(steps),
        rollout_storage_dtype=storage,
        guidance_scale=3.0,
    )
    (microgroup,) = made(worker, asked)
    for row, sample in enumerate(microgroup.samples):
        path = sample.streams["visual"]
        assert str(path.latents.dtype) == f"torch.{storage}"
        for step in range(steps):
            x = torch.stack([visual(microgroup, r).latent_at(step).float() for r in range(2)])
            # The trainer's call: the family's velocity of the stored latents, in the engine's batch shape.
            v = worker.family.velocity(
                worker.components.transformer,
                {"visual": x},
                {"visual": path.sigmas[step].expand(2)},
                microgroup.conditioning,
                guidance_scale=3.0,
            )["visual"]
            x_next = path.latent_at(step + 1).float()
            expected = normal_log_prob(kind, eta, x[row], x_next, v[row], path.sigmas, step)
            assert float(path.log_probs[step]) == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_a_trainers_forward_gives_exactly_the_engines_log_probs(worker: Worker) -> None:
    (microgroup,) = made(worker, request(guidance_scale=3.0, rollout_storage_dtype="bfloat16"))
    paths = [visual(microgroup, row) for row in range(2)]
    for step in range(4):
        x = torch.stack([p.latent_at(step) for p in paths]).float()
        x_next = torch.stack([p.latent_at(step + 1) for p in paths]).float()
        sigma = paths[0].sigmas[step].expand(2)
        with torch.no_grad():
            v = worker.family.velocity(
                worker.components.transformer,
                {"visual": x},
                {"visual": sigma},
                microgroup.conditioning,
                guidance_scale=3.0,
            )["visual"]
        mean, std = transitions.sde(
            x,
            v,
            sigma=transitions.per_row(sigma, x),
            next_sigma=transitions.per_row(paths[0].sigmas[step + 1].expand(2), x),
            first_sigma=paths[0].sigmas[1],
            eta=0.7,
        )
        again = transitions.gaussian_log_prob(x_next, mean, std)
        assert torch.equal(again, torch.stack([p.log_probs[step] for p in paths]))


def test_debug_tensors_make_the_step(worker: Worker) -> None:
    record = records(worker, rollout_debug_mode=True, rollout_sde_step_indices=[1, 2])[0]
    debug, path = record["rollout_debug_tensors"], record["dit_trajectory"]
    assert debug["rollout_debug_step_indices"].tolist() == [1, 2]
    assert debug["rollout_noise_std_devs"].shape == (2, 1)
    for i, step in enumerate((1, 2)):
        noise, std = debug["rollout_variance_noises"][i], debug["rollout_noise_std_devs"][i]
        assert torch.equal(debug["rollout_prev_sample_means"][i] + noise * std, path["latents"][step + 1])


def test_kept_latents_and_their_timesteps(worker: Worker) -> None:
    path = records(worker, rollout_return_step_indices=[0, 3, 4])[0]["dit_trajectory"]
    assert path["latent_step_indices"].tolist() == [0, 3, 4]
    assert path["latents"].shape == (3, 4, 4, 8)
    assert path["sigmas"].shape == path["grid_timesteps"].shape == (5,)
    assert torch.equal(path["timesteps"], path["grid_timesteps"][[0, 3, 4]])
    assert path["timesteps"][0] == 1000
    assert path["timesteps"][-1] == 0


def equal(one: Microgroup, other: Microgroup) -> bool:
    return all(
        torch.equal(a.media, b.media)
        and torch.equal(a.streams["visual"].latents, b.streams["visual"].latents)
        and torch.equal(a.streams["visual"].log_probs, b.streams["visual"].log_probs)
        for a, b in zip(one.samples, other.samples, strict=True)
    )


def test_the_same_seeds_are_the_same_bits(worker: Worker, folder: Path) -> None:  # noqa: F811
    (first,) = made(worker, request())
    made(worker, request(prompt="99", seeds=(3,)))
    (again,) = made(worker, request())
    (elsewhere,) = made(Worker(folder), request())
    assert equal(first, again)
    assert equal(first, elsewhere)
    (other,) = made(worker, request(seeds=(11, 13)))
    assert not torch.equal(visual(first, 1).latents, visual(other, 1).latents)


def test_requests_of_other_windows_and_prompts_share_a_batch(worker: Worker) -> None:
    one = request(guidance_scale=3.0, rollout_sde_step_indices=[0, 1])
    two = request(guidance_scale=3.0, rollout_sde_step_indices=[2], prompt="77", seeds=(21, 22, 23))
    three = request(
        guidance_scale=3.0, rollout_sde_type="cps", rollout_noise_level=0.5, rollout_sde_step_indices=[1], seeds=(5,)
    )
    joined = made(worker, one, two, three)
    assert joined[0].echo["batch_rows"] == 6
    for together, alone in zip(joined, [made(worker, r)[0] for r in (one, two, three)], strict=True):
        assert together.echo["rollout_sde_step_indices"] == alone.echo["rollout_sde_step_indices"]
        assert together.samples[0].prompt == alone.samples[0].prompt
        for a, b in zip(together.samples, alone.samples, strict=True):
            x, y = a.streams["visual"], b.streams["visual"]
            torch.testing.assert_close(x.latents, y.latents, atol=1e-5, rtol=0)
            torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-4, rtol=0)
            assert x.sde_step_indices == y.sde_step_indices
            off = [i for i in range(4) if i not in x.sde_step_indices]
            assert not x.log_probs[off].any()
    assert joined[1].conditioning.positive["pooled_projections"].shape == (3, 32)


def test_unlike_prompts_of_one_request_keep_their_order(worker: Worker) -> None:
    plain: dict[str, Any] = {"rollout": False, "share_denoising_env": False}
    (batch,) = made(worker, request(prompt=None, prompts=["1", "2", "1"], seeds=[4, 5, 6], **plain))
    assert [s.prompt for s in batch.samples] == ["1", "2", "1"]
    assert [s.seed for s in batch.samples] == [4, 5, 6]
    (second,) = made(worker, request(prompt="2", seeds=[5], **plain))
    gap = (batch.samples[1].media.int() - second.samples[0].media.int()).abs().max()
    assert gap <= 1
    assert not torch.equal(batch.samples[0].media, batch.samples[1].media)


def test_conditioning_once_or_for_each_sample_is_the_same(worker: Worker) -> None:
    asked: dict[str, Any] = {"prompt": None, "prompts": ["1", "22"], "guidance_scale": 2.0, "negative_prompt": "0"}
    (shared,) = made(worker, request(**asked))
    (single,) = made(worker, request(share_denoising_env=False, **asked))
    assert shared.conditioning.negative is not None
    assert single.conditioning.negative is not None
    for name, rows in shared.conditioning.positive.items():
        assert torch.equal(rows, single.conditioning.positive[name])
        assert not torch.equal(rows[0], rows[1])
        assert torch.equal(shared.conditioning.negative[name], single.conditioning.negative[name])


def test_shared_initial_noise_with_step_noise_of_its_own(worker: Worker) -> None:
    (microgroup,) = made(worker, request(initial_seeds=(7, 7)))
    a, b = visual(microgroup, 0), visual(microgroup, 1)
    assert torch.equal(a.latents[0], b.latents[0])
    assert not torch.equal(a.latents[1], b.latents[1])
    assert [s.initial_seed for s in microgroup.samples] == [7, 7]
    assert microgroup.echo["initial_seeds"] == [7, 7]


def test_ode_has_no_log_probs_and_no_noise(worker: Worker) -> None:
    (ode,) = made(worker, request(rollout_sde_type="ode"))
    (none,) = made(worker, request(rollout_sde_step_indices=[]))
    assert not visual(ode).log_probs.any()
    assert equal(ode, none)
    assert ode.echo["rollout_sde_step_indices"] == []


def test_float_media_and_uint8_media_are_one_picture(worker: Worker) -> None:
    (pixels,) = made(worker, request())
    (floats,) = made(worker, request(media_format="float"))
    assert torch.equal(pixels.samples[0].media, floats.samples[0].media)
    assert pixels.samples[0].media.shape == (1, 32, 64, 3)


def test_long_prompts_are_refused_or_counted(worker: Worker) -> None:
    long = "1 " * 40
    with pytest.raises(PromptError, match=r"tokens for tokenizer.*16.*truncate"):
        resolve(request(prompt=long), worker.components)
    allowed = request(prompt=None, prompts=[long, "1"], long_prompts="truncate")
    assert resolve(allowed, worker.components).echo()["truncated_prompts"] == 1
    # The negative prompt is only read, and so only checked, with guidance.
    assert resolve(request(negative_prompt=long), worker.components).truncated_prompts == 0
    with pytest.raises(PromptError):
        resolve(request(negative_prompt=long, guidance_scale=2.0), worker.components)


def test_embeddings_are_reused_and_bounded(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder, prompt_cache_bytes=30_000)
    for _ in range(3):
        made(worker, request())
    assert (worker.prompt_cache.num_misses, worker.prompt_cache.num_hits) == (1, 2)
    made(worker, request(max_sequence_length=8))
    assert worker.prompt_cache.num_misses == 2
    for number in range(5):
        made(worker, request(prompt=str(number)))
    assert worker.prompt_cache.num_bytes <= 30_000


def test_numbers_that_are_not_finite_are_no_answer(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    with torch.no_grad():
        worker.components.transformer.get_parameter("proj_out.bias").fill_(math.nan)
    (result,) = worker.generate([resolve(request(), worker.components)])
    assert isinstance(result, EngineError)
    assert "seeds [11, 12] are not finite" in str(result)


def test_an_engine_asleep_holds_no_weights_and_wakes_with_the_same_bits(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    (before,) = made(worker, request())
    held = worker.weight_bytes()
    assert held == sum(t.nbytes for m in worker.modules.values() for t in (*m.parameters(), *m.buffers()))
    worker.sleep()
    worker.sleep()
    assert worker.weight_bytes() == 0
    assert all(t.numel() == 0 for m in worker.modules.values() for t in (*m.parameters(), *m.buffers()))
    with pytest.raises(Unavailable, match="resume"):
        made(worker, request())
    for ask in (worker.checksums, lambda: worker.update_from_folder(folder, modules=["transformer"])):
        with pytest.raises(RequestError, match="has released its memory: resume it"):
            ask()
    worker.wake()
    worker.wake()
    assert worker.weight_bytes() == held
    assert equal(before, made(worker, request())[0])


def test_weights_given_up_in_sleep_are_asked_for(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    (before,) = made(worker, request())
    weights = {name: p.clone() for name, p in worker.components.transformer.named_parameters()}
    for version in (1, 2):
        worker.sleep("others")
        assert worker.weight_bytes() == 0
        worker.wake()
        with pytest.raises(EngineError, match="given up while the engine slept; send them again"):
            made(worker, request())
        sender = ShmSender(rank=0, bucket_bytes=2**20)
        dtypes = dict.fromkeys(weights, torch.float32)
        manifest = sender.publish(Outgoing(version=version, tensors=weights, dtypes=dtypes, lora=None))
        assert manifest is not None
        worker.update_from_manifest(manifest)
        sender.close()
        assert equal(before, made(worker, request())[0])


def test_a_base_that_no_update_brings_is_not_given_up(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    attach_lora(worker.components.transformer, LoraSpec(rank=2, alpha=4.0, targets=("attn.to_q",)))
    with pytest.raises(RequestError, match=r"LoRA pairs alone, its base must be kept: all"):
        worker.sleep("others")
    assert made(worker, request())


@pytest.mark.parametrize(
    "lora", [None, LoraSpec(rank=2, alpha=4.0, targets=("attn.to_q", "attn.to_v"))], ids=["full", "lora"]
)
def test_weights_from_shared_memory(folder: Path, lora: LoraSpec | None) -> None:  # noqa: F811
    worker, trainer = Worker(folder), Worker(folder)
    if lora is not None:
        assert attach_lora(trainer.components.transformer, lora) > 0
    module = trainer.components.transformer
    trained = {n: p for n, p in module.named_parameters() if lora is None or "lora_" in n}
    with torch.no_grad():
        for p in trained.values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    (before,) = made(worker, request())
    tensors = trained_tensors(trained, dtype=torch.float32)
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    manifest = sender.publish(Outgoing(version=3, tensors=tensors, dtypes=dtypes, lora=lora))
    assert manifest is not None
    certificate = worker.update_from_manifest(manifest)
    sender.close()
    assert certificate["num_applied"] == len(trained)
    (after,), (expected,) = made(worker, request()), made(trainer, request())
    assert after.samples[0].weight_version == after.echo["weight_version"] == 3
    assert not equal(before, after)
    assert equal(after, expected)


def test_a_manifest_that_does_not_fit_changes_nothing(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder)
    before = worker.checksums(["transformer"])
    tensors = {n: p.detach() + 1 for n, p in worker.components.transformer.named_parameters()}
    tensors["nobody.weight"] = tensors.pop("proj_out.weight")
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    manifest = sender.publish(Outgoing(version=1, tensors=tensors, dtypes=dtypes, lora=None))
    assert manifest is not None
    with pytest.raises(SyncError, match=r"nobody\.weight"):
        worker.update_from_manifest(manifest)
    sender.close()
    assert worker.checksums(["transformer"]) == before
    assert worker.weight_version == -1


def test_an_engine_in_half_precision_says_so(folder: Path) -> None:  # noqa: F811
    worker = Worker(folder, dtype=torch.bfloat16)
    (microgroup,) = made(worker, request())
    assert microgroup.echo["model_dtype"] == "bfloat16"
    assert visual(microgroup).log_probs.isfinite().all()
    family = recognise(folder)
    again = family.load(folder, parts=ALL_PARTS, dtype=torch.bfloat16, device=torch.device("cpu"))
    path = visual(microgroup)
    x = torch.stack([visual(microgroup, row).latent_at(0) for row in range(2)])
    conditioning = join_conditioning([microgroup.conditioning])
    assert all(value.is_contiguous() for value in conditioning.positive.values())
    with torch.no_grad():
        v = family.velocity(
            again.transformer,
            {"visual": x},
            {"visual": path.sigmas[0].expand(2)},
            conditioning,
            guidance_scale=1.0,
        )["visual"]
    expected = normal_log_prob("sde", 0.7, x[0], path.latent_at(1), v[0], path.sigmas, 0)
    assert float(path.log_probs[0]) == pytest.approx(expected, abs=1e-6)


def test_keys_of_a_microgroup_are_the_callers(worker: Worker) -> None:
    (result,) = worker.generate([resolve(request(), worker.components)])
    assert not isinstance(result, EngineError)
    named = list(reversed(keys(2)))
    assert [s.key for s in to_microgroup(encode_response(result), named).samples] == named
