/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ctl: shared by the commands of kvd-ctl: options, one connection, replies, exit
 * codes.
 */
#ifndef KVD_CTL_CTL_H
#define KVD_CTL_CTL_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "lib/kvd.h"

struct dirent;
struct passwd;

/* stable: scripts depend on them */
enum ctl_exit {
	CTL_OK = 0,
	CTL_ERROR = 1,	   /* an error reply, or an error of a file */
	CTL_USAGE = 2,	   /* invalid command line; nothing was sent */
	CTL_NO_DAEMON = 3, /* no daemon responds: no socket, no permission, no reply */
	CTL_VERSION = 4,   /* the daemon has another protocol version */
};

struct ctl {
	const char *socket, *name; /* --socket, --name */
	int timeout_ms;
	bool json;
	char **args; /* of the command, NULL-terminated */
	unsigned int arg_count;
	/* options of single commands */
	const char *role, *reason, *owner, *listen, *dir;
	struct ctl_words {
		const char *word[32];
		unsigned int count;
	} peers; /* --peer, each */
	bool diff, layout;
	unsigned long limit, count;
	const char *stuck, *state, *since, *code, *number; /* of rooms, history */
	bool failed;
	bool prometheus;
	const char *by; /* of stats */
	struct {	/* of trace */
		const char *join;
		bool pages;
	} trace;
	bool all;	      /* each instance of the run directory */
	bool takes_all;	      /* the command has --all */
	bool wait;	      /* of drain */
	const char *interval; /* of top */
	const char *root;     /* of doctor */
	struct {	      /* of bench */
		const char *size, *op, *transport, *memory;
		unsigned long rows;
		bool serve, flat, gather;
	} bench;
	bool raw;		   /* do not sanitize the strings of replies */
	bool version_differs;	   /* the reason why there is no client */
	struct kvd_client *client; /* opened by the first ctl_ask() */
	struct kvd_error error;	   /* of the last ctl_connect() or ctl_query() */
};

struct ctl_command {
	const char *name, *args, *summary;
	const char *help; /* paragraphs after the usage line */
	unsigned int args_min, args_max;
	const char *options; /* letters of the options that it accepts: "r" --role … */
	int (*run)(struct ctl *ctl);
};

/* Commands that a daemon of another protocol version answers without a session (plain.c).
 * `args`: JSON or NULL. */
bool ctl_needs_no_session(const char *cmd);
int ctl_ask_plain(struct ctl *ctl, const char *cmd, const char *args, cJSON **reply_p);

/* kvd_command() with trees. *reply_p is also set for an error reply. `args` may be NULL.
 */
int ctl_command(struct kvd_client *client, const char *cmd, const cJSON *args,
		int timeout_ms, cJSON **reply_p);
/* The connection; NULL: the error is in ctl->error. Prints nothing. */
struct kvd_client *ctl_connect(struct ctl *ctl);
/* Send a command; takes ownership of `args` (NULL: {}). CTL_OK and the reply, or a code
 * and ctl->error. A lost connection stays lost until ctl_disconnect(). */
