"""What is known of a batch when accelerate's loader returns it, after it has fetched the next one."""

from typing import Any

import pytest
import torch
from ftmon.trainer.probe.guard import replace
from ftmon.trainer.probe.hooks import frameworks

data_loader = pytest.importorskip("accelerate.data_loader")


class Loading:
    """Receives the reports of the hook; the loader's collate function fetches into its queue."""

    def __init__(self) -> None:
        self.fetched: Any = None
        self.pairs: list[tuple[int, int]] = []
        self.ends = 0

    def prefetching(self, prefetched: Any) -> None:
        self.fetched = prefetched

    def delivered(self, batch: Any) -> None:
        self.pairs.append((int(batch[0]), self.fetched.popleft()))

    def prefetched_all(self) -> None:
        self.ends += 1


@pytest.mark.parametrize(("count", "skipped"), [(5, 0), (1, 0), (5, 2), (0, 0)])
def test_each_batch_is_returned_with_what_was_counted_of_it(monkeypatch: Any, count: int, skipped: int) -> None:
    class Loader(data_loader.DataLoaderShard):
        pass

    replace(Loader, "__iter__", frameworks._iterating)
    loading = Loading()
    monkeypatch.setattr(frameworks, "mine", lambda: loading)

    def collate(rows: list[int]) -> torch.Tensor:
        loading.fetched.append(rows[0])
        return torch.tensor(rows)

    loader = Loader(list(range(count)), batch_size=1, collate_fn=collate, skip_batches=skipped)
    assert [int(batch[0]) for batch in loader] == list(range(skipped, count))
    assert loading.pairs == [(number, number) for number in range(skipped, count)]
    assert loading.ends == 1
