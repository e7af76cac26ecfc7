"""Finding the scales of a model's KV cache, and checking them on text they were not made from.

Read in this order: run.py (the whole way), corpus.py (what is read), observe.py (what is recorded of it), thresholds.py
(what is made of that), measure.py (how good it is), options.py (what can be chosen).
"""

from edgekv.calibrate.options import METHODS, CalibrateOptions, Method, Progress
from edgekv.calibrate.run import CalibrationReport, OpenEngine, calibrate

__all__ = ["METHODS", "CalibrateOptions", "CalibrationReport", "Method", "OpenEngine", "Progress", "calibrate"]
