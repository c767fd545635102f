"""verst's native engine and SGLang-Diffusion's server, both over HTTP, on one tiny SD3 in fp32: equal bits.

The sequence embeddings of the two differ by rounding (other attention kernels in the text encoders), so verst's engine
is given the ones that SGLang says it used; with its own ones the pictures are the same to 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import torch
from conftest import Sglang
from torch import Tensor

from verst.engine.resolve import Resolved
from verst.engine.server import EngineServer
from verst.engine.wire import decode_response
from verst.engine.worker import Worker
from verst.types import Conditioning

pytestmark = pytest.mark.sglang
SEQUENCE_LENGTH = 256
"""What SGLang's SD3 pads the long encoder's tokens to."""
EMBEDDING_BOUND = 4e-6
"""Largest difference of sequence embeddings, relative to the largest of them."""


class FedWorker(Worker):
    """Takes the conditioning it is given, where it is given one."""

    fed: Conditioning | None = None

    def _encode(self, jobs: Sequence[Resolved]) -> Conditioning:
        return super()._encode(jobs) if self.fed is None else self.fed


class FedServer(EngineServer):
    worker: FedWorker

    def _load(self) -> Worker:
        self.worker = FedWorker(self._folder)
        return self.worker


@pytest.fixture(scope="module")
def ours(sglang_server: Sglang) -> Iterator[FedServer]:
    server = FedServer(sglang_server.folder, threads=1)
    server.start()
    server.wait_ready()
    yield server
    server.stop()


def ask(url: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/rollout/generate", json=body, timeout=300, trust_env=False)
    assert response.status_code == 200, response.text
    (record,) = decode_response(response.content)
    return record


def body(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": "a red 7",
        "negative_prompt": "12",
        "seed": 11,
        "width": 64,
        "height": 32,
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
        "rollout_debug_mode": True,
        "rollout_return_denoising_env": True,
        "rollout_return_dit_trajectory": True,
        **changes,
    }


ONLY_OURS: dict[str, Any] = {
    "max_sequence_length": SEQUENCE_LENGTH,
    "rollout_log_prob_of": "noise",
    "guidance_passes": "two",
}


def conditioning(record: dict[str, Any]) -> Conditioning:
    sides = [record["denoising_env"][name] for name in ("pos_cond_kwargs", "neg_cond_kwargs")]
    positive, negative = (None if side is None else {k: t[None].clone() for k, t in side.items()} for side in sides)
    assert positive is not None
    return Conditioning(positive=positive, negative=negative)


def tensors(record: dict[str, Any], steps: Sequence[int]) -> dict[str, Tensor]:
    """All that a rollout returns; of SGLang's debug tensors the stochastic steps, which are the ones that verst keeps."""
    out = {name: record[name] for name in ("generated_output", "rollout_log_probs")}
    out |= {name: record["dit_trajectory"][name] for name in ("latents", "timesteps", "sigmas")}
    debug = dict(record["rollout_debug_tensors"])
    own = debug.pop("rollout_debug_step_indices", None)
    assert own is None or own.tolist() == list(steps)
    for name, value in debug.items():
        out[name] = value if own is not None else value[list(steps)]
    return out


CASES = [
    {"rollout_sde_type": "sde"},
    {"rollout_sde_type": "sde", "guidance_scale": 1.0, "seed": 2**40 + 1},
    {"rollout_sde_type": "sde", "height": 64, "num_inference_steps": 6, "rollout_noise_level": 0.3, "prompt": "9"},
    {"rollout_sde_type": "sde", "rollout_log_prob_no_const": True},
    {"rollout_sde_type": "sde", "rollout_sde_step_indices": [1, 2], "rollout_return_step_indices": [1, 2, 3]},
    {"rollout_sde_type": "cps", "rollout_noise_level": 0.8, "rollout_log_prob_no_const": True},
    {"rollout_sde_type": "cps", "rollout_sde_step_indices": [0, 1, 2], "rollout_return_step_indices": [0, 4]},
    {"rollout_sde_type": "ode", "rollout_log_prob_no_const": True},
]


