"""DeepEP's `Buffer`: what it is made of, sizes, and raw memory. The operations are in two modules beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep.config import Config
from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap
from epcomm.integrations.deep_ep.high_throughput import HighThroughput
from epcomm.integrations.deep_ep.low_latency import LowLatency


class Buffer(HighThroughput, LowLatency):
    """High-throughput and low-latency dispatch and combine with DeepEP's arguments and results.

    Attributes: ``rank``, ``group``, ``group_size``, ``num_nvl_bytes``, ``num_rdma_bytes``, ``low_latency_mode``,
    ``explicitly_destroy``, ``enable_shrink``.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        device: Any = None,
    ):
        """Collective: see `ConnectedBuffer` for `group`, `comm` and `device`.

        The sizes are kept as attributes; what names links or queues has no effect.
        """
        super().__init__(group, comm, device, enable_shrink)
        self.rank, self.group_size = self.communicator.rank, self.communicator.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self._scratch: dict[bool, torch.Tensor] = {}

    # ---- tuning, of which epcomm takes nothing from the caller

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: nothing is left out of a build."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets ``Buffer.num_sms``, an even number, which `get_dispatch_config` returns."""
        if new_num_sms < 0 or new_num_sms % 2:
            raise ConfigError(f"Buffer.set_num_sms: argument `new_num_sms`: wanted an even number, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The same for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The same for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of a receive and an output block: rows of 16 bits from all ranks for each local expert, twice."""
        rows = -(-num_experts // num_ranks) * num_ranks * num_max_dispatch_tokens_per_rank
        return 2 * rows * hidden * 2

    # ---- an event, raw memory

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream."""
        return EventOverlap(EventHandle())

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Memory of `num_nvl_bytes` (`num_rdma_bytes`) that is the caller's alone, as one tensor; or part of it.

        Args:
            dtype: of the result.
            size: its shape; default: everything from `offset` on, one-dimensional.
            offset: in elements.
        """
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if use_rdma_buffer not in self._scratch:
            self._scratch[use_rdma_buffer] = torch.empty(num_bytes, dtype=torch.uint8, device=self.communicator.device)
        whole = self._scratch[use_rdma_buffer][: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        shape = (len(whole) - offset,) if size is None else tuple(size)
        if offset < 0 or offset + math.prod(shape) > len(whole):
            wanted = f"wanted at most {len(whole)} elements of {dtype}"
            got = f"got {shape} at offset {offset}"
            raise self._rejected("get_local_buffer_tensor", f"argument `size`: {wanted}, {got}")
        return whole[offset : offset + math.prod(shape)].view(shape)
