/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One gate for each user, started with his first connection and ended some seconds after
 * his last. Each message on a gate's socket is one record (gate_child.h), and nothing
 * here waits: a socket that takes no more is a gate that hangs.
 *
 * Facts of the kernel that this rests on:
 *   - A peek without space for control data reports MSG_CTRUNC when descriptors lie
 *     anywhere in the queue, also behind the requested bytes; it takes and drops none. A
 *     plain read of bytes peeked this way frees only buffers without descriptors.
 *   - Except out-of-band bytes, which a peek passes by and a read drops, with their
 *     descriptors: SO_OOBINLINE makes them bytes like others.
 *   - The last close of a socket drops the content of its queue, in the context of the
 *     closing process; a duplicate in another process makes ours not the last. In the
 *     same way, a listening socket drops connections that were not accepted.
 *   - SIGKILL ends some sleeps in close() (SO_LINGER) and not others (FUSE's flush). A
 *     killed process runs no further instruction, so a socket from which it had not
 *     started to receive is unchanged.
 */
#include "daemon/gate/gate.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/gate/record.h"
#include "daemon/gate/warden.h"

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

#define GATE_HANG_NS (5 * LOOP_NS_PER_S) /* on a loaded machine all take long */
#define GATE_IDLE_NS (10 * LOOP_NS_PER_S)
#define GATE_PARKED_MAX 256u /* sockets that no process can close now */
#define GATE_OTHERS ((uid_t)-1)
#define GATE_LOST_SERIAL UINT64_MAX /* of no request: its client gets an error */

struct gate {
	struct list link;
	struct gates *gates;
	uid_t uid;
	uint64_t id; /* the warden's */
	struct loop_fd watch;
	struct loop_timer timer; /* hang, or idle */
	struct list clients;
	struct gate_client **slots;
	uint32_t slot_count;
	uint64_t serial;
};

struct gates {
	struct loop *loop;
	struct warden *warden;
	void (*on_lost)(void *arg);
	void *arg;
	struct list open, ended;
	struct loop_defer reap; /* those that ended */
	int parked[GATE_PARKED_MAX];
	unsigned int parked_count;
};

static void gate_replace(struct gate *gate, const char *why);

/* ---- one gate's life ---- */

static void parked_retry(struct gates *gates)
{
	unsigned int count = gates->parked_count;
	int fds[GATE_PARKED_MAX];

	memcpy(fds, gates->parked, count * sizeof(fds[0]));
	gates->parked_count = 0;
	for (unsigned int i = 0; i < count; i++)
		gate_turn_away(gates, fds[i]);
}

static void gates_on_freed(void *arg)
{
	struct gates *gates = arg;

	if (gates->parked_count)
		parked_retry(gates);
}

static void gates_on_lost(void *arg)
{
	struct gates *gates = arg;

	gates->on_lost(gates->arg);
}

static void gate_free(struct gate *gate)
{
	assert(list_empty(&gate->clients));
	list_remove(&gate->link);
	loop_timer_stop(&gate->timer);
	loop_fd_stop(&gate->watch);
	mem_closep(&gate->watch.fd);
	mem_free(gate->slots);
	mem_free(gate);
}

static void gates_on_reap(struct loop_defer *defer)
{
	struct gates *gates = container_of(defer, struct gates, reap);
	struct list *gate;

	while ((gate = list_pop_front(&gates->ended)))
		gate_free(list_entry(gate, struct gate, link));
}

/* Its process closes the remaining descriptors when it ends. The object is freed after
 * this callback. */
static void gate_abandon(struct gate *gate, bool hung)
{
	warden_abandon(gate->gates->warden, gate->id, gate->uid, hung);
	loop_timer_stop(&gate->timer);
	loop_fd_stop(&gate->watch);
	close(mem_steal_fd(&gate->watch.fd));
	list_remove(&gate->link);
	list_push_back(&gate->gates->ended, &gate->link);
	loop_defer(gate->gates->loop, &gate->gates->reap);
}

static bool gate_send(struct gate *gate, const struct gate_ask *ask, int fd)
{
	return record_send(gate->watch.fd, ask, sizeof(*ask), NULL, 0, &fd, fd >= 0) ==
	       (ssize_t)sizeof(*ask);
}

/* ---- answers ---- */

static void client_fault(struct gate_client *client, struct err *fault,
			 const struct gate_answer *answer)
{
	switch ((enum gate_fault)answer->fault) {
	case GATE_FINE:
		return;
	case GATE_REFUSED:
		err_set(fault, ERR_IMPORT,
			"descriptor %u is %s: kvd takes memfds, POSIX shared memory, "
			"dma-bufs, handles of GPU memory, /proc/self/mem and statm",
			answer->at, answer->what);
		return;
	case GATE_TOO_MANY:
		err_set(fault, ERR_LIMIT, "more than %u descriptors with one line",
			client->ask.most);
		return;
	case GATE_LOST:
		err_set(fault, ERR_LIMIT,
			"descriptors of this line were lost: kvd is out of descriptors");
		return;
	case GATE_NOTHING:
		break;
	}
	err_set(fault, ERR_IO, "queued bytes disappeared before they were read");
	fault->scope = ERR_SCOPE_SESSION;
}

static void client_answer(struct gate_client *client, struct gate_answer *answer,
			  const uint8_t *bytes, int *fds, unsigned int fd_count)
{
	struct gate_parcel parcel = {
		.bytes = bytes, .len = answer->bytes, .fds = fds, .fd_count = fd_count};

	answer->what[sizeof(answer->what) - 1] = '\0';
	client_fault(client, &parcel.fault, answer);
	client->ask.serial = 0;
	client->on_parcel(client, &parcel);
}

static void client_on_lost(struct loop_defer *defer)
{
	struct gate_client *client = container_of(defer, struct gate_client, lost);
	struct gate_parcel parcel = {.len = 0};

	client->ask.serial = 0;
	err_set(&parcel.fault, ERR_TIMEOUT,
		"user %u: receiving the descriptors of this line failed (%s): send none "
		"whose close() may block",
		client->uid, client->why);
	parcel.fault.scope = ERR_SCOPE_SESSION;
	client->on_parcel(client, &parcel);
}

/* Its bytes are lost, or cannot be received. */
static void client_lost(struct gate_client *client, const char *why)
{
	snprintf(client->why, sizeof(client->why), "%s", why);
	client->ask.serial = GATE_LOST_SERIAL;
	loop_defer(client->gates->loop, &client->lost);
}

static struct gate_client *client_by_serial(struct gate *gate, uint64_t serial)
{
	struct gate_client *client;

	list_foreach(client, &gate->clients, link)
		if (client->ask.serial == serial)
			return client;
	return NULL;
}

/* The process may be compromised: a reply that exceeds the request, or is empty, breaks
 * the protocol. */
static bool answer_fits(const struct gate_client *client,
			const struct gate_answer *answer, unsigned int fd_count)
{
	if (answer->begun)
		return answer->bytes == 0 && fd_count == 0;
	return answer->bytes <= client->ask.want && fd_count <= client->ask.most &&
	       (answer->bytes > 0 || answer->fault == GATE_NOTHING);
}

/* One record; false: there is none. */
static bool gate_read(struct gate *gate)
{
	struct {
		struct gate_answer answer;
		uint8_t bytes[GATE_BYTES];
	} record;
	struct gate_client *client = NULL;
	int fds[GATE_FDS_MAX];
	unsigned int count = 0;
	ssize_t n = record_receive_now(gate->watch.fd, &record, sizeof(record), fds,
				       GATE_FDS_MAX, &count);
	bool whole = n >= (ssize_t)sizeof(record.answer) &&
		     record.answer.bytes <= GATE_BYTES &&
		     (size_t)n == sizeof(record.answer) + record.answer.bytes;

	if (n < 0 && errno == EAGAIN)
		return false;
	if (whole && count != record.answer.fds) /* no numbers left for them here */
		record.answer.fault = GATE_LOST;
	if (whole)
		client = client_by_serial(gate, record.answer.serial);
	if (!whole)
		gate_replace(gate, "it ended");
	else if (client && !answer_fits(client, &record.answer, count))
		gate_replace(gate, "invalid reply");
	else if (client && record.answer.begun)
		client->begun = true;
	else if (client)
		client_answer(client, &record.answer, record.bytes, fds, count);
	for (unsigned int i = 0; i < count; i++)
		mem_closep(&fds[i]);
	return whole;
}

static void gate_on_ready(struct loop_fd *watch, int events)
{
	struct gate *gate = container_of(watch, struct gate, watch);

	(void)events;
	(void)gate_read(gate);
}

/* ---- hanging and idle ---- */

static bool client_waits(const struct gate_client *client)
{
	return client->ask.serial && client->ask.serial != GATE_LOST_SERIAL;
}

static void gate_time(struct gate *gate)
{
	const struct gate_client *client;
	uint64_t now = loop_now_ns(gate->gates->loop), first = UINT64_MAX;

	list_foreach(client, &gate->clients, link)
		if (client_waits(client) && client->asked_ns < first)
			first = client->asked_ns;
	if (first != UINT64_MAX)
		loop_timer_start(&gate->timer, first + GATE_HANG_NS > now
						       ? first + GATE_HANG_NS - now
						       : 0);
	else if (list_empty(&gate->clients))
		loop_timer_start(&gate->timer, GATE_IDLE_NS);
	else
		loop_timer_stop(&gate->timer);
}

static bool gate_hangs(const struct gate *gate)
{
	const struct gate_client *client;
	uint64_t now = loop_now_ns(gate->gates->loop);

	list_foreach(client, &gate->clients, link)
		if (client_waits(client) && now - client->asked_ns >= GATE_HANG_NS)
			return true;
	return false;
}

static void gate_on_timer(struct loop_timer *timer)
{
	struct gate *gate = container_of(timer, struct gate, timer);

	if (gate->watch.fd < 0)
		return;
	if (list_empty(&gate->clients)) {
		gate_abandon(gate, false);
		return;
	}
	/* replies that arrived while this daemon was busy */
	if (gate_hangs(gate) && gate_read(gate)) {
		if (gate->watch.fd >= 0)
			loop_timer_start(timer, 0);
	} else if (gate->watch.fd >= 0 && gate_hangs(gate)) {
		gate_replace(gate, "no reply");
	} else if (gate->watch.fd >= 0) {
		gate_time(gate);
	}
}

/* ---- finding and starting ---- */

static int gate_start(struct gates *gates, uid_t uid, struct gate **gate_p)
{
	struct gate *gate = mem_zalloc(sizeof(*gate));
	int r;

	if (!gate)
		return err_pass(-ENOMEM);
	list_init(&gate->link);
	list_init(&gate->clients);
	gate->gates = gates;
	gate->uid = uid;
	loop_timer_init(&gate->timer, gates->loop, gate_on_timer);
	loop_fd_init(&gate->watch, gates->loop, -1, gate_on_ready);
	r = warden_start(gates->warden, WARDEN_GATE, uid, &gate->id, &gate->watch.fd);
	if (r < 0) {
		gate_free(gate);
		return err_pass(r);
	}
	list_push_back(&gates->open, &gate->link);
	r = loop_fd_set(&gate->watch, LOOP_READ);
	if (r < 0) {
		gate_abandon(gate, false);
		return err_pass(r);
	}
	*gate_p = gate;
	return 0;
}

static int gate_of(struct gates *gates, uid_t uid, struct gate **gate_p)
{
	struct gate *gate;

	list_foreach(gate, &gates->open, link)
		if (gate->uid == uid) {
			*gate_p = gate;
			return 0;
		}
	return err_pass(gate_start(gates, uid, gate_p));
}

/* ---- holding ---- */

static int slot_take(struct gate *gate, uint32_t *slot_p)
{
	struct gate_client **slots;
	uint32_t at = 0;

	while (at < gate->slot_count && gate->slots[at])
		at++;
	if (at == GATE_SLOTS_MAX)
		return err_raise(ERR_LIMIT, "user %u: too many connections (limit %u)",
				 gate->uid, at);
	if (at == gate->slot_count) {
		slots = mem_regrow(gate->slots, 2 * at + 8, sizeof(*slots));
		if (!slots)
			return err_pass(-ENOMEM);
		gate->slot_count = 2 * at + 8;
		gate->slots = slots;
		memset(&slots[at], 0, (gate->slot_count - at) * sizeof(*slots));
	}
	*slot_p = at;
	return 0;
}

/* Linux 6.16 refuses descriptors at the sender's side where none are wanted; older
 * kernels do not know the option. */
static void pass_rights(int fd, int on)
{
	(void)setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &on, sizeof(on));
}

