/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session: one engine's connection on the control socket and all it owns.
 * It ends with the socket's EOF, the process's end (pidfd) or its memory's end
 * (statm), whichever is seen first; then its rooms fail, its pools and regions
 * go, its peers are told (invariant 4).
 */
#ifndef KVD_SESSION_H
#define KVD_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/idmap.h"
#include "daemon/base/list.h"

struct kvd;
struct status_page;

struct session {
	struct list link; /* in kvd's sessions */
	struct kvd *kvd;
	uint64_t id;	/* rises within an instance */
	uint64_t epoch; /* random: names the session on the wire */
	uint8_t secret[16];
	char client[64]; /* from hello */
	pid_t pid;	 /* SO_PEERCRED */
	uid_t uid;
	gid_t gid;
	bool admin;	 /* root, the daemon's uid or admin_uids */
	bool greeted;	 /* hello was answered */
	bool ending;	 /* session_end() has begun */
	struct idmap regions; /* id -> struct region */
	struct idmap pools;   /* id -> struct pool */
	struct list rooms;    /* struct room.session_link; rooms.c */
	struct list requests; /* open struct request */
	struct status_page *status;
	void *xfers;	      /* xfer.c's per-session part */
	void *conn;	      /* control.c's */
	uint64_t next_id;     /* for regions, pools, dlists, xfers */
	unsigned int objects_draining; /* what must be gone before session_free */
};

/* Begin the end: idempotent. Objects drain, then the session frees itself. */
void session_end(struct session *session, const char *why);
/* An object that drains after session_end() announces itself and its end. */
void session_drain_begin(struct session *session);
void session_drain_end(struct session *session);

#endif
