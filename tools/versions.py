"""List the versions of the site on a static host: python tools/versions.py FOLDER writes FOLDER/versions.json.

FOLDER has a folder for each version, such as 0.1.0, built by `make docs`. The pages of all of them read the list, so
that an old version offers the new ones as well.
"""

import json
import re
import sys
from pathlib import Path


def versions(folder: Path) -> list[dict[str, str]]:
    """The versions, newest first, and before them the folders with other names, such as latest."""
    names = [path.parent.name for path in folder.glob("*/objects.inv")]
    numbers = {name: [int(part) for part in re.findall(r"\d+", name)] for name in names}
    ordered = sorted(names, key=lambda name: (not name[0].isdigit(), numbers[name], name), reverse=True)
    return [{"version": name, "path": f"{name}/"} for name in ordered]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "versions.json").write_text(json.dumps(versions(place), indent=1) + "\n", encoding="utf-8")