static int gate_give(struct gate *gate, struct gate_client *client)
{
	struct gate_ask ask = {.op = GATE_HOLD};
	int r = slot_take(gate, &ask.slot);

	if (r < 0)
		return err_pass(r);
	if (!gate_send(gate, &ask, client->fd))
		return err_raise(ERR_LIMIT,
				 "user %u: the process that receives this user's "
				 "descriptors hangs",
				 gate->uid);
	pass_rights(client->fd, 1);
	gate->slots[ask.slot] = client;
	client->slot = ask.slot;
	client->gate = gate;
	list_push_back(&gate->clients, &client->link);
	gate_time(gate);
	return 0;
}

int gate_hold(struct gates *gates, struct gate_client *client, int fd, uid_t uid)
{
	struct gate *gate = NULL;
	int r = gate_of(gates, uid, &gate);

	client->gates = gates;
	client->gate = NULL;
	client->fd = fd;
	client->uid = uid;
	client->ask = (struct gate_ask){0};
	list_init(&client->link);
	loop_defer_init(&client->lost, client_on_lost);
	return err_pass(r < 0 ? r : gate_give(gate, client));
}

static void client_leave(struct gate_client *client)
{
	struct gate *gate = mem_steal(client->gate);

	list_remove(&client->link);
	gate->slots[client->slot] = NULL;
}

