"""Reading files that may be damaged, and writing atomically."""

import errno
import gzip
import hashlib
import io
import json
import os
import tarfile
import zipfile

import pytest

from bnrnn.errors import BnrnnError, first_line, mendable
from bnrnn.system import files
from bnrnn.system.files import (
    atomic_write,
    read_bytes,
    read_json,
    read_record,
    reading,
    tar_members,
    write_json,
    write_record,
    zip_members,
)


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half of", None])
    assert json.loads(path.read_text()) == {"a": 1} and list(path.parent.iterdir()) == [path]


def test_of_two_processes_that_write_a_file_at_once_the_last_one_counts_and_both_write_it_whole(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as later:
        later.write(b"of one ")
        later.flush()
        with atomic_write(path) as file:
            file.write(b"of the other")
        assert path.read_bytes() == b"of the other"
        later.write(b"process")
    assert path.read_bytes() == b"of one process" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path):
    path, old, new = tmp_path / "a", tmp_path / "a.0123abcd.partial", tmp_path / "a.4567abcd.partial"
    for leftover in (old, new):
        leftover.write_bytes(b"half of")
    os.utime(old, (0, 0))
    write_json(path, 1)
    assert sorted(tmp_path.iterdir()) == [path, new]


def test_a_file_that_fails_its_check_does_not_replace_the_old_one(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def check(partial):
        assert partial.read_bytes() == b"new"
        raise ValueError("damaged on the way")

    with pytest.raises(ValueError, match="on the way"), atomic_write(path, check) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_an_error_of_the_system_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, number):
    path = tmp_path / "a.json"
    write_json(path, 1)

    def fail(file):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(BnrnnError, match=rf"a.json cannot be written \({os.strerror(number)}\): make room"):
        write_json(path, 2)
    assert read_json(path, "") == 1 and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_named_and_never_opened(tmp_path):
    paths = {name: tmp_path / name for name in ("folder", "link", "pipe", "missing")}
    paths["folder"].mkdir()
    paths["link"].symlink_to("nowhere")
    os.mkfifo(paths["pipe"])
    reasons = {"folder": "it is a folder", "link": "its link leads nowhere", "pipe": "it is no regular file",
               "missing": "the file is missing"}  # fmt: skip
    for name, path in paths.items():
        with pytest.raises(BnrnnError, match=rf"{name} is damaged \({reasons[name]}\): get it again"):
            read_bytes(path, "get it again")


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), EOFError(), RecursionError(), MemoryError(), zipfile.BadZipFile("x")]
)
def test_any_error_of_a_reader_names_the_file(tmp_path, error):
    (tmp_path / "a").write_bytes(b"")
    found = pytest.raises(BnrnnError, match=r"a is not a list \(.+\): get it again")
    with found, reading(tmp_path / "a", "get it again", "a list"):
        raise error


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", "", most=5) == b"12345"
    with pytest.raises(BnrnnError, match="more than 4 bytes"):
        read_bytes(tmp_path / "a", "", most=4)


def test_json_that_would_take_a_multiple_of_its_size_in_memory_is_not_parsed(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, [2, {}]]}')  # two commas and four brackets
    for limit, least in (("MOST_VALUES", 6), ("MOST_JSON", 19)):
        monkeypatch.setattr(files, limit, least)
        assert read_json(path, "restore it") == {"a": [1, [2, {}]]}
        monkeypatch.setattr(files, limit, least - 1)
        with pytest.raises(
            BnrnnError, match=rf"a.json is damaged \(more than {least - 1} (values|bytes)\): restore it"
        ):
            read_json(path, "restore it")
        monkeypatch.undo()


