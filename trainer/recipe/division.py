"""Which numbers of ranks and attention heads allow ranks to share sequences. Nothing here imports torch."""

SEQUENCES = "training.sequence_parallel_size"


def ranks_refusal(ranks: int, size: int) -> str:
    """Return the reason why ``ranks`` ranks cannot form groups of ``size``; empty if they can."""
    if ranks % size == 0:
        return ""
    near = max(size, ranks // size * size)
    return f"is {size}, but {ranks} rank{'s are' * (ranks != 1) or ' is'} not a multiple of it; use run.ranks={near}"


def heads_refusal(heads: int, key_value_heads: int, size: int) -> str:
    """Return the reason why attention heads cannot be divided among ``size`` ranks; empty if they can.

    Query heads are divided. Key and value heads are divided too, or repeated if there are fewer than ranks.
    """

    def refuse(count: int, name: str) -> str:
        fits = [one for one in range(2, heads + 1) if _divides(heads, key_value_heads, one)]
        fix = f"use {', '.join(map(str, fits[:6]))} or 1" if fits else "use 1"
        return f"is {size}, which cannot divide the model's {count} {name} heads; {fix}"

    if heads % size:
        return refuse(heads, "attention")
    return "" if _divides(heads, key_value_heads, size) else refuse(key_value_heads, "key/value")


def _divides(heads: int, key_value_heads: int, size: int) -> bool:
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)