/* Kill it, and let the next have its clients. */
static void gate_replace(struct gate *gate, const char *why)
{
	struct gates *gates = gate->gates;
	struct gate_client *client;
	struct gate *next = NULL;

	log_warn("gate", NULL, "replacing a process that receives descriptors",
		 "uid=%u why=\"%s\"", gate->uid, why);
	gate_abandon(gate, true);
	while ((client = list_first(&gate->clients, struct gate_client, link))) {
		bool asked = client_waits(client);

		client_leave(client);
		if (asked)
			client->ask.serial = 0;
		if (gate_of(gates, client->uid, &next) < 0 ||
		    gate_give(next, client) < 0) {
			log_warn("gate", NULL, err_last()->text, "uid=%u", client->uid);
			err_clear();
		}
		if (asked && (client->begun || !client->gate))
			client_lost(client, why);
		else if (asked)
			gate_receive(client, (enum gate_op)client->ask.op,
				     client->ask.want, client->ask.most);
	}
}

/* ---- receiving ---- */

ssize_t gate_peek(int fd, void *buf, size_t size, bool *with_p)
{
	struct iovec iov = {buf, size};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	do
		n = recvmsg(fd, &msg, MSG_PEEK | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	*with_p = n >= 0 && (msg.msg_flags & MSG_CTRUNC);
	return n;
}

int gate_prepare(int fd)
{
	int on = 1;

	if (setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof(on)) < 0)
		return err_raise_errno(errno, "SO_OOBINLINE");
	return 0;
}

