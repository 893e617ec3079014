# SPDX-License-Identifier: Apache-2.0
"""Options, and the names of members on the command line, in files and in the directory."""
import argparse
import re
import urllib.parse
from collections import namedtuple

ROLES = ("prefill", "decode")
ENGINES = ("vllm", "sglang")
POLICIES = ("least-loaded", "prefix", "round-robin", "random")
BOOTSTRAP_PORT = 8998  # SGLang's default
LINES_MAX = 4096
FILE_MAX = 1 << 20

# Address of an engine. bootstrap: (host, port) of its bootstrap server, or None; draining: gets no
# new requests; worker: its name in the directory, or None; load: a Load of kvd.router.pick as of
# the time `sampled`, or None.
Spec = namedtuple("Spec", "role url engine bootstrap draining worker load sampled",
                  defaults=(None, False, None, None, None))


def host_port(text, what="address"):
    """(host, port) of HOST:PORT or [IPV6]:PORT; ValueError."""
    got = re.fullmatch(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})", text)
    if not got or not 0 < int(got[3]) < 65536:
        raise ValueError("%s: %.80r is not HOST:PORT" % (what, text))
    return got[1] or got[2], int(got[3])


def base_url(text):
    """http[s]://HOST:PORT without a path; ValueError."""
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment or \
            parts.path not in ("", "/") or "@" in parts.netloc:
        raise ValueError("url: %.80r is not http://HOST:PORT" % (text,))
    host_port(parts.netloc, "url")
    return "%s://%s" % (parts.scheme, parts.netloc)


def member_spec(text, role, engine):
    """From URL[,bootstrap=HOST:PORT]; ValueError."""
    url, *options = text.split(",")
    url, bootstrap = base_url(url.strip()), None
    for option in options:
        name, _, value = option.strip().partition("=")
        if name != "bootstrap":
            raise ValueError("%.80r: bootstrap=HOST:PORT is the only option" % option)
        bootstrap = host_port(value, "bootstrap")
    return spec_of(role, url, engine, bootstrap)


def spec_of(role, url, engine, bootstrap=None, **more):
    """SGLang's prefill always has a bootstrap server; its default port is used unless one is
    given."""
    if engine == "sglang" and role == "prefill" and bootstrap is None:
        bootstrap = urllib.parse.urlsplit(url).hostname, BOOTSTRAP_PORT
    return Spec(role, url, engine, bootstrap, **more)


def file_specs(path, role, engine):
    """From a file with a member per line; OSError, ValueError with the line."""
    with open(path, encoding="utf-8") as lines:
        text = lines.read(FILE_MAX + 1)
    if len(text) > FILE_MAX or text.count("\n") > LINES_MAX:
        raise ValueError("%s: more than %d bytes or %d lines" % (path, FILE_MAX, LINES_MAX))
    specs = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        try:
            specs += [member_spec(line, role, engine)] if line else []
        except ValueError as why:
            raise ValueError("%s:%d: %s" % (path, number, why)) from None
    return specs


def checked(call):
    def of(text):
        try:
            return call(text)
        except ValueError as why:
            raise argparse.ArgumentTypeError(str(why)) from None
    return of


def _seconds(text):
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError("%s is not a positive number of seconds" % text)
    return value


def _header(text):
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", text):
        raise ValueError("%.80r is not the name of a header" % text)
    return text


def _count(low):
    def of(text):
        value = int(text)
        if not low <= value < 1 << 31:
            raise ValueError("%s is not an integer from %d to %d" % (text, low, (1 << 31) - 1))
        return value
    return checked(of)


