/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames between two daemons of one host, on a stream socket (headers of 2 MiB
 * do not fit a packet of SOCK_SEQPACKET).
 *
 * A frame is 16 bytes and a body whose length the table bounds by type, before a byte is
 * allocated for it. A file descriptor travels with the first byte of its frame, and bytes
 * with descriptors are received by a gate; so when a frame is complete its fd has
 * arrived, and fds that are left over when no frame is unfinished were sent in violation
 * of the protocol.
 *
 * Received frames are handled some per turn. The rest waits in the buffer, where no poll
 * sees it: a deferred call continues, and the socket is read again after the last one.
 *
 * Frames are appended to one buffer and written when the turn ends. Requests wait at
 * their caller while the buffer is over SHM_OUT_SOFT; all other frames are few for each
 * request; a peer that never reads meets SHM_OUT_HARD and is lost. The loop never waits
 * for it.
 *
 * A peer that is this daemon itself has no socket: its sent bytes become its
 * received bytes, and everything else is the same.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#define IN_BYTES (64u << 10)
#define CALL_BYTES (32u << 10) /* of a long frame; unmapped memory costs it 25 us */
#define READ_BYTES (16u << 10) /* of short ones: about a turn's share */
#define ERR_WIRE_TEXT 256u

struct row {
	const char *name;
	size_t min, max; /* body bytes */
	bool fd;	 /* carries one */
	int (*on_frame)(struct shm_peer *peer, const struct shm_frame *f,
			struct cursor *c);
};

static const struct row rows[SHM_TYPE_END] = {
	[SHM_WELCOME] = {"WELCOME", 24, 24, false, shm_on_welcome},
	[SHM_REQUEST] = {"REQUEST", SHM_REQUEST_BYTES, SHM_BODY_MAX, false,
			 shm_on_request},
	[SHM_STAGE] = {"STAGE", 0, 0, false, shm_on_stage},
	[SHM_DATA] = {"DATA", 16, 16, false, shm_on_data},
	[SHM_FREE] = {"FREE", 0, 0, false, shm_on_free},
	[SHM_PROGRESS] = {"PROGRESS", 8, 8, false, shm_on_progress},
	[SHM_COPIED] = {"COPIED", 0, 0, false, shm_on_copied},
	[SHM_CONFIRM] = {"CONFIRM", 0, 0, false, shm_on_confirm},
	[SHM_CANCEL] = {"CANCEL", 6, 6 + ERR_WIRE_TEXT, false, shm_on_cancel},
	[SHM_DONE] = {"DONE", 6, 6 + ERR_WIRE_TEXT, false, shm_on_done},
	[SHM_RING] = {"RING", 8, 8, true, shm_on_ring},
	[SHM_KEY_ASK] = {"KEY_ASK", 24, 24, false, shm_on_key_ask},
	[SHM_KEY_GIVE] = {"KEY_GIVE", 17, 17, true, shm_on_key_give},
	[SHM_KEY_GIVE_IPC] = {"KEY_GIVE_IPC", LOCAL_KEY_BYTES, LOCAL_KEY_BYTES, false,
			      local_on_key_give},
	[SHM_KEY_GIVE_VMM] = {"KEY_GIVE_VMM", LOCAL_KEY_BYTES, LOCAL_KEY_BYTES, true,
			      local_on_key_give},
	[SHM_KEY_GIVE_VM] = {"KEY_GIVE_VM", 16, 16, true, shm_on_key_give_vm},
	[SHM_KEY_DENY] = {"KEY_DENY", 6, 6 + ERR_WIRE_TEXT, false, shm_on_key_deny},
};

void shm_wire_init(struct shm_wire *wire)
{
	*wire = (struct shm_wire){0};
}

void shm_wire_fini(struct shm_wire *wire)
{
	for (unsigned int i = 0; i < wire->out_fd_count; i++)
		close(wire->out_fds[i].fd);
	for (unsigned int i = 0; i < wire->in_fd_count; i++)
		if (wire->in_fds[i] >= 0)
			close(wire->in_fds[i]);
	for (unsigned int i = 0; i < wire->tail_count; i++)
		mem_free(wire->tails[i].owned);
	mem_free(wire->out);
	mem_free(wire->in);
	shm_wire_init(wire);
}

