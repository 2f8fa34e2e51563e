"""What the server did since its start, in numbers for Prometheus; they say nothing of what was written."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.serve.request_queue import RequestQueue
from edgespec.text.results import GenerationResult

PASS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
FIRST_TOKEN_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)  # streamed targets read long prompts for minutes


class Metrics:
    """The numbers of one server."""

    def __init__(self, queue: RequestQueue) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "edgespec_requests", "Answers to requests, by path and status", ["path", "status"], registry=registry
        )
        self._tokens = Counter("edgespec_tokens", "Tokens of texts that have ended", ["kind"], registry=registry)
        self._passes = Counter("edgespec_passes", "Passes of the target, counted for each text", registry=registry)
        self._first_token = Histogram(
            "edgespec_first_token_seconds", "Seconds from a text's start to its first token",
            buckets=FIRST_TOKEN_S, registry=registry,
        )  # fmt: skip
        self._waited = Histogram(
            "edgespec_request_first_token_seconds",
            "Seconds from a text's request to its first token, those in which it waited included",
            buckets=FIRST_TOKEN_S, registry=registry,
        )  # fmt: skip
        pass_s = Histogram(
            "edgespec_pass_seconds", "Seconds of a step of all texts, after which others may join",
            buckets=PASS_S, registry=registry,
        )  # fmt: skip
        self.longest_pass_s = 0.0
        Gauge("edgespec_longest_pass_seconds", "Seconds of the longest of these", registry=registry).set_function(
            lambda: self.longest_pass_s
        )

        def hear(seconds: float) -> None:
            pass_s.observe(seconds)
            self.longest_pass_s = max(self.longest_pass_s, seconds)

        queue.engine.hear_passes(hear)
        Gauge("edgespec_open_texts", "Texts that wait or are under way", registry=registry).set_function(
            lambda: queue.num_open
        )
        Gauge("edgespec_texts_at_once", "Texts that may share a pass", registry=registry).set(queue.engine.num_texts)
        Gauge("edgespec_kept_tokens", "Tokens of ended texts whose rows are kept", registry=registry).set_function(
            lambda: queue.engine.prefix_cache.num_tokens
        )
        Gauge("edgespec_kept_bytes", "Memory of rows of ended texts that are kept", registry=registry).set_function(
            lambda: queue.engine.prefix_cache.num_bytes
        )
        Gauge("edgespec_kept_most_bytes", "Memory that such rows may take", registry=registry).set(
            queue.engine.prefix_cache.most_bytes or 0
        )
        queue.on_ended = self._ended

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(path, str(status)).inc()

    def in_text(self) -> bytes:
        """Return all numbers in Prometheus' text form."""
        return generate_latest(self._registry)

    def _ended(self, result: GenerationResult, num_thought: int) -> None:
        passes = result.passes
        for kind, number in (
            ("read", result.prompt_tokens - result.cached_tokens),
            ("cached", result.cached_tokens),
            ("written", len(result.token_ids)),
            ("thought", num_thought),
            ("drafted", sum(step.num_drafted for step in passes)),
            ("accepted", sum(step.num_accepted for step in passes)),
        ):
            self._tokens.labels(kind).inc(number)
        self._passes.inc(len(passes))
        self._first_token.observe(result.time_to_first_token_s)
        if result.first_token_after_s is not None:
            self._waited.observe(result.first_token_after_s)
