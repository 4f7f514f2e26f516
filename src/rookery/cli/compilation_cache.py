"""Keep compiled programs on disk, so that a command compiles nothing a second time."""

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any


def keep_compiled() -> None:
    """Let JAX keep compiled programs in the user's cache folder.

    JAX's own environment variables, such as JAX_COMPILATION_CACHE_DIR, take precedence. With ROOKERY_CACHE=off, JAX's
    settings stay as they are.
    """
    if os.environ.get("ROOKERY_CACHE", "").lower() == "off":
        return
    import jax

    from rookery.data.files import cache_dir

    settings: dict[str, Any] = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = cache_dir() / "jax" / _processor()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # RuntimeError: there is no home folder
            return
        if not os.access(folder, os.W_OK):
            return
        settings["jax_compilation_cache_dir"] = str(folder)
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _processor() -> str:
    """Name this kind of processor: a program compiled for another kind may not run here."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    features = sorted(set(re.findall(r"^(?:model name|flags|Features)\b.*", text, re.MULTILINE))) or text
    return f"{platform.machine()}-{hashlib.sha256(repr(features).encode()).hexdigest()[:8]}"
