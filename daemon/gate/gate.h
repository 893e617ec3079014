/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate: descriptors of clients, received, checked and closed in a disposable process.
 *
 * close(), fstat() and most other calls on a descriptor that a client made may sleep for
 * as long as the client likes: a socket that lingers, a file of a FUSE server that does
 * not answer. So the daemon never receives a descriptor from a client's socket itself,
 * and is never the last to close such a socket, in whose queue more of them may lie. Each
 * user has one process that does this: it holds every connection of that user, receives
 * messages with descriptors, and passes on harmless ones (vet.h). Bytes without
 * descriptors the daemon reads by itself: a peek detects this (gate_peek()).
 *
 * A gate that hangs is killed and replaced; only the message being received is lost. A
 * user whose gates hang even so (some sleeps end for no signal) gets no further one until
 * they have ended, and can send no descriptors till then.
 */
#ifndef KVD_GATE_GATE_H
#define KVD_GATE_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/gate/gate_child.h"
#include "daemon/loop/loop.h"

struct gate;
struct gates;
struct warden;

/* A received message. */
struct gate_parcel {
	const uint8_t *bytes;
	size_t len;
	int *fds; /* taken by setting them -1; the rest is closed afterwards */
	unsigned int fd_count;
	struct err
		fault; /* code != OK: why the descriptors of the last line are not here;
			  scope SESSION: bytes are lost, the connection must be closed */
};

/* A client's socket, held by a gate. Embedded in its owner. */
struct gate_client {
	struct list link;
	struct gates *gates;
	struct gate *gate; /* NULL: its user may not send descriptors now */
	int fd;		   /* the daemon's; not owned */
	uid_t uid;
	uint32_t slot;
	struct gate_ask ask; /* serial 0: no request is pending */
	bool begun;
	uint64_t asked_ns;
	struct loop_defer lost; /* reports the loss if why[0] is set */
	char why[64];
	void (*on_parcel)(struct gate_client *client, struct gate_parcel *parcel);
};

/* Takes the socket of warden_fork(). When that process ends, on_lost is called once: no
 * gate can be started after that. */
int gates_new(struct loop *loop, int socket, void (*on_lost)(void *arg), void *arg,
	      struct gates **gates_p);
void gates_free(struct gates *gates); /* NULL is allowed; no client may be left */
/* For other processes of the daemon that may hang. */
struct warden *gates_warden(const struct gates *gates);
/* Do not retry now: too many sockets wait to be closed. */
bool gates_full(struct gates *gates);

/* From now on the gate of `uid` holds `fd`, too. ERR_LIMIT: that user's gates hang. */
int gate_hold(struct gates *gates, struct gate_client *client, int fd, uid_t uid);
/*
 * Called before the daemon reads from a client's socket. *with_p: the queue has
 * descriptors; then use gate_receive(), else this many bytes may be read directly. As
 * recv(2) with MSG_PEEK.
 */
ssize_t gate_peek(int fd, void *buf, size_t size, bool *with_p);
/* Once, before anything is read: out-of-band bytes would bypass the peek. */
int gate_prepare(int fd);
/* on_parcel follows, never from within this call. One at a time. */
void gate_receive(struct gate_client *client, enum gate_op op, size_t want,
		  unsigned int most);
static inline bool gate_receiving(const struct gate_client *client)
{
	return client->ask.serial != 0;
}
/* Closes *fd_p, here and there. on_parcel is not called any more. Idempotent. */
void gate_close(struct gate_client *client, int *fd_p);
/* Closes the gate's descriptor only; the daemon's stays open. Idempotent, also for one
 * never held. */
void gate_release(struct gate_client *client);
/* For a socket without a gate: a client that is refused. */
void gate_turn_away(struct gates *gates, int owned_fd);
/* A listening socket: on Linux 6.16 and later no client can send descriptors to a
 * connection before a gate holds it. */
void gate_listen(int fd);

#endif
