/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl: look at a daemon and steer it.
 *
 * Every command is one row of ctl_commands[]; the usage lines, --help and the
 * list of commands come from it. Options may stand before or after the command;
 * a command takes those that its row names, and the common ones.
 *
 * Text is for people and may change; --json is the daemon's own answer, exit
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
#include "ctl/words.h"
#include "daemon/base/mem.h"
#include "daemon/base/stdio.h"
#include "lib/kvd.h"

const struct ctl_command ctl_commands[] = {
	{"status", "", "the daemon at a glance",
	 "Version, instance, pid, endpoint, state, uptime, sessions, bytes, transports.",
	 0, 0, "a", ctl_run_status},
	{"health", "", "is the daemon well?",
	 "Exit status 0 when it is serving (degraded: it serves, and the directory\n"
	 "is away, or the disk of chunk_dir does not answer), 1 when it refuses\n"
	 "rooms (no transport that `require` allows is usable), drains, stops or\n"
	 "answers with an error, 3 when it does not answer: fit for a probe.",
	 0, 0, "a", ctl_run_health},
	{"stats", "", "all counters, gauges and histograms",
	 "--prometheus  as the metrics endpoint tells them, for a textfile of\n"
	 "              node_exporter\n"
	 "--by principal  what is kept for each user, key and address, beside the\n"
	 "                option memory_limit",
	 0, 0, "am", ctl_run_stats},
	{"rooms", "", "rooms of all sessions, and whom each waits for",
	 "--stuck [TIME]  only those that wait for so long (30s)\n"
	 "--state STATE   only those in it: bootstrapping, waiting_for_input,\n"
	 "                transferring, aborting, failed, success; or unopened: a peer\n"
	 "                asks for it, and no engine here has opened it\n"
	 "--peer PEER     only those with this peer: name, endpoint or instance\n"
	 "--failed        only those that have failed, or are about to\n"
	 "--limit N       show at most N rooms (1000)\n\n"
	 "AGE: for how long it has waited for that. Needs root, the daemon's uid or\n"
	 "admin_uids.",
	 0, 0, "luvfpa", ctl_run_rooms},
	{"room", "NUMBER", "everything about the rooms of a number",
	 "--role ROLE  send, recv, offer or pull only\n\n"
	 "Of all sessions. One that is closed is looked for among the last 4096 that\n"
	 "ended. Needs root, the daemon's uid or admin_uids.",
	 1, 1, "r", ctl_run_room},
	{"history", "", "rooms that have ended, the latest first",
	 "--failed      only those that failed\n"
	 "--code CODE   only those that failed with it, as ETIMEOUT\n"
	 "--since TIME  only those that ended since then: 10m, 1h\n"
	 "--room N      only those of this number\n"
	 "--limit N     show at most N (1000)\n\n"
	 "The daemon keeps the last 4096. Needs root, the daemon's uid or admin_uids.",
	 0, 0, "lfhka", ctl_run_history},
	{"trace", "NUMBER", "what happened to a room on both sides, and when",
	 "--role ROLE      begin with the send, recv, offer or pull room\n"
	 "--pages          with the page lists of rooms that are not closed\n"
	 "--perfetto FILE  write it for ui.perfetto.dev and chrome://tracing\n"
	 "--otlp FILE      write it as OpenTelemetry's spans (OTLP, JSON)\n"
	 "--join FILE      what kvd-ctl --json trace NUMBER printed elsewhere\n\n"
	 "Asks the other instances of this host, too. Times are milliseconds since the\n"
	 "first side opened it; the longest gap is marked. Each daemon keeps the latest\n"
	 "65536 events of all its rooms, and 4096 of one. Needs root, the daemons' uid\n"
	 "or admin_uids.",
	 1, 1, "rtj", ctl_run_trace},
	{"verify", "NUMBER", "do both sides of an open room hold the same bytes?",
	 "--views FILE  a sender's pages, as room.send has them: they are not kept\n"
	 "--join FILE   what kvd-ctl --json verify NUMBER printed elsewhere\n\n"
	 "Compares what the pages hold now, by view, layer, field, unit and block of 64\n"
	 "tokens; it holds only while both engines leave the pages alone. Exit status\n"
	 "0: equal; 1: different, or (not with --json) nothing to compare. Needs root,\n"
	 "the daemons' uid or admin_uids.",
	 1, 1, "jg", ctl_run_verify},
	{"peers", "", "the daemons that this one knows", "", 0, 0, "a", ctl_run_peers},
	{"top", "", "rooms, peers and rates, again and again",
	 "-b, --batch      frames one behind the other, as text\n"
	 "--json           frames as JSON, one a line\n"
	 "--interval TIME  between two looks (1s); rates are of that time\n"
	 "--count N        so many frames with --batch or --json, not for ever\n"
	 "--limit N        at most N rooms of a frame with --batch or --json (1000)\n\n"
	 "Keys: p peers only, r rooms only, f those that failed, / only lines with\n"
	 "these words, a abort a room, q quit. Rooms that have not ended, oldest first.\n"
	 "p50, p99 and FAIL/min are of the last minute, as far as it was seen. Rooms\n"
	 "need root, the daemon's uid or admin_uids. No colour with NO_COLOR.",
	 0, 0, "cltI", ctl_run_top},
	{"doctor", "", "what is wrong, and what to do about it",
	 "--peer ENDPOINT  can this daemon be reached from here? Up to 32\n"
	 "--stuck TIME     rooms that wait for so long (30s)\n"
	 "--root DIR       /proc, /sys and /dev are below DIR\n\n"
	 "A line a check: ok, note (right for some hosts), warn or FAIL, what is so,\n"
	 "what to do. Without a daemon the host is looked at. Exit status 1 with a\n"
	 "warn, 2 with a FAIL, else 0. Whole for root, the daemon's uid or admin_uids.",
	 0, 0, "apxu", ctl_run_doctor},
	{"keys", "", "CURVE keys: this daemon's, who is allowed, who was refused",
	 "With the line that the `curve_allow_file` of others needs for this daemon;\n"
	 "those beside it, of the same user and host, need none. After a change of\n"
	 "`curve_allow_file`, reload the daemon.",
	 0, 0, "", ctl_run_keys},
	{"regions", "", "registered memory of all sessions",
	 "Needs root, the daemon's uid or admin_uids.", 0, 0, "", ctl_run_regions},
	{"pools", "[--layout]", "pools of all sessions",
	 "--layout  how each lies in its buffers: pages, tokens a page, layers, units\n"
	 "          (heads) of the model's, strides in bytes; digests of equal layouts\n"
	 "          are equal. With --json as kvd-ctl plan takes it\n\n"
	 "Needs root, the daemon's uid or admin_uids.",
	 0, 0, "y", ctl_run_pools},
	{"chunks", "", "what the chunk store holds",
	 "Memory, what was asked for and found; for each space what it is, how much of\n"
	 "it is there, in how many layouts, how many sessions use it. Needs root, the\n"
	 "daemon's uid or admin_uids.",
	 0, 0, "", ctl_run_chunks},
	{"cluster", "", "the directory of the cluster, and the daemons in it",
	 "The state of the directory (option `cluster`), what this daemon says there\n"
	 "and reads; each daemon that is there.",
	 0, 0, "", ctl_run_cluster},
	{"group", "[NAME]", "who is in a group",
	 "Each rank of each worker: where, what, in which state, with its load. Without\n"
	 "NAME the groups that this daemon has to do with.",
	 0, 1, "", ctl_run_group},
	{"sessions", "", "the engines that are connected",
	 "Needs root, the daemon's uid or admin_uids.", 0, 0, "", ctl_run_sessions},
	{"devices", "", "RDMA ports and GPUs, and why one is not used",
	 "All ports of the machine: state, GIDs, and as which rail the transport verbs\n"
	 "uses each, or why it does not.",
	 0, 0, "", ctl_run_devices},
	{"ping", "", "round trips on the control socket", "--count N  how many (1)", 0, 0,
	 "c", ctl_run_ping},
	{"call", "COMMAND [JSON | -]", "send any command, print its answer as JSON",
	 "JSON is the command's members; - reads them from standard input.\n"
	 "`kvd-ctl call help` lists the commands and their members.",
	 1, 2, "", ctl_run_call},
	{"abort", "NUMBER", "fail a room on both sides",
	 "--role ROLE      send, recv, offer or pull, when a number has several\n"
	 "--reason WORDS   told to both engines\n\n"
	 "Foreign rooms need root, the daemon's uid or admin_uids.",
	 1, 1, "re", ctl_run_abort},
	{"drain", "", "refuse new rooms, let running ones end, then stop",
	 "--wait  return when it has stopped; on a terminal, tell what it waits for\n\n"
	 "Without, returns when the daemon has begun to drain. Needs root, the daemon's\n"
	 "uid or admin_uids.",
	 0, 0, "w", ctl_run_drain},
	{"log", "[LEVEL]", "show or set the log level",
	 "LEVEL: error, warn, info, debug or trace; until the next start. Setting needs\n"
	 "root, the daemon's uid or admin_uids.",
	 0, 1, "", ctl_run_log},
	{"config", "[--diff]", "the options in force",
	 "--diff  only what the file says otherwise, and which of it needs a restart\n\n"
	 "--diff needs root, the daemon's uid or admin_uids.",
	 0, 0, "d", ctl_run_config},
	{"reload", "", "read the configuration again",
	 "Tells what changed and what waits for a restart; a file with errors changes\n"
	 "nothing and is refused with the first. The allow-list and the members file\n"
	 "(option cluster) are read, too. Needs root, the daemon's uid or admin_uids.",
	 0, 0, "", ctl_run_reload},
	{"ls", "", "the instances of this host",
	 "Every *.sock in $KVD_RUN_DIR or /run/kvd. One without NAME.lock is stopped,\n"
	 "and not connected to: under socket activation that would start it.",
	 0, 0, "", ctl_run_ls},
	{"bench", "TICKET | - | --serve", "how fast two daemons move rows",
	 "--serve           serve memory and print a ticket, until interrupted\n"
	 "TICKET, -         measure against its printer; -: read it from standard "
	 "input\n"
	 "--with SOCKET     measure against another daemon of this host\n"
	 "--size LIST       bytes a row: 64K,4K,256 if not given\n"
	 "--rows N          rows a transfer; if not given half the memory, at most "
	 "65536\n"
	 "--flat            rows one behind the other, not scattered\n"
	 "--gather          rows one behind the other at the serving end only\n"
	 "--op OP           push, pull or both (both)\n"
	 "--transport NAME  refuse to measure any other\n"
	 "--count N         repetitions (20)\n"
	 "--memory SIZE     what is served, with --serve and --with (256M)\n\n"
	 "    ssh HOST kvd-ctl bench --serve | kvd-ctl bench -\n\n"
	 "GB/s (10^9) from posting to the state that an engine polls: median, tenth and\n"
	 "ninetieth percentile, and the first transfer, which finds cold maps. What was\n"
	 "pushed is pulled back and compared. Caches are as they are. Whoever has the\n"
	 "ticket may read and write the served memory while --serve runs.",
	 0, 1, "bc", ctl_run_bench},
	{"calibrate", "PEER", "measure the way to a peer, and how fast it attends",
	 "Echoes of 0 to 128 rows, at most 3 MB; then the cost page, as cost prints it.\n"
	 "PEER: the endpoint, name or instance of one that is up. Needs root, the\n"
	 "daemon's uid or admin_uids.",
	 1, 1, "", ctl_run_calibrate},
	{"cost", "[--preset NAME]", "route a query, fetch the KV, or recompute it",
	 "What the daemon measured of its peers: PROBE_US, TURN_US, GB/s: of query rows\n"
	 "and answers; FETCH: of pulls; each with its standard error. ATTEND: what\n"
	 "attention took there by what ATTENDS, how fast it is, says. REQUESTERS: at\n"
	 "work there.\n\n"
	 "With --preset: what the three ways cost on a published fabric, and from how\n"
	 "many steps on a fetch wins. No daemon needed.\n\n"
	 "--preset NAME      h100-ibgda, h100-nvlink4, a100-nvlink3, rtx6000-pcie5 or\n"
	 "                   a40-pcie4\n"
	 "--model NAME       v2-lite, v3, llama-8b or llama-70b (v2-lite)\n"
	 "--layers N, --heads N, --kv-heads N, --dqk N, --dv N\n"
	 "                   where the model's, as one rank has them, are others\n"
	 "--tokens LIST      of context (2k,32k,128k)\n"
	 "--query N          tokens of a step (1)\n"
	 "--steps N          that are to come (1)\n"
	 "--holders N        that have the context in equal parts, up to 8 (1)\n"
	 "--selected N       tokens that a query token attends to, chosen each step\n"
	 "--shifted          the KV is used at another position: a fetch rotates it\n"
	 "--recompute MICROS to compute KV, a token and layer; else never local",
	 0, 0, "q", ctl_run_cost},
	{"keygen", "[--owner USER] [FILE]",
	 "make a CURVE key pair for daemon-to-daemon traffic",
	 "With FILE: the secret key is written to it (mode 0600; an existing file is "
	 "not\n"
	 "touched) for `curve_secret_file`, and the public key printed, for a line\n"
	 "`NAME KEY [HOST]...` of every daemon's `curve_allow_file`. Without: both are\n"
	 "printed. No daemon needed.\n\n"
	 "--owner USER  who owns FILE; as root the user kvd if there is one, else the "
	 "caller",
	 0, 1, "o", ctl_run_keygen},
	{"init", "--listen ADDRESS:PORT", "write an instance's configuration",
	 "NAME.conf and NAME.peers in /etc/kvd. The daemon makes its key at its first\n"
	 "start; `keys` prints the line for its peers' lists. A file that exists is "
	 "not\n"
	 "touched.\n\n"
	 "--name NAME                  of the instance\n"
	 "--listen ADDRESS:PORT        of the handshake; data gets the port after it\n"
	 "--peer NAME=HOST:PORT[#KEY]  a daemon that may connect; up to 32\n"
	 "--dir DIR                    instead of /etc/kvd",
	 0, 0, "ip", ctl_run_init},
	{"completion", "SHELL", "a completion script for bash, zsh or fish", "", 1, 1, "",
	 ctl_run_completion},
	{"plan", "FILE | - | --room NUMBER", "which bytes go where, and in what rows",
	 "Reads two layouts and page lists (--cover: all sources and a destination) as\n"
	 "JSON, without a daemon, and prints the rows that would be copied (who sends\n"
	 "what) as JSON.\n\n"
	 "--explain      as text: fields, ranks, rows, and what each transport makes of\n"
	 "               them\n"
	 "--cover        who sends what\n"
	 "--room NUMBER  of an open room, with each of its sources or receivers. Of a\n"
	 "               push the source's pages are kept by nobody: --explain only\n"
	 "--role ROLE    its send, recv or pull room\n\n"
	 "Foreign rooms need root, the daemon's uid or admin_uids.",
	 0, 1, "rkn", ctl_run_plan},
	{"help", "[COMMAND]", "this text, or a command's", "", 0, 1, "", NULL},
	{NULL, NULL, NULL, NULL, 0, 0, NULL, NULL},
};

