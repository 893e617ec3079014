/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_gate: a gate's process that has been taken over. The daemon's side (gate.c) and
 * what stands behind it, a client's inbox, are real; the warden's process is not: its
 * socket ends here, and so do those of the gates that it is asked for. The input says
 * what they answer: records of any content and length, in time or not, with descriptors
 * or without, for requests that were made, that are over, or that never were.
 *
 * Whatever comes: no more bytes and descriptors than were asked for reach the client, the
 * daemon closes all that it was sent, and at the end everything can be freed.
 *
 * Input: steps of [what][and what it takes].
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/control/inbox.h"
#include "daemon/gate/gate.h"
#include "daemon/gate/record.h"
#include "daemon/loop/loop.h"
#include "tests/fuzz/lib/fuzz.h"

#define CLIENTS 3u
#define GATES 64u
#define STEPS_MAX 64u
#define LINE_MAX_BYTES 1000u
#define USER 4242u

/* As warden.c's */
struct order {
	uint32_t op;
	uint32_t uid;
	uint64_t id;
};
enum { ORDER_SPAWN = 1, ORDER_KILL };

static struct {
	struct loop *loop;
	struct gates *gates;
	int warden; /* our end of its socket */
	int fds[GATES];
	uint64_t ids[GATES];
	uint64_t serials[GATES]; /* of the last request */
	unsigned int begun;	 /* gates asked for */
	int event;
	struct client {
		struct gate_client gate;
		struct inbox in;
		int near, far;
		uint32_t want, most;
	} clients[CLIENTS];
} w;

static void hang_up(int *fd)
{
	int was = mem_steal_fd(fd);

	mem_closep(&was);
}

static void need(bool holds)
{
	if (!holds)
		abort();
}

/* What conn.c does with it. */
static void on_parcel(struct gate_client *gate, struct gate_parcel *parcel)
{
	struct client *client = container_of(gate, struct client, gate);
	const uint8_t *ahead;
	size_t len;

	if (parcel->fault.code != ERR_OK && parcel->fault.scope == ERR_SCOPE_SESSION)
		return;
	need(parcel->len > 0 && parcel->len <= client->want);
	need(parcel->fd_count <= client->most);
	need(inbox_put(&client->in, parcel) == 0);
	while ((ahead = inbox_ahead(&client->in, &len))) {
		need(len > 0);
		if (inbox_take(&client->in, len < 7 ? len : 7, LINE_MAX_BYTES) < 0)
			break;
		if (memchr(client->in.line, '\n', client->in.len))
			inbox_reset(&client->in);
	}
	inbox_reset(&client->in);
	inbox_fini(&client->in);
	inbox_init(&client->in, client->near);
	err_clear();
}

static void on_lost(void *arg)
{
	(void)arg;
}

static void turns(unsigned int n)
{
	while (n-- > 0)
		loop_turn(w.loop, 0);
}

/* Gates that were asked for, and what those were asked since. */
static void serve(void)
{
	struct order order;
	struct gate_ask ask;
	unsigned int count;
	int fd;

	while (record_receive_now(w.warden, &order, sizeof(order), &fd, 1, &count) ==
	       (ssize_t)sizeof(order)) {
		if (order.op == ORDER_SPAWN && count == 1 && w.begun < GATES) {
			w.ids[w.begun] = order.id;
			w.fds[w.begun++] = fd;
		} else if (count) {
			close(fd);
		}
	}
	for (unsigned int i = 0; i < w.begun; i++)
		while (w.fds[i] >= 0 &&
		       record_receive_now(w.fds[i], &ask, sizeof(ask), &fd, 1, &count) ==
			       (ssize_t)sizeof(ask)) {
			if (ask.serial)
				w.serials[i] = ask.serial;
			if (count)
				close(fd);
		}
}

