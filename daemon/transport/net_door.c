/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who connects is a guest until his hello shows whose he is. One whom nobody knows may
 * be early, his peer being opened a moment later, so he waits; but no longer than
 * wait_ns. Of those who have not said whose they are, and of those whom nobody knows,
 * there are `max` at most, and the oldest leaves for the next: whoever floods the door
 * with one kind pushes out that kind. Who is pushed out dials again.
 *
 * A daemon out of descriptors leaves connections in the backlog until the next tick.
 */
#include "daemon/transport/net_door.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define ACCEPTS_A_TURN 16u

static const char *door_name(const struct net_door *door)
{
	return door->net->base.ops->name;
}

/* ---- guests ---- */

static void net_guest_free(struct net_guest *guest)
{
	list_remove(&guest->link);
	guest->door->counts[guest->complete]--;
	loop_fd_stop(&guest->watch);
	mem_closep(&guest->fd);
	mem_free(guest);
}

int net_guest_take(struct net_guest *guest)
{
	int fd = mem_steal_fd(&guest->fd);

	net_guest_free(guest);
	return fd;
}

static void net_door_make_room(struct net_door *door, bool complete)
{
	struct net_guest *guest;

	if (door->counts[complete] < door->max)
		return;
	list_foreach(guest, &door->guests, link) {
		if (guest->complete != complete)
			continue;
		net_guest_free(guest);
		return;
	}
}

static void net_guest_introduce(struct net_guest *guest)
{
	struct net_door *door = guest->door;
	int r;

	loop_fd_stop(&guest->watch);
	r = door->meet(guest);
	if (r == NET_GUEST_WAITS) {
		net_door_make_room(door, true);
		door->counts[false]--;
		door->counts[true]++;
		guest->complete = true;
	} else if (r < 0) {
		log_warn(door_name(door), NULL, "refused a connection", "reason=\"%s\"",
			 err_last()->text);
		err_clear();
		net_guest_free(guest);
	}
}

static void net_guest_read(struct net_guest *guest)
{
	/* without room for control data the kernel closes fds that come along */
	ssize_t n = recv(guest->fd, guest->hello + guest->got,
			 sizeof(guest->hello) - guest->got, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		net_guest_free(guest);
		return;
	}
	guest->got += (size_t)n;
	if (guest->got == sizeof(guest->hello))
		net_guest_introduce(guest);
}

static void net_guest_on_ready(struct loop_fd *watch, int events)
{
	(void)events;
	net_guest_read(container_of(watch, struct net_guest, watch));
}

static void net_guest_new(struct net_door *door, int owned_fd)
{
	struct loop *loop = door->net->base.env.loop;
	struct net_guest *guest = mem_zalloc(sizeof(*guest));

	if (!guest) {
		err_clear();
		close(owned_fd);
		return;
	}
	net_door_make_room(door, false);
	guest->door = door;
	guest->fd = owned_fd;
	guest->deadline_ns = loop_now_ns(loop) + door->wait_ns;
	list_push_back(&door->guests, &guest->link);
	door->counts[false]++;
	loop_fd_init(&guest->watch, loop, owned_fd, net_guest_on_ready);
	if (loop_fd_set(&guest->watch, LOOP_READ) < 0) {
		err_clear();
		net_guest_free(guest);
		return;
	}
	door->want_tick(door);
	net_guest_read(guest); /* who dials says so at once: it is usually here already */
}

/* ---- listening ---- */

static void net_listener_on_ready(struct loop_fd *watch, int events)
{
	struct net_listener *listener = container_of(watch, struct net_listener, watch);

	(void)events;
	for (unsigned int budget = ACCEPTS_A_TURN; budget > 0; budget--) {
		int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0) {
			net_guest_new(listener->door, fd);
			continue;
		}
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
			/* the backlog stays readable: rest until the tick */
			log_warn(door_name(listener->door), NULL, "cannot accept",
				 "reason=\"%s\"", strerror(errno));
			loop_fd_stop(&listener->watch);
			listener->resting = true;
			listener->door->want_tick(listener->door);
		}
		return;
	}
}

int net_door_listen(struct net_door *door, unsigned int at, int owned_fd)
{
	struct net_listener *listener = &door->listeners[at];
	int r;

	listener->door = door;
	listener->fd = owned_fd;
	loop_fd_init(&listener->watch, door->net->base.env.loop, owned_fd,
		     net_listener_on_ready);
	r = loop_fd_set(&listener->watch, LOOP_READ);
	if (r < 0)
		mem_closep(&listener->fd);
	return err_pass(r);
}

void net_door_tick(struct net_door *door, bool *wanted_p)
{
	struct net_guest *guest;

	list_foreach_safe(guest, &door->guests, link) {
		if (loop_now_ns(door->net->base.env.loop) < guest->deadline_ns) {
			*wanted_p = true;
			continue;
		}
		log_warn(door_name(door), NULL,
			 "closed a connection without a known token", "got=%zu",
			 guest->got);
		net_guest_free(guest);
	}
	for (size_t i = 0; i < NET_LISTENERS; i++) {
		struct net_listener *listener = &door->listeners[i];

		if (!listener->resting)
			continue;
		*wanted_p = true;
		listener->resting = loop_fd_set(&listener->watch, LOOP_READ) < 0;
	}
}

void net_door_init(struct net_door *door, struct net_transport *net)
{
	door->net = net;
	list_init(&door->guests);
	for (size_t i = 0; i < NET_LISTENERS; i++)
		door->listeners[i].fd = -1;
}

void net_door_close(struct net_door *door)
{
	struct net_guest *guest;

	while ((guest = list_first(&door->guests, struct net_guest, link)))
		net_guest_free(guest);
	for (size_t i = 0; i < NET_LISTENERS; i++) {
		if (door->listeners[i].fd < 0)
			continue;
		loop_fd_stop(&door->listeners[i].watch);
		mem_closep(&door->listeners[i].fd);
	}
}
