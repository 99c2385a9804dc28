"""Kaldi's files are data: nothing in their names or their content runs a command, and damage is named."""

import gzip
import os

import kaldi_native_io
import numpy as np
import pytest

from bnrnn.data import kaldi_files
from bnrnn.data.kaldi_files import load_alignments, load_scp, shape
from bnrnn.errors import BnrnnError


def test_no_name_and_no_list_runs_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "ali';touch PWNED;'.gz"
    (tmp_path / name).write_bytes(gzip.compress(b"a 1 2 3\n"))
    assert load_alignments(tmp_path)["a"].tolist() == [1, 2, 3]
    for where in ("cat x |", ";touch PWNED;cat x |[0:2]", "| touch PWNED", "x.ark:5|"):
        (tmp_path / "cmvn.scp").write_text(f"speaker {where}\n")
        with pytest.raises(BnrnnError, match=r"cmvn.scp: speaker is read from a command, expected a file"):
            load_scp(tmp_path / "cmvn.scp")
    folder = tmp_path / "touch PWNED|"
    folder.mkdir()
    (folder / "feats.scp").write_text("a x.ark:5\n")
    (folder / "x.ark").write_bytes(b"")
    with pytest.raises(BnrnnError, match=r"has a \| in its path"):
        load_scp(folder / "feats.scp")
    assert not (tmp_path / "PWNED").exists()


def test_every_damaged_alignment_is_named(tmp_path, monkeypatch):
    path = tmp_path / "ali.1.ark"
    with kaldi_native_io.Int32VectorWriter(f"ark:{path}") as writer:
        writer.write("first", [1, 2, 3])
        writer.write("second", [4])
    content = path.read_bytes()
    assert {k: v.tolist() for k, v in load_alignments(tmp_path).items()} == {"first": [1, 2, 3], "second": [4]}
    whole = content.index(b"second")
    huge = content.replace(b"\4\3\0\0\0", b"\4\xff\xff\xff\x7f")
    for damaged in (*(content[:n] for n in range(1, len(content)) if n != whole), huge, b"\0" * 9, b"a x\n", b"a 1"):
        path.write_bytes(damaged)
        with pytest.raises(BnrnnError, match=r"ali.1.ark is not an archive of alignments \(.*: write it again with"):
            load_alignments(tmp_path)
    path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(kaldi_files, "MOST_STATES", 3)
        with pytest.raises(BnrnnError, match=r"ali.1.ark is not an archive of alignments \(more than 3 states\)"):
            load_alignments(tmp_path)
    path.unlink()
    os.mkfifo(path)  # would block for ever
    with pytest.raises(BnrnnError, match=r"ali.1.ark is not an archive of alignments \(it is no regular file\)"):
        load_alignments(tmp_path)


def test_a_matrix_that_claims_more_numbers_than_its_archive_has_takes_no_memory(tmp_path):
    with kaldi_native_io.FloatMatrixWriter(f"ark,scp:{tmp_path}/a.ark,{tmp_path}/a.scp") as writer:
        writer.write("one", np.ones((3, 2), "f4"))
    path = tmp_path / "a.ark"
    where = load_scp(tmp_path / "a.scp")["one"]
    assert shape("one", where) == (3, 2)
    path.write_bytes(path.read_bytes().replace(b"\4\3\0\0\0", b"\4\xff\xff\xff\x7f"))
    with pytest.raises(BnrnnError, match=r"a.ark is not an archive of matrices \(one claims 2,147,483,647 x 2"):
        shape("one", where)


def test_a_missing_list_says_where_it_comes_from(tmp_path):
    with pytest.raises(BnrnnError, match=r"feats.scp is missing: write it with Kaldi .*, or set BNRNN_DATA"):
        load_scp(tmp_path / "feats.scp")
