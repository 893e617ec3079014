# SPDX-License-Identifier: Apache-2.0
"""Two guests joined by a socket, each with Soft-RoCE; commands run in them.

    with Pair(image, [archives]) as pair:
        status, text = pair[0].run("ibv_devinfo", timeout=20)

A guest is a qemu process of ours and ends with us. Its second serial port is a
line protocol (see init): commands run side by side in it. Its monitor freezes
and wakes it; a frozen guest's qemu still empties the socket, into a buffer in front of
the card. Otherwise the socket filled up, and the other guest's qemu stood still in
send(), all of it: it was the sender that was frozen then.
"""
import os
import signal
import socket
import subprocess
import threading
import time

BOOT_S = 240  # two of them, on a busy machine
HOLD_US = 2**32 - 1  # as long as qemu can; what is beyond 10000 packets is dropped
ASK_S = 10  # how is a command? A line may have been lost
CARDS = 2  # and rails: rxe0 on eth0, rxe1 on eth1


def accelerator():
    """qemu's words, and the kernel's. KVM where the processor itself does it. A /dev/kvm
    without that (KVM-PVM in a cloud's guest) runs no kernel that is not made for it: a
    guest of the distribution's hangs there. An emulated processor does a string
    instruction byte by byte, or word by word: without them (112 is rep_good), and
    without looking at each access' rights twice, the guests are three times as fast."""
    with open("/proc/cpuinfo") as cpus:
        words = set(cpus.read().split())
    if words & {"vmx", "svm"} and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ["-accel", "kvm", "-cpu", "host"], ""
    return ["-accel", "tcg,thread=multi", "-cpu",
            "max,erms=off,smap=off,smep=off,pku=off,la57=off,umip=off"], "clearcpuid=112"


class Fault(Exception):
    """The rig itself failed, not what it tests."""


class Command:
    """A command that runs in a guest."""

    def __init__(self, guest, number, words):
        self.guest, self.number, self.words = guest, number, words
        self.lines = []
        self.status = None
        self.begun = False

    @property
    def text(self):
        return "\n".join(self.lines)

    def has(self, words):
        return any(words in line for line in self.lines)

    def wait(self, timeout, beside=None):
        """The exit status; Fault when it takes longer. None: the command `beside`,
        without which this one can only wait, failed."""
        self.guest.await_(lambda: self.status is not None or (beside and beside.status),
                          timeout, f"'{self.words[:60]}' does not end", self)
        return self.status

    def wait_line(self, words, timeout):
        self.guest.await_(lambda: self.has(words) or self.status is not None, timeout,
                          f"'{self.words[:60]}' does not say '{words}'", self)
        if not self.has(words):
            raise Fault(f"'{self.words[:60]}' ended ({self.status}) without '{words}': "
                        + self.text[-2000:])


