"""What the probe reads off a loader with workers."""

import torch
from ftmon.trainer.probe.link.publisher import loader_info


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.ones(4)] * 8)


def test_the_settings_of_a_loader_with_workers_are_read_off_its_iterator():
    data = torch.utils.data.TensorDataset(torch.ones(4))
    loader = torch.utils.data.DataLoader(data, num_workers=2, prefetch_factor=3, persistent_workers=True)
    iterator = iter(loader)
    found = loader_info(iterator)
    assert found is not None
    assert (found.workers, found.prefetch_factor, found.persistent_workers) == (2, 3, True)
    assert found.cpus >= 1
    assert not found.iterable
    streamed = loader_info(iter(torch.utils.data.DataLoader(Stream(), num_workers=2)))
    assert streamed is not None
    assert streamed.iterable
    del iterator
