"""The metadata and the files of the installed package, and of the source distribution."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from conftest import MINILM, ROOT

import encodle

PROJECT = ROOT / "python"
#: Builds use the dependencies that are compiled there.
TARGET = str(ROOT / "target")
LICENSES = ["LICENSE-APACHE", "LICENSE-MIT", "encodle/model/NOTICE"]


def test_the_version_is_that_of_the_distribution():
    assert encodle.__version__ == distribution("encodle").version


def test_the_installed_package_has_its_licences_and_a_description():
    installed = distribution("encodle")
    metadata = installed.metadata
    assert metadata["License-Expression"] == "(MIT OR Apache-2.0) AND Apache-2.0"
    assert metadata.get_all("License-File") == LICENSES
    files = {str(file): file for file in installed.files or []}
    folder = f"encodle-{encodle.__version__}.dist-info/licenses"
    for name in LICENSES:
        source = PROJECT / name
        assert files[f"{folder}/{name}"].read_text() == source.read_text()
    notice = files["encodle/model/NOTICE"].read_text()
    assert "Apache-2.0" in notice and "rounded from f32 to f16" in notice
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    description = metadata.get_payload() or metadata["Description"]
    assert description.strip() == (PROJECT / "README.md").read_text().strip()
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_values(wheel_or_sdist: Path, folder: Path) -> list[float]:
    """The first values of a vector of the built-in model, in a new virtual environment."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", wheel_or_sdist, CARGO_TARGET_DIR=TARGET)
    code = "import encodle; print(*encodle.SentenceTransformer().encode('A man is eating food.')[:4])"
    return [float(value) for value in run(python, "-c", code, HF_HUB_OFFLINE="1").split()]


@pytest.mark.packaging
@pytest.mark.timeout(3600)
def test_the_source_distribution_and_its_wheel_work_in_new_environments(tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "tools")
    tools = tmp_path / "tools/bin"
    run(tools / "pip", "install", "build")
    run(tools / "python", "-m", "build", "--sdist", "-o", tmp_path, PROJECT)
    [sdist] = tmp_path.glob("encodle-*.tar.gz")
    model = {str(file.relative_to(MINILM)) for file in MINILM.rglob("*") if file.is_file()}
    folder = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        names = set(archive.getnames())
    assert names >= {f"{folder}/encodle/model/{name}" for name in model}
    assert names >= {f"{folder}/{name}" for name in LICENSES}
    expected = pytest.approx([0.0332, 0.0044, -0.0062, 0.0484], abs=5e-5)  # the digits of README.md
    assert first_values(sdist, tmp_path / "of_sdist") == expected
    run(tools / "pip", "wheel", "--no-deps", "-w", tmp_path, sdist, CARGO_TARGET_DIR=TARGET)
    [wheel] = tmp_path.glob("encodle-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) >= {f"encodle/model/{name}" for name in model}
    assert first_values(wheel, tmp_path / "of_wheel") == expected
