"""`depthbench prepare` without the installed command."""

import sys

from depthbench.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
