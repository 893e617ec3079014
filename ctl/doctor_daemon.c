/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of the daemon by its replies to the usual commands of kvd-ctl. If the daemon
 * does not respond, doctor_daemon() reports that and the other checks have nothing to
 * check.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/doctor.h"
#include "daemon/base/endpoint.h"
#include "daemon/base/err.h"

#define LIBKVD "libkvd.so." KVD_SOVERSION
#define STUCK "30s"
#define RECENT_MS 600000
#define LINES_MAX 8 /* of one check; then "and N more" */

/* ---- daemon, version ---- */

/* The daemon's error message appears in the line unchanged. */
static void say_no_answer(struct doctor *d)
{
	const struct kvd_error *error = &d->ctl->error;
	struct dirent **names = NULL;
	int count = d->ctl->socket || d->ctl->name ? 0 : ctl_instances(&names);
	char remedy[120];

	ctl_instances_free(names, count);
	if (count > 1) {
		doctor_say(d, DOCTOR_FAIL,
			   "pass --name NAME or --all; kvd-ctl ls lists them",
			   "%d instances in %s", count, ctl_run_dir());
		return;
	}
	snprintf(remedy, sizeof(remedy),
		 "systemctl start kvd@%.60s; check its journal if it fails",
		 d->ctl->name ? d->ctl->name : "NAME");
	doctor_say(d, DOCTOR_FAIL,
		   error->code == KVD_E_VERSION
			   ? "use the kvd-ctl of the daemon's version"
		   : error->code == KVD_E_PERM ? "run as root or in the socket's group"
		   : error->code == KVD_E_NOREPLY
			   ? "the process is stopped or hangs: check journalctl -u "
			     "kvd@NAME and gdb -p PID"
			   : remedy,
		   "%s: %s", kvd_code_name(error->code), error->message);
}

void doctor_daemon(struct doctor *d)
{
	struct ctl *ctl = d->ctl;
	const char *state, *why;

	if (ctl_query(ctl, "health", NULL, &d->health)) {
		say_no_answer(d);
		return;
	}
	d->pid = kvd_daemon(ctl->client)->pid;
	ctl_query(ctl, "config.show", NULL, &d->settings);
	ctl_query(ctl, "devices", NULL, &d->devices);
	ctl_query(ctl, "stats", NULL, &d->stats);
	d->unprivileged =
		ctl_query(ctl, "session.list", ctl_args_all(), &d->sessions) != 0;
	ctl_query(ctl, "region.list", ctl_args_all(), &d->regions);
	state = ctl_str(d->health, "state", "?");
	why = ctl_str(d->health, "why", "");
	if (strcmp(state, "serving") == 0 || strcmp(state, "degraded") == 0)
		doctor_say(d, DOCTOR_OK, "", "%s serves, pid %d, up %s",
			   kvd_daemon(ctl->client)->name, d->pid,
			   ctl_ms(ctl_num(d->health, "uptime_ms")));
	else if (strcmp(state, "refusing") == 0)
		doctor_say(d, DOCTOR_FAIL,
			   "check kvd-ctl devices and the option `require`",
			   "refuses rooms: %s", why);
	else
		doctor_say(d, DOCTOR_WARN, "start the daemon again after it has stopped",
			   "%s: accepts no new rooms", state);
	if (*ctl_str(d->health, "sandbox_lacks", ""))
		doctor_say(d,
			   strcmp(doctor_setting(d, "sandbox"), "no") == 0 ? DOCTOR_WARN
									   : DOCTOR_NOTE,
			   "sandbox = yes, and a kernel that supports it",
			   "a compromised daemon would not be fully confined: %s",
			   ctl_str(d->health, "sandbox_lacks", ""));
	if (d->unprivileged)
		doctor_say(d, DOCTOR_WARN,
			   "run as root, the daemon's user or one of admin_uids",
			   "uid %u has no permission to list engines and rooms",
			   (unsigned int)geteuid());
}

