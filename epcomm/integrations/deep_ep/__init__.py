"""DeepEP's Python surface on epcomm: `Buffer` (high throughput, low latency), `ElasticBuffer`, `HybridEPBuffer`.

`install` makes ``import deep_ep`` mean this package, so that DeepEP's clients run unmodified, on CPUs too. What differs
from DeepEP is in docs/integrations.md.
"""

from __future__ import annotations

import torch

from epcomm.integrations.deep_ep.buffer import Buffer
from epcomm.integrations.deep_ep.config import Config
from epcomm.integrations.deep_ep.elastic import ElasticBuffer, EPHandle
from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap
from epcomm.integrations.deep_ep.hybrid import HybridEPBuffer
from epcomm.integrations.deep_ep.install import install

#: of expert indices; int32 is accepted, too
topk_idx_t = torch.int64

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "install",
    "topk_idx_t",
]
