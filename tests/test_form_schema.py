"""`export.py --form`: the expression of a JSON Schema matches valid values only, and those that models write."""
import datetime
import itertools
import json
import random
import re
import subprocess
import sys

import jsonschema
import pytest
from conftest import ROOT, export_py

parser = getattr(re, "_parser", None) or re.sre_parse      # Python's own, which has no public name
WORDS = ["name", "größe", "x\"y", "back\\slash", "日本", "n/a", "tab\t", "100%", "e-mail", "$ref", "😀", "(a|b)*[^c]{2}.", "type"]
VALUES = [1, 2.5, "a", "b\"", "ü", None, True, False, "two words", -3, [1, "x"], {"k": 1}, "", "\n", "a\\b", "\u2028", "^$"]
PATTERNS = [r"^[a-z]+$", r"^\d{3}-\d{4}$", r"^(foo|bar)?$", r"^[^a]{2,5}$", r"^\S+ \S+$", "b", "^x", "z$", "^.{1,4}$", r'^["\\]{1,2}$',
            r"^\w+?\s\w+$", "^[à-ÿ]+$", r"^[^\d]*$", "a|b", r"\W", "", "^$", r"^(?:\x41|\u00e9|[\u4e00-\u4e20]){2}$", r"^a\.b\/c\$$",
            r"^[\]\-^]+$", r"^\D\n$", r"^[^\W\d]{1,3}$", "^\n?}]$"]
ESCAPE = r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|n|[^\w\s])"
SYNTAX = re.compile(rf"(?:\(\?:|[)|]|\[\^?(?:{ESCAPE}|[^\\\[\]])+\]|(?:[?*+]|\{{\d+(?:,\d*)?\}})(?![?*+{{])|{ESCAPE}|[^][\\()|?*+{{}}^$.\x00-\x1f])*")   # of -g
FORMATS = {"date": "2024-02-29", "time": "23:59:59.5+02:00", "date-time": "9999-12-31T00:00:00Z", "email": "a.b+c@x-y.example.org",
           "uuid": "01234567-89AB-cdef-0123-456789abcdef", "ipv4": "255.0.19.200"}


def sample(r, tree):
    """A text that an expression matches: it walks the tree that Python's parser makes."""
    def one_of(items):
        kind, value = r.choice([x for x in items if str(x[0]) != "NEGATE"])
        return chr(r.randint(*value) if str(kind) == "RANGE" else value)

    def draw(kind, value):
        if kind in ("LITERAL", "IN") and not (kind == "IN" and str(value[0][0]) == "NEGATE"):
            return chr(value) if kind == "LITERAL" else one_of(value)
        if kind == "IN":
            inside = [(v, v) if str(k) == "LITERAL" else v for k, v in value[1:]]
            return chr(next(c for c in iter(lambda: r.choice([r.randint(32, 126), r.randint(0, 0xd7ff), 0x1f600]), None)
                            if not any(a <= c <= b for a, b in inside)))
        if kind == "BRANCH":
            return sample(r, r.choice(value[1]))
        if kind == "SUBPATTERN":
            return sample(r, value[3])
        assert kind == "MAX_REPEAT", kind
        least, most, what = value
        return "".join(sample(r, what) for _ in range(r.randint(least, min(int(most), least + 3))))
    return "".join(draw(str(kind), value) for kind, value in tree)


