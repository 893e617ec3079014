/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl: inspect and control a daemon.
 *
 * Every command is one row of ctl_commands[]; the usage lines, --help and the
 * list of commands are printed from it. Options may precede or follow the command;
 * a command accepts the common options and those that its row names.
 *
 * Text is for people and may change. --json prints the daemon's own reply. Exit
 * codes are part of the interface (ctl.h).
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/display.h"
#include "daemon/base/mem.h"
#include "daemon/base/stdio.h"
#include "lib/kvd.h"

const struct ctl_command ctl_commands[] = {
	{"status", "", "show the daemon's state",
	 "Version, instance ID, PID, endpoint, state, uptime, sessions, bytes\n"
	 "transferred and transports.",
	 0, 0, "a", ctl_run_status},
	{"health", "", "check whether the daemon is serving",
	 "Exit status, for probes:\n"
	 "0  serving, or degraded: it serves, but the cluster directory is unreachable\n"
	 "   or the disk of chunk_dir does not respond\n"
	 "1  it refuses rooms (no transport that `require` allows is usable), is\n"
	 "   draining or stopping, or replied with an error\n"
	 "3  it does not respond",
	 0, 0, "a", ctl_run_health},
	{"stats", "", "show counters, gauges and histograms",
	 "--prometheus    print the Prometheus text format, for the textfile collector\n"
	 "                of node_exporter\n"
	 "--by principal  print the memory charged to each user, key and address, and\n"
	 "                its limit (option memory_limit)",
	 0, 0, "am", ctl_run_stats},
	{"rooms", "", "list rooms and what each is waiting for",
	 "--stuck [TIME]  only rooms that have been waiting for TIME (default 30s)\n"
	 "--state STATE   only rooms in this state: bootstrapping, waiting_for_input,\n"
	 "                transferring, aborting, failed, success, or unopened\n"
	 "                (requested by a peer, not opened by an engine here)\n"
	 "--peer PEER     only rooms with this peer: a name, endpoint or instance ID\n"
	 "--failed        only rooms that have failed or are aborting\n"
	 "--limit N       list at most N rooms (default 1000)\n\n"
	 "AGE is the time for which the room has been waiting. Requires root, the\n"
	 "daemon's user or admin_uids.",
	 0, 0, "luvfpa", ctl_run_rooms},
	{"room", "NUMBER", "show the rooms with this number in detail",
	 "--role ROLE  only the send, recv, offer or pull room\n\n"
	 "Covers all sessions. If no such room is open, the last 4096 that ended are\n"
	 "searched. Requires root, the daemon's user or admin_uids.",
	 1, 1, "r", ctl_run_room},
	{"history", "", "list rooms that have ended, most recent first",
	 "--failed      only rooms that failed\n"
	 "--code CODE   only rooms that failed with this code, such as ETIMEOUT\n"
	 "--since TIME  only rooms that ended within TIME, such as 10m or 1h\n"
	 "--room N      only rooms with this number\n"
	 "--limit N     list at most N rooms (default 1000)\n\n"
	 "The daemon keeps the last 4096 rooms. Requires root, the daemon's user or\n"
	 "admin_uids.",
	 0, 0, "lfhka", ctl_run_history},
	{"trace", "NUMBER", "show a room's events on both sides, in order of time",
	 "--role ROLE  start from the send, recv, offer or pull room\n"
	 "--pages      include the page lists of open rooms\n"
	 "--join FILE  merge the output of kvd-ctl --json trace NUMBER of another\n"
	 "             host\n\n"
	 "Also queries the other instances of this host. Times are in milliseconds\n"
	 "since the first side opened the room; the longest gap is marked. Each daemon\n"
	 "keeps the last 65536 events of all rooms, and at most 4096 of one room.\n"
	 "Requires root, the daemons' user or admin_uids.",
	 1, 1, "rtj", ctl_run_trace},
	{"peers", "", "list peer daemons", "", 0, 0, "a", ctl_run_peers},
	{"top", "", "show rooms, peers and rates, updated periodically",
	 "--interval TIME  interval between frames (default 1s); rates are averages\n"
	 "                 over it\n"
	 "--count N        stop after N frames\n\n"
	 "On a terminal each frame replaces the one before it. Rooms in progress are\n"
	 "shown oldest first, at most 1000; they require root, the daemon's user or\n"
	 "admin_uids.",
	 0, 0, "cI", ctl_run_top},
	{"doctor", "", "diagnose the daemon and its host",
	 "--peer ENDPOINT  check that the daemon can connect to ENDPOINT; at most 32\n"
	 "--stuck TIME     report rooms that have been waiting for TIME (default 30s)\n"
	 "--root DIR       read /proc, /sys and /dev below DIR\n\n"
	 "Prints a line per check: ok, note (may be intended), warn or FAIL, then the\n"
	 "finding and the remedy. Without a daemon only the host is checked. Exit\n"
	 "status: 1 after a warn, 2 after a FAIL, else 0. Some checks require root, the\n"
	 "daemon's user or admin_uids.",
	 0, 0, "apxu", ctl_run_doctor},
	{"keys", "", "show this daemon's CURVE key, its allow-list and refusals",
	 "Also prints this daemon's line for the `curve_allow_file` of its peers.\n"
	 "Daemons of the same user and host need none. Run reload after changing\n"
	 "`curve_allow_file`.",
	 0, 0, "", ctl_run_keys},
	{"regions", "", "list the registered memory of all sessions",
	 "Requires root, the daemon's user or admin_uids.", 0, 0, "", ctl_run_regions},
	{"pools", "[--layout]", "list the pools of all sessions",
	 "--layout  show how each pool lies in its buffers: pages, tokens per page,\n"
	 "          layers, units (heads) of the model, strides in bytes. Pools with\n"
	 "          the same digest have the same layout. --json prints the format that\n"
	 "          kvd-ctl plan reads\n\n"
	 "Requires root, the daemon's user or admin_uids.",
	 0, 0, "y", ctl_run_pools},
	{"chunks", "", "show the contents and counters of the chunk store",
	 "Memory, lookups and hits; for each space its description, chunks, bytes, slot\n"
	 "layouts and the number of sessions that use it. Requires root, the daemon's\n"
	 "user or admin_uids.",
	 0, 0, "", ctl_run_chunks},
	{"cluster", "", "show the cluster directory and the daemons in it",
	 "The state of the directory (option `cluster`), the entries that this daemon\n"
	 "publishes and reads, and each registered daemon.",
	 0, 0, "", ctl_run_cluster},
	{"group", "[NAME]", "list the members of a group",
	 "Each rank of each worker with its endpoint, pool, state and load. Without\n"
	 "NAME: the groups that this daemon publishes to or watches.",
	 0, 1, "", ctl_run_group},
	{"sessions", "", "list connected engines",
	 "Requires root, the daemon's user or admin_uids.", 0, 0, "", ctl_run_sessions},
	{"devices", "", "list RDMA ports and GPUs, and why one is not used",
	 "All ports of the host with state and GIDs, and the rail as which the\n"
	 "transport verbs uses each, or the reason why it does not.",
	 0, 0, "", ctl_run_devices},
	{"ping", "", "measure round trips on the control socket",
	 "--count N  number of round trips (default 1)", 0, 0, "c", ctl_run_ping},
	{"call", "COMMAND [JSON | -]", "send a command, print its reply as JSON",
	 "JSON contains the command's members; - reads them from standard input.\n"
	 "`kvd-ctl call help` lists the commands and their members.",
	 1, 2, "", ctl_run_call},
	{"abort", "NUMBER", "fail a room on both sides",
	 "--role ROLE    send, recv, offer or pull; required if the number has several\n"
	 "--reason TEXT  error message for both engines\n\n"
	 "Rooms of other users require root, the daemon's user or admin_uids.",
	 1, 1, "re", ctl_run_abort},
	{"drain", "", "refuse new rooms, wait for open ones, then stop",
	 "--wait  return when the daemon has stopped; on a terminal, show what it is\n"
	 "        waiting for\n\n"
	 "Otherwise returns as soon as draining has started. Requires root, the\n"
	 "daemon's user or admin_uids.",
	 0, 0, "w", ctl_run_drain},
	{"log", "[LEVEL]", "show or set the log level",
	 "LEVEL: error, warn, info, debug or trace; it applies until the next start.\n"
	 "Setting it requires root, the daemon's user or admin_uids.",
	 0, 1, "", ctl_run_log},
	{"config", "[--diff]", "show the options in effect",
	 "--diff  show only options that differ in the file, and which of them require\n"
	 "        a restart\n\n"
	 "--diff requires root, the daemon's user or admin_uids.",
	 0, 0, "d", ctl_run_config},
	{"reload", "", "reload the configuration",
	 "Reports changed options, and those that require a restart. If the file has\n"
	 "errors, nothing changes and the first error is reported. Also reloads the\n"
	 "allow-list and the members file (option cluster). Requires root, the daemon's\n"
	 "user or admin_uids.",
	 0, 0, "", ctl_run_reload},
	{"ls", "", "list the instances of this host",
	 "Every *.sock in $KVD_RUN_DIR or /run/kvd. An instance without NAME.lock is\n"
	 "stopped and is not contacted: with socket activation that would start it.",
	 0, 0, "", ctl_run_ls},
	{"bench", "TICKET | - | --serve", "measure transfers between two daemons",
	 "--serve           serve memory and print a ticket, until interrupted\n"
	 "TICKET, -         measure against the end that printed TICKET; - reads it\n"
	 "                  from standard input\n"
	 "--size LIST       bytes per row (default 64K,4K,256)\n"
	 "--rows N          rows per transfer (default: half the memory, at most 65536)\n"
	 "--flat            use contiguous rows instead of scattered ones\n"
	 "--gather          use contiguous rows at the serving end only\n"
	 "--op OP           push, pull or both (default both)\n"
	 "--transport NAME  fail if the daemons use another transport\n"
	 "--count N         number of repetitions (default 20)\n"
	 "--memory SIZE     with --serve: memory to serve (default 256M)\n\n"
	 "    ssh HOST kvd-ctl bench --serve | kvd-ctl bench -\n\n"
	 "Reports GB/s (10^9) from posting a transfer until its polled state is\n"
	 "success: the median, the 10th and 90th percentile, and the first transfer,\n"
	 "which runs with cold mappings. Pushed data is pulled back and compared. CPU\n"
	 "caches are not flushed. Anyone with the ticket can read and write the served\n"
	 "memory while --serve runs.",
	 0, 1, "bc", ctl_run_bench},
	{"calibrate", "PEER", "measure network and attention costs of a peer",
	 "Sends echo requests of 0 to 128 rows, at most 3 MB, then prints the cost page\n"
	 "as cost does. PEER: the endpoint, name or instance ID of a connected peer.\n"
	 "Requires root, the daemon's user or admin_uids.",
	 1, 1, "", ctl_run_calibrate},
	{"cost", "", "show the measured costs of routing and fetching KV",
	 "Each cost with its standard error. PROBE US, TURN US and GB/s: query rows and\n"
	 "replies. FETCH US and FETCH GB/s: pulls. WAIT US, GPU WAIT US: of query rows\n"
	 "at the peer, for KV in host memory and in GPU memory. REQUESTERS: requesters\n"
	 "active at the peer. MEMORY: that has the KV. MEAS/PRED: recently measured\n"
	 "over predicted attention time. Prices on published fabrics: python -m\n"
	 "kvd.prices.",
	 0, 0, "", ctl_run_cost},
	{"keygen", "[--owner USER] [FILE]", "generate a CURVE key pair for a daemon",
	 "With FILE: writes the secret key to FILE for `curve_secret_file` (mode 0600;\n"
	 "an existing file is not overwritten), and prints the public key for a line\n"
	 "`NAME KEY [HOST]...` in every daemon's `curve_allow_file`. Without FILE:\n"
	 "prints both keys. No daemon needed.\n\n"
	 "--owner USER  owner of FILE (default: for root the user kvd if it exists,\n"
	 "              else the caller)",
	 0, 1, "o", ctl_run_keygen},
	{"init", "--listen ADDRESS:PORT", "write an instance's configuration",
	 "Writes NAME.conf and NAME.peers to /etc/kvd. The daemon generates its key at\n"
	 "its first start; `keys` prints the line for the allow-lists of its peers.\n"
	 "Existing files are not overwritten.\n\n"
	 "--name NAME                  name of the instance\n"
	 "--listen ADDRESS:PORT        control address; data uses the next port\n"
	 "--peer NAME=HOST:PORT[#KEY]  a daemon that may connect; up to 32 times\n"
	 "--dir DIR                    directory instead of /etc/kvd",
	 0, 0, "ip", ctl_run_init},
	{"completion", "SHELL", "print a completion script for bash, zsh or fish", "", 1,
	 1, "", ctl_run_completion},
	{"plan", "FILE | -", "show which bytes are copied where, in which rows",
	 "Reads two layouts and page lists as JSON, and prints the rows to copy as\n"
	 "JSON. No daemon needed.",
	 1, 1, "", ctl_run_plan},
	{"help", "[COMMAND]", "show this text or the help of a command", "", 0, 1, "",
	 NULL},
	{NULL, NULL, NULL, NULL, 0, 0, NULL, NULL},
};

