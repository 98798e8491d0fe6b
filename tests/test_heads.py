"""The README's picture of the tiny model's heads says what the model does now."""
from xml.etree import ElementTree

import heads


def test_picture():
    """Its texts: the tokens, the heads that find the name, the answer without these."""
    def texts(svg):
        return [(text.get("class"), text.text) for text in svg.iter("{http://www.w3.org/2000/svg}text")]

    drawn = ElementTree.fromstring(heads.draw(*heads.shares()))
    assert texts(ElementTree.parse(heads.PICTURE)) == texts(drawn), "changed: python tests/heads.py, and look at it"
    assert len([style for style, _ in texts(drawn) if "found" in style]) == 8
