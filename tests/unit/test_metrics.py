"""What Prometheus reads."""

from __future__ import annotations

from edgekv.generate import Usage
from edgekv.server.metrics import Metrics


def test_values_are_whole() -> None:
    """A counter of millions moves with every token, a gauge of bytes is exact."""
    metrics = Metrics()
    metrics.answered(Usage(input_tokens=1_234_567, reused_tokens=0, decode_s=12345.678))
    text = metrics.text({"resident_bytes": 1_234_567_890})
    assert 'edgekv_tokens_total{kind="input"} 1234567\n' in text
    assert 'edgekv_seconds_total{phase="decode"} 12345.678\n' in text
    assert "edgekv_resident_bytes 1234567890\n" in text
