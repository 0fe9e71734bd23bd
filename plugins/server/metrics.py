"""Metrics for Prometheus: counters and histograms of requests, and the engine's own gauges as they are when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from oarlock.core import hookimpl
from oarlock.core.request import Request
from oarlock.core.result import FinishReason, Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAUGES = {
    "active_rows": "Rows that decode.",
    "pending_rows": "Rows that wait or prepare.",
    "kv_bytes": "Bytes allocated for the caches of running rows.",
    "kv_live_bytes": "Bytes of them that hold tokens.",
    "active_bytes": "Bytes that MLX holds.",
    "peak_bytes": "The most bytes that MLX held.",
    "cache_bytes": "Bytes that MLX keeps for reuse.",
}
_COUNTERS = {
    "delivered_tokens": "Tokens delivered.",
    "preemptions": "Rows sent back to the queue for want of memory.",
    "recoveries": "Steps that failed and were done again.",
    "drafted_tokens": "Drafted tokens that were verified.",
    "accepted_tokens": "Of them, those that were accepted.",
}


class Metrics:
    """A plugin of the engine, and what ``/metrics`` prints. Each instance has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._stats: Callable[[], Mapping[str, Any]] = dict
        self._responses = self._counter("http_responses", "Answers by path and status.", "path", "status")
        self._finished = self._counter("requests", "Requests that ended, by how.", "outcome")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("cached_tokens", "Of them, those that were not computed again.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._first = self._histogram("time_to_first_token_seconds", "From submission to the first token.")
        self._between = self._histogram("time_per_output_token_seconds", "Mean time between tokens of a request.")
        self.registry.register(self)

    def watch(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Print what ``stats`` returns, see `Engine.stats`, from now on."""
        self._stats = stats

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's gauges and counters; called by the registry."""
        stats = self._stats()
        for name, text in _GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(f"oarlock_{name}", text, value=stats[name])
        for name, text in _COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(f"oarlock_{name}", text, value=stats[name])
        for key, text in (("hits", "Requests that found a stored prefix."), ("misses", "Requests that found none.")):
            if key in stats.get("state_cache", {}):
                yield CounterMetricFamily(f"oarlock_prefix_{key}", text, value=stats["state_cache"][key])

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"oarlock_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"oarlock_{name}", text, buckets=_SECONDS, registry=self.registry)

    @hookimpl
    def request_first_token(self, request: Request, elapsed: float) -> None:
        """Called when a request has its first token."""
        self._first.observe(elapsed)

    @hookimpl
    def request_finished(self, request: Request, reason: FinishReason, usage: Usage) -> None:
        """Called when a request has ended."""
        self._finished.labels(str(reason)).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._generated.inc(usage.generated_tokens)
        if usage.generated_tokens > 1:
            self._between.observe(usage.decode_ms / 1e3 / (usage.generated_tokens - 1))

    @hookimpl
    def request_failed(self, request: Request, error: BaseException) -> None:
        """Called when a request has failed."""
        self._finished.labels("failed").inc()
