"""Test the package as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradcam

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_no_torch() -> None:
    assert python("import sys, gradcam; print(sorted({'torch', 'numpy', 'cv2', 'PIL'} & set(sys.modules)))") == "[]\n"


def test_the_core_path_is_short() -> None:
    # It can be read in an afternoon only if it leaves out what detectors, text models and batches need.
    code = (
        "import pathlib, sys, torch, torchvision, gradcam\n"
        "gradcam.explain(torchvision.models.resnet18().eval(), torch.rand(1, 3, 224, 224), 'layer4')\n"
        "files = [module.__file__ for name, module in sys.modules.items() if name.split('.')[0] == 'gradcam']\n"
        "print(sum(len(pathlib.Path(file).read_text('utf-8').splitlines()) for file in files))"
    )
    assert int(python(code)) <= 6000


@pytest.mark.parametrize("name", sorted(set(gradcam.__all__) - {"__version__"}))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert name in dir(gradcam)
    value = getattr(gradcam, name)
    assert value is getattr(gradcam, name)
    assert name == "METHODS" or value.__doc__


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'gradcam' has no attribute 'nothing'"):
        _ = gradcam.nothing


OPTIONAL = ("cloudpickle", "lazy_loader", "matplotlib", "tqdm")


def test_explaining_needs_no_optional_package(tmp_path: Path) -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL})); "
    explain = "import gradcam; print(gradcam.load_classifier(device='cpu').explain(sys.argv[1]).heatmaps.shape)"
    command = "from gradcam.cli import main; main()"
    image = str(ROOT / "assets" / "coffee.jpg")
    # Explaining one image imports no module for archives and object stores.
    stores = ("gradcam.sources.archives", "gradcam.sources.contents", "gradcam.storage.fetch", "gradcam.storage.store")
    block_stores = f"import sys; sys.modules.update(dict.fromkeys({stores})); "
    for code, *arguments in ([explain], [block_stores + command, "run"], [command, "batch", "-o", "out"]):
        result = subprocess.run(
            [sys.executable, "-c", block + code, *arguments, image],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")


def test_no_public_name_is_overwritten_by_a_module() -> None:
    import importlib

    for path in (ROOT / "gradcam").iterdir():
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            importlib.import_module(f"gradcam.{path.stem}")
    assert callable(gradcam.overlay)
    assert callable(gradcam.explain)


def test_the_version_is_said() -> None:
    command = [sys.executable, "-m", "gradcam", "--version"]
    assert gradcam.__version__ in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"## [{gradcam.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text()


def read_texts() -> dict[str, str]:
    """Return the text of the repository's files by path, without generated files."""
    folders = (".ci", ".github", "assets", "docs", "examples", "gradcam", "scripts", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [path for path in ROOT.iterdir() if path.suffix in (".md", ".txt", ".toml", ".cff")]
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes().decode("utf-8", "replace")
        for path in paths
        if not {"_build", "__pycache__"} & set(path.parts)
    }


def test_nothing_is_installed_by_a_name_that_is_not_published() -> None:
    """Check that no instruction installs `gradcam` from PyPI, where it is another package."""
    texts = read_texts()
    name = re.findall(r'^name = "(.+)"$', texts["pyproject.toml"], re.M)[0]
    mentions = {path for path, text in texts.items() if re.search(name.replace("-", "[-_.]"), text)}
    assert mentions - {"pyproject.toml", ".github/workflows/release.yml"} == {"CONTRIBUTING.md"}
    assert texts["CONTRIBUTING.md"].count(name) == texts["pyproject.toml"].count(name) == 1
    by_name = re.compile(r"""pip install(?: (?!of )[^\s`#&]+)*? ["']?gradcam(?=["'`\[=<>~!@\s]|$)""", re.M)
    assert [f"{path}: {match[0]}" for path, text in texts.items() for match in by_name.finditer(text)] == []
