"""The adapter of an SGLang server, against a server that has the real one's traps (tests/fake_sglang.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fake_sglang import Faults, command, running
from run_fixtures import recipe_with, tiny_model

from verst.cli.doctor_target import recipe_findings
from verst.config.plan import batch_plan
from verst.engine.client import EngineClient, check_echo
from verst.engine.request import GenerateRequest
from verst.engine.server import EngineServer
from verst.engine.sglang.families import PIPELINES, pipeline_of
from verst.engine.sglang.server import SglangEngineServer
from verst.engine.wire import to_microgroup
from verst.engine.worker import Worker
from verst.errors import ConfigError, EngineError, ModelError, RequestError, SyncError
from verst.families import recognise
from verst.families.tiny import build_tiny
from verst.types import Microgroup, SampleKey
from verst.weights.lora import LoraSpec, attach_lora
from verst.weights.send import Outgoing, trained_tensors
from verst.weights.transports.shm import ShmSender

LORA = LoraSpec(rank=2, alpha=4.0, targets=("attn.to_q", "attn.to_v"))


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(
        **{
            "prompt": "a red cat",
            "negative_prompt": "a dog",
            "seeds": (11, 2**40 + 1),
            "height": 32,
            "width": 64,
            "num_inference_steps": 4,
            "guidance_scale": 4.0,
            "rollout_sde_step_indices": (1, 2),
            "rollout_return_step_indices": (1, 2, 3),
            "rollout_return_dit_trajectory": True,
            "rollout_return_denoising_env": True,
            "share_denoising_env": True,
            "rollout_log_prob_of": "noise",
            "guidance_passes": "two",
            "max_sequence_length": 256,
            "generator_device": "cuda",
            "media_format": "uint8",
            **changes,
        }
    )


def asked(server: EngineServer, *requests: GenerateRequest) -> list[Microgroup]:
    async def ask() -> list[Microgroup]:
        made = []
        async with EngineClient(server.url) as client:
            for one in requests:
                keys = [SampleKey(rollout=0, group=0, index=i) for i in range(len(one.seeds or ()))]
                made.append(to_microgroup(await client.generate(one), keys))
                check_echo(one, made[-1].echo)
        return made

    return asyncio.run(ask())


@contextmanager
def adapter(**options: Any) -> Iterator[SglangEngineServer]:
    server = SglangEngineServer(options.pop("folder", tiny_model()), **options)
    server.start()
    try:
        server.wait_ready(120)
        yield server
    finally:
        server.stop()


def refused(faults: Faults, **options: Any) -> str:
    """Why the adapter does not start."""
    with (
        running(options.get("folder", tiny_model()), faults) as (url, _),
        pytest.raises(EngineError) as error,
        adapter(url=url, **options),
    ):
        pass
    return str(error.value)


def test_samples_are_the_native_engines() -> None:
    native = EngineServer(tiny_model(), threads=1)
    native.start()
    native.wait_ready(60)
    with running(tiny_model(), Faults()) as (url, fake), adapter(url=url) as server:
        (theirs,) = asked(server, request())
        for path, body in fake.faults.asked:
            if path != "/rollout/generate":
                continue
            assert body["num_outputs_per_prompt"] == 1
            assert body["seed"] in (11, 2**40 + 1)
            assert body["rollout_debug_mode"] is False
            assert body["rollout_return_step_indices"] == [0, 1, 2, 3]
    # Each sample is a batch of its own there.
    ours = asked(native, request(seeds=(11,)), request(seeds=(2**40 + 1,)))
    native.stop()
    for (mine,), other in zip((one.samples for one in ours), theirs.samples, strict=True):
        assert torch.equal(mine.media, other.media)
        assert (mine.seed, mine.prompt, mine.fps) == (other.seed, other.prompt, other.fps)
        one, two = mine.streams["visual"], other.streams["visual"]
        for name in ("latents", "latent_step_indices", "sigmas", "timesteps", "log_probs"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        assert one.sde_step_indices == two.sde_step_indices == (1, 2)
    for side in ("positive", "negative"):
        mine_rows, other_rows = getattr(ours[0].conditioning, side), getattr(theirs.conditioning, side)
        assert mine_rows.keys() == other_rows.keys()
        assert all(torch.equal(mine_rows[name].expand_as(t), t) for name, t in other_rows.items())
    assert theirs.echo["generator_device"] == "cpu"
    assert theirs.echo["engine"] == "sglang 0.5.23"


def test_plain_sampling_and_unlike_prompts() -> None:
    plain = {"prompt": None, "rollout": False, "guidance_scale": 1.0}
    many = request(**plain, prompts=("a cat", "a dog"))
    native = EngineServer(tiny_model(), threads=1)
    native.start()
    native.wait_ready(60)
    with running(tiny_model(), Faults(batched_conditioning=True)) as (url, _), adapter(url=url) as server:
        (theirs,) = asked(server, many)
        # One prompt after the other, and both ranks of conditioning that servers answer with.
        (rollout,) = asked(server, request(prompt=None, prompts=("a cat", "a dog")))
    ours = asked(
        native,
        request(**plain, prompts=("a cat",), seeds=(11,)),
        request(**plain, prompts=("a dog",), seeds=(2**40 + 1,)),
    )
    native.stop()
    assert [s.prompt for s in theirs.samples] == ["a cat", "a dog"]
    assert all(torch.equal(a.samples[0].media, b.media) for a, b in zip(ours, theirs.samples, strict=True))
    assert theirs.samples[0].streams == {}
    assert rollout.conditioning.positive["encoder_hidden_states"].shape[:2] == (2, 333)
    assert rollout.conditioning.positive["pooled_projections"].ndim == 2


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults(seed_shift=1), "initial latent that is not that of seed 11"),
        (Faults(noise_factor=0.5), r"log-probs .* of sde with noise level 0.7 at the steps \[1, 2\] they are"),
        (Faults(shift=1.7), "sigmas .*, the grid is"),
        (Faults(short_text=True), "encoder_hidden_states of 332 tokens, 333 were expected"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_what_was_not_asked_for_is_no_sample(faults: Faults, words: str) -> None:
    with running(tiny_model(), faults) as (url, _), adapter(url=url) as server, pytest.raises(EngineError, match=words):
        asked(server, request())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"initial_seeds": (1, 1)}, "initial_seeds: SGLang draws"),
        ({"rollout_sde_type": "dance"}, '"dance" is no transition of SGLang'),
        ({"guidance_passes": "one_batch"}, 'a forward for each side; use "two"'),
        ({"rollout_log_prob_of": "stored"}, "rollout_log_prob_of = 'stored': SGLang has 'noise' alone"),
        ({"rollout_storage_dtype": "bfloat16"}, "rollout_storage_dtype"),
        ({"rollout_debug_mode": True}, "rollout_debug_mode"),
        ({"max_sequence_length": 128}, "always pads to 256"),
    ],
)
def test_what_the_contract_lacks_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with running(tiny_model(), Faults()) as (url, fake), adapter(url=url) as server:

        async def both() -> None:
            async with EngineClient(server.url) as client:
                (problem,) = await client.check_requests([request(**changes)])
                assert problem is not None
                assert words in problem
                with pytest.raises(RequestError) as error:
                    await client.generate(request(**changes))
                assert words in str(error.value)

        asyncio.run(both())
        assert "/rollout/generate" not in [path for path, _ in fake.faults.asked]


def test_servers_that_will_not_do_are_refused(tmp_path: Path) -> None:
    assert "is SGLang 0.5.10; its rollout API needs 0.5.11 or newer" in refused(Faults(version="0.5.10"))
    assert "serves ['FluxPipeline'], the model folder needs StableDiffusion3Pipeline" in refused(
        Faults(pipeline="FluxPipeline")
    )
    assert "tp_size = 2" in refused(Faults(tp_size=2))
    other = build_tiny("sd3", tmp_path / "other")
    with torch.no_grad():
        weights = Worker(other).components.transformer
        next(weights.parameters()).add_(1.0)
        weights.save_pretrained(other / "transformer")
    with (
        running(other, Faults()) as (url, _),
        pytest.raises(EngineError, match="does not hold the checkpoint"),
        adapter(url=url),
    ):
        pass
    with (
        pytest.raises(EngineError, match="nothing that is ready answers at"),
        adapter(url="http://127.0.0.1:9"),
    ):
        pass
    family = recognise(build_tiny("flux1", tmp_path / "flux"))
    with pytest.raises(ModelError, match=f"verst maps {', '.join(PIPELINES)} to a pipeline"):
        pipeline_of(family)


def outgoing(lora: LoraSpec | None, *, form: str = "pairs", dtype: torch.dtype = torch.float32) -> Outgoing:
    """Weights that are another model's."""
    module = Worker(tiny_model(), dtype=dtype).components.transformer
    if lora is not None:
        attach_lora(module, lora)
    trained = {n: p for n, p in module.named_parameters() if lora is None or "lora_" in n}
    with torch.no_grad():
        for p in trained.values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    tensors = trained_tensors(trained, dtype=torch.float32 if form == "merged" else dtype)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return Outgoing(version=3, tensors=tensors, dtypes=dtypes, lora=lora, form=form)  # type: ignore[arg-type]