/* Options of single commands. `letter`: as in ctl_command.options. */
static const struct command_option {
	const char *name;
	char letter;
	enum { OPTION_TEXT, OPTION_FLAG, OPTION_NUMBER, OPTION_PRESET, OPTION_LIST } kind;
	size_t at;
	unsigned long max; /* of a number; the minimum is 1 */
} command_options[] = {
#define OF(member) offsetof(struct ctl, member)
	{"role", 'r', OPTION_TEXT, OF(role), 0},
	{"reason", 'e', OPTION_TEXT, OF(reason), 0},
	{"owner", 'o', OPTION_TEXT, OF(owner), 0},
	{"listen", 'i', OPTION_TEXT, OF(listen), 0},
	{"dir", 'i', OPTION_TEXT, OF(dir), 0},
	{"peer", 'p', OPTION_LIST, OF(peers), 0},
	{"diff", 'd', OPTION_FLAG, OF(diff), 0},
	{"layout", 'y', OPTION_FLAG, OF(layout), 0},
	{"limit", 'l', OPTION_NUMBER, OF(limit), 65536},
	{"prometheus", 'm', OPTION_FLAG, OF(prometheus), 0},
	{"by", 'm', OPTION_TEXT, OF(by), 0},
	{"all", 'a', OPTION_FLAG, OF(all), 0},
	{"wait", 'w', OPTION_FLAG, OF(wait), 0},
	{"interval", 'I', OPTION_TEXT, OF(interval), 0},
	{"root", 'x', OPTION_TEXT, OF(root), 0},
	{"count", 'c', OPTION_NUMBER, OF(count), 1000000},
	{"stuck", 'u', OPTION_PRESET, OF(stuck), 0},
	{"state", 'v', OPTION_TEXT, OF(state), 0},
	{"failed", 'f', OPTION_FLAG, OF(failed), 0},
	{"since", 'h', OPTION_TEXT, OF(since), 0},
	{"code", 'h', OPTION_TEXT, OF(code), 0},
	{"room", 'k', OPTION_TEXT, OF(number), 0},
	{"join", 'j', OPTION_TEXT, OF(trace.join), 0},
	{"pages", 't', OPTION_FLAG, OF(trace.pages), 0},
	{"size", 'b', OPTION_TEXT, OF(bench.size), 0},
	{"rows", 'b', OPTION_NUMBER, OF(bench.rows), 1u << 22},
	{"flat", 'b', OPTION_FLAG, OF(bench.flat), 0},
	{"gather", 'b', OPTION_FLAG, OF(bench.gather), 0},
	{"op", 'b', OPTION_TEXT, OF(bench.op), 0},
	{"transport", 'b', OPTION_TEXT, OF(bench.transport), 0},
	{"memory", 'b', OPTION_TEXT, OF(bench.memory), 0},
	{"serve", 'b', OPTION_FLAG, OF(bench.serve), 0},
#undef OF
};

