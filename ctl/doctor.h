/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor: checks of a daemon and its host. Each check is a function of the table in
 * doctor.c, tells one line or several, and tells nothing where it has nothing to look at.
 * What the host's own files say is read below `root`, so a tree that a test made, or
 * another host's copy, is looked at by the same code.
 */
#ifndef KVD_CTL_DOCTOR_H
#define KVD_CTL_DOCTOR_H

#include <dirent.h>

#include "ctl/ctl.h"

/* The first three are exit statuses. A note is right for some: it counts as ok. */
enum doctor_result { DOCTOR_OK, DOCTOR_WARN, DOCTOR_FAIL, DOCTOR_NOTE };

struct doctor {
	struct ctl *ctl;
	const char *root;  /* "" or a directory */
	const char *check; /* the one that runs */
	enum doctor_result worst;
	cJSON *lines; /* --json */
	/* what the daemon answered; NULL: there is none, or it refuses */
	cJSON *health, *settings, *devices, *sessions, *regions, *stats;
	int pid;	   /* of the daemon, as seen from here; 0: not known */
	long uid;	   /* it runs as; -1: not known */
	bool unprivileged; /* foreign rooms are not told */
};

/* A line. remedy: NULL or "" where nothing is to be done. */
void doctor_say(struct doctor *d, enum doctor_result result, const char *remedy,
		const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* The value of an option that runs; "" when it is empty or not known. */
const char *doctor_setting(const struct doctor *d, const char *name);
bool doctor_has_transport(const struct doctor *d, const char *name);

/* A file below root, without the newline at its end; false: it cannot be read. */
bool doctor_read(const struct doctor *d, char *text, size_t size, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* The names in a directory below root, in order, without those with a dot; 0: none. Free
 * with ctl_instances_free(). */
int doctor_list(const struct doctor *d, struct dirent ***names_p, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
bool doctor_exists(const struct doctor *d, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

void doctor_daemon(struct doctor *d); /* also asks for what later checks need */
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
