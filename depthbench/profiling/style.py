"""The colours of a recording's pictures and pages, and their legend."""

from .parts import Part

COLORS = {
    Part.FORWARD: "#2f6db5",
    Part.BACKWARD: "#2a9d8f",
    Part.IDLE: "#d5dae1",
    Part.TRANSFER: "#e4572e",
    Part.UNKNOWN: "#e9d8a6",
    Part.DATA: "#7d8ca3",
    Part.REDUCE: "#c9639b",
    Part.OPTIMIZER: "#8e6bbf",
    Part.OTHER: "#b9a68f",
}
MEANINGS = {
    Part.FORWARD: "forward",
    Part.BACKWARD: "backward",
    Part.IDLE: "idle: waits until the peer is ready",
    Part.TRANSFER: "transfer: waits for bytes on their way",
    Part.UNKNOWN: "waits for a rank without a recording",
    Part.DATA: "data",
    Part.REDUCE: "reduce",
    Part.OPTIMIZER: "optimizer",
    Part.OTHER: "other",
}
_LIGHT = {Part.FORWARD: "#8fbcea", Part.BACKWARD: "#93d8c9"}


def fill(part: Part, round_: int, rounds: int) -> str:
    """Of a stage's chunks (round_ 0 to rounds - 1), the later are the darker."""
    if part not in _LIGHT or rounds == 1:
        return COLORS[part]
    light, dark = ([int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in (_LIGHT[part], COLORS[part]))
    mixed = (a + (b - a) * round_ / (rounds - 1) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def ink(color: str) -> str:
    """Of text on it."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#16202c"


def css_class(part: Part) -> str:
    return part.value.replace(" ", "-")