/* "" if the dynamic linker finds no library. */
static const char *libkvd_version(char text[32])
{
	void *library = dlopen(LIBKVD, RTLD_LAZY | RTLD_LOCAL);
	const char *(*version)(void) = NULL;

	*text = '\0';
	if (!library)
		return text;
	*(void **)&version = dlsym(library, "kvd_version");
	if (version)
		snprintf(text, 32, "%.31s", version());
	dlclose(library);
	return text;
}

void doctor_version(struct doctor *d)
{
	const char *daemon = d->health ? kvd_daemon(d->ctl->client)->daemon : "";
	char library[32], path[500], program[400];
	bool differ;
	ssize_t n;

	libkvd_version(library);
	if (strncmp(daemon, "kvd ", 4) == 0)
		daemon += 4;
	differ = (*daemon && strcmp(daemon, kvd_version()) != 0) ||
		 (*library && strcmp(library, kvd_version()) != 0);
	doctor_say(d, differ ? DOCTOR_WARN : DOCTOR_OK,
		   differ ? "install the same version of kvd, kvd-ctl and libkvd" : "",
		   "daemon %s, kvd-ctl %s, " LIBKVD " %s", *daemon ? daemon : "-",
		   kvd_version(), *library ? library : "not installed");
	snprintf(path, sizeof(path), "%s/proc/%d/exe", d->root, d->pid);
	n = d->pid ? readlink(path, program, sizeof(program) - 1) : -1;
	if (n < 10)
		return;
	program[n] = '\0';
	if (strcmp(program + n - 10, " (deleted)") == 0)
		doctor_say(d, DOCTOR_WARN, "kvd-ctl drain, then start it again",
			   "the executable was replaced after the daemon started");
}

/* ---- configuration ---- */

void doctor_config(struct doctor *d)
{
	cJSON *args = cJSON_CreateObject(), *reply;
	const cJSON *row;
	bool restart = false;
	char names[300] = "", keys[CTL_KEYS_MAX];
	int count = 0;
	size_t n = 0;

	cJSON_AddTrueToObject(args, "check");
	if (!d->health) {
		cJSON_Delete(args);
		return;
	}
	if (ctl_query(d->ctl, "config.reload", args, &reply)) {
		if (d->ctl->error.code != KVD_E_PERM)
			doctor_say(d, DOCTOR_FAIL, "kvd --check-config lists all errors",
				   "the next start or reload would fail: %s",
				   d->ctl->error.message);
		return;
	}
	cJSON_ArrayForEach(row, ctl_list(reply, "options")) {
		restart = restart || ctl_true(row, "restart");
		if (n < sizeof(names) - 100)
			n += (size_t)snprintf(
				names + n, sizeof(names) - n, "%s%.30s %.25s -> %.25s",
				count ? ", " : "", ctl_str(row, "name", "?"),
				ctl_str(row, "running", ""), ctl_str(row, "file", ""));
		count++;
	}
	if (ctl_keys_differ(reply, keys))
		doctor_say(d, DOCTOR_WARN, "kvd-ctl reload",
			   "curve_allow_file has changed since it was read: %s", keys);
	else if (!count)
		doctor_say(d, DOCTOR_OK, "", "%s: in effect",
			   *ctl_str(reply, "path", "") ? ctl_str(reply, "path", "")
						       : "built-in defaults");
	if (count)
		doctor_say(d, DOCTOR_WARN,
			   restart ? "kvd-ctl config --diff; restart the daemon"
				   : "kvd-ctl reload",
			   "the file differs from the options in effect: %s%s", names,
			   n < sizeof(names) - 100 ? "" : " …");
	cJSON_Delete(reply);
}

