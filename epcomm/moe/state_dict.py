"""Weights of one MoE block out of a dense state dict, as checkpoints of Hugging Face models have them.

What is found where, behind the block's own name (``model.layers.3.mlp.``, ``block_sparse_moe.``, ...):

    router      gate.weight or router.weight [num_experts, hidden], gate.bias or router.bias [num_experts]
    correction  gate.e_score_correction_bias or e_score_correction_bias [num_experts]
    experts     experts.3.gate_proj.weight, up_proj [intermediate, hidden], down_proj [hidden, intermediate]
                experts.3.w1.weight, w3, w2: the same three, as Mixtral and MiniMax-M2 name them
                experts.gate_up_proj [num_experts, 2 * intermediate, hidden], experts.down_proj [num_experts, hidden,
                intermediate]: transformers >= 5; or both transposed (Llama 4)
                the transposed ones with experts.gate_up_proj_bias and experts.down_proj_bias: gpt-oss, where the rows
                of gate and up alternate
    shared      shared_experts.gate_proj.weight, ... or shared_expert.gate_proj.weight, ...
    its gate    shared_expert_gate.weight [1, hidden]

Only what is asked for is read, so values may be loaded lazily. Results are copies: the dense tensors can go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.moe.checks import describe

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class DenseBlock:
    """One MoE block of a state dict.

    Args:
        state_dict: names to tensors: of the block alone, or of a whole model.
        prefix: what the block's names start with. It may be left away where there is one block only.

    Attributes: ``num_experts, hidden, intermediate``; ``shared_intermediate`` (0: no shared expert); ``dtype`` of the
    experts.

    Raises:
        ConfigError: there is no such block, or there are several; keys are missing; a tensor has another shape or is
            quantised. The message names the keys. Methods and attributes raise it too, for what they read.
    """

    def __init__(self, state_dict: Mapping[str, torch.Tensor], prefix: str = ""):
        self._state_dict = state_dict
        names = [key for key in state_dict if key.startswith(prefix) and "experts" in key.split(".")]
        blocks = {_block_of(key) for key in names}
        if len(blocks) != 1:
            found = ", ".join(sorted(repr(name) for name in blocks)[:4]) if blocks else _some(list(state_dict))
            wanted = f"the keys of one MoE block with prefix {prefix!r} (such as `experts.0.gate_proj.weight`)"
            raise _error(wanted, f"{len(blocks)} blocks: {found}")
        (self.prefix,) = blocks
        weight = self._first("gate.weight", "router.weight")
        if weight.dim() != 2:
            raise _error("a router's weight [num_experts, hidden]", describe(weight))
        self.num_experts, self.hidden = weight.shape

    # ---- parts, with the names that `Router` and `Experts` have for them

    def router(self) -> dict[str, torch.Tensor]:
        """weight, and bias and correction_bias if there are."""
        found = {"weight": self._tensor(self._name_of("gate.weight", "router.weight"), (self.num_experts, self.hidden))}
        for name, keys in (
            ("bias", ("gate.bias", "router.bias")),
            ("correction_bias", ("gate.e_score_correction_bias", "e_score_correction_bias")),
        ):
            if any(self._has(key) for key in keys):
                found[name] = self._tensor(self._name_of(*keys), (self.num_experts,))
        return found

    def experts(self, expert_ids: Sequence[int], **to: Any) -> dict[str, torch.Tensor]:
        """The experts with these global ids, in this order.

        Args:
            to: dtype and device of the results; default: as they are.

        Returns: gate_up_proj [len(expert_ids), 2 * intermediate, hidden], down_proj [len(expert_ids), hidden,
        intermediate]; for a block with biases also gate_up_bias and down_bias.
        """
        wrong = [expert for expert in expert_ids if not 0 <= expert < self.num_experts]
        if wrong:
            raise ConfigError(
                f"state dict: argument `expert_ids`: wanted 0 to {self.num_experts - 1}, got {_some(wrong)}"
            )
        if self._is_fused:
            return self._fused_experts(list(expert_ids), **to)
        return self._gated_mlps([f"experts.{expert}" for expert in expert_ids], self.intermediate, **to)

    def shared_expert(self, **to: Any) -> dict[str, torch.Tensor]:
        """gate_up_proj [1, 2 * shared_intermediate, hidden] and down_proj; nothing if there is no shared expert."""
        return self._gated_mlps([self._shared], self.shared_intermediate, **to) if self._shared else {}

    def shared_gate(self, **to: Any) -> dict[str, torch.Tensor]:
        """weight [1, hidden] of the shared expert's gate, or nothing."""
        if not self.has_shared_gate:
            return {}
        return {"weight": self._tensor("shared_expert_gate.weight", (1, self.hidden)).to(**to, copy=True)}

    @cached_property
    def intermediate(self) -> int:
        if self._is_fused:
            return self._value("experts.down_proj").shape[2 if not self._is_transposed else 1]
        return len(self._value(f"{self._an_expert}.{self._projections[0]}.weight"))

    @cached_property
    def shared_intermediate(self) -> int:
        return len(self._value(f"{self._shared}.{self._projections[0]}.weight")) if self._shared else 0

    @property
    def has_expert_bias(self) -> bool:
        return self._has("experts.gate_up_proj_bias")

    @property
    def has_shared_gate(self) -> bool:
        return self._has("shared_expert_gate.weight")

    @cached_property
    def dtype(self) -> torch.dtype:
        if self._is_fused:
            return self._value("experts.down_proj").dtype
        return self._value(f"{self._an_expert}.{self._projections[0]}.weight").dtype

    # ---- formats

    @cached_property
    def _is_fused(self) -> bool:
        return self._has("experts.gate_up_proj")

    @cached_property
    def _is_transposed(self) -> bool:
        """Whether the fused tensors are [.., in, out]. One of them can be both, if it is square, but not the two."""
        gate_up, down = self._value("experts.gate_up_proj"), self._value("experts.down_proj")
        if gate_up.dim() == 3 and down.dim() == 3:
            if gate_up.shape[2] == self.hidden == down.shape[1] and gate_up.shape[1] == 2 * down.shape[2]:
                return False
            if gate_up.shape[1] == self.hidden == down.shape[2] and gate_up.shape[2] == 2 * down.shape[1]:
                return True
        raise _error(
            f"{self.prefix}experts.gate_up_proj [{self.num_experts}, 2 * intermediate, {self.hidden}] and "
            f"{self.prefix}experts.down_proj [{self.num_experts}, {self.hidden}, intermediate], or both transposed",
            f"{describe(gate_up)} and {describe(down)}",
        )

    @cached_property
    def _an_expert(self) -> str:
        """Of those that are here; a rank's files may have a part of them."""
        start = f"{self.prefix}experts."
        numbers = [key[len(start) :].split(".")[0] for key in self._state_dict if key.startswith(start)]
        return f"experts.{min((int(number) for number in numbers if number.isdigit()), default=0)}"

    @cached_property
    def _shared(self) -> str:
        """The name of the shared expert, "" if there is none."""
        for name in ("shared_experts", "shared_expert"):
            if self._has(f"{name}.{self._projections[0]}.weight"):
                return name
        return ""

    @cached_property
    def _projections(self) -> tuple[str, str, str]:
        """What gate, up and down are called here."""
        parts = {part for key in self._state_dict if key.startswith(self.prefix) for part in key.split(".")}
        return next((names for names in _PROJECTIONS if parts.intersection(names)), _PROJECTIONS[0])

    def _gated_mlps(self, mlps: Sequence[str], intermediate: int, **to: Any) -> dict[str, torch.Tensor]:
        """Stacks the matrices of MLPs, one after the other into their places."""
        names = [tuple(f"{mlp}.{name}.weight" for name in self._projections) for mlp in mlps]
        self._require(key for keys in names for key in keys)
        inward, outward = (intermediate, self.hidden), (self.hidden, intermediate)
        dtype, device = to.get("dtype") or self.dtype, to.get("device")
        gate_up_proj = torch.empty(len(mlps), 2 * intermediate, self.hidden, dtype=dtype, device=device)
        down_proj = torch.empty(len(mlps), self.hidden, intermediate, dtype=dtype, device=device)
        for number, (gate, up, down) in enumerate(names):
            gate_up_proj[number, :intermediate] = self._tensor(gate, inward)
            gate_up_proj[number, intermediate:] = self._tensor(up, inward)
            down_proj[number] = self._tensor(down, outward)
        return {"gate_up_proj": gate_up_proj, "down_proj": down_proj}

    def _fused_experts(self, expert_ids: list[int], **to: Any) -> dict[str, torch.Tensor]:
        keys = ["experts.gate_up_proj", "experts.down_proj"]
        if self.has_expert_bias:
            keys += ["experts.gate_up_proj_bias", "experts.down_proj_bias"]
        self._require(keys)
        shapes: list[tuple[int, ...]] = [(2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)]
        if self._is_transposed:
            shapes = [(columns, rows) for rows, columns in shapes]
        shapes += [(2 * self.intermediate,), (self.hidden,)]
        found = [self._tensor(key, (self.num_experts, *shape))[expert_ids] for key, shape in zip(keys, shapes)]
        if self._is_transposed:
            found[:2] = [tensor.transpose(1, 2) for tensor in found[:2]]
        if self.has_expert_bias:
            found[0], found[2] = (torch.cat([each[:, ::2], each[:, 1::2]], dim=1) for each in (found[0], found[2]))
        names = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
        return {name: tensor.to(**to).contiguous() for name, tensor in zip(names, found)}

    # ---- access

    def _has(self, name: str) -> bool:
        return self.prefix + name in self._state_dict

    def _require(self, names: Any) -> None:
        missing = [self.prefix + name for name in names if not self._has(name)]
        if missing:
            raise _error(f"keys {_some(missing)}", "a state dict without them")

    def _name_of(self, *names: str) -> str:
        """The first one that is there, or the first one."""
        return next((name for name in names if self._has(name)), names[0])

    def _first(self, *names: str) -> torch.Tensor:
        return self._value(self._name_of(*names))

    def _value(self, name: str) -> torch.Tensor:
        self._require([name])
        tensor = self._state_dict[self.prefix + name]
        if tensor.dtype not in DTYPES:
            dtypes = ", ".join(str(dtype) for dtype in DTYPES)
            raise _error(f"`{self.prefix}{name}` of {dtypes} (not quantised)", describe(tensor))
        return tensor

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._value(name)
        if tuple(tensor.shape) != shape:
            raise _error(f"`{self.prefix}{name}` {shape}", describe(tensor))
        return tensor


def _block_of(key: str) -> str:
    """What stands before the part "experts" of a key."""
    parts = key.split(".")
    return "".join(f"{part}." for part in parts[: parts.index("experts")])


def _error(wanted: str, got: str) -> ConfigError:
    return ConfigError(f"state dict: argument `state_dict`: wanted {wanted}, got {got}")


def _some(items: Sequence[Any], most: int = 8) -> str:
    """The first ones, and how many there are."""
    text = ", ".join(str(item) for item in items[:most])
    return text if len(items) <= most else f"{text}, ... ({len(items)} in all)"
