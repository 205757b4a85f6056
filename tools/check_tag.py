"""Says whether a tag names the version of the package.

    python tools/check_tag.py v0.1.0

The release workflow asks before it builds; it needs Python only.
"""

import pathlib
import re
import sys

_VERSION = pathlib.Path(__file__).parent.parent / "keras_rub" / "version.py"


def problem(tag: str, source: str) -> str | None:
    """Why this tag is wrong for this version.py, or `None`."""
    found = re.search(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    if found is None:
        return f"{_VERSION} has no line __version__."
    if tag != f"v{found.group(1)}":
        return (
            f"The tag must be v{found.group(1)}, as in keras_rub/version.py. "
            f"Received: {tag}"
        )
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(problem(sys.argv[1], _VERSION.read_text()))