void doctor_listen(struct doctor *d)
{
	const char *listen = doctor_setting(d, "listen");
	const char *port = strrchr(listen, ':');
	bool random = port && strtoul(port + 1, NULL, 10) == 0;
	/* intended if all daemons are on one host */
	bool loopback = endpoint_is_loopback(listen);

	if (!*listen)
		return;
	if (ctl_true(d->health, "insecure"))
		doctor_say(d, DOCTOR_WARN,
			   "insecure = no (the next start generates keys), unless ucx is "
			   "used beyond loopback",
			   "insecure = yes: any host that reaches the ports can read and "
			   "write engines' caches");
	if (loopback)
		doctor_say(d, DOCTOR_NOTE,
			   "for daemons on several hosts: listen = an address of this "
			   "host",
			   "%s: not reachable from other hosts", listen);
	if (random)
		doctor_say(d, loopback ? DOCTOR_NOTE : DOCTOR_WARN,
			   "listen = a fixed port", "%s: the port changes at each start",
			   listen);
	if (!loopback && !random)
		doctor_say(d, DOCTOR_OK, "", "%s", listen);
}

/* ---- keys ---- */

static void check_secret(struct doctor *d, const char *path)
{
	char remedy[400];
	struct stat st;

	if (stat(path, &st) < 0) {
		doctor_say(d, DOCTOR_FAIL, "curve_secret_file = an existing file",
			   "%s: the next start would fail: %m", path);
		return;
	}
	snprintf(remedy, sizeof(remedy), "chmod 600 %.300s", path);
	if (st.st_mode & 077)
		doctor_say(d, DOCTOR_FAIL, remedy,
			   "%s has mode %04o: other users can read the key", path,
			   (unsigned int)st.st_mode & 07777);
	snprintf(remedy, sizeof(remedy), "chown %ld %.300s", d->uid, path);
	if (d->uid >= 0 && d->uid != (long)st.st_uid && d->uid != 0)
		doctor_say(
			d, DOCTOR_FAIL, remedy,
			"%s is owned by uid %u, the daemon runs as %ld: the next start "
			"would fail",
			path, (unsigned int)st.st_uid, d->uid);
}

static void check_allowed(struct doctor *d, const char *path)
{
	char remedy[400];
	struct stat st;

	snprintf(remedy, sizeof(remedy), "chmod go-w %.300s", path);
	if (stat(path, &st) < 0)
		doctor_say(d, DOCTOR_FAIL, "curve_allow_file = an existing file",
			   "%s: the next start or reload would fail: %m", path);
	else if (st.st_mode & 022)
		doctor_say(d, DOCTOR_FAIL, remedy,
			   "%s has mode %04o: other users can allow daemons", path,
			   (unsigned int)st.st_mode & 07777);
}

/* Names of the allow-list are users: see CURVE_SHARED_WHY of the daemon. */
static void say_shared(struct doctor *d, const cJSON *keys)
{
	const cJSON *one, *other;

	cJSON_ArrayForEach(one, ctl_list(keys, "allowed")) {
		for (other = one->next; other; other = other->next) {
			if (strcmp(ctl_str(one, "name", ""), ctl_str(other, "name", "")))
				continue;
			doctor_say(d, DOCTOR_WARN,
				   "use a name per daemon, as its kvd-ctl keys prints it",
				   "'%s' has several keys in curve_allow_file: these "
				   "daemons count as one user",
				   ctl_str(one, "name", ""));
			return;
		}
	}
}

static void say_refused(struct doctor *d, const cJSON *keys)
{
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(keys, "refused")) {
		const char *why = ctl_str(one, "why", "?");
		/* the peer has a wrong key of ours, or our list lacks its key */
		const char *remedy =
			strstr(why, "expects another")
				? "on that host: put the key that kvd-ctl keys prints "
				  "here into this daemon's line, then kvd-ctl reload"
				: "if it is a peer: put its key into its line of "
				  "curve_allow_file, then kvd-ctl reload";

		if (ctl_num(one, "last_ms") < RECENT_MS)
			doctor_say(d, DOCTOR_WARN, remedy,
				   "%s%s%s was refused %s, the last %s ago: %s",
				   ctl_str(one, "address", "?"),
				   *ctl_str(one, "key", "") ? " with key " : "",
				   ctl_str(one, "key", ""),
				   ctl_count(ctl_num(one, "count"), "time"),
				   ctl_ms(ctl_num(one, "last_ms")), why);
	}
}

