"""The cache on paper: its shape, its memory, which tokens leave it, and its numerics. Nothing here touches a device.

Read in this order: spec.py (what is chosen), window.py (who leaves and who stays), quant.py (how a row is stored with
one scale a channel), rows.py (how edgekv's own operator stores it, with a factor of its own), scales.py (the file that
says with which scales), plan.py (what it all costs). interchange.py takes scales to vLLM and genai and back.
"""
