"""What of DeepEP's surface needs no peers: `install`, events, configurations, sizes, raw memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epcomm
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.integrations import deep_ep

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str) -> str:
    """What it prints, in a process of its own."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_needs_neither_cuda_nor_triton() -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None; import epcomm.integrations.deep_ep; "
        "print(torch.cuda.is_initialized())"
    )
    assert run_python(code) == "False"


def test_install_is_what_clients_import() -> None:
    code = """
import importlib.util, sys
from epcomm.integrations import deep_ep as ours
ours.install(); ours.install()
assert importlib.util.find_spec("deep_ep") is not None  # how clients look for it
import deep_ep, deep_ep.utils
from deep_ep import Buffer, Config, EventOverlap
from deep_ep.utils import EventHandle
from deep_ep.utils.event import EventOverlap as again
from deep_ep.buffers.legacy import Buffer as legacy
from deep_ep_cpp import Config as compiled
assert deep_ep is ours and Buffer is ours.Buffer is legacy and EventOverlap is again and Config is compiled
assert EventHandle is ours.EventHandle
print("same")
"""
    assert run_python(code) == "same"


@pytest.mark.parametrize("name", ["deep_ep", "deep_ep.utils"])
def test_install_leaves_another_one_alone(name: str) -> None:
    code = f"""
import sys, types
other = sys.modules[{name!r}] = types.ModuleType({name!r})
other.__file__ = "/somewhere/deep_ep"
from epcomm.errors import UnsupportedError
from epcomm.integrations import deep_ep
try:
    deep_ep.install()
except UnsupportedError as error:
    print(error)
assert sys.modules[{name!r}] is other and "deep_ep_cpp" not in sys.modules
"""
    assert "/somewhere/deep_ep" in run_python(code)


def test_events() -> None:
    calls: list[str] = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), extra_tensors=(torch.ones(1),))
    event.register_hook_after_wait(lambda: calls.append("waited"))
    with event(release_handle=True) as entered:
        assert entered is event and calls == []
    event.current_stream_wait()
    assert calls == ["waited"] and event.event is None
    with deep_ep.Buffer.capture() as captured:
        pass
    assert captured.event is not None
    deep_ep.EventOverlap().current_stream_wait()  # nothing to wait for
    deep_ep.EventHandle().current_stream_wait()


def test_configurations_of_any_world() -> None:
    sizes = []
    for ranks in (1, 2, 3, 7, 100, 1024):
        for config in (deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)):
            assert config.num_sms == deep_ep.Buffer.num_sms
            assert config.get_rdma_buffer_size_hint(14336, ranks) == 0
            least = config.num_max_nvl_chunked_recv_tokens * 14336 * ranks
            assert config.get_nvl_buffer_size_hint(14336, ranks) >= least
        sizes.append(deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, ranks, 288))
    assert min(sizes) >= 2 * 288 * 128 * 7168 * 2
    custom = deep_ep.Config(24, 8, 256, 16, 128)
    assert (custom.num_sms, custom.num_max_rdma_chunked_recv_tokens) == (24, 128)
    with pytest.raises(ConfigError, match="num_ranks"):
        custom.get_nvl_buffer_size_hint(100, 0)


def test_num_sms() -> None:
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(12)
        assert deep_ep.Buffer.get_dispatch_config(8).num_sms == 12
        with pytest.raises(ConfigError, match="even"):
            deep_ep.Buffer.set_num_sms(13)
    finally:
        deep_ep.Buffer.set_num_sms(before)
    assert deep_ep.Buffer.is_sm90_compiled()


def test_raw_memory_and_stream_of_a_world_of_one() -> None:
    with epcomm.init() as comm:
        buffer = deep_ep.Buffer(comm, num_nvl_bytes=1001, num_rdma_bytes=64, explicitly_destroy=True)
        whole = buffer.get_local_buffer_tensor(torch.int32)
        whole.fill_(7)
        part = buffer.get_local_buffer_tensor(torch.int32, torch.Size([3, 4]), offset=238)
        assert whole.shape == (250,) and part.eq(7).all() and part.data_ptr() == whole[238:].data_ptr()
        assert buffer.get_local_buffer_tensor(torch.bfloat16, use_rdma_buffer=True).shape == (32,)
        with pytest.raises(ConfigError, match="250"):
            buffer.get_local_buffer_tensor(torch.int32, torch.Size([3, 4]), offset=239)
        buffer.get_comm_stream()
        buffer.destroy()


def test_arguments_of_a_buffer() -> None:
    with pytest.raises(UnsupportedError, match="MPI"):
        deep_ep.Buffer(None, comm=object())
    with pytest.raises(ConfigError, match="`group`"):
        deep_ep.Buffer(None)