/* The uid of the daemon's process; any user may read its status file. */
static void find_uid(struct doctor *d)
{
	char status[4096];
	const char *at = NULL;

	if (d->pid && doctor_read(d, status, sizeof(status), "/proc/%d/status", d->pid))
		at = strstr(status, "\nUid:");
	if (at)
		sscanf(at, "\nUid: %*d %ld", &d->uid);
}

void doctor_keys(struct doctor *d)
{
	const char *secret = doctor_setting(d, "curve_secret_file"),
		   *allowed = doctor_setting(d, "curve_allow_file");
	enum doctor_result before = d->worst;
	cJSON *keys;
	int count, beside;
	bool keyed;

	find_uid(d);
	if (!d->health || ctl_query(d->ctl, "keys", NULL, &keys))
		return;
	count = cJSON_GetArraySize(ctl_list(keys, "allowed"));
	beside = cJSON_GetArraySize(ctl_list(keys, "beside"));
	keyed = *ctl_str(keys, "public_key", "") != '\0';
	d->worst = DOCTOR_OK;
	/* the daemon reports paths to administrators only */
	if (*secret == '/')
		check_secret(d, secret);
	if (*allowed == '/')
		check_allowed(d, allowed);
	if (*secret && count == 0)
		doctor_say(d, DOCTOR_WARN,
			   "add the lines of the other daemons, then kvd-ctl reload",
			   "%s: no daemon may connect",
			   *allowed ? allowed : "curve_allow_file");
	say_shared(d, keys);
	say_refused(d, keys);
	if (!keyed)
		doctor_say(d, DOCTOR_WARN, "insecure = no",
			   "no key (insecure = yes): peers are not authenticated");
	else if (d->worst == DOCTOR_OK)
		doctor_say(d, DOCTOR_OK, "",
			   "%s may connect by curve_allow_file, %s as the same user "
			   "on this host",
			   ctl_count(count, "daemon"),
			   beside > 1 ? ctl_count(beside - 1, "daemon") : "none");
	d->worst = before > d->worst ? before : d->worst;
	cJSON_Delete(keys);
}

/* ---- transports ---- */

void doctor_transports(struct doctor *d)
{
	const char *require = doctor_setting(d, "require");
	char names[200] = "";
	const cJSON *one;
	size_t n = 0;

	if (!d->health)
		return;
	cJSON_ArrayForEach(one, ctl_list(d->health, "transports"))
		if (n < sizeof(names) - 20)
			n += (size_t)snprintf(names + n, sizeof(names) - n, "%s%.16s",
					      n ? " " : "", ctl_str(one, "name", "?"));
	doctor_say(d, n ? DOCTOR_OK : DOCTOR_FAIL,
		   n ? "" : "check the option `transports` and the daemon's log",
		   "%s; require: %s", n ? names : "none", *require ? require : "any");
}

/* ---- sockets ---- */

static void check_same_endpoint(struct doctor *d, const struct ctl_seen *a,
				const struct ctl_seen *b)
{
	size_t len = strcspn(a->endpoint, "#");

	if (len && len == strcspn(b->endpoint, "#") &&
	    strncmp(a->endpoint, b->endpoint, len) == 0)
		doctor_say(d, DOCTOR_FAIL, "give each its own `listen` or `advertise`",
			   "%s and %s both advertise %.*s", a->name, b->name, (int)len,
			   a->endpoint);
}

