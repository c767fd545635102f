"""SGLang-Diffusion's HTTP contract, from one thread: what is asked, and what its answers mean."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import dumps
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import torch
from torch import Tensor

from verst.engine.sglang.families import Pipeline
from verst.engine.wire import decode_response
from verst.errors import EngineError, ModelError, RequestError, SyncError

OLDEST = (0, 5, 11)
"""The first release with the rollout API."""
_CHECKED_AT_A_TIME = 64
Way = Literal["tensors", "flattened_bucket", "disk"]


class SglangClient:
    """One server. A call that fails is not made again: whoever asks decides."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout_s, connect=10.0), trust_env=False)

    def close(self) -> None:
        self._http.close()

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=10.0).status_code == 200
        except httpx.TransportError:
            return False

    def server_version(self) -> str:
        """As it says. Raises EngineError, ModelError."""
        return str(self._get("/server_info").get("version", "of an unknown version"))

    def verify(self, pipeline: Pipeline) -> str:
        """The server's version. Raises ModelError for one that is too old or serves another kind of model."""
        server, model = self._get("/server_info"), self._get("/model_info")
        version = str(server.get("version", ""))
        if release(version) < OLDEST:
            raise ModelError(
                f"{self.url} is SGLang {version or 'of an unknown version'}; its rollout API needs "
                f"{'.'.join(map(str, OLDEST))} or newer"
            )
        if model.get("architectures") != [pipeline.name]:
            raise ModelError(f"{self.url} serves {model.get('architectures')}, the model folder needs {pipeline.name}")
        if (server.get("tp_size", 1), server.get("dp_size", 1)) != (1, 1):
            raise ModelError(
                f"{self.url} runs with tp_size = {server.get('tp_size')}, dp_size = {server.get('dp_size')}: {pipeline.name} "
                "answers wrongly when it is cut, and replicas are engines of their own; use 1 for both"
            )
        return version

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The one sample's record. Raises RequestError, EngineError."""
        response = self._send("POST", "/rollout/generate", body)
        if response.status_code in (400, 422):
            raise RequestError(f"SGLang refuses it: {_detail(response)}")
        if not response.is_success:
            raise EngineError(f"{self.url} failed at a request ({response.status_code}): {_detail(response)}")
        records = decode_response(response.content)
        if len(records) != 1:
            raise EngineError(f"{self.url} answered {len(records)} samples to a request of one")
        return records[0]

    def update(self, module: str, tensors: Mapping[str, Tensor], *, way: Way, folder: Path | None = None) -> None:
        """Whole tensors. What the server does with names that it does not know it does not say: `mismatch` tells.

        folder: with "disk", one that holds `<module>/*.safetensors` of these. Raises SyncError, EngineError.
        """
        if way == "disk":
            body: dict[str, Any] = {"model_path": str(folder), "target_modules": [module], "flush_cache": True}
            self._post("/update_weights_from_disk", body)
            return
        named = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()]
        payload: Any = named if way == "tensors" else {module: _bucket(named)}
        extra = {} if way == "tensors" else {"load_format": "flattened_bucket"}
        self._from_tensor(module, payload, **extra)

    def update_lora(self, module: str, pairs: Mapping[str, tuple[Tensor, Tensor]], *, rank: int, alpha: float) -> None:
        """layer -> A, B. Raises SyncError, EngineError."""
        named = [
            (f"{layer}.{name}.weight", tensor)
            for layer, pair in pairs.items()
            for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        ]
        message = self._from_tensor(
            module,
            named,
            weight_update_mode="lora_merge",
            lora_rank=rank,
            lora_alpha=int(alpha) if alpha % 1 == 0 else alpha,
        )
        count = re.search(r"Updated (\d+) LoRA layers", message)
        if count is None or int(count[1]) != len(pairs):
            raise SyncError(f"{self.url} was sent {len(pairs)} LoRA layers and says: {message}")

    def mismatch(self, module: str, hashes: Mapping[str, str]) -> str | None:
        """What the server holds otherwise than these SHA-256 say, in its words; None where it holds all of them."""
        names = list(hashes)
        for start in range(0, len(names), _CHECKED_AT_A_TIME):
            part = {name: hashes[name] for name in names[start : start + _CHECKED_AT_A_TIME]}
            body = {"target_module": module, "expected_named_tensors_sha256": part}
            response = self._send("POST", "/update_weights_from_tensor_checker", body)
            if response.status_code == 400:
                return _detail(response)
            if not response.is_success:
                raise EngineError(f"{self.url} cannot check its weights ({response.status_code}): {_detail(response)}")
        return None

    def checksums(self, modules: Sequence[str] | None) -> dict[str, str]:
        body = {"module_names": None if modules is None else list(modules)}
        sums: dict[str, str] = self._post("/get_weights_checksum", body)
        return sums

    def _from_tensor(self, module: str, payload: Any, **more: Any) -> str:
        # The contract's own form, which the server reads with an allowlist; nothing is ever read so here.
        body = {
            "serialized_named_tensors": [base64.b64encode(dumps(payload)).decode()],
            "target_modules": [module],
            **more,
        }
        return str(self._post("/update_weights_from_tensor", body).get("message", ""))

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = self._send("POST", path, body)
        if response.status_code == 400:
            raise SyncError(f"{self.url} refuses {path}: {_detail(response)}")
        if not response.is_success:
            raise EngineError(f"{self.url} failed at {path} ({response.status_code}): {_detail(response)}")
        answer: dict[str, Any] = response.json()
        return answer

    def _get(self, path: str) -> dict[str, Any]:
        response = self._send("GET", path)
        if not response.is_success:
            raise ModelError(f"{self.url} answers {path} with {response.status_code}: is it SGLang-Diffusion?")
        answer: dict[str, Any] = response.json()
        return answer

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise EngineError(f"{self.url} dropped {path}: {type(error).__name__} {error}") from error


def release(version: str) -> tuple[int, ...]:
    """The first three numbers of a version; () where it has none."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _bucket(named: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """All bytes as one tensor, and where each begins."""
    places, parts, start = [], [], 0
    for name, tensor in named:
        flat = tensor.reshape(-1).view(torch.uint8)
        places.append(
            SimpleNamespace(
                name=name,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype),
                start_idx=start,
                end_idx=start + flat.numel(),
                numel=flat.numel(),
            )
        )
        parts.append(flat)
        start += flat.numel()
    return {"flattened_tensor": torch.cat(parts), "metadata": places}


def _detail(response: httpx.Response) -> str:
    try:
        answer = response.json()
    except ValueError:
        return response.text[:500] or f"HTTP {response.status_code}"
    return str(answer.get("detail") or answer.get("message") or answer)[:2000]
