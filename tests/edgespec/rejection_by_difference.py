"""A wrong version: multi-round rejection that keeps the remaining draft mass as one minus what was drawn."""

from __future__ import annotations

from torch import Tensor


def try_children(p: Tensor, q: Tensor | None, tokens: list[int], uniforms: list[float]) -> tuple[int | None, Tensor]:
    """As `edgespec.verify.rejection._try_children`, in the format of p: exact in real numbers, not in float32."""
    scale, total, mass_left = 0.0, 1.0, 1.0
    residual = p
    for index, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        assert q is not None
        q_here = float(q[token])
        mass_left = max(mass_left, q_here)
        if uniform * q_here * total < float(residual[token]) * mass_left:
            return index, residual
        next_scale = scale + total / mass_left
        next_residual = (p - next_scale * q).clamp(min=0)
        if next_residual.sum() <= 0:
            return index, residual
        scale, total, residual = next_scale, float(next_residual.sum()), next_residual
        mass_left -= q_here
    return None, residual