void doctor_sockets(struct doctor *d)
{
	static struct ctl_seen seen[64];
	struct dirent **names = NULL;
	int all = ctl_instances(&names), count = all > 64 ? 64 : all, stale = 0;
	char path[512];

	for (int i = 0; i < count; i++) {
		char *name = names[i]->d_name;

		snprintf(path, sizeof(path), "%s/%s", ctl_run_dir(), name);
		name[strlen(name) - 5] = '\0'; /* .sock */
		seen[i] = (struct ctl_seen){.name = name};
		ctl_instance_look(path, &seen[i]);
		if (strcmp(seen[i].state, "ENODAEMON") == 0 && ++stale)
			doctor_say(d, DOCTOR_WARN,
				   "start that instance, or remove the file",
				   "%s: no process listens: the daemon was killed", path);
		for (int j = 0; j < i; j++)
			check_same_endpoint(d, &seen[j], &seen[i]);
	}
	if (count > 0 && !stale)
		doctor_say(d, DOCTOR_OK, "", "%d in %s", all, ctl_run_dir());
	ctl_instances_free(names, all);
}

/* ---- peers ---- */

static double dead_after_ms(const struct doctor *d)
{
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(d->stats, "metrics"))
		if (strcmp(ctl_str(one, "name", ""), "peer_dead_after_seconds") == 0)
			return 1000 * ctl_num(one, "value");
	return 0;
}

/* No room waits for a lost peer. A peer that was never connected and never used by a room
 * may have been a test only. A key mismatch always needs a fix. */
static enum doctor_result peer_result(const cJSON *peer, const char *state,
				      const char *code)
{
	if (strcmp(state, "unreached") == 0 && !ctl_num(peer, "rooms_ended") &&
	    strcmp(code, "EAUTH") != 0)
		return DOCTOR_NOTE;
	return strcmp(state, "lost") == 0 || strcmp(state, "unreached") == 0
		       ? DOCTOR_WARN
		       : DOCTOR_FAIL;
}

static void say_error(struct doctor *d, const cJSON *peer, const char *state)
{
	const cJSON *error = ctl_list(peer, "last_error");
	const char *code = ctl_str(error, "code", "EPEER");
	const char *why =
		ctl_str(error, "message", ctl_str(peer, "why", "not connected"));

	doctor_say(d, peer_result(peer, state, code), err_remedy(err_of_name(code)),
		   "%s: %s for %s: %s: %s", ctl_peer_name(peer), state,
		   ctl_ms(ctl_num(peer, "since_ms")), code, why);
}

/* Whether one of the first `count` --peer options has already reported this endpoint. */
static bool was_tried(const struct doctor *d, unsigned int count, const char *endpoint)
{
	for (unsigned int i = 0; i < count; i++) {
		if (endpoint_same(d->ctl->peers.word[i], endpoint))
			return true;
	}
	return false;
}

static const char *line_remedy(const char *code)
{
	if (strcmp(code, "EREQUIRE") == 0)
		return "compare the options `require` and `transports` of both daemons";
	if (!*code)
		return "";
	return "open the port that it names (firewall, IPAddressAllow= under systemd), "
	       "or set that option there to an address that this host reaches";
}