def steps_of(case: dict[str, Any]) -> list[int]:
    if case["rollout_sde_type"] == "ode":
        return []
    return case.get("rollout_sde_step_indices", list(range(case.get("num_inference_steps", 4))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{v}" for v in case.values()))
def test_a_rollout_is_sglangs_bit_for_bit(case: dict[str, Any], sglang_server: Sglang, ours: FedServer) -> None:
    theirs = ask(sglang_server.url, **body(**case))
    ours.worker.fed = conditioning(theirs)
    mine = ask(ours.url, **body(**case), **ONLY_OURS)
    assert mine["echo"]["guidance_passes"] == "two"
    steps = steps_of(case)
    expected, found = tensors(theirs, steps), tensors(mine, steps)
    if not steps:
        expected = {name: t for name, t in expected.items() if name in found}
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert different == []
    assert found["generated_output"].std() > 0.01
    assert found["latents"].abs().max() > 1


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_serving_is_sglangs_bit_for_bit(guidance: float, sglang_server: Sglang, ours: FedServer) -> None:
    """Neither asks for a rollout; the conditioning comes from a rollout of the same prompts."""
    ours.worker.fed = conditioning(ask(sglang_server.url, **body(guidance_scale=guidance)))
    plain = body(rollout=False, guidance_scale=guidance, rollout_debug_mode=False)
    theirs = ask(sglang_server.url, **plain)
    mine = ask(ours.url, **plain, max_sequence_length=SEQUENCE_LENGTH, guidance_passes="two")
    assert torch.equal(mine["generated_output"], theirs["generated_output"])
    assert theirs["rollout_log_probs"] is None
    assert mine["rollout_log_probs"] is None


@pytest.mark.parametrize("prompt", ["a red 7", "", "1234567890 and more of it"])
def test_embeddings_are_sglangs_within_rounding(prompt: str, sglang_server: Sglang, ours: FedServer) -> None:
    ours.worker.fed = None
    theirs = ask(sglang_server.url, **body(prompt=prompt))
    mine = ask(ours.url, **body(prompt=prompt), **ONLY_OURS)
    for side in ("pos_cond_kwargs", "neg_cond_kwargs"):
        one, other = mine["denoising_env"][side], theirs["denoising_env"][side]
        assert one.keys() == other.keys()
        assert torch.equal(one["pooled_projections"], other["pooled_projections"])
        texts = one["encoder_hidden_states"], other["encoder_hidden_states"]
        assert float((texts[0] - texts[1]).abs().max()) <= EMBEDDING_BOUND * float(texts[1].abs().max())
    # The noise and so SGLang's log-probs do not depend on the weights or the prompt at all.
    assert torch.equal(mine["rollout_log_probs"], theirs["rollout_log_probs"])
    torch.testing.assert_close(mine["generated_output"], theirs["generated_output"], atol=1e-4, rtol=0)


def test_one_batch_guidance_differs_by_rounding_alone(sglang_server: Sglang, ours: FedServer) -> None:
    theirs = ask(sglang_server.url, **body())
    ours.worker.fed = conditioning(theirs)
    mine = ask(ours.url, **body(), **{**ONLY_OURS, "guidance_passes": "one_batch"})
    torch.testing.assert_close(
        mine["dit_trajectory"]["latents"], theirs["dit_trajectory"]["latents"], atol=1e-4, rtol=0
    )


def test_log_probs_of_the_stored_latents_are_sglangs_in_fp32(sglang_server: Sglang, ours: FedServer) -> None:
    """The two log-probs differ where latents are rounded; in fp32 hardly."""
    theirs = ask(sglang_server.url, **body())
    ours.worker.fed = conditioning(theirs)
    mine = ask(ours.url, **body(), **{**ONLY_OURS, "rollout_log_prob_of": "stored"})
    assert torch.equal(mine["dit_trajectory"]["latents"], theirs["dit_trajectory"]["latents"])
    torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-3, rtol=0)


def test_known_differences_are_still_there(sglang_server: Sglang, ours: FedServer) -> None:
    """docs/rollout.md names them: when SGLang changes one, this says so."""
    cps = body(rollout_sde_type="cps", rollout_noise_level=0.8)
    theirs = ask(sglang_server.url, **cps)
    assert theirs["rollout_log_probs"].isnan().tolist() == [False, False, False, True]
    refused = httpx.post(f"{ours.url}/rollout/generate", json=cps, timeout=60, trust_env=False)
    assert refused.status_code == 400
    assert "no noise under cps" in refused.json()["detail"]
    many = body(num_outputs_per_prompt=2)
    both = httpx.post(f"{sglang_server.url}/rollout/generate", json=many, timeout=300, trust_env=False)
    assert both.status_code == 200
    first, second = decode_response(both.content)
    alone = ask(sglang_server.url, **body())
    assert first["seed"] == second["seed"] == 11
    assert not torch.equal(first["dit_trajectory"]["latents"][2], alone["dit_trajectory"]["latents"][2])
