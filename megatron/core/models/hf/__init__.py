"""Import and export of Hugging Face checkpoints of DSA models (glm_moe_dsa, deepseek_v32).

``from_pretrained`` and ``save_pretrained`` move whole models, ``load_hf_weights`` fills a model that exists already,
``config_from_hf`` and ``config_to_hf`` map the configuration alone. The meaning of a checkpoint is what transformers
5.24.0 computes; older releases compute other numbers for the same file. Left out: multi-token-prediction layers (named
and skipped only when asked for) and writing FP8.
"""

from megatron.core.models.hf.config_export import config_to_hf, portability_notes
from megatron.core.models.hf.config_import import config_from_hf
from megatron.core.models.hf.pretrained import (
    config_from_folder,
    from_pretrained,
    load_hf_weights,
    materialize,
    read_config,
    save_pretrained,
)

__all__ = [
    "config_from_folder",
    "config_from_hf",
    "config_to_hf",
    "from_pretrained",
    "load_hf_weights",
    "materialize",
    "portability_notes",
    "read_config",
    "save_pretrained",
]
