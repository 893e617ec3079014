/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link: the transport of peer messages. Carries frames and does not interpret them.
 * ZeroMQ in the daemon (link_zmq), in memory for the simulation.
 *
 * A daemon receives on one socket bound at `listen` and sends on one line to each peer,
 * so the frames of one sender stay in order. A line may lose its queued frames when it
 * breaks; it never duplicates, reorders or alters frames. Nothing here blocks; a full
 * queue is reported to the caller.
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
	const char *line;		      /* line for the allow-lists of others; "" */
	const struct curve_allow *allow;      /* link_curve.h; NULL: none */
	struct link_keydir *dir;	      /* link_keydir.h; NULL: not used */
	const struct link_refusals *refusals; /* link_refused.h */
};

struct link_frame {
	const uint8_t *data;
	size_t len;
	/* the sender, as authenticated by the link: the CURVE key's user id; ""
	 * without keys */
	char user[LINK_USER_MAX];
};

struct link_ops {
	/* The canonical form of an endpoint, for `dial` and link.endpoint: ERR_INVAL
	 * when it cannot be dialled, ERR_AUTH when no key is known for it. Where a key
	 * may become known later (a daemon of this user and host that has not started
	 * yet) the endpoint is returned unchanged, and its canonical form may change.
	 * NULL: any tcp://host:port, unchanged. */
	int (*canonical)(struct link *link, const char *endpoint,
			 char canonical_p[LINK_ENDPOINT_MAX]);
	/* The name of the daemon that has the key of an endpoint (in the form of
	 * canonical()). False: none. NULL: a link without keys. */
	bool (*name)(struct link *link, const char *endpoint, char name_p[LINK_USER_MAX]);
	/* In on_frame: the sender of the frame is authenticated. While `unproven`,
	 * frames of a peering are confirmed, too; connections without a confirmed
	 * frame are closed after a timeout. NULL: the link has no connections. */
	void (*vouch)(struct link *link);
	/* Is the daemon at an endpoint (in the form of canonical()), which has
	 * authenticated as `user`, of the same user as this one? NULL: there are no
	 * keys, every daemon is. */
	bool (*same_user)(struct link *link, const char *endpoint, const char *user);
	/* NULL: a link without keys. */
	void (*keys)(struct link *link, struct link_keys *keys_p);
	/* Open a line; connecting continues in the background. */
	int (*dial)(struct link *link, const char *endpoint, void *owner,
		    struct link_line **line_p);
	/* The same for an endpoint that only an unauthenticated peer has named: one
	 * attempt without diagnosis. When the connection ends, on_diagnosis() reports
	 * it, and it is not opened again. NULL: as `dial`. */
	int (*dial_once)(struct link *link, const char *endpoint, void *owner,
			 struct link_line **line_p);
	/* May answers to `user` (of a frame) be sent to this endpoint (in the form of
	 * canonical())? ERR_AUTH: the key there is another user's, or the host is not
	 * listed for it. NULL: always. */
	int (*may_answer)(struct link *link, const char *endpoint, const char *user);
	/* After a reload: may the daemon at an endpoint (in the form of canonical())
	 * still connect, as `user` ("": not known yet) and, with `hosts`, from that
	 * host? ERR_AUTH. NULL: every endpoint may. */
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
	/* the endpoint for peers: `advertise` with the port */
	char endpoint[LINK_ENDPOINT_MAX];
	/* Frames are waiting that exceeded this turn's budget: silence is no evidence
	 * then. */
	bool backlog;
	bool unproven; /* there are connections without an authenticated frame */
	void *owner;
	/* Called on the loop within a budget a turn; frame valid during the call. */
	void (*on_frame)(void *owner, const struct link_frame *frame);
	/* The line accepts frames / accepts none (full or broken); hints, not proofs.
	 * Never called from inside dial, send or hangup. */
	void (*on_line)(void *owner, void *line_owner, bool connected);
	/* A line does not connect; the reason describes the other side: "cannot be
	 * reached: …". May be called repeatedly. `final`: retrying is pointless; hang
	 * up. Never called from inside dial, send or hangup. */
	void (*on_diagnosis)(void *owner, void *line_owner, const struct err *why,
			     bool final);
};

struct loop;
struct config;
int link_zmq_new(struct loop *loop, const struct config *config, struct link **link_p);
/* Reload (SIGHUP): read the allow file; on an error the old list stays. Connections of
 * keys that were removed or renamed are closed at their next frame. Without `apply`
 * the changes are only reported. */
struct curve_changes;
int link_zmq_reload(struct link *link, const char *allow_file, bool apply,
		    struct curve_changes *changes_p);
/* Attests keys that are neither in the allow-list nor of a daemon of this user and
 * host (cluster_trust = directory). NULL: such keys are refused. */
struct link_vouch {
	void *owner;
	/* Is it a member's now? */
	bool (*knows)(void *owner, const char *key);
	/* Is that member at tcp://host:port? */
	bool (*at)(void *owner, const char *key, const char *endpoint);
	/* True: the key may be valid; a query is running and link_zmq_look() follows.
	 * False: the answer of knows() is final. */
	bool (*ask)(void *owner, const char *key);
};
void link_zmq_vouch(struct link *link, const struct link_vouch *vouch);
/* The answer of knows() may have changed. */
void link_zmq_look(struct link *link);
/* Counters; `bad_frames` were not exactly [identity][frame]. */
struct link_zmq_stats {
	uint64_t frames_in, bad_frames, revoked;
};
const struct link_zmq_stats *link_zmq_stats(const struct link *link);

#endif
