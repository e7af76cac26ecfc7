"""The cache on paper: its shape, its memory, which tokens leave it, and its numerics. Nothing here touches a device.

Read in this order: spec.py (what is chosen), window.py (who leaves and who stays), quant.py (how a row is stored with
one scale a channel), rows.py (how edgekv's own operator stores it, with a factor of its own), scales.py (the file that
says with which scales), plan.py (what it all costs). interchange.py takes scales to vLLM and genai and back.

All of it is checked in about a minute (and the time to install torch, once): who leaves against plain lists, rows and
codes against torch and ONNX Runtime's own, logits after evictions against StreamingLLM's definition in float64.

    python3 scripts/test.py tests/property tests/unit/test_rows.py tests/unit/test_plan.py tests/parity/test_eviction.py
"""
