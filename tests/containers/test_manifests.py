#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""contrib/k8s as `kubectl kustomize` renders it, and compose.yaml: against the schemas that
Kubernetes publishes (the package kubernetes-validate of PyPI has them), and against what kvd,
its router and the other manifests take: commands, options, ports, modes, times, sizes, names."""
import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TREE, "tests", "lib"))
from kvd_daemon import BUILD, Skip, run  # noqa: E402

VENV = os.path.join(TREE, "build", "kubernetes")
KVD_PYTHON = os.path.join(TREE, "build", "python", "venv", "bin", "python")  # has kvd
K8S = os.path.join(TREE, "contrib", "k8s")
VERSION = "1.37.0"
VALIDATE = """import json, sys, kubernetes_validate
for each in json.load(sys.stdin):
    kubernetes_validate.validate(each, "%s", strict=True)
"""
PARSE = """import sys
from kvd.router import publish
publish.parser().parse_args(sys.argv[1:])
"""
WORKLOADS = ("Deployment", "DaemonSet")
UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30, " MiB": 1 << 20, " GiB": 1 << 30}
OVERLAYS = ("decode", "monitoring", "node", "prefill", "router", "scale", "store")
_rendered = {}


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


def load(text):
    """By the environment's PyYAML; JSON has no octal numbers, nor anchors."""
    out = subprocess.run([python(), "-c", "import json, sys, yaml\n"
                          "print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"],
                         input=text, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)


def compose():
    with open(TREE + "/contrib/container/compose.yaml") as f:
        return load(f.read())[0]


