"""The Python files that travel with an export: the Hugging Face model and the residual modules that trained it.

They lie side by side. transformers finds them with a regular expression for `from .name import`, and 4.57 copies only
those that the modeling file itself names, so it names all.
"""

import inspect
import re
from pathlib import Path

from depthbench.residual import Residual

_PACKAGE = Path(__file__).parents[1]
_HF = Path(__file__).parent / "hf"
_PLACES = {name: _PACKAGE / name for name in ("residual", "model")}
CONFIGURATION, MODELING = "configuration_depthbench", "modeling_depthbench"

_SIBLING = re.compile(r"^from \.(\w+) import", re.MULTILINE)
_OURS = re.compile(r"^from depthbench\.(residual|model)(?:\.(\w+))? import", re.MULTILINE)
_CONFIGURATION_IMPORT = f"from .{CONFIGURATION} import DepthBenchConfig\n"


def _sources(residual: Residual) -> dict[str, str]:
    """By name, what the model needs: the architecture's module, those that the backbone imports, and theirs."""
    found: dict[str, str] = {}
    modeling = (_HF / f"{MODELING}.py").read_text()
    architecture = Path(inspect.getfile(type(residual)))
    wanted = [(architecture.parent, architecture.stem)]
    wanted += [(_PLACES[place], module or "protocol") for place, module in _OURS.findall(modeling)]
    while wanted:
        folder, name = wanted.pop()
        text = (folder / f"{name}.py").read_text()
        if name in found:
            assert found[name] == text, f"two files called {name}.py"
            continue
        found[name] = text
        wanted += [(folder, sibling) for sibling in _SIBLING.findall(text)]
    return found


def code_files(residual: Residual) -> dict[str, str]:
    """File name to text of everything that an export of this architecture needs, in one folder."""
    siblings = _sources(residual)
    modeling = (_HF / f"{MODELING}.py").read_text()
    modeling = _OURS.sub(lambda match: f"from .{match[2] or 'protocol'} import", modeling)
    # a name that every module has; importing the architecture's registers it
    lines = (f"from .{name} import __name__ as _{name}  # noqa: F401\n" for name in sorted(siblings))
    why = "# every file of the model: transformers copies what this one names\n"
    assert _CONFIGURATION_IMPORT in modeling
    modeling = modeling.replace(_CONFIGURATION_IMPORT, _CONFIGURATION_IMPORT + why + "".join(lines))
    files = {f"{name}.py": text for name, text in siblings.items()}
    files[f"{MODELING}.py"] = modeling
    files[f"{CONFIGURATION}.py"] = (_HF / f"{CONFIGURATION}.py").read_text()
    return files
