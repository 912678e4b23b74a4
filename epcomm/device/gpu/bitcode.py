"""The device libraries that kernels with a network are linked with: found in what pip installed, and checked.

Nothing is compiled on the user's machine but by Triton: NCCL's and NVSHMEM's wheels contain their device functions as
LLVM bitcode.
"""

from __future__ import annotations

import ctypes
import functools
import re
from importlib import metadata
from pathlib import Path

import torch

from epcomm.device.gpu.nvshmem_slice import nvshmem_slice
from epcomm.errors import UnsupportedError

#: those of `network` that have a device library
NETWORKS = ("nvshmem", "gin")

_GIN_SHIM = Path(__file__).with_name("gin_shim.ll")
#: NCCL's functions that the shim calls; the kinds of network adapter that it names in a mask, 60, as they are mangled
_GIN_SYMBOLS = (b"ncclGinPut_v3", b"ncclGinSignal_v3", b"ncclGinFlush", b"ncclGin_BackendMaskILj60E")
_DEVICE_LIBRARY = re.compile(r"libnvshmem_device_sm_(\d+)\.bc")


def libraries(network: str, arch: str) -> dict[str, str]:
    """What Triton links a kernel with, in order: paths by name. Raises UnsupportedError with the reason if it can't."""
    if network not in NETWORKS:
        return {}
    return dict(_nvshmem(arch) if network == "nvshmem" else _gin())


@functools.cache
def _nvshmem(arch: str) -> dict[str, str]:
    version, folder = installed("nvshmem")
    wanted = int(arch.removeprefix("sm_"))
    found = {int(match[1]): path for path in folder.iterdir() if (match := _DEVICE_LIBRARY.fullmatch(path.name))}
    usable = [number for number in found if number <= wanted]  # code for an older GPU runs on a newer one
    if usable:
        return {"nvshmem": str(nvshmem_slice(found[max(usable)], version, f"sm_{max(usable)}"))}
    common = folder / "libnvshmem_device.bc"  # before 3.5 there was one for all
    if not common.is_file():
        raise UnsupportedError(f"NVSHMEM {version} has no device bitcode for {arch}: {folder} has no {common.name}")
    return {"nvshmem": str(nvshmem_slice(common, version, arch))}


@functools.cache
def _gin() -> dict[str, str]:
    version, folder = installed("nccl")
    path = folder / "libnccl_device.bc"
    newer = "pip install -U nvidia-nccl-cu12"
    if not path.is_file():
        raise UnsupportedError(f"NCCL {version} has no device bitcode, which came with 2.30.7: {newer}")
    bitcode = path.read_bytes()
    if missing := [symbol.decode() for symbol in _GIN_SYMBOLS if symbol not in bitcode]:
        raise UnsupportedError(f"NCCL {version}'s device bitcode has no {', '.join(missing)}: wanted 2.32; {newer}")
    require_version(version, nccl_version(folder / "libnccl.so.2"))
    return {"gin": str(_GIN_SHIM), "nccl": str(path)}  # the first is linked first, and asks for the second's functions


def installed(library: str) -> tuple[str, Path]:
    """(version, folder of its libraries) of "nccl" or "nvshmem"; for torch's release of CUDA if both are installed."""
    releases = sorted(("12", "13"), key=lambda release: not (torch.version.cuda or "12").startswith(release))
    for release in releases:
        try:
            found = metadata.distribution(f"nvidia-{library}-cu{release}")
        except metadata.PackageNotFoundError:
            continue
        folder = Path(str(found.locate_file(f"nvidia/{library}/lib")))
        if folder.is_dir():
            return found.version, folder
    raise UnsupportedError(f"{library.upper()}'s wheel isn't installed: pip install nvidia-{library}-cu{releases[0]}")


def nccl_version(path: Path) -> str:
    """What a libnccl says that it is; asking it takes no GPU."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"NCCL can't be loaded: {error}") from error
    if status:
        raise UnsupportedError(f"{path.name} doesn't tell its version: NCCL's error {status}")
    return version_text(number.value)


def version_text(number: int) -> str:
    """NCCL's version code as text: 23203 is "2.32.3"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def require_version(bitcode: str, library: str) -> None:
    """Raises unless NCCL's bitcode and the library that runs beside it are of one version: they share structs."""
    if bitcode.split(".")[:3] != library.split("."):
        raise UnsupportedError(
            f"NCCL's device bitcode is of version {bitcode}, the NCCL that is loaded of {library}: kernels and host "
            "must be of one version. Install one nvidia-nccl wheel, and let nothing else load another libnccl"
        )
