/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The link over ZeroMQ: one ROUTER, bound at `listen`, that only receives, and a DEALER
 * for each line that only sends. So the frames of one sender use one connection and keep
 * their order, and no side answers on a socket that the other side opened.
 *
 * Defaults of libzmq that are changed: it would queue for peers that are not connected
 * (ZMQ_IMMEDIATE), keep messages of closed sockets (LINGER: a moment only, so that a BYE
 * is sent), block on a full queue (DONTWAIT; EAGAIN is ERR_LIMIT), accept messages of any
 * size (MAXMSGSIZE), and keep a half-open handshake for 30 s. Its heartbeats are off:
 * PING belongs to the peers and measures the daemon's loop, which a heartbeat of the I/O
 * thread does not.
 *
 * ZMQ_FD is edge-triggered: it is signalled when the socket's mailbox becomes non-empty,
 * and not for messages that are already in it. So receiving continues until EAGAIN, or
 * until the budget of a turn is used up and the prepare hook keeps the loop awake. The fd
 * of a line reports both: connected or broken, full or not; libzmq's POLLOUT means
 * exactly "a frame would be accepted".
 *
 * Names. libzmq resolves them on its I/O thread, which all lines share: a dead name
 * server would block every peer. So it only gets numeric addresses (link_name.h).
 *
 * Input. A message is [identity][frame]; the identity is libzmq's name for the connection
 * and is ignored, whatever a client wrote into it. Messages with other parts are counted
 * and dropped, part by part within the budget. libzmq's high-water mark counts complete
 * messages, so a client that never ends a multi-part message would make it hold any
 * amount of memory: its connection is closed (link_door.c). A line that receives a
 * message (no peer has a reason to send one) reads and drops it, and has little room for
 * it.
 *
 * With keys an endpoint is tcp://HOST:PORT#KEY: to dial, the key of the expected daemon
 * must be known. With the key in it, the string that daemons send each other needs no
 * further book-keeping. The key must be known in any case, from the allow-list or as that
 * of a daemon of this user and host (link_keydir.h), so a wrong one in a message leads at
 * worst to no connection. A connection keeps the key and the name that it was admitted
 * with. After a reload that removes or renames the key, none of its frames is delivered:
 * the first one closes it, and a new connection is checked against the new list. The
 * peers layer ends its peering (peers_recheck).
 */
#include "daemon/link/link.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/link/link_again.h"
#include "daemon/link/link_curve.h"
#include "daemon/link/link_door.h"
#include "daemon/link/link_keydir.h"
#include "daemon/link/link_keyring.h"
#include "daemon/link/link_monitor.h"
#include "daemon/link/link_name.h"
#include "daemon/link/link_refused.h"
#include "daemon/link/link_diag.h"
#include "daemon/loop/work.h"

#define BUDGET_FRAMES 256u
#define BUDGET_BYTES (4u << 20)
#define LINGER_MS 100
#define HANDSHAKE_MS 2000
#define CONNECT_MS 2000 /* then the cause is probed: the kernel tries for two minutes */
#define RECONNECT_MS 20
#define BIND_TRIES 25
#define BIND_PAUSE_NS 20000000L
#define RECONNECT_MAX_MS 1000
#define BACKLOG 512
#define ZAP_DOMAIN "kvd"
#define LINE_RECEIVE_FRAMES 16
#define QUEUE_FRAMES 4096 /* queued for a peer; beyond, senders are refused */
#define LINE_RECEIVE_BYTES 1024

struct link_zmq {
	struct link link;
	struct loop *loop;
	void *context, *router;
	struct loop_fd fd;
	struct loop_prepare prepare;
	struct list lines;
	struct list queried, found; /* lines without a key; those to look it up for */
	struct loop_work look;
	struct link_zmq_stats stats;
	bool reloaded; /* live connections may have been admitted by an older list */
	struct link_keyring ring;
	struct curve_zap *zap;
	struct link_door *door;
	struct link_refusals refusals;
	/* the message being read: its parts so far */
	unsigned int parts;
	zmq_msg_t frame;
	bool have_frame;
};

