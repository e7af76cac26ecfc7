"""The default engine: ONNX Runtime, weights of 4 to 8 bits, attention over a quantised cache.

engine.py       runs the graph; its cache is a ring (ring.py) for edgekv's own attention operator, rows that move
                (moved.py) for ONNX Runtime's GroupQueryAttention
binding.py      buffers, bound once; memory.py in large pages; centre.py keys held less a constant
opening.py      the session: adapt.py gives a graph its cache, packed.py and table.py edgekv's own matmuls
native.py       whether edgekv's own operators are there; options.py what may be asked for
build.py        weights -> graph, with linear.py and graph.py
foreign.py      another maker's graph -> such a graph, with fuse.py, surgery.py, graphfile.py and foreign_check.py
diagnose.py     which layer gave what is not finite; attention_alone.py for `edgekv bench --attention`
"""