def hand_over(server: EngineServer, weights: Outgoing) -> dict[str, Any]:
    sender = ShmSender(rank=0, bucket_bytes=2**20)
    manifest = sender.publish(weights)
    assert manifest is not None

    async def ask() -> dict[str, Any]:
        async with EngineClient(server.url) as client:
            return await client.update_weights(manifest)

    try:
        return asyncio.run(ask())
    finally:
        sender.close()


@pytest.mark.parametrize("way", ["tensors", "flattened_bucket", "disk"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "merged"])
def test_weights_reach_the_server(way: str, lora: LoraSpec | None) -> None:
    with running(tiny_model(), Faults()) as (url, fake), adapter(url=url, way=way) as server:
        weights = outgoing(lora, form="merged")
        before = fake.worker.checksums(["transformer"])
        assert hand_over(server, weights)["version"] == 3
        assert fake.worker.checksums(["transformer"]) != before
        held = dict(fake.worker.components.transformer.named_parameters())
        if lora is None:
            assert all(torch.equal(held[name], t) for name, t in weights.tensors.items())
        else:
            mirror = Worker(tiny_model()).components.transformer
            for name, tensor in mirror.named_parameters():
                pair = [weights.tensors.get(f"{name[:-7]}.lora_{x}.default.weight") for x in "BA"]
                if pair[0] is None or pair[1] is None:
                    assert torch.equal(held[name], tensor)
                else:
                    expected = tensor.double() + 2.0 * pair[0].double() @ pair[1].double()
                    torch.testing.assert_close(held[name].double(), expected, atol=1e-6, rtol=0)
        (made,) = asked(server, request())
        assert made.echo["weight_version"] == 3


