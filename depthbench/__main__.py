"""`python -m depthbench`, which torchrun can start."""

import sys

from depthbench.cli import main

if __name__ == "__main__":  # checkpoint writers re-import the main module
    sys.exit(main())
