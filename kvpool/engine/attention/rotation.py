"""Moving a key that is cached with its rotation: R(a) R(b) = R(a + b), so a key moves by rotating it once more."""

import torch
from torch import Tensor


def moved(keys: Tensor, by: int, frequencies: Tensor) -> Tensor:
    """`keys` ``[..., dim]`` as they would be `by` positions later.

    `frequencies` ``[rotated / 2]`` are the model's, in radians per position; of the first `rotated` channels the first half is
    paired with the second, as in Llama; the others don't turn.
    """
    half = len(frequencies)
    angle = frequencies.double() * by
    cos, sin = angle.cos().to(keys.device), angle.sin().to(keys.device)
    a, b, rest = keys[..., :half].double(), keys[..., half : 2 * half].double(), keys[..., 2 * half :]
    return torch.cat(((a * cos - b * sin).to(keys.dtype), (b * cos + a * sin).to(keys.dtype), rest), dim=-1)
