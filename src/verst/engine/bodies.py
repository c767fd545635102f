"""Bodies of the engine's requests, besides the one for samples: SGLang-Diffusion's, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verst.engine.request import GenerateRequest


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DiskUpdate(_Body):
    model_path: Path
    """A local diffusers folder."""
    flush_cache: bool = True
    """Accepted for the contract's sake; whatever depends on weights is always dropped."""
    target_modules: list[str] | None = None
    """None = the transformer."""
    weight_version: int | None = None
    """None = one more than before."""


class TensorUpdate(_Body):
    serialized_named_tensors: list[str]
    """Base64 of safetensors files."""
    load_format: str | None = None
    target_modules: list[str] | None = None
    weight_version: int | None = None


class TensorCheck(_Body):
    target_module: str
    expected_named_tensors_sha256: dict[str, str]


class Checksums(_Body):
    module_names: list[str] | None = None


class Release(_Body):
    keep: Literal["all", "others"] = "all"
    """others: the transformer's weights are given up, and the next update brings all of them."""


class EntryBody(_Body):
    """`verst.weights.manifest.TensorEntry`."""

    name: str
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]
    offset: Annotated[int, Field(ge=0)]


class BucketBody(_Body):
    """`verst.weights.manifest.Bucket`."""

    handle: str
    nbytes: Annotated[int, Field(ge=0)]
    tensors: list[EntryBody]


class FullBody(_Body):
    type: Literal["full"]


class LoraBody(_Body):
    type: Literal["lora"]
    form: Literal["pairs", "merged"]
    rank: Annotated[int, Field(gt=0)]
    alpha: float
    targets: list[str]


class CollectiveEndpoint(_Body):
    """`verst.weights.transports.collective`."""

    host: str
    port: Annotated[int, Field(gt=0, lt=2**16)]
    generation: int
    is_new: bool
    number: int
    ranks: Annotated[int, Field(gt=0)]
    receivers: Annotated[int, Field(gt=0)]
    timeout_s: Annotated[float, Field(gt=0)]


class ManifestBody(_Body):
    """`verst.weights.manifest.Manifest`."""

    version: int
    finetune: Annotated[FullBody | LoraBody, Field(discriminator="type")]
    transport: str
    endpoint: dict[str, Any]
    buckets: list[BucketBody]
    digest: str

    @model_validator(mode="after")
    def _endpoint_of_its_transport(self) -> ManifestBody:
        if self.transport == "collective":
            CollectiveEndpoint.model_validate(self.endpoint)
        return self


class PromptCheck(_Body):
    prompts: list[str]
    max_sequence_length: int | None = None


class RequestCheck(_Body):
    requests: list[GenerateRequest]
