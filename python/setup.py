# SPDX-License-Identifier: Apache-2.0
"""Builds kvd._kvd: the extension's own sources, libkvd's and the attention kernels, in one shared
object.

The sources of libkvd are in lib/ next to this folder, and include by paths from the root. Python's
stable ABI of 3.9 is used, so one wheel works with every later version.

KVD_PROGRAMS: a folder whose files are added to the package as kvd/bin; without it the package has
the client only. KVD_SPLICE: the image of gpu/attend.cu that rotates keys in GPU memory. `make
wheel` sets both."""
import os
import re
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
ABI = "0x03090000"
PROGRAMS = os.environ.get("KVD_PROGRAMS")
SPLICE = os.environ.get("KVD_SPLICE")


def sources():
    own = ["python/src/" + f for f in os.listdir(os.path.join(HERE, "src"))]
    lib = ["lib/" + f for f in os.listdir(os.path.join(ROOT, "lib"))]
    more = ["proto/base64.c", "proto/out.c", "daemon/base/err.c", "daemon/base/hex.c",
            "daemon/base/mem.c", "daemon/base/text.c", "daemon/base/thread.c"]
    more += ["daemon/cost/%s.c" % f for f in ("cost", "page", "preset")]
    more += ["daemon/math/%s.c" % f for f in ("attend", "attend_ref", "attend_vec", "pick", "value")]
    more += ["daemon/plan/%s.c" % f for f in ("layout", "layout_json", "layout_text", "token_shard")]
    more += ["gpu/cudrv.c"]
    return sorted(f for f in own + lib + more if f.endswith(".c"))


def special(compiler):
    """{source: its flags}, as mk/math.mk has them: a kernel for each instruction set, which pick.c
    calls only where it is. Where the compiler makes code for another processor they are empty."""
    with open(os.path.join("mk", "math.mk")) as file:
        isa = dict(re.findall(r"^MATH_(AVX2|AVX512|BF16|AMX) +:= (.*)$", file.read(), re.M))
    for name, flags in isa.items():
        isa[name] = re.sub(r"\$\(MATH_(\w+)\)", lambda match: isa[match[1]], flags)
    target = subprocess.run(compiler.compiler_so + ["-dumpmachine"], stdout=subprocess.PIPE,
                            text=True, check=True).stdout
    x86 = target.startswith("x86_64")
    return {**{"daemon/math/attend_%s.c" % name.lower(): flags.split() if x86 else []
               for name, flags in isa.items()},
            # the same bits on every machine
            "daemon/math/merge.c": ["-ffp-contract=off"], "daemon/math/splice.c": ["-ffp-contract=off"]}


class BuildFromRoot(build_ext):
    """Compile in the root of the tree, so paths and objects stay inside it."""

    def build_extension(self, ext):
        target = os.path.abspath(self.get_ext_fullpath(ext.name))
        temp = os.path.abspath(self.build_temp)
        before = os.getcwd()
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.chdir(ROOT)
        try:
            objects = [made for files, flags in [(sources(), []), *(
                ([file], flags) for file, flags in special(self.compiler).items())]
                for made in self.compiler.compile(
                    files, output_dir=temp, include_dirs=ext.include_dirs,
                    macros=ext.define_macros, extra_postargs=ext.extra_compile_args + flags)]
            self.compiler.link_shared_object(
                objects, target, libraries=ext.libraries,
                extra_postargs=ext.extra_link_args)
        finally:
            os.chdir(before)


class WithPrograms(build_py):
    """The programs unchanged, with their executable bits."""

    def run(self):
        super().run()
        if PROGRAMS:
            self.copy_tree(PROGRAMS, os.path.join(self.build_lib, "kvd", "bin"))


class StableAbiWheel(bdist_wheel):
    def finalize_options(self):
        self.py_limited_api = "cp39"
        super().finalize_options()


if sys.platform != "linux":
    sys.exit("kvd needs Linux")

setup(
    ext_modules=[Extension(
        "kvd._kvd", sources=["src/ext.c"], py_limited_api=True,
        include_dirs=[ROOT, os.path.join(ROOT, "proto"), os.path.join(HERE, "src")],
        define_macros=[("_GNU_SOURCE", None), ("Py_LIMITED_API", ABI),
                       ("KVD_VERSION", '"0.1.0"')]
        + ([("SPLICE_FILE", '"%s"' % SPLICE)] if SPLICE else []),
        extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-pthread",
                            "-fstack-protector-strong", "-Wno-missing-field-initializers"],
        extra_link_args=["-pthread", "-Wl,-z,relro,-z,now", "-Wl,--as-needed",
                         "-Wl,--exclude-libs,ALL"],
        libraries=["cjson", "dl", "m"])],
    scripts=["bin/kvd", "bin/kvd-ctl"] if PROGRAMS else [],
    cmdclass={"build_ext": BuildFromRoot, "build_py": WithPrograms,
              "bdist_wheel": StableAbiWheel},
)
