"""Which transport GPUs take, and the host's side of NVSHMEM and NCCL: as far as they go without a GPU.

Ranks are threads here; libraries are small fakes, or the real ones as far as they can be imported (epcomm[link]).
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from network_wheels import need
from typer.testing import CliRunner

import epcomm
from epcomm.cli.main import app
from epcomm.device import control
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.heap import nccl, network, nvshmem, transport
from epcomm.heap.nccl import NcclNetwork, prefixed, raised_table, requirements
from epcomm.heap.network import Exchange, Network, agreed, nodes_of, require_processes
from epcomm.heap.nvshmem import NvshmemNetwork
from epcomm.heap.transport import connect, explained, first_taken
from epcomm.kernels.gpu import cuda
from epcomm.kernels.protocol.collectives import collective_regions

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def one_rank(payload: bytes) -> list[bytes]:
    """An exchange among one rank."""
    return [payload]


def on_ranks(size: int, body: Callable[[int, Exchange], Any]) -> list[Any]:
    """What ``body(rank, exchange)`` returns, or the error that it raises, on ranks that are threads."""
    barrier, payloads = threading.Barrier(size, timeout=30.0), [b""] * size

    def run(rank: int) -> Any:
        def exchange(payload: bytes) -> list[bytes]:
            payloads[rank] = payload
            barrier.wait()
            found = list(payloads)
            barrier.wait()
            return found

        try:
            return body(rank, exchange)
        except (UnsupportedError, ConfigError) as error:
            return error
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


# ---- the rule


def refusing(reason: str) -> Callable[[], str]:
    def attempt() -> str:
        raise UnsupportedError(reason)

    return attempt


def test_auto_takes_the_first_that_is_not_refused() -> None:
    attempts = {name: lambda name=name: name for name in transport.TRANSPORTS}
    assert transport.TRANSPORTS == ("peer_memory", "nvshmem", "gin")
    assert first_taken("auto", attempts) == "peer_memory"
    assert first_taken("auto", {**attempts, "peer_memory": refusing("2 hosts")}) == "nvshmem"
    refused = {**attempts, "peer_memory": refusing("2 hosts"), "nvshmem": refusing("no wheel")}
    assert first_taken("auto", refused) == "gin"
    for name in transport.TRANSPORTS:
        assert first_taken(name, attempts) == name
    with pytest.raises(UnsupportedError, match="got 'auto', but 2 hosts; no wheel; no adapter"):
        first_taken("auto", {**refused, "gin": refusing("no adapter")})
    with pytest.raises(UnsupportedError, match="got 'nvshmem', but no wheel$"):
        first_taken("nvshmem", refused)


def fake_network(name: str, refused_by: Sequence[int], log: list[tuple[str, int]]) -> Any:
    """A network that some ranks refuse, and that notes who made it."""

    class Fake:
        def __init__(self, rank: int, device: torch.device, exchange: Exchange):
            self.name = name
            agreed(name, exchange, lambda: self._check(rank))
            log.append((name, rank))

        def _check(self, rank: int) -> None:
            if rank in refused_by:
                raise UnsupportedError("no adapter")

    return Fake


CONNECTIONS = [
    # hosts, what is asked for, who refuses NVSHMEM, who refuses GIN, what is taken or said
    ([0, 0, 0], "auto", [], [], "peer_memory"),
    ([0, 1, 0], "auto", [], [], "nvshmem"),
    ([0, 1, 2], "auto", [2], [], "gin"),
    ([0, 1, 1], "auto", [1], [0, 2], "hosts, by rank [0, 1, 1]; nvshmem: rank 1: no adapter; gin: rank 0: no adapter"),
    ([0, 0, 0], "gin", [], [], "gin"),
    ([0, 0, 0], "nvshmem", [0], [], "got 'nvshmem', but nvshmem: rank 0: no adapter"),
    ([0, 0, 1], "peer_memory", [], [], "got 'peer_memory', but peer memory can't be used: rank 0: the ranks are on 2"),
]


@pytest.mark.parametrize("hosts, wanted, no_nvshmem, no_gin, result", CONNECTIONS)
def test_ranks_agree(
    hosts: list[int], wanted: str, no_nvshmem: list[int], no_gin: list[int], result: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    log: list[tuple[str, int]] = []
    fakes = {"nvshmem": fake_network("nvshmem", no_nvshmem, log), "gin": fake_network("gin", no_gin, log)}
    monkeypatch.setattr(transport, "_NETWORKS", fakes)
    found = on_ranks(3, lambda rank, exchange: connect(wanted, rank, hosts, GPU, exchange))
    if result in transport.TRANSPORTS:
        names = ["peer_memory" if connection is None else connection.name for connection in found]
        assert names == [result] * 3, found
        assert sorted(log) == [(result, rank) for rank in range(3) if result != "peer_memory"]
    else:
        assert len({str(error) for error in found}) == 1 and result in str(found[0]), found
        assert isinstance(found[0], UnsupportedError) and log == []


def test_gpus_that_do_not_reach_each_other_take_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []
    monkeypatch.setattr(transport, "_NETWORKS", {"nvshmem": fake_network("nvshmem", [], log)})
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)

    def body(rank: int, exchange: Exchange) -> Any:
        return connect("auto", rank, [0, 0], torch.device("cuda", rank), exchange)

    assert [found.name for found in on_ranks(2, body)] == ["nvshmem"] * 2
    monkeypatch.setattr(transport, "_NETWORKS", {})
    for error in on_ranks(2, body):
        assert "rank 0: cuda:0 has no peer access to cuda:1" in str(error)


def test_ranks_ask_for_the_same() -> None:
    for error in on_ranks(2, lambda rank, exchange: connect(("auto", "gin")[rank], rank, [0, 0], GPU, exchange)):
        assert isinstance(error, ConfigError)
        assert "wanted the same on all ranks, got 'auto', 'gin'" in str(error)


def test_transport_is_known() -> None:
    wanted = "wanted one of 'auto', 'peer_memory', 'nvshmem', 'gin', got 'infiniband'"
    with pytest.raises(ConfigError, match=wanted):
        epcomm.init(device="cuda", transport="infiniband")
    with pytest.raises(ConfigError, match="wanted one of 'auto', 'shared_memory', 'ucx', 'tcp', got 'gin'"):
        epcomm.init(transport="gin")


@pytest.mark.parametrize(
    "reach, nodes",
    [
        (["1"], [0]),
        (["111", "111", "111"], [0, 0, 0]),
        (["100", "010", "001"], [0, 1, 2]),
        (["1010", "0101", "1010", "0101"], [0, 1, 0, 1]),
        (["110", "110", "111"], None),
        (["110", "011", "111"], None),
        (["10", "00"], None),
    ],
)
def test_nodes_are_who_reach_each_other(reach: list[str], nodes: list[int] | None) -> None:
    rows = [[mark == "1" for mark in row] for row in reach]
    if nodes is None:
        with pytest.raises(UnsupportedError, match="reach each other by load and store, or not at all"):
            nodes_of(rows)
    else:
        assert nodes_of(rows) == nodes


# ---- what keeps a network from being used


@pytest.fixture()
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """As far as the checks can tell there is a GPU; what its driver says can be changed."""
    said = {"status": 0, "ordering": 100}
    runtime = SimpleNamespace(
        cudaDeviceAttr=SimpleNamespace(cudaDevAttrGPUDirectRDMAWritesOrdering=117),
        cudaDeviceGetAttribute=lambda attribute, index: (said["status"], said["ordering"]),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield said


def test_all_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in (NvshmemNetwork, NcclNetwork):
        archs: list[str] = []

        def refuse(arch: str, archs: list[str] = archs) -> None:
            archs.append(arch)
            raise UnsupportedError("its bitcode is of another version")

        monkeypatch.setattr(kind, "require_library", refuse)
        no_gpu, version = kind.refusals(GPU)
        assert f"{kind.title} needs a GPU: torch" in no_gpu and version == "its bitcode is of another version"
        with pytest.raises(UnsupportedError, match="can't be used: rank 0: .* no CUDA GPU or driver; its bitcode"):
            kind(0, GPU, one_rank)
        assert archs == ["sm_90"] * 2


def test_gpu_must_order_what_cards_write(with_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclNetwork, "require_library", lambda arch: None)
    assert NcclNetwork.refusals(GPU) == []
    with_gpu["ordering"] = 0
    assert NcclNetwork.refusals(GPU) == [
        "cuda:0 would have to flush what a network card wrote before it reads it: GPUDirect RDMA writes ordering 0"
    ]
    with_gpu["status"] = 1
    assert "CUDA error 1" in NcclNetwork.refusals(GPU)[0]


def test_info_explains_auto(with_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arch: str) -> None:
        raise UnsupportedError(f"no bitcode for {arch}")

    monkeypatch.setattr(NvshmemNetwork, "require_library", lambda arch: None)
    monkeypatch.setattr(NcclNetwork, "require_library", lambda arch: None)
    wanted = [("nvshmem", "taken by auto between hosts")]
    assert explained(GPU) == [*wanted, ("gin", "taken by auto between hosts where nvshmem is refused")]
    monkeypatch.setattr(NvshmemNetwork, "require_library", refuse)
    assert explained(GPU) == [
        ("nvshmem", "not taken by auto: no bitcode for sm_90"),
        ("gin", "taken by auto between hosts"),
    ]
    monkeypatch.setattr(NcclNetwork, "require_library", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = CliRunner().invoke(app, ["info"], env={"COLUMNS": "400"}).output
    for row in ("(peer_memory) +not taken by auto: .* no CUDA GPU", "(nvshmem) +not taken by auto: NVSHMEM needs a GPU",
                "(gin) +not taken by auto: NCCL's GIN needs a GPU: .*; no bitcode for sm_90"):  # fmt: skip
        assert re.search(re.escape("cuda target ") + row.replace("(", r"\(").replace(")", r"\)"), said), (row, said)


def test_versions_that_hosts_check(request: Any) -> None:
    need(request, "gin", with_bindings=True)
    NcclNetwork.require_library("sm_90")
    need(request, "nvshmem", with_bindings=True)
    NvshmemNetwork.require_library("sm_90")


@pytest.mark.parametrize("kind", [NvshmemNetwork, NcclNetwork])
def test_bindings_are_missing(kind: type[Network], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "libraries", lambda name, arch: {})
    monkeypatch.setattr(nccl, "libraries", lambda name, arch: {})
    monkeypatch.setitem(sys.modules, kind.modules[0], None)
    with pytest.raises(UnsupportedError, match=f"{kind.title} needs {kind.package}: pip install {kind.package}"):
        kind.require_library("sm_90")


@pytest.mark.parametrize("nodes, constant", [([0, 1], "gin"), ([0, 0], "none")])
def test_cuda_target_hands_its_network_on(
    nodes: list[int], constant: str, with_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To segments and to loaded kernels; kernels know of it if there is a rank that load and store don't reach."""
    log: list[Any] = []
    found = SimpleNamespace(name="gin", nodes=nodes, segment=lambda *arguments: log.append(arguments[:2]))
    monkeypatch.setattr(cuda, "require_cuda", lambda device: device)
    monkeypatch.setattr(cuda, "CudaStream", SimpleNamespace)
    monkeypatch.setattr(cuda, "connect", lambda *arguments: log.append(arguments[:4]) or found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    target = cuda.CudaTarget(GPU, None, "auto")
    assert target.connect(1, [0, 1], one_rank) is found and target.transport == "gin"
    target.segment(1, 4096, 256, (), lambda payload, descriptors: [(payload, [])])
    assert log == [("auto", 1, [0, 1], GPU), (4096, 256)]
    assert target.barrier().network == target.dispatch(8, 2, False).network == constant


# ---- a communicator's life, with fakes of the libraries


@pytest.fixture()
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Device memory is the CPU's, threads pass for processes, and nothing speaks against a network."""
    own_stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: own_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(network, "os", SimpleNamespace(getpid=threading.get_ident))
    monkeypatch.setattr(Network, "_require_gpu", lambda device: None)
    monkeypatch.setattr(NvshmemNetwork, "_is_in_use", False)
    for module, kind in ((nvshmem, NvshmemNetwork), (nccl, NcclNetwork)):
        monkeypatch.setattr(module, "zeroed", zeros_at)
        monkeypatch.setattr(kind, "require_library", lambda arch: None)
    yield


def zeros_at(address: int, num_bytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """CPU memory instead of an allocation of a fake library."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


class FakeNvshmem:
    """`nvshmem.core`, `nvshmem.bindings` and `cuda.core` of all ranks. Notes calls; other nodes' ranks have no ptr."""

    uniqueid_dtype = SimpleNamespace(itemsize=16)

    def __init__(self, nodes: list[int]):
        self.nodes, self.calls, self.rank = nodes, [], threading.local()
        self._ids: list[Any] = []

    def get_unique_id(self, empty: bool = False) -> Any:
        text = ctypes.create_string_buffer(b"" if empty else b"the one meeting", 16)
        self._ids.append(text)
        return SimpleNamespace(ptr=ctypes.addressof(text), text=text)

    def init(self, *, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        assert (uid.text.value, nranks, initializer_method) == (b"the one meeting", len(self.nodes), "uid")
        self.rank.value = rank

    def malloc(self, num_bytes: int) -> int:
        return 4096 * num_bytes

    def ptr(self, address: int, rank: int) -> int | None:
        return address + rank if self.nodes[rank] == self.nodes[self.rank.value] else None

    def Device(self, index: int) -> Any:
        return SimpleNamespace(set_current=lambda: None)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.mark.parametrize("nodes", [[0, 1, 0], [0, 0]])
def test_nvshmem_communicators(nodes: list[int], on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, one after the other; what all ranks give back together is given back only together."""
    library = FakeNvshmem(nodes)
    for name in ("nvshmem.core", "nvshmem.bindings", "cuda.core"):
        monkeypatch.setitem(sys.modules, name, library)

    def body(rank: int, exchange: Exchange) -> Any:
        made = NvshmemNetwork(rank, CPU, exchange)
        segment = made.segment(1000, 256, exchange)
        if rank == 0:
            made.prepare(77)
            made.prepare(77)
        exchange(b"")
        return made, segment, NvshmemNetwork.refusals(CPU)

    size = len(nodes)
    for _ in range(2):
        library.calls.clear()
        found = on_ranks(size, body)
        for rank, (made, segment, refusals) in enumerate(found):
            assert (made.name, made.nodes, made.address) == ("nvshmem", nodes, 0)
            address = 4096 * 1000
            wanted = [address + other if nodes[other] == nodes[rank] else 0 for other in range(size)]
            assert segment.bases.tolist() == wanted and segment.network == (address, 0, 0)
            assert len(refusals) == 1 and "close() that one first; if it failed, reset() it" in refusals[0]
            made.close()  # alone, after a failure
        assert library.calls == [("cumodule_init", 77)]
        found[0][0].close(is_together=True)
        assert library.calls[1:] == [
            ("cumodule_finalize", 77), ("free", 4096 * 4096), ("free", 4096 * 1000), ("finalize",),
        ]  # fmt: skip
        assert NvshmemNetwork.refusals(CPU) == []


class FakeNccl:
    """`nccl.core` and its parts, for all ranks, with an ncclDevComm of 16 bytes."""

    NcclGinConnectionType = SimpleNamespace(FULL="full", NONE="none")
    NcclGinType = SimpleNamespace(NONE="none")
    WindowFlag = SimpleNamespace(COLL_SYMMETRIC=1)
    NCCLDevCommRequirements = SimpleNamespace
    dev_comm_dtype = SimpleNamespace(itemsize=16)

    def __init__(self, nodes: list[int], magic: int = 0xCAFEBEEF, version: int = 23203, runtime_bytes: int = 16):
        self.nodes, self.destroyed = nodes, 0
        self.gin_type, self._runtime_bytes = "proxy", runtime_bytes
        self._struct = ctypes.create_string_buffer(magic.to_bytes(4, "little") + version.to_bytes(4, "little"), 16)
        self.Communicator = SimpleNamespace(init=self._communicator)
        self.UniqueId = SimpleNamespace(from_bytes=bytes)

    def get_unique_id(self) -> Any:
        return SimpleNamespace(as_bytes=b"the one meeting")

    def mem_alloc(self, num_bytes: int, device: Any) -> Any:
        return SimpleNamespace(handle=4096 * num_bytes)

    def _communicator(self, size: int, rank: int, unique_id: bytes) -> Any:
        assert (size, unique_id) == (len(self.nodes), b"the one meeting")

        def window(memory: Any, flag: int) -> Any:
            def pointer(peer: int) -> int:
                return memory.handle + peer if self.nodes[peer] == self.nodes[rank] else 0

            return SimpleNamespace(handle=memory.handle + 7, get_peer_device_pointer=pointer)

        def destroy() -> None:
            self.destroyed += 1

        properties = SimpleNamespace(
            device_api_support=True, gin_connection_type="full", gin_type=self.gin_type,
            dev_comm_runtime_version_size=self._runtime_bytes,
        )  # fmt: skip
        half = SimpleNamespace(ptr=ctypes.addressof(self._struct), gin_context_count=4)
        return SimpleNamespace(
            nranks=size, properties=properties, register_window=window, destroy=destroy,
            create_dev_comm=lambda wanted: SimpleNamespace(dev_comm=half),
        )  # fmt: skip


def gin_networks(library: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """By rank (network, segment of 1000 bytes with 300 of words), or the error."""
    for name in ("nccl.core", "nccl.bindings.nccl", "nccl.core.utils"):
        monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.setattr(nccl, "installed", lambda name: ("2.32.3", Path()))

    def body(rank: int, exchange: Exchange) -> Any:
        made = NcclNetwork(rank, CPU, exchange)
        return made, made.segment(1000, 300, exchange)

    return on_ranks(len(library.nodes), body)


def test_gin_communicator(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNccl([0, 1, 0])
    found = gin_networks(library, monkeypatch)
    tables = set()
    for rank, (made, segment) in enumerate(found):
        assert (made.name, made.nodes) == ("gin", library.nodes)
        assert ctypes.string_at(made.address, 4) == b"\xef\xbe\xfe\xca"  # the device's half
        assert int.from_bytes(ctypes.string_at(made.address - nccl.PREFIX.value, 8), "little") == 4  # contexts
        handle, table, lines = segment.network
        assert (handle, lines) == (4096 * 1000 + 7, 3)  # of 128 bytes
        assert segment.bases.tolist() == [
            4096 * 1000 + other if library.nodes[other] == library.nodes[rank] else 0 for other in range(3)
        ]
        assert segment.keep.shape == (3, 3) and table == segment.keep.data_ptr() and not segment.keep.any()
        tables.add(table)
        made.close()
        assert library.destroyed == rank
        made.close(is_together=True)
    assert len(tables) == 3 and library.destroyed == 3


@pytest.mark.parametrize(
    "library, message",
    [
        (FakeNccl([0, 1], magic=0xBAD), "ncclDevComm doesn't begin with 0xcafebeef but with 0xbad"),
        (FakeNccl([0, 1], version=23004), "device bitcode is of version 2.32.3, the NCCL that is loaded of 2.30.4"),
        (FakeNccl([0, 1], runtime_bytes=24), "ncclDevComm has 24 bytes, that of nccl4py 16"),
    ],
)
def test_nccl_struct_is_another(
    library: FakeNccl, message: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in gin_networks(library, monkeypatch):
        assert isinstance(error, UnsupportedError) and f"rank 0: NCCL's {message}" in str(error), error


def test_nccl_finds_no_adapter(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNccl([0, 1])
    library.gin_type = "none"
    for error in gin_networks(library, monkeypatch):
        assert "rank 0: NCCL finds no network adapter for GIN" in str(error)


def test_words_that_are_counted_are_all_words() -> None:
    """What a network counts of a segment covers every word of the collectives; payload follows."""
    for size, num_channels, num_nodes in ((1, 1, 1), (3, 2, 2), (16, 24, 16)):
        regions = collective_regions(size, num_channels, num_nodes=num_nodes)
        last = {
            "barrier": size, "words": num_channels * 4, "pushed": (num_nodes > 1) * num_channels * 4 * size,
            "message_sent": size, "message_taken": size, "one_shot_flags": 2, "tiny": 2,
        }  # fmt: skip
        for name, lines in last.items():
            assert getattr(regions, name) + lines * control.LINE <= regions.word_bytes, name
        assert control.control_region_bytes(size) <= regions.word_bytes <= regions.staged
        assert raised_table(size, regions.word_bytes, CPU).shape == (size, -(-regions.word_bytes // control.LINE))


def test_gin_adds_what_is_missing() -> None:
    """`gin_raise_remote`, interpreted, with a library that notes what is added: words that the table has counted."""
    script = Path(__file__).parent / "gin_words.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment, cwd=script.parent
    )
    assert (result.returncode, result.stdout.strip()) == (0, "ok"), result.stderr


# ---- the libraries' bindings, as far as they can be imported


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which tells it")
def test_calls_of_cuda_bindings(request: Any) -> None:
    need(request, "nvshmem", with_bindings=True)
    from cuda.bindings import runtime

    assert int(runtime.cudaGPUDirectRDMAWritesOrdering.cudaGPUDirectRDMAWritesOrderingOwner) == 100
    with pytest.raises(UnsupportedError, match="cuda:0 doesn't tell its GPUDirect RDMA writes ordering: CUDA error"):
        network.require_ordered_writes(GPU)


def test_calls_of_nvshmem4py(request: Any) -> None:
    need(request, "nvshmem", with_bindings=True)
    import nvshmem.bindings
    import nvshmem.core

    inspect.signature(nvshmem.core.init).bind(device=0, uid=0, rank=0, nranks=1, initializer_method="uid")
    inspect.signature(nvshmem.core.get_unique_id).bind(empty=True)
    inspect.signature(nvshmem.core.finalize).bind()
    assert nvshmem.bindings.uniqueid().ptr and nvshmem.bindings.uniqueid_dtype.itemsize == 128
    for call, arguments in (("malloc", 1), ("free", 1), ("ptr", 2), ("cumodule_init", 1), ("cumodule_finalize", 1)):
        inspect.signature(getattr(nvshmem.bindings, call)).bind(*range(arguments))


def test_calls_of_nccl4py(request: Any) -> None:
    need(request, "gin", with_bindings=True)
    import nccl.bindings.nccl
    import nccl.core
    from nccl.core.utils import UniqueId

    unique_id = nccl.core.get_unique_id()
    assert bytes(UniqueId.from_bytes(bytes(unique_id.as_bytes)).as_bytes) == bytes(unique_id.as_bytes)
    inspect.signature(nccl.core.Communicator.init).bind(1, 0, unique_id)
    inspect.signature(nccl.core.Communicator.register_window).bind(None, None, nccl.core.WindowFlag.COLL_SYMMETRIC)
    inspect.signature(nccl.core.Communicator.create_dev_comm).bind(None, requirements())
    inspect.signature(nccl.core.mem_alloc).bind(4096, 0)
    inspect.signature(nccl.core.RegisteredWindowHandle.get_peer_device_pointer).bind(None, 0)
    for name in ("destroy", "nranks", "properties"):
        assert hasattr(nccl.core.Communicator, name)
    fields = nccl.core.NCCLCommProperties.__dataclass_fields__
    assert {"device_api_support", "gin_type", "gin_connection_type", "dev_comm_runtime_version_size"} <= set(fields)
    host = nccl.bindings.nccl.DevComm()
    assert {"ptr", "gin_context_count"} <= set(dir(host))
    assert nccl.bindings.nccl.dev_comm_dtype.names[:2] == ("magic", "version")
    wanted = requirements()
    assert wanted.gin_va_signals_required and wanted.gin_strong_signals_required
    assert wanted.gin_connection_type == nccl.core.NcclGinConnectionType.FULL


def test_kernels_find_the_number_of_contexts_before_the_communicator() -> None:
    text = prefixed(b"\xef\xbe\xfe\xca" + bytes(244), 4)
    assert len(text) == 128 + 248 and int.from_bytes(text[:8], "little") == 4 and text[128:132] == b"\xef\xbe\xfe\xca"


def test_failure_of_one_rank_is_raised_by_all() -> None:
    def exchange(payload: bytes) -> list[bytes]:
        return [payload, pickle.dumps("no adapter")]

    with pytest.raises(UnsupportedError, match="GIN: rank 1: no adapter"):
        agreed("GIN", exchange, lambda: 1)
    with pytest.raises(UnsupportedError, match="GIN: rank 0: ValueError: bad"):
        agreed("GIN", one_rank, lambda: int(_raise(ValueError("bad"))))
    assert agreed("GIN", one_rank, lambda: 7) == 7


def _raise(error: Exception) -> int:
    raise error


def test_ranks_of_a_network_are_processes() -> None:
    require_processes("GIN", one_rank)
    with pytest.raises(UnsupportedError, match="must be a process of its own"):
        require_processes("GIN", lambda payload: [payload, payload])