/* Options of single commands. `letter`: of those in ctl_command.options. */
static const struct command_option {
	const char *name;
	char letter;
	enum { OPTION_TEXT, OPTION_FLAG, OPTION_NUMBER, OPTION_PRESET, OPTION_LIST } kind;
	size_t at;
	unsigned long max; /* of a number, which begins at 1 */
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
	{"batch", 't', OPTION_FLAG, OF(batch), 0},
	{"interval", 'I', OPTION_TEXT, OF(interval), 0},
	{"root", 'x', OPTION_TEXT, OF(root), 0},
	{"count", 'c', OPTION_NUMBER, OF(count), 1000000},
	{"stuck", 'u', OPTION_PRESET, OF(stuck), 0},
	{"state", 'v', OPTION_TEXT, OF(state), 0},
	{"failed", 'f', OPTION_FLAG, OF(failed), 0},
	{"since", 'h', OPTION_TEXT, OF(since), 0},
	{"code", 'h', OPTION_TEXT, OF(code), 0},
	{"room", 'k', OPTION_TEXT, OF(number), 0},
	{"cover", 'n', OPTION_FLAG, OF(plan.cover), 0},
	{"explain", 'n', OPTION_FLAG, OF(plan.explain), 0},
	{"perfetto", 't', OPTION_TEXT, OF(trace.perfetto), 0},
	{"otlp", 't', OPTION_TEXT, OF(trace.otlp), 0},
	{"join", 'j', OPTION_TEXT, OF(trace.join), 0},
	{"views", 'g', OPTION_TEXT, OF(views), 0},
	{"pages", 't', OPTION_FLAG, OF(trace.pages), 0},
	{"with", 'b', OPTION_TEXT, OF(bench.with), 0},
	{"size", 'b', OPTION_TEXT, OF(bench.size), 0},
	{"rows", 'b', OPTION_NUMBER, OF(bench.rows), 1u << 22},
	{"flat", 'b', OPTION_FLAG, OF(bench.flat), 0},
	{"gather", 'b', OPTION_FLAG, OF(bench.gather), 0},
	{"op", 'b', OPTION_TEXT, OF(bench.op), 0},
	{"transport", 'b', OPTION_TEXT, OF(bench.transport), 0},
	{"memory", 'b', OPTION_TEXT, OF(bench.memory), 0},
	{"serve", 'b', OPTION_FLAG, OF(bench.serve), 0},
	{"preset", 'q', OPTION_TEXT, OF(cost.preset), 0},
	{"model", 'q', OPTION_TEXT, OF(cost.model), 0},
	{"tokens", 'q', OPTION_TEXT, OF(cost.tokens), 0},
	{"recompute", 'q', OPTION_TEXT, OF(cost.recompute), 0},
	{"layers", 'q', OPTION_NUMBER, OF(cost.layers), 65536},
	{"heads", 'q', OPTION_NUMBER, OF(cost.heads), 65536},
	{"kv-heads", 'q', OPTION_NUMBER, OF(cost.kv_heads), 65536},
	{"dqk", 'q', OPTION_NUMBER, OF(cost.dqk), 65536},
	{"dv", 'q', OPTION_NUMBER, OF(cost.dv), 65536},
	{"query", 'q', OPTION_NUMBER, OF(cost.query), 1u << 20},
	{"steps", 'q', OPTION_NUMBER, OF(cost.steps), 1u << 30},
	{"holders", 'q', OPTION_NUMBER, OF(cost.holders), KVD_COST_HOLDERS_MAX},
	{"selected", 'q', OPTION_NUMBER, OF(cost.selected), 1u << 30},
	{"shifted", 'q', OPTION_FLAG, OF(cost.shifted), 0},
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

/* the common ones, then command_options[] as OPT_COMMAND and on: main() */
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
		"  -s, --socket PATH    the daemon's control socket\n"
		"  -n, --name NAME      the instance's name: <run dir>/NAME.sock\n"
		"      --all            of health, status, rooms, peers, stats, history, "
		"doctor:\n"
		"                       each instance of the run directory\n"
		"  -t, --timeout SEC    how long to wait for an answer (10)\n"
		"  -j, --json           print the daemon's answer as JSON\n"
		"  -h, --help           this text; after a command, that command's\n"
		"      --version\n"
		"\nWithout --socket and --name: $KVD_SOCKET, else instance $KVD_NAME, "
		"else the only\n"
		"*.sock in $KVD_RUN_DIR or /run/kvd.\n"
		"\nExit status: 0 done, 1 the daemon answered with an error, 2 the "
		"command line is\n"
		"wrong, 3 no daemon answers, 4 the daemon speaks another version.\n");
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

