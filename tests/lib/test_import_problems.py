"""Libraries that can't be imported: the one at fault is named, with the command that installs it again."""

import importlib
import sys
from importlib import metadata

import pytest

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.logs import import_problem, third_party_errors

OPERATOR = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
# As transformers imports: the error names what was wanted, and not what failed.
LAZY = """
def wanted():
    try:
        import {}
    except Exception as error:
        raise ModuleNotFoundError("Could not import module 'Wanted'.") from error
"""
FAULTS = {
    "torchvision": ({"torchvision/__init__": "import torchvision.ops", "torchvision/ops": OPERATOR}, "RuntimeError"),
    "torchaudio": ({"torchaudio/__init__": "import ctypes\nctypes.CDLL('/nowhere/libtorchaudio.so')"}, "OSError"),
    "binding": ({"binding/__init__": "from torch import no_such_name"}, "ImportError"),
    "absent": ({"binding/__init__": "import absent.part"}, "ModuleNotFoundError"),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("package", FAULTS)
def test_the_library_whose_import_failed_is_named_whoever_wanted_it(tmp_path, monkeypatch, package, lazy):
    files, kind = FAULTS[package]
    first = next(iter(files)).partition("/")[0]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "wants_it.py").write_text(LAZY.format(first))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchvision", "torchvision.ops", "torchaudio", "wants_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    refuses = pytest.raises(ArtifactError, match=f"{package} can't be imported, {kind} ")
    with refuses as refused, third_party_errors(ArtifactError):
        importlib.import_module("wants_it").wanted() if lazy else importlib.import_module(first)
    command = str(refused.value).partition("; run: ")[2]
    if package.startswith("torch"):
        version = metadata.version("torch")
        index = "https://download.pytorch.org/whl/cpu" if version.endswith("+cpu") else ""
        assert command.startswith(f"pip uninstall -y {package} && pip install {package} torch=={version}")
        assert command.endswith(index)
    else:
        assert command == f"pip install --upgrade --force-reinstall {package}"


def test_an_error_of_code_that_was_imported_is_no_problem_of_an_import(tmp_path, monkeypatch):
    (tmp_path / "works.py").write_text("def work():\n    raise KeyError('label')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError) as raised:
        importlib.import_module("works").work()
    assert import_problem(raised.value) is None


def test_the_name_to_install_is_that_of_the_distribution(tmp_path, monkeypatch):
    (tmp_path / "asks.py").write_text("import PIL.no_such_part")
    (tmp_path / "PIL.py").write_text("raise OSError('libjpeg.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(OSError, match="undefined symbol") as raised:
        importlib.import_module("asks")
    assert "PIL can't be imported" in (problem := import_problem(raised.value) or "")
    assert problem.endswith("pip install --upgrade --force-reinstall pillow")
