"""The cache of compiled kernels: where it is, and that no library that another user could write is loaded."""

import os
from pathlib import Path

import pytest

from bnrnn.scan.native import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")
OTHER = 12345  # the id of another user


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own, and a compiler that copies the kernels built before."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor a; do last=$a; done\ncp "{build.library()._name}" "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    build.library.cache_clear()
    yield tmp_path / "bnrnn"
    build.library.cache_clear()


def loaded() -> Path:
    build.library.cache_clear()
    return Path(build.library()._name)


@pytest.mark.parametrize("given", ["", ".", "relative/cache"])
def test_an_empty_or_relative_variable_is_ignored(cache, monkeypatch, tmp_path, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.chdir(tmp_path)
    assert loaded().parent == tmp_path / "home/.cache/bnrnn"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiler", "home"]


def test_a_folder_of_this_user_is_closed_for_others_and_used(cache, caplog):
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    assert loaded().parent == cache and cache.stat().st_mode & 0o777 == 0o755
    (message,) = caplog.messages
    assert message.startswith("Compiling")


@pytest.mark.parametrize("others", [0o775, 0o757])
def test_a_library_that_others_can_write_is_built_again(cache, others):
    path = loaded()
    assert path.stat().st_mode & 0o777 == 0o755
    path.chmod(others)
    before = path.stat().st_ino
    assert loaded() == path and path.stat().st_ino != before and path.stat().st_mode & 0o777 == 0o755


@as_root
def test_a_library_of_another_user_is_never_loaded(cache):
    path = loaded()
    os.chown(path, OTHER, OTHER)
    planted = path.with_name(path.name.replace(path.name[-10:], "0" * 7 + ".so"))
    planted.write_bytes(b"not even a library")
    os.chown(planted, OTHER, OTHER)
    assert loaded() == path and path.stat().st_uid == os.geteuid() and planted.exists()


@as_root
def test_in_a_folder_of_another_user_nothing_is_loaded_and_a_sentence_says_so(cache, caplog):
    path = loaded()
    os.chown(cache, OTHER, OTHER)
    caplog.clear()
    found = loaded()
    assert found.parent not in (cache, cache.parent) and found.parent.stat().st_mode & 0o777 == 0o700
    assert caplog.messages[0].startswith(f"{cache} belongs to another user, so the kernels are built in ")
    assert path.exists()


def test_a_link_is_not_loaded(cache, tmp_path):
    path = loaded()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert loaded() == path and not path.is_symlink()
