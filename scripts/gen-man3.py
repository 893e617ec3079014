#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""libkvd(3), made of the public headers.

gen-man3.py VERSION HEADER... [--states STATUS_HEADER]

The first HEADER is kvd.h: its opening comment is the description, a comment `---- name ----` begins a
section, and each comment becomes the text of the declarations behind it, until an empty
line. Of STATUS_HEADER only the enumerations are taken: the states and flags that an
engine polls. What the headers use beyond ASCII is in CHARACTERS; anything else is an
error."""
import argparse
import re
import sys

CHARACTERS = {"…": r"\&...", "–": r"\(en", "µ": r"\(mc", "×": r"\(mu", "\\": r"\e",
              "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}
SECTION = re.compile(r"-{2,} (.+?) -{2,}$")
COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
PAGE = (r'''.\" SPDX-License-Identifier: Apache-2.0
.\" Made of the public headers by scripts/gen-man3.py (make docs): change those.
.TH LIBKVD 3 "" "kvd %s" "Library functions"
.SH NAME
libkvd \- client library of the kvd daemon
.SH SYNOPSIS
.nf
.B #include <kvd.h>
.PP
.B cc engine.c $(pkg\-config \-\-cflags \-\-libs libkvd)
.fi''', r'''.SH ENVIRONMENT
.TP
.B KVD_SOCKET
The control socket of a client that is told neither path nor name.
.TP
.B KVD_NAME
The instance, without KVD_SOCKET.
.TP
.B KVD_RUN_DIR
The run directory instead of /run/kvd: its only socket is taken.
.SH SEE ALSO
.BR kvd (8),
.BR kvd\-ctl (1),
.BR kvd.conf (5)''')


def fail(words):
    sys.exit("gen-man3: " + words)


def roff(text):
    """Text as it is, for a line that begins with no request."""
    out = "".join(CHARACTERS.get(c, c) for c in text)
    for c in out:
        if ord(c) > 126:
            fail("no way to say %r of %r" % (c, text))
    return r"\&" + out if out[:1] in (".", "'") else out


def lines_of(comment):
    """The lines of a comment's inside, without its stars."""
    return [re.sub(r"^\s*\* ?", "", line).rstrip() for line in comment.strip().splitlines()]


def paragraphs(comment):
    """Text is filled; indented lines stay as they are; `word   meaning` in a column of its
    own is a list."""
    out, filled, kept = [], [], []

    def flush():
        if filled:
            out.append(("text", " ".join(filled)))
        if kept:
            out.append(("kept", "\n".join(kept)))
        filled.clear()
        kept.clear()
    for line in lines_of(comment):
        if not line:
            flush()
        elif line.startswith("  ") or (kept and line.startswith(" ")):
            if filled:
                flush()
            kept.append(line)
        elif re.match(r"\S.*?\S {3,}\S", line) and not filled:
            kept.append("  " + line)
        elif kept and not filled:
            flush()
            filled.append(line)
        else:
            filled.append(line)
    flush()
    return out


def sentences(text):
    """One a line, as roff wants it; function names in bold."""
    for one in re.split(r"(?<=[.:;!?])\s+(?=[A-Z(])", text):
        line = re.sub(r"(?:-?KVD_[A-Z0-9_]+|kvd_[a-z0-9_]+)(?:\(\))?",
                      lambda m: "\0" + m.group(0) + "\1", one)
        yield roff(line).replace("\0", r"\fB").replace("\1", r"\fR")


def said(comment):
    out = []
    for kind, text in paragraphs(comment):
        out.append(".PP")
        if kind == "text":
            out += sentences(text)
        else:
            first = min(len(x) - len(x.lstrip()) for x in text.splitlines())
            out += [".nf"] + [roff(x[first:]) for x in text.splitlines()] + [".fi"]
    return out