def test_lora_pairs_have_a_way_of_their_own() -> None:
    with running(tiny_model(), Faults()) as (url, fake), adapter(url=url) as server:
        weights = outgoing(LORA)
        hand_over(server, weights)
        (body,) = [body for path, body in fake.faults.asked if path == "/update_weights_from_tensor"]
        assert (body["weight_update_mode"], body["lora_rank"], body["lora_alpha"]) == ("lora_merge", 2, 4)
        for name, tensor in weights.tensors.items():
            assert torch.equal(fake.lora[name.replace(".default.weight", "")], tensor)
        hand_over(server, weights)
        proven = [
            set(body["expected_named_tensors_sha256"])
            for path, body in fake.faults.asked
            if path == "/update_weights_from_tensor_checker" and "lora_" in str(body)
        ]
        first, second = ({n for n in names if n.endswith("base_layer.weight")} for names in proven[-2:])
        # The base is looked at once, when the server has wrapped it.
        assert len(first) == len(weights.tensors) // 2
        assert second == set()


def test_half_precision_with_what_the_server_keeps_in_fp32() -> None:
    half = torch.bfloat16
    with running(tiny_model(), Faults(), dtype=half) as (url, fake), adapter(url=url, dtype=half) as server:
        hand_over(server, outgoing(None, dtype=half))
        assert fake.worker.components.transformer.proj_out.weight.dtype == half
    assert "does not hold the checkpoint" in refused(Faults(), dtype=half)


