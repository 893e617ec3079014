#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""test_wheel.py FOLDER: the wheel there: its files; then, in a small Debian with Python and
nothing of what kvd links or is built with, the daemon and the programs that it brings.

KVD_WHEEL_TOOLS: the virtual environment whose pip fetches numpy."""
import functools
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TREE, "tests", "lib"))
from kvd_daemon import Skip, run  # noqa: E402

WHEEL = (glob.glob(os.path.join(sys.argv[1], "*.whl")) or [sys.argv[1]])[0]
TOOLS = os.environ.get("KVD_WHEEL_TOOLS", os.path.join(TREE, "build", "python", "wheel-tools"))
ROOT = os.path.join(TREE, "build", "wheel-root")
# glibc of the tag manylinux_2_34; libstdc++ of GCC 12 is what Debian's libzmq wants
GLIBC, GLIBCXX = (2, 34), (3, 4, 30)
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "libdl.so.2",
          "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"}
ENTER = """
set -e
root=$1
shift
ip link set lo up
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for node in null zero random urandom; do
	touch "$root/dev/$node"
	mount --bind "/dev/$node" "$root/dev/$node"
done
exec chroot "$root" env -i HOME=/root PATH=/opt/kvd/bin:/usr/bin:/bin KVD_AUTOSTART=1 "$@"
"""


@functools.lru_cache()
def unpacked():
    """A folder with the wheel's files. It goes when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="kvd-wheel-")
    zipfile.ZipFile(WHEEL).extractall(folder.name)
    return folder


def files():
    top = unpacked().name
    return {os.path.relpath(os.path.join(at, name), top): os.path.join(at, name)
            for at, _, names in os.walk(top) for name in names}


@functools.lru_cache()
def programs():
    """{name: what readelf and objdump tell} of every ELF file."""
    out = {}
    for name, path in files().items():
        with open(path, "rb") as f:
            if f.read(4) == b"\x7fELF":
                out[name] = subprocess.run(
                    ["sh", "-c", 'readelf -dW "$1"; objdump -T "$1"', "sh", path],
                    capture_output=True, text=True, check=True).stdout
    return out


def tag_is_of_every_python_and_of_manylinux():
    tag = re.fullmatch(r"kvd_transfer-[0-9.]+-cp39-abi3-manylinux_2_([0-9]+)_\w+[.]whl",
                       os.path.basename(WHEEL))
    assert tag and int(tag.group(1)) <= 35, WHEEL


def programs_are_there_and_executable():
    wanted = {"kvd/bin/kvd", "kvd/bin/kvd-ctl", "kvd/_kvd.abi3.so"}
    assert wanted <= set(programs()), sorted(programs())
    modes = {i.filename: i.external_attr >> 16 for i in zipfile.ZipFile(WHEEL).infolist()}
    assert modes["kvd/bin/kvd"] & 0o111 and modes["kvd/bin/kvd-ctl"] & 0o111


def symbols_are_of_glibc_2_34_or_older():
    for name, text in programs().items():
        for kind, cap in (("GLIBC", GLIBC), ("GLIBCXX", GLIBCXX)):
            have = {tuple(map(int, v.split("."))) for v in
                    re.findall(r"\b%s_([0-9.]+)" % kind, text)}
            assert not have or max(have) <= cap, "%s: %s_%s" % (name, kind, max(have))


def libraries_are_in_the_wheel_or_every_systems():
    ours = {os.path.basename(name) for name in programs()}
    for name, text in programs().items():
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
        strange = {n for n in needed - ours - SYSTEM if not n.startswith("ld-linux")}
        assert needed and not strange, (name, strange)
        for word in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text):
            folders = [os.path.normpath(os.path.join(os.path.dirname(name), f[8:]))
                       for f in word.split(":") if f == "$ORIGIN" or f.startswith("$ORIGIN/")]
            assert len(folders) == len(word.split(":")), (name, word)
            assert set(folders) <= set(map(os.path.dirname, files())), (name, word)


def nothing_names_the_folder_of_the_build():
    for name, path in files().items():
        with open(path, "rb") as f:
            assert os.fsencode(TREE) not in f.read(), name


def licences_are_there():
    """Of each copied library, with the common texts that they name."""
    top = [os.path.dirname(n) for n in files() if n.endswith(".dist-info/licenses/LICENSE")]
    texts = {os.path.basename(n): p for n, p in files().items() if os.path.dirname(n) == top[0]}
    copied = [n for n in programs() if n.startswith("kvd_transfer.libs/")]
    assert len(copied) > 5
    for name in copied:
        assert re.sub("-[0-9a-f]{8}[.]", ".", os.path.basename(name)) in texts, name
    assert [n for n in texts if n.startswith("libmicrohttpd.so.12")]
    for path in texts.values():
        with open(path) as f:
            for common in re.findall(r"/common-licenses/([\w.-]*\w)", f.read()):
                assert common in texts, (path, common)


# ---- in a small Debian -------------------------------------------------------------------


def inside(*argv, check=True):
    """(status, output) of a command there: new namespaces, no network but loopback."""
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child",
         "sh", "-c", ENTER, "sh", ROOT] + list(argv),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300)
    assert not check or done.returncode == 0, (argv, done.returncode, done.stdout)
    return done.returncode, done.stdout


