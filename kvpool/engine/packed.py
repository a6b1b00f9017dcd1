"""Linear layers with their weights laid out once as the CPU's kernels want them, instead of anew in each pass.

Theory. A pass of few tokens reads every weight for little arithmetic; half of its time the general kernel spends on rearranging the
weights. oneDNN does that ahead: a pass of 16 tokens of SmolLM2 then takes about two thirds of the time, and so does a prefill. The price
is memory of the process's own, where unpacked weights are mapped from the file and shared. The sums are the same up to rounding.
"""

import logging
from typing import Any

import torch
from torch import nn

from kvpool.engine.hugepages import Span, enlarge
from kvpool.units import MIB

log = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """What `linear` computes, on the CPU, without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    @property
    def span(self) -> Span:
        """Where the packed weights lie."""
        start: int = torch.ops.mkldnn.data_ptr(self._packed)
        return Span(start, start + torch.ops.mkldnn._nbytes(self._packed))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return found


_ROWS = 16
"""For passes of about so many tokens the layout is chosen; it serves any number."""


def padded(rows: int) -> int:
    """How many rows a pass of `rows` should have: at least 4, which take no longer than one, and few different numbers of them.

    oneDNN makes and keeps code for each number of rows that it meets: some hundred KiB a layer.
    """
    for end, step in ((32, 4), (128, 16), (512, 32)):
        if rows <= end:
            return -(-rows // step) * step
    return -(-rows // 64) * 64


def packable(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch have kernels for packed weights of `dtype`."""
    ops: Any = torch.ops.mkldnn
    half = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return bool(torch._C._has_mkldnn and (dtype is torch.float32 or getattr(ops, half[dtype])()))


def pack(network: Any) -> int:
    """Replace the linear layers of `network`; how many. 0 where they are not `packable`."""
    if not packable(network.dtype):
        return 0
    found = [(parent, name, child) for parent in network.modules() for name, child in parent.named_children() if type(child) is nn.Linear]
    packed: dict[int, PackedLinear] = {}
    for parent, name, child in found:
        if id(child) not in packed:
            packed[id(child)] = PackedLinear(child)
        setattr(parent, name, packed[id(child)])
    log.info("%d MiB of packed weights lie in large pages", enlarge(layer.span for layer in packed.values()) // MIB)
    return len(found)