struct link_line {
	struct list link;
	struct link_zmq *zmq;
	void *socket, *owner;
	struct loop_fd fd;
	bool writable; /* as the owner knows it */
	bool unknown;  /* the expected key is unknown: no connection, and a reason is
			  reported */
	bool once;     /* one attempt to connect, to the first address of a name */
	struct link_monitor *monitor; /* monitors the end of its connection */
	struct loop_defer ended;
	struct link_name *name; /* NULL: dialled by number */
	struct link_diag *diag; /* until it has connected */
	char *queried; /* endpoint whose key the directory is queried for; NULL: none */
	struct list waits;		 /* in zmq->queried or ->found */
	char address[LINK_ENDPOINT_MAX]; /* of a name: the current address; "" none yet */
};

static int raise_zmq(const char *what)
{
	return err_raise(errno == ENOMEM ? ERR_NOMEM : ERR_IO, "%s: %s", what,
			 zmq_strerror(errno));
}

static bool set_int(void *socket, int option, int value)
{
	return zmq_setsockopt(socket, option, &value, sizeof(value)) == 0;
}

struct limits {
	int type, ipv6, send_frames, receive_frames;
	int64_t receive_bytes; /* of a message; a larger one breaks the connection */
};

/* Options of both kinds of sockets. */
static int socket_open(struct link_zmq *zmq, const struct limits *limits, void **socket_p)
{
	void *socket = zmq_socket(zmq->context, limits->type);

	if (!socket)
		return raise_zmq("a ZeroMQ socket");
	if (set_int(socket, ZMQ_LINGER, 0) && set_int(socket, ZMQ_IPV6, limits->ipv6) &&
	    set_int(socket, ZMQ_IMMEDIATE, 1) &&
	    set_int(socket, ZMQ_SNDHWM, limits->send_frames) &&
	    set_int(socket, ZMQ_RCVHWM, limits->receive_frames) &&
	    set_int(socket, ZMQ_CONNECT_TIMEOUT, CONNECT_MS) &&
	    set_int(socket, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS) &&
	    set_int(socket, ZMQ_RECONNECT_IVL, RECONNECT_MS) &&
	    set_int(socket, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS) &&
	    set_int(socket, ZMQ_BACKLOG, BACKLOG) &&
	    zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &limits->receive_bytes,
			   sizeof(limits->receive_bytes)) == 0) {
		*socket_p = socket;
		return 0;
	}
	int r = raise_zmq("a ZeroMQ socket's options");

	zmq_close(socket);
	return err_pass(r);
}

static int watch_socket(struct link_zmq *zmq, void *socket, struct loop_fd *watch,
			void (*on_ready)(struct loop_fd *watch, int events))
{
	size_t size = sizeof(int);
	int fd;

	if (zmq_getsockopt(socket, ZMQ_FD, &fd, &size) != 0)
		return raise_zmq("a ZeroMQ socket's fd");
	loop_fd_init(watch, zmq->loop, fd, on_ready);
	return err_pass(loop_fd_set(watch, LOOP_READ));
}

/* ---- receiving ---- */

/* Would its key be admitted now, with the same name? */
static bool frame_admitted(struct link_zmq *zmq, const char *user)
{
	const char *key = zmq_msg_gets(&zmq->frame, CURVE_KEY);
	const char *listed = key ? curve_allow_name(zmq->ring.allow, key) : NULL;

	if (listed)
		return user && strcmp(listed, user) == 0;
	return zmq_msg_gets(&zmq->frame, CURVE_MARK) != NULL;
}

static void link_zmq_hand_up(struct link_zmq *zmq)
{
	struct link_frame frame = {.data = zmq_msg_data(&zmq->frame),
				   .len = zmq_msg_size(&zmq->frame)};
	const char *user = zmq->ring.curve ? zmq_msg_gets(&zmq->frame, "User-Id") : NULL;

	if (zmq->reloaded && !frame_admitted(zmq, user)) {
		zmq->stats.revoked++;
		link_door_cut(zmq->door, zmq_msg_get(&zmq->frame, ZMQ_SRCFD));
		return;
	}
	zmq->stats.frames_in++;
	snprintf(frame.user, sizeof(frame.user), "%s", user ? user : "");
	if (zmq->link.on_frame)
		zmq->link.on_frame(zmq->link.owner, &frame);
}

