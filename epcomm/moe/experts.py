"""The experts of one rank: gated MLPs with stacked weights, on rows as `dispatch` delivers them.

For a row x of local expert e:  down_proj[e] @ activation(gate, up),  where [gate, up] = gate_up_proj[e] @ x.

**Layout of the weights.** gate_up_proj [local_experts, 2 * intermediate, hidden], first all rows of gate, then those of
up; down_proj [local_experts, hidden, intermediate]. It is what transformers (>= 5) stores for most models, and a
checkpoint with a matrix per expert is stacked without transposing: each of those is an ``nn.Linear`` weight, [out, in].
Transposed it is the operand that grouped GEMMs like best ("TN": both operands are contiguous along the sum), and the
only one that the float8 ones take. gate and up in one tensor read the rows once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from epcomm.errors import ConfigError
from epcomm.moe.checks import describe
from epcomm.moe.grouped import grouped_linear_into
from epcomm.moe.router import check_sizes

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """That of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-`limit`."""
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))


#: Of gate and up [rows, intermediate]. "silu" is SwiGLU (https://arxiv.org/abs/2002.05202).
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: F.relu(gate) * up,
    "clamped_swiglu": clamped_swiglu,
}


@functools.cache
def grouped_mm_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch multiplies groups of rows of this dtype there, forward and backward; tried once."""
    if not hasattr(F, "grouped_mm"):
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rows = torch.ones(3, 16, dtype=dtype, device=device, requires_grad=True)
            weight = torch.ones(2, 8, 16, dtype=dtype, device=device, requires_grad=True)
            ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
            result = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
            result.backward(torch.ones_like(result))
            assert weight.grad is not None
            return bool((result == 16).all()) and weight.grad[:, 0, 0].tolist() == [1, 2]
    except RuntimeError:  # of what it is: not this dtype, not on this device, not in this build
        return False


