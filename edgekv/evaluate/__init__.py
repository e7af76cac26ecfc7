"""How well a cache serves: losses of a text that streams through it, and what quantising and evicting change.

Read in this order: losses.py (one stream through one cache), settings.py (what can be tried), compare.py (several
caches in step beside a float one: perplexity, KL divergence, top choice), rows.py (the rounding error of each layer's
keys and values), needle.py (a fact inside and outside the window), checkpoint.py (stop and go on), run.py (all of it),
plot.py (the curve).
"""

from edgekv.evaluate.losses import StreamLoss, stream_loss, token_losses

__all__ = ["StreamLoss", "stream_loss", "token_losses"]
