"""What a checkpoint holds: run, step, every tensor's name, shape and dtype, and whether all its files are there."""

import argparse
import sys

from depthbench.checkpoint.inspect import add_arguments, run
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
