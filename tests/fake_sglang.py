"""SGLang-Diffusion's contract over verst's own worker, with the traps of the real server, and faults to be asked for.

    python fake_sglang.py serve --model-path DIR --port N ...      as `sglang serve`; faults from the environment's FAULTS

What it answers has the real server's names, shapes and silences (tests/sglang_oracle compares verst with that one).
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verst.engine.module_weights import checksum, read_folder, tensor_hash
from verst.engine.request import GenerateRequest
from verst.engine.resolve import resolve
from verst.engine.wire import encode_response
from verst.engine.worker import Worker

KEPT_FP32 = "pos_embed.pos_embed"


@dataclass
class Faults:
    version: str = "0.5.23"
    pipeline: str = "StableDiffusion3Pipeline"
    tp_size: int = 1
    seed_shift: int = 0
    """Made from another seed than it says."""
    noise_factor: float = 1.0
    shift: float | None = None
    """Of the sigma grid, whatever was asked."""
    batched_conditioning: bool = False
    """Keeps the batch dimension, as with several outputs."""
    short_text: bool = False
    loses: tuple[str, ...] = ()
    """Parameters that are unknown to it."""
    fails_updates: int = 0
    """So many fail in the middle."""
    once: str = ""
    """A file: the first server to find it away fails in its updates, and makes it."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of every request."""


