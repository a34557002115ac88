import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_installed_elsewhere_has_the_command_the_graph_the_prompts_and_imagenets_numbers(tmp_path: Path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # What the wheel needs is installed here already: torch alone would take minutes to install again.
    here = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (there,) = (tmp_path / "venv").glob("lib/*/site-packages")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (there / "zz-requirements.pth").write_text(f"{here}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    command = [tmp_path / "venv" / "bin" / "profiling-agent", "run", "--help"]
    helped = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=True)
    code = (
        "import profiling_agent; from profiling_agent.prompts import render; "
        "print(profiling_agent.__file__); "
        "print(render('input_shape_resolver', config='a', rules='b')[:20]); "
        "from profiling_agent.data.labels import WNIDS; print(len(WNIDS.read_text().split())); "
        "print(profiling_agent.build_graph().name)"
    )
    printed = subprocess.run([python, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=True).stdout

    assert "--max-accuracy-drop" in helped.stdout
    assert str(there) in printed
    assert "Settings of the mode" in printed
    assert "1000" in printed.splitlines()
    assert "profiling_agent" in printed.splitlines()[-1]
    assert not (there / "graphs").exists()
    assert not (there / "prompts").exists()
