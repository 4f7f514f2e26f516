"""`--config FILE`: read the options of a command from a TOML file, and write such a file."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from rookery.cli.lookup import find

_SET = "rookery.set"  # key of the file's --set in the context


def config_option(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the file's options the defaults of this command."""
    if path is None or ctx.resilient_parsing:
        return path
    params = {(param.name if param.name != "settings" else "set"): param for param in ctx.command.params}
    known = {_option(param): name for name, param in params.items() if name not in ("config", "help")}
    defaults: dict[str, Any] = {}
    for name, value in _read(path).items():
        word, entry = find(f"option of `rookery {ctx.info_name}` called", name, known)
        if entry == "set":
            ctx.meta[_SET] = _settings(path, value)
            continue
        many = getattr(params[entry], "multiple", False) or params[entry].nargs == -1
        value = [value] if many and isinstance(value, str) else value
        is_flag = getattr(params[entry], "is_flag", False)
        fits = isinstance(value, list) if many else isinstance(value, str | int | float)
        if not fits or (isinstance(value, bool) and not is_flag):
            raise ValueError(f"{path}: {word} must be a value for --{word}; got {json.dumps(value, default=str)}.")
        if is_flag and not isinstance(value, bool):
            raise ValueError(f"{path}: {word} must be true or false; got {value!r}.")
        name = params[entry].name or entry
        defaults[name] = [str(item) for item in value] if many else value if isinstance(value, bool) else str(value)
    ctx.default_map = defaults
    return path


def set_with_config(ctx: typer.Context, entries: list[str] | None) -> list[str] | None:
    """Add the file's settings to those of --set, which take precedence."""
    from_file = dict(ctx.meta.get(_SET, {}))
    for entry in entries or []:
        from_file.pop(entry.partition("=")[0].strip().replace("-", "_"), None)
    return [*(entries or []), *(f"{name}={text}" for name, text in from_file.items())]


def _option(param: Any) -> str:
    long = [name for name in param.opts if name.startswith("--")]
    return (long or [param.name])[0].removeprefix("--")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"--config must be a TOML file; {path} is not: {error}") from None


def _settings(path: Path, table: Any) -> dict[str, str]:
    """Return the settings of a table or a list as texts, by name."""
    if isinstance(table, list) and all(isinstance(entry, str) for entry in table):
        table = dict(entry.partition("=")[::2] for entry in table)
    if not isinstance(table, Mapping):
        raise ValueError(f"{path}: set must be a table, e.g. [set] upper_step = 0.1; got {table!r}.")
    entries = {}
    for name, value in table.items():
        value = "..".join(map(str, value)) if isinstance(value, list) and len(value) == 2 else value
        if not isinstance(value, str | int | float):
            raise ValueError(
                f"{path}: {name} must be a number, a word, true, false, or a pair of numbers; got {value!r}."
            )
        entries[name.strip().replace("-", "_")] = str(value).lower() if isinstance(value, bool) else str(value)
    return entries


def to_toml(options: Mapping[str, Any], settings: Mapping[str, Any], comment: str) -> str:
    """Return a TOML file with the options that are not None, and a table of settings."""
    lines = [f"# {comment}"]
    lines += [f"{name} = {_toml(value)}" for name, value in options.items() if value is not None]
    lines += ["", "[set]", *(f"{name} = {_toml(value)}" for name, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
