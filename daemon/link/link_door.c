/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libzmq accepts on its own thread and reports events: ACCEPTED and DISCONNECTED, with
 * the descriptor. It has no call that closes one connection, and no limit. So a
 * connection is closed here by shutdown() of its descriptor: libzmq then reads its end
 * and closes it. Since the event was sent, the descriptor may have been closed and reused
 * for another socket; so its cookie is compared, which the kernel gives to no second
 * socket. The time between that and the shutdown remains. In it the loop itself, which
 * accepts engines, opens nothing: at worst a line of ours is connected again.
 *
 * A connection is unproven until a frame of a daemon has been received on it: after
 * CURVE's handshake it may still be one of thousands with one key. Unproven connections
 * are few, and the oldest is closed first, so a quick peer connects however many slow
 * ones there are; and each has a timeout. Proven connections have a limit per user. All
 * together stay below half of RLIMIT_NOFILE: the rest is for engines.
 *
 * libzmq collects the parts of a message until the last has arrived, without a limit. So
 * the received bytes of each connection are checked: many bytes without a complete
 * message since the last check mean such a message. For a proven connection two checks
 * must agree, because received messages may be unread while the loop is busy.
 *
 * A failed handshake is followed by DISCONNECTED, and libzmq does not report which
 * connection failed. One I/O thread sends the events, so the two belong together. An end
 * without a cause (a port scan, our own probe, a daemon that ends) is not a refusal.
 */
#include "daemon/link/link_door.h"

#include <errno.h>
#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link.h"
#include "daemon/link/link_monitor.h"
#include "daemon/loop/loop.h"

#define EVENTS                                                      \
	(ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | \
	 ZMQ_EVENT_DISCONNECTED)
#define UNPROVEN_MAX 256u
#define USER_MAX 64u /* proven connections of one key: a daemon needs one */
#define BUCKETS 1024u
#define EARLY_MAX 16u
#define LOOK_UNPROVEN_NS (25 * LOOP_NS_PER_MS)
#define LOOK_OVER_NS (100 * LOOP_NS_PER_MS)
#define UNFINISHED_MAX (8u << 20) /* a frame has 1 MiB at most */

struct caller {
	struct list link;   /* in a bucket, by descriptor */
	struct list in_age; /* unproven or proven */
	int fd;
	bool proven, cut;
	bool heard;	      /* a complete message since the last check */
	bool over;	      /* at the last check: too many bytes without one */
	uint64_t whole_bytes; /* received bytes at the last check with a message */
	uint64_t cookie, since_ns;
	struct sockaddr_in6 from; /* or a sockaddr_in */
	char user[LINK_USER_MAX];
};

/* Authenticated before its ACCEPTED was read. */
struct early {
	uint64_t cookie;
	char user[LINK_USER_MAX];
};

struct link_door {
	struct link_door_args args;
	struct link_monitor *monitor;
	struct loop_timer look;
	const char *why; /* of the next connection that ends */
	struct list buckets[BUCKETS], unproven, proven;
	unsigned int unproven_count, count, unproven_max, max;
	struct early early[EARLY_MAX]; /* a ring */
	unsigned int early_next;
};

/* ---- callers ---- */

static struct caller *caller_find(struct link_door *door, int fd)
{
	struct caller *caller;

	list_foreach(caller, &door->buckets[(unsigned int)fd % BUCKETS], link) {
		if (caller->fd == fd)
			return caller;
	}
	return NULL;
}

static void count_unproven(struct link_door *door, int change)
{
	door->unproven_count += (unsigned int)change;
	*door->args.unproven = door->unproven_count > 0;
	if (change > 0) /* checked earlier */
		loop_timer_start(&door->look, LOOK_UNPROVEN_NS);
}

static void caller_free(struct link_door *door, struct caller *caller)
{
	list_remove(&caller->link);
	list_remove(&caller->in_age);
	door->count--;
	if (!caller->proven)
		count_unproven(door, -1);
	if (!door->count)
		loop_timer_stop(&door->look);
	mem_free(caller);
}

