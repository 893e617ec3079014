#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""contrib/k8s and compose.yaml: against the schemas that Kubernetes publishes (the package
kubernetes-validate of PyPI has them), and against what kvd takes: commands, options, ports,
modes, times."""
import glob
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TREE, "tests", "lib"))
from kvd_daemon import BUILD, Skip, run  # noqa: E402

VENV = os.path.join(TREE, "build", "kubernetes")
KVD_PYTHON = os.path.join(TREE, "build", "python", "venv", "bin", "python")  # has kvd
VERSION = "1.37.0"
VALIDATE = """import json, sys, kubernetes_validate
for each in json.load(sys.stdin):
    kubernetes_validate.validate(each, "%s", strict=True)
"""


def python():
    """Of a virtual environment with the schemas."""
    if not os.path.exists(VENV + "/ready"):
        for argv in (["python3", "-m", "venv", VENV],
                     [VENV + "/bin/pip", "install", "-q", "kubernetes-validate==" + VERSION]):
            made = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True)
            if made.returncode:
                raise Skip("kubernetes-validate of PyPI (%s)" %
                           (made.stdout.strip().splitlines() or ["python3-venv"])[-1])
        open(VENV + "/ready", "w").close()
    return VENV + "/bin/python"


def load(path):
    """By the environment's PyYAML; JSON has no octal numbers, nor anchors."""
    out = subprocess.run([python(), "-c", "import json, sys, yaml\n"
                          "print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))", path],
                         check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)


def manifests():
    return {os.path.basename(p): load(p)
            for p in sorted(glob.glob(TREE + "/contrib/k8s/*.yaml"))}


def pods():
    """(file, pod, its ConfigMap's configuration)."""
    for file, things in manifests().items():
        for thing in things:
            if "template" in thing.get("spec", {}) and file != "scale.yaml":  # it has no daemon
                conf = [t["data"]["kvd.conf"] for t in things if "kvd.conf" in t.get("data", {})]
                yield file, thing["spec"]["template"]["spec"], conf[0]


def daemon_of(pod):
    return [c for c in pod["containers"] + pod["initContainers"] if c["name"] == "kvd"][0]


def option(conf, name):
    return re.search(r"^%s = (.*)$" % name, conf, re.M).group(1)


