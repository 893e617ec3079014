/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link: the transport of peer messages. Carries frames, knows no meaning. ZeroMQ
 * in the daemon (link_zmq), in memory for the simulation.
 *
 * A daemon receives on one socket bound at `listen` and sends on one line to
 * each peer, so one sender's frames keep their order. A line may lose what is
 * in it when it breaks; it never duplicates, reorders or alters. Nothing here
 * blocks; a full queue is an answer.
 */
#ifndef KVD_LINK_H
#define KVD_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/endpoint.h"

struct err;
struct link;
struct link_line; /* an outgoing line to one endpoint */

#define LINK_ENDPOINT_MAX ENDPOINT_MAX
#define LINK_USER_MAX 64

struct curve_allow;
struct link_keydir;
struct link_refusals;
/* For `keys`. */
struct link_keys {
	const char *public_key;		      /* this daemon's; "": it has none */
	const char *line;		      /* for the allow-lists of others; "" */
	const struct curve_allow *allow;      /* link_curve.h; NULL: it has none */
	struct link_keydir *dir;	      /* link_keydir.h; NULL: it uses none */
	const struct link_refusals *refusals; /* link_refused.h */
};

struct link_frame {
	const uint8_t *data;
	size_t len;
	/* the sender, as the link's authentication proved: the CURVE key's
	 * user id; "" without keys */
	char user[LINK_USER_MAX];
};

struct link_ops {
	/* One spelling for each endpoint, as `dial` wants it and `link.endpoint` has
	 * it: ERR_INVAL when it has no form that can be dialled, ERR_AUTH when no
	 * key is known for it. Where that may change by itself (a daemon beside this one
	 * that has not started yet) it is as it was given, and has another spelling
	 * later. NULL: any tcp://host:port as it is. */
	int (*canonical)(struct link *link, const char *endpoint,
			 char canonical_p[LINK_ENDPOINT_MAX]);
	/* The name by which the daemon is known that has the key of an endpoint that
	 * canonical() has spelled. False: none. NULL: a link without keys. */
	bool (*name)(struct link *link, const char *endpoint, char name_p[LINK_USER_MAX]);
	/* In on_frame: the frame is a daemon's. While `unproven`, frames of a peering are
	 * vouched for, too; connections by which none comes are closed after a while.
	 * NULL: there are no connections. */
	void (*vouch)(struct link *link);
	/* Is the daemon at an endpoint (as canonical() has spelled it), which has shown
	 * `user`, of the same user as this one? NULL: there are no keys, every one is. */
	bool (*kin)(struct link *link, const char *endpoint, const char *user);
	/* NULL: a link without keys. */
	void (*keys)(struct link *link, struct link_keys *keys_p);
	/* Open a line; connecting goes on in the background. */
	int (*dial)(struct link *link, const char *endpoint, void *owner,
		    struct link_line **line_p);
	/* The same for an endpoint that only a stranger has named: one attempt, no look
	 * at why it fails, and when the connection has ended on_trouble() says so, and it
	 * is not made again. NULL: as `dial`. */
	int (*dial_once)(struct link *link, const char *endpoint, void *owner,
			 struct link_line **line_p);
	/* May `user` (of a frame) have itself answered at an endpoint that canonical()
	 * has spelled? ERR_AUTH: the key there is another's, or the host is not one that
	 * is known for it. NULL: anywhere. */
	int (*may_answer)(struct link *link, const char *endpoint, const char *user);
	/* After a reload: is the daemon at an endpoint (as canonical() has spelled it)
	 * still one that may connect, as `user` ("": it has shown none yet) and, with
	 * `hosts`, from that host? ERR_AUTH. NULL: nobody is refused. */
	int (*recheck)(struct link *link, const char *endpoint, const char *user,
		       bool hosts);
	void (*hangup)(struct link_line *line);
	/* Queue a frame (copied). ERR_LIMIT: the peer's queue is full or the line
	 * is not connected. */
	int (*send)(struct link_line *line, const void *frame, size_t len);
	void (*free)(struct link *link);
};

struct link {
	const struct link_ops *ops;
	/* what others dial: `advertise`, port filled in */
	char endpoint[LINK_ENDPOINT_MAX];
	/* Frames are waiting that did not fit into this turn's budget: silence means
	 * nothing yet. */
	bool backlog;
	bool unproven; /* a connection was made that nobody has vouched for */
	void *owner;
	/* Called on the loop within a budget a turn; frame valid during the call. */
	void (*on_frame)(void *owner, const struct link_frame *frame);
	/* The line takes frames / takes none (full or broken); hints, not proofs.
	 * Never called from inside dial, send or hangup. */
	void (*on_line)(void *owner, void *line_owner, bool connected);
	/* A line does not connect, and why, as what the other side does: "cannot be
	 * reached: …". May come again. `final`: it never will; hang up. Never called from
	 * inside dial, send or hangup. */
	void (*on_trouble)(void *owner, void *line_owner, const struct err *why,
			   bool final);
};

struct loop;
struct config;
int link_zmq_new(struct loop *loop, const struct config *config, struct link **link_p);
/* SIGHUP: read the allow file again; on an error the old list stays. Connections of
 * keys that are no longer in it, or have another name there, end with their next frame.
 * Without `apply` only what differs is told. */
struct curve_changes;
int link_zmq_reload(struct link *link, const char *allow_file, bool apply,
		    struct curve_changes *changes_p);
/* Keys that are neither in the allow-list nor beside this daemon: who vouches for them
 * (cluster_trust = directory). NULL: nobody. */
struct link_vouch {
	void *owner;
	/* Is it a member's now? */
	bool (*knows)(void *owner, const char *key);
	/* Is that member at tcp://host:port? */
	bool (*at)(void *owner, const char *key, const char *endpoint);
	/* It may be one: look, then link_zmq_look(). False: knows() has the last word. */
	bool (*ask)(void *owner, const char *key);
};
void link_zmq_vouch(struct link *link, const struct link_vouch *vouch);
/* knows() may say otherwise than before. */
void link_zmq_look(struct link *link);
/* Counters; `bad_frames` had not exactly [identity][frame]. */
struct link_zmq_stats {
	uint64_t frames_in, frames_out, bad_frames, refused, revoked;
};
const struct link_zmq_stats *link_zmq_stats(const struct link *link);

#endif