static void client_begin(struct client *client)
{
	int pair[2];

	need(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	client->near = pair[0];
	client->far = pair[1];
	client->gate.on_parcel = on_parcel;
	inbox_init(&client->in, client->near);
	if (gate_hold(w.gates, &client->gate, client->near, USER) < 0)
		err_clear(); /* it may send no descriptors */
}

static void client_end(struct client *client)
{
	gate_close(&client->gate, &client->near);
	hang_up(&client->far);
	inbox_fini(&client->in);
}

static void answer(struct cursor *in)
{
	unsigned int i = w.begun ? w.begun - 1 - cursor_get_u8(in) % w.begun : 0;
	uint8_t how = cursor_get_u8(in);
	struct {
		struct gate_answer head;
		uint8_t bytes[GATE_BYTES + 64];
	} record = {.head = {.serial = w.serials[i]}};
	int fds[GATE_FDS_MAX + 4];
	unsigned int count = how & 1 ? cursor_get_u8(in) % ARRAY_LEN(fds) : 0;
	size_t len, most;
	const void *bytes;

	if (!w.begun || w.fds[i] < 0)
		return;
	if (how & 2)
		record.head.serial += (uint64_t)(int8_t)cursor_get_u8(in);
	record.head.begun = how & 4 ? 1 : 0;
	record.head.fault = how & 8 ? cursor_get_u8(in) % 8 : 0;
	record.head.at = how & 16 ? cursor_get_u32(in) : 0;
	record.head.bytes = how & 32 ? cursor_get_u32(in) : cursor_get_u8(in);
	record.head.fds = how & 64 ? cursor_get_u8(in) : count;
	memset(record.head.what, 'x', sizeof(record.head.what));
	memset(record.bytes, '\n', sizeof(record.bytes));
	most = cursor_left(in) < 16 ? cursor_left(in) : 16;
	bytes = cursor_get_bytes(in, most);
	if (bytes)
		memcpy(record.bytes, bytes, most);
	len = record.head.bytes < sizeof(record.bytes) ? record.head.bytes
						       : sizeof(record.bytes);
	if (how & 128)
		len = cursor_get_u16(in) % sizeof(record.bytes);
	for (unsigned int f = 0; f < count; f++)
		fds[f] = w.event;
	(void)record_send(w.fds[i], &record.head, sizeof(record.head), record.bytes, len,
			  fds, count);
}

static void ask(struct cursor *in)
{
	struct client *client = &w.clients[cursor_get_u8(in) % CLIENTS];
	uint8_t how = cursor_get_u8(in);

	if (client->near < 0 || gate_receiving(&client->gate))
		return;
	client->want = 1 + (how >> 1) * 40u;
	if (client->want > GATE_BYTES)
		client->want = GATE_BYTES;
	client->most = how & 3 ? REQUEST_FDS_MAX : 1;
	gate_receive(&client->gate, how & 1 ? GATE_LINES : GATE_STREAM, client->want,
		     client->most);
}

static void step(struct cursor *in)
{
	uint8_t what = cursor_get_u8(in);
	struct client *client = &w.clients[(what >> 4) % CLIENTS];
	uint64_t gone;

	switch (what & 15) {
	case 0: /* a client comes, or goes */
		if (client->near < 0)
			client_begin(client);
		else
			client_end(client);
		break;
	case 1:
		if (w.begun) { /* a gate hangs up */
			hang_up(&w.fds[w.begun - 1 - cursor_get_u8(in) % w.begun]);
		}
		break;
	case 2: /* one has ended, or the warden says so */
		gone = w.begun ? w.ids[cursor_get_u8(in) % w.begun] : 0;
		(void)record_send(w.warden, &gone, sizeof(gone), NULL, 0, NULL, 0);
		break;
	case 3:
	case 4:
	case 5:
	case 6:
	case 7:
		ask(in);
		break;
	default:
		answer(in);
		break;
	}
	turns(2);
	serve();
}

static unsigned int open_count(void)
{
	unsigned int count = 0;

	for (int fd = 0; fd < 256; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	unsigned int before = open_count();
	struct cursor in;
	int pair[2];

	memset(&w, 0, sizeof(w));
	log_set_level(LOG_LEVEL_ERROR);
	w.event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	need(w.event >= 0 && loop_new(&w.loop) == 0 &&
	     socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
			pair) == 0);
	w.warden = pair[1];
	need(gates_new(w.loop, pair[0], on_lost, NULL, &w.gates) == 0);
	for (unsigned int i = 0; i < CLIENTS; i++)
		client_begin(&w.clients[i]);
	serve();
	cursor_read(&in, data, size);
	for (unsigned int i = 0; i < STEPS_MAX && cursor_left(&in) > 0; i++)
		step(&in);
	for (unsigned int i = 0; i < CLIENTS; i++)
		client_end(&w.clients[i]);
	turns(2);
	gates_free(w.gates);
	loop_free(w.loop);
	serve(); /* what was asked at the end */
	for (unsigned int i = 0; i < w.begun; i++)
		hang_up(&w.fds[i]);
	close(w.warden);
	close(w.event);
	need(open_count() == before);
	err_clear();
	return 0;
}
