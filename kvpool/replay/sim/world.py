"""The cluster that is simulated: its hardware, its model, and how long things take there.

Every number is the same for all policies and published, but for those marked *assumed*. The split and the chunks were settled after first
results had been seen (docs/routing.md says what they change):

* 16 nodes of eight A800, one half for prefill and one for decode: the cluster of Mooncake's scheduling experiment (FAST'25, figure 5: 16
  nodes) at the split that serves most there (5.5: about 1:1).
* Llama-3-70B: 80 layers, width 8192, 8 KV heads of 128 in 2 bytes (320 KB a token). Prefill of n tokens behind p others costs
  l (a (n^2 - p^2) d + b (n - p) d^2) operations, a = 4, b = 22 (there, equation 1 and table 1).
* 8 x 312 TFLOP/s (table 1) of which half is reached (*assumed*; figure 5's random and load-balanced times come out within 15 % so).
* 800 Gbit/s a node for its network, 128 GB/s from host to GPU (table 1).
* Host memory for 3 million tokens a node, 1 TB (5.3.1): 5,860 blocks of 512.
* Decode steps: weights and KV read once at 60 % (*assumed*) of 8 x 2.039 TB/s (A800 data sheet), and 20 ms (*assumed*) for what doesn't
  depend on either, which makes the 40 ms between tokens of figure 15. KV may fill 90 % (*assumed*) of 8 x 80 GB besides the weights.
* Where an engine computes in chunks, each has the work of 1,024 tokens without a context: that fills the GPUs ("typically larger than
  1000 tokens", 3.2), and deeper chunks have fewer tokens (as in Medha, arXiv 2409.17264).
* A first token counts within 30 s, the mean time between tokens within 100 ms (5.1).
"""

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Hardware and model. Rates are bytes a second, times seconds."""

    prefill_nodes: int = 8
    decode_nodes: int = 8
    block_tokens: int = 512
    node_blocks: int = 5860
    chunk_tokens: int = 1024
    layers: int = 80
    width: int = 8192
    flops_per_s: float = 8 * 312e12 * 0.5
    token_bytes: int = 2 * 80 * 8 * 128 * 2
    network: float = 100e9
    host_to_device: float = 128e9
    weight_bytes: float = 140e9
    device_read: float = 8 * 2.039e12 * 0.6
    step_overhead_s: float = 0.02
    device_bytes: float = 8 * 80e9 * 0.9
    adapter_s: float = 0.5
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1

    @property
    def nodes(self) -> int:
        """All of them; the first `prefill_nodes` prefill, the others decode."""
        return self.prefill_nodes + self.decode_nodes

    @property
    def linear_s(self) -> float:
        """Seconds a token costs by itself."""
        return self.layers * 22.0 * self.width**2 / self.flops_per_s

    @property
    def square_s(self) -> float:
        """Seconds a pair of tokens costs."""
        return self.layers * 4.0 * self.width / self.flops_per_s

    @property
    def decode_tokens(self) -> int:
        """KV that a decode node has room for."""
        return int((self.device_bytes - self.weight_bytes) / self.token_bytes)

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Seconds to compute tokens [context, context + tokens) of a prompt."""
        return self.linear_s * tokens + self.square_s * tokens * (2.0 * context + tokens)

    def chunk(self, context: int) -> int:
        """Tokens behind `context` others that have the work of a chunk."""
        linear = self.linear_s + 2.0 * self.square_s * context
        work = self.prefill_s(self.chunk_tokens)
        return max(1, int((sqrt(linear * linear + 4.0 * self.square_s * work) - linear) / (2.0 * self.square_s)))

    def step_s(self, kv_tokens: float) -> float:
        """Seconds between two tokens of a decode node with so much KV in use."""
        return self.step_overhead_s + (self.weight_bytes + kv_tokens * self.token_bytes) / self.device_read
