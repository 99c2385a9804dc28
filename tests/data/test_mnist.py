import gzip
import hashlib
import re
import struct

import numpy as np
import pytest
import torch

from bnrnn.commands import prepare
from bnrnn.data import mnist
from bnrnn.data.base import sha256
from bnrnn.data.mnist import SequentialMNIST, pixel_index, prepare_mnist
from bnrnn.errors import BnrnnError
from tests.helpers import served

NAMES = list(mnist.CHECKSUMS)


def idx(array: np.ndarray) -> bytes:
    """An array in the idx format of MNIST's files: magic number with type and number of axes, sizes, bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def small(tmp_path, monkeypatch) -> dict[str, np.ndarray]:
    """A small MNIST of random images in tmp_path/mnist, with the checksums patched to accept it."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, num in (("train", 30), ("t10k", 8)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, num, dtype=np.uint8)
    (tmp_path / "mnist").mkdir()
    for name, array in arrays.items():
        archive = gzip.compress(idx(array))
        (tmp_path / "mnist" / f"{name}.gz").write_bytes(archive)
        monkeypatch.setitem(mnist.ARCHIVES, name, hashlib.md5(archive).hexdigest())
        monkeypatch.setitem(mnist.CHECKSUMS, name, sha256(idx(array)))
    monkeypatch.setattr(mnist, "NUM_VALID", 10)
    return arrays


def test_authors_order_is_the_list_of_the_released_code():
    order = pixel_index("authors")
    assert order[:6].tolist() == [37, 235, 72, 767, 715, 645]
    assert order[-5:].tolist() == [246, 417, 166, 555, 103]
    assert len(order) == 784
    assert len(order.unique()) == 501


def test_permutation_shows_every_pixel_once_and_is_always_the_same():
    order = pixel_index("permutation")
    assert sorted(order.tolist()) == list(range(784))
    assert order.tolist() != list(range(784))
    np.random.seed(7)
    torch.manual_seed(7)
    assert torch.equal(order, pixel_index("permutation"))


def test_splits_and_scaling_are_the_papers(small, tmp_path):
    data = SequentialMNIST(str(tmp_path))
    assert {s: len(y) for s, (_, y) in data.splits.items()} == {"train": 20, "valid": 10, "test": 8}
    images = small["train-images-idx3-ubyte"].reshape(30, 784)
    valid = next(data.batches("valid", 10))
    assert np.allclose(valid.inputs[:, :, 0].T.numpy() * 255, images[20:], atol=1e-4)
    assert valid.targets[-1].tolist() == small["train-labels-idx1-ubyte"][20:].tolist()
    train = next(data.batches("train", 20))
    assert np.allclose(train.inputs[:, :, 0].T.numpy() * 255, images[:20], atol=1e-4)
    assert train.targets[-1].tolist() == small["train-labels-idx1-ubyte"][:20].tolist()
    assert data.t_max == 784


@pytest.mark.parametrize("order", ["permutation", "authors"])
def test_pixels_are_read_in_the_order_asked_for_in_every_split(small, tmp_path, order):
    data, index = SequentialMNIST(str(tmp_path), order), pixel_index(order).numpy()
    images = small["t10k-images-idx3-ubyte"].reshape(8, 784)[:, index]
    assert np.allclose(next(data.batches("test", 8)).inputs[:, :, 0].T.numpy() * 255, images, atol=1e-4)


def test_uncompressed_files_are_read_too(small, tmp_path):
    for name, array in small.items():
        (tmp_path / "mnist" / f"{name}.gz").unlink()
        (tmp_path / "mnist" / name).write_bytes(idx(array))
    assert len(SequentialMNIST(str(tmp_path)).splits["train"][1]) == 20


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_verified(small, tmp_path, name):
    (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(BnrnnError, match=rf"{name}.gz is not the published {name}"):
        SequentialMNIST(str(tmp_path))


def test_an_unknown_order_is_refused(small, tmp_path):
    with pytest.raises(BnrnnError, match=r"data.pixel_order is 'random': use 'scanline'"):
        SequentialMNIST(str(tmp_path), "random")


def test_missing_and_damaged_files_are_downloaded_and_no_others(small, tmp_path, monkeypatch):
    folder = (tmp_path / "mnist").rename(tmp_path / "mirror")
    archives = {path.name: path.read_bytes() for path in folder.iterdir()}
    data_dir = tmp_path / "fresh"

    def stored() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (data_dir / "mnist").iterdir()}

    with served(folder) as address:
        monkeypatch.setattr(mnist, "URL", address)
        prepare_mnist(data_dir)
        assert stored() == archives
        (data_dir / "mnist" / f"{NAMES[0]}.gz").write_bytes(b"damaged")
        (data_dir / "mnist" / NAMES[1]).write_bytes(b"damaged, and read before the good one with .gz")
        for name in NAMES[2:]:
            (folder / f"{name}.gz").unlink()
        prepare_mnist(data_dir)
        assert stored() == archives
    other = gzip.compress(idx(small[NAMES[0]]), compresslevel=1)  # the same images, compressed in another way
    assert other != archives[f"{NAMES[0]}.gz"]
    (data_dir / "mnist" / f"{NAMES[0]}.gz").write_bytes(other)
    prepare_mnist(data_dir)  # complete, so nothing is downloaded
    assert len(SequentialMNIST(str(data_dir)).splits["train"][1]) == 20


def test_what_is_missing_is_named_with_a_command_that_the_script_takes(tmp_path, capsys, monkeypatch):
    with pytest.raises(BnrnnError, match=rf"`bnrnn-prepare mnist --data-dir {tmp_path}`") as error:
        mnist.load_mnist(tmp_path)
    command = re.search(r"`bnrnn-prepare ([^`]*)`", str(error.value))[1]
    prepared = []
    monkeypatch.setitem(prepare.PREPARE, "mnist", prepared.append)
    monkeypatch.setattr("sys.argv", ["prepare", *command.split()])
    prepare.main()
    assert prepared == [tmp_path]
