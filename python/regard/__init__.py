"""Exact fused attention for CPUs, forward and backward, and inspection of attention weights.

    import numpy as np, regard
    q = k = v = np.random.rand(1, 8, 4096, 64).astype(np.float32)
    out = regard.attention(q, k, v, mask="causal & window 512")

`regard.torch`: PyTorch, with gradients. `regard.hf`: attention backend of Hugging Face Transformers. `regard.onnx`: backend of ONNX.
`regard.lens`: records the attention of a model. `regard.Model`: inference of Transformers; `regard.batch`: the same for tables;
`regard.jobs`: for a corpus, on Ray, Spark, Dask. These three need `pip install 'regard[models]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import masks
from ._cache import KvCache
from ._delta import DeltaRule, DeltaState
from ._linear import LinearAttention, LinearState
from ._lsh import LshAttention
from ._numpy import Aux, Grads, attention, plan, scaled_dot_product_attention
from ._regard import VERSION as __version__
from ._regard import isas
from ._steps import Steps, alibi_slopes, check, merge, rope, steps
from ._view import AttentionView

if TYPE_CHECKING:
    from ._model import Model as Model

__all__ = [
    "AttentionView", "Aux", "DeltaRule", "DeltaState", "Grads", "KvCache", "LinearAttention", "LinearState", "LshAttention", "Steps",
    "__version__", "alibi_slopes", "attention", "check", "isas", "masks", "merge", "plan", "rope", "scaled_dot_product_attention", "steps",
]


def __getattr__(name: str) -> Any:
    """`Model` is imported when it is used: it needs another package."""
    if name == "Model":
        from ._model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
