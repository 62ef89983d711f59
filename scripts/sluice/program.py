"""Where the program `sluice` is, and where these scripts are: in a checkout, or installed beside the program."""

import os
import shutil

SCRIPTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(SCRIPTS)  # of the checkout, or PREFIX/share/sluice
IN_CHECKOUT = os.path.exists(os.path.join(ROOT, "CMakeLists.txt"))


class NoProgram(Exception):
    """The program is not where it was looked for; the message says what to do."""


def find(given: str | None = None) -> str:
    """Absolute path of the program: `given` (a path, or a name in PATH), SLUICE or SLUICE_BINARY in the environment, build/sluice
    of the checkout, bin/sluice of the installation, sluice in PATH. Raises NoProgram."""
    named = given or os.environ.get("SLUICE") or os.environ.get("SLUICE_BINARY")
    if named:
        found = os.path.abspath(named if os.sep in named else shutil.which(named) or named)
        places = [found]
    else:
        places = [os.path.join(ROOT, "build", "sluice")] if IN_CHECKOUT else []
        places.append(os.path.normpath(os.path.join(ROOT, os.pardir, os.pardir, "bin", "sluice")))
        places += [path for path in [shutil.which("sluice")] if path]
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return place
    raise NoProgram(
        f"no program {places[0]}; build it (scripts/build release), or say where it is: SLUICE in the environment"
    )


def working_folder() -> str:
    """What paths inside configurations and sweep files are relative to: the checkout, or, for installed scripts, the folder in
    which the user stands."""
    return ROOT if IN_CHECKOUT else os.getcwd()
