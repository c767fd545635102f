"""The tables of rollout engines and of the cluster that holds all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from verst.config.basis import Flag, PositiveFloat, PositiveInt, Section
from verst.config.placement import FreePlacement, PlacementConfig, SleepConfig
from verst.errors import ConfigError


class EngineParallelConfig(Section):
    """Ranks of ONE engine, which share the tokens of each sample; each has a device of its own."""

    ulysses: PositiveInt = 1
    """Ranks that exchange tokens for heads around each attention; divides the model's heads."""
    ring: PositiveInt = 1
    """Ranks round which keys and values of an attention travel; only for families whose attention has no mask."""

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring


class RouterConfig(Section):
    """A process between the driver and all engines of the run (docs/serving.md)."""

    enabled: Flag = False
    """Requests for samples go through a router, which the run starts, watches and ends. Off: the driver itself chooses an engine for each. Weights and memory go to the engines themselves either way."""
    per_engine: PositiveInt = 16
    """Requests that one engine has at a time; others wait in the router, where they can still go to whichever engine is free first."""
    probe_s: PositiveFloat = 1.0
    """Seconds between two looks of the router at an engine."""
    host: str | None = None
    """Address that the router listens on; the same rules as for engine.host."""
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 0
    """The router's port; 0 = any free port."""


class EngineBase(Section):
    """What engines of every kind are told."""

    num: PositiveInt = 1
    """Engines; one process each, or one for each of its ranks."""
    queue_size: PositiveInt = 64
    """Requests that may wait; one more is answered 503."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds one request may take, waiting included."""
    host: str | None = None
    """Address that the server listens on. Elsewhere than on loopback, clients must know the environment's VERST_TOKEN, or a token that is made for the run. Unset = 127.0.0.1 with a local Ray, and in a running cluster (cluster.address) the address of the engine's node there."""
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 0
    """First engine's port, the next engines take the following ones; 0 = any free port."""
    router: RouterConfig = RouterConfig()
    """One address before all engines."""

    @model_validator(mode="after")
    def _ports_are_apart(self) -> EngineBase:
        last = self.port + self.num - 1
        if self.router.enabled and self.port and self.port <= self.router.port <= last:
            raise ConfigError(
                f"engine.router.port = {self.router.port} is an engine's: engine.port = {self.port} and engine.num = "
                f"{self.num} take those up to {last}; use another one, or 0 for any free port"
            )
        return self


class NativeEngine(EngineBase):
    """verst's own engine."""

    type: Literal["native"] = "native"
    parallel: EngineParallelConfig = EngineParallelConfig()
    """Ranks of each engine; by default one."""
    max_batch: PositiveInt = 64
    """Samples of one transformer batch when requests of equal geometry are joined (never when deterministic)."""

    noise_device: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    """Where noise is drawn, in the words of a request."""
    log_prob_of: ClassVar[Literal["stored", "noise"]] = "stored"
    """What the log-probs of a rollout are of, in the same words."""

    @property
    def processes(self) -> int:
        """Ranks of all engines."""
        return self.num * self.parallel.ranks


class SglangEngine(EngineBase):
    """SGLang-Diffusion servers (0.5.11 or newer), each behind an adapter that checks what it answers (docs/sglang.md)."""

    type: Literal["sglang"] = "sglang"
    urls: tuple[str, ...] = ()
    """Servers that run already, one an engine, e.g. http://10.0.0.7:30000; they keep the last weights of the run. Empty: the run launches `num` of them, and ends them."""
    executable: str = "sglang"
    """The command of the package's own environment, by name or path; its torch need not be verst's."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `sglang serve`, e.g. "--vae-precision", "fp32". Those that a rollout depends on are set by verst and refused here."""
    environment: Mapping[str, str] = {}
    """Further environment variables of the server."""
    start_s: PositiveFloat = 600.0
    """Longest that a server may take to start."""
    full_weights: Literal["tensors", "flattened_bucket", "disk"] = "tensors"
    """How whole tensors reach the server: one by one or as one buffer, in the body of a request, or as a file in shared memory of this host. LoRA pairs (sync.lora = pairs) have a way of their own."""
    check_noise: Flag = True
    """Prove from each answer that it was made from the seed, noise level and steps that were asked for. Off: for servers whose GPU draws other numbers than any device of the adapter."""

    parallel: ClassVar[EngineParallelConfig] = EngineParallelConfig()
    max_batch: ClassVar[int] = 1
    noise_device: ClassVar[Literal["cpu", "cuda"]] = "cuda"
    log_prob_of: ClassVar[Literal["stored", "noise"]] = "noise"

    @property
    def processes(self) -> int:
        return self.num

    @model_validator(mode="before")
    @classmethod
    def _one_for_each_url(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("urls") and "num" not in value:
            return {**value, "num": len(value["urls"])}
        return value

    @model_validator(mode="after")
    def _agrees(self) -> SglangEngine:
        if self.urls and self.num != len(self.urls):
            raise ConfigError(
                f"engine.num = {self.num}, but engine.urls names {len(self.urls)} servers; use engine.num = {len(self.urls)}"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"engine.urls = {url!r} is no address like http://127.0.0.1:30000")
        own = [argument for argument in self.arguments if argument.partition("=")[0] in OWN_ARGUMENTS]
        if own:
            raise ConfigError(
                f"engine.arguments: {own[0]} is set by verst, for what a server answers depends on it; leave it out"
            )
        launching = [name for name in ("arguments", "environment") if self.urls and getattr(self, name)]
        if launching:
            raise ConfigError(
                f"engine.{launching[0]} is of servers that the run launches, and engine.urls names running ones; leave one out"
            )
        return self


OWN_ARGUMENTS = (
    "--model-path", "--model-id", "--host", "--port", "--scheduler-port", "--master-port", "--num-gpus", "--tp-size", "--sp-degree", "--ulysses-degree", "--ring-degree",
    "--dp-size", "--enable-cfg-parallel", "--cfg-parallel-size", "--dit-precision", "--text-encoder-precisions",
    "--lora-merge-mode", "--lora-path", "--batching-max-size", "--warmup-mode", "--attention-backend", "--backend",
)  # fmt: skip
"""Of `sglang serve`."""


def _native_by_default(value: Any) -> Any:
    return {"type": "native", **value} if isinstance(value, Mapping) else value


EngineConfig = Annotated[
    Annotated[NativeEngine | SglangEngine, Field(discriminator="type")], BeforeValidator(_native_by_default)
]


class ClusterConfig(Section):
    address: str | None = None
    """Address of a running Ray cluster; unset = a local one is started and stopped with the run."""
    num_cpus: PositiveInt | None = None
    """CPUs of the local Ray; unset = the machine's cores."""
    object_store_bytes: PositiveInt = 256 * 2**20
    """Size of the local Ray's object store."""
    placement: PlacementConfig = FreePlacement()
    """Which nodes and GPUs trainer ranks and engines get."""
    sleep: SleepConfig = SleepConfig()
    """Memory that trainer and engine lend each other on a GPU that they share."""
    wait_s: PositiveFloat = 60.0
    """Seconds that a running cluster has to make room for `placement`; more where an autoscaler brings nodes."""