/* ---- sending ---- */

static int out_reserve(struct shm_wire *wire, size_t more)
{
	size_t unsent = wire->out_len - wire->out_pos, size = wire->out_size;
	uint8_t *bigger;

	if (wire->out_size - wire->out_len >= more)
		return 0;
	if (wire->out_pos > 0) { /* fd marks move with their frames */
		memmove(wire->out, wire->out + wire->out_pos, unsent);
		for (unsigned int i = 0; i < wire->out_fd_count; i++)
			wire->out_fds[i].pos -= wire->out_pos;
		for (unsigned int i = 0; i < wire->tail_count; i++)
			wire->tails[i].pos -= wire->out_pos;
		wire->out_pos = 0;
		wire->out_len = unsent;
	}
	if (unsent + wire->tail_bytes + more > SHM_OUT_HARD)
		return err_raise(ERR_PEER, "the peer does not read: %zu bytes are queued",
				 unsent);
	while (size - unsent < more)
		size = size ? 2 * size : IN_BYTES;
	if (size == wire->out_size)
		return 0;
	bigger = mem_regrow(wire->out, size, 1);
	if (!bigger)
		return err_pass(-ENOMEM);
	wire->out = bigger;
	wire->out_size = size;
	return 0;
}

int shm_wire_prepare(struct shm_wire *wire)
{
	int r = out_reserve(wire, IN_BYTES);

	if (r < 0)
		return err_pass(r);
	wire->in = mem_alloc(IN_BYTES);
	if (!wire->in)
		return err_pass(-ENOMEM);
	wire->in_size = IN_BYTES;
	return 0;
}

static int out_add_fd(struct shm_wire *wire, int fd)
{
	if (wire->out_fd_count == ARRAY_LEN(wire->out_fds)) {
		close(fd);
		return err_raise(ERR_PROTO,
				 "too many fds requested by the peer at once (limit %u)",
				 SHM_KEYS_ASKED);
	}
	wire->out_fds[wire->out_fd_count].fd = fd;
	wire->out_fds[wire->out_fd_count].pos = wire->out_len;
	wire->out_fd_count++;
	return 0;
}

/* After the content of `out`. A daemon's frames to itself are delivered directly from
 * `out`. */
static bool tail_add(struct shm_peer *peer, const struct shm_frame *f)
{
	struct shm_wire *wire = &peer->wire;

	if (!f->owned || peer->self || wire->tail_count == SHM_TAILS)
		return false;
	wire->tails[wire->tail_count].owned = f->owned;
	wire->tails[wire->tail_count].bytes = f->tail;
	wire->tails[wire->tail_count].pos = wire->out_len;
	wire->tails[wire->tail_count].len = f->tail_len;
	wire->tails[wire->tail_count].sent = 0;
	wire->tail_count++;
	wire->tail_bytes += f->tail_len;
	return true;
}

void shm_send(struct shm_peer *peer, const struct shm_frame *f)
{
	struct shm_wire *wire = &peer->wire;
	size_t len = SHM_FRAME_BYTES + f->body_len + f->tail_len;
	struct cursor c;
	int r;

	if (!shm_peer_speaks(peer)) {
		if (rows[f->type].fd)
			close(f->fd);
		mem_free(f->owned);
		return;
	}
	if (f->owned && !peer->self && wire->tail_count < SHM_TAILS)
		len -= f->tail_len; /* it is sent from where it is */
	r = out_reserve(wire, len);
	if (rows[f->type].fd) {
		if (r == 0)
			r = out_add_fd(wire, f->fd);
		else
			close(f->fd);
	}
	if (r < 0) {
		mem_free(f->owned);
		net_peer_fail_last(&peer->net);
		return;
	}
	cursor_write(&c, wire->out + wire->out_len, len);
	cursor_put_u32(&c, (uint32_t)(f->body_len + f->tail_len));
	cursor_put_u8(&c, (uint8_t)f->type);
	cursor_put_u8(&c, f->flags);
	cursor_put_u16(&c, 0);
	cursor_put_u64(&c, f->id);
	cursor_put_bytes(&c, f->body, f->body_len);
	wire->out_len += len;
	if (!tail_add(peer, f)) {
		cursor_put_bytes(&c, f->tail, f->tail_len);
		mem_free(f->owned);
	}
	net_peer_flush_soon(&peer->net);
}

