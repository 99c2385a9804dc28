import gzip
import os
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from bnrnn.config import compose_config
from bnrnn.data import text8
from bnrnn.data.base import sha256
from bnrnn.data.text8 import BEGINNING, SYMBOLS, Text8, prepare_text8
from bnrnn.errors import BnrnnError
from tests.helpers import served

DATA = Path(os.environ.get("BNRNN_DATA", "data"))
PREFIX = DATA / "text8" / "text8-prefix-6877825.gz"
SHORT = {"length": 18, "test_lengths": (50,)}
LETTERS = np.random.default_rng(0).choice(np.frombuffer(SYMBOLS, np.uint8), 10_000).tobytes()
TEXT = BEGINNING + LETTERS[len(BEGINNING) :]


def passes_for_text8(text: bytes, monkeypatch) -> None:
    monkeypatch.setattr(text8, "SIZE", len(text))
    monkeypatch.setattr(text8, "CRC32", zlib.crc32(text))


@pytest.fixture
def whole(monkeypatch) -> bytes:
    """10,000 random characters, with size and checksum patched to accept them as text8."""
    passes_for_text8(TEXT, monkeypatch)
    return TEXT


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "text8").mkdir()
    return tmp_path / "text8"


def plain(folder: Path, content: bytes) -> None:
    (folder / "text8").write_bytes(content)


def zipped(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "text8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", content)


def gzipped(folder: Path, content: bytes) -> None:
    (folder / "text8-some.gz").write_bytes(gzip.compress(content))


FORMS = pytest.mark.parametrize("store", [plain, zipped, gzipped])


def load(folder: Path, prefix: bool = False) -> Text8:
    return Text8(str(folder.parent), prefix, **SHORT)


@FORMS
def test_text8_is_split_90_5_5_from_whatever_form_it_has(whole, folder, store):
    store(folder, whole)
    data = load(folder)
    assert {split: len(part) for split, part in data.splits.items()} == {"train": 9000, "valid": 500, "test": 500}
    assert b"".join(part.tobytes() for part in data.splits.values()) == whole
    assert data.description == "text8: 9,000 / 500 / 500 characters, 27 symbols"
    assert (data.input_size, data.output_size, data.t_max) == (27, 27, 17)
    assert list(data.extra_tests()) == ["one_sequence", "segments_50"]


@FORMS
def test_a_beginning_of_text8_is_split_alike_and_called_by_its_name(whole, folder, store):
    store(folder, whole[:7_013])
    data = load(folder, prefix=True)
    assert data.description == "text8-prefix: 6,313 / 350 / 350 characters, 27 symbols"
    assert b"".join(part.tobytes() for part in data.splits.values()) == whole[:7_013]


def test_a_space_is_0_and_a_to_z_are_1_to_26(whole, folder):
    plain(folder, whole)
    batch = next(load(folder).batches("train", 1))
    assert batch.inputs[:8, 0].tolist() == [0, 1, 14, 1, 18, 3, 8, 9]  # " anarchi"


def test_the_plain_file_stays_on_disk(folder, monkeypatch):
    size = 20_000_000
    text = (BEGINNING * (size // len(BEGINNING) + 1))[:size]
    plain(folder, text)
    passes_for_text8(text, monkeypatch)
    del text
    tracemalloc.start()
    data = Text8(str(folder.parent))
    for batch in (next(data.batches("train", 128)), next(data.extra_tests()["one_sequence"][1])):
        assert batch.inputs.numel() > 900
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 5
    for part in data.splits.values():
        assert isinstance(part, np.memmap)
        assert np.shares_memory(part, data.splits["train"].base)


@FORMS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:1], "it has 1 bytes, expected 10,000: run `make data` .* with data=text8_prefix"),
        (lambda text: text[:9_999], "it has 9,999 bytes, expected 10,000: run `make data` .* with data=text8_prefix"),
        (lambda text: text + b" and on", "is not all of text8: it has more than 10,000 bytes, expected 10,000"),
        (lambda text: text[:-1] + b"!", f"CRC-32 {zlib.crc32(TEXT[:-1] + b'!'):08x}, expected {zlib.crc32(TEXT):08x}"),
    ],
)
def test_only_the_whole_text8_is_accepted_and_the_way_out_named(whole, folder, store, change, message):
    store(folder, change(whole))
    with pytest.raises(BnrnnError, match=message):
        load(folder)


