"""UCX's protocol layer (UCP) through ctypes: what is set up once. Its hot calls are in `device.cpu.ucx_engine`.

Structures are those of ucp.h and ucp_def.h of UCX 1.22; the library doesn't read fields that no mask names.

Wheels differ: that of libucx is built without RDMA, that of NIXL has a UCX with it, and so have most systems' packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from epcomm.errors import TimeoutError, UnsupportedError

_OLDEST = 1, 19  # whose fences can keep the order at each endpoint
_RMA, _WAKEUP = 1 << 1, 1 << 4  # features
_MULTI = 2  # UCS_THREAD_MODE_MULTI: the host sets up while the engine's thread runs
_PEER = 1  # UCP_ERR_HANDLING_MODE_PEER
_IN_PROGRESS = 1
_FLAGS, _MEMORY = 1 << 4, 1 << 8  # of the parameters of a request: which fields are set
_FORCE = 1  # UCP_EP_CLOSE_FLAG_FORCE
#: where RDMA devices show
_DEVICES = Path("/sys/class/infiniband")

_COMMON = {"FENCE_MODE": "ep_based"}  # the order at each endpoint is kept without a wait for all of them
#: by what is asked of UCX. Over TCP puts are messages that are copied once they are complete: no word comes in pieces
SETTINGS: dict[str, Mapping[str, str]] = {
    "RDMA": {**_COMMON, "TLS": "ib"},
    "TCP": {**_COMMON, "TLS": "tcp", "TCP_PUT_ENABLE": "n"},
}


class _Parameters(ctypes.Structure):
    _fields_ = [
        ("field_mask", ctypes.c_uint64), ("features", ctypes.c_uint64), ("request", ctypes.c_uint64 * 4),
        ("mt_workers_shared", ctypes.c_int), ("rest", ctypes.c_uint64 * 4),
    ]  # fmt: skip


class _WorkerParameters(ctypes.Structure):
    _fields_ = [("field_mask", ctypes.c_uint64), ("thread_mode", ctypes.c_int), ("rest", ctypes.c_uint64 * 23)]


class _EndpointParameters(ctypes.Structure):
    _fields_ = [
        ("field_mask", ctypes.c_uint64), ("address", ctypes.c_char_p), ("error_mode", ctypes.c_int),
        ("on_error", ctypes.c_void_p), ("argument", ctypes.c_void_p), ("rest", ctypes.c_uint64 * 8),
    ]  # fmt: skip


class _MapParameters(ctypes.Structure):
    _fields_ = [
        ("field_mask", ctypes.c_uint64), ("address", ctypes.c_void_p), ("length", ctypes.c_size_t),
        ("rest", ctypes.c_uint64 * 3),
    ]  # fmt: skip


class RequestParameters(ctypes.Structure):
    """ucp_request_param_t."""

    _fields_ = [
        ("mask", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("unused", ctypes.c_uint64 * 7),
        ("memory", ctypes.c_void_p), ("rest", ctypes.c_uint64 * 3),
    ]  # fmt: skip

    @classmethod
    def of_memory(cls, memory: int) -> RequestParameters:
        """Of a put from memory that was mapped."""
        return cls(mask=_MEMORY, memory=memory)


_P, _OUT, _OUT_SIZE = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
_STATUS, _REQUEST = ctypes.c_int8, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ucp_get_version": (None, [ctypes.POINTER(ctypes.c_uint)] * 3),
    "ucp_config_read": (_STATUS, [ctypes.c_char_p, ctypes.c_char_p, _OUT]),
    "ucp_config_modify": (_STATUS, [_P, ctypes.c_char_p, ctypes.c_char_p]),
    "ucp_config_release": (None, [_P]),
    "ucp_init_version": (_STATUS, [ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(_Parameters), _P, _OUT]),
    "ucp_cleanup": (None, [_P]),
    "ucp_worker_create": (_STATUS, [_P, ctypes.POINTER(_WorkerParameters), _OUT]),
    "ucp_worker_destroy": (None, [_P]),
    "ucp_worker_get_address": (_STATUS, [_P, _OUT, _OUT_SIZE]),
    "ucp_worker_release_address": (None, [_P, _P]),
    "ucp_worker_get_efd": (_STATUS, [_P, ctypes.POINTER(ctypes.c_int)]),
    "ucp_worker_progress": (ctypes.c_uint, [_P]),
    "ucp_ep_create": (_STATUS, [_P, ctypes.POINTER(_EndpointParameters), _OUT]),
    "ucs_status_string": (ctypes.c_void_p, [_STATUS]),
    "ucp_ep_close_nbx": (_REQUEST, [_P, ctypes.POINTER(RequestParameters)]),
    "ucp_ep_flush_nbx": (_REQUEST, [_P, ctypes.POINTER(RequestParameters)]),
    "ucp_request_check_status": (_STATUS, [_REQUEST]),
    "ucp_request_free": (None, [_REQUEST]),
    "ucp_mem_map": (_STATUS, [_P, ctypes.POINTER(_MapParameters), _OUT]),
    "ucp_mem_unmap": (_STATUS, [_P, _P]),
    "ucp_rkey_pack": (_STATUS, [_P, _P, _OUT, _OUT_SIZE]),
    "ucp_rkey_buffer_release": (None, [_P]),
    "ucp_ep_rkey_unpack": (_STATUS, [_P, ctypes.c_char_p, _OUT]),
    "ucp_rkey_destroy": (None, [_P]),
}
#: what the engine calls, by the names that it has for them
HOT = {
    "PROGRESS": "ucp_worker_progress", "ARM": "ucp_worker_arm", "FENCE": "ucp_worker_fence", "PUT": "ucp_put_nbx",
    "CHECK": "ucp_request_check_status", "FREE": "ucp_request_free",
}  # fmt: skip


# ---- the library


@functools.cache
def library() -> Any:
    """UCX's library, that of NIXL's wheel, of the system or of libucx's wheel. Raises UnsupportedError if none fits."""
    problems = []
    for path in _paths():
        try:
            loaded = ctypes.CDLL(path)
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            problems.append(str(error))
            continue
        version = [ctypes.c_uint() for _ in range(3)]
        loaded.ucp_get_version(*version)
        found = tuple(number.value for number in version)
        if found >= _OLDEST:
            return loaded
        problems.append(f"{path} is of release {'.'.join(map(str, found))}, wanted {'.'.join(map(str, _OLDEST))}")
    raise UnsupportedError(f"UCX's library is missing: pip install 'epcomm[ucx]' ({'; '.join(problems)})")