const char *ctl_option(const struct ctl_command *command, unsigned int i)
{
	if (i >= ARRAY_LEN(command_options))
		return NULL;
	return strchr(command->options, command_options[i].letter)
		       ? command_options[i].name
		       : "";
}

enum { OPT_VERSION = 256, OPT_COMMAND };

/* The common options; main() appends command_options[] as OPT_COMMAND + index. */
static struct option long_options[6 + ARRAY_LEN(command_options) + 1] = {
	{"socket", required_argument, NULL, 's'},
	{"name", required_argument, NULL, 'n'},
	{"timeout", required_argument, NULL, 't'},
	{"json", no_argument, NULL, 'j'},
	{"help", no_argument, NULL, 'h'},
	{"version", no_argument, NULL, OPT_VERSION},
};

static void print_commands(FILE *out)
{
	fprintf(out, "Usage: kvd-ctl [OPTIONS] COMMAND [ARGUMENTS]\n\nCommands:\n");
	for (const struct ctl_command *c = ctl_commands; c->name; c++)
		fprintf(out, "  %-8s %-31s %s\n", c->name, c->args, c->summary);
	fprintf(out,
		"\nOptions:\n"
		"  -s, --socket PATH    path of the daemon's control socket\n"
		"  -n, --name NAME      name of the instance: <run dir>/NAME.sock\n"
		"      --all            each instance of the run directory; for health, "
		"status,\n"
		"                       rooms, peers, stats, history and doctor\n"
		"  -t, --timeout SEC    seconds to wait for a reply (default 10)\n"
		"  -j, --json           print the daemon's reply as JSON\n"
		"  -h, --help           show this text or, after a command, its help\n"
		"      --version        show the version\n"
		"\nWithout --socket and --name: $KVD_SOCKET, else the instance "
		"$KVD_NAME, else the\n"
		"only *.sock in $KVD_RUN_DIR or /run/kvd.\n"
		"\nExit status: 0 success, 1 error reply from the daemon, 2 invalid "
		"command line,\n"
		"3 no reply from a daemon, 4 the daemon has another protocol version.\n");
}