def random_schema(r, depth, defs):
    kind = r.choice(["plain", "enum", "const", "format", "pattern", "length", "integer", "number", "types"]
                    + ["array", "object", "anyOf", "ref", "oneOf", "object", "allOf"] * (depth > 0))
    more = lambda: random_schema(r, depth - 1, defs)  # noqa: E731
    low = r.choice([0, 1, -5, -100, 7, 99, 1000, -123456, 10 ** 13])
    limits = {r.choice(["minimum", "exclusiveMinimum"]): low, r.choice(["maximum", "exclusiveMaximum"]): low + 2 + r.choice([0, 1, 5, 99, 12345])}
    limits = dict(r.sample(sorted(limits.items()), r.randint(0, 2)))
    names, n = r.sample(WORDS, r.randint(0, 5)), r.randint(0, 4)
    if kind == "ref":
        name = f"D/{len(defs)}~"
        defs[name] = True
        defs[name] = more()
        return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}
    return {
        "plain": lambda: {"type": r.choice(["string", "integer", "number", "boolean", "null"]), "title": "T"},
        "enum": lambda: {"enum": r.sample(VALUES, r.randint(1, 5))}, "const": lambda: {"const": r.choice(VALUES)},
        "format": lambda: {"type": "string", "format": r.choice([*FORMATS])}, "allOf": lambda: {"allOf": [more()]},
        "pattern": lambda: {"type": ["string"], "pattern": r.choice(PATTERNS)},
        "length": lambda: {"type": "string", "minLength": n, **({"maxLength": n + r.randint(0, 9)} if low else {})},
        "integer": lambda: {"type": "integer", **limits}, "number": lambda: {"type": "number", **({} if low > 10 ** 9 else limits)},
        "types": lambda: {"type": r.sample(["string", "null", "integer", "boolean"], r.randint(1, 3)), "description": "x"},
        "array": lambda: {"type": "array", "items": more(), "minItems": n % 3, **({"maxItems": n % 3 + r.randint(0, 3)} if low else {})},
        "object": lambda: {"type": "object", "properties": {name: more() for name in names}, "additionalProperties": False,
                           **({"required": [name for name in names if r.random() < .5]} if low else {})},
        "anyOf": lambda: {"anyOf": [more() for _ in range(r.randint(1, 3))], "default": None},
        "oneOf": lambda: {"oneOf": [{"type": "null"}, {"const": 1}, {"type": "object", "required": ["k"], "properties": {"k": {"const": "c"}, "v": more()}},
                                    {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["d", 1]}}, "additionalProperties": False}]},
    }[kind]()


def make_value(r, schema, root):
    """A valid value of a schema, but None where that is not simple."""
    if "$ref" in schema:
        return make_value(r, root["$defs"][schema["$ref"][8:].replace("~1", "/").replace("~0", "~")], root)
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return r.choice(values)
    if several := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return make_value(r, r.choice(several), root)
    kind = schema["type"] if type(schema["type"]) is str else r.choice(schema["type"])
    n = r.randint(schema.get("minLength", 0), schema.get("maxLength", 20))
    low = schema.get("minimum", schema.get("exclusiveMinimum", schema.get("maximum", schema.get("exclusiveMaximum", 10 ** 6)) - 9))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 10))
    return {"null": lambda: None, "boolean": lambda: r.random() < .5, "integer": lambda: r.randint(low, high),
            "number": lambda: r.choice([r.randint(low, high), round(r.uniform(low, high), r.randint(0, 6)), low + 1.0]),
            "string": lambda: FORMATS.get(schema.get("format")) or "".join(r.choice("aZ0 ß\"\\/\n\t😀日\x7f" + "\u2028\x01" * ("pattern" not in schema)) for _ in range(n)),
            "array": lambda: [make_value(r, schema["items"], root) for _ in range(r.randint(schema["minItems"], schema.get("maxItems", 5)))],
            "object": lambda: {name: make_value(r, part, root) for name, part in schema["properties"].items()
                               if name in schema.get("required", []) or r.random() < .5}}[kind]()


def is_valid(schema, text):
    """By jsonschema and its formats, and by Python's datetime, which knows those that it leaves out."""
    def refuse(number):
        raise ValueError(number)
    try:
        value = json.loads(text, parse_constant=refuse)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(value)
        if schema.get("format") in ("time", "date-time"):
            datetime.datetime.fromisoformat(("2000-01-01T" if schema["format"] == "time" else "") + value.replace("Z", "+00:00"))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("seed", range(8))
