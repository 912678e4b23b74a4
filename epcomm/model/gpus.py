"""The hardware constants that the predictions are made of, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.errors import ConfigError

BYTES_PER_MICROSECOND = 1e3  # of 1 GB/s


@dataclass(frozen=True)
class Bandwidth:
    """GB/s in one direction, per GPU: what the data sheet says, and the most that kernels have been seen to sustain."""

    peak: float
    reached: float
    source: str

    def microseconds(self, num_bytes: float, reached: bool = False) -> float:
        """The time in µs that `num_bytes` take at the peak, or at the rate that is `reached`."""
        return num_bytes / ((self.reached if reached else self.peak) * BYTES_PER_MICROSECOND)


@dataclass(frozen=True)
class Latency:
    """µs that pass however few the bytes."""

    microseconds: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """One GPU in its usual machine."""

    name: str
    num_sms: int  # architecture white papers; for Blackwell what the CUDA runtime reports
    domain: int  # GPUs that reach each other over NVLink
    nvlink: Bandwidth
    memory: Bandwidth
    nic: Bandwidth  # one adapter per GPU
    sm_bandwidth: float  # GB/s that one SM copies to a peer
    launch: Latency  # from the host's call to the kernel's first instruction
    nvlink_signal: Latency  # store to a peer's memory, seen by the peer that polls it
    nic_signal: Latency  # the same through the network

    def sms_for_nvlink(self) -> int:
        """The fewest SMs whose copies fill NVLink at its peak."""
        return -int(-self.nvlink.peak // self.sm_bandwidth)


_NVLINK4 = Bandwidth(450, 360, "data sheet: 18 links x 25 GB/s; reached: torchcomms P2P on H100, 361 GB/s")
_NVLINK5 = Bandwidth(900, 750, "data sheet: 18 links x 50 GB/s; reached: FlashInfer one-sided on GB200, 753 GB/s")
# The export model of the H100, on which DeepEP's first numbers were taken.
_NVLINK4_H800 = Bandwidth(200, 160, "data sheet: 400 GB/s in both directions together; reached: DeepEP docs/legacy.md")
_HBM_REACHED = 0.9  # of the peak: the usual share of a streaming copy
_NDR = Bandwidth(50, 47, "400 Gb/s adapter (ConnectX-7, EFA: as much per GPU); reached: 45 to 48 GB/s")

# NCCL's cost model of its symmetric kernels (2026-06): GiB/s per SM.
_SM_HOPPER = 44 * 2**30 / 1e9
_SM_BLACKWELL = 55 * 2**30 / 1e9

# An assumption, the only one here without a direct source: it has to stay under every launch that others report.
_LAUNCH = Latency(
    2.5, "assumed: NCCL's cost model lets an LL kernel on Hopper take 4.5 µs for no bytes, signals included"
)
_NVLINK_SIGNAL = Latency(0.6, "NCCL's cost model (2026-06): one step over NVLink with the LL protocol")
_NIC_SIGNAL = Latency(2.7, "NCCL's cost model (2026-06): one step of a ring over the network with the LL protocol")


def _hbm(peak: float) -> Bandwidth:
    return Bandwidth(peak, _HBM_REACHED * peak, "data sheet; reached: 90 %")


def _gpu(name: str, num_sms: int, domain: int, nvlink: Bandwidth, hbm: float, sm: float) -> Gpu:
    return Gpu(name, num_sms, domain, nvlink, _hbm(hbm), _NDR, sm, _LAUNCH, _NVLINK_SIGNAL, _NIC_SIGNAL)


GPUS = {
    "h100": _gpu("H100 SXM", 132, 8, _NVLINK4, 3350, _SM_HOPPER),
    "h800": _gpu("H800 SXM", 132, 8, _NVLINK4_H800, 3350, _SM_HOPPER),
    "h200": _gpu("H200 SXM", 132, 8, _NVLINK4, 4800, _SM_HOPPER),
    "b200": _gpu("B200", 148, 8, _NVLINK5, 8000, _SM_BLACKWELL),
    "gb200": _gpu("GB200 NVL72", 148, 72, _NVLINK5, 8000, _SM_BLACKWELL),
}


def find_gpu(name: str) -> Gpu:
    """The constants of a GPU by its key in GPUS."""
    if name not in GPUS:
        raise ConfigError(f"gpu is {name!r}; known are {', '.join(GPUS)}")
    return GPUS[name]
