"""Which batches a job leaves out, and where that puts the others. Pure arithmetic.

A batch is what one iteration consumes, numbered in the canonical order: as long as nothing is left out, iteration i consumes
batch i. `Ranges` are (first, last) in rising order, none of them within another.
"""

Ranges = tuple[tuple[int, int], ...]


def batch_of(iteration: int, skipped: Ranges) -> int:
    """The batch that an iteration consumes if those in `skipped` are left out."""
    batch = iteration
    for first, last in skipped:
        if first > batch:
            break
        batch += last - first + 1
    return batch


def leaving_out(skipped: Ranges, *, first: int, last: int) -> Ranges:
    """`skipped`, and the batches that the iterations `first` to `last` have consumed so far."""
    begin, end = batch_of(first, skipped), batch_of(last, skipped)
    others = (known for known in skipped if not begin <= known[0] <= end)
    return tuple(sorted((*others, (begin, end))))


def places(skipped: Ranges) -> tuple[int, ...]:
    """For each range the iteration that would have consumed its first batch, and now consumes the one behind it."""
    left_out, found = 0, []
    for first, last in skipped:
        found.append(first - left_out)
        left_out += last - first + 1
    return tuple(found)


def told(skipped: Ranges) -> str:
    """`41-45, 97`."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in skipped)
