"""The pictures of README.md are those that pictures.py makes, and are there."""
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ROOT
from pictures import PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name):
    """Equal, but for a pixel: sums of floats differ from machine to machine."""
    made, kept = PICTURES[name](), (ROOT / ".github" / f"{name}.svg").read_text("utf-8")
    ElementTree.fromstring(kept)
    made, kept = (re.split(r"(\d+\.?\d*)", picture) for picture in (made, kept))
    again = f"changed: python tests/pictures.py {name}, and look at it"
    assert made[::2] == kept[::2], again
    assert np.allclose(np.float64(made[1::2]), np.float64(kept[1::2]), rtol=0, atol=1), again


def test_readme():
    shown = set(re.findall(r"\.github/(\w+)\.svg", (ROOT / "README.md").read_text("utf-8")))
    assert shown == set(PICTURES)