/* Who may connect, when this user may not. */
static void hint_permission(const char *path)
{
	struct passwd *pw = getpwuid(geteuid());
	struct group *gr;
	struct stat st;

	if (stat(path, &st) < 0)
		return;
	gr = getgrgid(st.st_gid);
	fprintf(stderr,
		"  its group is %s and its mode %04o; as root: usermod -aG %s %s, then "
		"log in anew\n",
		gr ? gr->gr_name : "(no name)", (unsigned int)st.st_mode & 07777,
		gr ? gr->gr_name : "GROUP", pw ? pw->pw_name : "USER");
}

/* Which there are, when none was named. */
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
		fputs("  or each of them: --all\n", stderr);
	ctl_instances_free(names, count);
}

/* A socket that the service manager holds for a daemon that is stopped; --socket and
 * KVD_SOCKET mean it. */
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
		 "%.200s: stopped (it has no lock beside it); with --socket PATH a "
		 "connection may start it",
		 path);
	return true;
}

/* Words of others are in it. */
static void keep_error(struct ctl *ctl, const struct kvd_error *error)
{
	ctl->error = *error;
	words_clean(ctl->error.message);
}

struct kvd_client *ctl_connect(struct ctl *ctl)
{
	/* nobody asks again by himself: that might start a daemon that was stopped */
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
		fprintf(stderr, "  kvd-ctl is %s; use the one of the daemon's version\n",
			kvd_version());
	if (error->code == KVD_E_NODAEMON)
		fprintf(stderr,
			"  is it running?  systemctl status 'kvd@*'\n"
			"  another place?  --socket PATH, --name NAME, KVD_SOCKET, "
			"KVD_NAME or KVD_RUN_DIR\n");
	if (error->code == KVD_E_PERM && ctl->socket)
		hint_permission(ctl->socket);
	else if (error->code == KVD_E_PERM &&
		 !kvd_socket_find(ctl->name, path, sizeof(path), NULL))
		hint_permission(path);
	return NULL;
}

