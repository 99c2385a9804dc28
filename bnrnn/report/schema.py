"""Turns the mappings of a YAML file into dataclasses: the fields of a class are the keys that a mapping may have."""

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from bnrnn.config import LOADER
from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_text, reading

REMEDY = "correct it, or restore the file with git"
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
T = TypeVar("T")


class Keys(dict[Any, Any]):
    """A mapping of a YAML file, which knows where it stands and on which line each of its keys is."""

    path: Path
    line: int
    lines: dict[Any, int]

    def error(self, found: str, expected: str, key: Any = None) -> BnrnnError:
        """The error about a key of this mapping, or about all of it."""
        place = f"{self.path}, line {self.lines.get(key, self.line)}"
        return BnrnnError(f"{place}: {found}, expected {expected}: {REMEDY}")


class _Loader(LOADER):  # pyright: ignore[reportGeneralTypeIssues]
    """A safe loader of YAML whose mappings are `Keys`."""

    path: Path


def _construct(loader: Any, node: yaml.MappingNode) -> Keys:
    own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    loader.flatten_mapping(node)
    keys = Keys(loader.construct_mapping(node, deep=True))
    keys.path, keys.line = loader.path, node.start_mark.line + 1
    keys.lines = {loader.construct_object(key, deep=True): key.start_mark.line + 1 for key, _ in node.value}
    if twice := next((name for k, name in enumerate(own) if name in own[:k]), None):
        raise keys.error(f"{twice} stands here twice", "each key once", twice)
    return keys


_Loader.add_constructor("tag:yaml.org,2002:map", _construct)


def load_keys(path: Path, what: str) -> Keys:
    """The mapping in a YAML file. Raises BnrnnError if the file cannot be read or is no mapping."""
    text = read_text(path, REMEDY, what)
    with reading(path, REMEDY, what):
        return parse_keys(text, path)


def parse_keys(text: str, path: Path) -> Keys:
    """The mapping in a text of YAML; errors about it name the path. Raises ValueError if the text is none."""
    loader = _Loader(text)
    loader.path = path
    try:
        content = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        place = f"{path}, line {error.problem_mark.line + 1}" if error.problem_mark else path
        raise BnrnnError(f"{place}: {error.problem}: {REMEDY}") from None
    if not isinstance(content, Keys):
        raise ValueError("expected keys and values")
    return content


def listed(given: Keys, key: str) -> list[Keys]:
    """The mappings in a list; [] without the key. Raises BnrnnError, with file and line, for anything else."""
    found = given.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, Keys) for item in found):
        raise given.error(f"{key} is {json.dumps(found, default=str)}", "a list, each keys and values", key)
    return found


def build(kind: type[T], given: Keys, also: tuple[str, ...] = (), **computed: Any) -> T:
    """An instance of a dataclass whose fields have the values of a mapping's keys.

    Args:
        also: other keys that the mapping may have, which the caller reads.
        computed: the values of the fields that are no keys.

    Raises BnrnnError, with file and line, for an unknown key, a missing one, or a value of another type.
    """
    hints, own = get_type_hints(kind), {field.name: field for field in fields(kind) if field.name not in computed}  # pyright: ignore[reportArgumentType]
    if unknown := [key for key in given if key not in own and key not in also]:
        raise given.error(
            f"the key {unknown[0]} is unknown", f"one of {', '.join(map(str, [*own, *also]))}", unknown[0]
        )
    for name, field in own.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise given.error(f"{name} is missing", f"a key {name} with {in_words(hints[name])}")
    values = {name: convert(given[name], hints[name], given, name) for name in own if name in given}
    return kind(**values, **computed)


def convert(value: Any, kind: Any, given: Keys, key: Any) -> Any:
    """A value of a mapping as a type of a field: lists become tuples, and mappings dataclasses where a field has one.

    Raises BnrnnError, with file and line, for a value of another type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        kind = next((one for one in args if _has_form(value, one)), kind)
        origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(value, Keys):
        return build(kind, value)  # pyright: ignore[reportArgumentType]
    if origin is tuple and isinstance(value, list):
        return tuple(convert(item, args[0], given, key) for item in value)
    if origin is dict and isinstance(value, Keys):
        return {convert(k, args[0], value, k): convert(v, args[1], value, k) for k, v in value.items()}
    if not (value in args if origin is Literal else type(value) is kind):
        raise given.error(f"{key} is {json.dumps(value, default=str)}", in_words(kind), key)
    return value


def _has_form(value: Any, kind: Any) -> bool:
    """Whether a value can be of this type, as far as lists, mappings and plain values differ."""
    if isinstance(value, Keys):
        return is_dataclass(kind) or get_origin(kind) is dict
    if isinstance(value, list):
        return get_origin(kind) is tuple
    return value in get_args(kind) if get_origin(kind) is Literal else kind is type(value)


def in_words(kind: Any) -> str:
    """The type of a field in words, for messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple:
        return f"a list, each {in_words(args[0])}"
    if origin in (UnionType, Union):
        return " or ".join(dict.fromkeys(in_words(one) for one in args if one is not NoneType or len(args) == 1))
    if origin is dict or is_dataclass(kind):
        return "keys and values"
    return WORDS.get(kind, str(kind))
