"""A hundred JSON schemas of the shapes that services ask for. Strings, arrays and numbers are bounded: each answer ends."""

import itertools


def text(most=12, least=0, **more):
    return {"type": "string", "minLength": least, "maxLength": most, **more}


def whole(least=0, most=99):
    return {"type": "integer", "minimum": least, "maximum": most}


def halves(least, most):
    return {"type": "number", "minimum": least, "maximum": most, "multipleOf": 0.5}


def many(items, most=3, least=0):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(optional=(), **properties):
    """An object that has nothing but these properties; ``optional`` are the names of those that it may lack."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


COLOURS = {"enum": ["red", "green", "blue", "dark grey"]}
FLAG = {"type": "boolean"}
VALUES = {
    "a short text": text(),
    "a longer text": text(30, 5),
    "letters": text(pattern="^[a-z]{2,8}$"),
    "a whole number": whole(),
    "a number below zero": whole(-50, -10),
    "halves": halves(-2, 7.5),
    "a truth value": FLAG,
    "nothing": {"type": "null"},
    "a colour": COLOURS,
    "mixed values": {"enum": [1, "one", None, True, "ünö", "一"]},
    "a constant": {"const": 'fixed "text" \\ here'},
    "a day": {"type": "string", "format": "date"},
    "an address": {"type": "string", "format": "ipv4"},
    "text or number": {"type": ["string", "integer"], "maxLength": 6, "minimum": 0, "maximum": 9},
    "text or nothing": {"anyOf": [text(8), {"type": "null"}]},
}
SHAPES = {
    "alone": lambda value: value,
    "in a record": lambda value: record(value=value),
    "in a list": many,
    "in a list that is not empty": lambda value: many(value, most=2, least=1),
    "optional": lambda value: record(("note", "value"), name=text(8), note=text(8), value=value),
    "nested": lambda value: record(id=whole(), body=record(head=text(6), value=value)),
}
WHOLE = {
    "a person": record(("age",), name=text(20, 1), age=whole(0, 130), email=text(20)),
    "a tool call": record(name={"enum": ["search", "open"]}, arguments=record(query=text(24), limit=whole(1, 10))),
    "an order": record(items=many(record(sku=text(8), count=whole(1, 9)), 2, 1), total=halves(0, 500), paid=FLAG),
    "a tree": {
        "$defs": {
            "leaf": record(label=text(5)),
            "node": record(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
        },
        "$ref": "#/$defs/node",
    },
    "a choice of records": {
        "anyOf": [
            record(kind={"const": "cat"}, lives=whole(1, 9)),
            record(kind={"const": "dog"}, tricks=many(text(6), 2)),
        ]
    },
    "a pair": {"type": "array", "prefixItems": [text(6), whole()], "items": False, "minItems": 2, "maxItems": 2},
    "keys of many scripts": record(**{"größe": whole(), "名前": text(6), "цвет": COLOURS, "emoji 🙂": FLAG}),
    "keys that are escaped": record(**{'a "quoted" key': whole(), "back\\slash": FLAG, "new\nline": text(4)}),
    "deep": record(a=record(b=record(c=record(d=many(many(whole(0, 9), 2), 2))))),
    "empty": record(),
}
SCHEMAS = {
    f"{name}, {shape}": make(value)
    for (name, value), (shape, make) in itertools.product(VALUES.items(), SHAPES.items())
} | WHOLE
"""Their names are unique; 15 values in 6 shapes, and 10 of their own."""