static void zmq_vouch(struct link *link)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	const char *user;

	if (!zmq->have_frame)
		return;
	user = zmq->ring.curve ? zmq_msg_gets(&zmq->frame, "User-Id") : NULL;
	link_door_vouch(zmq->door, zmq_msg_get(&zmq->frame, ZMQ_SRCFD), user ? user : "");
}

static void link_zmq_frame_drop(struct link_zmq *zmq)
{
	if (zmq->have_frame)
		zmq_msg_close(&zmq->frame);
	zmq->have_frame = false;
}

/* One part; false when none is queued. *bytes_p counts the read bytes. */
static bool receive_part(struct link_zmq *zmq, size_t *bytes_p)
{
	zmq_msg_t part;
	bool more;

	zmq_msg_init(&part);
	if (zmq_msg_recv(&part, zmq->router, ZMQ_DONTWAIT) < 0) {
		zmq_msg_close(&part);
		return false;
	}
	*bytes_p += zmq_msg_size(&part);
	more = zmq_msg_more(&part);
	if (++zmq->parts == 2) {
		zmq_msg_init(&zmq->frame);
		zmq_msg_move(&zmq->frame, &part);
		zmq->have_frame = true;
	}
	zmq_msg_close(&part);
	if (more)
		return true;
	if (zmq->have_frame)
		link_door_received(zmq->door, zmq_msg_get(&zmq->frame, ZMQ_SRCFD));
	if (zmq->parts == 2)
		link_zmq_hand_up(zmq);
	else
		zmq->stats.bad_frames++;
	link_zmq_frame_drop(zmq);
	zmq->parts = 0;
	return true;
}

static void link_zmq_drain(struct link_zmq *zmq)
{
	size_t bytes = 0;

	for (unsigned int i = 0; i < 2 * BUDGET_FRAMES && bytes < BUDGET_BYTES; i++) {
		if (!receive_part(zmq, &bytes)) {
			zmq->link.backlog = false;
			return;
		}
		if (loop_enough(zmq->loop))
			break;
	}
	zmq->link.backlog = true;
}

static void on_router_ready(struct loop_fd *watch, int events)
{
	(void)events;
	link_zmq_drain(container_of(watch, struct link_zmq, fd));
}

static bool link_zmq_on_prepare(struct loop_prepare *prepare)
{
	struct link_zmq *zmq = container_of(prepare, struct link_zmq, prepare);

	if (zmq->link.backlog)
		link_zmq_drain(zmq);
	return zmq->link.backlog;
}

/* ---- endpoints ---- */

static int zmq_canonical(struct link *link, const char *endpoint,
			 char canonical_p[LINK_ENDPOINT_MAX])
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	struct link_endpoint e;
	int n, r;

	r = link_endpoint_parse(endpoint, &e);
	if (r == 0)
		r = link_endpoint_key(&zmq->ring, &e);
	if (r < 0)
		return err_pass(r);
	n = snprintf(canonical_p, LINK_ENDPOINT_MAX, "%s%s%s", e.plain, e.key ? "#" : "",
		     e.key ? e.key : "");
	if (n >= LINK_ENDPOINT_MAX)
		return err_raise(ERR_INVAL, "endpoint '%s': too long with its key",
				 e.plain);
	return 0;
}

/* ---- lines ---- */

/* Frames received on a sending socket: drop them, or they fill libzmq's queue. */
static void line_drain(struct link_line *line)
{
	char byte;

	for (unsigned int i = 0; i < BUDGET_FRAMES; i++) {
		if (zmq_recv(line->socket, &byte, sizeof(byte), ZMQ_DONTWAIT) < 0)
			return;
		line->zmq->stats.bad_frames++;
	}
}

