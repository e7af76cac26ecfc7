"""`edgekv`, which `python -m edgekv` is, too. Light up to the point where a Ctrl-C is looked after."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from edgekv.uninterrupted import uninterrupted

        with uninterrupted():
            from edgekv.cli import run
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