@FORMS
@pytest.mark.parametrize("prefix", [False, True])
def test_an_empty_text_is_refused(whole, folder, store, prefix):
    store(folder, b"")
    with pytest.raises(BnrnnError, match=r"text8\S* is empty, expected text8 or a beginning of it: run `make data`"):
        load(folder, prefix)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_missing_text_is_named(whole, tmp_path, prefix):
    with pytest.raises(BnrnnError, match=r"text8/text8 is missing: run `make data` .*BNRNN_DATA") as error:
        load(tmp_path / "text8", prefix)
    assert ("use data=text8" in str(error.value)) == prefix


@FORMS
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[:3_000] + b"9" + TEXT[3_001:6_000], "the byte at position 3,000 is b'9', expected one of b' abcdefg"),
        (b"anarchism" * 100, "it begins with b'anarchismana.*', expected b' anarchism originated as a"),
        (TEXT, "expected only the beginning of text8: use data=text8"),
    ],
)
def test_what_is_no_beginning_of_text8_is_refused(whole, folder, store, text, message):
    store(folder, text)
    with pytest.raises(BnrnnError, match=message):
        load(folder, prefix=True)


def test_a_prefix_beside_all_of_text8_is_left_alone(whole, folder):
    plain(folder, whole)
    gzipped(folder, whole[:5_000])
    assert load(folder).description.startswith("text8: 9,000 / ")
    assert load(folder, prefix=True).description.startswith("text8-prefix: 4,500 / ")


def test_two_packed_texts_are_ambiguous(whole, folder):
    for name in ("text8-a.gz", "text8-b.gz"):
        (folder / name).write_bytes(gzip.compress(whole))
    with pytest.raises(BnrnnError, match=r"has text8-a.gz, text8-b.gz, expected a single text8\*.gz"):
        load(folder)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def swap_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>")


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("damage", [truncate, swap_a_byte, garbage])
@pytest.mark.parametrize(("store", "name"), [(zipped, "text8.zip"), (gzipped, "text8-some.gz")])
def test_a_damaged_archive_is_named_with_the_command_that_repairs_it(whole, folder, store, name, damage, prefix):
    store(folder, whole)
    damage(folder / name)
    message = rf"text8/{name} is damaged \(.*\): run `make data`"
    with pytest.raises(BnrnnError, match=message):
        load(folder, prefix)


def test_an_archive_of_something_else_is_refused(whole, folder):
    with zipfile.ZipFile(folder / "text8.zip", "w") as archive:
        archive.writestr("enwik8", whole)
    with pytest.raises(BnrnnError, match=r"text8.zip is damaged \(.*no item named 'text8'"):
        load(folder)


def test_a_text_too_short_for_the_lengths_is_refused(whole, folder):
    plain(folder, whole)
    with pytest.raises(BnrnnError, match="test has 500 characters: expected at least 1,000 for segments of 1000"):
        Text8(str(folder.parent))


@pytest.fixture
def mirror(whole, tmp_path, monkeypatch) -> Iterator[Path]:
    """The archive that is downloaded, instead of the one on the web."""
    (tmp_path / "mirror").mkdir()
    zipped(tmp_path / "mirror", whole)
    path = tmp_path / "mirror" / "text8.zip"
    monkeypatch.setattr(text8, "ARCHIVE", sha256(path.read_bytes()))
    with served(path.parent) as address:
        monkeypatch.setattr(text8, "URL", f"{address}/text8.zip")
        yield path