def test_a_success_that_was_none_is_found_out() -> None:
    with running(tiny_model(), Faults()) as (url, fake), adapter(url=url) as server:
        fake.faults.loses = ("proj_out.weight",)
        with pytest.raises(SyncError, match=r"holds others: .*proj_out\.weight.* may hold weights of two versions"):
            hand_over(server, outgoing(None))
        with pytest.raises(EngineError, match="version 3 has not reached the server; send them again"):
            asked(server, request())
        fake.faults.loses = ()
        hand_over(server, outgoing(None))
        asked(server, request())


def launched(tmp_path: Path, **faults: Any) -> dict[str, Any]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return {
        "executable": str(command(tmp_path)),
        "environment": {"PYTHONPATH": path, "FAULTS": json.dumps(faults)},
        "log": tmp_path / "sglang.log",
        "threads": 1,
    }


def test_a_launched_server_is_told_everything_and_ends_with_its_adapter(tmp_path: Path) -> None:
    with adapter(**launched(tmp_path)) as server:
        asked(server, request())
        words = (tmp_path / "sglang.log").read_text()
        (line,) = [line for line in words.splitlines() if line.startswith("a fake server begins")]
        for flag in (
            "--tp-size 1", "--sp-degree 1", "--ulysses-degree 1", "--ring-degree 1", "--dp-size 1", "--cfg-parallel-size 1",
            "--num-gpus 1", "--batching-max-size 1", "--lora-merge-mode dynamic", "--attention-backend torch_sdpa",
            "--dit-precision fp32", "--text-encoder-precisions fp32 fp32 fp32", "--warmup-mode off", "--host 127.0.0.1",
        ):  # fmt: skip
            assert flag in line, flag
        children = psutil.Process().children(recursive=True)
        ours = [p for p in children if "fake_sglang.py" in " ".join(p.cmdline())]
        assert len(ours) == 1
    assert all(not p.is_running() for p in ours)


def test_a_server_that_fails_in_an_update_begins_anew(tmp_path: Path) -> None:
    with adapter(**launched(tmp_path, once=str(tmp_path / "failed"))) as server:
        certificate = hand_over(server, outgoing(None))
        assert certificate["version"] == 3
        assert (tmp_path / "failed").exists()
        assert (tmp_path / "sglang.log").read_text().count("a fake server begins") == 2
        (made,) = asked(server, request())
    native = EngineServer(tiny_model(), threads=1)
    native.start()
    native.wait_ready(60)
    hand_over(native, outgoing(None))
    (ours,) = asked(native, request(seeds=(11,)))
    native.stop()
    assert torch.equal(made.samples[0].media, ours.samples[0].media)


def test_a_server_that_dies_is_the_engines_end_with_its_last_words(tmp_path: Path) -> None:
    with adapter(**launched(tmp_path)) as server:
        (victim,) = [
            p
            for p in psutil.Process().children(recursive=True)
            if p.cmdline()[1:2] == [str(Path(__file__).with_name("fake_sglang.py"))]
        ]
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)

        async def failure_and_health() -> bool:
            async with EngineClient(server.url) as client:
                with pytest.raises(
                    EngineError, match=r"(?s)dropped /rollout/generate.*Its log, .*a fake server begins with"
                ):
                    await client.generate(request())
                # At once, as a run asks that wants to know whether the request or the engine has failed.
                return await client.health()

        assert not asyncio.run(failure_and_health())