class FakeSglang:
    def __init__(self, folder: Path, faults: Faults, *, dtype: torch.dtype = torch.float32) -> None:
        self.faults = faults
        self.worker = Worker(folder, dtype=dtype)
        self.kept_fp32 = self.worker.components.transformer.get_buffer(KEPT_FP32).float()
        self.lora: dict[str, torch.Tensor] = {}

    def app(self) -> Starlette:
        posts = {
            "/rollout/generate": self.generate,
            "/update_weights_from_tensor": self.from_tensor,
            "/update_weights_from_disk": self.from_disk,
            "/update_weights_from_tensor_checker": self.check,
            "/get_weights_checksum": self.checksum,
        }
        gets = {"/health": {"status": "ok"}}
        gets["/server_info"] = {"version": self.faults.version, "tp_size": self.faults.tp_size, "dp_size": 1}  # type: ignore[dict-item]
        gets["/model_info"] = {"model_type": "diffusion", "architectures": [self.faults.pipeline]}  # type: ignore[dict-item]

        def answering(value: dict[str, Any]) -> Any:
            async def get(request: Request) -> Response:
                return JSONResponse(value)

            return get

        def taking(path: str, handle: Any) -> Any:
            async def post(request: Request) -> Response:
                body = await request.json()
                self.faults.asked.append((path, body))
                answer: Response = handle(body)
                return answer

            return post

        routes = [Route(path, answering(value)) for path, value in gets.items()]
        routes += [Route(path, taking(path, handle), methods=["POST"]) for path, handle in posts.items()]
        return Starlette(routes=routes)

    def generate(self, body: dict[str, Any]) -> Response:
        faults = self.faults
        known = {name: value for name, value in body.items() if name in GenerateRequest.model_fields}
        known |= {"rollout_log_prob_of": "noise", "guidance_passes": "two", "max_sequence_length": 256}
        known["seed"] = body["seed"] + faults.seed_shift
        known["rollout_noise_level"] = body["rollout_noise_level"] * faults.noise_factor
        if faults.shift is not None:
            known["sigma_shift"] = faults.shift
        job = resolve(GenerateRequest(**known), self.worker.components)
        ((record,),) = self.worker.generate([job])
        record = {name: record[name] for name in THEIRS} | {"seed": body["seed"]}
        path = record["dit_trajectory"]
        record["dit_trajectory"] = {name: path[name] for name in ("latents", "timesteps", "sigmas")}
        environment = record["denoising_env"]
        if environment is not None:
            for name in ("pos_cond_kwargs", "neg_cond_kwargs"):
                if environment[name] is not None:
                    environment[name] = {key: self._as_theirs(key, t) for key, t in environment[name].items()}
        return Response(encode_response([record]), media_type="application/msgpack")

    def _as_theirs(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.faults.short_text and name == "encoder_hidden_states":
            tensor = tensor[:-1]
        return tensor[None] if self.faults.batched_conditioning else tensor

    def from_tensor(self, body: dict[str, Any]) -> Response:
        # A test's own bytes; the real server reads them with an allowlist.
        payload = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        if body.get("weight_update_mode") == "lora_merge":
            for name, tensor in payload:
                layer, _, rest = name.partition(".lora_")
                self.lora[f"{layer}.lora_{rest[0]}"] = tensor
            return _said(
                f"Updated {len(payload) // 2} LoRA layers in transformer from IPC tensors (skipped 0 unknown layers)."
            )
        if body.get("load_format") == "flattened_bucket":
            bucket = payload[body["target_modules"][0]]
            flat = bucket["flattened_tensor"]
            payload = [
                (
                    place.name,
                    flat[place.start_idx : place.end_idx].view(getattr(torch, place.dtype[6:])).view(place.shape),
                )
                for place in bucket["metadata"]
            ]
        return self._write(dict(payload))

    def from_disk(self, body: dict[str, Any]) -> Response:
        return self._write(read_folder(Path(body["model_path"]), body["target_modules"][0]))

    def _write(self, tensors: dict[str, torch.Tensor]) -> Response:
        own = self._own()
        once = Path(self.faults.once) if self.faults.once else None
        fails = self.faults.fails_updates > 0 or (once is not None and not once.exists())
        with torch.no_grad():
            for number, (name, tensor) in enumerate(tensors.items()):
                if fails and number == len(tensors) // 2:
                    self.faults.fails_updates -= 1
                    if once is not None:
                        once.touch()
                    return _said("Failed to update module 'transformer': out of something.", 400)
                if name in own:
                    own[name].copy_(tensor)
        return _said("Updated 1 modules from tensor (transformer).")

    def check(self, body: dict[str, Any]) -> Response:
        own = self._own()
        own |= {KEPT_FP32: self.kept_fp32, **self.lora}
        # A layer with a LoRA has its weights under another name.
        for layer in {name.partition(".lora_")[0] for name in self.lora}:
            own[f"{layer}.base_layer.weight"] = own.pop(f"{layer}.weight")
        wrong = [
            name
            for name, sha in body["expected_named_tensors_sha256"].items()
            if name not in own or tensor_hash(own[name]) != sha
        ]
        if wrong:
            return _said(f"checksum mismatch for {len(wrong)} tensor(s): {', '.join(wrong[:5])}", 400)
        return _said("Verified.")

    def checksum(self, body: dict[str, Any]) -> Response:
        return JSONResponse({"transformer": checksum(self.worker.components.transformer)})

    def _own(self) -> dict[str, torch.Tensor]:
        own = dict(self.worker.components.transformer.state_dict())
        for name in self.faults.loses:
            del own[name]
        return own


THEIRS = (
    "request_id", "prompt", "generated_output", "rollout_log_probs", "rollout_debug_tensors", "denoising_env",
    "dit_trajectory", "inference_time_s", "peak_memory_mb",
)  # fmt: skip
"""Fields of a record that the contract has, besides the seed."""


def _said(message: str, status: int = 200) -> Response:
    return JSONResponse({"success": status == 200, "message": message}, status)


@contextmanager
def running(folder: Path, faults: Faults, *, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, FakeSglang]]:
    """One in a thread of this process: its address, and itself."""
    fake = FakeSglang(folder, faults, dtype=dtype)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", fake
        finally:
            server.should_exit = True
            thread.join(30)


def command(folder: Path) -> Path:
    """A program that is called as `sglang` is."""
    path = folder / "sglang"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n')
    path.chmod(0o755)
    return path


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    options = {name: arguments[index + 1] for index, name in enumerate(arguments[:-1]) if name.startswith("--")}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["--dit-precision"]]
    print("a fake server begins with", " ".join(arguments), flush=True)
    faults = Faults(**json.loads(os.environ.get("FAULTS", "{}")))
    fake = FakeSglang(Path(options["--model-path"]), faults, dtype=dtype)
    uvicorn.run(fake.app(), host=options["--host"], port=int(options["--port"]), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1:])
