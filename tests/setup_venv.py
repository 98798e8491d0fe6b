"""Make tests/.venv with what export.py and the tests need; nothing to do when it is up to date.

Run by `make test` with the system's python3 (3.10 or newer); uses the standard library only.
"""
import hashlib
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HERE, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "stamp")
REQUIREMENTS = os.path.join(HERE, "requirements.txt")
EXPORT = os.path.join(HERE, "..", "export.py")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def inline_dependencies(script):
    """The `dependencies` of a script's PEP 723 block. (tomllib came with Python 3.11.)"""
    block = re.search(r"^# /// script$(.*?)^# ///$", script, re.M | re.S)
    found = block and re.search(r'^# dependencies = \[((?:[\s#,]|"[^"]*"|\'[^\']*\')*)\]',
                                block.group(1), re.M)
    if not found:
        sys.exit("tests: export.py: no list of dependencies in its '# /// script' block")
    packages = [a or b for a, b in re.findall(r'"([^"]*)"|\'([^\']*)\'', found.group(1))]
    oldest = os.environ.get("OLDEST")                       # make test OLDEST=1: of each the oldest
    return [package.replace(">=", "==") if oldest else package for package in packages]


def main():
    if sys.version_info < (3, 10):
        sys.exit("tests: python3: too old, expected 3.10 or newer, found %d.%d"
                 % sys.version_info[:2])
    packages = inline_dependencies(read(EXPORT))
    state = repr((packages, read(REQUIREMENTS), sys.version, sys.executable))
    stamp = hashlib.sha256(state.encode()).hexdigest()
    if os.path.exists(PYTHON) and os.path.exists(STAMP) and read(STAMP) == stamp:
        return
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart from python3, with python3-venv)
        import venv
    except ImportError as error:
        sys.exit("tests: python3: module %s is missing (Debian, Ubuntu: apt install python3-venv)"
                 % error.name)
    print("tests: installing into tests/.venv: %s and requirements.txt" % ", ".join(packages))
    sys.stdout.flush()
    venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(VENV)
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.call(pip + ["-r", REQUIREMENTS] + packages) != 0:
        sys.exit("tests: pip could not install the test dependencies")
    with open(STAMP, "w", encoding="utf-8") as file:
        file.write(stamp)


if __name__ == "__main__":
    main()
