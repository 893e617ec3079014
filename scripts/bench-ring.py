#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two daemons of this host over shm (or the transport given) and bench_ring on them:
scripts/bench-ring.py [TRANSPORT [SECONDS]]."""
import os
import subprocess
import sys
import tempfile
import time

BUILD = os.environ.get("KVD_BUILD", "build/rel")


def main():
    transport = sys.argv[1] if len(sys.argv) > 1 else "shm"
    seconds = sys.argv[2] if len(sys.argv) > 2 else "3"
    daemons, sockets = [], []
    with tempfile.TemporaryDirectory(prefix="kvd-ring-") as folder:
        try:
            for name in ("prefill", "decode"):
                config = os.path.join(folder, name + ".conf")
                sockets.append(os.path.join(folder, name + ".sock"))
                with open(config, "w") as f:
                    f.write("[daemon]\nname = %s\nrun_dir = %s\nlog_level = warn\n"
                            "[transport]\ntransports = %s\n" % (name, folder, transport))
                daemons.append(subprocess.Popen([BUILD + "/kvd", "--config", config]))
            while not all(map(os.path.exists, sockets)):
                time.sleep(0.01)
            return subprocess.call([BUILD + "/bench/bench_ring"] + sockets + [seconds])
        finally:
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait()


sys.exit(main())
