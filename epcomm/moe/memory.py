"""A handle's memory: its symmetric segment, the state block its kernels share, and the pools of blocks."""

from __future__ import annotations

import numpy as np

from epcomm.device.control import GENERATION_SHIFT, LINE
from epcomm.device.cpu.memory import STREAMING_BYTES
from epcomm.heap.layout import Layout
from epcomm.heap.private import PrivateMemory
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.blocks import BlockPool
from epcomm.moe.config import LAYOUTS, Config
from epcomm.runtime import Runtime

_TAILS = {"": protocol.UNDEFINED, "marked": protocol.MARKED, "zero": protocol.ZERO}
_PREFAULTED_BLOCKS = 2  # of each kind: a steady loop alternates between at most two


class Memory:
    """Collective to make: every rank maps every rank's segment."""

    def __init__(self, runtime: Runtime, config: Config):
        self._target, size, layout_code = runtime.target, runtime.size, LAYOUTS[config.layout]
        row_bytes = config.row_bytes
        self.capacity = config.capacity
        self.row_limit = config.max_recv_rows or self.capacity
        self.regions = protocol.block_regions(layout_code, self.capacity, config.topk, row_bytes)
        # it holds the experts' outputs, or their sums per token that came from another rank
        outputs_rows = max(self.capacity, config.most_arrivals) if config.is_expanded else self.capacity
        output_bytes = protocol.rows_bytes(outputs_rows, row_bytes)
        layout = Layout()
        word_bytes = protocol.NUM_KINDS * size * LINE
        layout.add("words", word_bytes)
        table = layout.add("count table", 2 * size * (config.most_physical + size) * 4)
        num_blocks = config.blocks + config.graph_blocks
        blocks = layout.add("receive blocks", num_blocks * self.regions.size)
        outputs = layout.add("output blocks", num_blocks * output_bytes)
        self.arrivals = protocol.arrival_regions(config.most_arrivals, config.topk, row_bytes)
        arrivals = layout.add("arrivals", self.arrivals.size) if config.is_expanded else 0
        self.departure_rows, self.return_rows = config.rows_between_nodes(runtime.nodes)
        self.departing = (
            protocol.arrival_regions(self.departure_rows, config.topk, row_bytes)
            if config.is_expanded
            else protocol.block_regions(layout_code, self.departure_rows, config.topk, row_bytes)
        )
        spans_nodes = len(set(runtime.nodes)) > 1
        departures = layout.add("departures", self.departing.size) if spans_nodes else 0
        return_bytes = protocol.rows_bytes(self.return_rows, row_bytes)
        returns = layout.add("returns", return_bytes) if spans_nodes else 0
        self.layout = layout
        balanced = config.balanced_rows * row_bytes
        prefault = [(0, blocks)]
        if layout_code != protocol.PADDED:  # which rows of a padded block are used depends on the routing
            for i in range(min(config.blocks, _PREFAULTED_BLOCKS)):
                prefault.append((blocks + i * self.regions.size + self.regions.rows, balanced))
                prefault.append((outputs + i * output_bytes, balanced))
        self.segment = runtime.segment(layout.size, word_bytes, prefault)
        own = self.segment.own
        numbers, of_graphs = range(config.blocks), range(config.blocks, num_blocks)
        self.receive = BlockPool(own, blocks, self.regions.size, numbers, num_lent=config.blocks)
        self.graph_receive = BlockPool(own, blocks, self.regions.size, of_graphs, num_lent=config.graph_blocks)
        # one output block is for staging, in graphs too; the others are lent by output_buffer()
        self.staging = config.blocks - 1
        self.outputs = BlockPool(own, outputs, output_bytes, numbers, num_lent=self.staging)
        self.graph_outputs = BlockPool(own, outputs, output_bytes, of_graphs, num_lent=config.graph_blocks)
        experts = config.most_physical
        self._tables = [self._target.private(4 * length) for length in (experts, experts, experts, size + 1)]
        self._window = self._private_copy(np.array([*self.segment.bases, *self.segment.network], dtype=np.int64))
        self._nodes = self._private_copy(np.array(runtime.nodes, dtype=np.int32))
        self._marks = self._target.private(4 * (2 * experts + size))
        most_sources = max(config.topk, size) + 1
        # rows that are quantised lie there on CPUs; GPUs have them in registers
        scratch_bytes = protocol.scratch_bytes(most_sources, row_bytes if self._target.runs_on_threads else 0)
        self._scratch = self._target.private(runtime.num_programs * scratch_bytes)
        self._state = self._target.private(8 * protocol.STATE_WORDS)
        self.state_address = self._state.address
        self._tells_later = self._target.defers and not config.host_sync
        overflow = self._overflow(config)
        self.drops = overflow != protocol.STOP
        state = self._state.array.view(np.int64)
        for word, value in (
            (protocol.MAX_TOKENS, config.max_tokens),
            (protocol.LAYOUT, layout_code),
            (protocol.ALIGNMENT, config.alignment),
            (protocol.ROW_LIMIT, self.row_limit),
            (protocol.WINDOW, self._window.address),
            (protocol.COUNT_TABLE, table),
            (protocol.BLOCKS, blocks),
            (protocol.BLOCK_BYTES, self.regions.size),
            (protocol.OUTPUTS, outputs),
            (protocol.OUTPUT_BYTES, output_bytes),
            (protocol.TOKEN_REGION, self.regions.token),
            (protocol.WEIGHT_REGION, self.regions.weight),
            (protocol.INDEX_REGION, self.regions.index),
            (protocol.OWNER, self._tables[0].address),
            (protocol.LOCAL, self._tables[1].address),
            (protocol.ORDER, self._tables[2].address),
            (protocol.ORDER_START, self._tables[3].address),
            (protocol.MARKS, self._marks.address),
            (protocol.SCRATCH, self._scratch.address),
            (protocol.SCRATCH_BYTES, scratch_bytes),
            (protocol.STREAMING_BYTES, STREAMING_BYTES),
            (protocol.NUM_BLOCKS, num_blocks),
            (protocol.NUM_OUTPUTS, num_blocks),
            (protocol.MOST_SOURCES, most_sources),
            (protocol.IS_BY_RANK, config.is_by_rank),
            (protocol.ARRIVALS, arrivals),
            (protocol.ARRIVED_TOKEN, self.arrivals.token),
            (protocol.ARRIVED_WEIGHT, self.arrivals.weight),
            (protocol.ARRIVED_PLACE, self.arrivals.place),
            (protocol.ARRIVED_FACTOR, self.arrivals.factor),
            (protocol.NODES, self._nodes.address),
            (protocol.DEPARTURES, departures),
            (protocol.RETURNS, returns),
            *((protocol.DEPARTING + i, offset) for i, offset in enumerate(self.departing.offsets)),
            (protocol.BLOCK_ROWS, self.capacity),
            (protocol.OVERFLOW, overflow),
            (protocol.TELLS_LATER, self._tells_later),
            (protocol.TAIL, _TAILS[config.tail]),
        ):
            state[word] = value
        self.set_placement(config)
        self.start_generation(runtime.generation)

    def _overflow(self, config: Config) -> int:
        if config.overflow == "drop":
            return protocol.DROP
        return protocol.DROP_AND_TELL if self._tells_later else protocol.STOP

    def free(self) -> None:
        """Lets go of the segment, which is unmapped when the last tensor on it is gone."""
        del self.segment
        for pool in (self.receive, self.graph_receive, self.outputs, self.graph_outputs):
            pool.free_arrays()

    def _private_copy(self, values: np.ndarray) -> PrivateMemory:
        memory = self._target.private(values.nbytes)
        memory.array[:] = values.view(np.uint8)
        memory.publish()
        return memory

    def set_placement(self, config: Config) -> None:
        """Kernels launched from now on find experts where `config` has them; none may be running."""
        for memory, table in zip(self._tables, self._placement_tables(config, config.size), strict=True):
            memory.array[: table.nbytes] = table.view(np.uint8)
            memory.publish(0, table.nbytes)
        self._state.array.view(np.int64)[protocol.NUM_EXPERTS] = config.num_physical
        # no other word: on a device they have gone on since the host wrote them
        self._state.publish(8 * protocol.NUM_EXPERTS, 8 * (protocol.NUM_EXPERTS + 1))

    @staticmethod
    def _placement_tables(config: Config, size: int) -> tuple[np.ndarray, ...]:
        """int32, of physical experts: owner; local number; all, by these two; where each rank's start among those."""
        by_rank = [config.physical_of(rank) for rank in range(size)]
        local = np.zeros(config.num_physical, dtype=np.int32)
        for experts in by_rank:
            local[experts] = np.arange(len(experts))
        starts = np.cumsum([0] + [len(experts) for experts in by_rank])
        order = [expert for experts in by_rank for expert in experts]
        tables = (config.owner, local, order, starts)
        return tuple(np.array(table, dtype=np.int32) for table in tables)

    def start_generation(self, generation: int) -> None:
        """Epochs start again above those of all earlier generations; lent blocks stay lent."""
        state = self._state.array.view(np.int64)
        state[protocol.COUNT_EPOCH : protocol.COMBINE_EPOCH + 1] = generation << GENERATION_SHIFT
        state[protocol.TICKET : protocol.COMBINE_PHASE + 1] = 0
        self._state.publish()
