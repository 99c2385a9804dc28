"""Changes of lines of the kernels, each of which makes them wrong."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A change: the file, the text (which occurs once), and what replaces it."""

    file: str
    old: str
    new: str


BLOCKS, LSTM, RHN = "triton_shared/blocks.py", "lstm/triton_kernels.py", "rhn/triton_kernels.py"
MUTATIONS = [
    Mutation(BLOCKS, "+ offset + columns, mask=valid", "+ columns, mask=valid"),
    Mutation(BLOCKS, "return gate * form.H + unit,", "return unit * form.Q + gate,"),
    Mutation(BLOCKS, "(unit < form.H) & (gate < form.Q)", "gate < form.Q"),
    Mutation(BLOCKS, "(unit < form.H) & (gate < form.Q)", "unit < form.H"),
    Mutation(BLOCKS, "first, third = tl.split(even)", "third, first = tl.split(even)"),
    Mutation(BLOCKS, "tl.join(tl.join(first, third), tl.join(second, fourth))",
             "tl.join(tl.join(first, second), tl.join(third, fourth))"),
    Mutation(BLOCKS, "p - 3.33332819422e-1", "p - 3.33e-1"),
    Mutation(BLOCKS, "mask=(rows < count)[:, None] & (depth < DEPTH)[None, :]", "mask=(depth < DEPTH)[None, :]"),
    Mutation(BLOCKS, "mask=(rows < count)[:, None] & (depth < DEPTH)[None, :]", "mask=(rows < count)[:, None]"),
    Mutation(BLOCKS, "lowered(b, form), total, input", "lowered(b, form), tl.zeros_like(total), input"),
    Mutation(BLOCKS, "depth = k + tl.arange", "depth = tl.arange"),
    Mutation(BLOCKS, "mean = tl.sum(tl.where(mask, v, 0.0), axis=0) / count", "mean = tl.sum(v, axis=0) / form.TILE"),
    Mutation(BLOCKS, "var = tl.sum(centred * centred, axis=0) / count",
             "var = tl.sum(centred * centred, axis=0) / (count - 1)"),
    Mutation(BLOCKS, "tl.store(variances + columns, var, mask", "tl.store(variances + columns, mean, mask"),
    Mutation(BLOCKS, "tl.sqrt(var + form.EPS))[None, :]", "tl.sqrt(var + 10.0 * form.EPS))[None, :]"),
    Mutation(BLOCKS, "value, mask=valid, sem", "value, sem"),
    Mutation(BLOCKS, "d - (total / count)[None, :] - v", "d - v"),
    Mutation(BLOCKS, " - v * (total_v / count)[None, :]", ""),
    Mutation(BLOCKS, "    add(dgamma, columns, valid, total_v)\n", ""),
    Mutation(BLOCKS, "    tl.debug_barrier()  # all threads of this program have stored\n", ""),
    Mutation(BLOCKS, "while (seen < target)", "while (seen < target - 1)"),
    Mutation(LSTM, "return tl.sigmoid(i), tl.sigmoid(f)", "return tl.sigmoid(f), tl.sigmoid(i)"),
    Mutation(LSTM, "f * before + i * g, before", "f * before + g, before"),
    Mutation(LSTM, "c = tl.where(running, f * before + i * g, before)", "c = f * before + i * g"),
    Mutation(LSTM, "((t + 1) % 2) * B", "(t % 2) * B"),
    Mutation(LSTM, "            tl.debug_barrier()  # the memory may be that of x", "            #"),
    Mutation(LSTM, "h = tl.where(running, h, tl.load", "h = tl.where(every, h, tl.load"),
    Mutation(LSTM, "tl.store(h_prev + B * form.H + of_units, h", "tl.store(h_prev + of_units, h"),
    Mutation(LSTM, "STATE, form.LOW) + of_units, h.to", "STATE, form.LOW) + of_units, c.to"),
    Mutation(LSTM, "left = address(table, U) + (t + 1)", "left = address(table, U) + t"),
    Mutation(LSTM, "count = tl.where(t + 1 < T, B, 0)", "count = B"),
    Mutation(LSTM, "every & (rows >= n_next)", "every & (rows > n_next)"),
    Mutation(LSTM, "dh * o * (1.0 - z * z)", "dh * o * (1.0 - z)"),
    Mutation(LSTM, "c = (c - mean) / tl.sqrt(var", "c = c / tl.sqrt(var"),
    Mutation(LSTM, "    tl.debug_barrier()  # all threads have loaded what is overwritten now", "    #"),
    Mutation(LSTM, "tl.where(running, d * f, d)", "tl.where(running, d, d)"),
    Mutation(LSTM, "d * before * f * (1.0 - f), d * i", "d * before * f * (1.0 - f), d * f"),
    Mutation(LSTM, "            target += tl.num_programs(0)\n            t += 1", "            t += 1"),
    Mutation(LSTM, "            target += tl.num_programs(0)\n            t -= 1", "            t -= 1"),
    Mutation(RHN, "t, d = t + 1, d - d", "t, d = t, d - d"),
    Mutation(RHN, "    return tl.where(mask, v, 0.0)", "    return v + 1.0 - 1.0 * mask"),
    Mutation(RHN, "((place + 1) % 2) * B", "(place % 2) * B"),
    Mutation(RHN, "h * transform + now * carry, now", "h * transform + now, now"),
    Mutation(RHN, "tl.store(ds, tl.where(running, grad * carry, grad)", "tl.store(ds, tl.where(running, grad, grad)"),
    Mutation(RHN, "of_gates, da, mask=all_gates)", "of_gates, da, mask=gates_mask)"),
    Mutation(RHN, "    tl.debug_barrier()  # all threads have loaded what is overwritten now", "    #"),
    Mutation(RHN, "slope * h, of_carry, tl.zeros", "slope * now, of_carry, tl.zeros"),
    Mutation(RHN, "add(address(table, DBIAS) + d * form.G, columns", "add(address(table, DBIAS), columns"),
]  # fmt: skip
