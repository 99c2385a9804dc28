"""MNIST pixel by pixel, in order or permuted (Le et al. 2015), as in Cooijmans et al. 2016, section 5.1."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bnrnn.data.base import PixelSequences
from bnrnn.data.download import fetch, is_good, read_published
from bnrnn.errors import BnrnnError

URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
# SHA-256 of the uncompressed files: compressed copies from other sources differ in the time stamp of their header.
CHECKSUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
ARCHIVES = {  # MD5 of the compressed files behind URL
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
NUM_VALID = 10_000
NUM_PIXELS = 784


def pixel_index(order: str) -> Int[Tensor, " T"] | None:
    """Index of the pixel to read at each of the 784 steps; the same for every seed, model and run.

    Args:
        order: "scanline" returns None, which reads all pixels in order. "permutation" is a permutation of the pixels,
            as the paper describes. "authors" is the order in the released code, which gave the paper's pMNIST numbers:
            it is sampled with replacement, so it has 501 distinct pixels and lacks the other 283 (D1).

    Raises BnrnnError for another order.
    """
    if order == "scanline":
        return None
    if order == "authors":
        return torch.from_numpy(np.random.RandomState(1).randint(0, NUM_PIXELS, size=NUM_PIXELS))
    if order == "permutation":
        return torch.from_numpy(np.random.RandomState(1).permutation(NUM_PIXELS))
    raise BnrnnError(f"data.pixel_order is {order!r}: use 'scanline', 'permutation' or 'authors'")


class SequentialMNIST(PixelSequences):
    """50,000 / 10,000 / 10,000 digits for train / valid / test; T = 784. `valid` has the end of the training file.

    Reads `<data_dir>/mnist/`. Raises BnrnnError if a file is missing or is not the published one.
    """

    def __init__(self, data_dir: str, pixel_order: str = "scanline", state_noise: float = 0.0) -> None:
        order = pixel_index(pixel_order)
        (x, y), test = load_mnist(Path(data_dir))
        splits = {"train": (x[:-NUM_VALID], y[:-NUM_VALID]), "valid": (x[-NUM_VALID:], y[-NUM_VALID:]), "test": test}
        super().__init__(splits, max_value=255.0, order=order, state_noise=state_noise)


def load_mnist(data_dir: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (N, 784) as bytes and labels (N,) of the training file and of the test file, with verified checksums."""
    arrays = [idx_array(read_published(data_dir / "mnist", name, known, ".gz")) for name, known in CHECKSUMS.items()]
    train_images, train_labels, test_images, test_labels = arrays
    return (train_images.flatten(1), train_labels.long()), (test_images.flatten(1), test_labels.long())


def idx_array(content: bytes) -> UInt8[Tensor, "..."]:
    """The bytes of an idx file as an array. Its header has two zeros, the type, the number of axes and their sizes."""
    num_axes = content[3]
    sizes = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(sizes).copy())


def prepare_mnist(data_dir: Path) -> None:
    """Download the missing or damaged files of `<data_dir>/mnist/`. A file appears there after verification."""
    folder = data_dir / "mnist"
    for name, known in CHECKSUMS.items():
        if not is_good(read_published, folder, name, known, ".gz"):
            fetch(f"{URL}/{name}.gz", f"md5:{ARCHIVES[name]}", folder)
            (folder / name).unlink(missing_ok=True)  # an uncompressed file, if there is one, is damaged
    print(f"{folder}: complete")
