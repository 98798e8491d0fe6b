"""The READMEs' pictures show what the sources, the tiny model and speed.txt say."""
import json
import re
from xml.etree import ElementTree

import pytest
from conftest import ROOT
from pictures import PICTURES

SVG = "{http://www.w3.org/2000/svg}"


def leaves(value, path=""):
    """(where, text or number) of all that is in a JSON value."""
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, f"{path}/{key}")
    else:
        yield path, value


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name):
    """Its data are those computed now (sums of floats differ from machine to machine), its texts are
    there, and the data can be drawn."""
    compute, draw = PICTURES[name]
    picture = ElementTree.parse(ROOT / ".github" / f"{name}.svg")
    kept = json.loads(picture.findtext(f"{SVG}metadata"))
    now = json.loads(json.dumps(compute()))
    expected = {where: value if isinstance(value, str) else pytest.approx(value, rel=0.02, abs=0.01)
                for where, value in leaves(now)}
    assert dict(leaves(kept)) == expected, f"changed: python tests/pictures.py {name}, and look at it"
    shown = {text.text for text in picture.iter(f"{SVG}text")}
    assert shown >= {value for value in expected.values() if isinstance(value, str)} != set()
    assert ElementTree.fromstring(draw(kept).svg(kept)).findtext(f"{SVG}metadata") == json.dumps(
        kept, ensure_ascii=False)


def test_readmes():
    shown = [name for path in ("README.md", "tests/README.md")
             for name in re.findall(r"\.github/(\w+)\.svg", (ROOT / path).read_text("utf-8"))]
    assert sorted(shown) == sorted(PICTURES)
