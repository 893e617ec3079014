#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py BUILD [CASE…]: RDMA between two virtual machines.

Makes the guests' image when it is missing or old (image.sh), puts the programs of
BUILD into it, boots two guests and runs the cases. Ends with "N passed, N failed".
"""
import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rig  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = []


def case(function):
    CASES.append(function)
    return function


class Failure(Exception):
    """What is tested does not hold."""


def check(condition, words):
    if not condition:
        raise Failure(words)


# ---- the guests themselves ----

@case
def rig_devices(pair):
    """each guest has one active Soft-RoCE port"""
    for guest in pair.guests:
        text = guest.must("ibv_devinfo -d rxe0")
        check("PORT_ACTIVE" in text, f"{guest.name}: {text}")


@case
def rig_connection_manager(pair):
    """rping between the guests, through librdmacm"""
    server = pair[0].start(f"rping -s -a {pair[0].address} -C 10 -v")
    pair[0].until("rdma resource show cm_id | grep -q LISTEN")
    pair[1].must(f"rping -c -a {pair[0].address} -C 10 -v", 60)
    check(server.wait(20) == 0, server.text)


@case
def rig_bandwidth(pair):
    """ib_write_bw between the guests"""
    server = pair[0].start("ib_write_bw -x 1 -s 65536 -n 200")
    pair[0].until("netstat -ltn | grep -q 18515")
    text = pair[1].must(f"ib_write_bw -x 1 -s 65536 -n 200 {pair[0].address}", 120)
    check(server.wait(20) == 0, server.text)
    print("# " + text.splitlines()[-2].strip())


# ---- running ----

def newer(made, sources):
    """Is it there, and younger than all of them?"""
    try:
        age = os.stat(made).st_mtime
    except OSError:
        return False
    return all(os.stat(name).st_mtime < age for name in sources)


def make_image():
    image = os.path.abspath("build/rdma-vm")
    parts = [os.path.join(HERE, name) for name in ("image.sh", "init")]
    if not newer(os.path.join(image, "base.cpio"), parts):
        subprocess.run([parts[0], image], check=True)
    return image


def libraries(program):
    """What ldd names, as the guest will look for it."""
    out = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
    for line in out.stdout.splitlines():
        if "=> /" in line:
            yield line.split("=> ")[1].split()[0]


def pack_programs(build, image, folder):
    """The programs under test and their libraries, as a cpio archive."""
    tree = os.path.join(folder, "programs")
    os.makedirs(os.path.join(tree, "kvd"))
    found = {}
    for name in PROGRAMS:
        path = os.path.join(build, name)
        if os.path.exists(path):
            found[os.path.basename(name)] = path
    for path in list(found.values()):
        for library in libraries(path):
            found.setdefault(os.path.basename(library), library)
    base = os.path.join(image, "root", "lib", "x86_64-linux-gnu")
    for name, path in found.items():
        if not os.path.exists(os.path.join(base, name)):
            subprocess.run(["cp", "-L", path, os.path.join(tree, "kvd", name)], check=True)
    archive = os.path.join(folder, "programs.cpio")
    subprocess.run(f"cd {tree} && find . | {image}/root/bin/busybox cpio -o -H newc "
                   f"> {archive} 2> /dev/null", shell=True, check=True)
    return archive


PROGRAMS = ["kvd", "kvd-ctl", "conform", "demo-prefill", "demo-decode"]


def run_case(pair, function):
    began = time.monotonic()
    try:
        function(pair)
        words = ""
    except (Failure, rig.Fault) as fault:
        words = str(fault) or "failed"
    took = time.monotonic() - began
    name = f"{function.__name__}: {function.__doc__.splitlines()[0]}"
    print(f"{'not ok' if words else 'ok'} {name} ({took:.1f} s)", flush=True)
    for line in words.splitlines():
        print("#   " + line)
    return not words


def main():
    build, wanted = sys.argv[1], sys.argv[2:]
    image = make_image()
    chosen = [c for c in CASES
              if not wanted or any(words in c.__name__ for words in wanted)]
    passed = failed = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvd-rdma-vm.") as folder:
        archives = [os.path.join(image, "base.cpio"),
                    pack_programs(build, image, folder)]
        with rig.Pair(image, archives, folder) as pair:
            print(f"# two guests are up after {time.monotonic() - began:.1f} s")
            for function in chosen:
                if run_case(pair, function):
                    passed += 1
                else:
                    failed += 1
    print(f"# {time.monotonic() - began:.1f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
