"""GitHub's workflows fit their schema; what they name is there, and what they run is pinned."""
import ast
import re
import sys
from datetime import datetime

import pytest
import yaml
from conftest import ROOT, call, export_py
from pyflakes.checker import Checker

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def jobs(path):
    """(name, job, its matrix as a list of dicts) of a workflow's jobs."""
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        yield name, job, job.get("strategy", {}).get("matrix", {}).get("include", [{}])


def scripts(path):
    """Of each step with a script, this with the matrix's values; also where env hands them over."""
    for _, job, matrix in jobs(path):
        for step in job["steps"]:
            for row in matrix if "run" in step else ():
                values = {f"${{{{ matrix.{key} }}}}": value for key, value in row.items()}
                env = {key: values.get(value, value) for key, value in job.get("env", {}).items()}
                yield re.sub(r"\$(\w+)", lambda name: str(env.get(name[1], name[0])), step["run"])


@each_workflow
def test_schema(path):
    pytest.importorskip("check_jsonschema")
    run = call(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", path)
    assert run.returncode == 0, run.stdout + run.stderr


def test_dependabot():
    """The pinned actions are renewed."""
    pytest.importorskip("check_jsonschema")
    path = ROOT / ".github/dependabot.yml"
    run = call(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.dependabot", path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [update["package-ecosystem"] for update in yaml.safe_load(path.read_text())["updates"]] == ["github-actions"]


@each_workflow
def test_jobs(path):
    """Each ends some day, has no more rights than it says, and needs what exists; an action is a commit."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for _, job, matrix in jobs(path):
        pages = {"pages", "id-token"} if path.name == "pages.yml" else set()
        assert job["timeout-minutes"] and job["permissions"].keys() == {"contents"} | pages
        assert job.get("needs", "draft") in workflow["jobs"] | {"draft": None}
        text = yaml.safe_dump(job)
        used = set(re.findall(r"\bmatrix\.(\w+)", text))
        assert used <= set().union(*matrix) and set().union(*matrix) <= used
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")]      # by env instead
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


@each_workflow
def test_scripts(path):
    """They are shell, and make knows their targets."""
    targets = set()
    for script in scripts(path):
        shell = call("bash", "-n", "-c", script)
        assert shell.returncode == 0, shell.stderr
        targets |= set(re.findall(r"^make( -s)?((?: [^ \n]+)*)$", re.sub(r' (&&|>) .*|"', "", script), re.M))
    assert targets
    for quiet, arguments in targets:
        made = call("make", "-n", *arguments.split(), cwd=ROOT)
        assert made.returncode == 0, made.stderr


def test_a_release_has_notes():
    """The changelog's newest part is this version's, which export.py has, too, and goes to the release alone."""
    version, = re.findall(r'^#define VERSION "(.*)"$', (ROOT / "qwen3.c").read_text(), re.M)
    changelog = (ROOT / ".github/CHANGELOG.md").read_text()
    newest, older = re.findall(r"^## (\d\S*)", changelog, re.M)[:2]
    assert newest == version == export_py.VERSION
    def notes(tag):
        return call("make", "-s", "notes", f"TAG={tag}", cwd=ROOT)
    said = notes(f"v{version}")
    assert said.returncode == 0 and said.stdout.strip() in changelog and "## " not in said.stdout, said
    refused = notes(f"v{older}")
    assert refused.returncode != 0 and refused.stdout == "" and f"expected v{version}" in refused.stderr


def test_the_release_is_what_make_builds():
    """Of each kind that the Makefile knows one program, built and, where its runner can, asked."""
    kinds = re.findall(r"^release-([\w-]+): BUILD", (ROOT / "Makefile").read_text(), re.M)
    (matrix,) = (matrix for name, _, matrix in jobs(ROOT / ".github/workflows/release.yml") if name == "build")
    assert sorted(row["name"] for row in matrix) == sorted(kinds)


def test_the_newest_versions():
    """uv takes no package of export.py that is newer than its release's day."""
    block = (ROOT / "export.py").read_text().partition('"""')[0]
    day, = re.findall(r'^# \[tool\.uv\]\n# exclude-newer = "(\d{4}-\d\d-\d\dT00:00:00Z)"\n# ///$', block, re.M)
    assert datetime.fromisoformat(day.removesuffix("Z")) < datetime.now()


def test_the_oldest_versions():
    """One job has Python and the packages that export.py's block begins with; OLDEST=1 takes these."""
    block = (ROOT / "export.py").read_text().partition('"""')[0]
    oldest = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["oldest"]
    needs = re.search('requires-python = ">=([0-9]+)[.]([0-9]+)"', block).groups()
    assert oldest["env"] == {"OLDEST": 1} and any(f"({', '.join(needs)})" in step.get("run", "") for step in oldest["steps"])
    code = "import setup_venv as s; print(*s.inline_dependencies(s.read(s.EXPORT)))"
    found = call(sys.executable, "-c", code, cwd=ROOT / "tests", env={"OLDEST": "1"}).stdout
    assert found.split() == [package.replace(">=", "==") for package in re.findall('^#   "(.*)",$', block, re.M)] != []


@pytest.mark.parametrize("path", [ROOT / "export.py", *(ROOT / "tests").glob("*.py"), *(ROOT / "tests").glob("tiny*/*.py")],
                         ids=lambda path: path.name)
def test_pyflakes(path):
    """No name is unused or unknown, but where a line says noqa: imports for others, fixtures."""
    lines = path.read_text().splitlines()
    found = Checker(ast.parse("\n".join(lines)), str(path)).messages
    assert not [str(message) for message in found if "noqa" not in lines[message.lineno - 1]]