def test_random_schemas(seed):
    r, matched, valid, mutated = random.Random(seed), 0, 0, [0, 0]
    for _ in range(60):
        defs = {}
        schema = random_schema(r, 3, defs)
        schema = schema | ({"$defs": defs} if defs else {})
        form = export_py.Part("$", schema, schema).write()
        assert SYNTAX.fullmatch(form), form
        compiled, tree = re.compile(form), parser.parse(form)
        for _ in range(4):
            text = sample(r, tree)
            assert compiled.fullmatch(text) and is_valid(schema, text), (schema, text)
            matched += 1
            for _ in range(10):
                at, n = r.randint(0, len(text)), r.randint(0, 2)
                other = text[:at] + r.choice(["", "", *",:[]{}\" \\0.-9x\n", text[at - 1:at]]) + text[at + n:]
                fits = bool(compiled.fullmatch(other))
                assert not fits or is_valid(schema, other), (schema, other)
                mutated[fits] += 1
        for _ in range(6):
            value = make_value(r, schema, schema)
            if "e" not in json.dumps(value) and is_valid(schema, json.dumps(value)):
                for how in {}, {"indent": 2}, {"indent": 4}, {"separators": (",", ":")}:
                    if how and any(type(x) in (dict, list) for x in VALUES if repr(x) in repr(schema)):
                        continue                             # a value of enum has one text
                    text = json.dumps(value, ensure_ascii=False, **how)
                    assert compiled.fullmatch(text), (schema, text)
                valid += 1
    assert matched == 240 and valid > 80 and min(mutated) > 100, (matched, valid, mutated)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds(kind):
    """Each whole number and half around every two bounds."""
    for low, high, a, b in itertools.product((None, -105, -9, -1, 0, 1, 8, 1000), (None, -100, 0, 1, 10, 109, 1001), ("m", "exclusiveM"), ("m", "exclusiveM")):
        schema = {"type": kind} | ({} if low is None else {f"{a}inimum": low}) | ({} if high is None else {f"{b}aximum": high})
        bounds = range(min(low or 0, high or 0) - 20, max(low or 0, high or 0) + 20)
        inside = {n for n in bounds if not ((low is not None and (n < low or n == low and a != "m")) or (high is not None and (n > high or n == high and b != "m")))}
        halves = {n + .5 for n in bounds if kind == "number" and (low is None or n >= low) and (high is None or n < high)}
        if not inside | halves:
            assert "no value matches" in refuse(schema)
            continue
        compiled = re.compile(export_py.Part("$", schema, schema).write())
        assert {n for n in bounds if compiled.fullmatch(str(n))} == inside, schema
        assert {n + .5 for n in bounds if compiled.fullmatch(str(n + .5))} == halves, schema


def refuse(schema):
    with pytest.raises(export_py.Refused) as error:
        export_py.Part("$", schema, schema).write()
    return str(error.value)


A, B = ({"type": "object", "properties": {"k": {"const": x}}, "required": ["k"]} for x in "ab")