def code(text):
    """A prototype in bold; what has a body as it is."""
    body = "{" in COMMENT.sub("", text)
    lines = []
    for line in text.splitlines():
        line = line.expandtabs(8)
        inside = len(line) - len(line.lstrip())
        if body:
            lines.append(roff(" " * (inside // 2) + line.lstrip()))
        else:
            lines.append(r"\fB%s\fR" % roff(line))
    return [".nf"] + lines + [".fi"]


class Header:
    """Cut into comments and declarations; an empty line ends what a comment belongs to."""

    def __init__(self, path):
        with open(path) as text:
            self.text = text.read()
        self.path = path
        self.opening = self.take_opening()

    def take_opening(self):
        found = [m.group(1) for m in COMMENT.finditer(self.text)]
        for one in found:
            if "SPDX" not in one:
                return one
        fail("%s: no comment at its head" % self.path)

    def body(self):
        """Behind the opening, without preprocessor lines and extern "C"."""
        at = self.text.index(self.opening) + len(self.opening) + 2
        lines, skipped = [], 0
        for line in self.text[at:].splitlines():
            if re.match(r"\s*#\s*if(def)? ", line) and "__cplusplus" in line:
                skipped += 1
            elif skipped and re.match(r"\s*#\s*endif", line):
                skipped -= 1
            elif not skipped and not re.match(r"\s*#", line):
                lines.append(line)
        return "\n".join(lines)

    def blocks(self):
        """Pieces between empty lines, but not inside braces or comments."""
        block, depth, comment = [], 0, False
        for line in self.body().splitlines() + [""]:
            if not line.strip() and depth == 0 and not comment:
                if block:
                    yield block
                block = []
                continue
            if line.strip() or block:
                block.append(line)
            bare = COMMENT.sub("", line)
            if "/*" in bare:
                comment, bare = True, bare[:bare.index("/*")]
            elif comment and "*/" in bare:
                comment, bare = False, bare[bare.index("*/") + 2:]
            elif comment:
                bare = ""
            depth += bare.count("{") - bare.count("}")
        if block:
            fail("%s: a block does not end" % self.path)


def statements(block):
    """("comment", text) and ("code", text), in order; code ends with `;` outside braces and
    has its own comment of the same line."""
    text, out = "\n".join(block), []
    while text.strip():
        text = text.lstrip("\n ")
        if text.startswith("/*"):
            end = text.index("*/") + 2
            out.append(("comment", text[2:end - 2]))
            text = text[end:]
            continue
        depth, at, comment = 0, 0, False
        while at < len(text):
            two = text[at:at + 2]
            if not comment and two == "/*":
                comment, at = True, at + 2
            elif comment and two == "*/":
                comment, at = False, at + 2
            elif comment:
                at += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                at += 1
                if text[at - 1] == ";" and depth == 0 or text[at - 1] == "}" and depth == 0 \
                        and not text[at:].lstrip().startswith((";", ",")) \
                        and text[at:].strip() == "":
                    break
        else:
            fail("what is %r?" % text[:60])
        tail = re.match(r"[ \t]*/\*.*?\*/", text[at:], re.S)
        if tail:
            at += tail.end()
        out.append(("code", text[:at].strip("\n")))
        text = text[at:]
    return out


def section_of(kind, text):
    found = SECTION.match(text.strip()) if kind == "comment" else None
    return found.group(1) if found else None


def item(pending, codes):
    """Declarations and what is told of them."""
    out = [".PP"]
    for text in codes:
        out += code(text)
    if pending:
        out.append(".RS 4")
        for one in pending:
            out += said(one)
        out.append(".RE")
    return out


def of_block(block):
    out, pending, codes = [], [], []

    def flush():
        if codes:
            out.extend(item(pending, codes))
            pending.clear()
            codes.clear()
    for kind, text in statements(block):
        name = section_of(kind, text)
        if name:
            flush()
            out.append(".SH " + roff(name.upper()))
        elif kind == "comment":
            flush()
            pending.append(text)
        elif re.fullmatch(r"struct \w+;", text):
            continue  # named where it is used
        else:
            codes.append(text)
    flush()
    for one in pending:
        out += said(one)
    return out


def main():
    parser = argparse.ArgumentParser(description="libkvd(3) of the public headers")
    parser.add_argument("version")
    parser.add_argument("headers", nargs="+", type=Header)
    parser.add_argument("--states", type=Header)
    args = parser.parse_args()
    out = [PAGE[0] % args.version, ".SH DESCRIPTION"]
    out += said(re.sub(r"\A\s*\*? ?\S+\.h: ", "", args.headers[0].opening))
    for header in args.headers:
        for block in header.blocks():
            out += of_block(block)
    if args.states:
        out.append(".SH STATES AND FLAGS")
        for block in args.states.blocks():
            if block[0].startswith("enum"):
                out += of_block(block)
    out.append(PAGE[1])
    print("\n".join(out))


main()
