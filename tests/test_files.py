import json

import pytest

from bnrnn.files import atomic_write, write_json


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half of", None])
    assert json.loads(path.read_text()) == {"a": 1} and list(path.parent.iterdir()) == [path]
