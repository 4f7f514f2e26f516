"""`--config FILE`: the options of a command in a TOML file, and the file that repeats a run."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

_SET = "rookery.set"  # where the file's --set is kept until the command line's is known


def config_option(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the file's options as defaults of this command."""
    if path is None or ctx.resilient_parsing:
        return path
    from rookery.cli.registry import find

    params = {(param.name if param.name != "settings" else "set"): param for param in ctx.command.params}
    known = {_option(param): name for name, param in params.items() if name not in ("config", "help")}
    defaults: dict[str, Any] = {}
    for name, value in _read(path).items():
        word, entry = find(f"option of `rookery {ctx.info_name}` called", name, known)
        if entry == "set":
            ctx.meta[_SET] = _entries(path, value)
            continue
        many = getattr(params[entry], "multiple", False) or params[entry].nargs == -1
        value = [value] if many and isinstance(value, str) else value
        whole = isinstance(value, list) if many else isinstance(value, str | int | float)
        if not whole or (isinstance(value, bool) and not getattr(params[entry], "is_flag", False)):
            raise ValueError(f"{path}: {word} = {json.dumps(value, default=str)} is not a value for --{word}.")
        if getattr(params[entry], "is_flag", False) and not isinstance(value, bool):
            raise ValueError(f"{path}: {word} is true or false, not {value!r}.")
        name = params[entry].name or entry
        defaults[name] = [str(each) for each in value] if many else value if isinstance(value, bool) else str(value)
    ctx.default_map = defaults
    return path


def set_with_config(ctx: typer.Context, given: list[str] | None) -> list[str] | None:
    """What --set says, and what the file does that --set does not."""
    from_file = dict(ctx.meta.get(_SET, {}))
    for entry in given or []:
        from_file.pop(entry.partition("=")[0].strip().replace("-", "_"), None)
    return [*(given or []), *(f"{name}={text}" for name, text in from_file.items())]


def _option(param: Any) -> str:
    long = [name for name in param.opts if name.startswith("--")]
    return (long or [param.name])[0].removeprefix("--")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from None


def _entries(path: Path, given: Any) -> dict[str, str]:
    """Name -> text as --set takes it, of a table or a list."""
    if isinstance(given, list) and all(isinstance(entry, str) for entry in given):
        given = dict(entry.partition("=")[::2] for entry in given)
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: set is a table, as in [set] upper_step = 0.1.")
    entries = {}
    for name, value in given.items():
        value = "..".join(map(str, value)) if isinstance(value, list) and len(value) == 2 else value
        if not isinstance(value, str | int | float):
            raise ValueError(f"{path}: {name} = {value!r} is no number, word, true or false, or pair of numbers.")
        entries[name.strip().replace("-", "_")] = str(value).lower() if isinstance(value, bool) else str(value)
    return entries


def to_toml(options: Mapping[str, Any], settings: Mapping[str, Any], comment: str) -> str:
    """Options, but for those that are None, and a table of settings; a text stands for a value that TOML has not."""
    lines = [f"# {comment}"]
    lines += [f"{name} = {_toml(value)}" for name, value in options.items() if value is not None]
    lines += ["", "[set]", *(f"{name} = {_toml(value)}" for name, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
