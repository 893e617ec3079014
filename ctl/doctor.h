/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor: checks of a daemon and its host. Each check is a function in the table of
 * doctor.c. It reports one or more lines, or none if there is nothing to check. Files of
 * the host are read below `root`, so that the same code can check a tree made by a test
 * or copied from another host.
 */
#ifndef KVD_CTL_DOCTOR_H
#define KVD_CTL_DOCTOR_H

#include <dirent.h>

#include "ctl/ctl.h"

/* The first three are exit statuses. A note may be intended and counts as ok. */
enum doctor_result { DOCTOR_OK, DOCTOR_WARN, DOCTOR_FAIL, DOCTOR_NOTE };

struct doctor {
	struct ctl *ctl;
	const char *root;  /* "" or a directory */
	const char *check; /* the current one */
	enum doctor_result worst;
	cJSON *lines; /* --json */
	/* the daemon's replies; NULL: no daemon, or refused */
	cJSON *health, *settings, *devices, *sessions, *regions, *stats;
	int pid;	   /* of the daemon, in this PID namespace; 0: not known */
	long uid;	   /* of the daemon; -1: not known */
	bool unprivileged; /* rooms of other users are not visible */
};

/* Prints a line. remedy: NULL or "" if none is needed. */
void doctor_say(struct doctor *d, enum doctor_result result, const char *remedy,
		const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* The value of an option in effect; "" if it is empty or not known. */
const char *doctor_setting(const struct doctor *d, const char *name);
bool doctor_has_transport(const struct doctor *d, const char *name);

/* Reads a file below root, without the final newline; false: not readable. */
bool doctor_read(const struct doctor *d, char *text, size_t size, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* The sorted names in a directory below root, except hidden ones; 0: none. Free with
 * ctl_instances_free(). */
int doctor_list(const struct doctor *d, struct dirent ***names_p, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
bool doctor_exists(const struct doctor *d, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

void doctor_daemon(struct doctor *d); /* also queries the input of later checks */
void doctor_version(struct doctor *d);
void doctor_config(struct doctor *d);
void doctor_listen(struct doctor *d);
void doctor_keys(struct doctor *d);
void doctor_transports(struct doctor *d);
void doctor_sockets(struct doctor *d);
void doctor_peers(struct doctor *d);
void doctor_chunks(struct doctor *d);
void doctor_cluster(struct doctor *d);
void doctor_loop(struct doctor *d);
void doctor_rooms(struct doctor *d);
void doctor_failures(struct doctor *d);

void doctor_limits(struct doctor *d);
void doctor_rights(struct doctor *d);
void doctor_kernel(struct doctor *d);
void doctor_huge_pages(struct doctor *d);
void doctor_shm(struct doctor *d);
void doctor_userfaultfd(struct doctor *d);
void doctor_namespaces(struct doctor *d);

void doctor_network(struct doctor *d);
void doctor_rdma(struct doctor *d);
void doctor_gpu(struct doctor *d);

#endif
