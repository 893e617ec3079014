/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config: the options of the daemon. One table (config_table.c) defines each option with
 * its section, type, default, limits and help. The parser, the checks, the sample file,
 * the manual page and `config.show` all use it.
 *
 * A struct config holds no pointers: it is copied by assignment. After config_load() it
 * is complete: "auto" values are resolved, combinations are checked.
 */
#ifndef KVD_CONFIG_H
#define KVD_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "daemon/base/log.h"
#include "daemon/config/setting.h"

#define CONFIG_OPTIONS_MAX 112u
#define CONFIG_NAME_BYTES 64u
#define CONFIG_PATH_BYTES 256u
#define CONFIG_ENDPOINT_BYTES 128u

/* Rooms whose end is logged at level info. */
enum log_rooms { LOG_ROOMS_FAILED, LOG_ROOMS_SLOW, LOG_ROOMS_ALL };

#define PEER_PART_BYTES (32u << 10)

struct config {
	/* [daemon] */
	char name[CONFIG_NAME_BYTES];	 /* instance name: letters, digits, . _ - */
	char run_dir[CONFIG_PATH_BYTES]; /* of socket and lock */
	uint32_t log_level;		 /* enum log_level */
	uint32_t log_format;		 /* enum log_format */
	uint32_t log_rooms;		 /* enum log_rooms */
	bool core_dumps;
	bool sandbox;
	uint32_t offload_threads; /* >= 1 */
	uint64_t drain_timeout_ns;
	uint64_t memory_bytes; /* of all accounts */

	/* [control] */
	char socket_path[CONFIG_PATH_BYTES]; /* never empty after config_load() */
	uint32_t socket_mode;
	char socket_group[CONFIG_NAME_BYTES]; /* "" = leave as created */
	struct setting_ids allow_uids, allow_gids, admin_uids;
	uint32_t sessions_max;
	uint32_t session_regions_max, session_pools_max;
	uint64_t client_queue_bytes; /* queued replies of a client that reads late */

	/* [peer] */
	char listen[CONFIG_ENDPOINT_BYTES];	   /* tcp://ADDRESS:PORT, port 0 = any */
	char advertise[CONFIG_ENDPOINT_BYTES];	   /* "" = the address of listen */
	char keys_dir[CONFIG_PATH_BYTES];	   /* "" = defaults of link_keydir.c */
	char curve_secret_file[CONFIG_PATH_BYTES]; /* "" = made in keys_dir */
	char curve_allow_file[CONFIG_PATH_BYTES];
	bool insecure;
	uint32_t peers_max;
	uint64_t peer_message_bytes;
	uint64_t peer_part_bytes; /* of a longer body, a turn. Not an option. */
	uint64_t ping_interval_ns, dead_after_ns;
	uint32_t early_requests_max;
	uint64_t early_request_ttl_ns;

	/* [cluster] */
	char cluster[1024];	/* the directory; "": only this daemon's own sessions */
	uint32_t cluster_trust; /* enum groups_trust */
	uint64_t cluster_lease_ns;
	char cluster_tls_ca[CONFIG_PATH_BYTES]; /* "" = the system's */
	char cluster_tls_cert[CONFIG_PATH_BYTES], cluster_tls_key[CONFIG_PATH_BYTES];
	char cluster_user_file[CONFIG_PATH_BYTES];

	/* [metrics] */
	char metrics_listen[CONFIG_ENDPOINT_BYTES]; /* "" = none */

	/* [rooms] */
	uint32_t rooms_max;
	uint32_t tombstones_max;
	uint64_t connect_timeout_ns;
	uint64_t bootstrap_timeout_ns, waiting_timeout_ns;
	uint64_t transfer_stall_timeout_ns, fence_timeout_ns;
	uint64_t lease_ns;

	/* [chunks] */
	uint64_t chunk_memory_bytes;	   /* 0: none are kept */
	char chunk_dir[CONFIG_PATH_BYTES]; /* "": no files */
	uint64_t chunk_dir_bytes;
	unsigned int attention_threads; /* 0: none */
	char attention_isa[16];
	unsigned int attention_gpu_share; /* percent; 0: none */
	uint32_t attention_busy_poll_us;  /* 0: auto; 1: none */
	char chunk_peers[1024];		  /* endpoints separated by blanks; "": none */
	bool chunk_hedge;		  /* re-issue a slow part to a second holder */
	char chunk_index[3072];		  /* the same */
	uint64_t chunk_index_bytes; /* memory of the index kept for others; 0: no index */