/* Whether it printed a line. */
static bool check_peer(struct doctor *d, const cJSON *peer)
{
	const char *state = ctl_str(peer, "state", "?"),
		   *version = ctl_str(peer, "version", "-"),
		   *own = kvd_daemon(d->ctl->client)->daemon,
		   *code = ctl_str(peer, "why_code", "");
	double rtt_ms = ctl_num(peer, "rtt_us") / 1000, dead_ms = dead_after_ms(d);
	bool slow = dead_ms > 0 && rtt_ms > dead_ms / 4, line;

	if (ctl_true(peer, "self"))
		return false;
	line = ctl_true(peer, "data_line");
	if (strcmp(state, "up") != 0) {
		if (was_tried(d, d->ctl->peers.count, ctl_str(peer, "endpoint", "")))
			return false;
		say_error(d, peer, state);
		return true;
	}
	doctor_say(d,
		   !line && !*code				       ? DOCTOR_NOTE
		   : !line					       ? DOCTOR_FAIL
		   : slow || (*version == 'k' && strcmp(version, own)) ? DOCTOR_WARN
								       : DOCTOR_OK,
		   !line  ? line_remedy(code)
		   : slow ? "check the network and the peer's load; raise dead_after"
		   : *version == 'k' && strcmp(version, own)
			   ? "run the same version in all daemons of a deployment"
			   : "",
		   "%s: up for %s, %s, transport %s, round trip %s%s%s",
		   ctl_peer_name(peer), ctl_ms(ctl_num(peer, "since_ms")), version,
		   ctl_str(peer, "transport", "none"), ctl_ms(rtt_ms),
		   line ? "" : "; data connection failed: ",
		   line ? "" : ctl_str(peer, "why", ""));
	if (line && !ctl_true(peer, "same_host") &&
	    strcmp(ctl_str(peer, "crypto", "none"), "none") == 0)
		doctor_say(d, DOCTOR_WARN,
			   "tcp_crypto = aes128gcm; for RDMA use MACsec or IPsec in the "
			   "adapter (docs/security.md) or a dedicated network",
			   "%s: data crosses the network unencrypted, transport %s",
			   ctl_peer_name(peer), ctl_str(peer, "transport", "none"));
	if (*ctl_str(peer, "passed_over", ""))
		doctor_say(d, DOCTOR_WARN,
			   "change that, or remove the skipped transport from "
			   "`transports`",
			   "%s: using %s; skipped: %s", ctl_peer_name(peer),
			   ctl_str(peer, "transport", "none"),
			   ctl_str(peer, "passed_over", ""));
	return true;
}

/* --peer: the daemon connects, even to an endpoint that it does not know yet. */
static void reach_peer(struct doctor *d, const char *endpoint)
{
	cJSON *args = cJSON_CreateObject(), *reply;

	cJSON_AddStringToObject(args, "endpoint", endpoint);
	cJSON_AddNumberToObject(args, "timeout_ms", d->ctl->timeout_ms / 2);
	if (ctl_query(d->ctl, "peer.connect", args, &reply) == CTL_OK)
		doctor_say(d, DOCTOR_OK, "", "%.*s: connected, transport %s",
			   (int)strcspn(endpoint, "#"), endpoint,
			   ctl_str(reply, "transport", "none"));
	else
		doctor_say(
			d, DOCTOR_FAIL,
			d->ctl->error.code == KVD_E_TIMEOUT
				? "check that its daemon runs, that its `listen` is that "
				  "address, and that no firewall blocks the port"
				: err_remedy((enum err_code)d->ctl->error.code),
			"%.*s: %s: %s", (int)strcspn(endpoint, "#"), endpoint,
			kvd_code_name(d->ctl->error.code), d->ctl->error.message);
	cJSON_Delete(reply);
}

void doctor_peers(struct doctor *d)
{
	static const char *const members[] = {"peers", "lost"};
	cJSON *reply;
	const cJSON *peer;
	unsigned int said = d->ctl->peers.count;

	if (!d->health)
		return;
	for (unsigned int i = 0; i < d->ctl->peers.count; i++)
		if (!was_tried(d, i, d->ctl->peers.word[i]))
			reach_peer(d, d->ctl->peers.word[i]);
	if (ctl_query(d->ctl, "peer.list", NULL, &reply))
		return;
	for (unsigned int i = 0; i < 2; i++) {
		cJSON_ArrayForEach(peer, ctl_list(reply, members[i])) {
			said += check_peer(d, peer);
		}
	}
	if (!said)
		doctor_say(d, DOCTOR_OK, "", "none known; --peer ENDPOINT checks one");
	cJSON_Delete(reply);
}

/* ---- loop, rooms, failures ---- */

