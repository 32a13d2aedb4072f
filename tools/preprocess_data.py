"""Prepare token files without the installed command: the same as ``depthbench prepare``."""

import argparse
import sys

from depthbench.data.prepare import add_arguments, run
from depthbench.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
