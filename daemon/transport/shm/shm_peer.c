/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's life: it connects, is ready, and one day is lost or closed.
 *
 * Everything that calls back to the user of the transport happens in one place,
 * peer_step(), a deferred call: so post(), land() and cancel() never call back,
 * and what a callback does to the peer (post, close) finds it in order. Others
 * change state, then kick the step.
 *
 * The end has one order: nothing is sent or received any more; every copy is
 * canceled and joined; then each op and inbound has its done, each key its
 * word; then on_peer_lost, or on_closed where the user asked for the end. So
 * "lost" is said when no byte moves.
 */
#include "daemon/transport/shm/shm_private.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define STEP_BUDGET 256u /* callbacks a turn */

static void peer_free(struct shm_peer *peer)
{
	shm_keys_detach(peer);
	loop_defer_cancel(&peer->step);
	list_remove(&peer->link);
	mem_free(peer->ops);
	mem_free(peer->ins);
	mem_free(peer);
}

static void peer_disconnect(struct shm_peer *peer)
{
	peer->state = SHM_PEER_DYING;
	peer->base.ready = false;
	if (peer->fd >= 0) {
		loop_fd_stop(&peer->watch);
		close(peer->fd);
		peer->fd = -1;
	}
	shm_peer_kick(peer);
}

void shm_peer_fail(struct shm_peer *peer)
{
	if (peer->state >= SHM_PEER_DYING) {
		err_clear();
		return;
	}
	err_take(&peer->why);
	peer_disconnect(peer);
}

/* ---- the step ---- */

static void peer_bury(struct shm_peer *peer)
{
	const struct xp_callbacks *cb = &peer->shm->base.callbacks;
	bool still = shm_ops_stop(peer);

	still = shm_ins_stop(peer) && still;
	if (!still || !shm_rings_idle(peer))
		return; /* each of them kicks when it is */
	shm_wire_fini(&peer->wire);
	shm_ops_end(peer);
	shm_ins_end(peer);
	shm_keys_end(peer);
	shm_rings_fini(peer);
	peer->state = SHM_PEER_DEAD;
	if (!peer->closing)
		cb->on_peer_lost(cb->owner, (struct xp_peer *)(void *)peer, &peer->why);
}

static void peer_send(struct shm_peer *peer)
{
	if (peer->self) {
		if (shm_wire_loop_back(peer))
			shm_peer_kick(peer);
	} else if (peer->state >= SHM_PEER_GREETING) {
		bool blocked = shm_wire_flush(peer);

		if (peer->state < SHM_PEER_DYING &&
		    loop_fd_set(&peer->watch, LOOP_READ | (blocked ? LOOP_WRITE : 0)) < 0)
			shm_peer_fail(peer);
	}
}

static void peer_work(struct shm_peer *peer)
{
	const struct xp_callbacks *cb = &peer->shm->base.callbacks;
	unsigned int budget = STEP_BUDGET;
	bool more = true;

	if (peer->ready_owed) {
		peer->ready_owed = false;
		peer->base.ready = true;
		cb->on_peer_ready(cb->owner, (struct xp_peer *)(void *)peer);
	}
	if (peer->wire.urgent)
		peer_send(peer); /* bytes stop before the callbacks take their time */
	peer->wire.urgent = false;
	while (more && budget-- && shm_peer_live(peer)) {
		more = shm_ins_deliver(peer);
		if (shm_peer_live(peer))
			more = shm_ops_deliver(peer) || more;
		if (loop_enough(peer->shm->base.env.loop))
			break;
	}
	if (more)
		shm_peer_kick(peer);
	if (shm_peer_live(peer)) {
		shm_ops_pump(peer);
		shm_keys_pump(peer);
	}
	if (peer->state < SHM_PEER_DYING)
		peer_send(peer);
}

static void peer_step(struct loop_defer *defer)
{
	struct shm_peer *peer = container_of(defer, struct shm_peer, step);

	if (peer->state < SHM_PEER_DYING)
		peer_work(peer);
	if (peer->state == SHM_PEER_DYING)
		peer_bury(peer);
	if (peer->state == SHM_PEER_DEAD && peer->closing) {
		void (*on_closed)(void *arg) = peer->on_closed;
		void *arg = peer->closed_arg;

		peer_free(peer);
		if (on_closed)
			on_closed(arg);
	}
}

/* ---- connecting ---- */

static void on_ready(struct loop_fd *watch, int events)
{
	struct shm_peer *peer = container_of(watch, struct shm_peer, watch);

	if (events & LOOP_READ)
		shm_wire_receive(peer);
	shm_peer_kick(peer); /* also writes */
}

static int peer_attach(struct shm_peer *peer, int fd)
{
	int r;

	peer->fd = fd;
	loop_fd_init(&peer->watch, peer->shm->base.env.loop, fd, on_ready);
	r = shm_wire_reserve(peer);
	if (r == 0)
		r = loop_fd_set(&peer->watch, LOOP_READ);
	return err_pass(r);
}

/* 0 connected, 1 try again later, negative errno (not raised). */
static int dial_name(const char *name, int *fd_p)
{
	struct sockaddr_un sa;
	socklen_t len;
	int fd, no;

	if (!name[0])
		return -ENOENT;
	if (shm_sockaddr(name, &sa, &len) < 0)
		return -errno;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (struct sockaddr *)&sa, len) == 0) {
		*fd_p = fd;
		return 0;
	}
	no = errno;
	close(fd);
	return no == EAGAIN || no == EINTR ? 1 : -no; /* backlog full */
}

