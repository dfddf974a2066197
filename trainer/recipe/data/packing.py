"""Packs documents into sequences of fixed length without cutting any: best-fit decreasing over the whole data set."""

from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute documents over bins, longest first, each into the fullest bin with room for it.

    Best-fit decreasing uses at most 11/9 of the fewest bins possible, plus 4 (Johnson, 1973).

    Returns:
        The numbers of the documents in each bin.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set while a bin has r tokens of room: the lowest set bit at or above a length is its best fit.
    rooms = 0
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        if length > capacity:
            raise ValueError(f"document {document} has {length} tokens, more than a bin's {capacity}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(document)
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return bins
