"""The tables of rollout engines and of the cluster that holds all processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

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


class NativeEngine(Section):
    type: Literal["native"] = "native"
    num: PositiveInt = 1
    """Engines; one process each, or one for each of its ranks."""
    parallel: EngineParallelConfig = EngineParallelConfig()
    """Ranks of each engine; by default one."""
    max_batch: PositiveInt = 64
    """Samples of one transformer batch when requests of equal geometry are joined (never when deterministic)."""
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

    @property
    def processes(self) -> int:
        """Ranks of all engines."""
        return self.num * self.parallel.ranks

    @model_validator(mode="after")
    def _ports_are_apart(self) -> NativeEngine:
        last = self.port + self.num - 1
        if self.router.enabled and self.port and self.port <= self.router.port <= last:
            raise ConfigError(
                f"engine.router.port = {self.router.port} is an engine's: engine.port = {self.port} and engine.num = "
                f"{self.num} take those up to {last}; use another one, or 0 for any free port"
            )
        return self


EngineConfig = NativeEngine


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