static void peer_dial(struct shm_peer *peer)
{
	int r = -ENOENT, fd = -1;

	for (size_t i = 0; i < ARRAY_LEN(peer->address.names) && r < 0; i++)
		r = dial_name(peer->address.names[i], &fd);
	if (r > 0)
		return; /* the tick comes back */
	if (r < 0) {
		err_raise(ERR_TRANSPORT, "shm: connecting to %s: %s",
			  peer->address.names[0], strerror(-r));
		shm_peer_fail(peer);
		return;
	}
	peer->state = SHM_PEER_GREETING;
	r = peer_attach(peer, fd);
	if (r < 0)
		shm_peer_fail(peer);
	else
		shm_send_hello(peer, SHM_HELLO);
}

static void peer_ready(struct shm_peer *peer)
{
	peer->state = SHM_PEER_READY;
	peer->ready_owed = true;
	snprintf(peer->base.path, sizeof(peer->base.path), "%s",
		 peer->self	  ? "self"
		 : peer->shm->gpu ? "memfd, CUDA"
				  : "memfd");
	shm_peer_kick(peer);
}

void shm_peer_welcome(struct shm_peer *peer, int fd)
{
	int r = peer_attach(peer, fd);

	peer_ready(peer);
	if (r < 0)
		shm_peer_fail(peer);
	else
		shm_send_hello(peer, SHM_WELCOME);
}

int shm_on_welcome(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	const void *token;
	int r = shm_hello_body(c, &token);

	(void)f;
	if (r < 0)
		return err_pass(r);
	if (!mem_equal(token, peer->token_in, XP_TOKEN_BYTES))
		return err_raise(ERR_AUTH, "the token is not the handshake's");
	peer_ready(peer);
	return 0;
}

void shm_peer_tick(struct shm_peer *peer, bool *wanted_p)
{
	if (peer->state == SHM_PEER_CONNECTING || peer->state == SHM_PEER_GREETING) {
		*wanted_p = true;
		if (loop_now_ns(peer->shm->base.env.loop) >= peer->deadline_ns) {
			err_raise(ERR_TIMEOUT, "shm: the peer %s within %ju ms",
				  peer->dial ? "did not welcome us" : "did not connect",
				  (uintmax_t)(peer->shm->connect_ns / LOOP_NS_PER_MS));
			shm_peer_fail(peer);
		} else if (peer->dial && peer->state == SHM_PEER_CONNECTING) {
			peer_dial(peer);
		}
	} else if (shm_peer_live(peer)) {
		shm_ops_tick(peer, wanted_p);
		shm_ins_tick(peer, wanted_p);
	}
}

/* ---- opening and closing ---- */

static void peer_lists_init(struct shm_peer *peer)
{
	struct list *lists[] = {&peer->link,	     &peer->waiting,	  &peer->draining,
				&peer->finished_ops, &peer->finished_ins, &peer->keys,
				&peer->asked,	     &peer->held,	  &peer->orphans};

	for (size_t i = 0; i < ARRAY_LEN(lists); i++)
		list_init(lists[i]);
}

int shm_peer_open(struct transport *transport, const struct xp_peer_args *args,
		  struct xp_peer **peer_p)
{
	struct shm *shm = (struct shm *)(void *)transport;
	struct shm_address address = {0};
	struct shm_peer *peer;
	int r = 0, fd;

	if (!args->self)
		r = shm_address_parse(args->address, args->address_len, &address);
	if (r < 0)
		return err_pass(r);
	if (!args->self &&
	    memcmp(address.boot_id, shm->base.env.boot_id, sizeof(address.boot_id)) != 0)
		return err_raise(ERR_REQUIRE, "shm: the peer runs on another machine");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	peer_lists_init(peer);
	shm_ring_init(peer);
	shm_wire_init(&peer->wire);
	r = args->self ? shm_wire_prepare(&peer->wire) : 0;
	if (r < 0) {
		shm_wire_fini(&peer->wire);
		mem_free(peer);
		return err_pass(r);
	}
	loop_defer_init(&peer->step, peer_step);
	peer->base.transport = transport;
	peer->base.owner = args->owner;
	peer->shm = shm;
	peer->self = args->self;
	peer->dial = args->dial;
	peer->fd = -1;
	peer->address = address;
	memcpy(peer->token_in, args->token_in, XP_TOKEN_BYTES);
	memcpy(peer->token_out, args->token_out, XP_TOKEN_BYTES);
	peer->deadline_ns = loop_now_ns(shm->base.env.loop) + shm->connect_ns;
	peer->gpu_owner = UINT64_MAX - ++shm->next_owner;
	list_push_back(&shm->peers, &peer->link);
	*peer_p = (struct xp_peer *)(void *)peer;
	if (peer->self) {
		peer_ready(peer);
		return 0;
	}
	shm_tick_want(shm);
	if (peer->dial) {
		peer_dial(peer);
	} else {
		fd = shm_guest_claim(shm, peer);
		if (fd >= 0)
			shm_peer_welcome(peer, fd);
	}
	return 0;
}

void shm_peer_close(struct xp_peer *xpeer, void (*on_closed)(void *arg), void *arg)
{
	struct shm_peer *peer = (struct shm_peer *)(void *)xpeer;

	assert(!peer->closing);
	peer->closing = true;
	peer->on_closed = on_closed;
	peer->closed_arg = arg;
	if (shm_peer_live(peer) && !peer->self)
		(void)shm_wire_flush(peer); /* last words, if there is room for them */
	err_raise(ERR_PEER, "shm: the connection was closed here");
	shm_peer_fail(peer);
	shm_peer_kick(peer);
}