static int error_exit(int r)
{
	return r == -KVD_E_LOST || r == -KVD_E_NOREPLY || r == -KVD_E_NODAEMON
		       ? CTL_NO_DAEMON
		       : CTL_ERROR;
}

/* Words of others become harmless, but where they are passed on as they are. */
static cJSON *take_answer(const struct ctl *ctl, cJSON *reply)
{
	if (!ctl->json && !ctl->raw)
		words_clean_json(reply);
	return reply;
}

/* *reply_p is set for an error's answer, too. */
static int send_command(struct ctl *ctl, const char *cmd, cJSON *args, cJSON **reply_p)
{
	char *text = args ? cJSON_PrintUnformatted(args) : NULL, *line = NULL;
	int r = kvd_command(ctl->client, cmd, text, 0, &line);

	cJSON_free(text);
	*reply_p = take_answer(ctl, line ? cJSON_Parse(line) : NULL);
	kvd_string_free(line);
	if (r < 0) {
		keep_error(ctl, kvd_last_error(ctl->client));
		return error_exit(r);
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
	take_answer(ctl, *reply_p);
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
	words_print_json(copy, false, stdout);
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

	/* its value may be left out, and begins with a digit */
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

/* One option; -1: go on, else an exit status. */
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
	case 'b':
		ctl->batch = true;
		return -1;
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

/* Options of single commands that this one does not take. */
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

	optind = 0; /* begin anew, behind the command's name */
	while (r < 0 &&
	       (opt = getopt_long(argc, argv, "s:n:t:jhb", long_options, NULL)) != -1)
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
	       (opt = getopt_long(argc, argv, "+s:n:t:jhb", long_options, NULL)) != -1)
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
