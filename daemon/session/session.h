/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session: one engine's connection on the control socket and all its objects. It ends
 * with the EOF of the socket, the end of the process (pidfd) or of its memory (statm),
 * whichever is detected first. Then its rooms fail, its pools and regions are removed,
 * and its peers are notified (invariant 4).
 */
#ifndef KVD_SESSION_H
#define KVD_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/account.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/module.h"
#include "daemon/loop/loop.h"

struct err;
struct kvd;
struct status_page;
struct region_map;
struct session_watch;
struct text;

/* Slots of a status page: rooms and moves of chunks that the daemon numbers, followed
 * by those that the engine numbers (proto/kvd_ring.h). */
#define SESSION_SLOTS 65536u
#define SESSION_ENGINE_SLOTS 65536u

#define SESSION_LINE_MAX (1u << 20) /* bytes of a request */

struct session {
	struct list link; /* in kvd's sessions */
	struct kvd *kvd;
	uint64_t id;		 /* rises within an instance */
	uint64_t epoch;		 /* random: names the session on the wire */
	struct account *account; /* of its user: charged for its objects */
	struct charge charge;	 /* the session itself */
	uint8_t secret[16];
	char client[64]; /* from hello */
	char role[16];	 /* from hello, for people */
	pid_t pid;	 /* SO_PEERCRED */
	uid_t uid;
	gid_t gid;
	bool admin;	      /* root, the daemon's uid or admin_uids */
	bool own;	      /* internal session of the daemon: no process, no limits */
	bool greeted;	      /* hello was answered */
	bool announced;	      /* its start was logged at info */
	bool ending;	      /* session_end() has started */
	struct idmap regions; /* id -> struct region */
	struct idmap pools;   /* id -> struct pool */
	struct list requests; /* open struct request */
	struct status_page *status;
	void *conn;				 /* control.c's; NULL: none, or closed */
	const struct session_conn_ops *conn_ops; /* with conn */
	uint64_t next_id;			 /* for regions, pools, dlists, xfers */
	unsigned int objects_draining;		 /* must be removed before session_free */
	unsigned int requests_open;
	unsigned int
		walking; /* long replies being written (reply_walk.h): no line is read */
	struct list waiting;	/* words being polled: struct wait.link (wait.c) */
	struct list words_link; /* in the list of sessions with words */
	unsigned int words;
	size_t requests_bytes; /* of the open requests' lines */
	uint64_t started_ns;
	struct region_map *region_map; /* regions by the engine's address */
	uint64_t regions_version;      /* incremented when a region is added or removed */
	unsigned int files;	       /* regions that are */
	struct session_watch *watch;   /* pidfd and statm of the engine */
	struct loop_defer free_defer;
	void *part[MODULES]; /* each module's own */
};

/* Of the connection behind a session; `conn` is session->conn. */
struct session_conn_ops {
	/* Send one line with its newline, which is taken, now or when the client reads.
	 * Descriptors of queued replies are duplicated. */
	void (*answer)(void *conn, struct text *text, const int *fds,
		       unsigned int fd_count);
	/* The session's ring has passed the point that a request line waited for. */
	void (*resume)(void *conn);
	/* The session has ended: send the reason, unless the client has disconnected,
	 * and close. */
	void (*hangup)(void *conn, const struct err *why);
};

/* SO_PEERCRED */
struct session_peer {
	pid_t pid; /* 0: in a PID namespace that is hidden from kvd */
	uid_t uid;
	gid_t gid;
	int fd; /* the connection, for SO_PEERPIDFD; not kept */
};

/* For control: a session for one connection. hello follows. */
int session_new(struct kvd *kvd, const struct session_peer *peer, void *conn,
		struct session **session_p);

/* An internal session, for memory, rooms and commands without an engine; in no metric of
 * sessions. `name` as a client has one. */
int session_new_own(struct kvd *kvd, const char *name, struct session **session_p);
/* Of its process; internal session: this process. 0: not visible here. */
pid_t session_pid(const struct session *session);
/* NULL: there is none. */
struct session *session_by_id(const struct kvd *kvd, uint64_t id);

/* Start the end: idempotent. Objects drain, then the session frees itself. */
void session_end(struct session *session, const char *why);
/* The deferred session_end() of the module is done. */
void session_end_next(struct session *session, enum module_id ended);
/* The principal of its jobs: its user, or the daemon itself (offload.h). */
uint64_t session_principal(const struct session *session);
/* 16 bytes: this daemon's instance; zeros without peers (tests). */
const uint8_t *session_instance(const struct session *session);
/* hello: make the status page and note its name and role. Once. */
int session_greet(struct session *session, const char *client, const char *role);
/* It registers memory: log it. Sessions that only query are not logged. */
void session_announce(struct session *session);
/* The object, unless it is NULL: then ERR_NOTFOUND, which names its kind and id. */
void *session_found(void *object, const char *kind, uint64_t id);
/* An object that drains after session_end() reports its start and end. */
void session_drain_begin(struct session *session);
void session_drain_end(struct session *session);

#endif
