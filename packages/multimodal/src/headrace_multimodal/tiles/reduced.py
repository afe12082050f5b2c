"""Pictures in numbers, made smaller by a whole factor without a filter in front, as torch's bicubic does.

Keys 1981, "Cubic convolution interpolation for digital image processing", with a = -0.75.
"""

from __future__ import annotations

import numpy as np

from headrace_multimodal.images.steps import Float

_A = -0.75


def reduced(x: Float, rows: int, columns: int) -> Float:
    """[C, H, W] float32 -> [C, H / rows, W / columns].

    Args:
        rows, columns: how many pixels become one; they divide H and W.
    """
    return _along(_along(x, rows).swapaxes(1, 2), columns).swapaxes(1, 2)


def _along(x: Float, factor: int) -> Float:
    """[C, N, ...] -> [C, N / factor, ...]: the middle of every ``factor`` numbers."""
    if factor % 2:
        return x[:, factor // 2 :: factor]
    first = np.arange(factor // 2 - 1, x.shape[1], factor)
    near, far = _weight(0.5), _weight(1.5)
    found = np.zeros_like(x[:, first])
    for step, weight in ((-1, far), (0, near), (1, near), (2, far)):
        found += np.float32(weight) * x[:, np.clip(first + step, 0, x.shape[1] - 1)]
    return found


def _weight(distance: float) -> float:
    """The kernel at a distance from 0 to 2."""
    d = distance
    if d <= 1:
        return (_A + 2) * d**3 - (_A + 3) * d**2 + 1
    return _A * (d**3 - 5 * d**2 + 8 * d - 4)
