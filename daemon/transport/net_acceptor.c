/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection is pending until its hello identifies its peer. One of a peer that is not
 * known yet may be early, since the peer is opened a moment later: it waits, but no
 * longer than wait_ns. Of those without a whole hello, and of those of unknown peers,
 * there are `max` at most, and the oldest is closed for the next: a flood of one kind
 * evicts that kind only. An evicted dialler dials again.
 *
 * On Unix sockets (`admits`) only users whose daemons are peers, or are about to be, may
 * connect: until then their connection is not read. No descriptor may arrive before the
 * hello is done; sockets with some in their queue are closed by a gate.
 *
 * A daemon out of descriptors leaves connections in the backlog until the next tick.
 */
#include "daemon/transport/net_acceptor.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/gate/gate.h"

#define ACCEPTS_A_TURN 16u

static const char *net_acceptor_name(const struct net_acceptor *acceptor)
{
	return acceptor->net->base.ops->name;
}

/* ---- pendings ---- */

static void net_acceptor_drop(struct net_acceptor *acceptor, int owned_fd)
{
	if (owned_fd < 0)
		return;
	if (acceptor->admits)
		gate_turn_away(acceptor->net->base.env.gates, owned_fd);
	else
		close(owned_fd);
}

static void net_pending_free(struct net_pending *pending)
{
	list_remove(&pending->link);
	pending->acceptor->counts[pending->complete]--;
	loop_fd_stop(&pending->watch);
	net_acceptor_drop(pending->acceptor, pending->fd);
	mem_free(pending);
}

int net_pending_take(struct net_pending *pending)
{
	int fd = mem_steal_fd(&pending->fd);

	net_pending_free(pending);
	return fd;
}

static void net_acceptor_make_room(struct net_acceptor *acceptor, bool complete)
{
	struct net_pending *pending;

	if (acceptor->counts[complete] < acceptor->max)
		return;
	list_foreach(pending, &acceptor->pendings, link) {
		if (pending->complete != complete)
			continue;
		net_pending_free(pending);
		return;
	}
}

static void net_pending_introduce(struct net_pending *pending)
{
	struct net_acceptor *acceptor = pending->acceptor;
	int r;

	loop_fd_stop(&pending->watch);
	r = acceptor->meet(pending);
	if (r == NET_PENDING_WAITS) {
		net_acceptor_make_room(acceptor, true);
		acceptor->counts[false]--;
		acceptor->counts[true]++;
		pending->complete = true;
	} else if (r < 0) {
		log_warn(net_acceptor_name(acceptor), NULL, "refused a connection",
			 "reason=\"%s\"", err_last()->text);
		err_clear();
		net_pending_free(pending);
	}
}

/* As recv(2); 0 also when descriptors arrive, which no client may send yet. */
static ssize_t net_pending_recv(struct net_pending *pending)
{
	size_t want = pending->acceptor->hello_bytes - pending->got;
	uint8_t *to = pending->hello + pending->got;
	bool with = false;
	ssize_t n;

	if (pending->acceptor->admits) {
		n = gate_peek(pending->fd, to, want, &with);
		if (n <= 0 || with)
			return with ? 0 : n;
		want = (size_t)n;
	}
	return recv(pending->fd, to, want, MSG_DONTWAIT);
}

static void net_pending_read(struct net_pending *pending)
{
	ssize_t n = net_pending_recv(pending);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		net_pending_free(pending);
		return;
	}
	pending->got += (size_t)n;
	if (pending->got == pending->acceptor->hello_bytes)
		net_pending_introduce(pending);
}

static void net_pending_on_ready(struct loop_fd *watch, int events)
{
	(void)events;
	net_pending_read(container_of(watch, struct net_pending, watch));
}

static void net_pending_begin(struct net_pending *pending)
{
	if (loop_fd_set(&pending->watch, LOOP_READ) < 0) {
		err_clear();
		net_pending_free(pending);
		return;
	}
	/* a dialer sends it at once: it is usually here already */
	net_pending_read(pending);
}