	/* [transport] */
	struct setting_words transports; /* in order of preference; all are built in */
	bool transports_auto;		 /* default list of transports. Not an option. */
	struct setting_words require;	 /* names or the class "rdma"; empty = any */
	char ucx_library[CONFIG_PATH_BYTES];	/* "" = the loader's libucp.so.0 */
	char tcp_listen[CONFIG_ENDPOINT_BYTES]; /* "" = the address of `listen` */
	uint32_t tcp_streams, tcp_threads;	/* >= 1 */
	uint32_t tcp_crypto;			/* enum tcp_crypto; END: auto */
	char gpu[CONFIG_PATH_BYTES];
	char cuda_library[CONFIG_PATH_BYTES];
	char gpu_kernels[CONFIG_PATH_BYTES];
	char verbs_rails[CONFIG_ENDPOINT_BYTES]; /* "" = the port of `listen` */
	uint32_t verbs_ack_timeout;		 /* 4.096 us << this */
	uint32_t verbs_traffic_class; /* of the IP header; 0 = system default */
	uint32_t verbs_request_ns;    /* of a work request; 0: no packing */
	uint32_t copy_threads;	      /* >= 1 */
	bool vm_direct;
	uint64_t slice_bytes;
	uint64_t max_inflight_bytes;

	/* file that was read; "" = built-in defaults only. Not an option. */
	char path[CONFIG_PATH_BYTES];
	/* The line that set each row of config_settings(). Not an option. */
	uint32_t line[CONFIG_OPTIONS_MAX];
};

/* Values of config.line that are not lines of the file */
#define CONFIG_LINE_DEFAULT 0u
#define CONFIG_LINE_ARGUMENT UINT32_MAX /* --name, KVD_NAME */

struct config_source {
	const char *path; /* --config; NULL: $KVD_CONFIG, else the search below */
	const char *name; /* --name; NULL: $KVD_NAME, else the file's, else "kvd" */
	/* names of the backends built in, in default order, NULL-terminated */
	const char *const *transports;
	/* optional: called for each fault, one line each */
	void (*on_problem)(void *arg, const char *text);
	void *arg;
};

/* Without a path: /etc/kvd/<name>.conf, then /etc/kvd/kvd.conf, then defaults.
 * ERR_CONFIG: the first fault as "file:line: option: fault; allowed: …". */
int config_load(struct config *config, const struct config_source *source);

/* Take the reloadable options of `fresh`; the names of other changed options
 * ("section.name …") are passed to on_kept. Returns the number of changed options. */
unsigned int config_reload(struct config *config, const struct config *fresh,
			   void (*on_kept)(void *arg, const char *name), void *arg);

/* The table, for config.show: rows 0 … *count_p - 1. */
const struct setting *config_settings(size_t *count_p);

/* Compare the configured memory with the limit of this process, `limit_bytes`.
 * ERR_CONFIG: chunk_memory alone, which is allocated at start, exceeds it. Outcome 1:
 * the sum exceeds it. */
int config_memory_check(const struct config *config, uint64_t limit_bytes);
/* The line that set an option; CONFIG_LINE_DEFAULT if none did. */
uint32_t config_line_of(const struct config *config, const char *name);

/* Print the effective options as a file, with the source of each. */
void config_print_effective(const struct config *config, FILE *out);

void config_print_sample(FILE *out); /* config/kvd.conf, which is generated */

/* May this user connect (any of its groups counts)? root and the daemon's own uid
 * always may; without allow_uids and allow_gids, every user that the mode of the
 * socket admits. */
bool config_admits(const struct config *config, uid_t uid, const gid_t *gids,
		   size_t gid_count);
/* root, the daemon's own uid, or in admin_uids. */
bool config_is_admin(const struct config *config, uid_t uid);

#endif
