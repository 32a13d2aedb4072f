"""What the commands' options have in common."""

import argparse

from .errors import UserError


def at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """Raise UserError for the first of the options `names` that is given and below `least`."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')}={value} must be at least {least}")