def rendered(folder):
    if folder not in _rendered:
        done = subprocess.run(["kubectl", "kustomize", os.path.join(K8S, folder)], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, "kustomize warns: " + done.stderr
        _rendered[folder] = load(done.stdout)
    return _rendered[folder]


def folders():
    return ["overlays/" + name for name in OVERLAYS] + ["cluster"]


def named(things, kind, name):
    found = [t for t in things if t["kind"] == kind and t["metadata"]["name"] == name]
    assert len(found) == 1, "%s %s: %d of them" % (kind, name, len(found))
    return found[0]


def workloads():
    """(a name for messages, everything of its overlay, the workload, its pod's spec)."""
    count = 0
    for folder in folders():
        for thing in rendered(folder):
            if thing["kind"] in WORKLOADS:
                count += 1
                yield ("%s: %s" % (folder, thing["metadata"]["name"]), rendered(folder), thing,
                       thing["spec"]["template"]["spec"])
    assert count == 6 + 5, count


def all_of(pod):
    return pod["initContainers"] + pod["containers"]


def container(pod, name):
    return [c for c in all_of(pod) if c["name"] == name][0]


def volume(pod, name):
    return [v for v in pod["volumes"] if v["name"] == name][0]


def configuration(things, pod):
    """What kvd-files joins."""
    data = named(things, "ConfigMap", volume(pod, "config")["configMap"]["name"])["data"]
    return "".join(data[name] for name in sorted(data))


def option(conf, name, default=None):
    found = re.findall(r"^%s = (.*)$" % name, conf, re.M)
    assert len(found) < 2, name
    return found[0] if found else default


def size(text):
    number, unit = re.fullmatch("([0-9]+)( ?[A-Za-z]*)", text).groups()
    return int(number) * UNITS[unit]


def env_of(one):
    """Values, and for fields of the pod what they may look like."""
    fields = {"metadata.name": "prefill-kvd-7d4b9c-x2k4q", "status.podIP": "10.1.2.3",
              "metadata.labels['app']": "prefill"}
    out = {}
    for each in one.get("env", []):
        out[each["name"]] = expanded(each["value"], out) if "value" in each else \
            fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
    return out


def expanded(text, env):
    """As the kubelet does it: by variables that are set before."""
    text = re.sub(r"\$\(([A-Za-z_]+)\)", lambda m: env.get(m[1], m[0]), text)
    assert "$(" not in text, text
    return text


def words_of(one):
    env = env_of(one)
    return [expanded(word, env) for word in one.get("command", []) + one.get("args", [])]


def after(words, name):
    return words[words.index(name) + 1]


def router_config():
    path = os.path.join(TREE, "python/kvd/router/config.py")  # of the standard library alone
    spec = importlib.util.spec_from_file_location("router_config", path)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    return config


# ---- cases ----

def all_overlays_are_rendered():
    there = {os.path.basename(p) for p in glob.glob(K8S + "/overlays/*")}
    assert there == set(OVERLAYS), there
    used = set()
    for path in glob.glob(K8S + "/**/kustomization.yaml", recursive=True):
        with open(path) as f:
            for word in re.findall(r"\.\./[./\w-]+", f.read()):
                used.add(os.path.relpath(os.path.join(os.path.dirname(path), word), K8S))
    for name in ("base", "engine", "node", "components/etcd-tls", "components/priority"):
        assert name in used, "%s is in no overlay" % name


def manifests_fit_the_schemas():
    things = [t for folder in folders() for t in rendered(folder)]
    assert len(things) >= 50, len(things)
    known = [t for t in things if t["kind"] != "PodMonitor"]  # not Kubernetes' own
    done = subprocess.run([python(), "-c", VALIDATE % VERSION.rpartition(".")[0]], text=True,
                          input=json.dumps(known), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-2000:]


def names_are_there():
    """Volumes, ConfigMaps, accounts, classes, ports by name, pods by label."""
    for where, things, thing, pod in workloads():
        volumes = [v["name"] for v in pod["volumes"]]
        mounts = {m["name"] for c in all_of(pod) for m in c.get("volumeMounts", [])}
        assert set(volumes) == mounts and len(volumes) == len(mounts), (where, volumes, mounts)
        named(things, "ConfigMap", volume(pod, "config")["configMap"]["name"])
        named(things, "ServiceAccount", pod["serviceAccountName"])
        if "priorityClassName" in pod:
            named(things, "PriorityClass", pod["priorityClassName"])
        labels = thing["spec"]["template"]["metadata"]["labels"]
        assert labels["app"] == thing["metadata"]["name"].partition("-kvd")[0], labels
        chosen = [("selector", thing["spec"]["selector"]["matchLabels"])]
        name = thing["metadata"]["name"]
        policy = named(things, "NetworkPolicy", name)
        chosen.append(("policy", policy["spec"]["podSelector"]["matchLabels"]))
        if thing["kind"] == "Deployment":
            budget = named(things, "PodDisruptionBudget", name)
            chosen.append(("budget", budget["spec"]["selector"]["matchLabels"]))
        for what, wanted in chosen:
            # its pods, and of no other overlay
            assert wanted == {"app": labels["app"], "kvd": "yes"}, (where, what, wanted)
        for one in all_of(pod):
            names = [p["name"] for p in one.get("ports", [])]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                port = one.get(probe, {}).get("httpGet", {}).get("port")
                assert port is None or port in names, (where, probe, port)
    cluster = rendered("cluster")
    service = named(cluster, "Service", "router-kvd")["spec"]
    assert service["selector"] == {"app": "router", "kvd": "yes"}
    pod = named(cluster, "Deployment", "router-kvd")["spec"]["template"]["spec"]
    ports = {p["name"]: p["containerPort"] for p in container(pod, "router")["ports"]}
    assert [ports.get(p["targetPort"]) for p in service["ports"]] == [8000], service


def configurations_are_taken():
    """The step kvd-files runs, on other paths, and kvd reads its result."""
    for where, things, thing, pod in workloads():
        with tempfile.TemporaryDirectory() as folder:
            files = container(pod, "kvd-files")
            for part in ("config", "etc", "keys", "run"):
                os.mkdir(folder + "/" + part)
            for name, text in named(things, "ConfigMap", volume(pod, "config")["configMap"][
                    "name"])["data"].items():
                text = text.replace("/var/lib/kvd", folder + "/keys").replace(
                    "[daemon]", "[daemon]\nrun_dir = " + folder + "/run")
                # the store's is more than this machine may have
                text = re.sub("(?m)^chunk_memory = .*", "chunk_memory = 64 MiB", text)
                with open(folder + "/config/" + name, "w") as f:
                    f.write(text)
            if "/secret" in [m["mountPath"] for m in files["volumeMounts"]]:
                certificates(folder + "/secret")
                assert volume(pod, "etcd")["secret"]["defaultMode"] == 0o400
            assert files["command"] == ["sh", "-ec"]
            script = files["args"][0].replace("/var/lib/kvd", folder + "/keys")
            script = script.replace("/etc/kvd", folder + "/etc")
            script = re.sub("(?<![a-z])/(config|secret)", folder + r"/\1", script)
            env = dict(env_of(files), ADDRESS="127.0.0.1", PATH=os.environ["PATH"])
            subprocess.run(["sh", "-ec", script], check=True, env=env)
            done = subprocess.run([BUILD + "/kvd", "--check-config", "--config",
                                   folder + "/etc/kvd.conf"], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, (where, done.stdout)
            with open(folder + "/etc/kvd.conf") as f:
                conf = f.read()
            assert "@" not in conf.partition("[daemon]")[2], conf
            # --check-config takes any words: an endpoint is parsed at the start
            assert option(conf, "chunk_index", "cluster") == "cluster", where
            tls = option(conf, "cluster").startswith("etcds://")
            assert tls == (option(conf, "cluster_tls_key") is not None), conf
            assert os.stat(option(conf, "keys_dir")).st_mode & 0o777 == 0o700
            if tls:
                key = os.stat(option(conf, "cluster_tls_key"))
                assert key.st_mode & 0o777 == 0o400, oct(key.st_mode)


def certificates(folder):
    os.mkdir(folder)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=test", "-keyout",
                    folder + "/tls.key", "-out", folder + "/tls.crt"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shutil.copy(folder + "/tls.crt", folder + "/ca.crt")


def each_pod_has_its_own_key():
    for where, things, _, pod in workloads():
        conf = configuration(things, pod)
        assert option(conf, "cluster_trust") == "directory", where
        assert not re.search("^(curve_|insecure)", conf, re.M), where
        folder = os.path.dirname(option(conf, "keys_dir"))
        keys = [(c["name"], m["name"]) for c in all_of(pod) for m in c.get("volumeMounts", [])
                if m["mountPath"] == folder]
        assert keys and set(keys) == {("kvd-files", "keys"), ("kvd", "keys")}, (where, keys)
        for name, mounted in (("keys", {"kvd-files", "kvd"}), ("etc", {"kvd-files", "kvd"})):
            assert volume(pod, name) == {"name": name, "emptyDir": {"medium": "Memory"}}
            holders = {c["name"] for c in all_of(pod) for m in c.get("volumeMounts", [])
                       if m["name"] == name}
            assert holders == mounted, (where, name, holders)
        assert not [t for t in things if t["kind"] == "Secret"]


def containers_start_in_order():
    for where, _, thing, pod in workloads():
        names = [c["name"] for c in pod["initContainers"]]
        sidecar = thing["kind"] == "Deployment"
        assert names.index("kvd-files") < (names + ["kvd"]).index("kvd"), (where, names)
        assert ("kvd" in names) == sidecar, where
        for one in pod["initContainers"]:
            runs_on = one["name"] in ("kvd", "metrics")
            assert one.get("restartPolicy") == ("Always" if runs_on else None), (where, one)
        assert not [c for c in pod["containers"] if "restartPolicy" in c], where


def probes_name_what_there_is():
    for where, things, _, pod in workloads():
        one = container(pod, "kvd")
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            words = one[name]["exec"]["command"]
            assert words[0] == "kvd-ctl", words
            # as kvd-ctl takes it: 3 is that nothing answers, usage is another
            done = subprocess.run([BUILD + "/kvd-ctl"] + words[1:], env={
                "KVD_NAME": env_of(one)["KVD_NAME"], "KVD_RUN_DIR": "/nonexistent",
                "LD_LIBRARY_PATH": BUILD}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert done.returncode == 3, (words, done.returncode, done.stdout)
            assert float(after(words, "-t")) < one[name]["timeoutSeconds"]
        assert "health" not in one["livenessProbe"]["exec"]["command"], \
            "a daemon that drains or refuses is alive"
        assert option(configuration(things, pod), "name") is None, "KVD_NAME is the name"
        for name, live in (("engine", "/health"), ("router", "/healthz")):
            for other in [c for c in pod["containers"] if c["name"] == name]:
                paths = [other[p]["httpGet"]["path"] for p in (
                    "startupProbe", "livenessProbe", "readinessProbe")]
                assert paths == [live, live, "/health"], (where, paths)
        assert {"engine", "router"} & {c["name"] for c in pod["containers"]} or \
            not where.split("/")[-1].startswith(("prefill", "decode", "router")), where


def pods_end_in_order():
    """Wait, the container's own drain, kvd's drain: within the grace."""
    seen = set()
    for where, things, _, pod in workloads():
        # the kubelet would run it at once, with the engine's
        assert not [c for c in pod["initContainers"] if "lifecycle" in c], where
        spent = int(re.fullmatch("([0-9]+) s", option(configuration(things, pod),
                                                      "drain_timeout"))[1])
        for one in pod["containers"]:
            if one["name"] not in ("engine", "router"):
                continue
            seen.add(one["name"])
            stop = one["lifecycle"]["preStop"]["exec"]["command"]
            words = words_of(one)
            own = int(after(words, "--shutdown-timeout" if one["name"] == "engine"
                            else "--drain-timeout"))
            # the router reads the directory each second
            assert stop[0] == "sleep" and int(stop[1]) >= 3 and own >= 20, (where, stop, own)
            spent += int(stop[1]) + own
        if "engine" in [c["name"] for c in pod["containers"]]:
            place = container(pod, "place")  # gone while the engine's preStop waits
            assert place in pod["containers"] and "lifecycle" not in place, where
        assert pod["terminationGracePeriodSeconds"] >= spent + 15, (where, spent)
    assert seen == {"engine", "router"}
    services = compose()["services"]
    for name in ("prefill", "decode"):
        words = " ".join(services[name]["command"]).split()
        assert 0 < int(after(words, "--shutdown-timeout")) < int(
            services[name]["stop_grace_period"][:-1]), words


def ports_agree():
    for where, things, thing, pod in workloads():
        conf = configuration(things, pod)
        ports = {p["name"]: p["containerPort"] for c in all_of(pod) for p in c.get("ports", [])}
        assert option(conf, "listen").endswith(":%d" % ports["kvd"]), where
        assert option(conf, "tcp_listen").endswith(":%d" % ports["kvd-data"]), where
        args = container(pod, "metrics")["args"]
        assert "--upstream=http://%s/" % option(conf, "metrics_listen")[6:] in args
        assert "--secure-listen-address=0.0.0.0:%d" % ports["kvd-metrics"] in args
        spec = named(things, "NetworkPolicy", thing["metadata"]["name"])["spec"]
        admitted = {p["port"] for rule in spec["ingress"] for p in rule["ports"]}
        assert admitted == set(ports.values()), (where, admitted, ports)
        allowed = {p["port"] for rule in spec["egress"] for p in rule["ports"]}
        etcd = re.match("etcds?://[a-z.]+:([0-9]+)/", env_of(container(pod, "kvd-files"))[
            "CLUSTER"])
        assert {ports["kvd"], ports["kvd-data"], int(etcd[1]), 53} <= allowed, (where, allowed)
        for one in pod["containers"]:
            if one["name"] == "engine":
                assert after(words_of(one), "--port") == str(ports["http"]), where
                engine = ports["http"]
                assert [r for r in spec["ingress"] if {"port": engine} in r["ports"]][0]["from"] \
                    == [{"podSelector": {"matchExpressions": [
                        {"key": "app", "operator": "In", "values": ["router"]}]}}], where
        if thing["metadata"]["name"] == "router-kvd":
            assert 8100 in allowed, where
    monitor = named(rendered("overlays/monitoring"), "PodMonitor", "kvd")["spec"]
    end, = monitor["podMetricsEndpoints"]
    assert (end["port"], end["path"], end["scheme"]) == ("kvd-metrics", "/metrics", "https")
    assert monitor["selector"]["matchLabels"] == {"kvd": "yes"}


def daemon_has_no_rights():
    for where, _, _, pod in workloads():
        for one in all_of(pod):
            context = one["securityContext"]
            assert not context["allowPrivilegeEscalation"], where
            assert context["capabilities"]["drop"] == ["ALL"], where
            # a vLLM image sets its user; the step makes a folder on the host
            if one["name"] not in ("engine", "run-dir"):
                assert context["readOnlyRootFilesystem"] and context["runAsNonRoot"], where
                assert "add" not in context["capabilities"], where
            if one["name"] in ("kvd", "kvd-files", "place", "router", "scale"):
                assert context["runAsUser"] == context["runAsGroup"] == 997, (where, one["name"])
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod), where
        gpu = "nvidia.com/gpu" in json.dumps([c.get("resources", {}) for c in all_of(pod)])
        # CUDA's import needs to see the process; nothing else does
        assert pod.get("shareProcessNamespace", False) == gpu, where


def gpus_are_asked_for():
    for where, _, thing, pod in workloads():
        if thing["metadata"]["labels"]["app"] in ("prefill", "decode"):
            limits = container(pod, "engine")["resources"]["limits"]
            assert limits.get("nvidia.com/gpu", 0) >= 1, where
            assert env_of(container(pod, "kvd"))["NVIDIA_VISIBLE_DEVICES"] == "all", where
            assert pod["tolerations"][0]["key"] == "nvidia.com/gpu", where
            assert pod["nodeSelector"], where


def memory_fits_the_limit():
    for where, things, _, pod in workloads():
        conf, one = configuration(things, pod), container(pod, "kvd")
        limit = size(one["resources"]["limits"]["memory"])
        assert size(one["resources"]["requests"]["memory"]) == limit, where
        chunks = size(option(conf, "chunk_memory", "0"))
        assert limit >= chunks + 2 * size(option(conf, "memory_limit")), where
        for each in all_of(pod):
            if "ports" in each:
                assert "memory" in each["resources"]["limits"], (where, each["name"])


def engines_take_their_options():
    roles = {}
    for where, _, thing, pod in workloads():
        for one in [c for c in pod["containers"] if c["name"] == "engine"]:
            env, app = env_of(one), thing["metadata"]["labels"]["app"]
            transfer = json.loads(after(words_of(one), "--kv-transfer-config"))
            assert transfer["kv_connector_module_path"] == "kvd.vllm"
            roles[app] = transfer["kv_role"]
            extra = transfer["kv_connector_extra_config"]
            with open(TREE + "/python/kvd/vllm/connector.py") as f:
                assert '("%s")' % '", "'.join(extra) in f.read(), extra
            assert extra["worker"] == env["POD"] and extra["url"] == "http://10.1.2.3:8100"
            assert env["KVD_SOCKET"] == "/run/kvd/%s.sock" % env_of(
                container(pod, "kvd"))["KVD_NAME"], where
            words = words_of(container(pod, "place"))
            assert words[:4] == ["python3", "-m", "kvd.router", "publish"], words
            done = subprocess.run([KVD_PYTHON, "-c", PARSE] + words[4:], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert done.returncode == 0, done.stdout
            assert after(words, "--socket") == env["KVD_SOCKET"], where
            # the router's group is another than the engine's, which has the engine until its end
            assert after(words, "--role") != extra["group"], where
            for mount in one["volumeMounts"] + container(pod, "place")["volumeMounts"]:
                assert mount["name"] != "run" or mount["readOnly"], where
    assert roles == {"prefill": "kv_producer", "decode": "kv_consumer"}, roles


def images_are_of_one_version():
    tags = {c["image"] for _, _, _, pod in workloads() for c in all_of(pod)
            if c["image"].startswith("kvd")}
    assert len(tags) == 2 and len({t.partition(":")[2] for t in tags}) == 1, tags
    with open(TREE + "/Makefile") as make, open(TREE + "/debian/changelog") as log:
        assert tags.pop().partition(":")[2] in make.read() + log.read()


def nodes_sockets_are_of_the_host():
    for name in ("node", "store"):
        things = rendered("overlays/" + name)
        pod = named(things, "DaemonSet", name + "-kvd")["spec"]["template"]["spec"]
        assert volume(pod, "run")["hostPath"]["path"] == "/run/kvd"
        fields = [e["valueFrom"]["fieldRef"]["fieldPath"] for e in container(pod, "kvd")["env"]
                  if e["name"] == "KVD_NAME"]
        assert fields == ["metadata.labels['app']"], fields  # a name that engines can know
        assert not [t for t in things if t["kind"] == "PodDisruptionBudget"]


def autoscalers_follow_the_metric():
    """The options of scale are such, and it writes the series that they ask for."""
    cluster = rendered("cluster")
    pod = named(cluster, "Deployment", "scale-kvd")["spec"]["template"]["spec"]
    words = words_of(container(pod, "scale"))
    assert words[:3] == ["python3", "-m", "kvd.router"]
    words = words[3:]
    groups = words[1:3]
    for option in ("--interval", "--socket"):
        at = words.index(option)
        del words[at:at + 2]
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/kvd.prom"
        words[words.index("--metrics") + 1] = path
        answer = {"ranks": []}
        done = subprocess.run([KVD_PYTHON, "-m", "kvd.router", *words, "--from", "-"], text=True,
                              input=json.dumps({"groups": dict.fromkeys(groups, answer)}),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        with open(path) as f:
            written = f.read()
    hpas = [t for t in cluster if t["kind"] == "HorizontalPodAutoscaler"]
    assert len(hpas) == 2
    for hpa in hpas:
        metric = hpa["spec"]["metrics"][0]["external"]
        label, = metric["metric"]["selector"]["matchLabels"].items()
        assert '%s{%s="%s"} ' % (metric["metric"]["name"], *label) in written, (hpa, written)
        assert metric["target"] == {"type": "AverageValue", "averageValue": "1"}
        # limits of the two agree
        role = label[1].partition("-")[0]
        limits = words[words.index("--" + role) + 1]
        assert limits == "%d:%d" % (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"])
        # the Deployment may have that many, of engines that say their load in this group
        target = named(cluster, "Deployment", hpa["spec"]["scaleTargetRef"]["name"])
        assert target["metadata"]["labels"]["app"] == role
        assert "replicas" not in target["spec"], "applying it would undo the autoscaler's"
        assert target["spec"]["strategy"]["type"] == "RollingUpdate"
        engine = container(target["spec"]["template"]["spec"], "engine")
        env = [e for e in engine["env"] if e["name"] == "ROLE"][0]
        assert env["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['app']"
        assert json.loads(env_of(engine)["KV_TRANSFER"])["kv_connector_extra_config"][
            "group"] == "prefill-engines", "of a pod whose label app is prefill"
        assert label[1] == role + "-engines" and label[1] in groups


def compose_is_one_network_and_one_volume():
    services = compose()["services"]
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
    config, services = router_config(), compose()["services"]
    assert services["router"]["entrypoint"] == ["python3", "-m", "kvd.router"]
    options = config.read(services["router"]["command"])
    assert services["kvd-prefill"]["ports"] == ["127.0.0.1:8000:%d" % options.listen[1]]
    assert options.listen[0] == "0.0.0.0", "the port is published from its network"
    for spec in options.static:
        port = services[spec.role]["environment"]["PORT"]
        assert spec.url == "http://127.0.0.1:" + port and spec.engine == "vllm"
    assert int(services["router"]["stop_grace_period"][:-1]) > options.drain_timeout
    pod = named(rendered("cluster"), "Deployment", "router-kvd")["spec"]["template"]["spec"]
    one = container(pod, "router")
    words = words_of(one)
    assert words[:3] == ["python3", "-m", "kvd.router"]
    options = config.read(words[3:])
    assert options.listen == ("0.0.0.0", one["ports"][0]["containerPort"])
    assert options.socket == "/run/kvd/%s.sock" % env_of(container(pod, "kvd"))["KVD_NAME"]
    # the groups that the containers `place` publish in
    assert (options.prefill_group, options.decode_group) == ("prefill", "decode")


def main():
    try:
        if not shutil.which("kubectl"):
            raise Skip("kubectl (kubernetes-client)")
        python()
    except Skip as need:
        print("skipped: %s" % need)
        return 77
    run([all_overlays_are_rendered, manifests_fit_the_schemas, names_are_there,
         configurations_are_taken, each_pod_has_its_own_key, containers_start_in_order,
         probes_name_what_there_is, pods_end_in_order, ports_agree, daemon_has_no_rights,
         gpus_are_asked_for, memory_fits_the_limit, engines_take_their_options,
         images_are_of_one_version, nodes_sockets_are_of_the_host,
         autoscalers_follow_the_metric, compose_is_one_network_and_one_volume,
         router_takes_its_options])
    return 0


if __name__ == "__main__":
    sys.exit(main())
