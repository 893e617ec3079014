# SPDX-License-Identifier: Apache-2.0
"""A real etcd for tests, with a disk and ports of its own.

    with Etcd() as etcd, Daemon("[cluster]\\ncluster = %s\\n" % etcd.url) as d:
"""
import json
import os
import shutil
import signal
import subprocess
import tempfile

from kvd_daemon import Skip, free_port, until


class Etcd:
    """One member on ports and a disk of its own."""

    def __init__(self, quota=0, tls=False, jwt=False):
        if not shutil.which("etcd") or not shutil.which("etcdctl"):
            raise Skip("etcd and etcdctl (etcd-server, etcd-client)")
        self.tmp = tempfile.TemporaryDirectory(prefix="kvd-test-")
        self.dir, self.quota, self.tls, self.proc = self.tmp.name, quota, tls, None
        self.port, self.peer_port = free_port(), free_port()
        self.jwt, self.login = jwt, []
        if (tls or jwt) and not shutil.which("openssl"):
            raise Skip("openssl")
        if tls:
            self.certify()
        if jwt:
            self.openssl("genrsa -out jwt.key 4096")
            self.openssl("rsa -in jwt.key -pubout -out jwt.pub")

    def path(self, name):
        return os.path.join(self.dir, name)

    def certify(self):
        with open(self.path("ext"), "w") as out:
            out.write("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        sh = "req -x509 -newkey rsa:2048 -nodes -subj /CN=ca -keyout ca.key -out ca.pem -days 2"
        lines = [sh]
        for name in "server", "client":
            lines += ["req -newkey rsa:2048 -nodes -subj /CN=%s -keyout %s.key -out %s.csr"
                      % (name, name, name),
                      "x509 -req -in %s.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
                      "-extfile ext -out %s.pem" % (name, name)]
        for line in lines:
            self.openssl(line)

    def openssl(self, line):
        subprocess.run(["openssl"] + line.split(), cwd=self.dir, check=True,
                       capture_output=True)

    def users(self):
        """root, and kvd with what it needs."""
        for line in ("user add root:root", "user grant-role root root", "role add kvd",
                     "role grant-permission --prefix kvd readwrite /kvd/",
                     "user add kvd:pass", "user grant-role kvd kvd", "auth enable"):
            self.ctl(*line.split())
        self.login = ["--user", "root:root"]

    @property
    def url(self):
        return "etcd%s://127.0.0.1:%d/kvd" % ("s" if self.tls else "", self.port)

    def ctl(self, *words, stdin=None, check=True):
        tls = ["--cacert", self.path("ca.pem"), "--cert", self.path("client.pem"),
               "--key", self.path("client.key")] if self.tls else []
        done = subprocess.run(
            ["etcdctl", "--command-timeout=10s", "--endpoints=http%s://127.0.0.1:%d" % (
                "s" if self.tls else "", self.port)] + tls + self.login + list(words),
            input=stdin, capture_output=True, env=dict(os.environ, ETCDCTL_API="3"))
        assert not check or done.returncode == 0, (words, done)
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None

    def start(self):
        client = "http%s://127.0.0.1:%d" % ("s" if self.tls else "", self.port)
        peer = "http://127.0.0.1:%d" % self.peer_port
        args = ["etcd", "--data-dir", self.path("data"), "--unsafe-no-fsync",
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", "default=" + peer]
        if self.quota:
            args += ["--quota-backend-bytes", str(self.quota)]
        if self.tls:
            args += ["--client-cert-auth", "--trusted-ca-file", self.path("ca.pem"),
                     "--cert-file", self.path("server.pem"), "--key-file",
                     self.path("server.key")]
        if self.jwt:
            args += ["--auth-token", "jwt,pub-key=%s,priv-key=%s,sign-method=RS512" % (
                self.path("jwt.pub"), self.path("jwt.key"))]
        with open(self.path("log"), "ab") as log:
            self.proc = subprocess.Popen(args, stdout=log, stderr=log,
                                         stdin=subprocess.DEVNULL)
        until("etcd is up", lambda: self.ctl("get", "x", check=False) is not None)
        return self

    def stop(self, sig=signal.SIGTERM):
        self.proc.send_signal(sig)
        self.proc.wait()

    def wipe(self):
        shutil.rmtree(self.path("data"))

    def freeze(self):
        self.proc.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.proc.pid, os.WSTOPPED)

    def thaw(self):
        self.proc.send_signal(signal.SIGCONT)

    def lease(self, seconds=600):
        return self.ctl("lease", "grant", str(seconds)).split()[1]

    def revision(self):
        return json.loads(self.ctl("get", "x", "-w", "json"))["header"]["revision"]

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        if self.proc.poll() is None:
            self.thaw()
            self.stop(signal.SIGKILL)
        self.tmp.cleanup()