static void line_writable(struct link_line *line, bool writable)
{
	line->writable = writable;
	if (line->name)
		link_name_line(line->name, writable);
	if (writable) { /* on a loss liveness decides; the owner redials */
		link_diag_free(line->diag);
		line->diag = NULL;
	}
}

static void on_line_ready(struct loop_fd *watch, int fd_events)
{
	struct link_line *line = container_of(watch, struct link_line, fd);
	struct link *link = &line->zmq->link;
	size_t size = sizeof(int);
	int events = 0;

	(void)fd_events;
	if (zmq_getsockopt(line->socket, ZMQ_EVENTS, &events, &size) == 0 &&
	    (events & ZMQ_POLLIN)) {
		line_drain(line);
		zmq_getsockopt(line->socket, ZMQ_EVENTS, &events, &size);
	}
	if (line->writable == ((events & ZMQ_POLLOUT) != 0))
		return;
	line_writable(line, !line->writable);
	if (link->on_line)
		link->on_line(link->owner, line->owner, line->writable);
}

static void line_free(struct link_line *line, int linger_ms)
{
	link_name_free(line->name);
	link_diag_free(line->diag);
	link_monitor_free(line->monitor);
	loop_defer_cancel(&line->ended);
	loop_fd_stop(&line->fd);
	set_int(line->socket, ZMQ_LINGER, linger_ms);
	zmq_close(line->socket);
	list_remove(&line->link);
	list_remove(&line->waits);
	mem_free(line->queried);
	mem_free(line);
}

/* The number of a name: an unchanged one needs no new connection, if there is one. */
static void on_address(void *owner, const char *address)
{
	struct link_line *line = owner;

	if (strcmp(line->address, address) == 0 || (line->once && *line->address))
		return;
	if (*line->address && !line->unknown)
		zmq_disconnect(line->socket, line->address);
	snprintf(line->address, sizeof(line->address), "%s", address);
	link_diag_address(line->diag, address);
	if (line->unknown || LINK_AGAIN(zmq_connect(line->socket, address)) == 0)
		return;
	log_warn("link", address, "not connected yet", "why=\"%s\"", zmq_strerror(errno));
	line->address[0] = '\0'; /* no address: the next result of the resolver dials */
}

static void on_no_address(void *owner, const char *host, const char *why)
{
	struct link_line *line = owner;

	link_diag_name(line->diag, host, why);
}

static int line_look(struct link_line *line);

static void on_line_diagnosis(void *owner, const struct err *why, bool final)
{
	struct link_line *line = owner;
	struct link *link = &line->zmq->link;
	struct err refused;
	int r = line->queried ? line_look(line) : LINK_KEY_UNKNOWN;

	if (r == 0)
		return;
	if (r < 0) {
		err_take(&refused);
		why = &refused;
		final = true;
	}
	if (link->on_diagnosis)
		link->on_diagnosis(link->owner, line->owner, why, final);
}

static void on_line_ended(struct loop_defer *defer)
{
	struct link_line *line = container_of(defer, struct link_line, ended);
	struct err why;

	err_set(&why, ERR_PEER, "the connection has ended");
	on_line_diagnosis(line, &why, true);
}

/* Its owner frees the line, and so the monitor. */
static void on_once_event(void *owner, int event, uint32_t value)
{
	struct link_line *line = owner;

	(void)event;
	(void)value;
	loop_defer(line->zmq->loop, &line->ended);
}

static int line_watch(struct link_line *line, const struct link_endpoint *e)
{
	struct link_zmq *zmq = line->zmq;
	const struct link_diag_args args = {.loop = zmq->loop,
					    .context = zmq->context,
					    .socket = line->socket,
					    .curve = zmq->ring.curve,
					    .line = zmq->ring.line,
					    .expected = e->key,
					    .queried = line->queried != NULL,
					    .on_diagnosis = on_line_diagnosis,
					    .owner = line};
	return err_pass(link_diag_new(&args, &line->diag));
}

