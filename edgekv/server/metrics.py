"""Counters and gauges in Prometheus's text format (its documentation, "Exposition formats", version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edgekv.generate import Usage

HELP = {
    "edgekv_requests_total": "Requests by path and status.",
    "edgekv_cancelled_total": "Answers whose client went away before the end.",
    "edgekv_tokens_total": "Tokens by kind: input (of these reused), output, evicted.",
    "edgekv_seconds_total": "Seconds by phase: prefill and decode.",
}


@dataclass
class Metrics:
    """What has happened since the server began."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    cancelled: int = 0

    def answered(self, usage: Usage) -> None:
        """An answer has been made."""
        self.tokens["input"] += usage.input_tokens
        self.tokens["reused"] += usage.reused_tokens
        self.tokens["output"] += usage.output_tokens
        self.tokens["evicted"] += usage.evicted_tokens
        self.seconds["prefill"] += usage.prefill_s
        self.seconds["decode"] += usage.decode_s

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything, with gauges of the moment: name -> value."""
        requests = ((f'path="{path}",status="{status}"', n) for (path, status), n in self.requests.items())
        lines = [
            *_counter("edgekv_requests_total", requests),
            *_counter("edgekv_cancelled_total", [("", self.cancelled)]),
            *_counter("edgekv_tokens_total", ((f'kind="{kind}"', n) for kind, n in self.tokens.items())),
            *_counter("edgekv_seconds_total", ((f'phase="{phase}"', n) for phase, n in self.seconds.items())),
        ]
        for name, value in gauges.items():
            lines += [f"# TYPE edgekv_{name} gauge", f"edgekv_{name} {value!r}"]
        return "\n".join(lines) + "\n"


def _counter(name: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    rows = [f"{name}{{{labels}}} {value!r}" if labels else f"{name} {value!r}" for labels, value in samples]
    return [f"# HELP {name} {HELP[name]}", f"# TYPE {name} counter", *rows]