void gate_receive(struct gate_client *client, enum gate_op op, size_t want,
		  unsigned int most)
{
	struct gate *gate = client->gate;

	assert(want > 0 && most <= GATE_FDS_MAX && !client->ask.serial);
	client->begun = false;
	client->asked_ns = loop_now_ns(client->gates->loop);
	client->ask =
		(struct gate_ask){.op = op,
				  .want = want < GATE_BYTES ? (uint32_t)want : GATE_BYTES,
				  .most = most};
	if (gate) {
		client->ask.slot = client->slot;
		client->ask.serial = ++gate->serial;
		if (gate_send(gate, &client->ask, -1))
			gate_time(gate);
		else
			gate_replace(gate, "its queue is full");
		return;
	}
	client_lost(client, "other processes of this user hang");
}

/* ---- closing ---- */

/* Its queue has nothing that a close could sleep on, and nothing more can arrive. */
static bool is_harmless(int fd)
{
	bool with = false;
	char byte = 0;

	(void)shutdown(fd, SHUT_RDWR);
	/* unix_stream_read_generic() searches the whole queue for descriptors */
	(void)gate_peek(fd, &byte, 1, &with);
	return !with;
}

/* No other process holds it. */
static void close_alone(struct gates *gates, int fd)
{
	struct gate_client client = {.fd = -1};

	if (is_harmless(fd)) {
		close(fd);
	} else if (gate_hold(gates, &client, fd, GATE_OTHERS) == 0) {
		gate_close(&client, &fd);
	} else if (gates->parked_count < GATE_PARKED_MAX) {
		err_clear();
		gates->parked[gates->parked_count++] = fd;
	} else {
		err_clear();
		log_warn("gate", NULL, "a socket cannot be closed and stays open",
			 "fd=%d", fd);
	}
}

