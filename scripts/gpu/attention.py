"""Attention in two parts is that of one kernel, within the rounding of its format."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from edgespec.model.attention import attend_part, joined
from edgespec.model.pass_rows import additive
from scripts.gpu.card import DEVICE, half_dtype
from scripts.gpu.finding import Finding, judged

ROWS = 768


def check(*, is_full: bool) -> Finding:
    """Compare attention to many keys, in the 16-bit format of this card and in float32."""
    table, ok = [], True
    for dtype in (half_dtype(), torch.float32):
        for context in (4096, 32768):
            query, keys, values = (
                torch.randn(1, 8, rows, 128, dtype=dtype, device=DEVICE)
                for rows in (ROWS, context + ROWS, context + ROWS)
            )
            own = additive(torch.ones(ROWS, ROWS, dtype=torch.bool, device=DEVICE).tril(), dtype)
            mask = torch.cat([own.new_zeros(ROWS, context), own], 1)
            scale = 128**-0.5
            one = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
            parts = [
                attend_part(query, keys[:, :, part], values[:, :, part], masked, scale)
                for part, masked in ((slice(0, context), None), (slice(context, None), own))
            ]
            difference = (joined(*parts).float() - one.float()).abs().max().item()
            ok &= difference <= 4 * torch.finfo(dtype).eps
            table.append({"dtype": str(dtype), "keys": context, "difference": difference})
    return judged(ok, table, "the parts differ from the whole")
