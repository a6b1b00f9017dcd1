"""Weights and KV on a CUDA device: streams and their order, copies through page-locked memory, a `KvStore` in the device's memory."""