def probes(one):
    return {name: one[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}


# ---- cases ----

def manifests_fit_the_schemas():
    things = [t for each in manifests().values() for t in each]
    assert len(things) >= 10
    known = [t for t in things if t["kind"] != "PodMonitor"]  # not Kubernetes' own
    done = subprocess.run([python(), "-c", VALIDATE % VERSION.rpartition(".")[0]], text=True,
                          input=json.dumps(known), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-2000:]


def configurations_are_taken():
    count = 0
    for file, _, conf in pods():
        with tempfile.TemporaryDirectory() as folder:
            text = conf.replace("@ADDRESS@", "127.0.0.1").replace("/etc/kvd-peers", folder)
            text = text.replace("/etc/kvd", folder).replace(
                "[daemon]", "[daemon]\nrun_dir = " + folder)
            key = subprocess.run([BUILD + "/kvd-ctl", "keygen", folder + "/daemon.key"],
                                 check=True, stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.PIPE).stdout
            with open(folder + "/peers", "w") as f:
                f.write("one " + key.split()[-1] + "\n")
            with open(folder + "/kvd.conf", "w") as f:
                f.write(text)
            done = subprocess.run([BUILD + "/kvd", "--check-config", "--config",
                                   folder + "/kvd.conf"], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, (file, done.stdout)
        count += 1
    assert count == 2


def probes_name_what_there_is():
    for file, pod, conf in pods():
        one = daemon_of(pod)
        name, metrics = option(conf, "name"), option(conf, "metrics_listen")
        stop = one["lifecycle"]["preStop"]["exec"]["command"]
        assert stop == ["kvd-ctl", "--name", name, "drain", "--wait"], (file, stop)
        for probe in probes(one).values():
            if "exec" in probe:
                words = probe["exec"]["command"]
                assert words[:3] == ["kvd-ctl", "--name", name], words
                # as kvd-ctl takes it: 3 is that nobody is there, usage is another
                done = subprocess.run([BUILD + "/kvd-ctl"] + words[1:], env={
                    "KVD_RUN_DIR": "/nonexistent", "LD_LIBRARY_PATH": BUILD},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                assert done.returncode == 3, (words, done.returncode, done.stdout)
                assert float(words[words.index("-t") + 1]) < probe["timeoutSeconds"]
            else:
                get = probe["httpGet"]
                assert pod.get("hostNetwork"), "metrics_listen is on loopback"
                assert metrics == "tcp://%s:%d" % (get["host"], get["port"])
                with open(TREE + "/docs/run.md") as f:
                    assert "| `%s` |" % get["path"] in f.read()
        live = one["livenessProbe"]
        assert "health" not in live.get("exec", {}).get("command", []), \
            "a daemon that drains or refuses is alive"


def engines_may_hand_over_before_they_end():
    """--shutdown-timeout, within the grace."""
    for file, pod, _ in pods():
        for engine in pod["containers"]:
            if "vllm" in engine["image"]:
                shuts_down(engine["args"], pod["terminationGracePeriodSeconds"])
    services = load(TREE + "/contrib/container/compose.yaml")[0]["services"]
    for name in ("prefill", "decode"):
        shuts_down(services[name]["command"], int(services[name]["stop_grace_period"][:-1]))


def shuts_down(args, grace):
    words = " ".join(args).split()
    assert 0 < int(words[words.index("--shutdown-timeout") + 1]) < grace, words


def ports_agree():
    for file, pod, conf in pods():
        ports = {p["name"]: p["containerPort"] for c in pod["containers"] + pod["initContainers"]
                 for p in c.get("ports", [])}
        assert option(conf, "listen").endswith(":%d" % ports["kvd"]), file
        assert option(conf, "tcp_listen").endswith(":%d" % ports["kvd-data"]), file
        proxies = [c for c in pod["initContainers"] if c["name"] == "metrics"]
        for args in [c["args"] for c in proxies]:
            assert "--upstream=http://%s/" % option(conf, "metrics_listen")[6:] in args
            assert "--secure-listen-address=0.0.0.0:%d" % ports["kvd-metrics"] in args
    monitor = [t for t in manifests()["podmonitor.yaml"] if t["kind"] == "PodMonitor"][0]
    end, = monitor["spec"]["podMetricsEndpoints"]
    assert (end["port"], end["path"], end["scheme"]) == ("kvd-metrics", "/metrics", "https")
    label = monitor["spec"]["selector"]["matchLabels"]
    labels = manifests()["sidecar.yaml"][1]["spec"]["template"]["metadata"]["labels"]
    assert label.items() <= labels.items()


def daemon_has_no_rights():
    for file, pod, _ in pods():
        context = daemon_of(pod)["securityContext"]
        assert context["runAsUser"] == context["runAsGroup"] == 997, file
        assert context["readOnlyRootFilesystem"] and context["runAsNonRoot"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & set(pod)


def key_is_the_daemons_alone():
    for file, pod, conf in pods():
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert volumes["keys"]["secret"]["defaultMode"] == 0o400
        assert volumes["etc"]["emptyDir"] == {"medium": "Memory"}
        files = [c for c in pod["initContainers"] if c["name"] == "kvd-files"][0]
        copy = shlex.split(files["args"][0].splitlines()[0])
        assert copy[:3] == ["install", "-m", "0400"] and copy[-1] == option(
            conf, "curve_secret_file"), copy
        assert files["securityContext"]["runAsUser"] == 997
        holders = [c["name"] for c in pod["containers"] + pod["initContainers"]
                   for m in c.get("volumeMounts", []) if m["name"] in ("keys", "etc")]
        assert set(holders) == {"kvd-files", "kvd"}, (file, holders)


def grace_is_longer_than_the_drain():
    for file, pod, conf in pods():
        seconds = int(re.fullmatch("([0-9]+) s", option(conf, "drain_timeout")).group(1))
        assert pod["terminationGracePeriodSeconds"] >= 60 > seconds, file


def autoscalers_follow_the_metric():
    """The options of scale are such, and it writes the series that they ask for."""
    things = manifests()["scale.yaml"]
    scale = [c for c in things[0]["spec"]["template"]["spec"]["containers"]
             if c["name"] == "scale"][0]
    assert scale["command"][1:] == ["-m", "kvd.router"]
    words = scale["args"]
    for option in ("--interval", "--socket"):
        at = words.index(option)
        del words[at:at + 2]
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/kvd.prom"
        words[words.index("--metrics") + 1] = path
        answer = {"ranks": []}
        done = subprocess.run([KVD_PYTHON, "-m", "kvd.router", *words, "--from", "-"], text=True,
                              input=json.dumps({"groups": {"prefill": answer, "decode": answer}}),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        with open(path) as f:
            written = f.read()
    for hpa in things[1:]:
        metric = hpa["spec"]["metrics"][0]["external"]
        label, = metric["metric"]["selector"]["matchLabels"].items()
        assert '%s{%s="%s"} ' % (metric["metric"]["name"], *label) in written, (hpa, written)
        assert metric["target"] == {"type": "AverageValue", "averageValue": "1"}
        # limits of the two agree
        limits = words[words.index("--" + label[1]) + 1]
        assert limits == "%d:%d" % (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"])


def compose_is_one_network_and_one_volume():
    compose = load(TREE + "/contrib/container/compose.yaml")[0]
    services = compose["services"]
    assert set(services) == {"kvd-prefill", "kvd-decode", "prefill", "decode", "router"}
    for name in ("prefill", "decode"):
        one, engine = services["kvd-" + name], services[name]
        assert one["command"] == ["--name", name]
        assert engine["environment"]["KVD_SOCKET"] == "/run/kvd/%s.sock" % name
        assert "kvd:/run/kvd" in one["volumes"] and "kvd:/run/kvd" in engine["volumes"]
        assert engine["depends_on"]["kvd-" + name]["condition"] == "service_healthy"
        assert one["environment"]["KVD_NAME"] == name, "for the image's HEALTHCHECK"
        assert one["read_only"] and one["cap_drop"] == ["ALL"]
    joined = [s.get("network_mode") for n, s in services.items() if n != "kvd-prefill"]
    assert set(joined) == {"service:kvd-prefill"}, joined


def router_takes_its_options():
    path = os.path.join(TREE, "python/kvd/router/config.py")  # of the standard library alone
    spec = importlib.util.spec_from_file_location("router_config", path)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    services = load(TREE + "/contrib/container/compose.yaml")[0]["services"]
    assert services["router"]["entrypoint"] == ["python3", "-m", "kvd.router"]
    options = config.read(services["router"]["command"])
    assert services["kvd-prefill"]["ports"] == ["127.0.0.1:8000:%d" % options.listen[1]]
    assert options.listen[0] == "0.0.0.0", "the port is published from its network"
    for spec in options.static:
        port = services[spec.role]["environment"]["PORT"]
        assert spec.url == "http://127.0.0.1:" + port and spec.engine == "vllm"
    assert int(services["router"]["stop_grace_period"][:-1]) > options.drain_timeout


def main():
    try:
        python()
    except Skip as need:
        print("skipped: %s" % need)
        return 77
    run([manifests_fit_the_schemas, configurations_are_taken, probes_name_what_there_is,
         ports_agree, daemon_has_no_rights, key_is_the_daemons_alone,
         engines_may_hand_over_before_they_end, grace_is_longer_than_the_drain,
         autoscalers_follow_the_metric,
         compose_is_one_network_and_one_volume, router_takes_its_options])
    return 0


if __name__ == "__main__":
    sys.exit(main())
