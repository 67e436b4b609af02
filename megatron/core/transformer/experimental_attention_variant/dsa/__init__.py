"""DeepSeek Sparse Attention: lightning indexer, top-k selection, sparse MLA attention and the indexer's KL loss.

``attention.py`` reads like the paper; ``reference.py`` is the specification; ``backends/`` holds the kernels;
``layout.py`` says who sees what. Everything but ``attention.py`` and ``indexer.py`` depends on torch and this folder
alone.
"""

from .config import DSAConfig
from .index_share import TopKCache, TopKRecord, record_topk, replay_topk
from .layout import Layout, Segment, row_bounds
from .loss import LossTracker
from .selection_io import load_topk, save_topk

# The two modules below import the rest of the tree, which in turn imports the names above.
from .attention import DSAttention, DSAttentionSubmodules  # isort: skip
from .indexer import DSAIndexer, DSAIndexerSubmodules  # isort: skip

__all__ = [
    "DSAConfig",
    "DSAIndexer",
    "DSAIndexerSubmodules",
    "DSAttention",
    "DSAttentionSubmodules",
    "Layout",
    "LossTracker",
    "Segment",
    "TopKCache",
    "TopKRecord",
    "load_topk",
    "record_topk",
    "replay_topk",
    "row_bounds",
    "save_topk",
]
