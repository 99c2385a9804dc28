"""Published files: one that is missing or damaged is named with the command that repairs it; downloads are verified."""

import gzip
from pathlib import Path

import pytest

from bnrnn.data.base import sha256
from bnrnn.data.download import fetch, is_good, read_published
from bnrnn.errors import BnrnnError
from tests.helpers import served

CONTENT = b"the published text\n" * 20
SHA256 = sha256(CONTENT)
DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "garbage": lambda path: path.write_bytes(b"<html>not found</html>\xff"),
    "another text": lambda path: path.write_bytes(packed(path, b"t" + CONTENT[:-1])),
}


def packed(path: Path, content: bytes) -> bytes:
    return gzip.compress(content) if path.suffix == ".gz" else content


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "toy").mkdir()
    return tmp_path / "toy"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_the_command_that_repairs_it(folder, name, damage):
    path = folder / name
    path.write_bytes(packed(path, CONTENT))
    assert read_published(folder, "a.txt", SHA256, ".gz") == CONTENT
    DAMAGES[damage](path)
    with pytest.raises(
        BnrnnError, match=r"toy/a.txt(.gz)? is (missing|damaged|not the published).*`make data`"
    ) as error:
        read_published(folder, "a.txt", SHA256, ".gz")
    assert f"`bnrnn-prepare toy --data-dir {folder.parent}`" in str(error.value) and "\n" not in str(error.value)
    assert not is_good(read_published, folder, "a.txt", SHA256, ".gz")


def test_what_is_not_the_published_file_is_described(folder):
    (folder / "a.txt").write_bytes(b"<html>not found</html>\xff")
    expected = rf"a.txt is not .* its 23 bytes begin with b'<html>not found</htm' .*, expected {SHA256[:16]}"
    with pytest.raises(BnrnnError, match=expected):
        read_published(folder, "a.txt", SHA256)


def test_only_the_published_file_is_downloaded_and_a_file_that_was_there_is_kept(folder, tmp_path):
    (tmp_path / "mirror").mkdir()
    source, known = tmp_path / "mirror/a.txt", f"sha256:{SHA256}"
    source.write_bytes(CONTENT)
    with served(source.parent) as address:
        path = fetch(f"{address}/a.txt", known, folder)
        assert path.read_bytes() == CONTENT
        for name in ("truncated", "garbage", "another text"):
            DAMAGES[name](source)
            path.unlink(missing_ok=True)
            with pytest.raises(BnrnnError, match=r"/a.txt is not the published (.|\n)*Put a.txt into .*toy by hand"):
                fetch(f"{address}/a.txt", known, folder)
            assert list(folder.iterdir()) == []
        source.unlink()
        path.write_bytes(b"mine")
        with pytest.raises(BnrnnError, match=r"a.txt could not be downloaded: (.|\n)*Put a.txt into .*toy by hand"):
            fetch(f"{address}/a.txt", known, folder)
        assert path.read_bytes() == b"mine"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BnrnnError, match="file/toy cannot be written"):
        fetch("http://127.0.0.1:9/a.txt", f"sha256:{SHA256}", tmp_path / "file/toy")