/* A daemon without a chunk store refuses the command: no line. */
void doctor_chunks(struct doctor *d)
{
	cJSON *reply = NULL;
	const cJSON *files, *nodes, *index;
	const char *why;

	if (!d->health || ctl_query(d->ctl, "chunk.list", NULL, &reply) != 0)
		return;
	files = cJSON_GetObjectItemCaseSensitive(reply, "files");
	why = ctl_str(files, "why", "");
	if (!ctl_true(reply, "ready"))
		doctor_say(d, DOCTOR_WARN,
			   "wait, or check the daemon's log; lower chunk_memory",
			   "the memory for chunks (%s) is not allocated",
			   ctl_bytes(ctl_num(reply, "memory_bytes")));
	else if (files && *why)
		doctor_say(d, DOCTOR_WARN,
			   "fix the cause (check dmesg and df), then restart the daemon",
			   "chunk_dir: %s: %s",
			   ctl_true(files, "open") ? "writing has stopped" : "not used",
			   why);
	else if (ctl_true(files, "stands"))
		doctor_say(
			d, DOCTOR_WARN,
			"restore the disk (check dmesg); the daemon cannot exit before",
			"the disk of %s does not respond", ctl_str(files, "dir", ""));
	else if (ctl_true(files, "full"))
		doctor_say(d, DOCTOR_WARN, "free space, or lower chunk_dir_size",
			   "the file system of %s is full (%s free): no more files are "
			   "created for chunks",
			   ctl_str(files, "dir", ""),
			   ctl_bytes(ctl_num(files, "disk_free_bytes")));
	else
		doctor_say(d, DOCTOR_OK, NULL, "%s of memory%s%s",
			   ctl_bytes(ctl_num(reply, "memory_bytes")),
			   files ? ", files in " : "", ctl_str(files, "dir", ""));
	nodes = cJSON_GetObjectItemCaseSensitive(reply, "index_nodes");
	if (ctl_num(nodes, "up") < ctl_num(nodes, "nodes"))
		doctor_say(d, DOCTOR_WARN,
			   "start them with chunk_memory; kvd-ctl peers shows the errors",
			   "%.0f of %.0f daemons of chunk_index are up",
			   ctl_num(nodes, "up"), ctl_num(nodes, "nodes"));
	index = cJSON_GetObjectItemCaseSensitive(reply, "index");
	if (ctl_num(index, "unknown") > 0)
		doctor_say(
			d, DOCTOR_WARN, "raise chunk_index_memory",
			"the chunk index has no space for %.0f chunks of other daemons",
			ctl_num(index, "unknown"));
	cJSON_Delete(reply);
}

void doctor_loop(struct doctor *d)
{
	const cJSON *late = ctl_list(ctl_list(d->stats, "loop"), "late_us");
	double p99_ms = ctl_num(late, "p99") / 1000, max_ms = ctl_num(late, "max") / 1000,
	       dead_ms = dead_after_ms(d);
	bool often, once;

	if (!late)
		return;
	often = dead_ms > 0 && p99_ms > dead_ms / 4;
	once = dead_ms > 0 && max_ms > dead_ms;
	doctor_say(d, often || once ? DOCTOR_WARN : DOCTOR_OK,
		   often || once
			   ? "the daemon lacks CPU time: raise CPUWeight= or dead_after"
			   : "",
		   "timers late by %s (p99), at most %s since start; dead_after %s",
		   ctl_ms(p99_ms), ctl_ms(max_ms), ctl_ms(dead_ms));
}

static const char *stuck_remedy(const cJSON *room)
{
	const char *who = ctl_str(ctl_list(room, "waits_for"), "who", "");

	if (strcmp(ctl_str(room, "state_name", ""), "unopened") == 0)
		return "check the router: no engine here has opened the room; or kvd-ctl "
		       "abort at the peer";
	if (strncmp(who, "engine ", 7) == 0)
		return "check that engine's log, or kvd-ctl abort";
	if (strncmp(who, "this daemon", 11) == 0)
		return "check this daemon's log and load";
	return "run kvd-ctl room NUMBER at the peer";
}