static int print_help(const char *name)
{
	const struct ctl_command *c = ctl_commands;

	if (!name) {
		print_commands(stdout);
		return CTL_OK;
	}
	while (c->name && strcmp(c->name, name) != 0)
		c++;
	if (!c->name)
		return ctl_usage("%s: no such command", name);
	printf("Usage: kvd-ctl [OPTIONS] %s%s%s\n\n%s.\n", c->name, *c->args ? " " : "",
	       c->args, c->summary);
	if (*c->help)
		printf("\n%s\n", c->help);
	printf("\nOptions common to all commands: kvd-ctl --help\n");
	return CTL_OK;
}

int ctl_usage(const char *fmt, ...)
{
	va_list ap;

	fputs("kvd-ctl: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputs("\nTry 'kvd-ctl --help'.\n", stderr);
	return CTL_USAGE;
}

int ctl_failed(const char *fmt, ...)
{
	va_list ap;

	fputs("kvd-ctl: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	return CTL_ERROR;
}

/* ---- the daemon ---------------------------------------------------------------- */

/* This user may not connect: show which group may. */
static void hint_permission(const char *path)
{
	struct passwd *pw = getpwuid(geteuid());
	struct group *gr;
	struct stat st;

	if (stat(path, &st) < 0)
		return;
	gr = getgrgid(st.st_gid);
	fprintf(stderr,
		"  its group is %s, its mode %04o; as root: usermod -aG %s %s, then "
		"log in again\n",
		gr ? gr->gr_name : "(no name)", (unsigned int)st.st_mode & 07777,
		gr ? gr->gr_name : "GROUP", pw ? pw->pw_name : "USER");
}

/* No instance was named: list them. */
static void hint_instances(const struct ctl *ctl)
{
	struct dirent **names = NULL;
	int count = ctl_instances(&names);

	for (int i = 0; i < count; i++)
		fprintf(stderr, "%s%.*s", i ? ", " : "  one of: --name ",
			(int)strlen(names[i]->d_name) - 5, names[i]->d_name);
	if (count > 0)
		fputc('\n', stderr);
	if (count > 1 && ctl->takes_all)
		fputs("  for all instances: --all\n", stderr);
	ctl_instances_free(names, count);
}

/* Whether the service manager holds the socket of a stopped daemon. With --socket or
 * KVD_SOCKET the user asks for the connection explicitly. */
static bool is_stopped(struct ctl *ctl)
{
	const char *env = getenv("KVD_SOCKET");
	char path[256];

	if (ctl->socket || (!ctl->name && env && *env) ||
	    kvd_socket_find(ctl->name, path, sizeof(path), NULL) ||
	    access(path, F_OK) != 0 || ctl_instance_runs(path))
		return false;
	ctl->error = (struct kvd_error){.code = KVD_E_NODAEMON, .retryable = true};
	snprintf(ctl->error.message, sizeof(ctl->error.message),
		 "%.200s: stopped (no .lock file); connecting with --socket PATH may "
		 "start it",
		 path);
	return true;
}

/* The message may contain text of other processes. */
static void keep_error(struct ctl *ctl, const struct kvd_error *error)
{
	ctl->error = *error;
	display_sanitize(ctl->error.message);
}

struct kvd_client *ctl_connect(struct ctl *ctl)
{
	/* no automatic reconnect: it might start a stopped daemon */
	struct kvd_options o = {.client = "kvd-ctl",
				.timeout_ms = ctl->timeout_ms,
				.socket = ctl->socket,
				.name = ctl->name,
				.manual_reconnect = true};

	if (!ctl->client && is_stopped(ctl))
		return NULL;
	if (ctl->client || !kvd_open(&o, &ctl->client))
		return ctl->client;
	keep_error(ctl, kvd_last_error(NULL));
	ctl->version_differs = ctl->error.code == KVD_E_VERSION;
	return NULL;
}

void ctl_disconnect(struct ctl *ctl)
{
	kvd_close(ctl->client);
	ctl->client = NULL;
}

struct kvd_client *ctl_open(struct ctl *ctl)
{
	const struct kvd_error *error = &ctl->error;
	char path[256];

	if (ctl_connect(ctl))
		return ctl->client;
	fprintf(stderr, "kvd-ctl: %s: %s\n", kvd_code_name(error->code), error->message);
	if (error->code == KVD_E_NODAEMON && !ctl->socket && !ctl->name)
		hint_instances(ctl);
	if (ctl->version_differs)
		fprintf(stderr, "  kvd-ctl is %s; use the daemon's version of it\n",
			kvd_version());
	if (error->code == KVD_E_NODAEMON)
		fprintf(stderr,
			"  is it running?  systemctl status 'kvd@*'\n"
			"  another socket?  --socket PATH, --name NAME, KVD_SOCKET, "
			"KVD_NAME or KVD_RUN_DIR\n");
	if (error->code == KVD_E_PERM && ctl->socket)
		hint_permission(ctl->socket);
	else if (error->code == KVD_E_PERM &&
		 !kvd_socket_find(ctl->name, path, sizeof(path), NULL))
		hint_permission(path);
	return NULL;
}

int ctl_command(struct kvd_client *client, const char *cmd, const cJSON *args,
		int timeout_ms, cJSON **reply_p)
{
	char *text = args ? cJSON_PrintUnformatted(args) : NULL, *line = NULL;
	int r = kvd_command(client, cmd, text, timeout_ms, &line);

	*reply_p = line ? cJSON_Parse(line) : NULL;
	cJSON_free(text);
	kvd_string_free(line);
	return r;
}

static int send_command(struct ctl *ctl, const char *cmd, const cJSON *args,
			cJSON **reply_p)
{
	int r = ctl_command(ctl->client, cmd, args, 0, reply_p);

	if (!ctl->json && !ctl->raw) /* else the reply is passed on unchanged */
		display_sanitize_json(*reply_p);
	if (r < 0) {
		keep_error(ctl, kvd_last_error(ctl->client));
		return r == -KVD_E_LOST || r == -KVD_E_NOREPLY || r == -KVD_E_NODAEMON
			       ? CTL_NO_DAEMON
			       : CTL_ERROR;
	}
	if (*reply_p)
		return CTL_OK;
	ctl->error = (struct kvd_error){.code = KVD_E_NOMEM, .message = "out of memory"};
	return CTL_ERROR;
}

int ctl_query(struct ctl *ctl, const char *cmd, cJSON *args, cJSON **reply_p)
{
	int r = CTL_NO_DAEMON;

	*reply_p = NULL;
	if (ctl_connect(ctl))
		r = send_command(ctl, cmd, args, reply_p);
	cJSON_Delete(args);
	if (r) {
		cJSON_Delete(*reply_p);
		*reply_p = NULL;
	}
	return r;
}

static int ask_without_session(struct ctl *ctl, const char *cmd, const cJSON *args,
			       cJSON **reply_p)
{
	char *text = args ? cJSON_PrintUnformatted(args) : NULL;
	int r = ctl_ask_plain(ctl, cmd, text, reply_p);

	cJSON_free(text);
	if (!ctl->json && !ctl->raw)
		display_sanitize_json(*reply_p);
	return r;
}

int ctl_ask(struct ctl *ctl, const char *cmd, cJSON *args, cJSON **reply_p)
{
	int r = CTL_NO_DAEMON;

	*reply_p = NULL;
	if (ctl_open(ctl)) {
		r = send_command(ctl, cmd, args, reply_p);
		if (r && ctl->json && *reply_p)
			ctl_print_json(*reply_p);
		if (r)
			fprintf(stderr, "kvd-ctl: %s: %s\n",
				kvd_code_name(ctl->error.code), ctl->error.message);
	} else if (ctl->version_differs && ctl_needs_no_session(cmd)) {
		r = ask_without_session(ctl, cmd, args, reply_p);
	}
	cJSON_Delete(args);
	if (r) {
		cJSON_Delete(*reply_p);
		*reply_p = NULL;
	}
	return r;
}

void ctl_print_json(const cJSON *reply)
{
	cJSON *copy = cJSON_Duplicate(reply, true);

	cJSON_DeleteItemFromObjectCaseSensitive(copy, "id");
	cJSON_DeleteItemFromObjectCaseSensitive(copy, "ok");
	display_print_json(copy, stdout);
	cJSON_Delete(copy);
}

/* ---- the command line ----------------------------------------------------------- */

static bool number(const char *text, unsigned long max, unsigned long *out_p)
{
	char *end;

	errno = 0;
	*out_p = strtoul(text, &end, 10);
	return *text >= '0' && *text <= '9' && !*end && !errno && *out_p <= max && *out_p;
}

static int take_command_option(struct ctl *ctl, const struct command_option *o,
			       char **argv)
{
	void *member = (char *)ctl + o->at;
	struct ctl_words *words = member;

	/* the value is optional and starts with a digit */
	if (o->kind == OPTION_PRESET && !optarg && argv[optind] &&
	    isdigit((unsigned char)*argv[optind]))
		optarg = argv[optind++];
	if (o->kind == OPTION_LIST && words->count == ARRAY_LEN(words->word))
		return ctl_usage("--%s: at most %zu times", o->name,
				 ARRAY_LEN(words->word));
	if (o->kind == OPTION_LIST)
		words->word[words->count++] = optarg;
	else if (o->kind == OPTION_TEXT)
		*(const char **)member = optarg;
	else if (o->kind == OPTION_PRESET)
		*(const char **)member = optarg ? optarg : "30s";
	else if (o->kind == OPTION_FLAG)
		*(bool *)member = true;
	else if (!number(optarg, o->max, member))
		return ctl_usage("--%s: 1 to %lu, not '%s'", o->name, o->max, optarg);
	return -1;
}

static bool is_given(const struct ctl *ctl, const struct command_option *o)
{
	const void *member = (const char *)ctl + o->at;

	if (o->kind == OPTION_LIST)
		return ((const struct ctl_words *)member)->count != 0;
	if (o->kind == OPTION_TEXT || o->kind == OPTION_PRESET)
		return *(const char *const *)member != NULL;
	return o->kind == OPTION_FLAG ? *(const bool *)member
				      : *(const unsigned long *)member != 0;
}

/* Handles one option. -1: continue; else an exit status. */
static int take_option(struct ctl *ctl, int opt, const char *command, char **argv)
{
	unsigned long seconds;

	switch (opt) {
	case 's':
		ctl->socket = optarg;
		return -1;
	case 'n':
		ctl->name = optarg;
		return -1;
	case 'j':
		ctl->json = true;
		return -1;
	case 't':
		if (!number(optarg, 86400, &seconds))
			return ctl_usage("--timeout: 1 to 86400 seconds, not '%s'",
					 optarg);
		ctl->timeout_ms = (int)seconds * 1000;
		return -1;
	case 'h':
		return print_help(command);
	case OPT_VERSION:
		printf("kvd-ctl %s\n", kvd_version());
		return CTL_OK;
	case '?':
		fputs("Try 'kvd-ctl --help'.\n", stderr);
		return CTL_USAGE;
	default:
		return take_command_option(ctl, &command_options[opt - OPT_COMMAND],
					   argv);
	}
}

/* Rejects options of other commands. */
static int check_options(const struct ctl *ctl, const struct ctl_command *c)
{
	for (size_t i = 0; i < ARRAY_LEN(command_options); i++) {
		const struct command_option *o = &command_options[i];

		if (is_given(ctl, o) && !strchr(c->options, o->letter))
			return ctl_usage("--%s: not an option of %s", o->name, c->name);
	}
	return -1;
}

static int run_command(struct ctl *ctl, const struct ctl_command *c, int argc,
		       char **argv)
{
	int r = -1, opt;

	optind = 0; /* restart after the command's name */
	while (r < 0 &&
	       (opt = getopt_long(argc, argv, "s:n:t:jh", long_options, NULL)) != -1)
		r = take_option(ctl, opt, c->name, argv);
	if (r < 0)
		r = check_options(ctl, c);
	if (r >= 0)
		return r;
	ctl->arg_count = (unsigned int)(argc - optind);
	ctl->args = argv + optind;
	if (ctl->arg_count < c->args_min || ctl->arg_count > c->args_max)
		return ctl_usage("usage: kvd-ctl %s%s%s", c->name, *c->args ? " " : "",
				 c->args);
	if (!c->run) /* help */
		return print_help(ctl->args[0]);
	ctl->takes_all = strchr(c->options, 'a');
	return ctl->all ? ctl_run_all(ctl, c) : c->run(ctl);
}

int main(int argc, char **argv)
{
	const struct ctl_command *c = ctl_commands;
	struct ctl ctl = {.timeout_ms = 10000};
	int r = -1, opt;

	stdio_open();
	for (size_t i = 0; i < ARRAY_LEN(command_options); i++)
		long_options[6 + i] = (struct option){
			command_options[i].name,
			command_options[i].kind == OPTION_FLAG	   ? no_argument
			: command_options[i].kind == OPTION_PRESET ? optional_argument
								   : required_argument,
			NULL, OPT_COMMAND + (int)i};
	argv[0] = (char *)(uintptr_t) "kvd-ctl"; /* getopt's messages */
	while (r < 0 &&
	       (opt = getopt_long(argc, argv, "+s:n:t:jh", long_options, NULL)) != -1)
		r = take_option(&ctl, opt, NULL, argv);
	if (r >= 0)
		return r;
	if (optind == argc) {
		print_commands(stderr);
		return CTL_USAGE;
	}
	while (c->name && strcmp(c->name, argv[optind]) != 0)
		c++;
	if (!c->name)
		return ctl_usage("%s: no such command", argv[optind]);
	argc -= optind;
	argv += optind;
	r = run_command(&ctl, c, argc, argv);
	if (r == CTL_NO_DAEMON && ctl.version_differs)
		r = CTL_VERSION;
	ctl_disconnect(&ctl);
	if (fflush(stdout) == EOF)
		return ctl_failed("standard output: %s", strerror(errno));
	return r;
}
