import torch

from bnrnn.data.digits import Digits


def test_splits_are_the_whole_set_once_and_sequences_are_the_images():
    from sklearn.datasets import load_digits

    data, (images, labels) = Digits(), load_digits(return_X_y=True)
    assert {s: len(y) for s, (_, y) in data.splits.items()} == {"train": 1200, "valid": 297, "test": 300}
    batch = next(data.batches("test", 300))
    assert batch.inputs.shape == (64, 300, 1)
    assert torch.allclose(batch.inputs[:, :, 0].T * 16, torch.from_numpy(images[1497:]).float())
    assert batch.targets.tolist() == [labels[1497:].tolist()]  # only the last step has a target


def test_a_shuffled_pass_shows_everything_once_and_can_begin_in_its_middle():
    data = Digits()

    def passed(**kwargs) -> list[torch.Tensor]:
        return [b.inputs for b in data.batches("train", 250, torch.Generator().manual_seed(3), **kwargs)]

    batches = passed()
    assert [b.shape[1] for b in batches] == [250, 250, 250, 250, 200]
    assert data.num_batches("train", 250) == 5
    everything = torch.cat(batches, dim=1)[:, :, 0].T
    ordered = torch.cat([b.inputs for b in data.batches("train", 250)], dim=1)[:, :, 0].T
    assert not torch.equal(everything, ordered)
    assert sorted(map(tuple, everything.tolist())) == sorted(map(tuple, ordered.tolist()))
    assert all(torch.equal(a, b) for a, b in zip(passed(start=3), batches[3:], strict=True))