void doctor_rooms(struct doctor *d)
{
	cJSON *args = ctl_args_all(), *reply;
	const cJSON *room;
	const char *stuck = d->ctl->stuck ? d->ctl->stuck : STUCK;
	int count = 0, total;
	double stuck_ms;

	cJSON_AddTrueToObject(args, "live");
	ctl_duration(stuck, &stuck_ms); /* checked by ctl_run_doctor() */
	cJSON_AddNumberToObject(args, "stuck_ms", (double)(long)stuck_ms);
	if (!d->health || d->unprivileged) {
		cJSON_Delete(args);
		return;
	}
	if (ctl_query(d->ctl, "room.list", args, &reply))
		return;
	total = cJSON_GetArraySize(ctl_list(reply, "rooms"));
	cJSON_ArrayForEach(room, ctl_list(reply, "rooms")) {
		const cJSON *waits = ctl_list(room, "waits_for");

		if (++count > LINES_MAX)
			break;
		doctor_say(d, DOCTOR_WARN, stuck_remedy(room),
			   "room %s (%s) has waited %s for %s",
			   ctl_str(room, "room", "?"), ctl_str(room, "role", "?"),
			   ctl_ms(ctl_num(waits, "since_ms")),
			   ctl_str(waits, "what", "?"));
	}
	if (total > LINES_MAX)
		doctor_say(d, DOCTOR_WARN, "kvd-ctl rooms --stuck", "and %s%d more",
			   total == 1000 ? "at least " : "", total - LINES_MAX);
	else if (!total)
		doctor_say(d, DOCTOR_OK, "", "%.0f open, none waiting longer than %s",
			   ctl_num(reply, "total"), stuck);
	cJSON_Delete(reply);
}

/* The count of one code and the latest failure. The list is sorted latest first. */
static void say_failures(struct doctor *d, const cJSON *rooms, const cJSON *latest)
{
	const char *code = ctl_str(ctl_list(latest, "error"), "code", "?");
	const cJSON *one;
	unsigned int count = 0;

	cJSON_ArrayForEach(one, rooms)
		count += strcmp(ctl_str(ctl_list(one, "error"), "code", ""), code) == 0;
	doctor_say(d, DOCTOR_WARN, err_remedy(err_of_name(code)),
		   "%s failed with %s; the latest, %s (%s), %s ago: %s",
		   ctl_count(count, "room"), code, ctl_str(latest, "room", "?"),
		   ctl_str(latest, "role", "?"), ctl_ms(ctl_num(latest, "ended_ms")),
		   ctl_str(ctl_list(latest, "error"), "message", ""));
}

static bool was_before(const cJSON *rooms, const cJSON *room)
{
	const char *code = ctl_str(ctl_list(room, "error"), "code", "?");
	const cJSON *one;

	cJSON_ArrayForEach(one, rooms) {
		if (one == room)
			return false;
		if (strcmp(ctl_str(ctl_list(one, "error"), "code", "?"), code) == 0)
			return true;
	}
	return false;
}

void doctor_failures(struct doctor *d)
{
	struct ctl asked = *d->ctl;
	const cJSON *one;
	cJSON *rooms;

	if (!d->health || d->unprivileged)
		return;
	asked.failed = true;
	asked.since = "10m";
	rooms = cJSON_CreateArray();
	if (ctl_history(&asked, NULL, 4096, rooms) == CTL_OK) {
		cJSON_ArrayForEach(one, rooms)
			if (!was_before(rooms, one))
				say_failures(d, rooms, one);
		if (!rooms->child)
			doctor_say(d, DOCTOR_OK, "", "none in the last 10 min");
	}
	cJSON_Delete(rooms);
}
