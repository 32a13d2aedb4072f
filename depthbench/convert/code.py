"""The Python files that travel with an export: the Hugging Face model and the residual modules that trained it.

They lie side by side. transformers finds them with a regular expression for `from .name import`, and 4.57 copies only
those that the modeling file itself names, so it names all.
"""

import hashlib
import inspect
import re
from pathlib import Path

from depthbench.residual import Residual

CONFIGURATION, MODELING = "configuration_depthbench", "modeling_depthbench"

_PACKAGE = Path(__file__).parents[1]
_HF = Path(__file__).parent / "hf"
_SIBLING = re.compile(r"^from \.(\w+) import", re.MULTILINE)
_OURS = re.compile(r"^from depthbench\.(residual|model)\.(\w+) import", re.MULTILINE)
_LAST_IMPORT = "from .layers_depthbench import"


def _sources(residual: Residual) -> dict[str, str]:
    """By name, what the model needs: the modeling file, the architecture's module, and whatever these import."""
    found: dict[str, str] = {}
    architecture = Path(inspect.getfile(type(residual)))
    wanted = [(_HF, MODELING), (architecture.parent, architecture.stem)]
    while wanted:
        folder, name = wanted.pop()
        text = (folder / f"{name}.py").read_text()
        if name in found:
            assert found[name] == text, f"two files called {name}.py"
            continue
        found[name] = text
        wanted += [(folder, sibling) for sibling in _SIBLING.findall(text)]
        wanted += [(_PACKAGE / place, module) for place, module in _OURS.findall(text)]
    return found


def code_files(residual: Residual) -> dict[str, str]:
    """File name to text of everything that an export of this architecture needs, in one folder."""
    files = {
        f"{name}.py": _OURS.sub(lambda match: f"from .{match[2]} import", text)
        for name, text in _sources(residual).items()
    }
    # a name that every module has; importing the architecture's registers it
    why = "# every file of the model: transformers copies what this one names\n"
    names = sorted(name.removesuffix(".py") for name in files if name != f"{MODELING}.py")
    lines = (f"from .{name} import __name__ as _{name}  # noqa: F401\n" for name in names)
    modeling = files[f"{MODELING}.py"]
    assert _LAST_IMPORT in modeling
    files[f"{MODELING}.py"] = modeling.replace(_LAST_IMPORT, why + "".join(lines) + _LAST_IMPORT)
    # transformers gives folders of one name that share this file the model class that it loaded first
    code = hashlib.sha256("".join(text for _, text in sorted(files.items())).encode()).hexdigest()[:16]
    files[f"{CONFIGURATION}.py"] += f"\n\n# of {residual.name}, with model code {code}\n"
    return files