static int line_connect(struct link_line *line, const struct link_endpoint *e)
{
	struct link_zmq *zmq = line->zmq;
	int r;

	if (e->key &&
	    (zmq_setsockopt(line->socket, ZMQ_CURVE_SERVERKEY, e->key, CURVE_KEY_CHARS) ||
	     zmq_setsockopt(line->socket, ZMQ_CURVE_PUBLICKEY, zmq->ring.keys.public_key,
			    CURVE_KEY_CHARS) ||
	     zmq_setsockopt(line->socket, ZMQ_CURVE_SECRETKEY, zmq->ring.keys.secret_key,
			    CURVE_KEY_CHARS)))
		return raise_zmq("CURVE keys of a line");
	if (line->once && !set_int(line->socket, ZMQ_RECONNECT_IVL, -1))
		return raise_zmq("a line's options");
	r = line->once ? link_monitor_new(zmq->loop, zmq->context, line->socket,
					  ZMQ_EVENT_DISCONNECTED, on_once_event, line,
					  &line->monitor)
		       : line_watch(line, e);
	if (r < 0)
		return err_pass(r);
	line->unknown = zmq->ring.curve && !e->key;
	if (!link_name_is_number(e->host))
		return err_pass(link_name_new(zmq->loop, e->host, e->port, on_address,
					      on_no_address, line, &line->name));
	link_diag_address(line->diag, e->plain);
	if (!line->unknown && LINK_AGAIN(zmq_connect(line->socket, e->plain)) != 0)
		return err_raise(ERR_INVAL, "endpoint '%s': %s", e->plain,
				 zmq_strerror(errno));
	return 0;
}

/* Connects a line whose key the directory has now. LINK_KEY_UNKNOWN: not yet, and the
 * query goes on; an error: it will not. */
static int line_look(struct link_line *line)
{
	struct link_endpoint e; /* points into the text */
	char *text;
	int r = link_endpoint_parse(line->queried, &e);

	if (r == 0)
		r = link_endpoint_key(&line->zmq->ring, &e);
	if (r)
		return err_pass(r);
	text = mem_steal(line->queried);
	list_remove(&line->waits);
	link_name_free(mem_steal(line->name));
	link_diag_free(mem_steal(line->diag));
	link_monitor_free(mem_steal(line->monitor));
	r = line_connect(line, &e);
	mem_free(text);
	if (r < 0)
		loop_defer(line->zmq->loop, &line->ended); /* the owner dials again */
	return err_pass(r);
}

/* One line: to connect it takes some 60 us. */
static bool look_step(struct loop_work *work)
{
	struct link_zmq *zmq = container_of(work, struct link_zmq, look);
	struct list *first = list_pop_front(&zmq->found);

	if (!first)
		return false;
	list_push_back(&zmq->queried, first);
	if (line_look(list_entry(first, struct link_line, waits)) < 0)
		err_clear(); /* reported by its next check, or its end */
	return !list_empty(&zmq->found);
}

static int line_open(struct link *link, const char *endpoint, void *owner, bool once,
		     struct link_line **line_p)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	/* no peer sends on it, except libzmq's own handshake */
	const struct limits limits = {.type = ZMQ_DEALER,
				      .ipv6 = 1,
				      .send_frames = QUEUE_FRAMES,
				      .receive_frames = LINE_RECEIVE_FRAMES,
				      .receive_bytes = LINE_RECEIVE_BYTES};
	struct link_line *line;
	struct link_endpoint e;
	int r;

	r = link_endpoint_parse(endpoint, &e);
	if (r == 0)
		r = link_endpoint_key(&zmq->ring, &e);
	if (r < 0)
		return err_pass(r);
	line = mem_zalloc(sizeof(*line));
	if (!line)
		return err_pass(-ENOMEM);
	if (r == LINK_KEY_UNKNOWN && e.key) {
		line->queried = mem_dup(endpoint, strlen(endpoint) + 1);
		if (!line->queried) {
			mem_free(line);
			return err_pass(-ENOMEM);
		}
		e.key = NULL; /* line_look() connects it */
	}
	line->zmq = zmq;
	line->owner = owner;
	line->once = once;
	loop_defer_init(&line->ended, on_line_ended);
	list_init(&line->link);
	list_init(&line->waits);
	r = socket_open(zmq, &limits, &line->socket);
	if (r == 0)
		r = line_connect(line, &e);
	if (r == 0)
		r = watch_socket(zmq, line->socket, &line->fd, on_line_ready);
	if (r < 0) {
		line_free(line, 0);
		return err_pass(r);
	}
	list_push_back(&zmq->lines, &line->link);
	if (line->queried)
		list_push_back(&zmq->queried, &line->waits);
	*line_p = line;
	return 0;
}

