"""Import OpenCV. If this fails, explain the cause, and which commands repair the installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from gradcam.errors import GradcamError

# All of these distributions install the folder `cv2`. A second distribution overwrites files of the first, and its
# removal breaks the first. The best distribution comes first: contrib builds contain all modules, and headless builds
# load on every machine. If several are installed, the error recommends the best of them.
DISTRIBUTIONS = ("opencv-contrib-python-headless", "opencv-contrib-python", "opencv-python-headless", "opencv-python")


def is_installed(distribution: str) -> bool:
    """Return whether pip lists the distribution, even if its files are gone."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def explain_failure(error: Exception) -> str:
    """Explain in one line why OpenCV cannot be loaded, and which commands leave one intact distribution installed."""
    installed = [name for name in DISTRIBUTIONS if is_installed(name)]
    package, advice = next(iter(installed), "opencv-python"), "Install it"
    if "cannot open shared object file" in str(error):
        package, advice = f"{package.removesuffix('-headless')}-headless", "Without a display, use the headless build"
    elif len(installed) > 1:
        advice = f"{' and '.join(installed)} overwrite each other's files, keep one of them"
    elif installed:
        advice = "The files of OpenCV are damaged or missing, install OpenCV again"
    uninstall = f"pip uninstall --yes {' '.join(installed)} && " if installed else ""
    return f"OpenCV cannot be loaded ({error}). {advice}: {uninstall}pip install {package}"


try:
    import cv2

    if not hasattr(cv2, "imdecode"):  # Python can import a folder without `__init__.py`, as an empty package.
        raise ImportError("the folder of cv2 has no binary")
except Exception as error:  # A mixture of versions can raise errors of any type.
    raise GradcamError(explain_failure(error)) from error

__all__ = ["cv2"]