static bool cookie_of(int fd, uint64_t *cookie_p)
{
	socklen_t len = sizeof(*cookie_p);

	return getsockopt(fd, SOL_SOCKET, SO_COOKIE, cookie_p, &len) == 0;
}

/* It is removed with its DISCONNECTED. */
static void caller_cut(struct caller *caller)
{
	uint64_t cookie;

	if (!caller->cut && cookie_of(caller->fd, &cookie) && cookie == caller->cookie)
		shutdown(caller->fd, SHUT_RDWR);
	caller->cut = true;
}

/* Cut connections are counted until libzmq has closed them, which is at once. */
static void door_make_room(struct link_door *door)
{
	unsigned int over = door->unproven_count > door->unproven_max
				    ? door->unproven_count - door->unproven_max
				    : 0;
	struct caller *caller;

	if (door->count > door->max && door->count - door->max > over)
		over = door->count - door->max;
	list_foreach(caller, &door->unproven, in_age) {
		if (!over--)
			return;
		caller_cut(caller);
	}
}

static void caller_look(struct caller *caller)
{
	struct tcp_info info = {0};
	socklen_t len = sizeof(info);
	uint64_t cookie;
	bool over;

	if (caller->cut ||
	    getsockopt(caller->fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0 ||
	    !cookie_of(caller->fd, &cookie) || cookie != caller->cookie)
		return;
	if (caller->heard)
		caller->whole_bytes = info.tcpi_bytes_received;
	caller->heard = false;
	over = info.tcpi_bytes_received - caller->whole_bytes > UNFINISHED_MAX;
	if (over && (caller->over || !caller->proven)) {
		log_warn("link", *caller->user ? caller->user : NULL, "connection closed",
			 "why=\"incomplete message over %u bytes\"", UNFINISHED_MAX);
		caller_cut(caller);
	}
	caller->over = over;
}

static void on_look(struct loop_timer *timer)
{
	struct link_door *door = container_of(timer, struct link_door, look);
	uint64_t now_ns = loop_now_ns(door->args.loop);
	struct caller *caller;
	bool over = false;

	list_foreach(caller, &door->unproven, in_age) {
		if (now_ns - caller->since_ns >= door->args.silent_ns)
			caller_cut(caller);
		else
			caller_look(caller);
	}
	list_foreach(caller, &door->proven, in_age) {
		caller_look(caller);
		over = over || caller->over;
	}
	if (door->unproven_count || over)
		loop_timer_start(timer,
				 door->unproven_count ? LOOK_UNPROVEN_NS : LOOK_OVER_NS);
	else
		loop_timer_start_tick(timer, LOOP_TICK_NS);
}

static unsigned int proven_of(struct link_door *door, const char *user)
{
	struct caller *caller;
	unsigned int n = 0;

	list_foreach(caller, &door->proven, in_age)
		n += !caller->cut && strcmp(caller->user, user) == 0;
	return n;
}

static void caller_prove(struct link_door *door, struct caller *caller, const char *user)
{
	if (*user && proven_of(door, user) >= USER_MAX) {
		caller_cut(caller);
		return;
	}
	snprintf(caller->user, sizeof(caller->user), "%s", user);
	caller->proven = true;
	list_remove(&caller->in_age);
	list_push_back(&door->proven, &caller->in_age);
	count_unproven(door, -1);
}

/* ---- events ---- */

static void on_accepted(struct link_door *door, int fd)
{
	struct caller *caller = caller_find(door, fd);
	socklen_t len = sizeof(caller->from);

	if (caller) /* its end was not reported */
		caller_free(door, caller);
	caller = mem_zalloc(sizeof(*caller));
	if (!caller) {
		err_clear(); /* one that is not watched */
		return;
	}
	caller->fd = fd;
	caller->since_ns = loop_now_ns(door->args.loop);
	if (!cookie_of(fd, &caller->cookie) ||
	    getpeername(fd, (struct sockaddr *)&caller->from, &len) != 0) {
		mem_free(caller); /* it has ended already */
		return;
	}
	list_push_back(&door->buckets[(unsigned int)fd % BUCKETS], &caller->link);
	list_push_back(&door->unproven, &caller->in_age);
	door->count++;
	count_unproven(door, 1);
	for (unsigned int i = 0; i < EARLY_MAX; i++) {
		if (door->early[i].cookie == caller->cookie) {
			caller_prove(door, caller, door->early[i].user);
			break;
		}
	}
	door_make_room(door);
}

static const char *words_of(const struct link_door *door, uint32_t value)
{
	if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
		return door->args.curve ? "the peer has no CURVE keys, this daemon has"
					: "the peer has CURVE keys, this daemon has none";
	if (value == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
		return "the peer expects another CURVE key of this daemon";
	return NULL; /* noise of others */
}

static void on_disconnected(struct link_door *door, int fd)
{
	struct caller *caller = caller_find(door, fd);
	const char *why = door->why;
	struct link_refused *entry;
	char address[64] = "";
	bool log;

	door->why = NULL;
	if (caller && why &&
	    getnameinfo((const struct sockaddr *)&caller->from, sizeof(caller->from),
			address, sizeof(address), NULL, 0, NI_NUMERICHOST) != 0)
		address[0] = '\0';
	if (caller)
		caller_free(door, caller);
	if (!why)
		return;
	entry = link_refused_note(door->args.refusals, loop_now_ns(door->args.loop), "",
				  address, why, &log);
	if (log)
		log_warn("link", *address ? address : NULL, "connection refused",
			 "why=\"%s\" count=%llu", why, (unsigned long long)entry->count);
}

static void door_on_event(void *owner, int event, uint32_t value)
{
	struct link_door *door = owner;

	if (event == ZMQ_EVENT_ACCEPTED)
		on_accepted(door, (int)value);
	else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL)
		door->why = words_of(door, value);
	else if (event == ZMQ_EVENT_DISCONNECTED)
		on_disconnected(door, (int)value);
}

/* ---- for the link ---- */

void link_door_vouch(struct link_door *door, int fd, const char *user)
{
	struct caller *caller = caller_find(door, fd);
	struct early early;

	if (!cookie_of(fd, &early.cookie))
		return;
	if (caller && caller->cookie == early.cookie) {
		if (!caller->proven && !caller->cut)
			caller_prove(door, caller, user);
		return;
	}
	snprintf(early.user, sizeof(early.user), "%s", user);
	door->early[door->early_next++ % EARLY_MAX] = early;
}

void link_door_cut(struct link_door *door, int fd)
{
	struct caller *caller = caller_find(door, fd);

	if (caller)
		caller_cut(caller);
}

void link_door_received(struct link_door *door, int fd)
{
	struct caller *caller = caller_find(door, fd);

	if (caller)
		caller->heard = true;
}

int link_door_new(const struct link_door_args *args, struct link_door **door_p)
{
	struct link_door *door = mem_zalloc(sizeof(*door));
	struct rlimit limit = {.rlim_cur = 1024};
	int r;

	if (!door)
		return err_pass(-ENOMEM);
	door->args = *args;
	list_init(&door->unproven);
	list_init(&door->proven);
	for (unsigned int i = 0; i < BUCKETS; i++)
		list_init(&door->buckets[i]);
	loop_timer_init(&door->look, args->loop, on_look);
	getrlimit(RLIMIT_NOFILE, &limit);
	door->max = limit.rlim_cur / 2 < INT32_MAX ? (unsigned int)(limit.rlim_cur / 2)
						   : INT32_MAX;
	door->unproven_max = door->max / 4 < UNPROVEN_MAX ? door->max / 4 : UNPROVEN_MAX;
	r = link_monitor_new(args->loop, args->context, args->router, EVENTS,
			     door_on_event, door, &door->monitor);
	if (r < 0) {
		mem_free(door);
		return err_pass(r);
	}
	*door_p = door;
	return 0;
}

void link_door_free(struct link_door *door)
{
	struct caller *caller;

	if (!door)
		return;
	link_monitor_free(door->monitor);
	list_foreach_safe(caller, &door->unproven, in_age)
		caller_free(door, caller);
	list_foreach_safe(caller, &door->proven, in_age)
		caller_free(door, caller);
	loop_timer_stop(&door->look);
	mem_free(door);
}