@pytest.mark.parametrize("schema, where", [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "$.uniqueItems: not supported"),
    ({"type": "string", "format": "uri"}, "$.format: "), ({"type": "string", "pattern": "(?=a)"}, "$.pattern: "),
    *[({"type": "string", "pattern": x}, "$.pattern: ") for x in
      ("(?!a)b", r"(a)\1", r"\bx", "a*+", "a{2", "(", ")", "[]a]", "(?i)a", r"\p{L}", "^a|b$", "a^b", "a$b", "(?P<x>a)", r"[^\s\S]", "*a", "a**")],
    ({"type": "integer", "minimum": 3, "maximum": 2}, "$: no value matches"), ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "$: no value"),
    ({"type": "number", "minimum": .5}, "$.minimum: "), ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "$.exclusiveMinimum: "),
    ({"type": "number", "maximum": "3"}, "$.maximum: "), ({"type": "integer", "multipleOf": 2}, "$.multipleOf: not"),
    ({"enum": []}, "$.enum: "), ({"anyOf": []}, "$.anyOf: "), ({"type": []}, "$"), ({"type": "array"}, "$"), ({}, "$: any value "), (True, "$: "),
    ({"type": "strin"}, "$.type: "), ({"type": ["string", 3]}, "$.type: "), ({"type": {"a": 1}}, "$"), ({"$ref": "x"}, "$.$ref: "), ({"$ref": "#/$defs/A"}, "$.$ref: "),
    ({"anyOf": [{"type": "string"}], "type": "string"}, "$.type: not supported"), ({"type": "object", "required": ["x"]}, "$.required[0]: "),
    ({"type": "object", "additionalProperties": {"type": "string"}}, "$.additionalProperties: "),
    ({"type": "object", "properties": {"a b": {"type": "string", "minLength": 3, "maxLength": 1}}}, "$.properties[\"a b\"].minLength: "),
    ({"type": "object", "properties": {"x": {"type": "string", "enum": ["a", 1]}}}, "$.properties.x.enum[1]: contradicts type"),
    ({"const": None, "type": "integer"}, "$.const: contradicts"), ({"const": "a", "enum": ["a", "b"]}, "$.const: contradicts enum"), ({"type": "string", "minLength": -1}, "$.minLength: "),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1.5}, "$.minItems: "), ({"type": "string", "minimum": 1}, "$.minimum: not supported"),
    ({"properties": {}}, '$.properties: not supported, expected "type": "object"'), ({"openapi": "3.0"}, "$.openapi: not supported, expected one of its schemas"),
    ({"allOf": [A, B]}, "$.allOf: "), ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf[1]: oneOf"), ({"enum": ["a"], "minLength": 2}, "$.minLength: "),
    ({"oneOf": [A, B | {"required": []}, B]}, "$.oneOf[2]: oneOf"), ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "$.oneOf[1]: oneOf"),
    ({"oneOf": [{"const": True}, {"const": 1}, {"const": 2}, {"const": 1}]}, "$.oneOf[3]: oneOf"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "$.maxLength: "), ({"type": "object", "properties": {"x": False}}, "$.properties.x: "),
    ({"type": "array", "items": [{"type": "null"}]}, "$.items: "), ({"const": "\ud800"}, "$"), ({"const": float("inf")}, "$"), ({"enum": "abc"}, "$.enum: "), ({"type": "object"}, "$: any members"), ({"type": [], "enum": ["a"]}, "$.enum: no type"), ({"not": {"type": "null"}}, "$.not: not supported"), ({"type": "string", "nullable": True}, '$.nullable: not supported, expected "type": [..., "null"]'),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}}, "$.$defs.A"),
    ({"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)} | {"40": {"type": "null"}}}, "$.$defs"),
    ({"$ref": "#/$defs/0", "$defs": {str(n): {"type": "array", "items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(40)} | {"40": {"type": "null"}}}, "$.$defs"),
], ids=lambda x: json.dumps(x)[:60])
def test_what_is_refused(schema, where):
    whole = {"type": "object", "properties": {"outer": schema}} | ({"$defs": schema["$defs"]} if schema is not True and "$defs" in schema else {})
    for one, place in (schema, where), (whole, where if "$.$defs" in where else where.replace("$", "$.properties.outer", 1)):
        assert refuse(one).startswith(place), refuse(one)


PYDANTIC = json.loads("""{"$defs": {"Cat": {"properties": {"kind": {"const": "cat", "default": "cat", "title": "Kind", "type": "string"},
 "lives": {"title": "Lives", "type": "integer"}}, "required": ["lives"], "title": "Cat", "type": "object"}, "Dog": {"properties": {"kind": {
 "const": "dog", "enum": ["dog"], "default": "dog", "title": "Kind", "type": "string"}}, "title": "Dog", "type": "object"}, "Mood": {"enum": ["angry", "ok"],
 "title": "Mood", "type": "string"}}, "description": "A row.", "properties": {"id": {"format": "uuid", "title": "Id", "type": "string"}, "day": {"anyOf":
 [{"format": "date", "type": "string"}, {"type": "null"}], "default": null, "title": "Day"}, "mood": {"$ref": "#/$defs/Mood", "default": "ok"},
 "pet": {"discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/Cat"},
 {"$ref": "#/$defs/Dog"}], "title": "Pet"}, "price": {"exclusiveMinimum": 0, "title": "Price", "type": "number"}, "tags": {"default": [], "items":
 {"$ref": "#/$defs/Mood"}, "maxItems": 3, "title": "Tags", "type": "array"}}, "required": ["id", "pet", "price"], "title": "Order", "type": "object"}""")


def test_hostile_schemas():
    """Alternatives inside others are looked at once; a pattern's letters, too; Python's warnings are not the user's."""
    def nest(depth, more):
        return {str(n): {"oneOf": [{"type": "object", "properties": {"k": {"$ref": f"#/$defs/{n - 1}"}, "t": {"const": x}}, "required": ["k", "t"]}
                                   for x in range(2)]} if n else {"oneOf": [{"const": 1}, {"const": more}]} for n in range(depth + 1)}
    done = [subprocess.run([sys.executable, "-I", "-S", ROOT / "export.py", "--form", "-"], input=json.dumps(schema), capture_output=True,
                           encoding="utf-8", timeout=20) for schema in (
        {"$ref": "#/$defs/4", "$defs": nest(4, 2)}, {"$ref": "#/$defs/30", "$defs": nest(30, 2)}, {"$ref": "#/$defs/30", "$defs": nest(30, 1)},
        {"type": "string", "pattern": "".join(map(chr, range(0x4e00, 0x4e00 + 400)))}, {"type": "string", "pattern": "^[^a-z&&[b]$"})]
    assert [x.returncode for x in done] == [0, 1, 1, 0, 0] and [x.stderr.count("\n") for x in done] == [0, 1, 1, 0, 0], done
    assert "too large" in done[1].stderr and "$.$defs[\"0\"].oneOf[1]: oneOf, expected nothing that may be of oneOf[0]" in done[2].stderr
    assert re.fullmatch(done[4].stdout[:-1], '"&"') is None and re.fullmatch(done[4].stdout[:-1], '"A"')


def test_command_line(tmp_path):
    """It needs no packages. One line comes out, or one line says why not."""
    def run(*args, stdin=""):
        return subprocess.run([sys.executable, "-I", "-S", ROOT / "export.py", *args], input=stdin, capture_output=True, encoding="utf-8")
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(PYDANTIC))
    done = run("--form", path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1
    assert run("--form", "-", stdin=json.dumps(PYDANTIC)).stdout == run(f"--form={path}").stdout == done.stdout
    row = {"id": "0" * 8 + "-0000" * 3 + "-" + "0" * 12, "day": "2024-02-29", "pet": {"kind": "cat", "lives": 9}, "price": 0.05, "tags": ["ok"]}
    assert re.fullmatch(done.stdout[:-1], json.dumps(row)) and re.fullmatch(done.stdout[:-1], json.dumps(row | {"day": None}, indent=2))
    for wrong in {"pet": {"lives": 9}}, {"pet": {"kind": "dog", "lives": 9}}, {"price": 0.0}, {"day": "2023-02-29"}, {"tags": ["ok"] * 4}:
        assert not re.fullmatch(done.stdout[:-1], json.dumps(row | wrong)), wrong
    for args, stdin, status, words in ((("--form", "-"), '{"type": "string", "format": "x\\u001b"}', 1, "-: $.format: "), (("--form", "-"), "{", 1, "-: "), (("--form", "-"), '{"type": "null", "type": "null"}', 1, "'type' twice"), (("--form", "-"), "[" * 99999, 1, "-: "),
                                       (("--form", tmp_path / "none.json"), "", 1, "none.json: No such file or directory, expected a file with"),
                                       (("--form", "-"), '{"type": "function", "function": {"parameters": {"type": "object"}}}', 1, "jq .function.parameters FILE |"), (("--form",), "", 2, "expected"),
                                       (("SOURCE", "--form", path), "", 2, "expected"), (("--form", "-"), "\udcff", 1, "-: ")):
        done = run(*args, stdin=stdin) if "\udcff" not in stdin else run(*args, stdin="\xff{")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1) and words in done.stderr and "\x1b" not in done.stderr, done
