"""Small host pools as SGLang's are, on plain CPU tensors: layouts, buffers by address, whole pages by copy.

The arithmetic of addresses is that of SGLang 0.5.23's `MHATokenToKVPoolHost`, `MLATokenToKVPoolHost` and `MambaPoolHost`; the tests of
`tests/engines` compare with these classes.
"""

from typing import Any

import torch

LAYERS, HEADS, DIM, PAGE = 3, 4, 8, 4


class MhaPool:
    """K and V of `pages` pages, bf16, in one of the layouts `layer_first`, `page_first`, `page_first_direct` and `page_head`."""

    def __init__(self, layout: str, pages: int, heads: int = HEADS) -> None:
        self.layout = layout
        self.page_size, self.layer_num, self.head_num, self.head_dim = PAGE, LAYERS, heads, DIM
        self.start_layer, self.end_layer = 0, LAYERS
        self.dtype = torch.bfloat16
        self.size = pages * PAGE
        self.size_per_token = 2 * LAYERS * heads * DIM * 2
        dims = {
            "layer_first": (2, LAYERS, self.size, heads, DIM),
            "page_first": (2, self.size, LAYERS, heads, DIM),
            "page_first_direct": (2, pages, LAYERS, PAGE, heads, DIM),
            "page_head": (2, pages, heads, PAGE, LAYERS, DIM),
        }
        self.kv_buffer = torch.zeros(dims[layout], dtype=self.dtype)

    def page(self, number: int) -> torch.Tensor:
        """One page, a view."""
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, number * PAGE : (number + 1) * PAGE]
        if self.layout == "page_first":
            return self.kv_buffer[:, number * PAGE : (number + 1) * PAGE]
        return self.kv_buffer[:, number : number + 1]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes, page by page."""
        layers = self.layer_num if self.layout == "layer_first" else 1
        views = [
            self.page(index // PAGE)[part, layer : layer + 1] if layers > 1 else self.page(index // PAGE)[part]
            for index in indices.tolist()[::PAGE]
            for layer in range(layers)
            for part in range(2)
        ]
        return [view.data_ptr() for view in views], [view.numel() * 2 for view in views]

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split_factor: int) -> tuple[list[int], list[int]]:
        """The same by groups of heads."""
        assert self.layout == "page_head"
        step = self.head_num // split_factor
        views = [
            self.page(index // PAGE)[part, 0, head : head + step]
            for index in indices.tolist()[::PAGE]
            for head in range(0, self.head_num, step)
            for part in range(2)
        ]
        return [view.data_ptr() for view in views], [view.numel() * 2 for view in views]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A copy."""
        return self.page(int(index) // PAGE).flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Room for a page."""
        return torch.zeros(self.page(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """A copy back."""
        page = self.page(int(index) // PAGE)
        page.copy_(data_page.reshape(page.shape))


class MlaPool(MhaPool):
    """Latents: one buffer instead of K and V, no heads that ranks could share."""

    kv_lora_rank = DIM

    def page(self, number: int) -> torch.Tensor:
        """One page, a view: its first half is all there is."""
        return super().page(number)[:1]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes, page by page."""
        views = [self.page(index // PAGE) for index in indices.tolist()[::PAGE]]
        if self.layout == "layer_first":
            views = [view[:, layer] for view in views for layer in range(self.layer_num)]
        return [view.data_ptr() for view in views], [view.numel() * 2 for view in views]


class StatePool:
    """Mamba states: a page is one token, of two buffers of different types; whole pages only when they lie by layers."""

    page_size = 1

    def __init__(self, layout: str, pages: int) -> None:
        self.layout = layout
        self.temporal_buffer = torch.zeros((pages, LAYERS, 16), dtype=torch.float32)
        self.conv_buffer = [torch.zeros((pages, LAYERS, 6), dtype=torch.bfloat16)]

    def page(self, number: int) -> torch.Tensor:
        """A copy of one page's bytes."""
        buffers = (self.temporal_buffer, *self.conv_buffer)
        return torch.cat([buffer[number].reshape(-1).view(torch.uint8) for buffer in buffers])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes, page by page."""
        if self.layout == "layer_first":
            raise ValueError(f"Mamba storage zero-copy requires page_first layout, got {self.layout}")
        views: list[Any] = [buffer[i] for i in indices.tolist() for buffer in (self.temporal_buffer, *self.conv_buffer)]
        return [view.data_ptr() for view in views], [view.numel() * view.element_size() for view in views]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A copy."""
        return self.page(int(index))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Room for a page."""
        return torch.zeros_like(self.page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """A copy back."""
        at = 0
        for buffer in (self.temporal_buffer, *self.conv_buffer):
            row = buffer[int(index)]
            nbytes = row.numel() * row.element_size()
            row.copy_(data_page[at : at + nbytes].view(buffer.dtype).reshape(row.shape))
            at += nbytes
