"""The default engine: ONNX Runtime, MatMulNBits weights, GroupQueryAttention over a quantised cache.

build.py writes the graph, adapt.py gives a graph its cache type, binding.py holds the buffers, engine.py runs it.
"""
