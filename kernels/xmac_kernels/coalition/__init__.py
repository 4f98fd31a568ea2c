"""coalition_residual: how much of a mixture-of-experts layer's output is lost when only some experts are left.

For every coalition S of experts and token t the router chooses the k best of S, gates them, and
    residual(S) = sum_t || sum_i g_S[t,i] f_i(t) - sum_i g_N[t,i] f_i(t) ||^2 = sum_t c' G_t c,   c = g_S - g_N,
where G_t[i,j] = <f_i(t), f_j(t)> is the Gram matrix of the token's expert outputs. c has at most 2k entries other than
zero, and none at all when S leaves the token alone, so that nothing is lost to cancellation.
Shapes: T tokens, n experts, B coalitions.
"""

from xmac_kernels.coalition.op import CoalitionTable, coalition_residual

__all__ = ["CoalitionTable", "coalition_residual"]