def test_archives_give_their_regular_files_only_and_have_a_limit(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in (("file", tarfile.REGTYPE), ("link", tarfile.SYMTYPE), ("device", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, "/etc/passwd", 3 if name == "file" else 0
            archive.addfile(member, io.BytesIO(b"abc"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("file", "abc")
    assert tar_members(tmp_path / "a.tar", lambda n: n == "file") == {"file": b"abc"}
    assert zip_members(tmp_path / "a.zip", lambda n: True) == {"file": b"abc"}
    for name in ("link", "device"):
        with pytest.raises(ValueError, match=f"{name} is no regular file"):
            tar_members(tmp_path / "a.tar", lambda n, name=name: n == name)
    for read, name in ((tar_members, "a.tar"), (zip_members, "a.zip")):
        with pytest.raises(ValueError, match="more than 2 bytes"):
            read(tmp_path / name, lambda n: n == "file", most=2)


def test_a_changed_number_in_a_record_is_an_error_and_a_record_without_checksum_is_accepted(tmp_path):
    path = tmp_path / "a.json"
    write_record(path, {"value": 1.25, "list": [1, 2]})
    assert read_record(path, "") == {"value": 1.25, "list": [1, 2]}
    path.write_text(path.read_text().replace("1.25", "1.35"))
    with pytest.raises(BnrnnError, match=r"a.json is damaged \(it does not have its checksum\): run again"):
        read_record(path, "run again")
    write_json(path, {"value": 1.25})
    assert read_record(path, "") == {"value": 1.25}


def test_errors_of_the_system_and_a_lack_of_memory_can_be_mended_by_the_user():
    found = mendable(FileExistsError(errno.EEXIST, "File exists", "/a/b"))
    assert str(found).startswith("/a/b cannot be used (File exists)")
    assert "not enough memory" in str(mendable(MemoryError()))
    assert "smaller batch_size" in str(mendable(RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")))
    error = BnrnnError("a is damaged")
    error.__cause__ = OSError("it is a folder")
    assert mendable(error) is error
    wrapped = RuntimeError("Error in call to target")
    wrapped.__cause__ = ModuleNotFoundError("No module named 'pandas'", name="pandas")
    assert "the package pandas is not installed" in str(mendable(wrapped))
    assert mendable(ModuleNotFoundError("No module named 'bnrnn.data.x'", name="bnrnn.data.x")) is None
    assert mendable(RuntimeError("a bug")) is None and mendable(OSError("without a file")) is None


def test_a_file_that_is_not_as_its_folder_lists_it_is_named(tmp_path):
    path, sums = tmp_path / "a.txt", tmp_path / files.SUMS
    path.write_text("a dog")
    assert read_bytes(path, "") == b"a dog"  # a folder without a list is not checked
    sums.write_text(f"{hashlib.sha256(b'a dog').hexdigest()}  a.txt\n")
    assert read_bytes(path, "") == b"a dog"
    path.write_text("a dot")
    with pytest.raises(BnrnnError, match=r"a.txt is damaged \(it does not have its checksum in SHA256SUMS\): get it"):
        read_bytes(path, "get it again")
    sums.write_text(f"{'0' * 64} *b.txt\n")
    with pytest.raises(BnrnnError, match=r"a.txt is damaged \(SHA256SUMS beside it does not list it\)"):
        read_bytes(path, "")
    sums.write_text(f"{'0' * 64}  a.txt\n{'0' * 63}  b.txt\n")
    with pytest.raises(BnrnnError, match=r"SHA256SUMS is not a list of checksums \(line 2 is no checksum of a file\)"):
        read_bytes(path, "")


def test_an_archive_with_something_around_it_or_without_its_checksum_is_refused(tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    packed = gzip.compress(content.getvalue())
    for damaged in (packed * 2, packed[:-5] + b"x" + packed[-4:], packed[:-4]):
        (tmp_path / "a.tar.gz").write_bytes(damaged)
        with pytest.raises((ValueError, OSError, EOFError)):
            tar_members(tmp_path / "a.tar.gz", lambda n: True)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("file", "abc")
    good = (tmp_path / "a.zip").read_bytes()
    for damaged in (good * 2, good + b"\0", b"\0" + good):
        (tmp_path / "a.zip").write_bytes(damaged)
        with pytest.raises(ValueError, match="before the beginning or after the end"):
            zip_members(tmp_path / "a.zip", lambda n: True)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "a"),
        (ValueError("\n  a\nb"), "a"),
        (ValueError(), "ValueError"),
        (OSError("\n"), "OSError"),
    ],
)
def test_the_first_line_of_an_error_says_something(error, line):
    assert first_line(error) == line