@pytest.mark.parametrize("before", [None, plain, zipped, gzipped])
def test_download_brings_what_a_prefix_does_not_replace(mirror, whole, folder, before, capsys):
    if before:
        before(folder, whole[:5_000])
    others = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "text8"}
    prepare_text8(folder.parent)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == others | {"text8": whole}
    assert load(folder).splits["train"].tobytes() == whole[:9000]
    mirror.unlink()
    prepare_text8(folder.parent)  # complete, so nothing is downloaded
    assert capsys.readouterr().out == f"{folder}: complete\n" * 2


@FORMS
def test_nothing_is_downloaded_where_all_of_text8_is(mirror, whole, folder, store):
    store(folder, whole)
    mirror.unlink()
    names = [path.name for path in folder.iterdir()]
    prepare_text8(folder.parent)
    assert [path.name for path in folder.iterdir()] == names


def test_another_archive_is_refused_and_leaves_nothing_behind(mirror, folder):
    zipped(mirror.parent, b"x" * 10_000)
    gzipped(folder, BEGINNING)
    with pytest.raises(BnrnnError, match=rf"{text8.URL} is not the published text8.zip(.|\n)*text8 by hand"):
        prepare_text8(folder.parent)
    assert [path.name for path in folder.iterdir()] == ["text8-some.gz"]


def test_configs_build_both_data_sets(whole, folder):
    short = ("data.length=18", "data.test_lengths=[50]", f"data_dir={folder.parent}")
    plain(folder, whole)
    data = instantiate(compose_config("data=text8", *short).data)
    assert (data.description[:6], data.t_max, data.state_noise) == ("text8:", 17, 0.0)
    gzipped(folder, whole[:5_000])
    assert instantiate(compose_config("data=text8_prefix", *short).data).description.startswith("text8-prefix:")


def test_configs_have_the_papers_lengths():
    for name, prefix in (("text8", False), ("text8_prefix", True)):
        data = compose_config(f"data={name}").data
        assert (data.length, data.test_lengths, data.prefix) == (180, [1000], prefix)


def test_a_full_epoch_has_3907_updates(whole, folder, monkeypatch):
    plain(folder, whole)
    data = load(folder)
    data.splits["train"], data.length = np.broadcast_to(np.uint8(0), 90_000_000), 180
    assert data.num_segments("train") == 499_999
    assert data.num_batches("train", 128) == 3_907
    assert next(data.batches("train", 128, torch.Generator().manual_seed(0))).inputs.shape == (179, 128)


@pytest.mark.skipif(not PREFIX.exists(), reason="needs the prefix of text8 in BNRNN_DATA")
def test_the_published_prefix_is_read_whole():
    data = Text8(str(DATA), prefix=True)
    assert data.description == "text8-prefix: 6,190,043 / 343,891 / 343,891 characters, 27 symbols"
    assert sha256(b"".join(part.tobytes() for part in data.splits.values())) == (
        "8c5551457ad85e6f248e016443493f940756c7582473e6bbfcafcbe27fc98836"
    )
    assert data.num_segments("train") == 34_389 - 1
    assert {name: num for name, (num, _) in data.extra_tests().items()} == {"one_sequence": 344, "segments_1000": 4}
    if not any((PREFIX.parent / name).exists() for name in ("text8", "text8.zip")):
        with pytest.raises(BnrnnError, match=r"it has 6,877,825 bytes, expected 100,000,000.*data=text8_prefix"):
            Text8(str(DATA))


def test_validation_looks_at_the_first_segments_alone(whole, folder):
    plain(folder, whole)
    part, everything = (Text8(str(folder.parent), **SHORT, valid_segments=n) for n in (7, None))
    assert part.num_batches("valid", 1) == 7 < everything.num_batches("valid", 1)
    assert torch.equal(next(part.batches("valid", 7)).inputs, next(everything.batches("valid", 7)).inputs)
    assert len(part.splits["test"]) == len(everything.splits["test"])