void shm_send_err(struct shm_peer *peer, enum shm_type type, uint64_t id,
		  const struct err *err)
{
	uint8_t body[6 + ERR_WIRE_TEXT];
	char text[ERR_WIRE_TEXT] = "";
	struct cursor c;

	if (err) {
		memcpy(text, err->text, sizeof(text) - 1);
		text[sizeof(text) - 1] = '\0';
	}
	cursor_write(&c, body, sizeof(body));
	cursor_put_u32(&c, err ? (uint32_t)err->code : 0);
	cursor_put_str(&c, text);
	if (err) {
		peer->wire.urgent = true;
		net_peer_kick(&peer->net);
	}
	shm_send(peer, &(struct shm_frame){
			       .type = type, .id = id, .body = body, .body_len = c.pos});
}

/* A peer's text ends up in logs and replies: one line of plain text. */
void shm_get_err(struct cursor *c, struct err *err_p)
{
	uint32_t code = cursor_get_u32(c);
	char text[ERR_WIRE_TEXT + 1];

	cursor_get_str(c, text, sizeof(text));
	if (c->bad || code == 0) {
		*err_p = (struct err){0};
		return;
	}
	for (char *s = text; *s; s++)
		if (*s < ' ' || *s > '~')
			*s = '?';
	err_set(err_p, err_from_wire(code), "%s", text);
	err_foreign(err_p);
}

void shm_send_hello(struct shm_peer *peer, enum shm_type type)
{
	uint8_t body[SHM_HELLO_BYTES - SHM_FRAME_BYTES];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	cursor_put_format(&c, SHM_MAGIC, SHM_VERSION);
	cursor_put_u16(&c, 0);
	cursor_put_bytes(&c, peer->net.token_out, XP_TOKEN_BYTES);
	shm_send(peer, &(struct shm_frame){
			       .type = type, .body = body, .body_len = sizeof(body)});
}

int shm_hello_body(struct cursor *c, const void **token_p)
{
	int r = cursor_get_format(c, "shm", SHM_MAGIC, SHM_VERSION);

	if (r < 0)
		return err_pass(r);
	cursor_get_u16(c);
	*token_p = cursor_get_bytes(c, XP_TOKEN_BYTES);
	return err_pass(cursor_check(c, "shm"));
}

int shm_hello_parse(const uint8_t buf[SHM_HELLO_BYTES], uint8_t token_p[XP_TOKEN_BYTES])
{
	const void *token;
	struct cursor c;
	uint32_t len;
	uint8_t type;
	int r;

	cursor_read(&c, buf, SHM_HELLO_BYTES);
	len = cursor_get_u32(&c);
	type = cursor_get_u8(&c);
	cursor_get_bytes(&c, SHM_FRAME_BYTES - 5);
	if (len != SHM_HELLO_BYTES - SHM_FRAME_BYTES || type != SHM_HELLO)
		return err_raise(ERR_PROTO, "shm: the first frame is not HELLO");
	r = shm_hello_body(&c, &token);
	if (r == 0)
		memcpy(token_p, token, XP_TOKEN_BYTES);
	return err_pass(r);
}

/* Bytes up to the next frame with an fd: an fd is sent with its frame's first byte. */
static size_t out_part(const struct shm_wire *wire, int *fd_p)
{
	size_t end = wire->out_len;
	unsigned int next = 0;

	*fd_p = -1;
	if (wire->out_fd_count > 0 && wire->out_fds[0].pos == wire->out_pos) {
		*fd_p = wire->out_fds[0].fd;
		next = 1;
	}
	if (next < wire->out_fd_count)
		end = wire->out_fds[next].pos;
	if (wire->tail_count > 0 && wire->tails[0].pos < end)
		end = wire->tails[0].pos;
	return end - wire->out_pos;
}

