# SPDX-License-Identifier: Apache-2.0
"""Names of a space. Two engines share chunks when all names are equal, so everything that changes
KV without changing ids is part of one of them."""
import hashlib
import json
import os
import re

WORD_MAX = 200  # bytes of a space's name
WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|gguf|tensors|npz)$")
BESIDE = re.compile(r"\.(json|py)$")  # files next to weights that change their results
READ = 64 << 20  # bytes that are read of a folder of weights
PIECE = 64 << 10
HEADER_MAX = 16 << 20  # of a safetensors file
KNOWN_MAX = 1024

_known = {}  # results of weights_of(), {path: (files, digest)}


def word(text):
    """A name in the form that a space accepts. A shortened or changed one ends in a digest of all
    of it."""
    text = str(text)
    plain = "".join(c if c.isprintable() else "?" for c in text)
    if plain == text and len(text.encode()) <= WORD_MAX:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    head = plain.encode(errors="replace")[:WORD_MAX - len(digest) - 5]
    return head.decode(errors="ignore") + " … " + digest


def commit_of(loaded, revision):
    """A name for weights of a hub: the loaded commit, or a revision that is one. A branch or a tag
    does not identify weights. None: neither."""
    if loaded:
        return loaded
    return revision if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", revision or "") else None


def weights_of(path):
    """A digest of a file or a folder of weights: names, sizes, times, the headers of safetensors,
    and READ bytes of contents, spread over the files. Contents distinguish copies without times,
    times distinguish changes between the sampled parts. None: there are no weights."""
    if os.path.isfile(path):
        files = [path]
    else:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else ()
        files = [os.path.join(path, name) for name in names
                 if WEIGHTS.search(name) or BESIDE.search(name)]
        if not any(map(WEIGHTS.search, files)):
            return None
    stats = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
             for name, stat in ((os.path.basename(f), os.stat(f)) for f in files)]
    known = _known.get(path)
    if known is None or known[0] != stats:
        digest, share = hashlib.sha256(), max(READ // len(files), PIECE)
        for file, (name, size, time, *_) in zip(files, stats):
            digest.update(("%s %d %d\n" % (name, size, time)).encode())
            read_some(file, size, share, digest)
        if len(_known) >= KNOWN_MAX:
            _known.clear()
        known = _known[path] = stats, digest.hexdigest()
    return known[1]


def read_some(path, size, share, digest):
    """A file's header, and samples of the rest at equal distances."""
    with open(path, "rb") as file:
        if path.endswith(".safetensors"):
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, HEADER_MAX)))
        count = share // PIECE
        if size <= share:
            file.seek(0)
            digest.update(file.read(share))
            return
        for i in range(count):
            file.seek(i * (size - PIECE) // max(count - 1, 1))
            digest.update(file.read(PIECE))


def rope_of(hf_config, length):
    """Position encoding of a model."""
    told = getattr(hf_config, "rope_parameters", None) or {
        name: getattr(hf_config, name) for name in ("rope_theta", "rope_scaling")
        if getattr(hf_config, name, None) is not None}
    text = json.dumps(told, sort_keys=True, default=str) if told else ""
    if "longrope" in text or "dynamic" in text:  # these depend on the longest prompt
        text = "%d of %s" % (length, text)
    return text