@functools.lru_cache()
def system():
    """The folder of the Debian, with the wheel and numpy beside it: not installed yet."""
    if os.getuid() != 0:
        raise Skip("root")
    made = subprocess.run([TREE + "/tests/systemd/root.sh", ROOT, "python3", "python3-venv"],
                          capture_output=True, text=True)
    if made.returncode:
        raise Skip(made.stdout.strip().split("skipped: ")[-1] or made.stderr.strip())
    if subprocess.run(["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "true"],
                      stderr=subprocess.DEVNULL).returncode:
        raise Skip("namespaces")
    for folder in ("opt/kvd", "wheels"):
        shutil.rmtree(os.path.join(ROOT, folder), ignore_errors=True)
    wheels = os.path.join(ROOT, "wheels")
    shutil.copytree(os.path.join(HERE), wheels)
    version = inside("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")[1]
    got = subprocess.run(
        [os.path.join(TOOLS, "bin", "pip"), "download", "-q", "-d", wheels, "--no-deps",
         "--only-binary=:all:", "--python-version", version.strip()] +
        ["--platform=manylinux_2_%d_%s" % (n, os.uname().machine) for n in (17, 27, 28)] +
        ["numpy"], capture_output=True, text=True)
    if got.returncode:
        raise Skip("numpy from PyPI (%s)" % got.stderr.strip().splitlines()[-1])
    shutil.copy(WHEEL, wheels)
    return ROOT


@functools.lru_cache()
def installed():
    """Into /opt/kvd there, whose programs are in PATH."""
    assert not [n for n in os.listdir(system() + "/usr/bin") if n in ("cc", "gcc", "kvd")]
    inside("python3", "-m", "venv", "/opt/kvd")
    inside("sh", "-c", "pip install -q --no-index --no-deps /wheels/*.whl")


def it_installs_without_an_index():
    installed()
    code, said = inside("python", "-c", "import kvd, importlib.util as u; "
                        "assert u.find_spec('nixl') is None; print(kvd.__version__)")
    assert said.strip() in os.path.basename(WHEEL)


def rooms_move_between_two_daemons_of_its_own():
    installed()
    assert inside("python", "/wheels/moves.py")[1] == "2 rooms\n"


def nixl_moves_bytes():
    installed()
    text = """
import kvd.nixl, sys
sys.path.insert(0, kvd.nixl.path())
import numpy as np
from nixl._api import nixl_agent
a = nixl_agent("alone")
m = np.arange(1 << 14, dtype=np.uint8)
at = m.ctypes.data
a.register_memory([(at, m.size, 0, "")], "DRAM")
h = a.initialize_xfer("WRITE", a.get_xfer_descs([(at, 4096, 0)], "DRAM"),
                      a.get_xfer_descs([(at + 8300, 4096, 0)], "DRAM"), "alone")
a.transfer(h)
while a.check_xfer_state(h) != "DONE":
    pass
assert (m[:4096] == m[8300:8300 + 4096]).all()
"""
    inside("python", "-c", text)


def attention_runs_there():
    """By each kernel that the build has and this processor runs."""
    installed()
    text = """
import numpy as np
from kvd.math import Batch, Cache, attend, isas
random = np.random.default_rng(1)
kv = random.standard_normal((4, 2, 16, 64), np.float32)
q, batch = random.standard_normal((1, 2, 32), np.float32), Batch([1], [2], [3, 1], lengths=[20])
(wanted, log), *others = [attend(q, Cache(kv, 32), batch, scale=0.2, isa=isa) for isa in isas()]
for o, lse in others:
    assert abs(o - wanted).max() < 1e-5 and abs(lse - log).max() < 1e-5
print(*isas())
"""
    flags = open("/proc/cpuinfo").read().split()
    had = inside("python", "-c", text)[1].split()
    assert had[:2] == ["ref", "vector"], had
    assert ("avx2" in had) == ("avx2" in flags and "fma" in flags), (had, flags)


def programs_are_run_by_module_and_by_name():
    installed()
    for start in (["python", "-m", "kvd", "daemon"], ["kvd"]):
        assert inside(*start, "--version")[1].startswith("kvd 0."), start
        assert inside(*start, "--print-config")[1].startswith("#"), start
    for start in (["python", "-m", "kvd", "ctl"], ["kvd-ctl"]):
        code, said = inside(*start, "status", check=False)
        assert code == 3 and "ENODAEMON" in said, (code, said)
        assert inside(*start, "nonsense", check=False)[0] == 2
    assert inside("python", "-m", "kvd", check=False)[0] == 2


def a_daemon_by_hand_is_listed_and_has_metrics():
    installed()
    text = """
mkdir -p /tmp/kvd && cd /tmp/kvd
printf '[daemon]\nrun_dir = /tmp/kvd\nlog_format = plain\n[metrics]\n%s\n' \
	'metrics_listen = tcp://127.0.0.1:9464' > kvd.conf
kvd --config kvd.conf --name gpu0 & daemon=$!
export KVD_RUN_DIR=/tmp/kvd
until kvd-ctl status > /dev/null 2>&1; do kill -0 $daemon; done
python -m kvd ctl ls
python -c 'from urllib.request import urlopen as u
print(u("http://127.0.0.1:9464/metrics").read().decode())'
kvd-ctl drain
wait $daemon
"""
    said = inside("sh", "-ec", text)[1]
    assert "gpu0" in said and "kvd_build_info" in said, said


if __name__ == "__main__":
    run([tag_is_of_every_python_and_of_manylinux, programs_are_there_and_executable,
         symbols_are_of_glibc_2_34_or_older, libraries_are_in_the_wheel_or_every_systems,
         nothing_names_the_folder_of_the_build, licences_are_there,
         it_installs_without_an_index, rooms_move_between_two_daemons_of_its_own,
         nixl_moves_bytes, attention_runs_there, programs_are_run_by_module_and_by_name,
         a_daemon_by_hand_is_listed_and_has_metrics])
