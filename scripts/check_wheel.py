"""Whether an installed wheel has the operator in it and ONNX Runtime takes it: cibuildwheel runs this on each wheel."""

from __future__ import annotations

import sys

import onnxruntime

from edgekv.engines.onnx import native


def main() -> int:
    """Say what the operator runs with, or why it does not."""
    if reason := native.unavailable():
        print(f"The operator cannot be used: {reason}", file=sys.stderr)
        return 1
    onnxruntime.SessionOptions().register_custom_ops_library(str(native.library()))
    print(f"{native.library().name}: {native.instruction_set()}, onnxruntime {onnxruntime.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
