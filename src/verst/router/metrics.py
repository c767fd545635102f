"""What the router counts, as Prometheus reads it. docs/serving.md lists the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verst.router.pool import Pool, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Of one router; nothing is global."""

    def __init__(self, pool: Pool, *, num_waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfPool(pool, num_waiting))

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"verst_router_{name}", text, labels, registry=self._registry)

        self.requests = counter("requests", "Answers of the router to requests for samples", ["status"])
        self.retries = counter("retries", "Requests that were sent to another engine", ["reason"])
        self.cancelled = counter("cancelled", "Requests whose client went away")
        self.relayed = counter("relayed_bytes", "Bytes of answers that clients took")
        self.updates = counter("updates", "Requests to all engines", ["path", "outcome"])
        self.in_hand = Gauge("verst_router_in_hand_bytes", "Bytes read and not sent yet", registry=self._registry)
        self.wait_s = Histogram(
            "verst_router_wait_seconds", "Until an engine was free", buckets=_SECONDS, registry=self._registry
        )
        self.answer_s = Histogram(
            "verst_router_answer_seconds", "Until an answer began", buckets=_SECONDS, registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _OfPool(Collector):
    """Read when it is asked for: engines come and go, and leave no stale rows."""

    def __init__(self, pool: Pool, num_waiting: Callable[[], int]) -> None:
        self._pool, self._num_waiting = pool, num_waiting

    def collect(self) -> Iterable[Metric]:
        pool = self._pool
        yield GaugeMetricFamily("verst_router_waiting", "Requests that wait for an engine", value=self._num_waiting())
        if pool.current is not None:
            yield GaugeMetricFamily("verst_router_weight_version", "Handed out last", value=pool.current)
        state = GaugeMetricFamily("verst_router_engine_state", "1 for the state it is in", labels=["engine", "state"])
        in_flight = GaugeMetricFamily("verst_router_engine_in_flight", "Requests at an engine", labels=["engine"])
        served = GaugeMetricFamily("verst_router_engine_served", "Requests that it has served", labels=["engine"])
        quarantines = GaugeMetricFamily("verst_router_engine_quarantines", "Times it was put aside", labels=["engine"])
        version = GaugeMetricFamily("verst_router_engine_weight_version", "That it holds", labels=["engine"])
        for member in pool.members.values():
            for name in get_args(State):
                state.add_metric([member.url, name], float(member.state == name))
            in_flight.add_metric([member.url], member.in_flight)
            served.add_metric([member.url], member.num_served)
            quarantines.add_metric([member.url], member.num_quarantines)
            if member.version is not None:
                version.add_metric([member.url], member.version)
        yield from (state, in_flight, served, quarantines, version)