static void net_pending_new(struct net_acceptor *acceptor, int owned_fd)
{
	struct loop *loop = acceptor->net->base.env.loop;
	struct net_pending *pending = mem_zalloc(sizeof(*pending));

	if (!pending) {
		err_clear();
		net_acceptor_drop(acceptor, owned_fd);
		return;
	}
	net_acceptor_make_room(acceptor, false);
	pending->acceptor = acceptor;
	pending->fd = owned_fd;
	pending->deadline_ns = loop_now_ns(loop) + acceptor->wait_ns;
	list_push_back(&acceptor->pendings, &pending->link);
	acceptor->counts[false]++;
	loop_fd_init(&pending->watch, loop, owned_fd, net_pending_on_ready);
	acceptor->want_tick(acceptor);
	pending->unread = acceptor->admits && !acceptor->admits(acceptor, owned_fd);
	if (!pending->unread)
		net_pending_begin(pending);
}

static struct net_pending *net_acceptor_unread(struct net_acceptor *acceptor)
{
	struct net_pending *pending;

	list_foreach(pending, &acceptor->pendings, link)
		if (pending->unread && acceptor->admits(acceptor, pending->fd))
			return pending;
	return NULL;
}

void net_acceptor_look(struct net_acceptor *acceptor)
{
	struct net_pending *pending;

	while ((pending = net_acceptor_unread(acceptor))) {
		pending->unread = false;
		net_pending_begin(pending);
	}
}

/* ---- listening ---- */

static void net_listener_on_ready(struct loop_fd *watch, int events)
{
	struct net_listener *listener = container_of(watch, struct net_listener, watch);

	(void)events;
	for (unsigned int budget = ACCEPTS_A_TURN; budget > 0; budget--) {
		int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0) {
			net_pending_new(listener->acceptor, fd);
			continue;
		}
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
			/* the backlog stays readable: rest until the tick */
			log_warn(net_acceptor_name(listener->acceptor), NULL,
				 "cannot accept", "reason=\"%s\"", strerror(errno));
			loop_fd_stop(&listener->watch);
			listener->resting = true;
			listener->acceptor->want_tick(listener->acceptor);
		}
		return;
	}
}

int net_acceptor_listen(struct net_acceptor *acceptor, unsigned int at, int owned_fd)
{
	struct net_listener *listener = &acceptor->listeners[at];
	int r;

	assert(acceptor->hello_bytes && acceptor->hello_bytes <= NET_HELLO_MAX);
	listener->acceptor = acceptor;
	listener->fd = owned_fd;
	loop_fd_init(&listener->watch, acceptor->net->base.env.loop, owned_fd,
		     net_listener_on_ready);
	if (acceptor->admits)
		gate_listen(owned_fd);
	r = loop_fd_set(&listener->watch, LOOP_READ);
	if (r < 0)
		mem_closep(&listener->fd);
	return err_pass(r);
}

void net_acceptor_tick(struct net_acceptor *acceptor, bool *wanted_p)
{
	struct net_pending *pending;

	list_foreach_safe(pending, &acceptor->pendings, link) {
		if (loop_now_ns(acceptor->net->base.env.loop) < pending->deadline_ns) {
			*wanted_p = true;
			continue;
		}
		log_warn(net_acceptor_name(acceptor), NULL,
			 "closed a connection without a known token", "got=%zu",
			 pending->got);
		net_pending_free(pending);
	}
	for (size_t i = 0; i < NET_LISTENERS; i++) {
		struct net_listener *listener = &acceptor->listeners[i];

		if (!listener->resting)
			continue;
		*wanted_p = true;
		listener->resting = loop_fd_set(&listener->watch, LOOP_READ) < 0;
	}
}

void net_acceptor_init(struct net_acceptor *acceptor, struct net_transport *net)
{
	acceptor->net = net;
	list_init(&acceptor->pendings);
	for (size_t i = 0; i < NET_LISTENERS; i++)
		acceptor->listeners[i].fd = -1;
}

void net_acceptor_close(struct net_acceptor *acceptor)
{
	struct net_pending *pending;

	while ((pending = list_first(&acceptor->pendings, struct net_pending, link)))
		net_pending_free(pending);
	for (size_t i = 0; i < NET_LISTENERS; i++) {
		if (acceptor->listeners[i].fd < 0)
			continue;
		loop_fd_stop(&acceptor->listeners[i].watch);
		mem_closep(&acceptor->listeners[i].fd);
	}
}