class Guest:
    def __init__(self, image, archive, folder, number, nets, memory_mib, cpus):
        self.number = number
        self.name = f"guest{number}"
        self.address = f"10.0.0.{number}"  # and 10.0.1.N on the second rail
        self.folder = folder
        self.changed = threading.Condition()
        self.commands = {}
        self.next_id = 1
        self.booted = self.dead = False
        # what the commands said, while they run
        self.log = open(os.path.join(image, f"{self.name}.log"), "w")
        self.console = open(os.path.join(folder, f"{self.name}.console"), "wb")
        agent, monitor = self._path("agent"), self._path("monitor")
        how, kernel_words = accelerator()
        self.process = subprocess.Popen(
            [os.path.join(image, "qemu"), *how, "-nographic", "-no-reboot",
             "-nodefaults", "-m", str(memory_mib), "-smp", str(cpus),
             "-kernel", os.path.join(image, "vmlinuz"), "-initrd", archive,
             "-append",
             f"console=ttyS0 no_timer_check quiet panic=-1 kvd.host={number} mitigations=off "
             f"tsc=reliable clocksource=tsc nowatchdog {kernel_words}",
             "-serial", "stdio",
             "-chardev", f"socket,id=agent,path={agent},server=on,wait=off",
             "-serial", "chardev:agent",
             "-chardev", f"socket,id=mon,path={monitor},server=on,wait=off",
             "-mon", "chardev=mon,mode=readline",
             *self._cards(nets)],
            stdin=subprocess.DEVNULL, stdout=self.console, stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent)
        self.agent = self._connect(agent)
        self.monitor = self._connect(monitor)
        threading.Thread(target=self._read, daemon=True).start()

    def _cards(self, nets):
        for i, net in enumerate(nets):
            yield from ("-netdev", f"socket,id=net{i},{net}", "-device",
                        f"virtio-net-pci,netdev=net{i},romfile=,"
                        f"mac=52:54:00:00:0{i}:0{self.number}", "-object",
                        f"filter-buffer,id=hold{i},netdev=net{i},queue=tx,"
                        f"interval={HOLD_US},status=off")

    def _path(self, what):
        return os.path.join(self.folder, f"{self.name}.{what}")

    def _connect(self, path):
        until = time.monotonic() + 20
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(path)
                return sock
            except OSError:
                sock.close()
                if time.monotonic() > until or self.process.poll() is not None:
                    raise Fault(f"{self.name}: qemu does not start: {self.tail()}")
                try:
                    self.process.wait(0.02)
                except subprocess.TimeoutExpired:
                    pass

    def _read(self):
        left = b""
        while True:
            try:
                data = self.agent.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            *lines, left = (left + data).split(b"\n")
            with self.changed:
                for line in lines:
                    self._line(line.decode("utf-8", "replace").rstrip("\r"))
                self.changed.notify_all()
        with self.changed:
            self.dead = True
            self.changed.notify_all()

    def _line(self, line):
        self.log.write(line + "\n")
        self.log.flush()
        head, _, rest = line[1:].partition(" ")
        if not head.isdigit():
            return
        if line.startswith("=") and head == "0":
            self.booted = True
        command = self.commands.get(int(head))
        if command and line.startswith("!"):
            command.begun = True
        elif command and line.startswith("~"):
            self._send(command)
        elif command and line.startswith("@"):
            command.lines.append(rest)
        elif command and line.startswith("="):
            command.status = int(rest)

    def await_(self, condition, timeout, what, command=None, ask_s=ASK_S):
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            with self.changed:
                self.changed.wait_for(lambda: condition() or self.dead,
                                      max(0, min(left, ask_s)))
                if condition():
                    return
            if self.dead or left <= 0:
                raise Fault(f"{self.name}{' (died)' if self.dead else ''}: {what} within "
                            f"{timeout} s\n{self.tail()}")
            if command:
                self.agent.sendall(f"?{command.number}\n".encode())

    def await_boot(self):
        self.await_(lambda: self.booted, BOOT_S, "does not boot")

    def start(self, words):
        """Run in the background of the guest."""
        with self.changed:
            command = Command(self, self.next_id, words.strip())  # as read gives it
            self.commands[self.next_id] = command
            self.next_id += 1
        self._send(command)
        self.await_(lambda: command.begun, 60, "does not take a command", command, 1)
        return command

    def _send(self, command):
        self.agent.sendall(f"{command.number} {len(command.words)} {command.words}\n".encode())

    def run(self, words, timeout=120):
        command = self.start(words)
        return command.wait(timeout), command.text

    def must(self, words, timeout=120):
        status, text = self.run(words, timeout)
        if status != 0:
            raise Fault(f"{self.name}: '{words}' ended with {status}: {text[-2000:]}")
        return text

    def until(self, condition, timeout=60):
        """Ask the guest's shell until it says yes."""
        self.must(f"n=0; until {condition}; do n=$((n + 1)); [ $n -lt {timeout * 20} ] || "
                  "exit 1; usleep 50000; done", 3 * timeout)

    def _hold(self, how):
        for i in range(CARDS):
            self.monitor.sendall(f"qom-set /objects/hold{i} status {how}\n".encode())

    def freeze(self):
        self._hold("on")
        self.monitor.sendall(b"stop\n")

    def wake(self):
        """It goes on, and gets what was sent to it meanwhile."""
        self.monitor.sendall(b"cont\n")
        self._hold("off")

    def tail(self):
        self.console.flush()
        with open(self.console.name, "rb") as console:
            return console.read()[-1500:].decode("utf-8", "replace")

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.agent.close()
        self.monitor.close()
        self.console.close()
        self.log.close()


def _die_with_parent():
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Pair:
    """Two guests (or one), booted. `archives` are cpio files that are unpacked over
    one another in order."""

    def __init__(self, image, archives, folder, count=2, memory_mib=3072, cpus=2):
        self.guests = []
        archive = os.path.join(folder, "boot.cpio")
        with open(archive, "wb") as out:
            for name in archives:
                with open(name, "rb") as part:
                    while chunk := part.read(1 << 20):
                        out.write(chunk)
                out.write(b"\0" * (-out.tell() % 512))
        ports = [_free_port() for _ in range(CARDS)]
        nets = [[f"{how}=127.0.0.1:{port}" for port in ports]
                for how in ("listen", "connect")]
        try:
            for i in range(count):
                self.guests.append(Guest(image, archive, folder, i + 1, nets[i],
                                         memory_mib, cpus))
            for guest in self.guests:
                guest.await_boot()
        except BaseException:
            self.end()
            raise

    def __getitem__(self, i):
        return self.guests[i]

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.end()

    def end(self):
        for guest in self.guests:
            guest.end()