class Experts(nn.Module):
    """Gated MLPs: the `num_local` experts that one rank has; 0 is possible.

    Args:
        num_local, hidden, intermediate: sizes.
        activation: one of `ACTIVATIONS`, or a function (gate, up) -> rows, each [rows, intermediate].
        bias: add ``gate_up_bias`` [num_local, 2 * intermediate] and ``down_bias`` [num_local, hidden].
        grouped: where torch has one grouped GEMM for all experts and it pays, use it. False: a loop over experts.
        dtype, device: of the parameters, and of the rows.

    Raises:
        ConfigError: an argument is wrong.
    """

    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(
        self,
        num_local: int,
        hidden: int,
        intermediate: int,
        *,
        activation: str | Activation = "silu",
        bias: bool = False,
        grouped: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
    ):
        super().__init__()
        check_sizes("Experts", hidden=hidden, intermediate=intermediate)
        if type(num_local) is not int or num_local < 0:
            raise ConfigError(f"Experts: argument `num_local`: wanted an integer >= 0, got {num_local!r}")
        if not callable(activation) and activation not in ACTIVATIONS:
            wanted = f"a function or one of {tuple(ACTIVATIONS)}"
            raise ConfigError(f"Experts: argument `activation`: wanted {wanted}, got {activation!r}")
        self.num_local, self.hidden, self.intermediate = num_local, hidden, intermediate
        self.activation, self.grouped = activation, grouped
        where = torch.empty(0, device=device).device
        if where.type != "meta":
            grouped_mm_works(dtype, where)  # tried now: a first forward may be recorded, by checkpointing for one

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local, *shape, dtype=dtype, device=device))

        self.gate_up_proj = parameter(2 * intermediate, hidden)
        self.down_proj = parameter(hidden, intermediate)
        self.gate_up_bias = parameter(2 * intermediate) if bias else None
        self.down_bias = parameter(hidden) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights of a new model: normal with a deviation of 0.02; no biases."""
        self.gate_up_proj.normal_(std=0.02)
        self.down_proj.normal_(std=0.02)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def needs_grad(self, rows: torch.Tensor) -> bool:
        """Whether a result for these rows will carry gradients."""
        tensors = (rows, self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias)
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def takes_out(self, rows: torch.Tensor) -> bool:
        """Whether a result for these rows can be written into given memory: with gradients, if torch loops anyway."""
        return not self.needs_grad(rows) or (rows.dim() == 2 and rows.is_cpu)

    def forward(
        self,
        rows: torch.Tensor,
        expert_offsets: torch.Tensor | Sequence[int] | None = None,
        *,
        expert_counts: torch.Tensor | Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies to each row the expert that it lies with.

        Args:
            rows: of the parameters' dtype. Contiguous layout: [rows, hidden], grouped by local expert. Padded layout:
                [num_local, capacity, hidden].
            expert_offsets: contiguous layout: [num_local + 1], where each expert's rows start, then where the last
                one's end, as in ``received.expert_offsets``. Padding rows inside a group are computed like others; rows
                past the last offset are undefined in the result, and in the gradient of rows.
            expert_counts: padded layout: [num_local], how many rows each expert has. The others are undefined in the
                result, and no gradient comes from or goes to them. None: all are computed, in as many kernels
                whatever the counts and without the host knowing them, as a graph capture needs it; no gradients then.
            out: like rows; receives the result, and is it (see `takes_out`).

        Returns: like rows. Without any rows it still depends on every parameter: their gradients are zeros, not None.

        Raises:
            ConfigError: an argument is wrong.
        """
        is_padded = rows.dim() == 3
        needs_grad = self.needs_grad(rows)
        self._check(rows, expert_offsets, expert_counts, out, needs_grad)
        if is_padded and expert_counts is None:
            return _written(self._all_rows(rows), out)
        if rows.numel() == 0:
            no_rows = rows.flatten(0, -2).expand(self.num_local, 0, self.hidden)
            return _written(self._all_rows(no_rows).reshape(rows.shape), out)
        if is_padded:
            assert expert_counts is not None
            return self._padded(rows, _on_host(expert_counts), out, needs_grad)
        if needs_grad and out is not None:
            return self._grouped_into(out, rows, expert_offsets)
        # on CPUs a grouped GEMM is a loop too: it saves autograd nodes, but has no `out`
        if self.grouped and (needs_grad or not rows.is_cpu) and self._suits_grouped_mm(rows):
            ends = torch.as_tensor(expert_offsets, dtype=torch.int32, device=rows.device)[1:]
            return _written(self._grouped(rows, ends), out)
        assert expert_offsets is not None
        return self._contiguous(rows, _on_host(expert_offsets), out, needs_grad)

    def _all_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Every row of [num_local, n, hidden]."""
        gate_up = torch.bmm(rows, self.gate_up_proj.transpose(1, 2))
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[:, None]
        result = torch.bmm(self._activated(gate_up), self.down_proj.transpose(1, 2))
        return result if self.down_bias is None else result + self.down_bias[:, None]

    def _padded(
        self, rows: torch.Tensor, counts: list[int], out: torch.Tensor | None, needs_grad: bool
    ) -> torch.Tensor:
        capacity = rows.shape[1]
        if needs_grad:
            pieces = self._each([group[:count] for group, count in zip(rows.unbind(0), counts)])
            return torch.stack([F.pad(piece, (0, 0, 0, capacity - len(piece))) for piece in pieces])
        result = torch.empty_like(rows) if out is None else out
        self._each_into(
            [group[:count] for group, count in zip(rows, counts)],
            [group[:count] for group, count in zip(result, counts)],
        )
        return result

    def _contiguous(
        self, rows: torch.Tensor, offsets: list[int], out: torch.Tensor | None, needs_grad: bool
    ) -> torch.Tensor:
        sizes = [*(end - start for start, end in zip(offsets, offsets[1:])), len(rows) - offsets[-1]]
        if needs_grad:
            *pieces, rest = rows.split(sizes)
            return torch.cat([*self._each(pieces), torch.zeros_like(rest)])
        result = torch.empty_like(rows) if out is None else out
        self._each_into(rows.split(sizes)[:-1], result.split(sizes)[:-1])
        return result

    def _each(self, pieces: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Each expert's result for its piece. unbind, as the gradient of it is one stack, not a tensor per index."""
        return [
            F.linear(self._activated(F.linear(piece, gate_up, gate_up_bias)), down, down_bias)
            for piece, gate_up, down, gate_up_bias, down_bias in zip(
                pieces,
                self.gate_up_proj.unbind(0),
                self.down_proj.unbind(0),
                _unbound(self.gate_up_bias, self.num_local),
                _unbound(self.down_bias, self.num_local),
            )
        ]

    def _each_into(self, pieces: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Writes each expert's result for its piece, without gradients."""
        with torch.no_grad():
            for number, (piece, result) in enumerate(zip(pieces, results)):
                if len(piece) == 0:
                    continue
                gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[number]
                # under autocast it has another dtype than what is to be written
                inner = self._activated(F.linear(piece, self.gate_up_proj[number], gate_up_bias)).to(result.dtype)
                if self.down_bias is None:
                    torch.mm(inner, self.down_proj[number].t(), out=result)
                else:
                    torch.addmm(self.down_bias[number], inner, self.down_proj[number].t(), out=result)

    def _grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """One grouped GEMM for all gates and ups, one for all downs."""
        inner = self._inner(rows, ends)
        return _grouped_linear(inner, self.down_proj, self.down_bias, ends)

    def _inner(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self._activated(_grouped_linear(rows, self.gate_up_proj, self.gate_up_bias, ends))

    def _grouped_into(self, out: torch.Tensor, rows: torch.Tensor, expert_offsets: Any) -> torch.Tensor:
        """With gradients, and the last GEMM's result where it is wanted."""
        offsets = _on_host(expert_offsets)
        if self.grouped and self._suits_grouped_mm(rows):
            inner = self._inner(rows, torch.as_tensor(expert_offsets, dtype=torch.int32)[1:])
        else:
            sizes = [end - start for start, end in zip(offsets, offsets[1:])]
            pieces = rows.split([*sizes, len(rows) - offsets[-1]])[:-1]
            biases = _unbound(self.gate_up_bias, self.num_local)
            gate_up = [F.linear(*each) for each in zip(pieces, self.gate_up_proj.unbind(0), biases)]
            rest = rows.new_zeros(len(rows) - offsets[-1], 2 * self.intermediate)
            inner = self._activated(torch.cat([*gate_up, rest]))
        return grouped_linear_into(out, inner, self.down_proj, self.down_bias, offsets)

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        return activation(*gate_up.chunk(2, dim=-1))

    def _suits_grouped_mm(self, rows: torch.Tensor) -> bool:
        """Whether torch has a grouped GEMM for this. It wants each row of each operand at a multiple of 16 bytes."""
        is_aligned = rows.data_ptr() % 16 == 0 and rows.stride(1) == 1
        widths = (rows.stride(0), self.hidden, self.intermediate)
        is_aligned = is_aligned and all(width * rows.element_size() % 16 == 0 for width in widths)
        return is_aligned and grouped_mm_works(rows.dtype, rows.device)

    def _check(self, rows: torch.Tensor, offsets: Any, counts: Any, out: Any, needs_grad: bool) -> None:
        weight = self.gate_up_proj
        is_padded = rows.dim() == 3
        if (
            rows.dim() not in (2, 3)
            or rows.shape[-1] != self.hidden
            or (is_padded and len(rows) != self.num_local)
            or rows.dtype != weight.dtype
            or rows.device != weight.device
        ):
            shapes = f"[rows, {self.hidden}] or [{self.num_local}, capacity, {self.hidden}]"
            raise _error("rows", f"{shapes} of {weight.dtype} on {weight.device}", describe(rows))
        name, given, other, length = "expert_offsets", offsets, counts, self.num_local + 1
        if is_padded:
            name, given, other, length = "expert_counts", counts, offsets, self.num_local
        layout = "padded" if is_padded else "contiguous"
        if other is not None:
            unwanted = "expert_offsets" if is_padded else "expert_counts"
            raise _error(unwanted, f"None in {layout} layout", "some")
        if given is None and not is_padded:
            raise _error(name, f"{length} integers in {layout} layout", "None")
        if given is not None and len(given) != length:
            raise _error(name, f"{length} integers in {layout} layout", f"{len(given)}")
        if out is not None and not self.takes_out(rows):
            raise _error("out", "None where gradients are needed (but for contiguous layout on a CPU)", "a tensor")
        if out is not None and (out.shape != rows.shape or out.dtype != rows.dtype or out.device != rows.device):
            raise _error("out", describe(rows), describe(out))

    def extra_repr(self) -> str:
        return f"{self.num_local} local, hidden={self.hidden}, intermediate={self.intermediate}, {self.activation}"


def _error(name: str, wanted: str, got: str) -> ConfigError:
    return ConfigError(f"Experts: argument `{name}`: wanted {wanted}, got {got}")


def _on_host(numbers: torch.Tensor | Sequence[int]) -> list[int]:
    return numbers.tolist() if isinstance(numbers, torch.Tensor) else list(numbers)


def _unbound(bias: torch.Tensor | None, count: int) -> Sequence[torch.Tensor | None]:
    return [None] * count if bias is None else bias.unbind(0)


def _written(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def _grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
) -> torch.Tensor:
    """rows @ weight[e].T (+ bias[e]) of [rows, in] and [experts, out, in]; e ends before row ends[e]."""
    result = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    if result.requires_grad:
        # the backward GEMMs take no broadcast gradient, such as that of a sum
        result.register_hook(torch.Tensor.contiguous)
    if bias is None:
        return result
    # rows past the last offset are of one more expert
    expert_of = torch.searchsorted(ends, torch.arange(len(rows), dtype=torch.int32, device=ends.device), right=True)
    return result + F.pad(bias, (0, 0, 0, 1))[expert_of]