static int zmq_dial(struct link *link, const char *endpoint, void *owner,
		    struct link_line **line_p)
{
	return err_pass(line_open(link, endpoint, owner, false, line_p));
}

static int zmq_dial_once(struct link *link, const char *endpoint, void *owner,
			 struct link_line **line_p)
{
	return err_pass(line_open(link, endpoint, owner, true, line_p));
}

static int zmq_may_answer(struct link *link, const char *endpoint, const char *user)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	struct link_endpoint e;
	int r = link_endpoint_parse(endpoint, &e);

	if (r == 0)
		r = link_endpoint_check_user(&zmq->ring, &e, user);
	return err_pass(r);
}

static int zmq_recheck(struct link *link, const char *endpoint, const char *user,
		       bool hosts)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	struct link_endpoint e;
	int r = link_endpoint_parse(endpoint, &e);

	if (r == 0)
		r = link_endpoint_recheck(&zmq->ring, &e, user, hosts);
	return err_pass(r);
}

static void zmq_hangup(struct link_line *line)
{
	/* in the background: the last message is mostly the reason */
	line_free(line, LINGER_MS);
}

static int zmq_line_send(struct link_line *line, const void *frame, size_t len)
{
	int no;

	if (zmq_send(line->socket, frame, len, ZMQ_DONTWAIT) >= 0) {
		line_writable(line, true);
		return 0;
	}
	no = errno;
	line_writable(line, false);
	if (no == EAGAIN)
		return err_raise(ERR_LIMIT, "the connection is full or not established");
	errno = no;
	return raise_zmq("sending a frame");
}

/* ---- the link ---- */

static void zmq_link_free(struct link *link)
{
	struct link_zmq *zmq;
	struct link_line *line;

	if (!link)
		return;
	zmq = container_of(link, struct link_zmq, link);
	list_foreach_safe(line, &zmq->lines, link)
		line_free(line, LINGER_MS);
	loop_work_stop(&zmq->look);
	loop_prepare_remove(&zmq->prepare);
	link_door_free(zmq->door);
	loop_fd_stop(&zmq->fd);
	link_zmq_frame_drop(zmq);
	if (zmq->router)
		zmq_close(zmq->router);
	curve_zap_free(zmq->zap);
	/* waits for the lingering lines only: LINGER_MS at most */
	while (zmq->context && zmq_ctx_term(zmq->context) != 0 && errno == EINTR)
		;
	link_keyring_close(&zmq->ring);
	mem_free(zmq);
}

static bool zmq_name(struct link *link, const char *endpoint, char name[LINK_USER_MAX])
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	const char *hash = strchr(endpoint, '#'), *mark;

	return zmq->ring.curve && hash &&
	       link_keyring_who(&zmq->ring, hash + 1, name, &mark);
}

/* On this host, or with its name: one name in the allow-list may have several keys. */
static bool zmq_same_user(struct link *link, const char *endpoint, const char *user)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	const char *hash = strchr(endpoint, '#'), *own;
	char name[LINK_USER_MAX];

	if (!zmq->ring.curve)
		return true;
	if (hash && link_keydir_find(zmq->ring.keydir, hash + 1, name))
		return true;
	own = curve_allow_name(zmq->ring.allow, zmq->ring.keys.public_key);
	return own && strcmp(own, user) == 0;
}

static void zmq_keys(struct link *link, struct link_keys *keys_p)
{
	const struct link_zmq *zmq = container_of(link, struct link_zmq, link);

	*keys_p = (struct link_keys){.public_key = zmq->ring.keys.public_key,
				     .line = zmq->ring.line,
				     .allow = zmq->ring.allow,
				     .dir = zmq->ring.keydir,
				     .refusals = &zmq->refusals};
}

