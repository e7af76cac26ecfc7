"""The torch engine: transformers' models over edgekv's own cache, on CUDA with Triton kernels, on a CPU in plain torch.

Read in this order: engine.py (the protocol), cache.py (the ring), attention.py (where transformers' models meet it),
kernels/ (what reads the rows), loader.py and linear.py (published weights into transformers' modules), graph.py (the
captured decode step).
"""
