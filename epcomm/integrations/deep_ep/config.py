"""`Config`: DeepEP's tuning numbers, for any number of ranks. epcomm takes none of them; its size hints are sizes."""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.errors import ConfigError

_WEIGHT_BYTES = 128 * (8 + 4)  # a token's indices and weights; DeepEP's hints, too, are for at most 128 slots
_ALIGNMENT = 128


@dataclass(frozen=True)
class Config:
    """Multiprocessors, and tokens per chunk and queue of DeepEP's two links.

    They are kept and returned by name; only the hints depend on them.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of a queue of `num_max_nvl_chunked_recv_tokens` rows, indices and weights from each of the ranks."""
        return self._queues(hidden_bytes, num_ranks, self.num_max_nvl_chunked_recv_tokens)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: nothing is staged for a network."""
        self._queues(hidden_bytes, num_ranks, self.num_max_rdma_chunked_recv_tokens)
        return 0

    @staticmethod
    def _queues(hidden_bytes: int, num_ranks: int, tokens: int) -> int:
        if hidden_bytes < 0 or num_ranks < 1:
            raise ConfigError(
                f"Config: wanted `hidden_bytes` >= 0 and `num_ranks` >= 1, got {hidden_bytes} and {num_ranks}"
            )
        return -(-num_ranks * tokens * (hidden_bytes + _WEIGHT_BYTES) // _ALIGNMENT) * _ALIGNMENT