static const struct link_ops zmq_ops = {
	.canonical = zmq_canonical,
	.name = zmq_name,
	.same_user = zmq_same_user,
	.keys = zmq_keys,
	.vouch = zmq_vouch,
	.dial = zmq_dial,
	.dial_once = zmq_dial_once,
	.may_answer = zmq_may_answer,
	.recheck = zmq_recheck,
	.hangup = zmq_hangup,
	.send = zmq_line_send,
	.free = zmq_link_free,
};

static int context_open(struct link_zmq *zmq, const struct config *config)
{
	/* a line for each peer, with two that monitor it until it has connected, as
	 * many that linger, refusals, ZAP */
	long sockets = 6 * (long)config->peers_max + 256;
	long most;
	void *first;

	zmq->context = zmq_ctx_new();
	if (!zmq->context)
		return raise_zmq("a ZeroMQ context");
	most = zmq_ctx_get(zmq->context, ZMQ_SOCKET_LIMIT);
	if (zmq_ctx_set(zmq->context, ZMQ_MAX_SOCKETS,
			(int)(sockets < most ? sockets : most)) ||
	    zmq_ctx_set(zmq->context, ZMQ_BLOCKY, 0))
		return raise_zmq("the ZeroMQ context's options");
	/* The first connect of a process initializes locales of C++, which takes most of
	 * a turn, and the first monitor reads its code. */
	first = zmq_socket(zmq->context, ZMQ_DEALER);
	zmq_socket_monitor(first, "inproc://kvd-first", 0);
	zmq_connect(first, "tcp://127.0.0.1:0"); /* no service has this port */
	zmq_close(first);
	return 0;
}

static int curve_open(struct link_zmq *zmq, const struct config *config)
{
	const struct curve_zap_args args = {.loop = zmq->loop,
					    .context = zmq->context,
					    .owner = &zmq->ring,
					    .who = link_keyring_who,
					    .ask = link_keyring_ask,
					    .refusals = &zmq->refusals};
	int r = link_keyring_open(&zmq->ring, config);

	if (r == 0 && zmq->ring.curve)
		r = curve_zap_new(&args, &zmq->zap);
	return err_pass(r);
}

static int curve_serve(struct link_zmq *zmq)
{
	if (set_int(zmq->router, ZMQ_CURVE_SERVER, 1) &&
	    zmq_setsockopt(zmq->router, ZMQ_CURVE_SECRETKEY, zmq->ring.keys.secret_key,
			   CURVE_KEY_CHARS) == 0 &&
	    zmq_setsockopt(zmq->router, ZMQ_ZAP_DOMAIN, ZAP_DOMAIN, strlen(ZAP_DOMAIN)) ==
		    0)
		return 0;
	return raise_zmq("CURVE keys of the listening socket");
}

/* The socket of a killed predecessor outlives its lock for a moment: the kernel closes
 * one descriptor after the other. */
static int bind_patiently(void *socket, const char *endpoint)
{
	for (int tries = 0; zmq_bind(socket, endpoint) != 0; tries++) {
		if (errno != EADDRINUSE || tries == BIND_TRIES)
			return -1;
		nanosleep(&(struct timespec){.tv_nsec = BIND_PAUSE_NS}, NULL);
	}
	return 0;
}

static int door_open(struct link_zmq *zmq, const struct config *config)
{
	const struct link_door_args args = {
		.loop = zmq->loop,
		.context = zmq->context,
		.router = zmq->router,
		.curve = zmq->ring.curve,
		.silent_ns = HANDSHAKE_MS * LOOP_NS_PER_MS + LOOP_NS_PER_S +
			     config->dead_after_ns,
		.refusals = &zmq->refusals,
		.unproven = &zmq->link.unproven,
	};

	return err_pass(link_door_new(&args, &zmq->door));
}

