"""The request record refuses what it does not know; the codec gives tensors back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch
from engine_fixtures import folder, keys, raw, request  # noqa: F401
from pydantic import ValidationError

from verst.engine.request import explain
from verst.engine.resolve import resolve
from verst.engine.wire import GenerateRequest, decode_response, encode_response, to_microgroup
from verst.engine.worker import Worker
from verst.errors import EngineError, RequestError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 5)], ids=str)
def test_tensors_survive_the_codec(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 4).to(dtype)
    (sample,) = decode_response(encode_response([{"a": {"b": [tensor, None, 2**63 - 1, "x"]}}]))
    got, nothing, number, text = sample["a"]["b"]
    assert got.dtype == dtype
    assert got.shape == tensor.shape
    assert torch.equal(got, tensor)
    assert (nothing, number, text) == (None, 2**63 - 1, "x")


def test_a_strided_tensor_is_sent_as_it_looks() -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    assert torch.equal(decode_response(encode_response([{"t": tensor}]))[0]["t"], tensor)


def test_tensor_bytes_are_a_safetensors_file() -> None:
    tensor = torch.randn(2, 3)
    record = msgpack.unpackb(encode_response([{"x": tensor}]))[0]["x"]
    assert record["__tensor__"] is True
    assert record["shape"] == [2, 3]
    assert record["dtype"] == "torch.float32"
    assert torch.equal(safetensors.torch.load(record["data"])["t"], tensor)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb([1])])
def test_what_is_no_response_is_an_engine_error(payload: bytes) -> None:
    with pytest.raises(EngineError, match="response"):
        decode_response(payload)


def test_a_cut_tensor_is_an_engine_error() -> None:
    record = msgpack.unpackb(encode_response([{"x": torch.randn(8)}]))
    record[0]["x"]["data"] = record[0]["x"]["data"][:-4]
    with pytest.raises(EngineError, match="cannot be read"):
        decode_response(msgpack.packb(record))


def test_a_response_without_proof_is_refused() -> None:
    with pytest.raises(EngineError, match="echo, weight_version"):
        to_microgroup(encode_response([{"prompt": "a"}]), keys(1))
    with pytest.raises(EngineError, match="1 samples, 2 were asked"):
        to_microgroup(encode_response([{"prompt": "a"}]), keys(2))


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"guidence_scale": 4.0}, 422, "did you mean 'guidance_scale'?"),
        ({"rollout_sde_typ": "sde"}, 422, "did you mean 'rollout_sde_type'?"),
        ({"height": "tall"}, 422, "height = 'tall'"),
        ({"height": 0}, 400, "height = 0"),
        ({"num_inference_steps": -1}, 400, "num_inference_steps = -1"),
        ({"guidance_scale": -0.5}, 400, "guidance_scale = -0.5"),
        ({"guidance_scale": float("nan")}, 400, "guidance_scale"),
        ({"guidance_scale": float("inf")}, 400, "guidance_scale"),
        ({"rollout_sde_type": "euler"}, 400, "'sde', 'cps', 'dance' or 'ode'"),
        ({"rollout_noise_level": float("inf")}, 400, "rollout_noise_level"),
        ({"prompts": ["a", "b"]}, 400, "either prompt or prompts"),
        ({"initial_seeds": [1]}, 400, "seeds: 2, initial_seeds: 1"),
        ({"seeds": [1, 2**63]}, 400, "seeds.1"),
        ({"seed": 3}, 400, "seed = 3 is not seeds"),
        ({"rollout_sde_step_indices": [2, 1]}, 400, "ascending"),
        ({"true_cfg_scale": 3.0}, 400, "differ"),
    ],
    ids=str,
)
def test_bad_requests_say_what_is_wrong(changes: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate(raw(**changes))
    code, text = explain(caught.value)
    assert (code, message in text) == (status, True), text


def test_seeds_count_up_from_one_seed() -> None:
    assert request(seeds=None, seed=5, num_outputs_per_prompt=3).sample_seeds() == (5, 6, 7)
    with pytest.raises(RequestError, match="past"):
        request(seeds=None, seed=2**63 - 1, num_outputs_per_prompt=2).sample_seeds()
    with pytest.raises(RequestError, match="seed is missing"):
        request(seeds=None).sample_seeds()


def test_extra_parameters_are_merged_and_unknown_ones_refused() -> None:
    extra = {"seed": [8, 7], "flow_shift": 2.0, "guidance_scale": 0}
    merged = request(seeds=None, seed=1, extra_sampling_params=extra).merged()
    assert (merged.sample_seeds(), merged.sigma_shift, merged.guidance_scale) == ((8, 7), 2.0, 0.0)
    for name in ("nonsense", "rollout"):
        with pytest.raises(RequestError, match=f"extra_sampling_params.{name}"):
            request(extra_sampling_params={name: 1}).merged()


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:  # noqa: F811
    return Worker(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 40}, "nearest that is: 32"),
        ({"width": 4096}, "nearest that is: 256"),
        ({"num_frames": 5}, "num_frames = 5"),
        ({"image_path": ["a.png"]}, "image_path"),
        ({"rollout_sde_step_indices": [4]}, "the last of 4 steps is 3"),
        ({"rollout_return_step_indices": [5]}, "the final latent is 4"),
        ({"rollout_noise_level": 0}, "no noise and so no log-prob"),
        ({"rollout_sde_type": "cps"}, "reaches the last step 3"),
        ({"rollout_sde_type": "cps", "rollout_noise_level": 1.5}, "0 to 1"),
        ({"rollout_sde_type": "ode", "rollout_sde_step_indices": [0]}, "no such step"),
    ],
    ids=str,
)
def test_what_the_model_cannot_do_is_refused(worker: Worker, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(request(**changes), worker.components)


def test_left_out_parameters_are_the_published_pipelines(worker: Worker) -> None:
    resolved = resolve(GenerateRequest(prompt="1", seed=4), worker.components)
    echo = resolved.echo()
    assert (echo["height"], echo["width"], echo["num_inference_steps"]) == (128, 128, 28)
    assert (echo["guidance_scale"], echo["negative_prompt"], echo["max_sequence_length"]) == (7.0, "", 256)
    assert (echo["seeds"], echo["generator_device"]) == ([4], "cpu")
    assert echo["rollout_sde_step_indices"] == list(range(28))


@pytest.mark.parametrize("scale", [0, 0.0, 0.5, 1.0])
def test_zero_guidance_stays_zero(worker: Worker, scale: float) -> None:
    echo = resolve(request(guidance_scale=scale), worker.components).echo()
    assert echo["guidance_scale"] == scale
    true_cfg = request(guidance_scale=None, true_cfg_scale=0)
    assert resolve(true_cfg, worker.components).echo()["guidance_scale"] == 0
