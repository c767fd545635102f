"""What `verst router` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from verst.router.pool import Policy


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    engines: tuple[str, ...] = ()
    """Addresses of engines that are there from the start."""
    policy: Policy = field(default_factory=Policy)
    queue_size: int = 1024
    """Requests that may wait for an engine; one more is answered 503."""
    request_timeout_s: float = 900.0
    """Until an answer begins, for requests that name no shorter time."""
    update_timeout_s: float = 600.0
    """For one engine to take new weights."""
    probe_s: float = 1.0
    """Between two looks at an engine."""
    probe_timeout_s: float = 10.0
    """An engine that computes answers late; one that hangs does not."""
