"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """A wrong setting, file or layout. The message states what was given, what is allowed and the way out.

    The command line prints it without a traceback and exits with status 2.
    """