static int router_open(struct link_zmq *zmq, const struct config *config)
{
	/* an IPv4 address bound by an IPv6 socket would appear as ::ffff:… */
	const struct limits limits = {
		.type = ZMQ_ROUTER,
		.ipv6 = config->listen[6] == '[' || config->listen[6] == '*',
		.send_frames = 1,
		.receive_frames = QUEUE_FRAMES,
		.receive_bytes = (int64_t)config->peer_message_bytes};
	const char *colon = strrchr(config->listen, ':');
	char bound[LINK_ENDPOINT_MAX];
	size_t size = sizeof(bound);
	int r;

	/* libzmq truncates a port modulo 65536 */
	if (strncmp(config->listen, "tcp://", 6) != 0 ||
	    strtoul(colon + 1, NULL, 10) > 65535)
		return err_raise(ERR_CONFIG, "listen = %s: must be tcp://ADDRESS:PORT",
				 config->listen);
	r = socket_open(zmq, &limits, &zmq->router);
	if (r == 0 && zmq->ring.curve)
		r = curve_serve(zmq);
	if (r == 0)
		r = door_open(zmq, config);
	if (r < 0)
		return err_pass(r);
	/* not a fault of the configuration: the interface may come up, or the port
	 * become free */
	if (bind_patiently(zmq->router, config->listen) != 0)
		return err_raise(errno == EADDRINUSE || errno == EADDRNOTAVAIL
					 ? ERR_IO
					 : ERR_CONFIG,
				 "listen = %s: %s", config->listen, zmq_strerror(errno));
	if (zmq_getsockopt(zmq->router, ZMQ_LAST_ENDPOINT, bound, &size) != 0)
		return raise_zmq("the listening socket's address");
	r = link_keyring_endpoint(&zmq->ring, config, bound, zmq->link.endpoint);
	if (r == 0)
		r = watch_socket(zmq, zmq->router, &zmq->fd, on_router_ready);
	return err_pass(r);
}

int link_zmq_new(struct loop *loop, const struct config *config, struct link **link_p)
{
	struct link_zmq *zmq = mem_zalloc(sizeof(*zmq));
	int r;

	if (!zmq)
		return err_pass(-ENOMEM);
	zmq->link.ops = &zmq_ops;
	zmq->loop = loop;
	zmq->ring.own = zmq->link.endpoint;
	list_init(&zmq->lines);
	list_init(&zmq->queried);
	list_init(&zmq->found);
	loop_work_init(&zmq->look, loop, look_step, NULL);
	zmq->prepare.on_prepare = link_zmq_on_prepare;
	list_init(&zmq->prepare.link);
	r = context_open(zmq, config);
	if (r == 0)
		r = curve_open(zmq, config);
	if (r == 0)
		r = router_open(zmq, config);
	if (r < 0) {
		zmq_link_free(&zmq->link);
		return err_pass(r);
	}
	loop_prepare_add(loop, &zmq->prepare);
	zmq->link.backlog = true; /* messages from before the fd was watched */
	log_info("link", zmq->link.endpoint, "listening", "curve=%s",
		 zmq->ring.curve ? "yes" : "no");
	*link_p = &zmq->link;
	return 0;
}

void link_zmq_vouch(struct link *link, const struct link_vouch *vouch)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);

	assert(link->ops == &zmq_ops);
	zmq->ring.vouch = vouch;
}

void link_zmq_look(struct link *link)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);

	if (zmq->zap)
		curve_zap_look(zmq->zap);
	list_append(&zmq->found, &zmq->queried);
	loop_work_start(&zmq->look);
}

int link_zmq_reload(struct link *link, const char *allow_file, bool apply,
		    struct curve_changes *changes_p)
{
	struct link_zmq *zmq = container_of(link, struct link_zmq, link);
	int r = link_keyring_reload(&zmq->ring, allow_file, apply, changes_p);

	if (r == 0 && apply && zmq->ring.curve)
		zmq->reloaded = true;
	return err_pass(r);
}

const struct link_zmq_stats *link_zmq_stats(const struct link *link)
{
	return &container_of(link, struct link_zmq, link)->stats;
}
