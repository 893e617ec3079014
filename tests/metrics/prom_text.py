# SPDX-License-Identifier: Apache-2.0
"""A strict reader of Prometheus' text format 0.0.4: more than Prometheus itself asks for.
parse(text) gives {family: Family}; what breaks a rule raises Broken with the line."""
import re

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|\+Inf)\Z")  # as kvd writes them
TYPES = ("counter", "gauge", "histogram")


class Broken(Exception):
    pass


class Family:
    def __init__(self, name):
        self.name, self.type, self.help = name, None, None
        self.samples = {}  # (sample's name, ((label, value), …)): number, in order

    def get(self, suffix="", **labels):
        return self.samples[(self.name + suffix, tuple(sorted(labels.items())))]

    def sum(self, suffix="", **labels):
        return sum(v for (name, pairs), v in self.samples.items()
                   if name == self.name + suffix and set(labels.items()) <= set(pairs))


def unescape(text, quoted):
    """Label values may hold \\\\ \\" \\n, help \\\\ \\n."""
    out, it = [], iter(text)
    for c in it:
        if c != "\\":
            out.append(c)
            continue
        escape = next(it, None)
        known = {"\\": "\\", "n": "\n"}
        if quoted:
            known['"'] = '"'
        if escape not in known:
            raise Broken("a wrong escape: %r" % text)
        out.append(known[escape])
    return "".join(out)


def read_labels(text):
    """`a="b",c="d"`; the text behind the closing brace is the rest."""
    pairs, at = [], 0
    while True:
        end = text.index("=", at)
        name = text[at:end]
        if not LABEL.match(name) or name.startswith("__") or text[end + 1] != '"':
            raise Broken("not a label: %r" % text)
        at = end + 2
        while text[at] != '"':
            at += 2 if text[at] == "\\" else 1
        pairs.append((name, unescape(text[end + 2:at], True)))
        at += 1
        if text[at] == "}":
            break
        if text[at] != ",":
            raise Broken("no comma: %r" % text)
        at += 1
    names = [n for n, _ in pairs]
    if len(set(names)) != len(names):
        raise Broken("a label twice: %r" % text)
    return pairs, text[at + 1:]


def read_sample(line):
    brace = line.find("{")
    if brace >= 0:
        name = line[:brace]
        pairs, rest = read_labels(line[brace + 1:])
        if not rest.startswith(" "):
            raise Broken(line)
        rest = rest[1:]
    else:
        name, _, rest = line.partition(" ")
        pairs = []
    if not NAME.match(name) or not NUMBER.match(rest):
        raise Broken("no name or number: %r" % line)
    return name, tuple(sorted(pairs)), float(rest.replace("+Inf", "inf"))


def check_histogram(family):
    series = {}
    for (name, pairs), value in family.samples.items():
        rest = tuple(p for p in pairs if p[0] != "le")
        one = series.setdefault(rest, {"buckets": []})
        if name == family.name + "_bucket":
            end = dict(pairs)["le"]
            if end != "+Inf" and "." not in end:
                raise Broken("le is no float: %s" % end)
            one["buckets"].append((float(end.replace("+Inf", "inf")), value))
        else:
            one[name[len(family.name):]] = value
    for rest, one in series.items():
        ends = [e for e, _ in one["buckets"]]
        counts = [c for _, c in one["buckets"]]
        if ends != sorted(set(ends)) or ends[-1] != float("inf") or counts != sorted(counts):
            raise Broken("buckets of %s %s" % (family.name, rest))
        if one["_count"] != counts[-1] or "_sum" not in one:
            raise Broken("count or sum of %s %s" % (family.name, rest))
        if one["_count"] == 0 and one["_sum"] != 0:
            raise Broken("a sum of nothing: %s" % family.name)


def check(family):
    suffixes = {"counter": ("",), "gauge": ("",),
                "histogram": ("_bucket", "_sum", "_count")}
    if family.type not in TYPES or not family.help:
        raise Broken("%s has no type or help" % family.name)
    if family.type == "counter" and not family.name.endswith("_total"):
        raise Broken("a counter without _total: %s" % family.name)
    shapes = set()
    for (name, pairs), value in family.samples.items():
        if name not in [family.name + s for s in suffixes[family.type]]:
            raise Broken("%s in %s %s" % (name, family.type, family.name))
        if value != value or value == float("inf"):
            raise Broken("%s is %s" % (name, value))
        shapes.add(tuple(n for n, _ in pairs if n != "le"))
    if len(shapes) > 1:
        raise Broken("%s has series of several shapes: %s" % (family.name, shapes))
    if family.type == "histogram":
        check_histogram(family)


def parse(text):
    families, family = {}, None
    if not text.endswith("\n"):
        raise Broken("the last line does not end")
    for line in text[:-1].split("\n"):
        if line.startswith("#"):
            _, what, name, rest = line.split(" ", 3)
            if not NAME.match(name) or what not in ("HELP", "TYPE"):
                raise Broken(line)
            if not family or family.name != name:
                if name in families:
                    raise Broken("%s is told in two places" % name)
                family = families[name] = Family(name)
            if family.samples:
                raise Broken("behind the samples: " + line)
            field = what.lower()
            if getattr(family, field):
                raise Broken("twice: " + line)
            setattr(family, field, unescape(rest, False) if what == "HELP" else rest)
            continue
        name, pairs, value = read_sample(line)
        if not family or not name.startswith(family.name):
            raise Broken("a sample outside its family: " + line)
        if (name, pairs) in family.samples:
            raise Broken("a series twice: " + line)
        family.samples[(name, pairs)] = value
    for one in families.values():
        check(one)
    return families