def test_nothing_is_left_of_a_killed_adapter(tmp_path: Path) -> None:
    options = launched(tmp_path)
    program = f"""
import time
from pathlib import Path
from verst.engine.sglang.server import SglangEngineServer
server = SglangEngineServer(Path({str(tmp_path / "model")!r}), executable={options["executable"]!r},
    environment={options["environment"]!r}, log=Path({str(options["log"])!r}), threads=1)
server.start()
server.wait_ready(120)
print("ready", flush=True)
time.sleep(600)
"""
    build_tiny("sd3", tmp_path / "model")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def test_no_command_no_server() -> None:
    with (
        pytest.raises(EngineError, match="'no-such-sglang' is no command here"),
        adapter(executable="no-such-sglang"),
    ):
        pass


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sampling.transition.type=dance",), "sampling.transition.type = dance: engine.type = sglang has none such"),
        (("sampling.shared_initial_noise=true",), "sampling.shared_initial_noise = True"),
        (("sampling.storage_dtype=bfloat16",), "sampling.storage_dtype = 'bfloat16'"),
        (("model.compile=aot_eager",), "model.compile = 'aot_eager'"),
        (("model.dtype=bfloat16",), 'set algorithm.old_log_probs = "recompute"'),
        (('engine.arguments=["--tp-size", "2"]',), "engine.arguments: --tp-size is set by verst"),
        (('engine.urls=["127.0.0.1:1"]',), "is no address like http://127.0.0.1:30000"),
        (
            ('engine.urls=["http://a:1", "http://b:1"]', "engine.num=3"),
            "engine.num = 3, but engine.urls names 2 servers",
        ),
    ],
)
def test_recipes_that_no_such_server_can_carry_out(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    base = ("engine.type=sglang", "sampling.shared_initial_noise=false", "model.max_sequence_length=256")
    with pytest.raises(ConfigError) as error:
        recipe_with(tmp_path, *base, *overrides)
    assert words in str(error.value)


def test_num_follows_the_addresses(tmp_path: Path) -> None:
    base = ("engine.type=sglang", "sampling.shared_initial_noise=false", "model.max_sequence_length=256")
    recipe = recipe_with(tmp_path, *base, 'engine.urls=["http://a:1", "http://b:1"]')
    assert recipe.engine.num == 2
    assert recipe.guides_in_two_passes
    assert not batch_plan(recipe).exact_ratio
    assert batch_plan(recipe_with(tmp_path)).exact_ratio
    assert recipe_with(tmp_path).engine.type == "native"
    assert not recipe_with(tmp_path).guides_in_two_passes


def test_doctor_looks_for_servers_and_their_command(tmp_path: Path) -> None:
    def found(*overrides: str) -> list[tuple[str, str]]:
        base = ("engine.type=sglang", "sampling.shared_initial_noise=false", "model.max_sequence_length=256")
        recipe = recipe_with(tmp_path, *base, *overrides)
        return [(finding.level, finding.text) for finding in recipe_findings(recipe) if finding.name == "sglang"]

    with running(tiny_model(), Faults()) as (good, _), running(tiny_model(), Faults(version="0.5.9")) as (old, _):
        levels = found(f'engine.urls=["{good}", "{old}", "http://127.0.0.1:9"]')
        assert levels[:2] == [("ok", f"{good} is SGLang 0.5.23"), ("fail", f"{old} is SGLang 0.5.9")]
        assert levels[2][0] == "fail"
        assert "http://127.0.0.1:9 dropped /server_info" in levels[2][1]
    assert found(f'engine.executable="{command(tmp_path)}"')[0][0] == "ok"
    assert found("engine.executable=no-such-sglang") == [("fail", "no server can be launched")]