void gate_release(struct gate_client *client)
{
	struct gate_ask ask = {.op = GATE_DROP, .slot = client->slot};
	struct gate *gate = client->gate;

	if (!gate)
		return;
	client->ask.serial = 0;
	loop_defer_cancel(&client->lost);
	client_leave(client);
	if (gate_send(gate, &ask, -1))
		gate_time(gate);
	else
		gate_replace(gate, "its queue is full");
}

void gate_close(struct gate_client *client, int *fd_p)
{
	int fd = mem_steal_fd(fd_p);

	if (fd < 0)
		return;
	client->ask.serial = 0;
	if (!client->gate) {
		loop_defer_cancel(&client->lost);
		close_alone(client->gates, fd);
		return;
	}
	close(fd); /* not the last: the gate's is */
	gate_release(client);
}

void gate_turn_away(struct gates *gates, int owned_fd)
{
	if (gate_prepare(owned_fd) < 0)
		err_clear();
	close_alone(gates, owned_fd);
}

bool gates_full(struct gates *gates)
{
	if (gates->parked_count)
		parked_retry(gates);
	return gates->parked_count == GATE_PARKED_MAX;
}

void gate_listen(int fd)
{
	pass_rights(fd, 0); /* accepted sockets inherit it */
}

/* ---- all of them ---- */

int gates_new(struct loop *loop, int socket, void (*on_lost)(void *arg), void *arg,
	      struct gates **gates_p)
{
	struct gates *gates = mem_zalloc(sizeof(*gates));
	struct warden_events events = {gates_on_lost, gates_on_freed, gates};
	int r;

	if (!gates) {
		close(socket);
		return err_pass(-ENOMEM);
	}
	gates->loop = loop;
	gates->on_lost = on_lost;
	gates->arg = arg;
	list_init(&gates->open);
	list_init(&gates->ended);
	loop_defer_init(&gates->reap, gates_on_reap);
	r = warden_new(loop, socket, &events, &gates->warden);
	if (r < 0) {
		mem_free(gates);
		return err_pass(r);
	}
	*gates_p = gates;
	return 0;
}

struct warden *gates_warden(const struct gates *gates)
{
	return gates->warden;
}

void gates_free(struct gates *gates)
{
	struct gate *gate;

	if (!gates)
		return;
	while ((gate = list_first(&gates->open, struct gate, link)))
		gate_abandon(gate, false);
	loop_defer_cancel(&gates->reap);
	gates_on_reap(&gates->reap);
	for (unsigned int i = 0; i < gates->parked_count; i++)
		warden_keep(gates->warden, gates->parked[i]);
	warden_free(gates->warden);
	mem_free(gates);
}