TIMES = (
    ("connect-timeout", 3, "timeout of a connection to a member"),
    ("prefill-timeout", 10, "time without any answer from a prefill server after which it counts "
     "as failed, plus one second per 1000 tokens of the prompt"),
    ("first-timeout", 300, "timeout of the first byte of a member's answer"),
    ("deadline", 600, "limit of all tries together, until the answer starts"),
    ("idle-timeout", 60, "longest pause of a stream, of the member or of the client"),
    ("client-timeout", 60, "timeout of receiving a client's body"),
    ("member-wait", 2, "longest wait for an available pair of members"),
    ("queue-timeout", 30, "longest time in the queue"),
    ("drain-timeout", 30, "time for running requests to finish after SIGTERM"),
    ("health-interval", 2, "interval of health checks of a member"),
    ("health-timeout", 5, "timeout of a health check"),
    ("circuit-open", 5, "time that a failed member gets no requests; doubled up to 60 on repeated "
                        "failures"),
    ("affinity-slack", 1, "with --affinity: a session keeps its members while their predicted first "
                          "token is at most this much later than the best"),
)
LIMITS = (
    ("retries", 2, 0, "further tries of a request whose answer has not started"),
    ("health-failures", 3, 1, "consecutive failed health checks after which a member gets no "
                              "requests"),
    ("circuit-failures", 3, 1, "consecutive failed requests after which a member gets no requests "
                               "for circuit-open"),
    ("max-body", 16 << 20, 1, "largest body of a request, in bytes"),
    ("max-bodies", 256 << 20, 1, "memory for bodies of requests without an answer so far, in "
                                 "bytes; beyond: 429"),
    ("max-header", 32 << 10, 256, "largest header of a request, in bytes"),
    ("max-in-flight", 1024, 1, "largest number of running requests"),
    ("max-queued", 1024, 0, "largest number of queued requests; beyond: 429"),
    ("alone-below", 0, 0, "prompts with fewer tokens are computed by decode, without a prefill "
                          "server (vLLM)"),
    ("alone-uncached", 0, 0, "so are prompts of which decode lacks fewer tokens than this; needs "
                             "--policy prefix"),
    ("prefix-memory", 256 << 20, 1 << 20, "with --policy prefix: memory for its index, in bytes"),
)


def parser():
    out = argparse.ArgumentParser(
        prog="python -m kvd.router", allow_abbrev=False,
        description="An OpenAI-compatible router in front of prefill and decode servers.",
        epilog="python -m kvd.router members|flip|publish|pick|scale --help: other commands")
    out.add_argument("--listen", type=checked(host_port), default=("127.0.0.1", 8000),
                     metavar="HOST:PORT", help="address to listen on (127.0.0.1:8000)")
    out.add_argument("--engine", choices=ENGINES, default="vllm",
                     help="engine of members that do not specify one (vllm)")
    for role in ROLES:
        out.add_argument("--" + role, nargs="+", action="extend", default=[], metavar="MEMBER",
                         help="http://HOST:PORT[,bootstrap=HOST:PORT], or @FILE with one per line")
    out.add_argument("--socket", metavar="PATH", help="control socket of a kvd; members are read "
                                                      "from its directory")
    for role in ROLES:
        out.add_argument("--%s-group" % role, default=role, metavar="GROUP",
                         help="group of these members in the directory (%s)" % role)
    out.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="(%s)" % POLICIES[0])
    out.add_argument("--affinity", type=checked(_header), metavar="HEADER",
                     help="header of requests whose value names a session; its requests get the "
                          "pair of the last one (none)")
    out.add_argument("--admin", metavar="PATH", help="Unix socket to create, for the commands "
                                                     "members and flip")
    out.add_argument("--health-path", default="/health", metavar="PATH", help="(/health)")
    for name, value, text in TIMES:
        out.add_argument("--" + name, type=checked(_seconds), default=float(value),
                         metavar="SECONDS", help="%s (%g)" % (text, value))
    for name, value, low, text in LIMITS:
        out.add_argument("--" + name, type=_count(low), default=value, metavar="N",
                         help="%s (%d)" % (text, value))
    return out


def read(argv):
    """The options; argparse exits if they are invalid."""
    options = parser()
    args = options.parse_args(argv)
    args.files, args.static = [], []
    for role in ROLES:
        for word in getattr(args, role):
            try:
                if word.startswith("@"):
                    file_specs(word[1:], role, args.engine)
                    args.files.append((role, word[1:]))
                else:
                    args.static.append(member_spec(word, role, args.engine))
            except (OSError, ValueError) as why:
                options.error("--%s: %s" % (role, why))
        if not getattr(args, role) and not args.socket:
            options.error("--%s or --socket is required" % role)
    for wrong, why in (
            (args.affinity and args.policy not in ("least-loaded", "prefix"),
             "--affinity: --policy %s predicts no times; use least-loaded or prefix" % args.policy),
            (args.alone_uncached and args.policy != "prefix",
             "--alone-uncached: --policy prefix is required"),
            (args.engine == "sglang" and (args.alone_below or args.alone_uncached),
             "--alone-below, --alone-uncached: SGLang's decode servers compute no prompts")):
        if wrong:
            options.error(why)
    if not args.health_path.startswith("/"):
        options.error("--health-path: %r does not start with /" % args.health_path)
    return args
