"""Numbers as people read them."""


def duration(microseconds: float | None) -> str:
    """Three digits or so, in microseconds, milliseconds or seconds; a dash for None."""
    if microseconds is None:
        return "-"
    size, unit = time_unit(microseconds)
    return f"{_digits(microseconds / size)} {unit}"


def time_unit(microseconds: float) -> tuple[float, str]:
    """(microseconds in it, its name)."""
    if abs(microseconds) >= 1e6:
        return 1e6, "s"
    return (1e3, "ms") if abs(microseconds) >= 1e3 else (1, "µs")


def size(number: float | None) -> str:
    """Bytes, in powers of 1000 as plans have them; a dash for None."""
    if number is None:
        return "-"
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number) >= scale:
            return f"{_digits(number / scale)} {unit}"
    return f"{number:.0f} B"


def share(fraction: float | None) -> str:
    """In percent; a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def whole(number: float | None) -> str:
    """Rounded; a dash for None."""
    return "-" if number is None else f"{number:,.0f}"


def rate(gigabytes_per_second: float | None) -> str:
    return "-" if gigabytes_per_second is None else f"{_digits(gigabytes_per_second)} GB/s"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