int ctl_query(struct ctl *ctl, const char *cmd, cJSON *args, cJSON **reply_p);
void ctl_disconnect(struct ctl *ctl);
/* The connection; NULL after printing the error (then return CTL_NO_DAEMON). */
struct kvd_client *ctl_open(struct ctl *ctl);
/* As ctl_query(), and prints the error. */
int ctl_ask(struct ctl *ctl, const char *cmd, cJSON *args, cJSON **reply_p);
/* Print a reply without "id" and "ok", for --json. */
void ctl_print_json(const cJSON *reply);
int ctl_usage(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
int ctl_failed(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* The contents of a file of at most `most` bytes, with a NUL behind them, from malloc();
 * "-" is standard input. NULL: errno. */
char *ctl_read_file(const char *path, size_t most, size_t *len_p);
/* A file that must not exist yet, complete or not at all; owner NULL: the caller. */
int ctl_write_new(const char *path, mode_t mode, const struct passwd *owner,
		  const char *text);

/* Print a line on standard error that the next call replaces; NULL erases it. Only if
 * standard error is a terminal. */
void ctl_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* "4096", "64K", "1G", *end_p behind it; 1 to CTL_SIZES_MAX of these, separated by
 * commas, each from 1 to `most`. */
#define CTL_SIZES_MAX 16u
bool ctl_size(const char *text, uint64_t *size_p, const char **end_p);
bool ctl_sizes(const char *text, uint64_t most, uint64_t sizes[CTL_SIZES_MAX],
	       unsigned int *count_p);
/* "30s", "500ms", "10m", "1h"; a plain number means seconds. */
bool ctl_duration(const char *text, double *ms_p);

/* Members of a reply, with a default if absent. */
const char *ctl_str(const cJSON *obj, const char *name, const char *absent);
double ctl_num(const cJSON *obj, const char *name);
const cJSON *ctl_list(const cJSON *obj, const char *name);
bool ctl_true(const cJSON *obj, const char *name);
/* "1.5 MiB", "1:05 min", "1 room", "2 rooms"; valid until the eighth call after. */
const char *ctl_bytes(double bytes);
const char *ctl_ms(double ms);
const char *ctl_count(double count, const char *noun);
struct table;
int ctl_print_table(struct table *table); /* frees it */
/* A cell for each of these members, "error.code" of the object error: text, a number, yes
 * or no; "-": absent. Behind a name, ":B" bytes, ":t" ms, ":2" so many decimals, ":@" an
 * endpoint without its key. */
void ctl_cells(struct table *table, const cJSON *obj, const char *names);
void ctl_endpoint_cell(struct table *table, const char *endpoint); /* without its key */
/* A table of the records of a list, a row each. */
int ctl_print_list(const cJSON *list, const char *heads,
		   void (*row)(struct table *table, const cJSON *record));
/* Send a command and print the reply: as JSON, or by `print`. */
int ctl_show(struct ctl *ctl, const char *cmd, cJSON *args,
	     int (*print)(const cJSON *reply));
cJSON *ctl_args_all(void); /* {"all":true} */
/* Changes of the allow-list in a reply of config.reload; false: none. */
#define CTL_KEYS_MAX 80
bool ctl_keys_differ(const cJSON *reply, char text[CTL_KEYS_MAX]);
/* The last error of a peer; `absent` if it has none. */
void ctl_peer_error_cell(struct table *table, const cJSON *peer, const char *absent);

extern const struct ctl_command ctl_commands[]; /* the last has no name */
/* The name of option i; "" if the command does not accept it; NULL at the end. */
const char *ctl_option(const struct ctl_command *command, unsigned int i);

/* $KVD_RUN_DIR or /run/kvd, and its sorted *.sock files (-1: errno). */
const char *ctl_run_dir(void);
int ctl_instances(struct dirent ***names_p);
void ctl_instances_free(struct dirent **names, int count);
/* False: NAME.sock without NAME.lock; a connection might start the daemon. */
bool ctl_instance_runs(const char *socket);
struct ctl_seen {
	const char *name;
	char state[64]; /* its own, "stopped", or the error code of the connection */
	char version[64], endpoint[128];
	int pid;
};
/* Opens a short connection if the daemon runs. */
void ctl_instance_look(const char *socket, struct ctl_seen *seen);

/* Run the command for each instance (--all); the highest exit code. */
int ctl_run_all(struct ctl *ctl, const struct ctl_command *command);
/* Append records of ended rooms, latest first, to the array `rooms`. As ctl_ask(). */
int ctl_history(struct ctl *ctl, const char *number, unsigned long limit, cJSON *rooms);
/* "stopped" or "zombie" by this host's /proc; "": neither, or not visible. */
const char *ctl_process_state(double pid);
/* The name by which a peer is known here, without its key; valid until the next call. */
const char *ctl_peer_name(const cJSON *peer);

int ctl_run_status(struct ctl *ctl);
int ctl_run_health(struct ctl *ctl);
int ctl_run_stats(struct ctl *ctl);
int ctl_run_rooms(struct ctl *ctl);
int ctl_run_room(struct ctl *ctl);
int ctl_run_history(struct ctl *ctl);
int ctl_run_trace(struct ctl *ctl);
int ctl_run_peers(struct ctl *ctl);
int ctl_run_regions(struct ctl *ctl);
int ctl_run_devices(struct ctl *ctl);
int ctl_run_chunks(struct ctl *ctl);
int ctl_run_cluster(struct ctl *ctl);
int ctl_run_group(struct ctl *ctl);
int ctl_run_pools(struct ctl *ctl);
int ctl_run_plan(struct ctl *ctl);
int ctl_run_sessions(struct ctl *ctl);
int ctl_run_ping(struct ctl *ctl);
int ctl_run_call(struct ctl *ctl);
int ctl_run_abort(struct ctl *ctl);
int ctl_run_drain(struct ctl *ctl);
int ctl_run_log(struct ctl *ctl);
int ctl_run_keys(struct ctl *ctl);
int ctl_run_keygen(struct ctl *ctl);
int ctl_run_config(struct ctl *ctl);
int ctl_run_reload(struct ctl *ctl);
int ctl_run_ls(struct ctl *ctl);
int ctl_run_init(struct ctl *ctl);
int ctl_run_completion(struct ctl *ctl);
int ctl_run_bench(struct ctl *ctl);
int ctl_run_cost(struct ctl *ctl);
int ctl_run_calibrate(struct ctl *ctl);
int ctl_run_top(struct ctl *ctl);
int ctl_run_doctor(struct ctl *ctl);

#endif
