"""Why some damage to the kernels is not noticed, with Triton 3.7.1."""

BARRIERS = (
    "in every compiled form that was tried, another barrier lies between the loads and the stores, or each thread "
    "stores only where it has loaded"
)
# By kernel and number of the instruction.
ORDER = {
    ("backward_steps, sm_90", "1"): "it stands between copies into two different buffers, and no other access to the "
    "second one lies between the barriers before and after it",
    ("backward_steps, sm_90", "6"): "it waits until at most one group of products is open, and only one has begun",
    ("backward_steps, sm_90", "7"): "it stands before a copy into a third buffer, and no other access to it lies "
    "between the barriers before and after it",
    ("backward_steps, sm_90", "11"): "only products have used the sums since the fence before the first product",
    ("backward_steps, sm_90", "28"): "values are brought back to the layout that they had: each thread overwrites only "
    "words that it has read itself",
    (
        "backward_steps, sm_90",
        "61",
    ): "other programs read only the gradients of the recurrent product, which were stored before an earlier barrier",
}
# By file and old text.
SOURCE = {
    ("triton_shared/blocks.py", "    tl.debug_barrier()  # all threads of this program have stored\n"): "Triton itself "
    "puts a barrier before the atomic operation that follows, so the compiled code stays the same",
    ("lstm/triton_kernels.py", "            tl.debug_barrier()  # the memory may be that of x"): BARRIERS,
    ("lstm/triton_kernels.py", "    tl.debug_barrier()  # all threads have loaded what is overwritten now"): BARRIERS,
    ("rhn/triton_kernels.py", "    tl.debug_barrier()  # all threads have loaded what is overwritten now"): BARRIERS,
    ("rhn/triton_kernels.py", "    return tl.where(mask, v, 0.0)"): "rows of finished sequences are masked again where "
    "their product is used, and their gradients are 0",
}


def reason(row: dict[str, str]) -> str:
    """Why the damage of a row was not noticed; "" if it was, or if that is not known."""
    if row["noticed"]:
        return ""
    number = row["what"].partition(":")[0]
    return SOURCE.get((row["where"], row["what"])) or ORDER.get((row["where"], number), "")