def _paths() -> Iterator[str]:
    found = importlib.util.find_spec("nixl_cu12")
    if found is not None and found.origin is not None:
        yield from map(str, Path(found.origin).parents[1].glob("nixl_cu12.libs/libucp-*.so*"))
    yield "libucp.so.0"
    found = importlib.util.find_spec("libucx")
    if found is not None and found.origin is not None:
        yield str(Path(found.origin).parent / "lib" / "libucp.so.0")


def require_rdma() -> None:
    """Raises UnsupportedError with the reason unless UCX can use an RDMA device of this host."""
    if reason := refusal_of_rdma():
        raise UnsupportedError(reason)


def refusal_of_rdma() -> str:
    """Why UCX can't use an RDMA device of this host; "" if it can."""
    if not _DEVICES.is_dir() or not any(_DEVICES.iterdir()):
        return f"this host has no RDMA device: nothing is in {_DEVICES}"
    try:
        Worker(SETTINGS["RDMA"]).close()
        return ""
    except UnsupportedError as error:
        return str(error)


def address_of(name: str) -> int:
    """The address of a function of the library."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def _require(status: int, what: str) -> None:
    if status != 0:
        text = ctypes.cast(library().ucs_status_string(status), ctypes.c_char_p).value or b""
        raise UnsupportedError(f"{what}: {text.decode()}")


class Worker:
    """A context of UCX with one worker; ``handle``, ``descriptor`` (ready when there is something to progress).

    `settings` by name, without UCX's prefix. What fails raises UnsupportedError.
    """

    def __init__(self, settings: Mapping[str, str]):
        self._library = library()
        self._memories: set[int] = set()
        self._undo = contextlib.ExitStack()
        try:
            self._open(settings)
        except BaseException:
            self._undo.close()
            raise

    def _open(self, settings: Mapping[str, str]) -> None:
        ucx, config, context, worker = self._library, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        _require(ucx.ucp_config_read(None, None, config), "UCX's settings")
        try:
            for name, value in settings.items():
                _require(ucx.ucp_config_modify(config, name.encode(), value.encode()), f"UCX's setting {name}={value}")
            wanted = _Parameters(field_mask=1 | 1 << 5, features=_RMA | _WAKEUP, mt_workers_shared=1)
            what = f"UCX with {', '.join(f'{name}={value}' for name, value in settings.items())}"
            _require(ucx.ucp_init_version(*_OLDEST, wanted, config, context), what)
        finally:
            ucx.ucp_config_release(config)
        self._context = context
        self._undo.callback(ucx.ucp_cleanup, context)
        self._undo.callback(self._unmap_all)
        _require(ucx.ucp_worker_create(context, _WorkerParameters(field_mask=1, thread_mode=_MULTI), worker), what)
        self._undo.callback(ucx.ucp_worker_destroy, worker)
        self._worker, self.handle = worker, worker.value or 0
        descriptor = ctypes.c_int()
        _require(ucx.ucp_worker_get_efd(worker, descriptor), what)
        self.descriptor = descriptor.value

    @property
    def address(self) -> bytes:
        """What `connect` takes elsewhere."""
        return self._taken(self._library.ucp_worker_get_address, self._library.ucp_worker_release_address, self._worker)

    def connect(self, address: bytes, on_error: int, argument: int) -> int:
        """An endpoint to another worker; the function at `on_error` is called with `argument` when it breaks."""
        parameters = _EndpointParameters(
            field_mask=0b111, address=address, error_mode=_PEER, on_error=on_error, argument=argument
        )
        return self._made(self._library.ucp_ep_create, self._worker, parameters)

    def map(self, address: int, num_bytes: int) -> int:
        """Memory that peers which have its `key` can put to, and puts can read from."""
        parameters = _MapParameters(field_mask=0b11, address=address, length=num_bytes)
        memory = self._made(self._library.ucp_mem_map, self._context, parameters)
        self._memories.add(memory)
        return memory

    def unmap(self, memory: int) -> None:
        self._memories.remove(memory)
        self._library.ucp_mem_unmap(self._context, memory)

    def key(self, memory: int) -> bytes:
        ucx = self._library
        return self._taken(lambda of, *out: ucx.ucp_rkey_pack(self._context, of, *out),
                           lambda _, buffer: ucx.ucp_rkey_buffer_release(buffer), memory)  # fmt: skip

    def unpack(self, endpoint: int, key: bytes) -> int:
        """A key as puts at an endpoint take it, until it is destroyed by `forget`."""
        return self._made(self._library.ucp_ep_rkey_unpack, endpoint, key)

    def forget(self, key: int) -> None:
        self._library.ucp_rkey_destroy(key)

    def flush(self, endpoints: Iterable[int], timeout: float) -> None:
        """Returns once all that was put is in place, or lost with its peer. Raises TimeoutError."""
        self._finish([self._library.ucp_ep_flush_nbx(each, RequestParameters()) for each in endpoints], timeout)

    def disconnect(self, endpoints: Iterable[int], timeout: float) -> None:
        """Closes endpoints, whatever is on its way. Raises TimeoutError."""
        by_force = RequestParameters(mask=_FLAGS, flags=_FORCE)
        self._finish([self._library.ucp_ep_close_nbx(each, by_force) for each in endpoints], timeout)

    def close(self) -> None:
        """Gives everything back, what is mapped included."""
        self._undo.close()

    def _unmap_all(self) -> None:
        for memory in list(self._memories):
            self.unmap(memory)

    def _finish(self, requests: Iterable[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for request in requests:
            if request > 0:  # else it is done, or failed
                while self._library.ucp_request_check_status(request) == _IN_PROGRESS:
                    self._library.ucp_worker_progress(self._worker)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"UCX did not finish in {timeout:g} s")
                self._library.ucp_request_free(request)

    @staticmethod
    def _made(function: Any, *arguments: Any) -> int:
        result = ctypes.c_void_p()
        _require(function(*arguments, result), function.__name__)
        return result.value or 0

    @staticmethod
    def _taken(get: Any, release: Any, of: Any) -> bytes:
        buffer, size = ctypes.c_void_p(), ctypes.c_size_t()
        _require(get(of, buffer, size), "UCX's address or key of memory")
        try:
            return ctypes.string_at(buffer.value or 0, size.value)
        finally:
            release(of, buffer)
