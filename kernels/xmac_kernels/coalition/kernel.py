"""The Triton kernel of coalition_residual: mask, gate, top-k, gather and quadratic form in one pass.

One program evaluates one coalition on BLOCK_T tokens. Programs of neighbouring coalitions read the same Gram matrices,
so axis 0 of the grid runs over coalitions. All arithmetic is float32, the sum over tokens float64. Padded sizes NP >= n
and KP >= k are powers of two. No tl.dot: the form needs (2k)^2 gathered entries, far fewer than n^2.
"""

import triton
import triton.language as tl


@triton.jit
def coalition_residual_kernel(  # type: ignore[no-untyped-def]
    order_ptr,  # int16 [T, n], best choice first
    weight_ptr,  # float32 [T, n], in that order
    gram_ptr,  # float32 [T, n, n]
    full_ptr,  # float32 [T, k]
    mask_ptr,  # int8 [B, n]
    out_ptr,  # float64 [blocks, B]
    tokens,
    n,
    coalitions,
    scale,
    epsilon,
    k: tl.constexpr,
    MODE: tl.constexpr,  # 0 topk, 1 survivors, 2 none
    NP: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    coalition = tl.program_id(0)
    block = tl.program_id(1)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, NP)
    s = tl.arange(0, KP)
    inside = (t < tokens)[:, None] & (j < n)[None, :]
    row = t.to(tl.int64)[:, None] * n + j[None, :]
    order = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int32)
    weight = tl.load(weight_ptr + row, mask=inside, other=0.0).to(tl.float32)
    present = tl.load(mask_ptr + coalition * n + order, mask=inside, other=0).to(tl.int32)

    # Position s of the coalition's own top-k is the s-th present entry of the order.
    rank = tl.cumsum(present, axis=1)
    slot = (rank[:, :, None] == (s + 1)[None, None, :]) & (present[:, :, None] > 0) & (s < k)[None, None, :]
    chosen = tl.sum(tl.where(slot, order[:, :, None], 0), axis=1)
    position = tl.sum(tl.where(slot, j[None, :, None], 0), axis=1)
    filled = tl.sum(slot.to(tl.int32), axis=1) > 0
    gate = tl.sum(tl.where(slot, weight[:, :, None], 0.0), axis=1)
    if MODE == 2:
        gate = gate * scale
    else:
        if MODE == 0:
            total = tl.sum(gate, axis=1) + epsilon
        else:
            total = tl.sum(weight * present.to(tl.float32), axis=1) + epsilon
        # an empty coalition has total 0 and gate 0
        gate = gate * (scale / tl.where(total > 0, total, 1.0))[:, None]

    # c = g_S - g_N on the full model's top-k (the first k of the order), and g_S on experts that newly entered.
    in_top = (t < tokens)[:, None] & (s < k)[None, :]
    top = tl.load(order_ptr + t.to(tl.int64)[:, None] * n + s[None, :], mask=in_top, other=0).to(tl.int32)
    full = tl.load(full_ptr + t.to(tl.int64)[:, None] * k + s[None, :], mask=in_top, other=0.0).to(tl.float32)
    stays = filled & (position < k)
    moved = (position[:, :, None] == s[None, None, :]) & stays[:, :, None]
    c_top = tl.sum(tl.where(moved, gate[:, :, None], 0.0), axis=1) - full
    c_new = tl.where(filled & (position >= k), gate, 0.0)

    base = gram_ptr + t.to(tl.int64)[:, None, None] * n * n
    live = (t < tokens)[:, None, None] & (s < k)[None, :, None] & (s < k)[None, None, :]
    g = tl.load(base + top[:, :, None] * n + top[:, None, :], mask=live, other=0.0).to(tl.float32)
    value = tl.sum(tl.sum(g * c_top[:, :, None] * c_top[:, None, :], axis=2), axis=1)
    entered = live & (c_new != 0.0)[:, :, None]
    g = tl.load(base + chosen[:, :, None] * n + top[:, None, :], mask=entered, other=0.0).to(tl.float32)
    value += 2.0 * tl.sum(tl.sum(g * c_new[:, :, None] * c_top[:, None, :], axis=2), axis=1)
    entered = entered & (c_new != 0.0)[:, None, :]
    g = tl.load(base + chosen[:, :, None] * n + chosen[:, None, :], mask=entered, other=0.0).to(tl.float32)
    value += tl.sum(tl.sum(g * c_new[:, :, None] * c_new[:, None, :], axis=2), axis=1)
    if MODE != 1:
        # The coalition leaves this token's choice alone: exactly nothing is lost.
        value = tl.where(tl.sum(stays.to(tl.int32), axis=1) == k, 0.0, value)

    lost = tl.sum(value.to(tl.float64), axis=0)
    tl.store(out_ptr + block.to(tl.int64) * coalitions + coalition, lost)