static ssize_t out_write(struct shm_peer *peer, size_t len, int fd)
{
	struct shm_wire *wire = &peer->wire;
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec iov = {wire->out + wire->out_pos, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (fd >= 0) {
		msg.msg_control = &control;
		msg.msg_controllen = sizeof(control);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	}
	return sendmsg(peer->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* The part of the tail that is next in order. */
static ssize_t tail_write(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;
	size_t left = wire->tails[0].len - wire->tails[0].sent;
	ssize_t n =
		send(peer->fd, wire->tails[0].bytes + wire->tails[0].sent,
		     left < CALL_BYTES ? left : CALL_BYTES, MSG_NOSIGNAL | MSG_DONTWAIT);

	if (n < 0)
		return n;
	wire->tails[0].sent += (size_t)n;
	wire->tail_bytes -= (size_t)n;
	if ((size_t)n == left) {
		mem_free_large(wire->tails[0].owned, wire->tails[0].len);
		wire->tail_count--;
		memmove(&wire->tails[0], &wire->tails[1],
			wire->tail_count * sizeof(wire->tails[0]));
	}
	return n;
}

static ssize_t out_some(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;
	size_t len;
	ssize_t n;
	int fd;

	if (wire->tail_count > 0 && wire->tails[0].pos == wire->out_pos)
		return tail_write(peer);
	len = out_part(wire, &fd);
	n = out_write(peer, len, fd);
	if (n < 0)
		return n;
	if (fd >= 0) {
		close(wire->out_fds[0].fd);
		wire->out_fd_count--;
		memmove(&wire->out_fds[0], &wire->out_fds[1],
			wire->out_fd_count * sizeof(wire->out_fds[0]));
	}
	wire->out_pos += (size_t)n;
	return n;
}

bool shm_wire_flush(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;

	while (wire->out_pos < wire->out_len || wire->tail_count > 0) {
		if (out_some(peer) >= 0) {
			if (wire->tail_count > 0 &&
			    loop_enough(peer->shm->net.base.env.loop))
				return true; /* the socket calls again */
			continue;
		}
		if (errno == EINTR)
			continue;
		/* frames that it sent before its end come first */
		if (errno == EAGAIN || loop_work_running(&peer->frames))
			return true;
		err_raise(ERR_PEER, "shm: sending to the peer: %s", strerror(errno));
		net_peer_fail_last(&peer->net);
		return false;
	}
	wire->out_pos = 0;
	wire->out_len = 0;
	if (wire->out_size > 4 * SHM_OUT_SOFT) { /* a burst is no reason to keep it */
		mem_free(wire->out);
		wire->out = NULL;
		wire->out_size = 0;
	}
	return false;
}

/* ---- receiving ---- */

int shm_wire_take_fd(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;
	int fd;

	if (wire->in_fd_count == 0)
		return -1;
	fd = wire->in_fds[0];
	wire->in_fd_count--;
	memmove(&wire->in_fds[0], &wire->in_fds[1],
		wire->in_fd_count * sizeof(wire->in_fds[0]));
	return fd;
}

static int frame_handle(struct shm_peer *peer, const uint8_t *p, size_t body_len)
{
	struct shm_frame f = {.body_len = body_len};
	const struct row *row;
	struct cursor c;
	bool greeting;
	int r;

	cursor_read(&c, p, SHM_FRAME_BYTES + body_len);
	cursor_get_u32(&c);
	f.type = cursor_get_u8(&c);
	f.flags = cursor_get_u8(&c);
	cursor_get_u16(&c);
	f.id = cursor_get_u64(&c);
	row = &rows[f.type];
	greeting = sm_state(&peer->net.sm) == NET_PEER_JOINING;
	if (greeting != (f.type == SHM_WELCOME))
		return err_raise(ERR_PROTO, "shm: unexpected %s", row->name);
	if (row->fd && peer->wire.in_fd_count == 0)
		return err_raise(ERR_PROTO, "shm: %s without its fd", row->name);
	r = row->on_frame(peer, &f, &c);
	return err_prefix(r, "shm %s", row->name);
}

/* The length of the frame at p, 0 when its head is not complete. */
static int frame_length(const uint8_t *p, size_t have, size_t *body_p)
{
	const struct row *row;
	struct cursor c;
	uint32_t body;
	uint8_t type;

	cursor_read(&c, p, have);
	body = cursor_get_u32(&c);
	type = cursor_get_u8(&c);
	row = type < SHM_TYPE_END ? &rows[type] : NULL;
	if (!row || !row->on_frame)
		return err_raise(ERR_PROTO, "shm: frame of unknown type %u", type);
	if (body < row->min || body > row->max)
		return err_raise(ERR_PROTO, "shm: %s of %u bytes, not %zu to %zu",
				 row->name, body, row->min, row->max);
	*body_p = body;
	return 0;
}

/* Handles the next frame. 1: done; 0: none is complete. */
static int frame_next(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;
	const uint8_t *p = wire->in + wire->in_pos;
	size_t have = wire->in_len - wire->in_pos, body;
	int r;

	if (!shm_peer_speaks(peer) || have < SHM_FRAME_BYTES)
		return 0;
	r = frame_length(p, SHM_FRAME_BYTES, &body);
	if (r < 0 || have < SHM_FRAME_BYTES + body)
		return err_pass(r);
	r = frame_handle(peer, p, body);
	if (wire->in_len > 0) /* else it was taken */
		wire->in_pos += SHM_FRAME_BYTES + body;
	return r < 0 ? err_pass(r) : 1;
}

static bool frames_step(struct loop_work *work)
{
	struct shm_peer *peer = container_of(work, struct shm_peer, frames);
	int r = frame_next(peer);

	if (r < 0)
		net_peer_fail_last(&peer->net);
	net_peer_kick(&peer->net); /* an answer gives space for requests */
	net_peer_flush_soon(&peer->net);
	return r > 0;
}

/* Only a part of a frame is left, if anything. */
static void frames_done(struct loop_work *work)
{
	struct shm_peer *peer = container_of(work, struct shm_peer, frames);
	struct shm_wire *wire = &peer->wire;

	wire->in_len -= wire->in_pos;
	memmove(wire->in, wire->in + wire->in_pos, wire->in_len);
	wire->in_pos = 0;
	if (shm_peer_speaks(peer) && wire->in_len == 0 && wire->in_fd_count > 0) {
		err_raise(ERR_PROTO, "shm: an fd that no frame carries");
		net_peer_fail_last(&peer->net);
	}
}

void shm_wire_frames_init(struct shm_peer *peer)
{
	loop_work_init(&peer->frames, peer->shm->net.base.env.loop, frames_step,
		       frames_done);
}

/* Space for the frame that is arriving. */
int shm_wire_reserve(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;
	size_t body = 0, want = IN_BYTES;
	uint8_t *bigger;

	if (wire->in_len >= SHM_FRAME_BYTES) {
		int r = frame_length(wire->in, wire->in_len, &body);

		if (r < 0)
			return err_pass(r);
	}
	if (SHM_FRAME_BYTES + body > want)
		want = SHM_FRAME_BYTES + body;
	if (want == wire->in_size || (want < wire->in_size && wire->in_len > 0))
		return 0;
	if (net_peer_half(&peer->net, want > IN_BYTES ? want : 0) < 0)
		return err_pass(-ENOMEM);
	bigger = mem_regrow(wire->in, want, 1);
	if (!bigger)
		return err_pass(-ENOMEM);
	wire->in = bigger;
	wire->in_size = want;
	return 0;
}

uint8_t *shm_wire_take_frame(struct shm_peer *peer, size_t body_len)
{
	struct shm_wire *wire = &peer->wire;
	uint8_t *frame = wire->in, *next;

	/* shm_wire_reserve() made it for this frame alone */
	if (peer->self || wire->in_size <= IN_BYTES ||
	    wire->in_size != SHM_FRAME_BYTES + body_len || wire->in_len != wire->in_size)
		return NULL;
	next = mem_alloc(IN_BYTES);
	if (!next) {
		err_clear();
		return NULL;
	}
	wire->in = next;
	wire->in_size = IN_BYTES;
	wire->in_len = 0;
	net_peer_half(&peer->net, 0);
	return frame;
}

/* Bytes received through the gate, with their fds. */
static int in_put(struct shm_wire *wire, struct gate_parcel *parcel)
{
	unsigned int room = ARRAY_LEN(wire->in_fds) - wire->in_fd_count;

	if (parcel->fault.code == ERR_LIMIT && parcel->len && room) {
		/* this process is out of fds: only the frame fails, the connection
		 * continues */
		wire->in_fds[wire->in_fd_count++] = -1;
	} else if (parcel->fault.code != ERR_OK) {
		return err_raise(parcel->fault.code == ERR_IO ? ERR_PEER : ERR_PROTO,
				 "shm: %s", parcel->fault.text);
	}
	if (parcel->fd_count > room || parcel->len > wire->in_size - wire->in_len)
		return err_raise(ERR_PROTO, "shm: more fds than frames carry");
	for (unsigned int i = 0; i < parcel->fd_count; i++)
		wire->in_fds[wire->in_fd_count++] = mem_steal_fd(&parcel->fds[i]);
	memcpy(wire->in + wire->in_len, parcel->bytes, parcel->len);
	wire->in_len += parcel->len;
	return 0;
}

/* 1: bytes arrived; 0: none now. */
static int in_read(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire;
	const size_t most = wire->in_size > IN_BYTES ? CALL_BYTES : READ_BYTES;
	size_t want = wire->in_size - wire->in_len;
	bool with = false;
	ssize_t n;

	if (want > most)
		want = most;
	n = gate_peek(peer->fd, wire->in + wire->in_len, want, &with);
	if (n > 0 && with) {
		gate_receive(&peer->gate, GATE_STREAM, (size_t)n,
			     (unsigned int)ARRAY_LEN(wire->in_fds) - wire->in_fd_count);
		return 0;
	}
	if (n > 0) /* no more than was seen */
		n = recv(peer->fd, wire->in + wire->in_len, (size_t)n, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n < 0)
		return err_raise(ERR_PEER, "shm: the connection broke: %s",
				 strerror(errno));
	if (n == 0)
		return err_raise(ERR_PEER, "shm: the peer closed the connection");
	wire->in_len += (size_t)n;
	return 1;
}

/* One read per call: the loop calls again while there is more, and serves the other peers
 * in between. */
void shm_wire_receive(struct shm_peer *peer)
{
	int r;

	if (gate_receiving(&peer->gate) || loop_work_running(&peer->frames))
		return;
	r = shm_wire_reserve(peer);
	if (r == 0)
		r = in_read(peer);
	if (r < 0)
		net_peer_fail_last(&peer->net);
	else if (r > 0)
		loop_work_start(&peer->frames);
}

void shm_wire_on_parcel(struct gate_client *client, struct gate_parcel *parcel)
{
	struct shm_peer *peer = container_of(client, struct shm_peer, gate);

	if (!shm_peer_speaks(peer))
		return;
	if (in_put(&peer->wire, parcel) < 0)
		net_peer_fail_last(&peer->net);
	else
		loop_work_start(&peer->frames);
	net_peer_flush_soon(&peer->net); /* watches again */
}

void shm_wire_loop_back(struct shm_peer *peer)
{
	struct shm_wire *wire = &peer->wire, sent = *wire;

	if (sent.out_len == 0 || loop_work_running(&peer->frames))
		return;
	/* The buffers change places, so frames need no memory but for their own length.
	 * Those that handlers send meanwhile belong to the next round. */
	shm_wire_init(wire);
	wire->in = sent.out;
	wire->in_len = sent.out_len;
	wire->in_size = sent.out_size;
	wire->out = sent.in;
	wire->out_size = sent.in_size;
	for (unsigned int i = 0; i < sent.out_fd_count; i++)
		wire->in_fds[wire->in_fd_count++] = sent.out_fds[i].fd;
	loop_work_start(&peer->frames);
}
